"""Whether a tensor is the mean of every filter of a weight, whichever way it is written.

v.mean((1, 2, 3), keepdim=True)                v.mean(1, keepdim=True).mean(2, keepdim=True)
torch.var_mean(v, (1, 2, 3), keepdim=True)[1]  v.flatten(1).mean(1).view(-1, 1, 1, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ..graphs.operations import VIEWS, op_name
from ..words.pieces import Made, view_of
from .values import is_one_slab

SPREADS = {"var_mean", "std_mean"}


def is_mean(node: fx.Node, parameter: str, known: Mapping[fx.Node, Any]) -> bool:
    """Over all dimensions but the first. known: the values of expressions."""
    left = dimensions_left(node, parameter, known)
    return left is not None and filters_only(left)


def dimensions_left(node: fx.Node, parameter: str, known: Mapping[fx.Node, Any]) -> list[bool] | None:
    """Of the parameter, or of it as filters [o, ...], which dimensions are no mean yet; None for anything else."""
    value = known.get(node)
    if isinstance(value, Made):
        whole = is_one_slab(value) and view_of(value.slabs[0]).is_contiguous()
        plain = whole and value.slabs[0].parameter == parameter and not value.slabs[0].slopes
        return [True] * len(value.shape) if plain and value.slabs[0].scale == 1.0 else None
    name, source = op_name(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "getitem" and node.args[1] == 1 and op_name(source) in SPREADS:
        return averaged(source, parameter, known)
    if name == "mean":
        return averaged(node, parameter, known)
    left = dimensions_left(source, parameter, known) if name in VIEWS else None
    return [True] if left is not None and filters_only(left) else None


def averaged(node: fx.Node, parameter: str, known: Mapping[fx.Node, Any]) -> list[bool] | None:
    """What is left after the mean that a node takes."""
    source: Any = node.args[0]
    left = dimensions_left(source, parameter, known)
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if left is None or given is None:
        return None
    over = {dim % len(left) for dim in ([given] if isinstance(given, int) else given)}
    kept = node.kwargs.get("keepdim", len(node.args) > 2 and node.args[-1] is True)
    return [one and n not in over for n, one in enumerate(left) if kept or n not in over]


def filters_only(left: list[bool]) -> bool:
    return left[:1] == [True] and not any(left[1:])
