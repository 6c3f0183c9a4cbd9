"""Steps: which position of the sequences a use is at, where a model takes them one by one.

x_0 = x[:, 0];  h = f(linear(cat(x_0, h), w));  x_1 = x[:, 1];  h = f(linear(cat(x_1, h), w));  ...

The outputs of such uses have no dimension of positions. The uses of a weight are at one position after the other if
what they see says so: the newest position that the input of the n-th use depends on is n, or, as of a state from the
step before, n - 1; backward in time it is the oldest, counted from the last. What `unroll` wrote says it itself.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import Any

from torch import fx

from .graphs.operations import SHAPE_ONLY, op_name
from .graphs.sizes import shape_of, sizes_of
from .ir import STEP, Use

STRANGE, ALL = -1, sys.maxsize  # beside positions: one of other sequences or in another order; more than one
AS = {"expand_as", "view_as", "reshape_as", "type_as"}  # read the kind of their second operand, and no values
UNCLEAR = "which of the positions it is at is not clear"


class Timeline:
    """positions, cases: the mask's sizes; moved: nodes whose positions are in another order; owners: inputs with
    positions that the mask is computed from."""

    def __init__(
        self, mask: fx.Node, cases: str, positions: str, moved: Container[fx.Node], owners: frozenset[fx.Node]
    ) -> None:
        self.mask, self.cases, self.positions, self.moved, self.owners = mask, cases, positions, moved, owners
        self.number = int(positions) if positions.isdigit() else None  # None: any
        self.seen: dict[fx.Node, frozenset[int]] = {}  # the positions that a node depends on; none while it has all
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}  # the inputs with positions behind a node
        self.taken: set[frozenset[fx.Node]] = set()  # of what positions were taken from
        for node in mask.graph.nodes if positions != cases else ():
            self.follow(node)

    def carries(self, node: fx.Node) -> bool:
        sizes = sizes_of(node)
        return self.cases in sizes and sizes.count(self.positions) == 1

    def follow(self, node: fx.Node) -> None:
        if node.op == "placeholder" and self.carries(node):
            self.sources[node] = frozenset({node} - {self.mask})
            return
        if op_name(node) in SHAPE_ONLY:
            return
        operands = node.all_input_nodes[: 1 if op_name(node) in AS else None]
        self.sources[node] = frozenset().union(*(self.sources.get(one, frozenset()) for one in operands))
        if self.carries(node):
            return
        found: set[int] = set()
        for one in operands:
            found |= self.picked(node, one) if self.whole(one) else self.seen.get(one, frozenset())
        self.seen[node] = frozenset(found)

    def whole(self, node: fx.Node) -> bool:
        """Whether it has all positions, perhaps as a tuple of them."""
        return self.carries(node) or op_name(node) == "unbind" and self.carries(node.all_input_nodes[0])

    def picked(self, node: fx.Node, operand: fx.Node) -> set[int]:
        """The positions that an operation takes from something that has all."""
        tensor = operand if self.carries(operand) else operand.all_input_nodes[0]
        if op_name(node) == "unbind":
            return set()  # as a tuple
        place = self.taken_place(node, operand, sizes_of(tensor).index(self.positions))
        if place is None or (place < 0 and self.number is None):
            return {ALL}
        sources = self.sources.get(tensor, frozenset())
        self.taken |= {sources} if sources else set()
        strange = tensor in self.moved or (self.owners and not sources & self.owners)
        return {place % (self.number or ALL)} | ({STRANGE} if strange else set())

    def taken_place(self, node: fx.Node, operand: fx.Node, dim: int) -> int | None:
        """Of a single position along this dimension, if it is one."""
        name, dims = op_name(node), len(shape_of(operand))
        given: list[Any] = [*node.args[1:], *node.kwargs.values()]
        if name == "getitem" and op_name(operand) == "unbind":
            rank = len(shape_of(operand.all_input_nodes[0]))
            along: Any = [*operand.args[1:], *operand.kwargs.values(), 0][0]
            return int(given[0]) if along % rank == dim else None
        if name not in ("select", "slice", "narrow") or not all(isinstance(one, int) for one in given[:2]):
            return None
        along, start, *rest = given
        if along % dims != dim:
            return None
        ends = {"select": start + 1, "narrow": start + rest[0] if rest else None, "slice": rest[0] if rest else None}
        return start if ends[name] == start + 1 else None

    def steps(self, uses: Sequence[Use]) -> tuple[list[int] | None, str]:
        """(the positions of the uses of one weight in one tower, in the order of the graph; or None, and why)."""
        seen = [self.seen.get(use.input, frozenset()) for use in uses]
        said = [use.output.meta.get(STEP) for use in uses]
        if any(STRANGE in one for one in seen):
            return None, "its steps are of other sequences than the mask's, or in another order"
        places = [one[0] for one in said if one is not None and one[1] == self.number]
        if len(places) < len(uses):
            places = self.in_order(seen)
        if not places:
            return None, UNCLEAR
        if not self.owners and len(self.taken) > 1:
            inputs = " or ".join(sorted("of " + " and ".join(sorted(n.name for n in one)) for one in self.taken))
            return None, (
                f"its steps may be those {inputs}, and so may the mask; write it as a function of one of them, as in "
                "padding_mask=lambda x, y: x != 0"
            )
        return places, ""

    def in_order(self, seen: Sequence[frozenset[int]]) -> list[int]:
        """The positions of uses that see these, one a use; none if they are not clear."""
        own = list(range(len(seen)))
        newest = [max(one, default=-1) for one in seen]
        if len(seen) > 1 and newest in (own, [-1, *own[:-1]]):
            return own
        if len(seen) != self.number or len(seen) < 2 or ALL in newest:
            return []
        oldest = [self.number - 1 - min(one, default=self.number) for one in seen]
        return own[::-1] if oldest in (own, [-1, *own[:-1]]) else []
