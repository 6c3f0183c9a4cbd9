"""What scales every element on its own and is written as no product: quotients, mixtures, outer products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ir import Attrs
from .elementwise import scale_and_shift
from .rows import elements, written


def by_quotient(x: Tensor, attrs: Attrs) -> Tensor:
    """The change of x / w is -x / w² times that of w."""
    return elements(-x / attrs["value"].square(), attrs)


@scale_and_shift.form(
    rows=by_quotient,
    where=lambda attrs: True,
    example=(
        written(lambda x, w: x / w, (4, 7, 5), w=(7, 5)),
        written(lambda x, w: x / w, (4, 1, 5), w=()),
        written(lambda x, w: x / w.view(-1, 1), (4, 7, 5), w=(7,)),
    ),
)
def quotient(x: Tensor, value: Any = None, *, weight: Tensor) -> Tensor:
    return torch.div(x, weight)


@scale_and_shift.form(
    rows=lambda x, attrs: elements(x.reciprocal(), attrs),
    where=lambda attrs: True,
    example=written(lambda x, w: w / (1 + x.square()), (4, 7, 5), w=(7, 5)),
)
def numerator(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.div(weight, x)


@scale_and_shift.form(
    rows=lambda x, attrs: elements(attrs["end"] - x, attrs),
    where=lambda attrs: True,
    example=written(lambda x, w: torch.lerp(x, torch.tanh(x), w), (4, 7, 5), w=(7, 5)),
)
def mixed(x: Tensor, end: Tensor, *, weight: Tensor) -> Tensor:
    return torch.lerp(x, end, weight)


@scale_and_shift.form(
    rows=lambda x, attrs: elements(x.unsqueeze(-1), attrs),
    where=lambda attrs: len(attrs["weight"]) == 1,
    example=written(lambda x, w: torch.outer(x, w), (4,), w=(5,)),
)
def outer(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.outer(x, weight)
