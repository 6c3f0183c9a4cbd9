"""Padding: which rows of every use are real.

The mask is a node [N, S], nonzero where a position of a case is real. It goes with a use where it is known to which
rows a position belongs: the use's output has a dimension of the cases and one of the positions, told by their symbolic
sizes, or one dimension of both, made by a view of them; and the layer's own gradient rows of the mask, spread over such
an output, are constant in every row. Where a model takes a sequence step by step, every use gets the mask's position
that it is at (`Timeline`). All rows of other uses count, and `unmasked` says which and why.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from .cases import CaseOrder
from .errors import LayerError, ModelChangedError, fatal, where
from .graphs.labels import everything_behind, in_example, known_number, operands_read, shape_of, sizes_of
from .graphs.operations import JOINS, SHAPE_ONLY, op_name
from .ir import ROW_MASK, STEP, Dims, Note, Program, Registration, Use, literal_attrs
from .layers import Layer
from .parametrization import Computed, Value

STRANGE = -1  # instead of a position: one of other sequences, or in another order
ALL = sys.maxsize  # instead of a position: more than one
OTHER_SEQUENCES = "its steps are of other sequences than the mask's, or in another order"
UNCLEAR = "which of the positions it is at is not clear"


class Timeline:
    """The positions that every node of a graph depends on, for models that take their sequences step by step.

        x_0 = x[:, 0];  h = f(linear(cat(x_0, h), w));  x_1 = x[:, 1];  h = f(linear(cat(x_1, h), w));  ...

    The outputs of such uses have no dimension of positions. The n-th use of a weight is at position n if that is the
    newest position on which its input depends, or n - 1 for a state of the step before. Backward in time it is the
    oldest position, counted from the last. Uses that `unroll` wrote know their step.

    Args:
        mask: the node of the padding mask.
        cases, positions: the mask's sizes.
        moved: nodes whose positions are in another order.
        owners: inputs with positions from which the mask is computed.
        sizes: of a node, by names.
    """

    def __init__(
        self,
        mask: fx.Node,
        cases: str,
        positions: str,
        moved: Container[fx.Node],
        owners: frozenset[fx.Node],
        sizes: Callable[[fx.Node], list[str]] = sizes_of,
    ) -> None:
        self.sizes = sizes
        self.mask, self.cases, self.positions, self.moved, self.owners = mask, cases, positions, moved, owners
        self.number = int(positions) if positions.isdigit() else None  # None: symbolic
        self.seen: dict[fx.Node, frozenset[int]] = {}  # the positions that a node depends on, if it has none itself
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}  # the inputs with positions behind a node
        self.taken: set[frozenset[fx.Node]] = set()  # the sources of tensors from which positions are taken
        for node in mask.graph.nodes if positions != cases else ():
            self.follow(node)

    def carries(self, node: fx.Node) -> bool:
        """Whether the node has a dimension of cases and one of positions."""
        sizes = self.sizes(node)
        return self.cases in sizes and sizes.count(self.positions) == 1

    def follow(self, node: fx.Node) -> None:
        if node.op == "placeholder" and self.carries(node):
            self.sources[node] = frozenset({node} - {self.mask})
            return
        if op_name(node) in SHAPE_ONLY:
            return
        operands = operands_read(node)
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
        place = self.taken_place(node, operand, self.sizes(tensor).index(self.positions))
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
        number = rest[0] if rest and isinstance(rest[0], int) else None  # a size of the batch is a node
        ends = {"select": start + 1, "narrow": None if number is None else start + number, "slice": number}
        return start if ends[name] == start + 1 else None

    def steps(self, uses: Sequence[Use]) -> tuple[list[int] | None, str]:
        """The positions of the uses of one weight in one tower, in the order of the graph; or None, and the reason."""
        seen = [self.seen.get(use.input, frozenset()) for use in uses]
        steps = [use.output.meta.get(STEP) for use in uses]  # (position, number of positions), written by `unroll`
        if any(STRANGE in positions for positions in seen):
            return None, OTHER_SEQUENCES
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


# --- the pass ---------------------------------------------------------------------------------------------------------


REORDERS = {"flip", "fliplr", "flipud", "roll", "sort", "msort"}  # put other positions where positions were
PICKS = {"index", "index_select", "gather", "take_along_dim"}
MERGES = {"view", "reshape", "flatten", "unsafe_view", "contiguous"}
Fitting = tuple[Value, Dims]  # a mask, and where its dimensions are in an output
NO_ROWS = "its output ["
LENGTH = 3  # of a dimension whose size only the batch knows, for trying a layer's rows


def padding(program: Program, of_losses: bool = False) -> Program:
    """Give every use that the mask fits the mask, and say of the others why not.

    of_losses: whether the mask is that of the rows of the losses, and not of the inputs.
    """
    if program.mask is None:
        return program
    places = Places(program, program.mask, of_losses)
    notes: list[Note] = []
    padded: list[Note] = []
    registrations: list[Registration] = []
    for registration in program.registrations:
        uses = list(registration.uses)
        for tower in range(registration.towers):
            numbers = [n for n, use in enumerate(uses) if use.tower == tower and ROW_MASK not in use.attrs]
            fittings = places.of_tower(registration, [uses[n] for n in numbers])
            for n, (fitting, reason) in zip(numbers, fittings, strict=True):
                if fitting is None:
                    notes.append(Note(f"{registration} at {where(uses[n].output)}", reason))
                    padded += [notes[-1]] * places.has_padding(uses[n], reason)
                else:
                    mask, dims = fitting
                    uses[n] = replace(uses[n], attrs={**uses[n].attrs, ROW_MASK: mask}, mask_dims=dims)
        registrations.append(replace(registration, uses=tuple(uses)))
    outputs = tuple(places.of_output(node) for node in program.outputs)
    return program.but(
        registrations=tuple(registrations), mask_dims=outputs, unmasked=tuple(notes), padded=tuple(padded)
    )


class Places:
    """Where the cases and the positions of a mask are in the nodes of its graph.

    of_losses: see `padding`. Moves of positions in front of a use do not matter then, and those behind it do.
    """

    def __init__(self, program: Program, mask: fx.Node, of_losses: bool = False) -> None:
        self.order = CaseOrder(program.graph)
        self.mask, self.layers = mask, program.layers
        self.shape = tuple(self.order.size(size) for size in tied(program, mask))
        self.cases, self.positions = (str(size) for size in self.shape)
        self.both = str(self.shape[0] * self.shape[1])
        self.moved: dict[fx.Node, fx.Node] = {}  # a node -> what moved positions or cases on the way to it
        self.movers: list[fx.Node] = []  # what moves positions
        self.merged: dict[fx.Node, bool] = {}  # in their first dimension, case by case (False) or position by position
        self.joined: set[fx.Node] = set()  # steps of other sequences than the mask's, and what is computed from these
        for node in program.graph.nodes:
            self.follow(node)
        for node in () if self.order.sort_of(mask) else program.graph.nodes:
            if (sort := self.order.sort_of(node)) is not None and self.positions in self.order.sizes(node):
                self.moved.setdefault(node, sort)
        behind = everything_behind([mask]) - {mask}
        owners = [node for node in program.inputs if node in behind and self.positions in self.order.sizes(node)]
        self.time = Timeline(mask, self.cases, self.positions, self.moved, frozenset(owners), self.order.sizes)
        self.moved_outputs = self.moved
        if of_losses:
            of_sorted = {node: mover for node, mover in self.moved.items() if self.order.sort_of(node) is not None}
            later = {node: mover for mover in self.movers for node in everything_behind([mover]) - {mover}}
            self.moved_outputs = later | of_sorted
        for node in program.graph.nodes:
            if self.joins_others(node) or any(n in self.joined for n in node.all_input_nodes if self.time.carries(n)):
                self.joined.add(node)

    def follow(self, node: fx.Node) -> None:
        sizes, operands = self.order.sizes(node), node.all_input_nodes
        before = [
            self.moved[operand]
            for operand in operands
            if operand in self.moved and self.positions in self.order.sizes(operand)
        ]
        if (
            operands
            and self.positions in sizes
            and node not in self.order.picked
            and (
                op_name(node) in REORDERS or (op_name(node) in PICKS and self.order.sizes(operands[0])[:2] == sizes[:2])
            )
        ):
            self.movers.append(node)
            self.moved[node] = node
        if before:
            self.moved[node] = before[0]
        if sizes[:1] != [self.both]:
            return
        if op_name(node) in MERGES and (shape := self.order.sizes(operands[0])[:2]) in (
            [self.cases, self.positions],
            [self.positions, self.cases],
        ):
            self.merged[node] = shape[0] == self.positions
            return
        along = [operand for operand in operands if self.order.sizes(operand)[:1] == [self.both]]
        orders = {self.merged.get(operand) for operand in along}
        if len(orders) == 1 and None not in orders and op_name(node) not in REORDERS | PICKS:
            self.merged[node] = self.merged[along[0]]

    def of_tower(self, registration: Registration, uses: Sequence[Use]) -> list[tuple[Fitting | None, str]]:
        """The masks of the uses in one tower: one per use, or None, and the reason."""
        fittings = [self.of_use(registration, use, self.layers[use.layer]) for use in uses]
        if not uses or any(self.candidates(use.output) for use in uses):
            others = [STRANGE in self.time.seen.get(use.input, frozenset()) for use in uses]
            pairs = zip(fittings, others, strict=True)
            return [(None, OTHER_SEQUENCES) if other and old[0] is None else old for old, other in pairs]
        places, reason = self.time.steps(uses)
        if places is None:
            if reason == OTHER_SEQUENCES and len(uses) == 1:
                return fittings  # one row for each case, as of the last state of packed sequences: there are no steps
            unclear = reason != UNCLEAR or self.time.number == len(uses) > 1
            return [(None, reason) if unclear else old for old in fittings]
        return [self.of_step(use, place) for use, place in zip(uses, places, strict=True)]

    def of_step(self, use: Use, place: int) -> tuple[Fitting | None, str]:
        """With one position of the mask, [N, 1]."""
        cases = use.batch_dim or 0
        other = next((dim for dim in range(len(self.order.sizes(use.output))) if dim != cases), None)
        if other is None or not fits_mask((cases, other), use, self.layers[use.layer], (self.shape[0], 1)):
            return None, f"{NO_ROWS}{in_words(use.output)}] has no rows of {in_example(self.shape[0])} cases"
        return (Computed(torch.narrow, (self.mask, 1, place, 1)), (cases, other)), ""

    def of_use(self, registration: Registration, use: Use, layer: Layer) -> tuple[Fitting | None, str]:
        """(the mask and its dimensions in the output, why not)."""
        if registration.structure.needs_pixels and sizes_of(use.input)[2:] != sizes_of(use.output)[2:]:
            return None, "its pixels are not its output positions"
        if reason := next((step.unmasked for step in use.through if step.unmasked), None):
            return None, reason
        if use.is_complex:
            return None, "its output is complex, so each position has two rows"
        if use.output in self.joined:
            return None, OTHER_SEQUENCES
        if use.output in self.moved_outputs:
            return None, f"positions are moved by {where(self.moved_outputs[use.output])}"
        fitting = [dims for dims in self.candidates(use.output) if fits_mask(dims, use, layer, self.shape)]
        if len(fitting) == 1:
            turned = len(set(fitting[0])) == 1 and self.merged[use.output]
            return (Computed(torch.t, (self.mask,)) if turned else self.mask, fitting[0]), ""
        shown = in_words(use.output)
        if fitting:
            return None, f"which dimension of its output [{shown}] counts positions is not clear"
        cases, positions = map(in_example, self.shape)
        return None, f"{NO_ROWS}{shown}] has no rows of {cases} cases and {positions} positions"

    def joins_others(self, node: fx.Node) -> bool:
        """Whether it puts steps of other sequences than the mask's together, which are as long in this capture."""
        seen = (self.time.seen.get(operand, frozenset()) for operand in node.all_input_nodes)
        joins = op_name(node) in JOINS and self.time.carries(node) and self.order.sort_of(node) is None
        return joins and any(STRANGE in positions for positions in seen)

    def of_output(self, node: fx.Node) -> Dims | None:
        """The dimensions of an output of the Fisher; the first ones, if several have these sizes. None for rows that
        are merged position by position, which `spread` does not know."""
        if node in self.moved or node in self.joined or self.merged.get(node):
            return None
        return next(iter(self.candidates(node)), None)

    def has_padding(self, use: Use, reason: str) -> bool:
        """Whether there may be padding in the rows of a use that the mask does not fit: not in one row for each case,
        as behind a mean over positions, and as of learned positions, which every element of a case has its own of."""
        of_case = math.prod(in_example(size) for size in shape_of(use.output)) // in_example(self.shape[0])
        if use.parameters.keys() == {"bias"} and math.prod(use.parameters["bias"].canonical.result) >= of_case:
            return False
        others = [size for size in self.order.sizes(use.output) if size != self.cases and not size.isdigit()]
        return bool(others) or not reason.startswith(NO_ROWS)

    def candidates(self, node: fx.Node) -> list[Dims]:
        sizes = self.order.sizes(node)
        pairs = product(
            *([i for i, size in enumerate(sizes) if size == wanted] for wanted in (self.cases, self.positions))
        )
        apart: list[Dims] = [(i, j) for i, j in pairs if i != j]
        return apart or ([(0, 0)] if node in self.merged else [])


