"""Which order the cases have in a graph: sorted, brought back, mixed, and where nothing sorts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.cases import CaseOrder
from tests.compiler.toy import Toy, before


def inverse_of(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(0, order.shape[0]))


def sorted_cases(x: Tensor) -> tuple[Tensor, Tensor]:
    _, order = torch.sort(x[:, 0], descending=True)
    return x.index_select(0, order), order


def restored(x: Tensor, w: Tensor) -> Tensor:
    y, order = sorted_cases(x)
    return torch.tanh(F.linear(y, w)).index_select(0, inverse_of(order))


def of_constants(x: Tensor, w: Tensor) -> Tensor:
    places = torch.sort(torch.arange(4.0), descending=True)[1]
    return F.linear(x + torch.ones(4, 3).index_select(0, places).sum(), w)


ORDERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "as they come": (lambda x, w: F.linear(x, w), False),
    "sorted": (lambda x, w: F.linear(sorted_cases(x)[0], w), True),
    "an argsort": (lambda x, w: F.linear(x.index_select(0, x[:, 0].argsort()), w), True),
    "brought back": (restored, False),
    "brought back, and not behind it": (lambda x, w: restored(x, w) + F.linear(sorted_cases(x)[0], w), True),
    "sorted and not": (lambda x, w: F.linear(x + sorted_cases(x)[0], w), True),
    "sorted twice": (lambda x, w: F.linear(sorted_cases(sorted_cases(x)[0].tanh())[0], w), True),
    "not where they were": (lambda x, w: F.linear(x, w).index_select(0, inverse_of(sorted_cases(x)[1])), True),
    "a sort of each case": (lambda x, w: F.linear(x.sort(1)[0], w), False),
    "a sort of constants": (of_constants, False),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_the_order_of_the_cases(kind: str) -> None:
    function, is_sorted = ORDERS[kind]
    program = before("resolve", Toy(function, w=(2, 3)), torch.randn(4, 3))
    order = CaseOrder(program.graph)
    (output,) = program.outputs
    assert (order.sort_of(output) is not None) is is_sorted
