"""Weights that are products of matrices, in which parameters are factors.

    linear(x, a @ b)                        rows of a: b x; gradient rows of b: aᵀ d
    linear(x, kron(a, b))                   a meets parts of x that b was applied to, b those that a was
    linear(x, (a @ b) * (c @ d))            a, with H = c @ d: output o has rows of its own, Σ_i H[o, i] b[:, i] x[i];
                                            b: every input has gradient rows of its own
    linear(x, w + s * (a @ b))              w, and each factor

W is linear in each of its factors, so every one is exact for what the others are. A weight Hadamard-multiplied by
another one has no matrix of rows and gradient rows, unless it is a product itself: each row of a, or column of b, is a
group. (LoHa and LoKr: Yeh et al. 2024; Hyeon-Woo et al. 2022.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from ..graphs.edit import attribute
from ..graphs.labels import differentiated
from ..graphs.operations import PERMUTES, op_name
from ..ir import Bound, Use
from ..matrix import Layout, Shape
from ..pieces import Made, Piece, Product, Step, layout_in, view_of, viewed, whole
from ..registration import Factor
from .slices import called, dims_after, scaled, without_data

LEFT, RIGHT, TIMES, KRON_LEFT, KRON_RIGHT = "left", "right", "times", "kron left", "kron right"
KRON = (KRON_LEFT, KRON_RIGHT)
OTHER_SIDE = {LEFT: RIGHT, RIGHT: LEFT}
MULTIPLIES = {"matmul", "kron", "mul", "div"}
KEEPS_ORDER = {"reshape", "flatten", "view", "unflatten", "reshape_as", "squeeze", "unsqueeze", "view_as"}


# --- what a node is a product of ------------------------------------------------------------------------------------


def product(node: fx.Node, operands: Sequence[Made], root: nn.Module) -> Made | None:
    """The value of matmul(a, b), kron(a, b) or a * b of one shape; None where no parameter is such a factor."""
    name, (a, b) = op_name(node), operands
    shape: Shape
    left, right = (one for one in node.args[:2] if isinstance(one, fx.Node))
    if name == "matmul" and len(a.shape) == len(b.shape) == 2:
        shape, of_a, of_b = (a.shape[0], b.shape[1]), RIGHT, LEFT
    elif name == "kron" and len(a.shape) == len(b.shape) > 1 and math.prod(a.shape[2:]) == 1:
        shape, of_a, of_b = tuple(m * n for m, n in zip(a.shape, b.shape, strict=True)), KRON_LEFT, KRON_RIGHT
    elif name == "mul" and a.shape == b.shape and len(a.shape) > 1 and not a.slabs and not b.slabs:
        shape, of_a, of_b = a.shape, TIMES, TIMES
    else:
        return None
    found = [
        replace(one, shape=matrix(shape), steps=(Step(kind, other, matrix(its)), *one.steps))
        for value, kind, other, its in ((a, of_a, right, b.shape), (b, of_b, left, a.shape))
        for one in factors(value, root)
    ]
    return Made(shape, (), tuple(found)) if found else None


def matrix(shape: Shape) -> Shape:
    """Filters by all the rest."""
    return shape[0], math.prod(shape[1:])


def factors(value: Made, root: nn.Module) -> list[Product]:
    found = list(value.products)
    for slab in value.slabs:
        own = tuple(attribute(root, slab.parameter).shape)
        layout = layout_in(Piece(slab.parameter, 0, 0, *own[:1] or (1,)), own, view_of(slab))
        if layout is not None and slab.shape == value.shape and not slab.slopes:
            shape = matrix(value.shape)
            found.append(Product(slab.parameter, layout.reshape(shape), shape, (), slab.scale))
    return found


def reshaped(node: fx.Node, value: Made, known: Mapping[fx.Node, Any]) -> Made | None:
    """A view of products that leaves their elements in their order, or turns a matrix."""
    rest = without_data(node.args[1:], known)
    if value.slabs:
        return None
    if op_name(node) in PERMUTES and dims_after(node, len(value.shape), rest) == (1, 0):
        return Made(value.shape[::-1], (), tuple(map(turned, value.products)))
    if op_name(node) not in KEEPS_ORDER:
        return None
    return Made(tuple(called(node, (whole(value.shape), *rest)).shape), (), value.products)


def turned(one: Product) -> Product:
    steps = [replace(step, kind=OTHER_SIDE.get(step.kind, step.kind), turned=not step.turned) for step in one.steps]
    return replace(one, layout=one.layout.permute((1, 0)), shape=one.shape[::-1], steps=tuple(steps))


def added(node: fx.Node, first: Made, second: Any) -> Made | None:
    """A sum, or a difference, in which there is a product."""
    if not isinstance(second, Made) or first.shape != second.shape or not (first.products or second.products):
        return None
    if node.kwargs or len(node.args) > 2 or any(slab.shape != first.shape for slab in (*first.slabs, *second.slabs)):
        return None
    other = scaled(second, -1.0) if op_name(node) == "sub" else second
    assert other is not None, "bug in kfac_fx: a value without its negative"
    return Made(first.shape, (*first.slabs, *other.slabs), (*first.products, *other.products))


def complete(value: Made, node: fx.Node) -> Made | None:
    """Without the products of parameters that also reach the node on a way that is none of these; None if there is
    nothing left, or if there are slabs, which would hide such a parameter."""
    found = Counter([*(slab.parameter for slab in value.slabs), *(one.parameter for one in value.products)])
    ways = ways_to(node, {})
    lost = {name for name, number in found.items() if ways[name] != number}
    products = tuple(one for one in value.products if one.parameter not in lost)
    if (lost and value.slabs) or not products:
        return None
    return replace(value, products=products)


def ways_to(node: fx.Node, known: dict[fx.Node, Counter[str]]) -> Counter[str]:
    """In how many ways every parameter reaches a node."""
    if node not in known:
        if node.op == "get_attr":
            known[node] = Counter({str(node.target): 1})
        else:
            known[node] = sum((ways_to(one, known) for one in differentiated(node)), Counter())
    return known[node]


# --- uses -----------------------------------------------------------------------------------------------------------


def uses_of_factors(use: Use, made: Made, canonical: Layout, ids: bool) -> list[Use]:
    """Of all parameters of which every product has rows and gradient rows, in one form of matrix."""
    found = [(one.parameter, use_of_factor(use, made, one, canonical, ids)) for one in made.products]
    forms: dict[str, set[Any]] = {}
    for name, own in found:
        forms.setdefault(name, set()).add(own and form_of(own))
    right = {name for name, own in forms.items() if None not in own and len({form[0] for form in own}) == 1}
    return [own for name, own in found if own is not None and name in right]


def form_of(use: Use) -> tuple[int, bool]:
    """How many groups a factor's matrix has."""
    (bound,) = use.parameters.values()
    return bound.layout.result[0], use.factor is not None and use.factor.turned