def in_words(node: fx.Node) -> str:
    """The sizes of a node in the example."""
    return ", ".join(str(in_example(size)) for size in shape_of(node))


def tied(program: Program, mask: fx.Node) -> tuple[Any, Any]:
    """The sizes of a mask. Those that no use and no other input has, since forward only expands the mask or does not
    read it, are those of the other inputs that are as large in the example, if that is clear. As many cases as the
    graph has in the example are these, also where the mask is a function of their input and of lengths."""
    cases, positions = mask.meta["val"].shape
    behind = everything_behind([mask])
    others = [node for node in program.inputs if node not in behind]
    inputs = [size for node in others for size in shape_of(node)]
    known = {str(size): size for node in program.inputs for size in shape_of(node)}
    outputs = [use.output for registration in program.registrations for use in registration.uses]
    of_uses = {str(size) for node in outputs for size in shape_of(node)}
    elsewhere = of_uses | {str(size) for node in others for size in shape_of(node)}

    def same(of_mask: Any, first: str | None) -> Any:
        is_number = first is not None and str(of_mask).isdigit() and not first.isdigit()  # as features may be, too
        if str(of_mask) in elsewhere and not is_number:
            return of_mask
        if first in known and in_example(known[first]) == in_example(of_mask):
            return known[first]
        alike = {str(size): size for size in inputs if in_example(size) == in_example(of_mask)}
        if first is None:  # positions: not the cases, and those of uses where targets are as long
            alike = {name: size for name, size in alike.items() if name != program.cases}
            alike = {name: size for name, size in alike.items() if name in of_uses} or alike
        return next(iter(alike.values())) if len(alike) == 1 else of_mask

    return same(cases, program.cases), same(positions, None)


