"""Nested inputs and outputs as flat lists of leaves.

The only private API of torch in this package: `torch.export` speaks this pytree, and torch has no public name for it.
`tests/compiler/test_trace.py` holds the three functions we rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

TreeSpec = _pytree.TreeSpec


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    return _pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def leaves(tree: Any) -> list[Any]:
    return _pytree.tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of every leaf."""
    found, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in found], spec)
