"""The functions of torch's pytree that we rely on; torch has no public name for it."""

from __future__ import annotations

import torch

from kfac_fx.passes.graphs import pytree


def test_nested_values_are_flat_lists_of_leaves_and_back() -> None:
    tree = {"b": (torch.ones(2), None), "a": [1, {"c": "text"}]}
    leaves, spec = pytree.flatten(tree)
    assert leaves[0] is tree["b"][0] and leaves[1:] == [None, 1, "text"]
    assert pytree.unflatten(leaves, spec) == tree
    assert [id(leaf) for leaf in pytree.leaves(tree)] == [id(leaf) for leaf in leaves]
    assert str(spec) == str(pytree.flatten(tree)[1]) != str(pytree.flatten([*leaves])[1])
