"""Whether passes leave the graphs alone that they are given: other Programs share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from kfac_fx.passes.ir import Pass, Program

Line = tuple[str, str, Any, str, dict[str, int]]


def lines(graph: fx.Graph) -> list[Line]:
    """Every node of a graph with its arguments, and the objects in its meta."""
    return [
        (node.name, node.op, node.target, f"{node.args} {node.kwargs}", {key: id(node.meta[key]) for key in node.meta})
        for node in graph.nodes
    ]


def run_untouched(program: Program, passes: Sequence[Pass]) -> Program:
    """Raises AssertionError with the first pass that writes into the graph of its Program."""
    for step in passes:
        before = lines(program.graph)
        changed = step(program)
        after = lines(program.graph)
        wrong = [f"{old} became {new}" for old, new in zip(before, after, strict=False) if old != new]
        assert before == after, f"{step.__name__}: {len(before)} nodes became {len(after)}; {wrong[:1]}"
        program = changed
    return program
