"""Fully connected layers in all the ways that torch writes them, except `einsum`, and bilinear layers.

    y = F.linear(x, w, b)     y = x @ w + b     y = w @ x     y = torch.tensordot(x, w, dims)     ...

There is one row for each position. The weight [o, i] meets the last dimension of x or, from the left, the last but one.
A bilinear layer is a matrix [o, i j] times the products x_i y_j of two inputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir import Attrs
from ..matrix import Layout, Shape
from .declaration import as_rows, by_group, layer, written


def columns_as_rows(tensor: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., d, S] -> [N, S, d]. Without N, every column is a case."""
    return as_rows(tensor.mT if tensor.dim() > 1 else tensor, attrs)


def along_rows(bias: Shape, outputs: int) -> bool:
    """Whether the bias is one row. With more dimensions it might have more than the product."""
    return bias in ((outputs,), (1, outputs))


def as_one_row(bias: Layout, attrs: Attrs) -> Layout:
    """A bias of any dimensions -> [1, o]."""
    return bias.reshape((1, math.prod(bias.result)))


@layer(
    rows=as_rows,
    grad_rows=as_rows,
    where=lambda attrs: attrs.get("bias") in (None, attrs["weight"][:1]),
    leading=True,
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
    where=lambda attrs: along_rows(attrs["bias"], attrs["weight"][0]),
    layouts={"bias": as_one_row},
    example=(
        written(lambda x, w, b: F.linear(x, w) + b, (4, 7, 5), w=(3, 5), b=(3,)),
        written(lambda x, w, b: b + F.linear(x, w), (4, 5), w=(3, 5), b=(1, 3)),
    ),
)
def linear_and_bias(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight) + bias


@linear.form(
    grad_rows=lambda dy, attrs: as_rows(dy.index_select(-1, attrs["index"]), attrs),
    example=written(
        lambda x, w: F.linear(x, torch.index_copy(torch.ones(3, 5), 0, torch.tensor([2, 0]), w)), (4, 7, 5), w=(2, 5)
    ),
)
def some_outputs(x: Tensor, _base: Tensor, index: Tensor, *, weight: Tensor) -> Tensor:
    return F.linear(x, torch.index_copy(_base, 0, index, weight))


# --- a weight [i, o] on the right -----------------------------------------------------------------------------------


