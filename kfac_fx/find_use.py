"""From what a user says, "the layer with these parameters that computes this node", to the use of a declared layer.

The layer's own form is laid over the graph at that node, as the matcher does, so what a user registers by hand and what
the matcher finds are one kind of thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import fx

from kfac_fx.captured import CapturedModel
from kfac_fx.passes.claims import own
from kfac_fx.passes.errors import RegistrationError, table
from kfac_fx.passes.ir import Program, Use, where
from kfac_fx.passes.labels import Label, labels, symbolic_sizes
from kfac_fx.passes.losses import find_losses
from kfac_fx.passes.match import Pattern, held_shapes, lay_over, patterns_by_target, with_batch_dim
from kfac_fx.registry import Key

Nodes = Any  # a node, its name, or a list of them, one a use


class Finder:
    """Uses at the nodes of one captured model."""

    def __init__(self, captured: CapturedModel) -> None:
        self.captured = captured

    @cached_property
    def program(self) -> Program:
        """With the cases that the model's outputs have."""
        return find_losses(self.captured.program)

    @cached_property
    def label(self) -> dict[fx.Node, Label]:
        return labels(self.program.graph, self.program.parameters, cases=self.program.cases)

    @cached_property
    def patterns(self) -> dict[Any, list[Pattern]]:
        return patterns_by_target({name: one for name, one in self.program.layers.items() if not one.parts})

    @cached_property
    def batch_sizes(self) -> list[str]:
        """The symbolic sizes that may count cases: those of the outputs, then the first ones of the inputs."""
        inputs = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        first = [size for node in inputs for size in symbolic_sizes(node)[:1] if size]
        return list(dict.fromkeys([self.program.cases, *first] if self.program.cases else first))

    def at(self, output: fx.Node) -> list[Use]:
        """All uses of declared layers whose output is this node."""
        shapes = held_shapes(self.program)
        found = (
            lay_over(pattern, output, self.label, shapes, self.program.parameters)
            for pattern in self.patterns.get(output.target, ())
        )
        return [self.with_batch(use) for use in found if use is not None]

    def with_batch(self, use: Use) -> Use:
        sizes = symbolic_sizes(use.output)
        return with_batch_dim(use, next((size for size in self.batch_sizes if size in sizes), "")) if sizes else use

    def find(self, layers: Sequence[str], params: Key, inputs: Nodes, outputs: Nodes) -> tuple[Use, ...]:
        """One use for every output. inputs: None for those that the graph says; lists are in the order of the uses.

        Raises RegistrationError with what is there instead, if a node is not computed by one of `layers` (any, if
        empty) with at least these parameters from its input; ValueError for lists of different lengths or none.
        """
        to = [self.captured.node(one) for one in listed(outputs)]
        given = [None] * len(to) if inputs is None else [self.captured.node(one) for one in listed(inputs)]
        if not to or len(given) != len(to):
            raise RegistrationError(f"{', '.join(params)}: {len(given)} inputs and {len(to)} outputs; give one a use")
        return tuple(self.one(layers, params, one, output) for one, output in zip(given, to, strict=True))

    def one(self, layers: Sequence[str], params: Key, given: fx.Node | None, output: fx.Node) -> Use:
        there = self.at(output)
        fitting = [
            use
            for use in there
            if (not layers or use.layer in layers)
            and set(params) <= use.parameter_set
            and (given is None or use.input is given)
        ]
        if not fitting:
            raise RegistrationError(self.why_not(layers, params, given, output, there))
        use = min(fitting, key=lambda one: (len(one.parameters), -len(one.nodes), not own(self.program, one)))
        return replace(use, parameters={r: bound for r, bound in use.parameters.items() if bound.parameter in params})

    def why_not(
        self, layers: Sequence[str], params: Key, given: fx.Node | None, output: fx.Node, there: Sequence[Use]
    ) -> str:
        kind = " or ".join(layers) or "declared"
        reads = f" from {given.name}" if given is not None else ""
        lines = [f"no {kind} layer with {', '.join(params)} computes {where(output)}{reads}"]
        elsewhere = (use for node in self.program.graph.nodes if node is not output for use in self.at(node))
        known = [*there, *(use for use in elsewhere if use.parameter_set & set(params))]
        rows = [(str(use), f"computes {where(use.output)} from {use.input.name}") for use in known]
        return "\n".join([*lines, "The graph has:", table(rows)]) if rows else lines[0]


def listed(nodes: Nodes) -> list[Any]:
    return list(nodes) if isinstance(nodes, (list, tuple)) else [nodes]
