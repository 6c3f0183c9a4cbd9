"""A step that the first-order rule cannot take changes nothing, as one that K-FAC cannot take."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.tables import pairs


class Beside(nn.Module):
    """A layer in a Fisher block, and a parameter that only the training loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.beside = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Training:
    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Beside()
        self.net = kfac_fx.compile(self.model, loss="categorical")
        self.opt = kfac_fx.KFAC(
            self.net,
            **{"lr": 0.1, "damping": 0.1, "seed": 0, "estimation_mode": "empirical"} | options,
            first_order={"lr": 1e-3},
        )

    def step(self, number: int, factor: float = 1.0) -> None:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(number))
        loss = F.cross_entropy(self.net(x), (x[:, 0] > 0).long())
        self.opt.zero_grad()
        (loss + factor * self.model.beside.sum()).backward()
        self.opt.step(evaluate=lambda: F.cross_entropy(self.net(x), (x[:, 0] > 0).long()))

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pairs(
    ("options", {"": {}, "adapting": {"adapt_damping": True, "damping_adaptation_interval": 1}}),
    ("factor", [1e25, math.inf, math.nan]),
)
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_gradient_that_is_too_large_to_be_squared_freezes_nothing(factor: float, options: dict[str, Any]) -> None:
    clean, hit = Training(**options), Training(**options)
    for training in (clean, hit):
        training.step(0)
    before, velocity = hit.values(), hit.opt.state[hit.model.layer.weight]["velocity"].clone()
    hit.step(1, factor)
    assert all(map(torch.equal, hit.values(), before)) and hit.opt.skipped.item() == 1
    assert torch.equal(hit.opt.state[hit.model.layer.weight]["velocity"], velocity)
    hit.step(2)
    assert not torch.equal(hit.model.beside, before[-1]) and all(p.isfinite().all() for p in hit.values())


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_learning_rate_that_makes_the_update_infinite_moves_no_group() -> None:
    training = Training()
    training.step(0)
    before = training.values()
    (group,) = (group for group in training.opt.param_groups if group["first_order"])
    group["lr"] = 3e38
    training.step(1)
    assert all(map(torch.equal, training.values(), before)) and training.opt.skipped.item() == 1
    group["lr"] = 1e-3
    training.step(2)
    assert not any(map(torch.equal, training.values(), before))


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_the_moments_of_the_first_order_rule_stay_as_they_were() -> None:
    training = Training()
    training.step(0)
    before = copy.deepcopy(training.opt.state[training.model.beside])
    training.step(1, 1e25)
    after = training.opt.state[training.model.beside]
    assert all(torch.equal(before[name], after[name]) for name in ("exp_avg", "exp_avg_sq", "step"))
