"""Fully connected layers as the less common products of torch write them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..ir import Attrs
from ..words.matrix import Layout, Shape
from .linear import ONE_OUTPUT, along_rows, linear, one_row, single
from .rows import as_rows, written

# --- torch.tensordot -------------------------------------------------------------------------------------------------


def contracted_rows(x: Tensor, attrs: Attrs) -> Tensor:
    """The dimensions that are summed over, in their order, are the inputs."""
    number = len(attrs["dims"])
    return as_rows(x.movedim(tuple(attrs["dims"]), tuple(range(-number, 0))).flatten(-number), attrs)


def free_rows(dy: Tensor, attrs: Attrs) -> Tensor:
    """The dimensions that the weight leaves are the last."""
    number = len(attrs["weight"]) - len(attrs["weight_dims"])
    return as_rows(dy.flatten(-number), attrs) if number else one_row(dy, attrs)


def contracted_weight(weight: Layout, attrs: Attrs) -> Layout:
    dims = len(weight.result)
    summed = tuple(dim % dims for dim in attrs["weight_dims"])
    free = tuple(dim for dim in range(dims) if dim not in summed)
    outputs, inputs = (math.prod(weight.result[dim] for dim in some) for some in (free, summed))
    return weight.permute((*free, *summed)).reshape((1, outputs, inputs))


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
    ),
)
def tensordot(x: Tensor, dims: Any, weight_dims: Any, *, weight: Tensor) -> Tensor:
    return torch.ops.aten.tensordot.default(x, weight, dims, weight_dims)  # type: ignore[no-any-return]


# --- torch.inner, torch.linalg.vecdot --------------------------------------------------------------------------------


@linear.form(
    where=lambda attrs: len(attrs["weight"]) == 2,
    example=written(lambda x, w: torch.inner(x, w), (4, 7, 5), w=(3, 5)),
)
def inner(x: Tensor, *, weight: Tensor) -> Tensor:
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
    product: Tensor = torch.linalg.vecdot(x, weight)
    return product


# --- one weight, in as many copies as there are cases -----------------------------------------------------------------


def of_copies(weight: Layout, attrs: Attrs) -> Layout:
    """[1, ..., i, o]"""
    return weight.reshape(weight.result[-2:]).rearrange("i o -> 1 o i")


def one_matrix(attrs: Attrs) -> bool:
    """Copied along dimensions of its own only."""
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


@linear.form(
    **COPIES,
    example=written(lambda x, w: torch.bmm(x, w.repeat(x.shape[0], 1, 1)), (4, 7, 5), w=(5, 3)),
)
def product_of_repeated(x: Tensor, _sizes: Any, *, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.repeat(_sizes))


@linear.form(
    rows=lambda x, attrs: x.transpose(0, 1).flatten(1).unsqueeze(1),
    grad_rows=lambda dy, attrs: dy.unsqueeze(1),
    where=lambda attrs: along_rows(attrs["bias"], attrs["weight"][-1]),
    layouts={"weight": "b i o -> o (b i)", "bias": single},
    leading=False,
    example=written(lambda x, w, b: torch.addbmm(b, x, w), (2, 4, 5), w=(2, 5, 3), b=(3,)),
)
def addbmm(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    """The sum of all products: the matrices side by side are one."""
    return torch.addbmm(bias, x, weight)
