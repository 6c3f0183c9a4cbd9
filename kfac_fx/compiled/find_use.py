"""Finds the use of a declared layer that a user names by its parameters and by the node that it computes.

The layer's own form is laid over the graph at that node, as the matcher does. A use that a user registers by hand and a
use that the matcher finds are therefore equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import fx

from kfac_fx.compiled.captured_model import CapturedModel
from kfac_fx.passes.cases import with_batch_dim, with_mask
from kfac_fx.passes.choose import declared_by_user
from kfac_fx.passes.errors import RegistrationError, table
from kfac_fx.passes.graphs.labels import Label, labels_of, symbolic_sizes
from kfac_fx.passes.ir import Program, Use
from kfac_fx.passes.losses import find_losses
from kfac_fx.passes.match import Pattern, held_shapes, lay_over, patterns_at, patterns_by_target
from kfac_fx.passes.pieces import Piece
from kfac_fx.passes.pipeline import MATCHED, run
from kfac_fx.passes.users_code import where
from kfac_fx.recording.moments import Key

Nodes = Any  # a node, its name, or a list of them, one per use


class Finder:
    """Finds uses at the nodes of one captured model."""

    def __init__(self, captured: CapturedModel) -> None:
        self.captured = captured
        self._cut: tuple[Any, Program] | None = None

    @cached_property
    def program(self) -> Program:
        """The captured program, with the cases that the model's outputs have."""
        return find_losses(self.captured.program)

    @cached_property
    def label(self) -> Mapping[fx.Node, Label]:
        return labels_of(self.program)

    @cached_property
    def patterns(self) -> dict[Any, list[Pattern]]:
        return patterns_by_target({name: layer for name, layer in self.program.layers.items() if not layer.parts})

    @cached_property
    def batch_sizes(self) -> list[str]:
        """The symbolic sizes that may count cases: those of the outputs, then the first ones of the inputs."""
        inputs = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        first = [size for node in inputs for size in symbolic_sizes(node)[:1] if size]
        return list(dict.fromkeys([self.program.cases, *first] if self.program.cases else first))

    def cut(self, scope: Program) -> Program:
        """All uses that the matcher finds, with parameters cut into the pieces that they are used in.

        scope: the graph. Only uses behind its outputs count; its options may ask for more pieces.
        """
        asked = scope.outputs, scope.options.pieces
        if self._cut is None or self._cut[0] != asked:
            self._cut = asked, run(scope, MATCHED)
        return self._cut[1]

    def check_cuts(self, pieces: Iterable[Piece], scope: Program, others: Program) -> None:
        """Raises RegistrationError if one of `pieces` is no piece of its parameter in the graph.

        scope: asks for all of them; others: asks for those that are registered or linked already.
        """
        cut = self.cut(scope)
        for piece in pieces:
            if piece.name not in cut.pieces:
                parts = self.cut(others).parts(piece.parameter)
                raise RegistrationError(
                    f"{piece.name} cannot be registered by itself: in the graph's uses {piece.parameter} comes as "
                    f"{', '.join(parts)}"
                )

    def in_pieces(self, bare: Program, scope: Program, owners: set[str]) -> Program:
        """`bare`, where the parameters in `owners` are cut into pieces."""
        cut = self.cut(scope)
        behind = {
            node: frozenset(name if cut.owner(name) in owners else cut.owner(name) for name in names)
            for node, names in cut.behind.items()
        }
        pieces = {name: piece for name, piece in cut.pieces.items() if piece.parameter in owners}
        return bare.but(pieces=pieces, behind=behind)

    def uses_at(self, output: fx.Node) -> list[Use]:
        """All uses of declared layers whose output is this node."""
        shapes = held_shapes(self.program)
        uses = (
            lay_over(pattern, output, self.label, shapes, self.program.parameters)
            for pattern in patterns_at(self.patterns, output)
        )
        return [with_mask(self.with_batch(use)) for use in uses if use is not None]

    def parts_at(self, output: fx.Node, scope: Program) -> list[Use]:
        """The same by parts, where parameters are used or asked for in pieces, or several are put together."""
        return [self.with_batch(use) for use in self.cut(scope).matches if use.output is output]

    def with_batch(self, use: Use) -> Use:
        sizes = symbolic_sizes(use.output)
        if not sizes or not self.batch_sizes:
            return use
        return with_batch_dim(use, next((size for size in self.batch_sizes if size in sizes), ""))

    def find(
        self, layers: Sequence[str], params: Key, inputs: Nodes, outputs: Nodes, scope: Program
    ) -> tuple[Use, ...]:
        """One use for every output; several where the parameters have several places in its matrix.

        Args:
            layers: names of declared layers; empty: any.
            inputs: the nodes that the uses read, in the order of `outputs`; None: as in the graph.
            scope: see `cut`.

        Raises RegistrationError, which lists the uses that are there, if a node is not computed by one of `layers` with
        at least these parameters from its input, and for lists of different lengths or without an output.
        """
        to = [self.captured.node(output) for output in listed(outputs)]
        reads = [None] * len(to) if inputs is None else [self.captured.node(node) for node in listed(inputs)]
        if not to or len(reads) != len(to):
            raise RegistrationError(f"{', '.join(params)}: {len(reads)} inputs and {len(to)} outputs; give one a use")
        pairs = zip(reads, to, strict=True)
        return tuple(use for read, output in pairs for use in self.find_at(layers, params, read, output, scope))

    def find_at(
        self, layers: Sequence[str], params: Key, read: fx.Node | None, output: fx.Node, scope: Program
    ) -> list[Use]:
        def rank(use: Use) -> tuple[int, int, bool]:
            return len(use.parameters), -len(use.nodes), not declared_by_user(self.program, use)

        def fitting(uses: Sequence[Use]) -> list[Use]:
            fits = [
                use
                for use in uses
                if (not layers or use.layer in layers)
                and set(params) <= use.parameter_set
                and (read is None or use.input is read)
            ]
            best = min(fits, key=rank, default=None)
            return [use for use in fits if best is not None and identity(use) == identity(best)]

        def identity(use: Use) -> Any:  # equal for the parts of one layer at one node
            return use.layer, use.form, use.nodes, use.parameter_set

        uses = fitting(self.uses_at(output))[:1] or fitting(self.parts_at(output, scope))
        if not uses:
            raise RegistrationError(self.why_not(layers, params, read, output, scope))
        bound = [{role: place for role, place in use.parameters.items() if place.parameter in params} for use in uses]
        return [replace(use, parameters=parameters) for use, parameters in zip(uses, bound, strict=True)]

    def why_not(self, layers: Sequence[str], params: Key, read: fx.Node | None, output: fx.Node, scope: Program) -> str:
        kind = " or ".join(layers) or "declared"
        source = f" from {read.name}" if read is not None else ""
        text = f"no {kind} layer with {', '.join(params)} computes {where(output)}{source}"
        matched = [use for use in self.cut(scope).matches if not scope.layers[use.layer].parts]
        uses = [*self.uses_at(output), *matched]
        near = [use for use in uses if use.output is output or use.parameter_set & set(params)]
        rows = dict.fromkeys((str(use), f"computes {where(use.output)} from {use.input.name}") for use in near)
        return "\n".join([text, "The graph has:", table(rows)]) if rows else text


def listed(nodes: Nodes) -> list[Any]:
    return list(nodes) if isinstance(nodes, (list, tuple)) else [nodes]
