"""Uses by the gradients of whole cases: the parameter's matrix has a group for every element, of one input and output.

x * λ(q, k)         a function of small parameters, with its Jacobian
x * g + g           the gain's rows are inputs, the shift's are ones: one matrix of both has no other columns
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..ir import KEPT, Bound, Use
from ..matching.jacobians import by_jacobian, jacobian_of
from ..matrix import Layout, Shape
from ..words.pieces import viewed, whole
from ..words.uses import JACOBIAN


def flattened(use: Use, shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """A use of every parameter behind a function of its own, and what is left of the use."""
    made = {role: one for role, one in use.made.items() if not by_jacobian(one[0])}
    for role in use.made.keys() - made.keys():
        value, canonical = use.made[role]
        for slab in value.slabs:
            (slope,) = slab.slopes
            own = shapes[slab.parameter]
            attrs = {**unmasked(use), JACOBIAN: jacobian_of(slope.operand, slab.parameter)}
            bound = Bound(slab.parameter, Layout(own), alone(own))
            yield replace(use, parameters={"weight": bound}, made={}, attrs=attrs, flat=canonical)
    if made or use.parameters:
        yield replace(use, made=made) if use.made else use


def flat(use: Use) -> Use | None:
    """The use of one parameter that scales or shifts, over the matrix of its elements; None of another."""
    ((role, bound),) = use.parameters.items()
    own = alone(bound.layout.shape)
    if role == "weight" and same(bound.layout, own):
        return use
    apart = use.gain_of or use.flat or use.factor or not all(step.keeps_elements for step in use.through)
    if apart or bound.layout.result[2:] not in ((), (1,)):
        return None
    changed = {"weight": Bound(bound.parameter, Layout(own.shape), own, bound.scale)}
    return replace(use, parameters=changed, attrs=unmasked(use), flat=bound.layout)


def alone(shape: Shape) -> Layout:
    """[elements, 1, 1]"""
    return Layout(shape).reshape((math.prod(shape), 1, 1))


def same(one: Layout, other: Layout) -> bool:
    mine, its = (viewed(layout, whole(layout.shape)) for layout in (one, other))
    return mine is not None and its is not None and mine.shape == its.shape and mine.stride() == its.stride()


def unmasked(use: Use) -> dict[str, Any]:
    """Padding is in the gradient of a case; what is sent back from there is nothing."""
    return {name: value for name, value in use.attrs.items() if name != KEPT}
