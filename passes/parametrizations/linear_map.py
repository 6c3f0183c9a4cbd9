"""Tables that are interpolated on the way to their use, as position embeddings are for images of another size.

    L = interpolate(T)                                      L[e, :] = Σ_f M[e, f] T[f, :], with M a constant
    L = cat([T[:, :1], interpolate(T[:, 1:])], 1)           the same, of more steps
    y = x + L                                               a shift by the elements of L

Operations that only move and mix entries by literal numbers, alike in every column, are one matrix M. It is computed
once, from tables of zeros and ones, and stands in the graph as a buffer beside the table. The gradient of T is Mᵀ times
that of L, case by case, so the rows are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..errors import fatal
from ..graphs.edit import attribute
from ..graphs.labels import Label
from ..graphs.operations import JOINS, VIEWS, computed, op_name
from ..matrix import Shape
from ..parametrization import Parametrization, RowPair, RowsStep, WeightExample

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
    """The layer has a table in the place of its one parameter.

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
    "linear map": WeightExample(
        lambda w: F.interpolate(w.t()[None], scale_factor=0.5, mode="linear")[0].t(), {"w": (8, 4)}
    )
}
