"""Tables: tensors whose elements were gathered from one parameter, or mixed from its entries by constants.

    table[index].view(s, s, h).permute(2, 0, 1)   ->   the same of the elements' numbers, beside it in the graph

A shift by gathered elements, as of relative positions, has their numbers as an attribute of the layer, and adds every
gradient to the element that the number names. A weight may be gathered, too:

    W[g, o, :] = T[index[g, o], :]          einsum("bhqd,qkd->bhqk", q, table[index]): a group a position of queries
    W[g, :, i] = T[:, index[g, i]]          linear(x, w[:, chosen])

That is the layer of the whole table, of whose outputs, or inputs, some are taken, and some more than once. Its rows are
those of W, of every group one after the other; in its gradient rows the gradients of all outputs that are one entry add
up. Gathered inputs add up in the rows instead. Both are exact. The numbers are constants that only the tap of a use
reads; without one they are no part of the emitted module.

A table may be interpolated on the way to its use, as position embeddings are for images of another size:

    L = interpolate(T)                                      L[e, :] = Σ_f M[e, f] T[f, :], with M a constant
    L = cat([T[:, :1], interpolate(T[:, 1:])], 1)           the same, of more steps
    y = x + L                                               a shift by the elements of L

Operations that only move and mix entries by literal numbers, alike in every column, are one matrix M. It is computed
once, from tables of zeros and ones, and stands in the graph as a buffer beside the table. The gradient of T is Mᵀ times
that of L, case by case, so the rows are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..errors import fatal
from ..graphs.edit import attribute
from ..graphs.labels import Label, has_gradient, labels
from ..graphs.operations import CASTS, EXPANDS, JOINS, PARTS, VIEWS, changes_memory, computed, is_random, op_name
from ..ir import ELEMENTS
from ..matrix import Layout, Shape
from ..parametrization import (
    INPUTS,
    OUTPUTS,
    Computed,
    Parametrization,
    RowPair,
    RowsStep,
    Value,
    Views,
    WeightExample,
    apply_views,
    view_steps,
)

SELECTS = (VIEWS - CASTS) | PARTS | EXPANDS
SELECTS |= {"index", "index_select", "flip", "roll", "take", "unfold", "diagonal", "gather"}


@dataclass(frozen=True)
class Gathered(Parametrization):
    """A weight whose outputs, or inputs, are entries of a table.

    index: the entries' numbers, [g, o] or [g, i].
    side: "outputs" or "inputs".
    size: how many entries the table has on this side.
    """

    merges_groups = True

    index: Value
    side: str
    size: int

    def step(self) -> RowsStep:
        side, size = self.side, self.size
        return lambda both, tensors: of_table(*both, tensors["index"], side, size)

    @property
    def keeps_pixels(self) -> bool:
        return self.side == OUTPUTS


def of_table(rows: Tensor, grad_rows: Tensor, index: Tensor, side: str, size: int) -> RowPair:
    """The rows and gradient rows of a weight as those of its table: [N, S, g, i] and [N, S, g, o] -> [N, S g, i] and
    [N, S g, o]; see the module's docstring. Ids [N, S] are those of the table's inputs."""
    grad_rows = grad_rows if grad_rows.dim() == 4 else grad_rows.unsqueeze(2)
    if side == OUTPUTS:
        grad_rows = added_at(grad_rows, index, size)
    if not rows.is_floating_point():
        ids = rows if side == OUTPUTS else torch.where(rows >= 0, index[0][rows.clamp(min=0)], -1)
        return ids, grad_rows.flatten(1, 2)
    rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
    if side == INPUTS:
        rows = added_at(rows, index, size)
    return rows.flatten(1, 2), grad_rows.flatten(1, 2)


def added_at(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """[N, S, g, k], to its places [g, k] among `size`."""
    return rows.new_zeros(*rows.shape[:3], size).scatter_add(3, index.expand(rows.shape), rows)


# --- which elements a tensor holds ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elements:
    """The elements of a tensor that was gathered from a parameter, or from a linear map of it.

    numbers: the node of the elements' numbers; -1 stands for a constant.
    """

    parameter: str
    numbers: fx.Node
    map: LinearMap | None


def note_elements(graph: fx.Graph, parameters: Iterable[str], root: nn.Module) -> None:
    """Note the elements of every tensor that holds nothing but elements of one parameter, or of a linear map of it, and
    constants, in the node's meta."""
    label = labels(graph, parameters)
    numbers = Numbers(graph, label, LinearMaps(graph, label, root))
    for node in list(graph.nodes):
        node.meta.pop(ELEMENTS, None)
        if label[node] is Label.PURE and numbers.gathered(node) and not merely_viewed(node):
            node.meta[ELEMENTS] = numbers.elements(node)


