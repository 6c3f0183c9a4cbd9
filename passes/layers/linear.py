"""Fully connected layers, in all the ways they are written but for `einsum`.

One row a position: the weight of [o, i] meets the last dimension of x, or, on the left, the last but one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir import Attrs
from ..words.matrix import Layout, Shape
from .declaration import layer
from .rows import as_rows, by_group, written


def columns_as_rows(tensor: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., d, S] -> [N, S, d]; without N, every column is a case."""
    return as_rows(tensor.mT if tensor.dim() > 1 else tensor, attrs)


def along_rows(bias: Shape, outputs: int) -> bool:
    """Not with more dimensions: they could be more than the product has."""
    return bias in ((outputs,), (1, outputs))


def single(bias: Layout, attrs: Attrs) -> Layout:
    """One group, whatever the dimensions."""
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
    layouts={"bias": single},
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


# --- weight of [i, o] on the right ----------------------------------------------------------------------------------


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
    layouts={"weight": "i o -> o i", "bias": single},
    example=(
        written(lambda x, w, b: x @ w + b, (4, 7, 5), w=(5, 3), b=(3,)),
        written(lambda x, w, b: b + torch.mm(x, w), (4, 5), w=(5, 3), b=(1, 3)),
    ),
)
def product_and_bias(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(x, weight) + bias


@linear.form(
    where=lambda attrs: along_rows(attrs["bias"], attrs["weight"][-1]),
    layouts={"weight": "i o -> o i", "bias": single},
    example=written(lambda x, w, b: torch.addmm(b, x, w), (4, 5), w=(5, 3), b=(3,)),
)
def addmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight)


def one_row(dy: Tensor, attrs: Attrs) -> Tensor:
    return as_rows(dy.unsqueeze(-1), attrs)


ONE_OUTPUT: dict[str, Any] = {"grad_rows": one_row, "layouts": {"weight": "i -> 1 i"}}


@linear.form(
    **ONE_OUTPUT,
    example=(
        written(lambda x, w: x @ w, (4, 7, 5), w=(5,)),
        written(lambda x, w: torch.mv(x, w), (4, 5), w=(5,)),
    ),
)
def one_output(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


# --- weight of [o, i] on the left -----------------------------------------------------------------------------------


FROM_LEFT: dict[str, Any] = {"rows": columns_as_rows, "grad_rows": columns_as_rows, "leading": False}
FROM_LEFT_AND_BIAS: dict[str, Any] = {
    **FROM_LEFT,
    "where": lambda attrs: attrs["bias"] == (attrs["weight"][0], 1),
    "layouts": {"bias": single},
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


@linear.form(
    **FROM_LEFT_AND_BIAS,
    example=written(lambda x, w, b: w @ x + b, (4, 5, 7), w=(3, 5), b=(3, 1)),
)
def product_from_left_and_bias(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(weight, x) + bias


@linear.form(
    **FROM_LEFT_AND_BIAS,
    example=written(lambda x, w, b: torch.addmm(b, w, x), (5, 4), w=(3, 5), b=(3, 1)),
)
def addmm_from_left(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, weight, x)


# --- a stack of weights [..., i, o], a group each -------------------------------------------------------------------


def by_matrix(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., S, i] -> [N, S, g, i]"""
    return by_group(torch.atleast_2d(x), (*attrs["weight"][:-2], 1))


def grad_by_matrix(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., S, o] -> [N, S, g, o]; without S if x was a vector."""
    return by_matrix(dy if dy.dim() >= len(attrs["weight"]) else dy.unsqueeze(-2), attrs)


def stacked(weight: Layout, attrs: Attrs) -> Layout:
    *stack, i, o = weight.result
    return weight.reshape((math.prod(stack), i, o)).rearrange("g i o -> g o i")


def stacked_biases(bias: Layout, attrs: Attrs) -> Layout:
    *stack, o = bias.result
    return bias.reshape((math.prod(stack), o))


@linear.form(
    rows=by_matrix,
    grad_rows=grad_by_matrix,
    where=lambda attrs: len(attrs["weight"]) > 2,
    layouts={"weight": stacked},
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
    layouts={"weight": stacked, "bias": stacked_biases},
    leading=False,
    example=written(lambda x, w, b: x @ w + b, (4, 2, 7, 5), w=(2, 5, 3), b=(2, 1, 3)),
)
def products_and_biases(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(x, weight) + bias


@linear.form(
    rows=by_matrix,
    grad_rows=by_matrix,
    where=lambda attrs: attrs["bias"] == (attrs["weight"][0], 1, attrs["weight"][-1]),
    layouts={"weight": stacked, "bias": stacked_biases},
    leading=False,
    example=written(lambda x, w, b: torch.baddbmm(b.unsqueeze(1), x, w), (2, 4, 5), w=(2, 5, 3), b=(2, 3)),
)
def baddbmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, x, weight)
