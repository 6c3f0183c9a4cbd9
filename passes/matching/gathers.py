"""Weights whose outputs, or inputs, are entries of a table: relative positions that meet queries.

    W[g, o, :] = T[index[g, o], :]          einsum("bhqd,qkd->bhqk", q, table[index]): a group a position of queries
    W[g, :, i] = T[:, index[g, i]]          linear(x, w[:, chosen])

This is the layer of the whole table, of whose outputs, or inputs, some are taken, and some more than once. Its rows are
those of W, of every group one after the other; in its gradient rows the gradients of all outputs that are one entry add
up. Gathered inputs add up in the rows instead. Both are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import fatal
from ..graphs.edit import attribute
from ..graphs.labels import Label
from ..graphs.operations import changes_memory, computed, is_random, op_name
from ..matrix import Layout, Shape

ENTRIES = "entries"  # in a use's attributes: the node of the indices
OUTPUTS, INPUTS = "outputs", "inputs"
Side = tuple[str, int]  # which side of the matrix is gathered, and how many entries the table has there
Views = tuple[tuple[Shape, Shape], ...]  # (order, shape), one of them empty


def entries(
    numbers: fx.Node, layout: Layout, shape: Shape, root: Any, label: Mapping[fx.Node, Label]
) -> tuple[Layout, Side, fx.Node] | None:
    """How a weight was gathered from a parameter of `shape`: (the parameter as [1, o, i], the side, the node of the
    indices, [g, o] or [g, i]); None if in another way, or if only the batch knows.

    numbers: of the parameter's elements in the weight. layout: from there to the weight's matrix.
    """
    value = constant(numbers, root, label)
    sizes = [size for size in shape if size != 1]
    if value is None or len(sizes) != 2 or not value.numel() or bool((value < 0).any()):
        return None
    matrix, width = layout.apply(value), sizes[1]
    if 1 in matrix.shape[1:]:
        return None  # every element on its own
    straight = Layout(shape).reshape(tuple(sizes))
    for table in (straight, straight.permute((1, 0))):
        whole = table.apply(torch.arange(sizes[0] * width, device=value.device).view(shape))
        for name in (OUTPUTS, INPUTS):
            along = (name == OUTPUTS) == (table is straight)  # whether the gathered side is the table's first
            index = picked(value, views(layout), name, width, along)
            found = whole[index] if name == OUTPUTS else whole[:, index].movedim(1, 0)
            if found.shape == matrix.shape and torch.equal(found, matrix):
                with numbers.graph.inserting_after(numbers):
                    node = numbers.graph.call_function(picked, (numbers, views(layout), name, width, along))
                side = whole.shape[0 if name == OUTPUTS else 1]
                return table.reshape((1, *table.result)), (name, side), node
    return None


def picked(numbers: Tensor, steps: Views, side: str, width: int, along: bool) -> Tensor:
    """The indices of a gathered side, from the numbers of elements of a table that is `width` wide."""
    for order, after in steps:
        numbers = numbers.permute(order) if order else numbers.reshape(after)
    first = numbers[:, :, 0] if side == OUTPUTS else numbers[:, 0]
    return first // width if along else first % width


def views(layout: Layout) -> Views:
    return tuple((one.order, ()) if one.order else ((), one.after) for one in layout.steps)


def constant(node: fx.Node, root: Any, label: Mapping[fx.Node, Label]) -> Any:
    """The value of what is computed from constants alone, or None."""
    behind, stack = set[fx.Node](), [node]
    while stack:
        one = stack.pop()
        if label.get(one, Label.CONST).activation:
            return None  # a size that only the batch knows
        stack += () if one in behind else one.all_input_nodes
        behind.add(one)
    known: dict[fx.Node, Any] = {}
    for one in sorted(behind):  # nodes compare by their places
        known[one] = attribute(root, str(one.target)) if one.op == "get_attr" else of_constants(one, known)
        if known[one] is None:
            return None
    return known[node]


def of_constants(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    if is_random(node) or op_name(node) == "written":
        return None
    arguments: Any = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    args, kwargs = arguments
    if changes_memory(node):
        args = (args[0].clone(), *args[1:])
    try:
        return computed(node, args, kwargs)
    except (RuntimeError, TypeError) as error:
        if fatal(error):
            raise
        return None  # sizes that are no numbers here, tensors without data


def of_table(rows: Tensor, grad_rows: Tensor, index: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """The rows and gradient rows of a weight as those of its table: [N, S, g, i] and [N, S, g, o] -> [N, S g, i] and
    [N, S g, o]; see the module's docstring. Ids [N, S] are those of the table's inputs."""
    name, size = side
    grad_rows = grad_rows if grad_rows.dim() == 4 else grad_rows.unsqueeze(2)
    if name == OUTPUTS:
        grad_rows = added(grad_rows, index, size)
    if not rows.is_floating_point():
        ids = rows if name == OUTPUTS else torch.where(rows >= 0, index[0][rows.clamp(min=0)], -1)
        return ids, grad_rows.flatten(1, 2)
    rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
    if name == INPUTS:
        rows = added(rows, index, size)
    return rows.flatten(1, 2), grad_rows.flatten(1, 2)


def added(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """[N, S, g, k], to its places [g, k] among `size`."""
    return rows.new_zeros(*rows.shape[:3], size).scatter_add(3, index.expand(rows.shape), rows)
