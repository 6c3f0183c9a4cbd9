"""Tables that are interpolated on the way to their use: positions of images of another size than the model's.

    L = interpolate(T)                                      L[e, :] = Σ_f M[e, f] T[f, :], with M a constant
    L = cat([T[:, :1], interpolate(T[:, 1:])], 1)           the same, of more steps

What only moves and mixes entries by literal numbers, alike in every column, is one matrix M, computed once, from tables
of zeros and ones. What has L for a parameter, has T: the gradient of T is Mᵀ times that of L, case by case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import fatal
from ..graphs.edit import attribute
from ..graphs.labels import Label
from ..graphs.operations import VIEWS, computed, op_name
from ..matrix import Shape
from ..words.uses import Mapped

MAP = "map"  # in a use's attributes: the node of the matrix
JOINS = {"cat", "concat", "concatenate", "stack"}
MOVES = VIEWS | JOINS | {"slice", "narrow", "select", "getitem", "flip", "roll"}
MIXES = ("interpolate", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
LARGEST = 4096**2  # numbers in a matrix: no factor takes more, either


class Maps:
    """The tables of a graph that are made so, and their matrices, held by `root` and read by nodes of the graph."""

    def __init__(self, graph: fx.Graph, label: Mapping[fx.Node, Label], root: nn.Module) -> None:
        self.graph, self.label, self.root = graph, label, root
        self.made: dict[fx.Node, tuple[Mapped, fx.Node] | None] = {}
        self.behind: dict[fx.Node, fx.Node | None] = {}  # the parameter that a node is a linear map of
        self.mixed: dict[fx.Node, bool] = {}  # whether entries are

    def of(self, node: fx.Node) -> tuple[Mapped, fx.Node] | None:
        """The table that a node makes of a parameter, and the node of its matrix; None if its step is none of mixing,
        or joining what is mixed, or if sizes or numbers on the way are known with the batch only."""
        if node not in self.made:
            joins = mixes(node) or op_name(node) in JOINS
            found = self.parameter(node) if joins and self.label[node] is Label.PURE else None
            self.made[node] = None if found is None or not self.mixed[node] else self.make(node, found)
        return self.made[node]

    def parameter(self, node: fx.Node) -> fx.Node | None:
        if node not in self.behind:
            self.behind[node], self.mixed[node] = node if node.op == "get_attr" else None, False
            if node.op != "get_attr" and (op_name(node) in MOVES or mixes(node)):
                found = {self.parameter(operand) for operand in node.all_input_nodes}
                self.behind[node] = found.pop() if len(found) == 1 else None
                self.mixed[node] = mixes(node) or any(self.mixed[operand] for operand in node.all_input_nodes)
        return self.behind[node]

    def make(self, node: fx.Node, parameter: fx.Node) -> tuple[Mapped, fx.Node] | None:
        value: Tensor = attribute(self.root, str(parameter.target))
        try:
            found = matrix_of(lambda table: run(node, {parameter: table}), tuple(value.shape), value.dtype)
        except (RuntimeError, TypeError, ValueError) as error:
            if fatal(error):
                raise
            return None
        if found is None:
            return None
        mapped, matrix = found
        name = f"_map_of_{node.name}"
        self.root.register_buffer(name, matrix.to(value.device), persistent=False)
        with self.graph.inserting_after(node):
            return mapped, self.graph.get_attr(name)


def mixes(node: fx.Node) -> bool:
    return "upsample_" in op_name(node) or op_name(node) in MIXES


def run(node: fx.Node, known: dict[fx.Node, Tensor]) -> Any:
    """The value of a node, from the parameter's."""
    if node not in known:
        arguments: Any = fx.map_arg((node.args, node.kwargs), lambda operand: run(operand, known))
        known[node] = computed(node, *arguments)
    return known[node]


def matrix_of(function: Callable[[Tensor], Tensor], shape: Shape, dtype: torch.dtype) -> tuple[Mapped, Tensor] | None:
    """M [e, f] of a linear function of tables of `shape` that does the same to every column; None if it does not."""
    dtype = torch.promote_types(dtype, torch.float32)
    trial = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    made = function(trial)
    for column, dim in columns(shape, tuple(made.shape)):
        width, entries = shape[column], prod(shape) // shape[column]
        if made.numel() // width * entries > LARGEST:
            return None
        number = -(-entries // width)  # of tables that all unit vectors fit in, one a column
        unit = torch.eye(number * width, dtype=dtype)[:entries].view(entries, number, width)
        mapped = Mapped(tuple(made.shape), dim, shape, column)
        images = [by_entry(function(table_of(unit[:, n], mapped)), dim) for n in range(number)]
        matrix = torch.cat(images, -1)[:, :entries].to(dtype)
        if torch.allclose(by_entry(made, dim).to(dtype), matrix @ by_entry(trial, column), rtol=1e-4, atol=1e-4):
            return mapped, matrix
    return None


def columns(shape: Shape, made: Shape) -> Iterator[tuple[int, int]]:
    """The dimensions that may be columns, of a table and of what was made of it; the last ones first."""
    for column in reversed(range(len(shape))):
        for dim in reversed(range(len(made))):
            if shape[column] == made[dim] > 1:
                yield column, dim


def by_entry(table: Tensor, column: int) -> Tensor:
    """[entries, columns]"""
    return table.movedim(column, -1).flatten(0, -2)


def table_of(rows: Tensor, mapped: Mapped) -> Tensor:
    """[..., entries, columns] in the shape of the parameter."""
    sizes = [size for dim, size in enumerate(mapped.whole) if dim != mapped.column]
    lead = rows.dim() - 2
    table: Tensor = rows.unflatten(lead, sizes or (1,)).movedim(-1, lead + mapped.column)
    return table


def of_elements(rows: Tensor, grad_rows: Tensor, matrix: Tensor, mapped: Mapped) -> tuple[Tensor, Tensor]:
    """Rows and gradient rows of shifts by a table's elements, [N, 1, elements, 0 or 1], as those of its parameter."""
    table = grad_rows.unflatten(2, mapped.shape)[..., 0].movedim(2 + mapped.dim, -1)
    gradient = matrix.to(grad_rows).mT @ table.flatten(2, -2)  # [N, 1, entries, columns]
    grad_rows = table_of(gradient, mapped).flatten(2).unsqueeze(-1)
    return rows.new_zeros(*rows.shape[:2], grad_rows.shape[2], 0), grad_rows
