"""Nested inputs and outputs as flat lists of leaves, in the order and with the specification of torch.export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import torch_private

TreeSpec = torch_private.pytree.TreeSpec


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    return torch_private.pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    return torch_private.pytree.tree_unflatten(leaves, spec)


def leaves(tree: Any) -> list[Any]:
    return torch_private.pytree.tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` applied to every leaf."""
    values, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in values], spec)
