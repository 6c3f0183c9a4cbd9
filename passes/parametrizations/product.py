"""Weights that are products of matrices, in which parameters are factors.

    linear(x, a @ b)                        rows of a: b x; gradient rows of b: aᵀ d
    linear(x, kron(a, b))                   a meets parts of x that b was applied to, b those that a was
    linear(x, (a @ b) * (c @ d))            a, with H = c @ d: output o has rows of its own, Σ_i H[o, i] b[:, i] x[i];
                                            b: every input has gradient rows of its own
    linear(x, w + s * (a @ b))              w, and each factor

The weight is linear in each of its factors, so each is exact for the values of the others. Let the gradient of the
weight be Σ l rᵀ over positions. A factor V that the partner C multiplies

    C V  has Cᵀ l        V C  has C r        V ⊗ C  has a row for every row of C at each position

A weight that is Hadamard-multiplied by another one has no matrix of rows and gradient rows, unless it is a product
itself: each row of its left factor, or column of its right one, is a group then. (LoHa and LoKr: Yeh et al. 2024;
Hyeon-Woo et al. 2022.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graphs.edit import attribute
from ..graphs.labels import differentiated
from ..graphs.operations import PERMUTES, computed, dims_after, op_name
from ..ir import Bound, Use
from ..matrix import Layout, Shape
from ..parametrization import NodeValues, Parametrization, RowPair, RowsStep, Value, WeightExample
from ..pieces import (
    ParameterExpr,
    Partner,
    Piece,
    ProductTerm,
    layout_in,
    multiple_of,
    unallocated,
    view_of,
    viewed,
    without_data,
)

LEFT, RIGHT, TIMES, KRON_LEFT, KRON_RIGHT = "left", "right", "times", "kron left", "kron right"
KRON_KINDS = (KRON_LEFT, KRON_RIGHT)
OTHER_SIDE = {LEFT: RIGHT, RIGHT: LEFT}
MULTIPLIES = {"matmul", "kron", "mul", "div"}
KEEPS_ORDER = {"reshape", "flatten", "view", "unflatten", "reshape_as", "squeeze", "unsqueeze", "view_as"}


@dataclass(frozen=True)
class ProductFactor(Parametrization):
    """One factor of a weight that is a product.

    partners: what it is multiplied with, the last multiplication first.
    turned: whether the layer's matrix is the product transposed.
    """

    partners: tuple[Partner, ...]
    turned: bool

    @property
    def nodes(self) -> dict[str, Value]:
        return {str(number): partner.node for number, partner in enumerate(self.partners)}

    def step(self) -> RowsStep:
        partners = [(str(n), partner.kind, partner.shape, partner.turned) for n, partner in enumerate(self.partners)]
        turned = self.turned

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            rows, grad_rows = (without_group(side) for side in both)
            left, right = (rows, grad_rows) if turned else (grad_rows, rows)
            times: Tensor | None = None  # a Hadamard product that waits for the next product of matrices
            for name, kind, shape, other_turned in partners:
                other = tensors[name].reshape(shape).to(grad_rows)
                other = other.mT if other_turned else other
                if kind == TIMES:
                    times = other if times is None else times * other
                elif kind == LEFT and times is not None:
                    left, right, times = hadamard_groups(left, other.mT, times.mT), right.unsqueeze(-1), None
                elif kind == RIGHT and times is not None:
                    left, right, times = left.unsqueeze(-1), hadamard_groups(right, other, times), None
                elif kind == LEFT:
                    left = times_matrix(left, other.mT)
                elif kind == RIGHT:
                    right = times_matrix(right, other)
                else:
                    left, right = kronecker(left, right, other, kind)
            left, right = (side if side.dim() != 3 else side.unsqueeze(2) for side in (left, right))
            return (left, right) if turned else (right, left)

        return step

    @property
    def unmasked(self) -> str | None:
        repeats = any(partner.kind in KRON_KINDS for partner in self.partners)
        return "its weight is a Kronecker product, whose factors have several rows a position" if repeats else None


def without_group(rows: Tensor) -> Tensor:
    """[N, S, 1, d] -> [N, S, d]; ids as they are."""
    return rows.squeeze(2) if rows.dim() == 4 else rows


def times_matrix(rows: Tensor, matrix: Tensor) -> Tensor:
    """matrix [m, d] times every row."""
    if rows.is_floating_point():
        return rows @ matrix.mT
    return torch.where((rows >= 0).unsqueeze(-1), F.embedding(rows.clamp(min=0), matrix.mT.contiguous()), 0)


def hadamard_groups(rows: Tensor, matrix: Tensor, times: Tensor) -> Tensor:
    """rows [N, S, d], matrix [m, d], times [e, d] -> Σ_d times[e, d] matrix[m, d] rows[d], [N, S, e, m]."""
    return ((rows.unsqueeze(-2) * matrix) @ times.mT).mT


def kronecker(left: Tensor, right: Tensor, other: Tensor, kind: str) -> RowPair:
    """The rows of a factor V of V ⊗ C or C ⊗ V: one position per row of C, or per column if there are fewer columns."""
    outputs, inputs = other.shape
    if kind == KRON_LEFT:
        left, right = (side.unflatten(-1, (-1, size)).mT for side, size in ((left, outputs), (right, inputs)))
    else:
        assert kind == KRON_RIGHT, f"bug in kfac_fx: {kind} is no step of a product"
        left, right = (side.unflatten(-1, (size, -1)) for side, size in ((left, outputs), (right, inputs)))
    if outputs <= inputs:  # [N, S, rows of C, i]
        right = other @ right
    else:
        left = other.mT @ left
    return left.flatten(1, 2), right.flatten(1, 2)


# --- what a node is a product of ------------------------------------------------------------------------------------


def product_of(node: fx.Node, operands: Sequence[ParameterExpr], root: nn.Module) -> ParameterExpr | None:
    """The value of matmul(a, b), kron(a, b) or a * b of one shape; None where no parameter is such a factor."""
    name, (a, b) = op_name(node), operands
    shape: Shape
    left, right = (operand for operand in node.args[:2] if isinstance(operand, fx.Node))
    if name == "matmul" and len(a.shape) == len(b.shape) == 2:
        shape, of_a, of_b = (a.shape[0], b.shape[1]), RIGHT, LEFT
    elif name == "kron" and len(a.shape) == len(b.shape) > 1 and math.prod(a.shape[2:]) == 1:
        shape, of_a, of_b = tuple(m * n for m, n in zip(a.shape, b.shape, strict=True)), KRON_LEFT, KRON_RIGHT
    elif name == "mul" and a.shape == b.shape and len(a.shape) > 1 and not a.slices and not b.slices:
        shape, of_a, of_b = a.shape, TIMES, TIMES
    else:
        return None
    terms = [
        replace(factor, shape=matrix(shape), partners=(Partner(kind, other, matrix(its)), *factor.partners))
        for value, kind, other, its in ((a, of_a, right, b.shape), (b, of_b, left, a.shape))
        for factor in factors_in(value, root)
    ]
    return ParameterExpr(shape, (), tuple(terms)) if terms else None


def matrix(shape: Shape) -> Shape:
    """Filters by all the rest."""
    return shape[0], math.prod(shape[1:])


def factors_in(value: ParameterExpr, root: nn.Module) -> list[ProductTerm]:
    terms = list(value.products)
    for slice_ in value.slices:
        whole_shape = tuple(attribute(root, slice_.parameter).shape)
        layout = layout_in(Piece(slice_.parameter, 0, 0, *whole_shape[:1] or (1,)), whole_shape, view_of(slice_))
        if layout is not None and slice_.shape == value.shape and not slice_.through:
            shape = matrix(value.shape)
            terms.append(ProductTerm(slice_.parameter, layout.reshape(shape), shape, (), slice_.scale))
    return terms


def reshaped(node: fx.Node, value: ParameterExpr, values: Mapping[fx.Node, Any]) -> ParameterExpr | None:
    """A view of products that leaves their elements in their order, or turns a matrix."""
    rest = without_data(node.args[1:], values)
    if value.slices:
        return None
    if op_name(node) in PERMUTES and dims_after(node, len(value.shape), rest) == (1, 0):
        return ParameterExpr(value.shape[::-1], (), tuple(map(turned, value.products)))
    if op_name(node) not in KEEPS_ORDER:
        return None
    return ParameterExpr(
        tuple(computed(node, (unallocated(value.shape), *rest), node.kwargs).shape), (), value.products
    )


def turned(product: ProductTerm) -> ProductTerm:
    partners = tuple(
        replace(partner, kind=OTHER_SIDE.get(partner.kind, partner.kind), turned=not partner.turned)
        for partner in product.partners
    )
    return replace(product, layout=product.layout.permute((1, 0)), shape=product.shape[::-1], partners=partners)


def sum_of(node: fx.Node, first: ParameterExpr, second: Any) -> ParameterExpr | None:
    """A sum, or a difference, in which there is a product."""
    if not isinstance(second, ParameterExpr) or first.shape != second.shape or not (first.products or second.products):
        return None
    if (
        node.kwargs
        or len(node.args) > 2
        or any(slice_.shape != first.shape for slice_ in (*first.slices, *second.slices))
    ):
        return None
    other = multiple_of(second, -1.0) if op_name(node) == "sub" else second
    assert other is not None, "bug in kfac_fx: a value without its negative"
    return ParameterExpr(first.shape, (*first.slices, *other.slices), (*first.products, *other.products))


def complete(value: ParameterExpr, node: fx.Node) -> ParameterExpr | None:
    """A value without the products of parameters that also reach the node in another way. None if no product is left,
    or if there are slices, which would hide such a parameter."""
    counts = Counter(slice_.parameter for slice_ in value.slices)
    counts += Counter(product.parameter for product in value.products)
    ways = ways_to(node, {})
    lost = {name for name, number in counts.items() if ways[name] != number}
    products = tuple(product for product in value.products if product.parameter not in lost)
    if (lost and value.slices) or not products:
        return None
    return replace(value, products=products)


def ways_to(node: fx.Node, ways: dict[fx.Node, Counter[str]]) -> Counter[str]:
    """In how many ways every parameter reaches a node."""
    if node not in ways:
        if node.op == "get_attr":
            ways[node] = Counter({str(node.target): 1})
        else:
            ways[node] = sum((ways_to(operand, ways) for operand in differentiated(node)), Counter())
    return ways[node]


# --- uses -------------------------------------------------------------------------------------------------------------


def uses_of_factors(use: Use, value: ParameterExpr, canonical: Layout, ids: bool) -> list[Use]:
    """The uses of all parameters of which every product has rows and gradient rows, in one form of matrix."""
    factor_uses = [
        (product.parameter, use_of_factor(use, value, product, canonical, ids)) for product in value.products
    ]
    forms: dict[str, set[Any]] = {}
    for name, factor_use in factor_uses:
        forms.setdefault(name, set()).add(factor_use and groups_in(factor_use))
    alike = {name for name, groups in forms.items() if None not in groups and len(groups) == 1}
    return [factor_use for name, factor_use in factor_uses if factor_use is not None and name in alike]


def groups_in(use: Use) -> int:
    """How many groups a factor's matrix has."""
    (bound,) = use.parameters.values()
    return bound.layout.result[0]


