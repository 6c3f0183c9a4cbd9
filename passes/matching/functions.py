"""Functions of parameters, as slopes of the slabs that go through them; see `passes.words.slopes`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from ..graphs.edit import attribute
from ..graphs.labels import Label, parameters_behind
from ..graphs.operations import EXPANDS, op_name
from ..matrix import Layout, Shape
from ..words.pieces import Made, Piece, Slab, Slope, layout_in, view_of, viewed, whole
from ..words.slopes import CENTERED, DIVIDED, ELEMENTWISE, MULTIPLIED, OVER, OWN, SLICED, STANDARDIZED, TIMES, UNIT
from .means import is_mean
from .values import called, is_one_slab, without_data

WHOLE = -1  # in the place of a dimension: all of a parameter is one slice
FUNCTIONS = {*ELEMENTWISE, "batch_norm", "_weight_norm"}


class Functions:
    """Of what is known: the values of expressions, as they are found."""

    def __init__(self, root: nn.Module, label: Mapping[fx.Node, Label], known: Mapping[fx.Node, Any]) -> None:
        self.root, self.label, self.known = root, label, known

    def of(self, node: fx.Node, operand: fx.Node, value: Made, other: Shape | None = None) -> Made | None:
        """A function of every element, or what multiplies a weight's slices."""
        (one,) = value.slabs
        slab = sloped(node, operand, value, tuple(attribute(self.root, one.parameter).shape), other)
        if slab is None:
            return None
        slope = slab.slopes[-1]
        if slope.name not in OWN and slope.factor is not None:
            slab = replace(slab, slopes=(*slab.slopes[:-1], replace(slope, gain=self.gain(slope))))
        return Made(value.shape, (slab,))

    def gain(self, slope: Slope) -> Slab | None:
        """The parameter that slices are multiplied by, if it is a whole one in its own order."""
        assert slope.factor is not None, "bug in kfac_fx: a gain of nothing"
        value = self.known.get(slope.factor)
        if not isinstance(value, Made) or not is_one_slab(value):
            return None
        slab, shape = value.slabs[0], tuple(attribute(self.root, value.slabs[0].parameter).shape)
        if slope.name == OVER and (found := inverted(slope.factor, value, shape)) is not None:
            slab = found
        plain, size = all(one.name in ELEMENTWISE for one in slab.slopes), math.prod(shape)
        return slab if plain and view_of(slab).is_contiguous() and math.prod(slab.shape) == size else None

    def product(self, node: fx.Node, left: fx.Node, right: fx.Node) -> Made | None:
        """Of a weight and a factor that may be another parameter; a quotient's may be a number of the weight."""
        pairs = ((left, right), (right, left)) if op_name(node) == "mul" else ((left, right),)
        for operand, by in pairs:
            value, shape = self.known.get(operand), self.sizes(by)
            if not isinstance(value, Made) or len(value.slabs) != 1 or self.label[by].activation:
                continue
            behind, own = parameters_behind(by, self.label), {value.slabs[0].parameter}
            if behind == own:
                found = self.of(node, operand, value)
                if found is not None or op_name(node) == "div":
                    return found
            found = None if shape is None or behind & own else self.of(node, operand, value, shape)
            if found is not None:
                return found
        return None

    def centered(self, node: fx.Node, operand: fx.Node, mean: fx.Node) -> Made | None:
        """A weight without the mean of each of its filters."""
        value, shape = self.known.get(operand), self.sizes(mean)
        if not isinstance(value, Made) or not is_one_slab(value) or shape is None or node.kwargs:
            return None
        (slab,) = value.slabs
        layout = laid_out(value, tuple(attribute(self.root, slab.parameter).shape))
        if layout is None or slab.slopes or slab.scale != 1.0 or slices(shape, layout) != 0:
            return None
        if not is_mean(mean, slab.parameter, self.known):
            return None
        return Made(value.shape, (replace(slab, slopes=(Slope(CENTERED, operand, layout, None, (0,)),)),))

    def sizes(self, node: fx.Node) -> Shape | None:
        value = self.known.get(node)
        if isinstance(value, Made):
            return value.shape
        try:
            return self.shape_of(node)
        except ValueError:
            return None

    def shape_of(self, node: fx.Node) -> Shape:
        """Of a constant. Raises ValueError if it is not known."""
        value = attribute(self.root, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if value is None and all(operand in self.known for operand in node.all_input_nodes):
            value = called(node, without_data(node.args, self.known))
        if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise ValueError
        return tuple(value.shape)


def sloped(node: fx.Node, operand: fx.Node, value: Made, shape: Shape, other: Shape | None = None) -> Slab | None:
    """The slab of a function of `operand`, whose value is one slab of a parameter of `shape`.

    other: of what it is multiplied with or divided by, if that does not depend on the parameter.
    """
    (slab,) = value.slabs
    name, plain = op_name(node), value
    if other is None and name in ("mul", "div") and [one.name for one in slab.slopes] == [CENTERED]:
        plain = Made(value.shape, (replace(slab, slopes=()),))
    layout = laid_out(plain, shape)
    multiple = name in MAKERS and (slab.scale != 1.0 or plain.slabs[0].slopes)
    if layout is None or multiple:
        return None
    if other is not None:
        slope = product(node, operand, layout, other)
    else:
        slope = MAKERS.get(name, elementwise)(node, operand, layout)
    return None if slope is None else replace(slab, slopes=(*slab.slopes, slope))


def inverted(operand: fx.Node, value: Made, shape: Shape) -> Slab | None:
    """The slab of 1 / `operand`."""
    layout = laid_out(value, shape)
    slope = None if layout is None else Slope("reciprocal", operand, layout)
    return None if slope is None else replace(value.slabs[0], slopes=(*value.slabs[0].slopes, slope))


def laid_out(value: Made, shape: Shape) -> Layout | None:
    """From a parameter to a value that is all of it and may have one more slope; else None."""
    if not is_one_slab(value) or any(one.name in SLICED for one in value.slabs[0].slopes):
        return None
    (slab,) = value.slabs
    return layout_in(Piece(slab.parameter, 0, 0, *shape[:1] or (1,)), shape, view_of(slab))


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


def own_number(node: fx.Node, operand: fx.Node, layout: Layout) -> Slope | None:
    """`v / σ` or `v * σ`, with σ one number, or one for every slice along a dimension of the parameter. Not for every
    element: what the change of σ takes off, and a block leaves out, would be all there is."""
    name = DIVIDED if op_name(node) == "div" else MULTIPLIED
    by: Any = node.args[1] if node.args[0] is operand else node.args[0]
    while op_name(by) in EXPANDS:
        by = by.args[0]
    value = by.meta.get("val")
    dim = slices(tuple(value.shape), layout) if isinstance(value, Tensor) else None
    if dim is None or math.prod(layout.shape) == (1 if dim == WHOLE else layout.shape[dim]):
        return None
    return Slope(name, operand, layout, by, (None if dim == WHOLE else dim,))


def product(node: fx.Node, operand: fx.Node, layout: Layout, other: Shape) -> Slope | None:
    """`v * e` or `v / e`, with e one number, or one for every slice."""
    left, right = node.args
    by, dim = left if right is operand else right, slices(other, layout)
    assert isinstance(by, fx.Node), "bug in kfac_fx: a product of one node"
    return None if dim is None else Slope(TIMES if op_name(node) == "mul" else OVER, operand, layout, by, (dim, 0.0))


def slices(sizes: Shape, layout: Layout) -> int | None:
    """The dimension of a parameter along which a factor of these sizes varies, WHOLE if along none; None if the factor
    varies otherwise or broadcasts the parameter."""
    new = len(layout.result) - len(sizes)
    several = [new + dim for dim, size in enumerate(sizes) if size != 1]
    if not several:
        return WHOLE if new >= 0 else None
    dim, fits = several[0], len(several) == 1 and layout.result == layout.shape and not reordered(layout)
    return dim if fits and new >= 0 and sizes[dim - new] == layout.shape[dim] else None


def reordered(layout: Layout) -> bool:
    """Whether the elements are in another order than in the parameter."""
    places = whole(layout.shape)
    view = viewed(layout, places)
    return view is None or not view.is_contiguous()


MAKERS = {"batch_norm": standardization, "_weight_norm": normalization, "div": own_number, "mul": own_number}
