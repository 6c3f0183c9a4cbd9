"""Weights that are products of matrices, in which parameters are factors.

    linear(x, a @ b)                        rows of a: b x; gradient rows of b: aᵀ d
    linear(x, kron(a, b))                   a meets parts of x that b was applied to, b those that a was
    linear(x, (a @ b) * (c @ d))            a, with H = c @ d: output o has rows of its own, Σ_i H[o, i] b[:, i] x[i];
                                            b: every input has gradient rows of its own
    linear(x, w + s * (a @ b))              w, and each factor
    x @ (w + einsum("eor,eri->eio", a, b))  the same in every group, for stacked weights (experts)

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
from collections.abc import Iterator, Mapping, Sequence
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
from ..parametrization import (
    INPUTS,
    OUTPUTS,
    NodeValues,
    ParameterExpr,
    Parametrization,
    Partner,
    Piece,
    ProductTerm,
    RowPair,
    RowsStep,
    Value,
    WeightExample,
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
    side: where the matrices of a stack are side by side in one group of it, "outputs" or "inputs"; None: nowhere.
    """

    partners: tuple[Partner, ...]
    turned: bool
    side: str | None = None

    @property
    def nodes(self) -> dict[str, Value]:
        return {str(number): partner.node for number, partner in enumerate(self.partners)}

    def step(self) -> RowsStep:
        partners = [(str(n), p.kind, p.shape, p.turned, p.order) for n, p in enumerate(self.partners)]
        turned, side, stacked = self.turned, self.side, len(self.partners[0].shape) == 3

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            rows, grad_rows = map(with_group if stacked else without_group, both)
            if side is not None:
                rows, grad_rows = by_stack(rows, grad_rows, partners[0][2][0], side)
            left, right = (rows, grad_rows) if turned else (grad_rows, rows)
            times: Tensor | None = None  # a Hadamard product that waits for the next product of matrices
            for name, kind, shape, other_turned, order in partners:
                other = tensors[name].permute(order) if order else tensors[name]
                other = other.reshape(shape).to(grad_rows)
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


def with_group(rows: Tensor) -> Tensor:
    """[N, S, d] -> [N, S, 1, d]"""
    return rows.unsqueeze(2) if rows.dim() == 3 else rows


def by_stack(rows: Tensor, grad_rows: Tensor, groups: int, side: str) -> RowPair:
    """[N, S, 1, g d] of one side, and [N, S, 1, e] of the other -> [N, S, g, d] and [N, S, g, e]."""
    rows, grad_rows = (
        tensor.squeeze(2).unflatten(-1, (groups, -1)) if side == name else tensor.expand(-1, -1, groups, -1)
        for tensor, name in ((rows, INPUTS), (grad_rows, OUTPUTS))
    )
    return rows, grad_rows


def times_matrix(rows: Tensor, matrix: Tensor) -> Tensor:
    """matrix [m, d] times every row; or [g, m, d], the matrix of its group."""
    if matrix.dim() == 3:
        return torch.einsum("nsgd,gmd->nsgm", rows, matrix)
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
    """The value of kron(a, b), of a * b of one shape, or of a product of matrices or of stacks of them; None where no
    parameter is such a factor."""
    name, (a, b) = op_name(node), operands
    shape: Shape
    left, right = (operand for operand in node.args if isinstance(operand, fx.Node))
    if name in ("matmul", "einsum"):
        equation = str(node.args[0]) if name == "einsum" else MATMULS.get((len(a.shape), len(b.shape)), "")
        return contracted(equation, (left, right), operands, root)
    if name == "kron" and len(a.shape) == len(b.shape) > 1 and math.prod(a.shape[2:]) == 1:
        shape, of_a, of_b = tuple(m * n for m, n in zip(a.shape, b.shape, strict=True)), KRON_LEFT, KRON_RIGHT
    elif name == "mul" and a.shape == b.shape and len(a.shape) > 1 and not a.slices and not b.slices:
        shape, of_a, of_b = a.shape, TIMES, TIMES
    else:
        return None
    terms = [
        replace(factor, shape=matrix(shape), partners=(Partner(kind, other, matrix(its)), *factor.partners))
        for value, kind, other, its in ((a, of_a, right, b.shape), (b, of_b, left, a.shape))
        for factor in factors_in(value, root, matrix(value.shape))
    ]
    return ParameterExpr(shape, (), tuple(terms)) if terms else None


