"""Functions of parameters, found in a graph: what `elementwise` and `normalized` declare, in all spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from ..graphs.edit import attribute
from ..graphs.labels import Label, parameters_behind
from ..graphs.operations import VIEWS, computed, op_name
from ..matrix import Shape
from ..pieces import ParameterExpr, Slice, is_one_slice, view_of, without_data
from ..torch_private import WEIGHT_NORM
from .elementwise import DERIVATIVES, Elementwise, elementwise
from .normalized import MAKERS, Centered, Scaled, WithGain, dim_of, laid_out, scaled_by

FUNCTIONS = {*DERIVATIVES, "batch_norm", WEIGHT_NORM}
SPREADS = {"var_mean", "std_mean"}


class Functions:
    """Functions of parameters in a graph. known: the values of the nodes so far, see `passes.expressions`."""

    def __init__(self, root: nn.Module, label: Mapping[fx.Node, Label], values: Mapping[fx.Node, Any]) -> None:
        self.root, self.label, self.values = root, label, values

    def of(
        self, node: fx.Node, operand: fx.Node, value: ParameterExpr, other: Shape | None = None
    ) -> ParameterExpr | None:
        """The value of a function of every element of `value`, or of every slice along a dimension.

        other: the shape of what `value` is multiplied with or divided by, if that does not depend on the parameter.
        """
        (slice_,) = value.slices
        name, plain = op_name(node), value
        if other is None and name in ("mul", "div") and [type(step) for step in slice_.through] == [Centered]:
            plain = ParameterExpr(value.shape, (replace(slice_, through=()),))
        layout = laid_out(plain, self.shape(slice_))
        multiple = name in MAKERS and (slice_.scale != 1.0 or plain.slices[0].through)
        if layout is None or multiple:
            return None
        make = MAKERS.get(name, elementwise)
        step = make(node, operand, layout) if other is None else scaled_by(node, operand, layout, other)
        if isinstance(step, WithGain):
            step = replace(step, gain=self.gain(step))
        return None if step is None else ParameterExpr(value.shape, (replace(slice_, through=(*slice_.through, step)),))

    def gain(self, step: WithGain) -> Slice | None:
        """The parameter that slices are multiplied by, if it is a whole one in its own order."""
        value = None if step.factor is None else self.values.get(step.factor)
        if step.factor is None or not isinstance(value, ParameterExpr) or not is_one_slice(value):
            return None
        slice_, shape = value.slices[0], self.shape(value.slices[0])
        layout = laid_out(value, shape)
        if isinstance(step, Scaled) and step.divides and layout is not None:
            slice_ = replace(slice_, through=(*slice_.through, Elementwise(step.factor, layout, "reciprocal")))
        plain, size = all(isinstance(function, Elementwise) for function in slice_.through), math.prod(shape)
        return slice_ if plain and view_of(slice_).is_contiguous() and math.prod(slice_.shape) == size else None

    def shape(self, slice_: Slice) -> Shape:
        """The shape of the slice's parameter."""
        return tuple(attribute(self.root, slice_.parameter).shape)

    def product(self, node: fx.Node, left: fx.Node, right: fx.Node) -> ParameterExpr | None:
        """The product of a weight and a factor, which may be another parameter or a number of the weight's own."""
        pairs = ((left, right), (right, left)) if op_name(node) == "mul" else ((left, right),)
        for operand, by in pairs:
            value, shape = self.values.get(operand), self.sizes(by)
            if not isinstance(value, ParameterExpr) or len(value.slices) != 1 or self.label[by].activation:
                continue
            behind, parameter = parameters_behind(by, self.label), {value.slices[0].parameter}
            if behind == parameter:
                scaled = self.of(node, operand, value)
                if scaled is not None or op_name(node) == "div":
                    return scaled
            scaled = None if shape is None or behind & parameter else self.of(node, operand, value, shape)
            if scaled is not None:
                return scaled
        return None

    def centered(self, node: fx.Node, operand: fx.Node, mean: fx.Node) -> ParameterExpr | None:
        """A weight without the mean of each of its filters."""
        value, shape = self.values.get(operand), self.sizes(mean)
        if not isinstance(value, ParameterExpr) or not is_one_slice(value) or shape is None or node.kwargs:
            return None
        (slice_,) = value.slices
        layout = laid_out(value, self.shape(slice_))
        if layout is None or slice_.through or slice_.scale != 1.0 or dim_of(shape, layout) != 0:
            return None
        if not is_mean(mean, slice_, self.values):
            return None
        return ParameterExpr(value.shape, (replace(slice_, through=(Centered(operand, layout, 0),)),))

    def sizes(self, node: fx.Node) -> Shape | None:
        value = self.values.get(node)
        if isinstance(value, ParameterExpr):
            return value.shape
        try:
            return self.shape_of(node)
        except ValueError:
            return None

    def shape_of(self, node: fx.Node) -> Shape:
        """The shape of a constant. Raises ValueError if it is not known."""
        value = attribute(self.root, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if value is None and all(operand in self.values for operand in node.all_input_nodes):
            value = computed(node, without_data(node.args, self.values), node.kwargs)
        if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise ValueError
        return tuple(value.shape)


# --- means of filters, whichever way they are written: v.mean((1, 2, 3), keepdim=True), v.flatten(1).mean(1), ... -----


def is_mean(node: fx.Node, weight: Slice, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a node is the mean of a whole parameter over all dimensions but the first.

    weight: all of the parameter. values: of the expressions in the graph.
    """
    left = dimensions_left(node, weight, values)
    return left is not None and filters_only(left)


def dimensions_left(node: fx.Node, weight: Slice, values: Mapping[fx.Node, Any]) -> list[bool] | None:
    """For each dimension of the parameter, or of its filters [o, ...], whether it is not averaged yet.

    None for a node that is no mean of the parameter.
    """
    value = values.get(node)
    if isinstance(value, ParameterExpr):
        if not is_one_slice(value):
            return None
        (slice_,) = value.slices
        entire = view_of(slice_).is_contiguous() and math.prod(slice_.shape) == math.prod(weight.shape)
        same = slice_.parameter == weight.parameter and slice_.scale == 1.0 and not slice_.through
        return [True] * len(value.shape) if entire and same else None
    name, source = op_name(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "getitem" and node.args[1] == 1 and op_name(source) in SPREADS:
        return averaged(source, weight, values)
    if name == "mean":
        return averaged(node, weight, values)
    left = dimensions_left(source, weight, values) if name in VIEWS else None
    return [True] if left is not None and filters_only(left) else None


def averaged(node: fx.Node, weight: Slice, values: Mapping[fx.Node, Any]) -> list[bool] | None:
    """The same after the mean that a node takes."""
    source: Any = node.args[0]
    left = dimensions_left(source, weight, values)
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if left is None or dims is None:
        return None
    over = {dim % len(left) for dim in ([dims] if isinstance(dims, int) else dims)}
    if 0 in over:
        return None  # a mean over filters: what is left of it would be taken for a number of each filter
    keepdim = node.kwargs.get("keepdim", len(node.args) > 2 and node.args[-1] is True)
    return [remains and n not in over for n, remains in enumerate(left) if keepdim or n not in over]


def filters_only(left: list[bool]) -> bool:
    return left[:1] == [True] and not any(left[1:])
