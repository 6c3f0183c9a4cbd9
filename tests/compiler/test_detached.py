"""`.data` in forward, on parameters and on what is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.trace import capture


class Beside(nn.Module):
    """An adapter that reads the weight it was put beside, and its own output, without their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.own = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.linear(x, self.base.weight.data) + self.own(x)
        return y / y.data.norm()


@pytest.mark.parametrize("inputs", [None, (torch.ones(2, 3),)], ids=["symbolic", "exported"])
def test_data_is_read_without_a_gradient(inputs: tuple[Tensor] | None) -> None:
    torch.manual_seed(0)
    model, x = Beside(), torch.randn(2, 3)
    traced = capture(model, inputs)
    graph = fx.GraphModule(traced.program.root, traced.program.graph)
    torch.testing.assert_close(traced.unflatten(graph(x)), model(x), rtol=0, atol=0)


def test_what_only_data_reads_is_unused() -> None:
    net = kfac_fx.compile(Beside(), (torch.randn(4, 3),), loss="normal", strict=True)
    assert [one.parameters for one in net.registrations] == [("own.weight", "own.bias")]
    assert set(net.report.unused) == {"base.weight", "base.bias"}


def test_what_data_is_written_through_is_no_graph() -> None:
    class Decays(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.9)
            return super().forward(x)

    model, x = nn.Sequential(Decays(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    net = kfac_fx.compile(model, (x,), loss="normal")
    assert "writes into its parameters 0.weight in forward" in str(net.report).replace("\n            ", " ")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