def contracted(
    equation: str, nodes: tuple[fx.Node, fx.Node], operands: Sequence[ParameterExpr], root: nn.Module
) -> ParameterExpr | None:
    """The value of einsum(equation, a, b), if it is a product of two matrices, or of every two in two stacks."""
    orders = matrices_in(equation)
    if orders is None or any(
        len(order) != len(value.shape) for order, value in zip(orders.operands, operands, strict=True)
    ):
        return None
    sizes = [tuple(value.shape[d] for d in order) for order, value in zip(orders.operands, operands, strict=True)]
    (stack, left, summed), right = orders.split(sizes[0]), orders.split(sizes[1], last=True)[2]
    shapes = ((*stack, left, summed), (*stack, summed, right))
    size = dict(zip(orders.letters[0], sizes[0], strict=True)) | dict(zip(orders.letters[1], sizes[1], strict=True))
    plain = [() if order == tuple(range(len(order))) else order for order in orders.operands]
    terms = [
        replace(factor, shape=(*stack, left, right), partners=(partner, *factor.partners))
        for n, partner in enumerate(
            (Partner(RIGHT, nodes[1], shapes[1], order=plain[1]), Partner(LEFT, nodes[0], shapes[0], order=plain[0]))
        )
        for factor in factors_in(operands[n], root, shapes[n], plain[n])
    ]
    if not terms:
        return None
    terms = list(map(turned, terms)) if orders.turned else terms
    return ParameterExpr(tuple(size[k] for k in orders.result), (), tuple(terms))


MATMULS = {(2, 2): "lm,mr->lr", (3, 3): "glm,gmr->glr"}  # of matrices and of stacks


@dataclass(frozen=True)
class Matrices:
    """An einsum that is a product of matrices [stack, left, summed] and [stack, summed, right].

    operands: the orders that bring the dimensions of the two operands into this order; letters: their indices then.
    counts: how many indices are of the stack, and on the left, summed and on the right.
    result: the indices of the result. turned: whether it is [stack, right, left].
    """

    operands: tuple[Shape, Shape]
    letters: tuple[str, str]
    counts: tuple[int, int, int, int]
    result: str
    turned: bool

    def split(self, sizes: Shape, last: bool = False) -> tuple[Shape, int, int]:
        """(the size of the stack or nothing, the sizes of the matrix) of an operand. last: of the second one."""
        stacked, left, summed, _ = self.counts
        first = stacked + (summed if last else left)
        stack = (math.prod(sizes[:stacked]),) if stacked else ()
        return stack, math.prod(sizes[stacked:first]), math.prod(sizes[first:])


