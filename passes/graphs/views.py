"""The parameter behind a chain of views, and the layout that these views make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import fatal
from ..matrix import Layout, Shape, Step
from .operations import CASTS, PERMUTES, VIEWS, computed, op_name


def bound_parameter(node: fx.Node, shapes: Mapping[str, Shape]) -> tuple[str, Layout] | None:
    """The parameter behind `node` if only invertible views lie between, and the layout they make; else None."""
    chain: list[fx.Node] = []
    while node.op != "get_attr":
        operands = node.all_input_nodes
        if op_name(node) not in VIEWS or not operands or operands[0] is not node.args[0]:
            return None
        chain.append(node)
        node = operands[0]
    if node.target not in shapes:
        return None
    layout = Layout(shapes[str(node.target)])
    for view in reversed(chain):
        step = view_step(view, layout.result)
        if step is None:
            return None
        layout = Layout(layout.shape, (*layout.steps, step)) if step.before != step.after or step.order else layout
    return str(node.target), layout


def view_step(node: fx.Node, before: Shape) -> Step | None:
    """`node` as a Step on a tensor of shape `before`, found by running it without data; None if it does not keep every
    element or needs sizes that only the batch knows."""
    name = op_name(node)
    if name in CASTS:
        return Step(before, before)
    if len(node.all_input_nodes) > 1 or any(isinstance(arg, torch.dtype) for arg in node.args):
        return None
    probe = torch.empty(before, device="meta")
    try:
        result = computed(node, (probe, *node.args[1:]), node.kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        if fatal(error):
            raise
        return None
    if not isinstance(result, Tensor) or result.numel() != probe.numel():
        return None
    if name not in PERMUTES:
        return Step(before, tuple(result.shape))
    return Step(before, tuple(result.shape), dims_after(node, len(before), node.args[1:]))


def dims_after(node: fx.Node, dims: int, arguments: Sequence[Any]) -> Shape:
    """The order that a permuting node with these further arguments leaves the dimensions of a tensor in."""
    distinct = torch.empty(tuple(range(2, dims + 2)), device="meta")  # every dimension has its own size
    return tuple(int(size) - 2 for size in computed(node, (distinct, *arguments), node.kwargs).shape)
