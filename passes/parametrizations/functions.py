"""Functions of parameters, found in a graph: what `elementwise` and `normalized` declare, in all spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from ..graphs.edit import attribute
from ..graphs.labels import Label, parameters_behind
from ..graphs.operations import VIEWS, op_name
from ..matrix import Shape
from ..pieces import Made, Slab, view_of
from .elementwise import DERIVATIVES, Elementwise, elementwise
from .normalized import MAKERS, Centered, Scaled, WithGain, dim_of, laid_out, scaled_by
from .slices import called, is_one_slab, without_data

FUNCTIONS = {*DERIVATIVES, "batch_norm", "_weight_norm"}
SPREADS = {"var_mean", "std_mean"}


class Functions:
    """Functions of parameters, as they are found in a graph. known: the expressions that are found so far."""

    def __init__(self, root: nn.Module, label: Mapping[fx.Node, Label], known: Mapping[fx.Node, Any]) -> None:
        self.root, self.label, self.known = root, label, known

    def of(self, node: fx.Node, operand: fx.Node, value: Made, other: Shape | None = None) -> Made | None:
        """A function of every element, or of every slice, of one slab.

        other: the shape of what it is multiplied with or divided by, if that does not depend on the parameter.
        """
        (slab,) = value.slabs
        name, plain = op_name(node), value
        if other is None and name in ("mul", "div") and [type(step) for step in slab.slopes] == [Centered]:
            plain = Made(value.shape, (replace(slab, slopes=()),))
        layout = laid_out(plain, self.shape(slab))
        multiple = name in MAKERS and (slab.scale != 1.0 or plain.slabs[0].slopes)
        if layout is None or multiple:
            return None
        make = MAKERS.get(name, elementwise)
        step = make(node, operand, layout) if other is None else scaled_by(node, operand, layout, other)
        if isinstance(step, WithGain):
            step = replace(step, gain=self.gain(step))
        return None if step is None else Made(value.shape, (replace(slab, slopes=(*slab.slopes, step)),))

    def gain(self, step: WithGain) -> Slab | None:
        """The parameter that slices are multiplied by, if it is a whole one in its own order."""
        value = None if step.factor is None else self.known.get(step.factor)
        if step.factor is None or not isinstance(value, Made) or not is_one_slab(value):
            return None
        slab, shape = value.slabs[0], self.shape(value.slabs[0])
        layout = laid_out(value, shape)
        if isinstance(step, Scaled) and step.divides and layout is not None:
            slab = replace(slab, slopes=(*slab.slopes, Elementwise(step.factor, layout, "reciprocal")))
        plain, size = all(isinstance(one, Elementwise) for one in slab.slopes), math.prod(shape)
        return slab if plain and view_of(slab).is_contiguous() and math.prod(slab.shape) == size else None

    def shape(self, slab: Slab) -> Shape:
        """Of the slab's parameter."""
        return tuple(attribute(self.root, slab.parameter).shape)

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
        layout = laid_out(value, self.shape(slab))
        if layout is None or slab.slopes or slab.scale != 1.0 or dim_of(shape, layout) != 0:
            return None
        if not is_mean(mean, slab.parameter, self.known):
            return None
        return Made(value.shape, (replace(slab, slopes=(Centered(operand, layout, 0),)),))

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


# --- means of filters, whichever way they are written: v.mean((1, 2, 3), keepdim=True), v.flatten(1).mean(1), ... -----


def is_mean(node: fx.Node, parameter: str, known: Mapping[fx.Node, Any]) -> bool:
    """Whether a node is the mean of a parameter over all dimensions but the first. known: the values of expressions."""
    left = dimensions_left(node, parameter, known)
    return left is not None and filters_only(left)


def dimensions_left(node: fx.Node, parameter: str, known: Mapping[fx.Node, Any]) -> list[bool] | None:
    """Of the parameter, or of it as filters [o, ...], which dimensions are no mean yet; None for anything else."""
    value = known.get(node)
    if isinstance(value, Made):
        entire = is_one_slab(value) and view_of(value.slabs[0]).is_contiguous()
        plain = entire and value.slabs[0].parameter == parameter and not value.slabs[0].slopes
        return [True] * len(value.shape) if plain and value.slabs[0].scale == 1.0 else None
    name, source = op_name(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "getitem" and node.args[1] == 1 and op_name(source) in SPREADS:
        return averaged(source, parameter, known)
    if name == "mean":
        return averaged(node, parameter, known)
    left = dimensions_left(source, parameter, known) if name in VIEWS else None
    return [True] if left is not None and filters_only(left) else None


def averaged(node: fx.Node, parameter: str, known: Mapping[fx.Node, Any]) -> list[bool] | None:
    """What is left after the mean that a node takes."""
    source: Any = node.args[0]
    left = dimensions_left(source, parameter, known)
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if left is None or dims is None:
        return None
    over = {dim % len(left) for dim in ([dims] if isinstance(dims, int) else dims)}
    keepdim = node.kwargs.get("keepdim", len(node.args) > 2 and node.args[-1] is True)
    return [remains and n not in over for n, remains in enumerate(left) if keepdim or n not in over]


def filters_only(left: list[bool]) -> bool:
    return left[:1] == [True] and not any(left[1:])