def use_of_factor(use: Use, made: Made, one: Product, canonical: Layout, ids: bool) -> Use | None:
    """The use of a factor of a weight; None where it has no rows and gradient rows."""
    turns = turns_to(one.shape, made.shape, canonical)
    group = groups_of(one.steps)
    kinds = {step.kind for step in one.steps}
    if turns is None or group is None or (ids and (group or kinds & set(KRON))):
        return None
    result = Layout(one.layout.result).rearrange(
        {"": "l r -> 1 l r", RIGHT: "l r -> l 1 r", LEFT: "l r -> r l 1"}[group]
    )
    if turns:
        result = result.permute((0, 2, 1))
    bound = Bound(one.parameter, one.layout, result, one.scale)
    nodes = {f"factor{k}": step.other for k, step in enumerate(one.steps)}
    steps = tuple((step.kind, step.shape, step.turned) for step in one.steps)
    factor = Factor(steps, turns)
    return replace(use, parameters={"weight": bound}, made={}, attrs={**use.attrs, **nodes}, factor=factor)


def turns_to(shape: Shape, seen: Shape, canonical: Layout) -> bool | None:
    """Whether the one group of a layer's matrix is the product transposed; None if it is neither."""
    view = viewed(canonical, whole(seen))
    if view is None or view.dim() != 3 or view.shape[0] != 1:
        return None
    for turned_, own in ((False, view[0]), (True, view[0].mT)):
        strides = zip(own.shape, own.stride(), (shape[1], 1), strict=True)
        if tuple(own.shape) == shape and all(size == 1 or step == wanted for size, step, wanted in strides):
            return turned_
    return None


def groups_of(steps: Sequence[Step]) -> str | None:
    """Which factor of a Hadamard product's factor it is, "left" or "right", whose columns or rows are groups; "" where
    there are no groups; None where there are no rows."""
    group, waits = "", False
    for step in steps:
        if step.kind in OTHER_SIDE:
            if group and step.kind != group:
                return None
            group, waits = step.kind if waits else group, False
        elif group or (waits and step.kind != TIMES):
            return None
        else:
            waits = step.kind == TIMES
    return None if waits else group