def merely_viewed(node: fx.Node) -> bool:
    """Whether a matcher sees the parameter through views alone."""
    while node.op != "get_attr" and op_name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


class Numbers:
    """The numbers of the elements of nodes, which are inserted into the graph when they are asked for."""

    def __init__(self, graph: fx.Graph, label: Mapping[fx.Node, Label], maps: LinearMaps) -> None:
        self.graph, self.label, self.maps = graph, label, maps
        self.inserted: dict[fx.Node, fx.Node] = {}
        self.gathers_or_is_table: dict[fx.Node, bool] = {}

    def elements(self, node: fx.Node) -> Elements:
        table = node
        while not self.is_table(table):
            table = source(table)
        parameter = self.maps.parameter(table)
        assert parameter is not None, "bug in kfac_fx: a table that is made of nothing"
        return Elements(str(parameter.target), self.of(node), self.maps.of(table))

    def gathered(self, node: fx.Node) -> bool:
        if node not in self.gathers_or_is_table:
            self.gathers_or_is_table[node] = self.is_table(node) or self.gathers(node)
        return self.gathers_or_is_table[node] and self.label.get(node) is Label.PURE

    def gathers(self, node: fx.Node) -> bool:
        """Whether the node moves elements of its one operand that is no constant."""
        if op_name(node) not in GATHERS or not has_gradient(node):
            return False
        pure = [operand for operand in node.all_input_nodes if self.label.get(operand) is not Label.CONST]
        return len(pure) == 1 and self.gathered(pure[0]) and source(node) is pure[0]

    def is_table(self, node: fx.Node) -> bool:
        """Whether elements are numbered in this node's tensor."""
        return node.op == "get_attr" or self.maps.of(node) is not None

    def of(self, node: fx.Node) -> fx.Node:
        if node not in self.inserted:
            with self.graph.inserting_after(node):
                self.inserted[node] = self.insert(node)
        return self.inserted[node]

    def insert(self, node: fx.Node) -> fx.Node:
        if self.is_table(node):
            return self.graph.call_function(numbered, (node,))
        before = self.of(source(node))
        if op_name(node) in CASTS:
            return before
        special = SPECIAL.get(op_name(node))
        if special is not None:
            place = PLACE.get(op_name(node), 0)
            return self.graph.call_function(special, (before, *node.args[:place], *node.args[place + 1 :]))
        return self.graph.node_copy(node, lambda n: before if n is source(node) else n)


def source(node: fx.Node) -> Any:
    """The operand whose elements are moved."""
    return node.args[PLACE.get(op_name(node), 0)]


def numbered(parameter: Tensor) -> Tensor:
    """The number of every element, in the shape of the parameter."""
    return torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)


def looked_up(numbers: Tensor, ids: Tensor, padding_idx: int | None, *_: Any) -> Tensor:
    entries = numbers[ids]
    if padding_idx is None:
        return entries
    return entries.masked_fill((ids == padding_idx % numbers.shape[0]).unsqueeze(-1), -1)


def beside_constant(numbers: Tensor, constant: Any) -> Tensor:
    """The numbers of the elements of a sum with a constant."""
    shape = constant.shape if isinstance(constant, Tensor) else ()
    return numbers.expand(torch.broadcast_shapes(numbers.shape, shape))


def where_not_masked(numbers: Tensor, mask: Tensor, _: Any) -> Tensor:
    shape = torch.broadcast_shapes(numbers.shape, mask.shape)
    return numbers.expand(shape).masked_fill(mask, -1)


def where_masked(numbers: Tensor, mask: Tensor, _: Any) -> Tensor:
    return where_not_masked(numbers, mask.logical_not(), _)


SPECIAL: dict[str, Callable[..., Any]] = {
    "embedding": looked_up,
    "add": beside_constant,
    "masked_fill": where_not_masked,
    "where": where_masked,
}
PLACE = {"embedding": 1, "where": 1}
GATHERS = SELECTS | CASTS | SPECIAL.keys()


# --- gathered weights -------------------------------------------------------------------------------------------------


