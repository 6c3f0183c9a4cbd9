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

from kfac_fx.collection.captured import CapturedModel
from kfac_fx.collection.registry import Key
from kfac_fx.passes.cut import cut
from kfac_fx.passes.errors import RegistrationError, table
from kfac_fx.passes.expressions import express
from kfac_fx.passes.graphs.labels import Label, labels, symbolic_sizes
from kfac_fx.passes.graphs.sizes import with_batch_dim, with_mask
from kfac_fx.passes.ir import Program, Use, where
from kfac_fx.passes.losses import find_losses
from kfac_fx.passes.match import Pattern, held_shapes, lay_over, match, patterns_by_target
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.resolve import own

Nodes = Any  # a node, its name, or a list of them, one a use


class Finder:
    """Uses at the nodes of one captured model."""

    def __init__(self, captured: CapturedModel) -> None:
        self.captured = captured
        self._cut: tuple[Any, Program] | None = None

    def cut(self, scope: Program) -> Program:
        """All that the matcher finds, with parameters in the pieces that they are used in and in those that the options
        ask for. scope: the graph, with the outputs behind which uses count."""
        asked = scope.outputs, scope.options.pieces
        if self._cut is None or self._cut[0] != asked:
            self._cut = asked, run(scope, (express, match, cut))
        return self._cut[1]

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
        return [with_mask(self.with_batch(use)) for use in found if use is not None]

    def parts_at(self, output: fx.Node, scope: Program) -> list[Use]:
        """The same by parts, where parameters are used or asked for in pieces, or several are put together."""
        return [self.with_batch(use) for use in self.cut(scope).matches if use.output is output]

    def with_batch(self, use: Use) -> Use:
        sizes = symbolic_sizes(use.output)
        return (
            with_batch_dim(use, next((size for size in self.batch_sizes if size in sizes), ""))
            if sizes and self.batch_sizes
            else use
        )

    def find(
        self, layers: Sequence[str], params: Key, inputs: Nodes, outputs: Nodes, scope: Program
    ) -> tuple[Use, ...]:
        """One use for every output; several where the parameters have several places in its matrix.

        inputs: None for those that the graph says; lists are in the order of the uses. scope: see `cut`.

        Raises RegistrationError with what is there instead, if a node is not computed by one of `layers` (any, if
        empty) with at least these parameters from its input; ValueError for lists of different lengths or none.
        """
        to = [self.captured.node(one) for one in listed(outputs)]
        given = [None] * len(to) if inputs is None else [self.captured.node(one) for one in listed(inputs)]
        if not to or len(given) != len(to):
            raise RegistrationError(f"{', '.join(params)}: {len(given)} inputs and {len(to)} outputs; give one a use")
        return tuple(
            use for one, output in zip(given, to, strict=True) for use in self.one(layers, params, one, output, scope)
        )

    def one(
        self, layers: Sequence[str], params: Key, given: fx.Node | None, output: fx.Node, scope: Program
    ) -> list[Use]:
        def rank(use: Use) -> tuple[int, int, bool]:
            return len(use.parameters), -len(use.nodes), not own(self.program, use)

        def fitting(uses: Sequence[Use]) -> list[Use]:
            fits = [
                use
                for use in uses
                if (not layers or use.layer in layers)
                and set(params) <= use.parameter_set
                and (given is None or use.input is given)
            ]
            best = min(fits, key=rank, default=None)
            return [use for use in fits if best is not None and of_one_kind(use, best)]

        found = fitting(self.at(output))[:1] or fitting(self.parts_at(output, scope))
        if not found:
            raise RegistrationError(self.why_not(layers, params, given, output, scope))
        bound = [{r: one for r, one in use.parameters.items() if one.parameter in params} for use in found]
        return [replace(use, parameters=some) for use, some in zip(found, bound, strict=True)]

    def why_not(
        self, layers: Sequence[str], params: Key, given: fx.Node | None, output: fx.Node, scope: Program
    ) -> str:
        kind = " or ".join(layers) or "declared"
        reads = f" from {given.name}" if given is not None else ""
        lines = [f"no {kind} layer with {', '.join(params)} computes {where(output)}{reads}"]
        matched = [use for use in self.cut(scope).matches if not scope.layers[use.layer].parts]
        found = [*self.at(output), *matched]
        known = [use for use in found if use.output is output or use.parameter_set & set(params)]
        rows = dict.fromkeys((str(use), f"computes {where(use.output)} from {use.input.name}") for use in known)
        return "\n".join([*lines, "The graph has:", table(rows)]) if rows else lines[0]


def of_one_kind(use: Use, other: Use) -> bool:
    """Whether they are one layer at one node, perhaps of other parts of it."""
    return (use.layer, use.form, use.nodes, use.parameter_set) == (
        other.layer,
        other.form,
        other.nodes,
        other.parameter_set,
    )


def listed(nodes: Nodes) -> list[Any]:
    return list(nodes) if isinstance(nodes, (list, tuple)) else [nodes]
