"""Fully connected layers in all the ways that torch writes them; bilinear layers, and those of experts.

    y = F.linear(x, w, b)     y = x @ w     y = w @ x     y = torch.tensordot(x, w, dims)
    y = torch.einsum("bti,oi->bto", x, w)     cases b, positions t, inputs i, outputs o

There is one row for each position. The weight [o, i] meets the last dimension of x or, from the left, the last but one.
Stacked weights are groups. The equation of an einsum says which index is a group, an input, an output or a position.

A bilinear layer is a matrix [o, i j] times the products x_i y_j of two inputs.

    y = grouped_mm(x, w, offs)      y = grouped_product(x, w, offs, grouped_mm)
    f(y)                       ->   f(with_row_mask(y, routed(x, offs)))

In a mixture of experts every expert is a group, and every row, sorted by expert, belongs to one group. `with_row_mask`
notes this in the graph: the mean over the inputs of an expert is over its own rows, not over those of all experts.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..approximations import EVERY_LAYER
from ..cases import with_row_mask
from ..graphs.operations import REQUIRED, XW, Spelling, X, op_name
from ..graphs.spelling import terms_of
from ..ir import Attrs
from ..matrix import Layout, Shape
from ..torch_private import GROUPED_MM, OpOverload, OpOverloadPacket
from .declaration import as_rows, by_group, layer, written


def columns_as_rows(tensor: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., d, S] -> [N, S, d]. Without N, every column is a case."""
    return as_rows(tensor.mT if tensor.dim() > 1 else tensor, attrs)