def gathered_weight(
    numbers: fx.Node, layout: Layout, shape: Shape, root: Any, label: Mapping[fx.Node, Label]
) -> tuple[Layout, Gathered] | None:
    """How a weight was gathered from a parameter of `shape`, and the parameter as [1, o, i]; None if in another way, or
    if only the batch knows.

    numbers: of the parameter's elements in the weight. layout: from there to the weight's matrix.
    """
    value = constant(numbers, root, label)
    sizes = [size for size in shape if size != 1]
    if value is None or len(sizes) != 2 or not value.numel() or bool((value < 0).any()):
        return None
    matrix, width = layout.apply(value), sizes[1]
    if 1 in matrix.shape[1:]:
        return None  # every element on its own
    steps = view_steps(Layout(layout.shape), layout)
    straight = Layout(shape).reshape(tuple(sizes))
    for table in (straight, straight.permute((1, 0))):
        whole = table.apply(torch.arange(sizes[0] * width, device=value.device).view(shape))
        for side in (OUTPUTS, INPUTS):
            along = (side == OUTPUTS) == (table is straight)  # whether the gathered side is the table's first
            index = picked(value, steps, side, width, along)
            taken = whole[index] if side == OUTPUTS else whole[:, index].movedim(1, 0)
            if taken.shape == matrix.shape and torch.equal(taken, matrix):
                indices = Computed(picked, (numbers, steps, side, width, along))
                size = int(whole.shape[0 if side == OUTPUTS else 1])
                return table.reshape((1, *table.result)), Gathered(indices, side, size)
    return None


def picked(numbers: Tensor, steps: Views, side: str, width: int, along: bool) -> Tensor:
    """The indices of a gathered side, from the numbers of elements of a table that is `width` wide."""
    matrix = apply_views(numbers, steps)
    first = matrix[:, :, 0] if side == OUTPUTS else matrix[:, 0]
    return first // width if along else first % width


def constant(node: fx.Node, root: Any, label: Mapping[fx.Node, Label]) -> Any:
    """The value of what is computed from constants alone, or None."""
    behind, stack = set[fx.Node](), [node]
    while stack:
        ancestor = stack.pop()
        if label.get(ancestor, Label.CONST).activation:
            return None  # a size that only the batch knows
        stack += () if ancestor in behind else ancestor.all_input_nodes
        behind.add(ancestor)
    values: dict[fx.Node, Any] = {}
    for ancestor in sorted(behind):  # nodes compare by their places
        held = ancestor.op == "get_attr"
        values[ancestor] = attribute(root, str(ancestor.target)) if held else of_constants(ancestor, values)
        if values[ancestor] is None:
            return None
    return values[node]