def matrices_in(equation: str) -> Matrices | None:
    """None unless every index is of the stack, on one side, or summed, and the result has them side by side."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = terms.partition(",")
    distinct = all(len(set(side)) == len(side) for side in (first, second, result))
    if not arrow or "." in equation or "," in second or not second or not distinct:
        return None
    stack = "".join(k for k in result if k in first and k in second)
    summed = "".join(k for k in first if k in second and k not in result)
    left, right = ("".join(k for k in result if k in side and k not in stack) for side in (first, second))
    if {*stack, *left, *summed} != set(first) or {*stack, *summed, *right} != set(second) or not (left and right):
        return None
    if not summed or result not in (stack + left + right, stack + right + left):
        return None
    letters = stack + left + summed, stack + summed + right
    orders = tuple(map(first.index, letters[0])), tuple(map(second.index, letters[1]))
    counts = len(stack), len(left), len(summed), len(right)
    return Matrices(orders, letters, counts, result, result != stack + left + right)


def matrix(shape: Shape) -> Shape:
    """Filters by all the rest."""
    return shape[0], math.prod(shape[1:])


def factors_in(value: ParameterExpr, root: nn.Module, shape: Shape, order: Shape = ()) -> list[ProductTerm]:
    """The parameters in an operand of a product, which is used with its dimensions in this order and of this shape."""
    terms = [product for product in value.products if not order and product.shape == shape]
    for slice_ in value.slices:
        whole_shape = tuple(attribute(root, slice_.parameter).shape)
        layout = layout_in(Piece(slice_.parameter, 0, 0, *whole_shape[:1] or (1,)), whole_shape, view_of(slice_))
        if layout is not None and slice_.shape == value.shape and not slice_.through:
            layout = layout.permute(order) if order else layout
            terms.append(ProductTerm(slice_.parameter, layout.reshape(shape), shape, (), slice_.scale))
    return terms


def reshaped(node: fx.Node, value: ParameterExpr, values: Mapping[fx.Node, Any]) -> ParameterExpr | None:
    """A view of products that leaves their elements in their order, or turns matrices."""
    rest = without_data(node.args[1:], values)
    if value.slices:
        return None
    dims = len(value.shape)
    turns = op_name(node) in PERMUTES and dims_after(node, dims, rest) == (*range(dims - 2), dims - 1, dims - 2)
    if turns and all(len(product.shape) == dims for product in value.products):
        return ParameterExpr(
            (*value.shape[:-2], *value.shape[:-3:-1]), (), tuple(turned(product) for product in value.products)
        )
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
    order = (0, 2, 1) if len(product.shape) == 3 else (1, 0)
    shape = tuple(product.shape[d] for d in order)
    return replace(product, layout=product.layout.permute(order), shape=shape, partners=partners)


def added(node: fx.Node, first: ParameterExpr, operands: Sequence[ParameterExpr], root: nn.Module) -> Any:
    """The value of baddbmm(first, a, b, alpha=s) and addmm(first, a, b, alpha=s); None as of a sum."""
    _, left, right = node.args
    alpha: Any = node.kwargs.get("alpha", 1.0)
    if node.kwargs.get("beta", 1) != 1:
        return None
    equation = MATMULS.get((len(operands[0].shape), len(operands[1].shape)), "")
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node), "bug in kfac_fx: a product of no tensors"
    product = multiple_of(contracted(equation, (left, right), operands, root), float(alpha))
    if product is None or first.shape != product.shape:
        return None
    if any(slice_.shape != first.shape for slice_ in first.slices):
        return None
    return ParameterExpr(first.shape, first.slices, (*first.products, *product.products))


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
    place = place_of(product.shape, value.shape, canonical)
    group = groups_of(product.partners)
    kinds = {partner.kind for partner in product.partners}
    in_groups = len(product.shape) == 3 or bool(group)
    if place is None or group is None or (ids and (in_groups or kinds & set(KRON_KINDS))):
        return None
    turns, side = place
    pattern = {"": "l r -> 1 l r", RIGHT: "l r -> l 1 r", LEFT: "l r -> r l 1"}[group]
    result = Layout(product.layout.result)
    result = result if len(result.shape) == 3 else result.rearrange(pattern)
    bound = Bound(product.parameter, product.layout, result.permute((0, 2, 1)) if turns else result, product.scale)
    return replace(use, parameters={"weight": bound}, exprs={}, through=(ProductFactor(product.partners, turns, side),))


def place_of(shape: Shape, seen: Shape, canonical: Layout) -> tuple[bool, str | None] | None:
    """(whether a layer's matrix is the product transposed, in each of its groups; the side on which one group holds a
    whole stack of products, if any); None if it is neither."""
    stack = (1, *shape)[-3:]
    wanted = unallocated(stack).stride()
    for side, view in stacks_in(canonical, seen, stack[0]):
        for transposed, matrices in ((False, view), (True, view.mT)):
            strides = zip(stack, matrices.stride(), wanted, strict=True)
            if tuple(matrices.shape) == stack and all(size == 1 or step == other for size, step, other in strides):
                return transposed, side
    return None


def stacks_in(canonical: Layout, seen: Shape, groups: int) -> Iterator[tuple[str | None, Tensor]]:
    """The views [groups, o, i] of a weight that a layer lays out as a matrix: its own groups or, if it has one, the
    matrices that are side by side in its outputs or in its inputs."""
    whole = viewed(canonical, unallocated(seen))
    if whole is not None and whole.dim() == 3 and whole.shape[0] == groups:
        yield None, whole
    if groups == 1 or not canonical.steps or len(canonical.result) != 3 or canonical.result[0] != 1:
        return
    last = canonical.steps[-1]
    before = Layout(canonical.shape, canonical.steps[: -1 if last.order is None else None])  # it may merge dimensions
    apart, (_, o, i) = viewed(before, unallocated(seen)), canonical.result
    for side, split in ((OUTPUTS, (groups, o // groups, i)), (INPUTS, (o, groups, i // groups))):
        view = None if apart is None else split_view(apart, split)
        if view is not None:
            yield side, view if side == OUTPUTS else view.transpose(0, 1)


def split_view(tensor: Tensor, shape: Shape) -> Tensor | None:
    """None where elements would be copied, or do not fit."""
    if math.prod(shape) != tensor.numel():
        return None
    return viewed(Layout(tuple(tensor.shape)).reshape(shape), tensor)


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
    "stack": WeightExample(
        lambda w, b: (w.reshape(2, 2, 4) @ b.reshape(2, 4, 4)).reshape(4, 4), {"w": (4, 4), "b": (8, 4)}
    ),
    "kronecker": WeightExample(lambda w, c: torch.kron(c, w), {"w": (2, 2), "c": (2, 2)}),
    "hadamard": WeightExample(
        lambda w, b, c, d: (w @ b) * (c @ d), {"w": (4, 2), "b": (2, 4), "c": (4, 3), "d": (3, 4)}
    ),
}
