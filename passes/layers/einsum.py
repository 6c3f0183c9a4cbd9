"""Fully connected layers as `einsum` writes them; what their equation says is in `contraction`."""

from __future__ import annotations

import torch
from torch import Tensor

from .contraction import as_einsum
from .linear import linear
from .rows import written


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
    ),
)
def einsum(x: Tensor, equation: str, *, weight: Tensor) -> Tensor:
    return torch.einsum(equation, x, weight)


@linear.form(
    **as_einsum(weight_first=False),
    example=(
        written(lambda x, w, b: torch.einsum("btd,dhk->bhtk", x, w) + b, (4, 7, 5), w=(5, 2, 3), b=(2, 1, 3)),
        written(lambda x, w, b: torch.einsum("...i,oi->...o", x, w) + b, (4, 7, 5), w=(3, 5), b=(3,)),
    ),
)
def einsum_and_bias(x: Tensor, equation: str, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum(equation, x, weight) + bias


@linear.form(
    **as_einsum(weight_first=True),
    example=(
        written(lambda x, w: torch.einsum("oi,nij->noj", w, x), (4, 5, 7), w=(3, 5)),
        written(lambda x, w: torch.einsum("hdk,nthk->ntd", w, x), (4, 7, 2, 5), w=(2, 3, 5)),
    ),
)
def einsum_from_left(x: Tensor, equation: str, *, weight: Tensor) -> Tensor:
    return torch.einsum(equation, weight, x)


@linear.form(
    **as_einsum(weight_first=True),
    example=written(lambda x, w, b: torch.einsum("oi,nij->noj", w, x) + b, (4, 5, 7), w=(3, 5), b=(3, 1)),
)
def einsum_from_left_and_bias(x: Tensor, equation: str, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum(equation, weight, x) + bias