@layer(
    rows=as_rows,
    grad_rows=as_rows,
    where=lambda attrs: attrs.get("bias") in (None, attrs["weight"][:1]),
    leading=True,
    bias_along=-1,
    spelled=Spelling(F.linear, {**XW, "bias": None}, data_first=True),
    tf_kind="fully_connected",
    example=(
        lambda: (nn.Linear(5, 3), torch.randn(4, 5)),
        lambda: (nn.Linear(5, 3), torch.randn(4, 7, 2, 5)),
        lambda: (nn.Linear(5, 3, bias=False), torch.randn(4, 7, 5)),
        lambda: (nn.Linear(5, 3), torch.randn(5)),
    ),
)
def linear(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@linear.form(
    grad_rows=lambda dy, attrs: as_rows(dy.index_select(-1, attrs["index"]), attrs),
    bias_along=None,
    example=written(
        lambda x, w: F.linear(x, torch.index_copy(torch.ones(3, 5), 0, torch.tensor([2, 0]), w)), (4, 7, 5), w=(2, 5)
    ),
)
def some_outputs(x: Tensor, _base: Tensor, index: Tensor, *, weight: Tensor) -> Tensor:
    return F.linear(x, torch.index_copy(_base, 0, index, weight))


# --- a weight [i, o] on the right -----------------------------------------------------------------------------------


@linear.form(
    layouts={"weight": "i o -> o i"},
    spelled=Spelling(torch.matmul, {**X, "other": REQUIRED}),
    example=(
        written(lambda x, w: x @ w, (4, 7, 5), w=(5, 3)),
        written(lambda x, w: torch.matmul(x, w.t()), (5,), w=(3, 5)),
    ),
)
def product(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


# Without beta and alpha, here and below: with them it is another operation.
@linear.form(
    layouts={"weight": "i o -> o i"},
    spelled=Spelling(torch.addmm, {**X, "mat1": REQUIRED, "mat2": REQUIRED}),
    example=written(lambda x, w, b: torch.addmm(b, x, w), (4, 5), w=(5, 3), b=(3,)),
)
def addmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight)


def one_row(dy: Tensor, attrs: Attrs) -> Tensor:
    return as_rows(dy.unsqueeze(-1), attrs)


ONE_OUTPUT: dict[str, Any] = {
    "grad_rows": one_row,
    "layouts": {"weight": "i -> 1 i"},
    "bias_along": lambda attrs, dims: (1,),
}


@linear.form(
    **ONE_OUTPUT,
    example=(written(lambda x, w: x @ w, (4, 7, 5), w=(5,)), written(lambda x, w: torch.mv(x, w), (4, 5), w=(5,))),
)
def one_output(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


@linear.form(
    rows=lambda x, attrs: as_rows(x.to_dense(), attrs),
    layouts={"weight": "i o -> o i"},
    spelled=Spelling(torch.sparse.mm, {"sparse": REQUIRED, "dense": REQUIRED}),
    example=written(lambda x, w: torch.sparse.mm(x, w), (4, 5), w=(5, 3)),
)
def product_of_sparse(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.sparse.mm(x, weight)  # type: ignore[no-any-return]


# --- a weight [o, i] on the left ------------------------------------------------------------------------------------


FROM_LEFT: dict[str, Any] = {
    "rows": columns_as_rows,
    "grad_rows": columns_as_rows,
    "leading": False,
    "bias_along": lambda attrs, dims: attrs["weight"][:1] if dims == 1 else (attrs["weight"][0], 1),
}


@linear.form(
    **FROM_LEFT,
    example=(
        written(lambda x, w: w @ x, (4, 5, 7), w=(3, 5)),
        written(lambda x, w: torch.mm(w, x), (5, 4), w=(3, 5)),
        written(lambda x, w: torch.mv(w, x), (5,), w=(3, 5)),
    ),
)
def product_from_left(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(weight, x)


@linear.form(**FROM_LEFT, example=written(lambda x, w, b: torch.addmm(b, w, x), (5, 4), w=(3, 5), b=(3, 1)))
def addmm_from_left(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, weight, x)


# --- a stack of weights [..., i, o], each a group -------------------------------------------------------------------


def by_matrix(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., S, i] -> [N, S, g, i]"""
    return by_group(torch.atleast_2d(x), (*attrs["weight"][:-2], 1))


def grad_by_matrix(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., S, o] -> [N, S, g, o]. If x is a vector, there is no S."""
    return by_matrix(dy if dy.dim() >= len(attrs["weight"]) else dy.unsqueeze(-2), attrs)


def stacked_weights(weight: Layout, attrs: Attrs) -> Layout:
    *stack, i, o = weight.result
    return weight.reshape((math.prod(stack), i, o)).rearrange("g i o -> g o i")


def along_stack(attrs: Attrs, dims: int | None) -> Shape:
    """[..., 1, o], or [..., o] if x is a vector, so that the output has no S."""
    *stack, _, o = attrs["weight"]
    return (*stack, o) if dims == len(stack) + 1 else (*stack, 1, o)


def stacked_biases(bias: Layout, attrs: Attrs) -> Layout:
    *stack, o = bias.result
    return bias.reshape((math.prod(stack), o))


STACK: dict[str, Any] = {
    "rows": by_matrix,
    "grad_rows": grad_by_matrix,
    "where": lambda attrs: len(attrs["weight"]) > 2,
    "layouts": {"weight": stacked_weights, "bias": stacked_biases},
    "leading": False,
    "bias_along": along_stack,
}


@linear.form(
    **STACK,
    example=(
        written(lambda x, w: x @ w, (4, 2, 7, 5), w=(2, 5, 3)),
        written(lambda x, w: x @ w, (4, 1, 6, 7, 5), w=(2, 1, 5, 3)),
        written(lambda x, w: torch.bmm(x, w), (2, 4, 5), w=(2, 5, 3)),
        written(lambda x, w: x @ w, (4, 5), w=(2, 5, 3)),
    ),
)
def products(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


@linear.form(
    **STACK,
    spelled=Spelling(torch.baddbmm, {**X, "batch1": REQUIRED, "batch2": REQUIRED}),
    example=written(lambda x, w, b: torch.baddbmm(b.unsqueeze(1), x, w), (2, 4, 5), w=(2, 5, 3), b=(2, 3)),
)
def baddbmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, x, weight)


# --- a stack of weights [..., o, i] on the left ---------------------------------------------------------------------


def columns_by_matrix(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., i, S] -> [N, S, g, i]"""
    return by_matrix((x if x.dim() > 1 else x.unsqueeze(-1)).mT, attrs)


def grad_columns_by_matrix(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., o, S] -> [N, S, g, o]. If x is a vector, there is no S."""
    return by_matrix((dy if dy.dim() >= len(attrs["weight"]) else dy.unsqueeze(-1)).mT, attrs)


def stacked_from_left(weight: Layout, attrs: Attrs) -> Layout:
    *stack, o, i = weight.result
    return weight.reshape((math.prod(stack), o, i))


def columns_of_biases(bias: Layout, attrs: Attrs) -> Layout:
    """[..., o] or [..., o, 1]"""
    *stack, o, _ = attrs["weight"]
    return bias.reshape((math.prod(stack), o))


STACK_FROM_LEFT: dict[str, Any] = {
    "rows": columns_by_matrix,
    "grad_rows": grad_columns_by_matrix,
    "where": lambda attrs: len(attrs["weight"]) > 2,
    "layouts": {"weight": stacked_from_left, "bias": columns_of_biases},
    "leading": False,
    "bias_along": lambda attrs, dims: (*attrs["weight"][:-1], *(1,) * (dims != len(attrs["weight"]) - 1)),
}


@linear.form(
    **STACK_FROM_LEFT,
    example=(
        written(lambda x, w: w @ x, (4, 2, 5, 7), w=(2, 3, 5)),
        written(lambda x, w: w @ x, (4, 2, 1, 5, 1), w=(1, 2, 6, 3, 5)),
        written(lambda x, w: torch.bmm(w, x), (2, 5, 4), w=(2, 3, 5)),
        written(lambda x, w: w @ x, (5, 4), w=(2, 3, 5)),
        written(lambda x, w: w @ x, (5,), w=(2, 3, 5)),
    ),
)
def products_from_left(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(weight, x)


@linear.form(
    **STACK_FROM_LEFT,
    example=written(lambda x, w, b: torch.baddbmm(b.unsqueeze(-1), w, x), (2, 5, 4), w=(2, 3, 5), b=(2, 3)),
)
def baddbmm_from_left(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, weight, x)


# --- torch.tensordot -------------------------------------------------------------------------------------------------


def summed_pairs(attrs: Attrs) -> list[tuple[int, int]]:
    """(a dimension of the weight that is summed, that of the input), in the order of the weight's: so the matrix of a
    part of a parameter is a view of it."""
    count = len(attrs["weight"])
    return sorted((of_weight % count, dim) for of_weight, dim in zip(attrs["weight_dims"], attrs["dims"], strict=True))


def contracted_rows(x: Tensor, attrs: Attrs) -> Tensor:
    """The summed dimensions are the inputs."""
    dims = [dim for _, dim in summed_pairs(attrs)]
    return as_rows(x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)), attrs)


def free_rows(dy: Tensor, attrs: Attrs) -> Tensor:
    """The dimensions of the weight that are not summed are the last of the output."""
    number = len(attrs["weight"]) - len(attrs["weight_dims"])
    return as_rows(dy.flatten(-number), attrs) if number else one_row(dy, attrs)


def along_free(attrs: Attrs, dims: int | None) -> Shape:
    """The dimensions of the weight that are not summed."""
    shape, summed = attrs["weight"], [dim % len(attrs["weight"]) for dim in attrs["weight_dims"]]
    return tuple(size for dim, size in enumerate(shape) if dim not in summed) or (1,)


def contracted_weight(weight: Layout, attrs: Attrs) -> Layout:
    summed = tuple(dim for dim, _ in summed_pairs(attrs))
    free = tuple(dim for dim in range(len(weight.result)) if dim not in summed)
    inputs = math.prod(weight.result[dim] for dim in summed)
    return weight.permute((*free, *summed)).reshape((1, math.prod(weight.result) // inputs, inputs))


@linear.form(
    rows=contracted_rows,
    grad_rows=free_rows,
    where=lambda attrs: len(attrs["dims"]) > 0 and 0 not in attrs["dims"],
    layouts={"weight": contracted_weight},
    leading=False,
    bias_along=along_free,
    example=(
        written(lambda x, w: torch.tensordot(x, w, 1), (4, 7, 5), w=(5, 3)),
        written(lambda x, w: torch.tensordot(x, w, 2), (4, 7, 5), w=(7, 5, 3)),
        written(lambda x, w: torch.tensordot(x, w, dims=([2, 1], [1, 2])), (4, 7, 5), w=(3, 5, 7, 2)),
        written(lambda x, w: torch.tensordot(x, w, ([1, 2], [0, 1])), (4, 7, 5), w=(7, 5)),
        written(lambda x, w: torch.tensordot(x, w, ([-1], [-2])), (4, 7, 5), w=(5, 3)),
        written(lambda x, w: torch.tensordot(x, w, ([1, 2], [1, 0])), (4, 7, 5), w=(5, 7, 3)),
    ),
)
def tensordot(x: Tensor, dims: Any, weight_dims: Any, *, weight: Tensor) -> Tensor:
    return torch.ops.aten.tensordot.default(x, weight, dims, weight_dims)  # type: ignore[no-any-return]


# --- torch.inner, torch.linalg.vecdot --------------------------------------------------------------------------------


@linear.form(
    where=lambda attrs: len(attrs["weight"]) == 2, example=written(lambda x, w: torch.inner(x, w), (4, 7, 5), w=(3, 5))
)
def inner_product(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.inner(x, weight)


@linear.form(
    **ONE_OUTPUT,
    where=lambda attrs: len(attrs["weight"]) == 1,
    example=written(lambda x, w: torch.inner(x, w), (4, 7, 5), w=(5,)),
)
def inner_of_one(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.inner(x, weight)


@linear.form(
    **ONE_OUTPUT,
    where=lambda attrs: len(attrs["weight"]) == 1,
    example=written(lambda x, w: torch.linalg.vecdot(x, w), (4, 7, 5), w=(5,)),
)
def vecdot(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.linalg.vecdot(x, weight)  # type: ignore[no-any-return]


# --- a copy of the weight for every case ------------------------------------------------------------------------------


def of_copies(weight: Layout, attrs: Attrs) -> Layout:
    """[1, ..., i, o]"""
    return weight.reshape(weight.result[-2:]).rearrange("i o -> 1 o i")


def one_matrix(attrs: Attrs) -> bool:
    """Whether the weight is a single matrix, so that only the new dimensions are copies."""
    shape: Shape = attrs["weight"]
    return len(shape) > 1 and math.prod(shape[:-2]) == 1 and 1 not in shape[-2:]


COPIES: dict[str, Any] = {"where": one_matrix, "layouts": {"weight": of_copies}, "leading": False}


@linear.form(
    **COPIES,
    example=(
        written(lambda x, w: torch.bmm(x, w.expand(x.shape[0], -1, -1)), (4, 7, 5), w=(5, 3)),
        written(lambda x, w: x @ w.unsqueeze(0).expand(x.shape[0], 5, 3), (4, 7, 5), w=(5, 3)),
    ),
)
def product_of_copies(x: Tensor, _sizes: Any, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.expand(_sizes))


@linear.form(**COPIES, example=written(lambda x, w: torch.bmm(x, w.repeat(x.shape[0], 1, 1)), (4, 7, 5), w=(5, 3)))
def product_of_repeated(x: Tensor, _sizes: Any, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.repeat(_sizes))


@linear.form(
    rows=lambda x, attrs: x.transpose(0, 1).flatten(1).unsqueeze(1),
    grad_rows=lambda dy, attrs: dy.unsqueeze(1),
    layouts={"weight": "b i o -> o (b i)"},
    spelled=Spelling(torch.addbmm, {**X, "batch1": REQUIRED, "batch2": REQUIRED}),
    leading=False,
    example=written(lambda x, w, b: torch.addbmm(b, x, w), (2, 4, 5), w=(2, 5, 3), b=(3,)),
)
def addbmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    """The sum of all products is the product with the matrices side by side."""
    return torch.addbmm(bias, x, weight)


# --- (x * weight).sum(dims): a contraction element by element ---------------------------------------------------------


def contraction_by_elements(attrs: Attrs) -> Contraction:
    """The contraction of a product with a weight whose dimensions `dims` are summed, counted from the last."""
    names = string.ascii_letters[: len(attrs["weight"])]
    kept = "".join(k for at, k in enumerate(names) if at - len(names) not in attrs["dims"])
    return Contraction(f"...{names}", names, f"...{kept}", attrs["weight"])


def rows_of_product(x: Tensor, attrs: Attrs) -> Tensor:
    """The rows of `contraction_by_elements`, also if the weight has dimensions in front of those of x."""
    return contraction_by_elements(attrs).rows(x[(None,) * (len(attrs["weight"]) - x.dim())])


def sums_the_weight(attrs: Attrs) -> bool:
    """Whether the sum is over dimensions along which the weight varies; else the product is a scale."""
    shape = attrs["weight"]
    return len(attrs["dims"]) > 0 and all(-len(shape) <= dim < 0 and shape[dim] > 1 for dim in attrs["dims"])


SUMMED_PRODUCT: dict[str, Any] = {
    "rows": rows_of_product,
    "grad_rows": lambda dy, attrs: contraction_by_elements(attrs).grad_rows(dy),
    "layouts": {"weight": lambda weight, attrs: contraction_by_elements(attrs).weight_layout(weight)},
    "where": sums_the_weight,
    "leading": False,
}


@linear.form(
    **SUMMED_PRODUCT,
    example=(
        written(lambda x, w: (x * w).sum(-1), (4, 7, 5), w=(5,)),
        written(lambda x, w: (x * w).sum(-1), (4, 2, 5), w=(1, 2, 5)),
        written(lambda x, w: (w * x.unsqueeze(1)).sum(dim=-1), (4, 7, 5), w=(3, 7, 5)),
        written(lambda x, w: torch.sum(x * w, (-2, -1)), (4, 7, 5), w=(7, 5)),
        written(lambda x, w: (x * w).sum(-2), (4, 7, 5), w=(7, 5)),
        written(lambda x, w: (x * w).sum(-1).t(), (4, 5), w=(3, 1, 5)),
    ),
)
def summed_product(x: Tensor, dims: Any, *, weight: Tensor) -> Tensor:
    return torch.sum(x * weight, dims)


@linear.form(
    **{
        **SUMMED_PRODUCT,
        "grad_rows": lambda dy, attrs: contraction_by_elements(attrs).grad_rows(dy.squeeze(tuple(attrs["dims"]))),
        "where": lambda attrs: attrs["keepdim"] is True and sums_the_weight(attrs),
    },
    example=(
        written(lambda x, w: (x * w).sum(-1, keepdim=True), (4, 7, 5), w=(5,)),
        written(lambda x, w: (x * w).sum((-2, -1), keepdim=True), (4, 7, 2, 5), w=(7, 2, 5)),
    ),
)
def summed_product_kept(x: Tensor, dims: Any, keepdim: bool, *, weight: Tensor) -> Tensor:
    return torch.sum(x * weight, dims, keepdim)


# --- torch.einsum: sums over named indices ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Contraction:
    """`y = einsum("x,weight->y", ...)`: the indices of the three, and the sizes of the weight's.

    An index of the weight is a group if x and y have it, an input if only x has it, and an output if only y has it. The
    other indices of y are positions; the first of them counts the cases. An index along which the weight has size 1,
    and which x has too, or y has not, is not counted as the weight's.
    """

    x: str
    weight: str
    y: str
    sizes: Shape

    @property
    def size(self) -> dict[str, int]:
        sizes = zip(self.weight, self.sizes, strict=True)
        return {k: n for k, n in sizes if n != 1 or (k in self.y and k not in self.x)}

    @property
    def groups(self) -> list[str]:
        return [k for k in self.size if k in self.x and k in self.y]

    @property
    def inputs(self) -> list[str]:
        return [k for k in self.size if k not in self.y]

    @property
    def outputs(self) -> list[str]:
        return [k for k in self.size if k not in self.x]

    def linear(self) -> bool:
        """Whether y is a linear map of x by a matrix that holds every element of the weight once."""
        sides = [side.replace("...", "") for side in (self.x, self.weight, self.y)]
        repeated = any(len(set(side)) < len(side) for side in sides)
        return "..." not in self.weight and not repeated and set(self.size) <= set(self.x + self.y)

    def rows(self, x: Tensor) -> Tensor:
        """[N, S, g, i]"""
        return self.split(x, self.x, self.inputs)

    def grad_rows(self, y: Tensor) -> Tensor:
        """[N, S, g, o]"""
        return self.split(y, self.y, self.outputs)

    def split(self, tensor: Tensor, indices: str, columns: Sequence[str]) -> Tensor:
        last = [*self.groups, *columns]
        first = "".join(k for k in self.y if k not in self.size)
        tensor = torch.einsum(f"{indices}->{first}{''.join(last)}", tensor)
        positions = tensor.shape[: tensor.dim() - len(last)] or (1,)
        groups, width = math.prod([self.size[k] for k in self.groups]), math.prod([self.size[k] for k in columns])
        tensor = tensor.expand(*positions, *(self.size[k] for k in last))  # x may be broadcast against the weight
        return tensor.reshape(positions[0], math.prod(positions[1:]), groups, width)

    def weight_layout(self, weight: Layout) -> Layout:
        return weight.rearrange(f"{spaced(k if k in self.size else '1' for k in self.weight)} -> {self.matrix(True)}")

    def bias_layout(self, bias: Layout) -> Layout:
        indices = [k for k in self.y if k in self.groups + self.outputs]
        sizes = tuple(self.size[k] for k in indices)
        return bias.reshape(sizes).rearrange(f"{spaced(indices)} -> {self.matrix(False)}")

    def matrix(self, inputs: bool) -> str:
        parts = [self.groups, self.outputs, self.inputs] if inputs else [self.groups, self.outputs]
        return " ".join(f"({spaced(part)})" for part in parts)

    def along(self) -> Shape | None:
        """The shape of a bias that varies along all groups and outputs of y, and along no positions."""
        last = self.y.rpartition("...")[2]
        varying = self.groups + self.outputs
        return tuple(self.size[k] if k in varying else 1 for k in last) if set(varying) <= set(last) else None


def spaced(names: Any) -> str:
    return " ".join(names)


def contraction(attrs: Attrs, weight_first: bool) -> Contraction:
    """The contraction of the attribute `equation`."""
    (first, second), y = terms_of(attrs["equation"])
    x, weight = (second, first) if weight_first else (first, second)
    return Contraction(x, weight, y, attrs["weight"])


def as_einsum(weight_first: bool) -> dict[str, Any]:
    """The arguments of `layer` for a form with an attribute `equation`."""

    def parts(attrs: Attrs) -> Contraction:
        return contraction(attrs, weight_first)

    return {
        "rows": lambda x, attrs: parts(attrs).rows(x),
        "grad_rows": lambda dy, attrs: parts(attrs).grad_rows(dy),
        "layouts": {
            "weight": lambda weight, attrs: parts(attrs).weight_layout(weight),
            "bias": lambda bias, attrs: parts(attrs).bias_layout(bias),
        },
        "where": lambda attrs: parts(attrs).linear(),
        "leading": False,
        "bias_along": lambda attrs, dims: parts(attrs).along(),
    }


@linear.form(
    **as_einsum(weight_first=False),
    example=(
        written(lambda x, w: torch.einsum("bti,oi->bto", x, w), (4, 7, 5), w=(3, 5)),
        written(lambda x, w: torch.einsum("b t d, d h k -> b h t k", x, w), (4, 7, 5), w=(5, 2, 3)),
        written(lambda x, w: torch.einsum("...hi,hio->...ho", x, w), (4, 7, 2, 5), w=(2, 5, 3)),
        written(lambda x, w: torch.einsum("bnhk,khd->bnd", x, w), (4, 7, 2, 3), w=(3, 2, 5)),
        written(lambda x, w: torch.einsum("bi,io", x, w), (4, 5), w=(5, 3)),
        written(lambda x, w: torch.einsum("bsi,io->bo", x, w), (4, 7, 5), w=(5, 3)),
        written(lambda x, w: torch.einsum("btd,d->btd", x, w), (4, 7, 5), w=(5,)),
        written(lambda x, w: torch.einsum("bhi,hio->bho", x, w), (4, 2, 5), w=(1, 5, 3)),
        written(lambda x, w: torch.einsum("bhi,hio->bho", x, w), (4, 1, 5), w=(2, 5, 3)),
        written(lambda x, w: torch.einsum("bh,hio->bho", x, w), (4, 2), w=(2, 1, 3)),
    ),
)
def einsum(x: Tensor, equation: str, *, weight: Tensor) -> Tensor:
    return torch.einsum(equation, x, weight)


@linear.form(
    **as_einsum(weight_first=True),
    example=(
        written(lambda x, w: torch.einsum("oi,nij->noj", w, x), (4, 5, 7), w=(3, 5)),
        written(lambda x, w: torch.einsum("hdk,nthk->ntd", w, x), (4, 7, 2, 5), w=(2, 3, 5)),
    ),
)
def einsum_from_left(x: Tensor, equation: str, *, weight: Tensor) -> Tensor:
    return torch.einsum(equation, weight, x)


# --- bilinear layers ------------------------------------------------------------------------------------------------


def bilinear_products(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., i] and [N, ..., j] -> [N, S, i j]"""
    return as_rows((x.unsqueeze(-1) * attrs["second"].unsqueeze(-2)).flatten(-2), attrs)


@layer(
    rows=bilinear_products,
    grad_rows=as_rows,
    layouts={"weight": "o i j -> o (i j)"},
    bias_along=-1,
    spelled=Spelling(
        F.bilinear, {"input1": REQUIRED, "input2": REQUIRED, "weight": REQUIRED, "bias": None}, data_first=True
    ),
    example=(
        written(lambda x, w, b: F.bilinear(x, x[..., :2].sin(), w, b), (4, 5), w=(3, 5, 2), b=(3,)),
        written(lambda x, w: F.bilinear(x, x[..., 1:3].tanh(), w), (4, 7, 5), w=(3, 5, 2)),
    ),
)
def bilinear(x: Tensor, second: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.bilinear(x, second, weight, bias)


# --- experts --------------------------------------------------------------------------------------------------------

GROUPED_MM_NAMES = ("grouped_mm", GROUPED_MM, "grouped_mm_fallback")  # of torch.nn.functional, of ATen, of transformers


def route(graph: fx.Graph) -> None:
    """Bring products of experts to one spelling; see the module's docstring.

    Those with a bias, another type of result, or rows in more dimensions stay as they are.
    """
    for node in [node for node in graph.nodes if node.op == "call_function" and op_name(node) in GROUPED_MM_NAMES]:
        operands = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs
        operands = {name: value for name, value in operands.items() if value is not None}
        if operands.keys() != {"x", "weight", "offs"} or len(node.args) < 2:
            continue
        if dimensions(node.args) not in ((2, 3), None):
            continue
        kernel = one_overload(node.target)
        node.target, node.kwargs = grouped_product, {}
        node.args = (operands["x"], operands["weight"], operands["offs"], kernel)
        with graph.inserting_before(node):  # a tap behind the product reads it
            membership = graph.call_function(routed, (operands["x"], operands["offs"]))
        with graph.inserting_after(node):
            output = graph.call_function(with_row_mask, (node, membership))
        output.meta = dict(node.meta)
        for reader in list(node.users):
            if reader is not output:
                reader.replace_input_with(node, output)


def dimensions(operands: Any) -> tuple[int, ...] | None:
    """The numbers of dimensions of x and weight; None if the graph has no sizes."""
    values = [operand.meta.get("val") for operand in operands[:2]]
    return tuple(value.dim() for value in values) if all(isinstance(value, Tensor) for value in values) else None


def one_overload(target: Any) -> Any:
    """The kernel as an object that fx can hold as an argument."""
    if isinstance(target, OpOverload):
        return target
    return target.default if isinstance(target, OpOverloadPacket) else getattr(torch.ops.aten, GROUPED_MM).default


@fx.wrap
def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor, kernel: Any) -> Tensor:
    """x [S, i], sorted by expert, times weight [g, i, o] -> [S, o].

    Args:
        offsets: [g], where the rows of each expert end.
        kernel: the operation of torch or of the user's library that computes the product.
    """
    product: Tensor = kernel(x, weight, offs=offsets)
    return product


def routed(rows: Tensor, offsets: Tensor) -> Tensor:
    """Which of the rows [S, ...] belong to which group: [S, 1, g]. Rows behind the last offset belong to none."""
    place = torch.arange(rows.shape[0], device=offsets.device).unsqueeze(-1)
    before = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return ((place >= before) & (place < offsets)).unsqueeze(1)


def by_expert(rows: Tensor, attrs: Attrs) -> Tensor:
    """[S, d] -> [S, 1, g, d], zero except in the group that a row belongs to."""
    return torch.where(routed(rows, attrs["offsets"]).unsqueeze(-1), rows[:, None, None], 0)


# --- an example in any precision; torch's own operation has bfloat16 only --------------------------------------------


@torch.library.custom_op("kfac_fx::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return torch.einsum("sgi,gio->so", by_expert(x, {"offsets": offs})[:, 0], weight)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, offs = ctx.saved_tensors
    rows, grad_rows = (by_expert(tensor, {"offsets": offs})[:, 0] for tensor in (x, grad))
    return torch.einsum("sgo,gio->si", grad_rows, weight), torch.einsum("sgi,sgo->gio", rows, grad_rows), None


grouped_mm.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Experts(nn.Module):
    """Two rows for the first expert, none for the second, three for the third, and one row for no expert."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.randn(3, 2, 4) if transposed else torch.randn(3, 4, 2))
        self.register_buffer("offsets", torch.tensor([2, 2, 5]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.mT if self.transposed else self.weight
        product: Tensor = torch.ops.kfac_fx.grouped_mm(x, weight, self.offsets)
        return product


@layer(
    rows=by_expert,
    grad_rows=by_expert,
    layouts={"weight": "g i o -> g o i"},
    approximations=EVERY_LAYER,
    example=(lambda: (Experts(False), torch.randn(6, 4)), lambda: (Experts(True), torch.randn(6, 4))),
)
def experts(x: Tensor, offsets: Tensor, kernel: Any, *, weight: Tensor) -> Tensor:
    return grouped_product(x, weight, offsets, kernel)
