"""Batches as they come at the end of an epoch, after a filter, or broken: empty, of one case, not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx

OPTIONS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "empirical": {"estimation_mode": "empirical"},
    "fraction": {"fraction": 0.5},
    "burn-in": {"num_burnin_steps": 2},
    "qmodel": {"lr": None, "momentum": None, "momentum_type": "qmodel"},
}


def made(**options: Any) -> tuple[Any, kfac_fx.KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net = kfac_fx.compile(model, (torch.zeros(2, 4),), loss="categorical")
    return net, kfac_fx.KFAC(net, **{"lr": 0.1, "damping": 0.1, "seed": 0, **options})


def batch(cases: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))[:cases], torch.arange(cases) % 3


def train(net: Any, opt: kfac_fx.KFAC, *batches: tuple[Tensor, Tensor]) -> list[Tensor]:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_an_empty_first_batch_is_as_if_it_had_not_been(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    same, without = made(**options)
    found = train(net, opt, batch(0), *[batch(8)] * 4)
    expected = train(same, without, *[batch(8)] * 4)
    if options.get("estimation_mode") == "empirical" or "momentum_type" in options:  # nothing random
        torch.testing.assert_close(found, expected)
    assert opt.counter == without.counter
    assert F.cross_entropy(net(batch(8)[0]), batch(8)[1]) < F.cross_entropy(made()[0](batch(8)[0]), batch(8)[1])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_empty_batch_later_is_in_no_factor(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    train(net, opt, *[batch(8)] * 3)
    before = {name: tensor.clone() for name, tensor in opt.estimator.state_dict().items() if "moment" in name}
    found = train(net, opt, batch(0))
    after = opt.estimator.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.isfinite().all() for parameter in found)
    assert opt.counters()["skipped statistics"] == 0


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_case_is_a_batch(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    before = F.cross_entropy(net.model(batch(1)[0]), batch(1)[1])
    train(net, opt, *[batch(1)] * 4)
    assert F.cross_entropy(net.model(batch(1)[0]), batch(1)[1]) < before
    assert opt.counters()["skipped statistics"] == opt.counters()["skipped steps"] == 0


class Shifted(nn.Module):
    """With a generic parameter, and with a layer that does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table, self.last = nn.Linear(4, 3), nn.Linear(2, 3), nn.Linear(3, 3)
        self.steps, self.places = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x)) + self.table(torch.ones(1, 2)) + torch.cumsum(self.places, 0)
        z: Tensor = self.last(torch.hypot(y, self.steps))
        return z


@pytest.mark.parametrize("mode", ["gradients", "empirical", "curvature_prop", "exact"])
def test_a_batch_without_cases_has_the_sums_of_every_registration(mode: str) -> None:
    net = kfac_fx.compile(Shifted(), (torch.zeros(2, 4),), loss="categorical")
    whole, nothing = (
        net.record((torch.randn(n, 4),), {}, mode=mode, targets=torch.arange(n) if mode == "empirical" else None)
        for n in (2, 0)
    )
    assert nothing.cases == 0 and any(registration.generic for registration in net.registrations)
    for key, sums in whole.statistics.items():
        of_none = nothing.statistics[key]
        assert sums.keys() == of_none.keys()
        assert not any(total.any() for total in of_none.values())


def test_a_fraction_of_less_than_a_case_is_a_case() -> None:
    net, _ = made()
    assert [net.record((batch(n)[0],), {}, fraction=1e-6).cases for n in (8, 1, 0)] == [1, 1, 0]


@pytest.mark.parametrize("example", [torch.ones(0, 4), torch.full((2, 4), torch.nan)])
def test_an_example_that_proves_nothing_leaves_the_proof_to_the_next_batch(example: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net = kfac_fx.compile(model, (example,), loss="categorical")
    assert not net.recorder((example,), {}).proven
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    train(net, opt, batch(8))
    assert net.recorder((batch(8)[0],), {}).proven and opt.counter == 1


def test_an_empty_example_has_cases_of_its_first_dimension() -> None:
    net = kfac_fx.compile(nn.Linear(4, 3), (torch.ones(0, 4),), loss="normal")
    assert [net.record((torch.ones(n, 4),), {}, fraction=0.5).cases for n in (0, 4)] == [0, 2]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_a_batch_with_a_nan_changes_nothing(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    x, y = batch(8)
    broken = x.clone()
    broken[0, 0] = torch.nan
    before = train(net, opt, (x, y), (x, y), (x, y))
    torch.testing.assert_close(train(net, opt, (broken, y)), before, rtol=0, atol=0)
    assert opt.counters()["skipped steps"] == 1
    assert all(parameter.isfinite().all() for parameter in train(net, opt, (x, y)))


def test_an_empty_batch_of_squared_errors_moves_nothing_but_the_momentum() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    net = kfac_fx.compile(model, (torch.zeros(2, 4),), loss="mse")
    optimizer = kfac_fx.KFAC(net)
    for cases in (8, 0, 8):
        optimizer.zero_grad()
        (net(batch(cases)[0]) - 1).square().sum().div(max(1, 3 * cases)).backward()
        optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())