def of_constants(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if is_random(node) or op_name(node) == "overwritten":
        return None
    arguments: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = arguments
    if changes_memory(node):
        args = (args[0].clone(), *args[1:])
    try:
        return computed(node, args, kwargs)
    except (RuntimeError, TypeError) as error:
        if fatal(error):
            raise
        return None  # sizes that are no numbers here, tensors without data


# --- interpolated tables ----------------------------------------------------------------------------------------------


MOVES_ENTRIES = VIEWS | JOINS | {"slice", "narrow", "select", "getitem", "flip", "roll"}
MIXES = ("interpolate", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
LARGEST_MATRIX = 4096**2  # numbers in a matrix: no factor takes more, either


@dataclass(frozen=True)
class Columns:
    """Which dimensions of a table and of its parameter count columns.

    shape, dim: of the table, and its dimension of columns.
    whole, column: the same of the parameter.
    """

    shape: Shape
    dim: int
    whole: Shape
    column: int


@dataclass(frozen=True)
class LinearMap(Parametrization):
    """The layer has a table instead of its one parameter.

    matrix: the node of M [entries of the table, entries of the parameter].
    """

    matrix: fx.Node
    columns: Columns

    def step(self) -> RowsStep:
        columns = self.columns
        return lambda both, tensors: of_parameter(*both, tensors["matrix"], columns)


def of_parameter(rows: Tensor, grad_rows: Tensor, matrix: Tensor, columns: Columns) -> RowPair:
    """Rows and gradient rows of shifts by a table's elements, [N, 1, elements, 0 or 1], as those of its parameter."""
    table = grad_rows.unflatten(2, columns.shape)[..., 0].movedim(2 + columns.dim, -1)
    gradient = matrix.to(grad_rows).mT @ table.flatten(2, -2)  # [N, 1, entries, columns]
    grad_rows = table_of(gradient, columns).flatten(2).unsqueeze(-1)
    return rows.new_zeros(*rows.shape[:2], grad_rows.shape[2], 0), grad_rows


def by_entry(table: Tensor, column: int) -> Tensor:
    """[entries, columns]"""
    return table.movedim(column, -1).flatten(0, -2)


def table_of(rows: Tensor, columns: Columns) -> Tensor:
    """[..., entries, columns] in the shape of the parameter."""
    sizes = [size for dim, size in enumerate(columns.whole) if dim != columns.column]
    lead = rows.dim() - 2
    table: Tensor = rows.unflatten(lead, sizes or (1,)).movedim(-1, lead + columns.column)
    return table


# --- in a graph -------------------------------------------------------------------------------------------------------


class LinearMaps:
    """The tables of a graph that are linear maps of parameters. `root` holds their matrices."""

    def __init__(self, graph: fx.Graph, label: Mapping[fx.Node, Label], root: nn.Module) -> None:
        self.graph, self.label, self.root = graph, label, root
        self.maps: dict[fx.Node, LinearMap | None] = {}
        self.parameters: dict[fx.Node, fx.Node | None] = {}  # the parameter that a node is a linear map of
        self.mixed: dict[fx.Node, bool] = {}  # whether entries are

    def of(self, node: fx.Node) -> LinearMap | None:
        """The map whose last step is this node. None if the step neither mixes nor joins what is mixed, or if sizes or
        numbers on the way depend on the batch."""
        if node not in self.maps:
            joins = mixes_elements(node) or op_name(node) in JOINS
            parameter = self.parameter(node) if joins and self.label[node] is Label.PURE else None
            self.maps[node] = None if parameter is None or not self.mixed[node] else self.insert(node, parameter)
        return self.maps[node]

    def parameter(self, node: fx.Node) -> fx.Node | None:
        if node not in self.parameters:
            self.parameters[node], self.mixed[node] = node if node.op == "get_attr" else None, False
            if node.op != "get_attr" and (op_name(node) in MOVES_ENTRIES or mixes_elements(node)):
                sources = {self.parameter(operand) for operand in node.all_input_nodes}
                self.parameters[node] = sources.pop() if len(sources) == 1 else None
                self.mixed[node] = mixes_elements(node) or any(self.mixed[operand] for operand in node.all_input_nodes)
        return self.parameters[node]

    def insert(self, node: fx.Node, parameter: fx.Node) -> LinearMap | None:
        """Compute the matrix and read it beside the node."""
        value: Tensor = attribute(self.root, str(parameter.target))
        try:
            linear = matrix_of(lambda table: value_from(node, {parameter: table}), tuple(value.shape), value.dtype)
        except (RuntimeError, TypeError, ValueError) as error:
            if fatal(error):
                raise
            return None
        if linear is None:
            return None
        columns, matrix = linear
        name = f"_map_of_{node.name}"
        self.root.register_buffer(name, matrix.to(value.device), persistent=False)
        with self.graph.inserting_after(node):
            return LinearMap(self.graph.get_attr(name), columns)


def mixes_elements(node: fx.Node) -> bool:
    return "upsample_" in op_name(node) or op_name(node) in MIXES


def value_from(node: fx.Node, values: dict[fx.Node, Tensor]) -> Any:
    """The value of a node, from the parameter's."""
    if node not in values:
        arguments: Any = fx.map_arg((node.args, node.kwargs), lambda operand: value_from(operand, values))
        values[node] = computed(node, *arguments)
    return values[node]


def matrix_of(function: Callable[[Tensor], Tensor], shape: Shape, dtype: torch.dtype) -> tuple[Columns, Tensor] | None:
    """M [e, f] of a linear function of tables of `shape` that does the same to every column; None if it does not."""
    dtype = torch.promote_types(dtype, torch.float32)
    trial = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    table = function(trial)
    for columns in candidates(shape, tuple(table.shape)):
        width = shape[columns.column]
        entries = prod(shape) // width
        if table.numel() // width * entries > LARGEST_MATRIX:
            return None
        number = -(-entries // width)  # of tables that all unit vectors fit in, one a column
        unit = torch.eye(number * width, dtype=dtype)[:entries].view(entries, number, width)
        images = [by_entry(function(table_of(unit[:, n], columns)), columns.dim) for n in range(number)]
        matrix = torch.cat(images, -1)[:, :entries].to(dtype)
        wanted = by_entry(table, columns.dim).to(dtype)
        if torch.allclose(wanted, matrix @ by_entry(trial, columns.column), rtol=1e-4, atol=1e-4):
            return columns, matrix
    return None


def candidates(whole: Shape, shape: Shape) -> Iterator[Columns]:
    """The dimensions of the parameter and of the table that may be columns; the last ones first."""
    for column in reversed(range(len(whole))):
        for dim in reversed(range(len(shape))):
            if whole[column] == shape[dim] > 1:
                yield Columns(shape, dim, whole, column)


EXAMPLES = {
    "gathered": WeightExample(lambda w: w[torch.tensor([2, 0, 2, 1])], {"w": (4, 4)}),
    "gathered inputs": WeightExample(lambda w: w[:, torch.tensor([2, 0, 2, 1])], {"w": (4, 4)}),
    "linear map": WeightExample(
        lambda w: F.interpolate(w.t()[None], scale_factor=0.5, mode="linear")[0].t(), {"w": (8, 4)}
    ),
}
