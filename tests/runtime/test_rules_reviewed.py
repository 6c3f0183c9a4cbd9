"""A subclass makes its own steps, and the multiplier knows which parameters moved and which training is an old one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.rules import BlockStep, Regular, Update

CALLS: list[str] = []


@dataclass(frozen=True, kw_only=True, eq=False)
class Steepest(Regular):
    name: ClassVar[str] = "steepest"

    def direction(self, step: BlockStep) -> Update:
        CALLS.append("direction")
        return Update(step.g.clone(), {"velocity": step.g.clone()})


def problem() -> tuple[Tensor, Tensor, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return torch.randn(32, 4), torch.randint(3, (32,)), model


def train(optimizer: Any, net: Any, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def test_a_subclass_of_a_rule_with_whole_steps_makes_its_own() -> None:
    x, y, model = problem()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, 0.5, rule=Steepest(damping=0.1))
    CALLS.clear()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(optimizer, net, x, y, 1)
    assert CALLS == ["direction"]
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.5 * parameter.grad)


def test_parameters_of_a_group_without_lr_have_no_last_update() -> None:
    x, y, model = problem()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    first, second = ([*layer.parameters()] for layer in (model[0], model[2]))  # type: ignore[index]
    optimizer = kfac_fx.KFAC(net, params=[{"params": first, "lr": 0.0}, {"params": second}])
    train(optimizer, net, x, y, 2)
    assert not any(optimizer.state[parameter]["last_update"].any() for parameter in first)
    assert all(optimizer.state[parameter]["last_update"].any() for parameter in second)


def test_a_state_without_a_multiplier_is_no_first_check() -> None:
    x, y, model = problem()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, damping_adaptation_interval=1)
    train(optimizer, net, x, y, 3)
    state = optimizer.state_dict()
    for values in state["state"].values():
        for name in ("last_update", "kfac/soon"):
            values.pop(name, None)
        for name in ("multiplier", "peak_lr", "promised", "trust", "advance", "agreement", "agreed", "unit"):
            values.pop(f"kfac/{name}", None)
        if "kfac/norm" in values:
            values["kfac/norm"] = torch.full_like(values["kfac/norm"], torch.inf)
    with pytest.warns(
        UserWarning,
        match="of an earlier version, and these begin anew: multiplier, peak_lr, promised, trust, advance, agreement, "
        "agreed, unit, last_update.",
    ):
        optimizer.load_state_dict(state)
    train(optimizer, net, x, y, 1)
    assert float(optimizer.scalars["multiplier"]) <= 1.0


@pytest.mark.filterwarnings("error::kfac_fx.StalledWarning")
def test_a_write_through_data_after_the_first_checks_is_seen() -> None:
    x, y, model = problem()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, damping_adaptation_interval=1)
    train(optimizer, net, x, y, 5)
    for _ in range(40):
        noise = [0.02 * torch.randn_like(parameter) for parameter in model.parameters()]
        for parameter, part in zip(model.parameters(), noise, strict=True):
            parameter.data.add_(part)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for parameter, part in zip(model.parameters(), noise, strict=True):
            parameter.data.sub_(part)
        optimizer.step()
    assert float(optimizer._step_state.checks.size.ratio) < 10
