"""The examples of a batch in arguments of any structure: how many there are, and the first of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kfac_fx.passes.graphs import pytree


def length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, (list, tuple)) and any(isinstance(leaf, Tensor) for leaf in pytree.leaves(value)):
        return len(value)
    leaves = (leaf for leaf in pytree.leaves(value) if isinstance(leaf, Tensor) and leaf.dim())
    return next((leaf.shape[0] for leaf in leaves), None)


def examples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of the first argument that has any: the length of a list or tuple, the first dimension of a tensor."""
    found = (length(value) for value in (*args, *kwargs.values()))
    return next((n for n in found if n is not None), 1)


def cut(value: Any, total: int, kept: int) -> Any:
    """The first `kept` of `total` examples: of a list as long, of tensors in anything else."""
    if isinstance(value, (list, tuple)) and len(value) == total and type(value) in (list, tuple):
        return value[:kept]
    leaves, spec = pytree.flatten(value)
    whole = (isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total for leaf in leaves)
    return pytree.unflatten([leaf[:kept] if has else leaf for leaf, has in zip(leaves, whole, strict=True)], spec)
