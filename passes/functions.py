"""Functions of parameters, as slopes of the slabs that go through them; see `passes.slopes`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from .matrix import Layout, Shape
from .operations import EXPANDS, op_name
from .pieces import Made, Piece, Slab, Slope, layout_in, view_of, viewed, whole
from .slopes import DIVIDED, ELEMENTWISE, NORMALIZED, STANDARDIZED, UNIT
from .values import is_one_slab

NORMS = {"batch_norm", "_weight_norm"}
FUNCTIONS = {*ELEMENTWISE, *NORMS, "div"}


def sloped(node: fx.Node, operand: fx.Node, value: Made, shape: Shape) -> Slab | None:
    """The slab of a function of `operand`, whose value is one slab of a parameter of `shape`."""
    (slab,) = value.slabs
    layout = layout_in(Piece(slab.parameter, 0, 0, *shape[:1] or (1,)), shape, view_of(slab))
    name, last = op_name(node), any(one.name in (*NORMALIZED, DIVIDED) for one in slab.slopes)
    multiple = name in MAKERS and (slab.scale != 1.0 or slab.slopes)
    if layout is None or not is_one_slab(value) or last or multiple:
        return None
    slope = MAKERS.get(name, elementwise)(node, operand, layout)
    return None if slope is None else replace(slab, slopes=(*slab.slopes, slope))


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


MAKERS = {"batch_norm": standardization, "_weight_norm": normalization, "div": division}
