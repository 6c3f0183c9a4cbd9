"""Branches on random numbers that can only go one way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import UntraceableError
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.trace import capture

X = torch.randn(5, 3)


class Dropped(nn.Module):
    """A layer that is left out where `branch` of its rate says so, and dropout behind it."""

    def __init__(self, branch: Callable[[float], Tensor | bool], rate: float) -> None:
        super().__init__()
        self.layer, self.branch, self.rate, self.dropout = nn.Linear(3, 3), branch, rate, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.branch(self.rate):
            x = self.layer(x)
        y: Tensor = self.dropout(x)
        return y


CERTAIN: dict[str, tuple[Callable[[float], Tensor | bool], float, bool]] = {
    "> 0": (lambda rate: torch.rand(1) > rate, 0.0, True),
    ">= 0": (lambda rate: torch.rand([]) >= rate, 0, True),
    "< 0": (lambda rate: torch.rand(1) < rate, 0.0, False),
    "<= 0": (lambda rate: torch.rand(1).le(rate), 0.0, False),
    "> 1": (lambda rate: torch.gt(torch.rand(1), rate), 1.0, False),
    "< 1": (lambda rate: (rate > torch.rand_like(X[0, 0])).item(), 1.0, True),
    "not": (lambda rate: not torch.rand(1) < rate, 0.0, True),
    ">= 0 of half": (lambda rate: torch.rand(1, dtype=torch.float16) >= rate, 0.0, True),
}


@pytest.mark.parametrize("kind", CERTAIN)
def test_a_certain_branch_is_taken_and_the_stream_goes_on_as_the_models(kind: str) -> None:
    branch, rate, taken = CERTAIN[kind]
    model = Dropped(branch, rate)
    captured = capture(model, (X,))
    graph = captured.program.graph
    assert (sum(op_name(one) == "linear" for one in graph.nodes) == 1) is taken
    torch.manual_seed(1)
    wanted = model(X)
    torch.manual_seed(1)
    (found,) = torch.fx.GraphModule(captured.program.root, graph)(*captured.flatten((X,), {}))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "branch",
    [
        lambda rate: torch.rand(1) > rate,
        lambda rate: torch.rand(1, dtype=torch.bfloat16) > 0.0,  # one in 256 draws is 0
        lambda rate: torch.randn(1) > 0.0,
        lambda rate: torch.rand(1) * 2 < 1.0,
    ],
    ids=["a rate", "of few numbers", "normal", "computed with"],
)
def test_what_depends_on_the_draw_is_refused(branch: Callable[[float], Tensor]) -> None:
    with pytest.raises(UntraceableError, match="Dropped could not be captured as a graph"):
        capture(Dropped(branch, 0.1), (X,))


def test_a_rate_that_is_set_later_is_seen() -> None:
    model = nn.Sequential(Dropped(lambda rate: torch.rand(1) > rate, 0.0), nn.Linear(3, 2))
    net = kfac_fx.compile(model, (X,), loss="normal")
    assert net.recorder((X,), {}).whole
    model[0].rate = 0.5  # type: ignore[assignment]
    assert not net.recorder((X,), {}).whole
