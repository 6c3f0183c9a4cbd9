"""Divided models that do not run the same submodules, or not in the same way, at every forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import ModelChangedError, UntraceableError
from tests.whole.divided import (
    Base,
    Branching,
    Rare,
    Sizes,
    X,
    compiled,
    submodules_of,
)


class Dropped(nn.Module):
    """Layers that are left out at random."""

    def __init__(self, draw: Callable[[], float], probability: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.draw, self.probability = draw, probability

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if self.draw() >= self.probability:
                x = x + layer(x).tanh()
        return self.head(x)


def by_torch() -> float:
    return float(torch.rand(()))


@pytest.mark.parametrize("draw", [by_torch, random.random, np.random.rand])
def test_layers_that_are_dropped_at_random(draw: Callable[[], float]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Dropped(draw)
    net = compiled(model)
    assert [registration.layer for registration in net.registrations] == ["linear"] * 4
    counts = {registration.parameters: set[float]() for registration in net.registrations}
    for _ in range(12):
        moments = net.record((X,), {})
        for key, sums in moments.statistics.items():
            counts[key].add(float(sums["count"]))
        draw(), net(X)
    assert counts.pop(("head.weight", "head.bias")) == {6.0}
    assert all(count == {0.0, 6.0} for count in counts.values())


class Gated(Base):
    def between(self, h: Tensor) -> Any:
        return self.middle(h) if h.sum() > 0 else h


def test_a_layer_that_does_not_run_counts_as_no_rows_of_that_batch() -> None:
    """F = c A ⊗ G: A and G are of the batches that it ran in, and c, its rows a case, is of all batches."""
    model = Gated()
    with torch.no_grad():
        model.first.weight.copy_(torch.ones(5, 4))
    x = X.abs()
    est = kfac_fx.FisherEstimator(compiled(model, x), damping=1e-3, cov_ema_decay=1.0)
    factors = est.blocks[("middle.weight", "middle.bias")].factors
    est.update_covariances(x)
    before = factors["A"].value.clone()
    est.update_covariances(-10 * x)
    torch.testing.assert_close(factors["A"].value, before)
    assert factors["positions"].value == 0.5
    assert est.blocks[("last.weight", "last.bias")].factors["positions"].value == 1


def test_a_branch_that_was_not_taken_is_captured_without_inputs_and_proved_when_it_is() -> None:
    model = Rare()
    net = compiled(model)
    rows = {row.parameters: row for row in net.report.rows}
    assert rows[("rare.0.weight", "rare.0.bias")].uses == 0 and not rows[("rare.0.weight", "rare.0.bias")].generic
    emitted = submodules_of(net)
    assert emitted.checked == {0, 1, 2}
    moments = net.record((1e4 * X,), {})
    assert moments.statistics[("rare.0.weight", "rare.0.bias")]["count"] == 6
    assert emitted.checked == {0, 1, 2, 3}
    assert net.record((X,), {}).statistics[("rare.0.weight", "rare.0.bias")]["count"] == 0


def test_a_parameter_that_python_begins_to_read_is_an_error() -> None:
    net = compiled(Rare(wrong=True))
    with pytest.raises(ModelChangedError) as failure:
        net.record((1e4 * X,), {})
    text = str(failure.value)
    assert text.startswith("on these inputs Rare reads middle.weight outside of its captured submodules, as it did not")
    assert '"middle.weight": "generic"' in text


def test_a_call_that_no_graph_serves_is_captured_when_it_is_met() -> None:
    model = Sizes()
    short, long = [torch.randn(3, 4), torch.randn(2, 4)], [torch.randn(3, 4), torch.randn(7, 4)]
    net = compiled(model, short)
    assert len(submodules_of(net).captured) == 2
    assert net.record((short,), {}).statistics[("inner.linear.weight", "inner.linear.bias")]["count"] == 5
    assert net.record((long,), {}).statistics[("inner.linear.weight", "inner.linear.bias")]["count"] == 10
    (recorders,) = net.captures.recorders.values()
    assert [len(recorder.emitted.captured) for recorder in recorders] == [3]
    assert net.record((short,), {}).statistics[("inner.linear.weight", "inner.linear.bias")]["count"] == 5


def test_python_that_never_does_the_same_is_refused() -> None:
    class Counting(Sizes):
        sizes = iter(range(2, 1000))

        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward([torch.ones(next(Counting.sizes), 4)])

    refusal = r"Counting (computes something else than its graph|calls inner differently)"
    with pytest.raises(UntraceableError, match=refusal):
        compiled(Counting())


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.requires_grad else 3.0)


class WithAsking(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.middle = Asking(5, 5)


class AskingBetween(Branching):
    def between(self, h: Tensor) -> Tensor:
        return super().between(h) * (2.0 if h.requires_grad else 3.0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            WithAsking,
            "middle asks in forward whether a tensor needs a gradient (requires_grad, is_leaf or grad_fn), and "
            "WithAsking is captured in submodules, which run with gradients and without.\nLet middle decide",
        ),
        (
            AskingBetween,
            "AskingBetween computes something else where its parameters need no gradients, as in the forwards that "
            "check a step of KFAC. AskingBetween is captured in submodules, between which it may ask whether a tensor "
            "needs a gradient (requires_grad, is_leaf or grad_fn).\nLet it decide",
        ),
    ],
)
def test_a_divided_model_that_depends_on_gradients_is_refused(model: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(UntraceableError) as failure:
        compiled(model())
    assert str(failure.value) == f"{reason} by self.training, by an attribute of its own, or by an argument."


def test_python_between_submodules_may_ask_for_gradients_where_that_changes_no_output() -> None:
    class Hooking(Branching):
        def between(self, h: Tensor) -> Tensor:
            if h.requires_grad:
                h.register_hook(lambda grad: None)
            return super().between(h)

    assert submodules_of(compiled(Hooking())).captured


def test_a_model_that_differentiates_by_its_own_parameters_is_compiled() -> None:
    class Adapting(Branching):
        def between(self, h: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(h.sum(), self.first.bias, create_graph=True)
            return super().between(h) + slope.sum()

    assert submodules_of(compiled(Adapting())).captured
