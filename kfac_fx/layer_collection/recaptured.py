"""What was registered on one capture of a model, on another capture of it."""

from __future__ import annotations

from torch import nn

from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.ir import Program
from kfac_fx.passes.losses import case_size
from kfac_fx.passes.pipeline import CAPTURED, run


def recaptured(own: Program, traced: Program, model: nn.Module) -> Program:
    """`own` on the graph of `traced`. Raises ModelChangedError if that is another graph."""
    fresh = run(traced, CAPTURED)
    pairs = list(zip(own.graph.nodes, fresh.graph.nodes, strict=False))
    alike = len(own.graph.nodes) == len(fresh.graph.nodes)
    if not alike or any((a.op, a.target) != (b.op, b.target) for a, b in pairs):
        raise ModelChangedError(
            f"these inputs take another path through {type(model).__name__} than those that the "
            "LayerCollection was built on.\nMake a LayerCollection for each path."
        )
    there = own.on(fresh.graph, dict(pairs))
    return there.but(
        root=fresh.root,
        parameters=fresh.parameters,
        aliases=fresh.aliases,
        cases=case_size(fresh.graph, there.outputs),
        history=fresh.history,
    )
