"""Bilinear layers: a matrix times the products of two inputs, x_i y_j."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..ir import Attrs
from .declaration import layer
from .rows import as_rows, written


def products(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., i] and [N, ..., j] -> [N, S, i j]"""
    return as_rows((x.unsqueeze(-1) * attrs["second"].unsqueeze(-2)).flatten(-2), attrs)


@layer(
    rows=products,
    grad_rows=as_rows,
    layouts={"weight": "o i j -> o (i j)"},
    example=(
        written(lambda x, w, b: F.bilinear(x, x[..., :2].sin(), w, b), (4, 5), w=(3, 5, 2), b=(3,)),
        written(lambda x, w: F.bilinear(x, x[..., 1:3].tanh(), w), (4, 7, 5), w=(3, 5, 2)),
    ),
)
def bilinear(x: Tensor, second: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.bilinear(x, second, weight, bias)