def fits_mask(dims: Dims, use: Use, layer: Layer, mask: Sequence[Any]) -> bool:
    """Whether a row of the layer belongs to one position, tried on a mask of different numbers."""
    sizes, shape = ([known_number(size) or LENGTH for size in all_] for all_ in (mask, use.output.meta["val"].shape))
    if len(set(dims)) == 1:
        shape[dims[0]] = sizes[0] * sizes[1]
    numbers = torch.arange(1.0, sizes[0] * sizes[1] + 1).view(sizes)
    try:
        rows = spread_rows(replace(use, mask_dims=dims), layer)(torch.empty(shape, device="meta"), numbers).flatten(2)
    except (RuntimeError, KeyError, ValueError, IndexError, LayerError) as error:
        if fatal(error):
            raise
        return False
    return bool((rows == rows[..., :1]).all())


def spread_rows(use: Use, layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient rows that the mask, spread over the output, has. It closes over functions and literals only."""
    form = layer.forms[use.form]
    grad_rows, dims = form.grad_rows, use.mask_dims
    literals = literal_attrs(use)
    batch_dim = (use.batch_dim or 0) if form.leading else 0
    merged = any(step.merges_groups for step in use.through)

    def rows(output: Tensor, mask: Tensor) -> Tensor:
        over = spread(mask, dims, output.shape)
        masked = grad_rows(over.movedim(batch_dim, 0) if batch_dim else over, literals)
        return masked.flatten(1, 2) if merged and masked.dim() == 4 else masked

    return rows


def spread(mask: Tensor, dims: Iterable[int], shape: Sequence[int]) -> Tensor:
    """The mask along `dims` of a tensor of this shape, the same one twice if they are merged: a view.

    Raises ModelChangedError for another number of cases: those of a mask and of the batch were equal in the example.
    """
    dims = tuple(dims)
    if mask.shape[0] * (mask.shape[1] if dims[0] == dims[1] else 1) != shape[dims[0]]:
        raise ModelChangedError(
            f"padding_mask has shape {list(mask.shape)}, and dimension {dims[0]} of an output {list(shape)} counts the "
            f"{'positions of all ' * (dims[0] == dims[1])}cases; with the first inputs the mask had as many.\n"
            "Pass forward a mask, or the lengths from which padding_mask computes it, of every case of the batch."
        )
    if len(set(dims)) < len(dims):
        mask, dims = mask.reshape(-1), dims[:1]
    mask = mask.permute(sorted(range(len(dims)), key=dims.__getitem__))
    ordered = sorted(dims)
    view = [mask.shape[ordered.index(dim)] if dim in ordered else 1 for dim in range(len(shape))]
    return mask.reshape(view).expand(shape)
