"""The positions of uses in models that take their sequences step by step.

    x_0 = x[:, 0];  h = f(linear(cat(x_0, h), w));  x_1 = x[:, 1];  h = f(linear(cat(x_1, h), w));  ...

The outputs of such uses have no dimension of positions. The n-th use of a weight is at position n if that is the newest
position on which its input depends, or n - 1 for a state of the step before. Backward in time it is the oldest
position, counted from the last. Uses that `unroll` wrote know their step.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import Any

from torch import fx

from .graphs.operations import SHAPE_ONLY, op_name
from .graphs.sizes import shape_of, sizes_of
from .ir import STEP, Use

STRANGE = -1  # in the place of a position: one of other sequences, or in another order
ALL = sys.maxsize  # in the place of a position: more than one
AS = {"expand_as", "view_as", "reshape_as", "type_as"}  # they read the shape or type of their second operand only
UNCLEAR = "which of the positions it is at is not clear"


class Timeline:
    """The positions that every node of a graph depends on.

    Args:
        mask: the node of the padding mask.
        cases, positions: the mask's sizes.
        moved: nodes whose positions are in another order.
        owners: inputs with positions from which the mask is computed.
    """

    def __init__(
        self, mask: fx.Node, cases: str, positions: str, moved: Container[fx.Node], owners: frozenset[fx.Node]
    ) -> None:
        self.mask, self.cases, self.positions, self.moved, self.owners = mask, cases, positions, moved, owners
        self.number = int(positions) if positions.isdigit() else None  # None: symbolic
        self.seen: dict[fx.Node, frozenset[int]] = {}  # the positions that a node depends on, if it has none itself
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}  # the inputs with positions behind a node
        self.taken: set[frozenset[fx.Node]] = set()  # the sources of tensors from which positions are taken
        for node in mask.graph.nodes if positions != cases else ():
            self.follow(node)

    def carries(self, node: fx.Node) -> bool:
        """Whether the node has a dimension of cases and one of positions."""
        sizes = sizes_of(node)
        return self.cases in sizes and sizes.count(self.positions) == 1

    def follow(self, node: fx.Node) -> None:
        if node.op == "placeholder" and self.carries(node):
            self.sources[node] = frozenset({node} - {self.mask})
            return
        if op_name(node) in SHAPE_ONLY:
            return
        operands = node.all_input_nodes[: 1 if op_name(node) in AS else None]
        self.sources[node] = frozenset().union(*(self.sources.get(operand, frozenset()) for operand in operands))
        if self.carries(node):
            return
        seen: set[int] = set()
        for operand in operands:
            seen |= self.picked(node, operand) if self.whole(operand) else self.seen.get(operand, frozenset())
        self.seen[node] = frozenset(seen)

    def whole(self, node: fx.Node) -> bool:
        """Whether the node has all positions, in a tensor or in a tuple of tensors."""
        return self.carries(node) or op_name(node) == "unbind" and self.carries(node.all_input_nodes[0])

    def picked(self, node: fx.Node, operand: fx.Node) -> set[int]:
        """The positions that an operation takes from an operand that has all."""
        tensor = operand if self.carries(operand) else operand.all_input_nodes[0]
        if op_name(node) == "unbind":
            return set()  # the tuple has all positions
        place = self.taken_place(node, operand, sizes_of(tensor).index(self.positions))
        if place is None or (place < 0 and self.number is None):
            return {ALL}
        sources = self.sources.get(tensor, frozenset())
        self.taken |= {sources} if sources else set()
        strange = tensor in self.moved or (self.owners and not sources & self.owners)
        return {place % (self.number or ALL)} | ({STRANGE} if strange else set())

    def taken_place(self, node: fx.Node, operand: fx.Node, dim: int) -> int | None:
        """The index of the single position that an operation takes along a dimension, or None."""
        name, dims = op_name(node), len(shape_of(operand))
        arguments: list[Any] = [*node.args[1:], *node.kwargs.values()]
        if name == "getitem" and op_name(operand) == "unbind":
            rank = len(shape_of(operand.all_input_nodes[0]))
            along: Any = [*operand.args[1:], *operand.kwargs.values(), 0][0]
            return int(arguments[0]) if along % rank == dim else None
        if name not in ("select", "slice", "narrow") or not all(
            isinstance(argument, int) for argument in arguments[:2]
        ):
            return None
        along, start, *rest = arguments
        if along % dims != dim:
            return None
        ends = {"select": start + 1, "narrow": start + rest[0] if rest else None, "slice": rest[0] if rest else None}
        return start if ends[name] == start + 1 else None

    def steps(self, uses: Sequence[Use]) -> tuple[list[int] | None, str]:
        """The positions of the uses of one weight in one tower, in the order of the graph; or None, and the reason."""
        seen = [self.seen.get(use.input, frozenset()) for use in uses]
        steps = [use.output.meta.get(STEP) for use in uses]  # (position, number of positions), written by `unroll`
        if any(STRANGE in positions for positions in seen):
            return None, "its steps are of other sequences than the mask's, or in another order"
        places = [step[0] for step in steps if step is not None and step[1] == self.number]
        if len(places) < len(uses):
            places = self.in_order(seen)
        if not places:
            return None, UNCLEAR
        if not self.owners and len(self.taken) > 1:
            inputs = " or ".join(sorted("of " + " and ".join(sorted(n.name for n in nodes)) for nodes in self.taken))
            return None, (
                f"its steps may be those {inputs}, and so may the mask; write it as a function of one of them, as in "
                "padding_mask=lambda x, y: x != 0"
            )
        return places, ""

    def in_order(self, seen: Sequence[frozenset[int]]) -> list[int]:
        """A position for each use, from the positions that each sees; empty if the order is not clear."""
        order = list(range(len(seen)))
        newest = [max(positions, default=-1) for positions in seen]
        if len(seen) > 1 and newest in (order, [-1, *order[:-1]]):
            return order
        if len(seen) != self.number or len(seen) < 2 or ALL in newest:
            return []
        oldest = [self.number - 1 - min(positions, default=self.number) for positions in seen]
        return order[::-1] if oldest in (order, [-1, *order[:-1]]) else []
