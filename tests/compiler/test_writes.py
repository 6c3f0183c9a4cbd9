"""What forward writes into parameters is found before it is written, and put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kfac_fx.passes.tracing.substitutes import parameters_kept

Write = Callable[[nn.Linear], object]
WRITES: dict[str, Write] = {
    "in place": lambda layer: layer.weight.clamp_(-0.1, 0.1),
    "through data": lambda layer: layer.weight.data.mul_(0.5),
    "into a slice": lambda layer: layer.weight.__setitem__(0, 1.0),
    "into a view": lambda layer: layer.weight.detach().view(-1).add_(1.0),
    "of a list": lambda layer: torch._foreach_mul_([layer.weight, layer.bias], 0.5),
    "as a result": lambda layer: torch.add(layer.weight, 1.0, out=layer.weight),
    "by init": lambda layer: nn.init.zeros_(layer.weight),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_named_and_undone(write: str) -> None:
    layer = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    with torch.no_grad(), parameters_kept(layer) as written:
        WRITES[write](layer)
    assert list(written)[0] == "weight"
    assert all(torch.equal(one, other) for one, other in zip(layer.parameters(), before, strict=True))


def test_a_write_is_undone_after_an_error() -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), torch.no_grad(), parameters_kept(layer):
        layer.weight.zero_()
        1 / 0  # noqa: B018
    assert torch.equal(layer.weight, before)


def test_what_is_read_or_written_elsewhere_is_no_write() -> None:
    layer = nn.Linear(3, 2)
    with parameters_kept(layer) as written:
        layer(torch.ones(1, 3)).relu_()
        layer.weight.detach().clone().zero_()
    assert not written