def use_of_factor(use: Use, value: ParameterExpr, product: ProductTerm, canonical: Layout, ids: bool) -> Use | None:
    """The use of a factor of a weight; None where it has no rows and gradient rows."""
    turns = turns_to(product.shape, value.shape, canonical)
    group = groups_of(product.partners)
    kinds = {partner.kind for partner in product.partners}
    if turns is None or group is None or (ids and (group or kinds & set(KRON_KINDS))):
        return None
    pattern = {"": "l r -> 1 l r", RIGHT: "l r -> l 1 r", LEFT: "l r -> r l 1"}[group]
    result = Layout(product.layout.result).rearrange(pattern)
    bound = Bound(product.parameter, product.layout, result.permute((0, 2, 1)) if turns else result, product.scale)
    return replace(use, parameters={"weight": bound}, exprs={}, through=(ProductFactor(product.partners, turns),))


def turns_to(shape: Shape, seen: Shape, canonical: Layout) -> bool | None:
    """Whether the one group of a layer's matrix is the product transposed; None if it is neither."""
    view = viewed(canonical, unallocated(seen))
    if view is None or view.dim() != 3 or view.shape[0] != 1:
        return None
    for transposed, matrix in ((False, view[0]), (True, view[0].mT)):
        strides = zip(matrix.shape, matrix.stride(), (shape[1], 1), strict=True)
        if tuple(matrix.shape) == shape and all(size == 1 or step == wanted for size, step, wanted in strides):
            return transposed
    return None


def groups_of(partners: Sequence[Partner]) -> str | None:
    """Which factor of a Hadamard product's factor it is, "left" or "right", whose columns or rows are groups; "" where
    there are no groups; None where there are no rows."""
    group, waits = "", False
    for partner in partners:
        if partner.kind in OTHER_SIDE:
            if group and partner.kind != group:
                return None
            group, waits = partner.kind if waits else group, False
        elif group or (waits and partner.kind != TIMES):
            return None
        else:
            waits = partner.kind == TIMES
    return None if waits else group


EXAMPLES = {
    "product": WeightExample(lambda w, b: w @ b, {"w": (4, 4), "b": (4, 4)}),
    "kronecker": WeightExample(lambda w, c: torch.kron(c, w), {"w": (2, 2), "c": (2, 2)}),
    "hadamard": WeightExample(
        lambda w, b, c, d: (w @ b) * (c @ d), {"w": (4, 2), "b": (2, 4), "c": (4, 3), "d": (3, 4)}
    ),
}
