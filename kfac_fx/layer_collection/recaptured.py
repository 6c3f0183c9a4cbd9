"""What was registered on one capture of a model, on another capture of it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.ir import Program
from kfac_fx.passes.losses import case_size
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.parametrization import moved
from kfac_fx.passes.parametrizations.jacobian import KEY as JACOBIAN
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.unroll import unroll


def recaptured(own: Program, traced: Program, model: nn.Module) -> Program:
    """`own` on the graph of `traced`. Raises ModelChangedError if that is another graph."""
    fresh = run(traced, (unroll, normalize))
    captured = [node for node in own.graph.nodes if JACOBIAN not in node.meta]
    pairs = list(zip(captured, fresh.graph.nodes, strict=False))
    alike = len(captured) == len(fresh.graph.nodes)
    if not alike or any((a.op, a.target) != (b.op, b.target) for a, b in pairs):
        raise ModelChangedError(
            f"these inputs take another path through {type(model).__name__} than those that the "
            "LayerCollection was built on.\nMake a LayerCollection for each path."
        )
    nodes = dict(pairs)
    for node in [node for node in own.graph.nodes if JACOBIAN in node.meta]:
        with fresh.graph.inserting_after(nodes[node.prev]):
            nodes[node] = fresh.graph.node_copy(node, nodes.__getitem__)
    registrations = tuple(replace(one, uses=moved(one.uses, nodes)) for one in own.registrations)
    outputs = tuple(nodes[node] for node in own.outputs)
    return fresh.but(
        outputs=outputs,
        cases=case_size(fresh.graph, outputs),
        mask=own.mask and nodes[own.mask],
        mask_dims=own.mask_dims,
        registrations=registrations,
        unused=own.unused,
        unmasked=own.unmasked,
        pieces=own.pieces,
        behind={nodes[node]: names for node, names in own.behind.items()},
    )
