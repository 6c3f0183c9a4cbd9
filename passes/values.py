"""Operations on values of expressions; see `expressions`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from .matrix import Layout, Shape
from .operations import EXPANDS, op_name
from .pieces import Box, Made, Slab, Slope, slab_of, view_of, viewed, whole
from .slopes import DIVIDED, STANDARDIZED, UNIT


def called(node: fx.Node, args: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **node.kwargs)
    assert callable(node.target), "bug in kfac_fx: an operation that is neither a function nor a method"
    return node.target(*args, **node.kwargs)


def without_data(arguments: Any, known: Mapping[fx.Node, Any]) -> Any:
    """Arguments with the values of their nodes; those that are tensors have shapes only."""

    def value_of(node: fx.Node) -> Any:
        value = known[node]
        return whole(value.shape) if isinstance(value, Made) else value

    return fx.map_arg(arguments, value_of)


def is_one_slab(value: Made) -> bool:
    return len(value.slabs) == 1 and value.slabs[0].shape == value.shape


def made_of(view: Tensor, slab: Slab) -> Made:
    """A view of a slab. Raises ValueError where elements are repeated."""
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)):
        raise ValueError
    return Made(tuple(view.shape), (slab_of(slab.parameter, view, slab.scale, slab.slopes),))


def elementwise(node: fx.Node, operand: fx.Node, layout: Layout) -> Slope | None:
    settings: tuple[Any, ...] = tuple(node.args[1:])
    if op_name(node) == "clamp":
        low, high = (*settings, None, None)[:2]
        settings = node.kwargs.get("min", low), node.kwargs.get("max", high)
    elif node.kwargs or settings:
        return None
    numbers = all(one is None or isinstance(one, (int, float)) for one in settings)
    return Slope(op_name(node), operand, layout, None, settings) if numbers else None


def standardization(node: fx.Node, operand: fx.Node, layout: Layout) -> Slope | None:
    """`batch_norm(v.reshape(1, o, -1), weight=γ)`, of a weight whose first dimension counts filters."""
    _, mean, var, gain, shift, training, _, eps = node.args
    filters = bool(layout.shape) and layout.result == (1, layout.shape[0], math.prod(layout.shape[1:]))
    if not filters or training is not True or (mean, var, shift) != (None, None, None) or reordered(layout):
        return None
    return Slope(STANDARDIZED, operand, layout, gain, (1, eps)) if isinstance(gain, fx.Node | None) else None


def normalization(node: fx.Node, operand: fx.Node, layout: Layout) -> Slope | None:
    """`_weight_norm(v, g, dim)`; -1 stands for the whole tensor."""
    gain, dim = (*node.args[1:], 0)[:2]
    slices = isinstance(dim, int) and -1 <= dim < len(layout.shape) and layout.result == layout.shape
    if not slices or reordered(layout) or not isinstance(gain, fx.Node):
        return None
    return Slope(UNIT, operand, layout, gain, (dim, 0.0))


def division(node: fx.Node, operand: fx.Node, layout: Layout) -> Slope | None:
    """`v / σ`, with σ one number, or one for every slice along a dimension of the parameter."""
    by: Any = node.args[1]
    while op_name(by) in EXPANDS:
        by = by.args[0]
    value = by.meta.get("val")
    sizes = tuple(value.shape) if isinstance(value, Tensor) else (None,)
    several = [dim for dim, size in enumerate(sizes) if size != 1]
    if not several:
        return Slope(DIVIDED, operand, layout, by, (None,))
    of_slices = len(several) == 1 and len(sizes) == len(layout.shape) and layout.result == layout.shape
    return Slope(DIVIDED, operand, layout, by, (several[0],)) if of_slices and not reordered(layout) else None


def reordered(layout: Layout) -> bool:
    """Whether the elements are in another order than in the parameter."""
    places = whole(layout.shape)
    view = viewed(layout, places)
    return view is None or not view.is_contiguous()


def scaled(value: Made | None, by: float | None) -> Made | None:
    if value is None or by is None:
        return None
    return Made(value.shape, tuple(replace(slab, scale=by * slab.scale) for slab in value.slabs))


def factor(name: str, node: fx.Node) -> float | None:
    """Of a product with a number; None for another product."""
    if name == "neg":
        return -1.0
    by = node.args[1]
    if node.kwargs or not isinstance(by, (int, float)) or by == 0:
        return None
    return 1.0 / by if name == "div" else float(by)


def unsqueezed(value: Made, dim: int) -> Made:
    dim = dim % (len(value.shape) + 1)
    slabs = [view_of(slab).unsqueeze(dim).stride() for slab in value.slabs]
    boxes = [(*slab.box[:dim], (0, 1), *slab.box[dim:]) for slab in value.slabs]
    new = [replace(old, box=box, strides=by) for old, box, by in zip(value.slabs, boxes, slabs, strict=True)]
    return Made((*value.shape[:dim], 1, *value.shape[dim:]), tuple(new))


def permuted(slab: Slab, order: Shape) -> Slab:
    return replace(slab, box=tuple(slab.box[d] for d in order), strides=tuple(slab.strides[d] for d in order))


def moved(box: Box, dim: int, by: int) -> Box:
    start, stop = box[dim]
    return (*box[:dim], (start + by, stop + by), *box[dim + 1 :])


def dims_after(node: fx.Node, dims: int, rest: Any) -> Shape:
    """The order that a permuting node leaves the dimensions in."""
    distinct = whole(tuple(range(2, dims + 2)))
    return tuple(int(size) - 2 for size in called(node, (distinct, *rest)).shape)


def basic(index: Any) -> bool:
    """Whether an index makes a view."""
    return all(one is None or one is ... or isinstance(one, (int, slice, fx.Node)) for one in as_tuple(index))


def as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