@linear.form(
    layouts={"weight": "i o -> o i"},
    example=(
        written(lambda x, w: x @ w, (4, 7, 5), w=(5, 3)),
        written(lambda x, w: torch.matmul(x, w.t()), (5,), w=(3, 5)),
    ),
)
def product(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


@linear.form(
    where=lambda attrs: along_rows(attrs["bias"], attrs["weight"][-1]),
    layouts={"weight": "i o -> o i", "bias": as_one_row},
    example=(
        written(lambda x, w, b: x @ w + b, (4, 7, 5), w=(5, 3), b=(3,)),
        written(lambda x, w, b: b + torch.mm(x, w), (4, 5), w=(5, 3), b=(1, 3)),
    ),
)
def product_and_bias(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(x, weight) + bias


@linear.form(
    where=lambda attrs: along_rows(attrs["bias"], attrs["weight"][-1]),
    layouts={"weight": "i o -> o i", "bias": as_one_row},
    example=written(lambda x, w, b: torch.addmm(b, x, w), (4, 5), w=(5, 3), b=(3,)),
)
def addmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight)


def one_row(dy: Tensor, attrs: Attrs) -> Tensor:
    return as_rows(dy.unsqueeze(-1), attrs)


ONE_OUTPUT: dict[str, Any] = {"grad_rows": one_row, "layouts": {"weight": "i -> 1 i"}}


@linear.form(
    **ONE_OUTPUT,
    example=(written(lambda x, w: x @ w, (4, 7, 5), w=(5,)), written(lambda x, w: torch.mv(x, w), (4, 5), w=(5,))),
)
def one_output(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


# --- a weight [o, i] on the left ------------------------------------------------------------------------------------


FROM_LEFT: dict[str, Any] = {"rows": columns_as_rows, "grad_rows": columns_as_rows, "leading": False}
FROM_LEFT_AND_BIAS: dict[str, Any] = {
    **FROM_LEFT,
    "where": lambda attrs: attrs["bias"] == (attrs["weight"][0], 1),
    "layouts": {"bias": as_one_row},
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


@linear.form(**FROM_LEFT_AND_BIAS, example=written(lambda x, w, b: w @ x + b, (4, 5, 7), w=(3, 5), b=(3, 1)))
def product_from_left_and_bias(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(weight, x) + bias


@linear.form(**FROM_LEFT_AND_BIAS, example=written(lambda x, w, b: torch.addmm(b, w, x), (5, 4), w=(3, 5), b=(3, 1)))
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


def stacked_biases(bias: Layout, attrs: Attrs) -> Layout:
    *stack, o = bias.result
    return bias.reshape((math.prod(stack), o))


@linear.form(
    rows=by_matrix,
    grad_rows=grad_by_matrix,
    where=lambda attrs: len(attrs["weight"]) > 2,
    layouts={"weight": stacked_weights},
    leading=False,
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
    rows=by_matrix,
    grad_rows=grad_by_matrix,
    where=lambda attrs: len(attrs["weight"]) > 2 and attrs["bias"] == (*attrs["weight"][:-2], 1, attrs["weight"][-1]),
    layouts={"weight": stacked_weights, "bias": stacked_biases},
    leading=False,
    example=written(lambda x, w, b: x @ w + b, (4, 2, 7, 5), w=(2, 5, 3), b=(2, 1, 3)),
)
def products_and_biases(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(x, weight) + bias


@linear.form(
    rows=by_matrix,
    grad_rows=by_matrix,
    where=lambda attrs: attrs["bias"] == (attrs["weight"][0], 1, attrs["weight"][-1]),
    layouts={"weight": stacked_weights, "bias": stacked_biases},
    leading=False,
    example=written(lambda x, w, b: torch.baddbmm(b.unsqueeze(1), x, w), (2, 4, 5), w=(2, 5, 3), b=(2, 3)),
)
def baddbmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, x, weight)


# --- bilinear layers ------------------------------------------------------------------------------------------------


def bilinear_products(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., i] and [N, ..., j] -> [N, S, i j]"""
    return as_rows((x.unsqueeze(-1) * attrs["second"].unsqueeze(-2)).flatten(-2), attrs)


@layer(
    rows=bilinear_products,
    grad_rows=as_rows,
    layouts={"weight": "o i j -> o (i j)"},
    example=(
        written(lambda x, w, b: F.bilinear(x, x[..., :2].sin(), w, b), (4, 5), w=(3, 5, 2), b=(3,)),
        written(lambda x, w: F.bilinear(x, x[..., 1:3].tanh(), w), (4, 7, 5), w=(3, 5, 2)),
    ),
)
def bilinear(x: Tensor, second: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.bilinear(x, second, weight, bias)


# --- torch.tensordot -------------------------------------------------------------------------------------------------


def contracted_rows(x: Tensor, attrs: Attrs) -> Tensor:
    """The summed dimensions are the inputs, in their order."""
    number = len(attrs["dims"])
    return as_rows(x.movedim(tuple(attrs["dims"]), tuple(range(-number, 0))).flatten(-number), attrs)


def free_rows(dy: Tensor, attrs: Attrs) -> Tensor:
    """The dimensions of the weight that are not summed are the last of the output."""
    number = len(attrs["weight"]) - len(attrs["weight_dims"])
    return as_rows(dy.flatten(-number), attrs) if number else one_row(dy, attrs)


def contracted_weight(weight: Layout, attrs: Attrs) -> Layout:
    dims = len(weight.result)
    summed = tuple(dim % dims for dim in attrs["weight_dims"])
    free = tuple(dim for dim in range(dims) if dim not in summed)
    inputs = math.prod(weight.result[dim] for dim in summed)
    return weight.permute((*free, *summed)).reshape((1, math.prod(weight.result) // inputs, inputs))


@linear.form(
    rows=contracted_rows,
    grad_rows=free_rows,
    where=lambda attrs: len(attrs["dims"]) > 0 and 0 not in attrs["dims"],
    layouts={"weight": contracted_weight},
    leading=False,
    example=(
        written(lambda x, w: torch.tensordot(x, w, 1), (4, 7, 5), w=(5, 3)),
        written(lambda x, w: torch.tensordot(x, w, 2), (4, 7, 5), w=(7, 5, 3)),
        written(lambda x, w: torch.tensordot(x, w, dims=([2, 1], [1, 2])), (4, 7, 5), w=(3, 5, 7, 2)),
        written(lambda x, w: torch.tensordot(x, w, ([1, 2], [0, 1])), (4, 7, 5), w=(7, 5)),
        written(lambda x, w: torch.tensordot(x, w, ([-1], [-2])), (4, 7, 5), w=(5, 3)),
    ),
)
def tensordot(x: Tensor, dims: Any, weight_dims: Any, *, weight: Tensor) -> Tensor:
    return torch.ops.aten.tensordot.default(x, weight, dims, weight_dims)  # type: ignore[no-any-return]


def has_free_sizes(attrs: Attrs) -> bool:
    """Whether the bias has the dimensions of the weight that are not summed, and there are some."""
    shape, summed = attrs["weight"], [dim % len(attrs["weight"]) for dim in attrs["weight_dims"]]
    free = tuple(size for dim, size in enumerate(shape) if dim not in summed)
    return bool(free) and attrs["bias"] == free


@linear.form(
    rows=contracted_rows,
    grad_rows=free_rows,
    where=lambda attrs: len(attrs["dims"]) > 0 and 0 not in attrs["dims"] and has_free_sizes(attrs),
    layouts={"weight": contracted_weight, "bias": as_one_row},
    leading=False,
    example=(
        written(lambda x, w, b: torch.tensordot(x, w, 1) + b, (4, 7, 5), w=(5, 3), b=(3,)),
        written(lambda x, w, b: torch.tensordot(x, w, 2) + b, (4, 7, 5), w=(7, 5, 3), b=(3,)),
        written(lambda x, w, b: torch.tensordot(x, w, ([2, 1], [1, 2])) + b, (4, 7, 5), w=(3, 5, 7, 2), b=(3, 2)),
    ),
)
def tensordot_and_bias(x: Tensor, dims: Any, weight_dims: Any, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.tensordot.default(x, weight, dims, weight_dims) + bias  # type: ignore[no-any-return]


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
    where=lambda attrs: along_rows(attrs["bias"], attrs["weight"][-1]),
    layouts={"weight": "b i o -> o (b i)", "bias": as_one_row},
    leading=False,
    example=written(lambda x, w, b: torch.addbmm(b, x, w), (2, 4, 5), w=(2, 5, 3), b=(3,)),
)
def addbmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    """The sum of all products is the product with the matrices side by side."""
    return torch.addbmm(bias, x, weight)
