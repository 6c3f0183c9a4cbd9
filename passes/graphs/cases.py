"""Where the cases are in a use's output, and how many there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from ..ir import CASES, Use
from . import pytree
from .labels import symbolic_sizes

NUMBER = "kfac_fx_submodule"  # in the meta of a node of several submodules' graphs side by side: which it belongs to


def with_batch_dim(use: Use, cases: str) -> Use:
    """Where the cases are in the use's output; None if no dimension has their size."""
    sizes = symbolic_sizes(use.output)
    if use.free:
        use = replace(use, attrs={**use.attrs, CASES: number_of_cases(use.output, cases)})
    return replace(use, batch_dim=sizes.index(cases) if cases in sizes else None) if sizes else use


def number_of_cases(output: fx.Node, cases: str | None) -> fx.Node:
    """A node of the size of the cases; where it is not known, the first size of the first input, of the same submodule.

    What is free of the batch only has the same Fisher with any number: `count` grows with it, and G falls.
    """
    graph, own = output.graph, output.meta.get(NUMBER)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.meta.get(NUMBER) == own]
    found = [(node, symbolic_sizes(node).index(cases)) for node in inputs if cases in symbolic_sizes(node) and cases]
    node, dim = found[0] if found else (inputs[0], 0)
    known = [user for user in node.users if user.target is size and user.args[1] == dim]
    with graph.inserting_after(inputs[-1]):
        return known[0] if known else graph.call_function(size, (node, dim))


def size(value: Any, dim: int) -> int:
    """Of an input: a tensor, or several in a container."""
    return next((int(one.shape[dim]) for one in pytree.leaves(value) if isinstance(one, Tensor) and one.dim()), 1)
