"""Proofs, captures, recordings and measurements write into no tensor that the user's own graph has saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.passes.tracing.effects import closure_undone
from tests.tables import every

CASES = 6


class Positions(nn.Module):
    """Reads rows of a table by the numbers in a buffer, which the backward of the table needs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(3, 2)
        self.register_buffer("numbers", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.table(self.numbers).mean(0)
        return self.head(hidden)


class Average(nn.Module):
    """Multiplies by a buffer that it has written into: the backward of the product needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.head(torch.tanh(self.first(x)) * self.mean)


class Branch(Average):
    """As `Average`, with a branch on values, so that only its submodules have graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y if x.sum() > -1e9 else -y


class Teacher(Branch):
    """As `Branch`, with a parameter that follows another one in forward; the backward of its product needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 3, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.1)
        y: Tensor = super().forward(self.first(x) @ self.teacher.weight)
        return y


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "positions": Positions, "average": Average, "branch": Branch, "teacher": Teacher, "batch norm": normalized,
}  # fmt: skip


def prove_again(net: Any, x: Tensor) -> None:
    net.captures.recorders.clear()
    net.recorder((x,), {})


def record(net: Any, x: Tensor) -> None:
    net.record((x,), {})


def record_exactly(net: Any, x: Tensor) -> None:
    net.record((x,), {}, mode="exact")


def measure(net: Any, x: Tensor) -> None:
    with closure_undone(net.buffers(), net.parameters(), [], None):
        net(x)


def compile_again(net: Any, x: Tensor) -> None:
    kfac_fx.compile(net.model, (x,), loss="normal")


EVENTS = prove_again, record, record_exactly, measure, compile_again
PAIRS = [
    pytest.param(name, event, id=f"{name}, {event.__name__}".replace("_", " "))
    for name, event in product(MODELS, EVENTS)
    if (name, event) != ("teacher", measure)
]


def nothing(net: Any, x: Tensor) -> None:
    pass


@cache
def gradients(name: str, event: Callable[[Any, Tensor], None]) -> list[Tensor]:
    """The gradients of a model of `MODELS`, where something happens between forward and backward."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(CASES, 3)
    net = kfac_fx.compile(model, (x,), loss="normal")
    loss = net(x).square().mean()
    buffers = [buffer.clone() for buffer in model.buffers()]
    event(net, x)
    assert all(map(torch.equal, model.buffers(), buffers))
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("name", "between"), every(4, PAIRS))
def test_a_backward_is_the_same_whatever_runs_between_it_and_its_forward(
    name: str, between: Callable[[Any, Tensor], None]
) -> None:
    expected = gradients(name, nothing)
    assert len(expected) > 2 and all(map(torch.equal, gradients(name, between), expected))


class Config:
    kind: str | None = None


class Body(Positions):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config


class Classifier(nn.Module):
    """Sets a value in a configuration that its submodule shares, in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.body = Body(self.config)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = "one label"
        return F.cross_entropy(self.body(x), labels)


def test_a_configuration_that_forward_sets_and_submodules_share_is_captured_once() -> None:
    x, labels = torch.randn(CASES, 3), torch.randint(2, (CASES,))
    net = kfac_fx.compile(Classifier(), (x, labels))
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        net(x, labels).backward()
        optimizer.step()
    assert len(net.captures.recorders) == 1 and all(len(kind) == 1 for kind in net.captures.recorders.values())
