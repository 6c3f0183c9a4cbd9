"""Parameters that begin to move in a training, and an lr that is raised: no step goes too far for them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.linalg import matrices
from kfac_fx.optim.checks import Newcomers

AT, STEPS = 65, 90
UNTRAINED = 2.31  # about log 10, the loss of equal probabilities


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images).float() / 8 - 1, torch.tensor(labels)


class Network(nn.Module):
    """Layers of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.skipped = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.head, self.deep = nn.Linear(64, 10), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.first(x).relu()).relu()
        return self.head(x + self.skipped(x).relu() if self.deep else x)  # type: ignore[no-any-return]


class Training:
    """A training in which `way` lets parameters begin to move, or raises the lr, before step `AT`."""

    def __init__(self, way: str, begun: bool = False) -> None:
        """begun: whether it goes on with a state of after `AT`."""
        self.way, self.model, self.losses = way, Network(), list[float]()
        body = [*self.model.first.parameters(), *self.model.inner.parameters()]
        rest = [*self.model.skipped.parameters(), *self.model.head.parameters()]
        for parameter in body:
            parameter.requires_grad_(begun or way != "unfrozen")
        self.model.deep = way != "a path"
        self.net = kfac_fx.compile(self.model, loss="categorical")
        self.body = body
        params: Any = {"a group": rest, "an lr of zero": [{"params": rest}, {"params": body, "lr": 0.0}]}.get(way)
        self.opt = kfac_fx.KFAC(self.net, lr=0.05 if way == "a raised lr" else 1.0, params=params)

    def begin(self) -> None:
        if self.way == "unfrozen":
            for parameter in self.body:
                parameter.requires_grad_(True)
        elif self.way == "a group":
            self.opt.add_param_group({"params": self.body})
        elif self.way == "an lr of zero":
            self.opt.param_groups[1]["lr"] = 1.0
        elif self.way == "a path":
            self.model.deep = True
        else:
            self.opt.param_groups[0]["lr"] = 1.0

    def run(self, first: int, last: int) -> None:
        x, y = digits()
        for number in range(first, last):
            if number == AT:
                self.begin()
            chosen = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(number))
            self.opt.zero_grad()
            loss = F.cross_entropy(self.net(x[chosen]), y[chosen])
            loss.backward()
            self.opt.step()
            self.losses.append(loss.item())


WAYS = ["unfrozen", "a group", "an lr of zero", "a path", "a raised lr"]


SAVED = [AT - 1, AT, AT + 1, AT + 2]


@functools.cache
def trained(way: str) -> tuple[list[float], dict[int, Any]]:
    """The losses of a training, and the weights and the state that it had before each step of `SAVED`."""
    training, states, done = Training(way), {}, 0
    for saved in SAVED:
        training.run(done, saved)
        states[saved] = copy.deepcopy((training.model.state_dict(), training.opt.state_dict()))
        done = saved
    training.run(done, STEPS)
    return training.losses, states


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_stays_low_where_parameters_begin_to_move(way: str) -> None:
    losses, _ = trained(way)
    assert sum(losses[AT - 10 : AT]) / 10 < 0.5
    assert max(losses[AT:]) < UNTRAINED / 2
    assert sum(losses[-10:]) / 10 < 0.25


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("way", ["unfrozen", "an lr of zero", "a raised lr"])
def test_a_resumed_training_begins_anew_where_the_first_did(way: str, saved: int) -> None:
    losses, states = trained(way)
    weights, state = states[saved]
    resumed = Training(way, begun=saved > AT)
    resumed.model.load_state_dict(weights)
    resumed.opt.load_state_dict(copy.deepcopy(state))
    resumed.run(saved, AT + 20)
    assert resumed.losses == losses[saved : AT + 20]


def test_networks_that_take_turns_begin_once() -> None:
    newcomers, begun = Newcomers(), []
    for step in range(200):
        turn, other = ("generator", "discriminator") if step % 2 else ("discriminator", "generator")
        if newcomers.look(frozenset([turn]), lambda other=other: [other], step, step // 10 * 10 - 20):  # type: ignore[misc]
            begun.append(step)
    assert begun == [1]


@pytest.mark.parametrize(("rest", "begins"), [(15, False), (60, True)])
def test_a_long_rest_counts_and_a_short_one_does_not(rest: int, begins: bool) -> None:
    newcomers = Newcomers()
    both, alone = frozenset(["body", "head"]), frozenset(["head"])
    for step in range(20):
        assert not newcomers.look(both, list, step, 0)
    for step in range(20, 20 + rest):
        assert not newcomers.look(alone, lambda: ["body"], step, 0)
    assert newcomers.look(both, list, 20 + rest, long_ago=rest) == begins


def test_parameters_without_a_gradient_for_long_do_not_begin_anew() -> None:
    newcomers = Newcomers()
    assert not newcomers.look(frozenset(["body", "head"]), list, 0, 0)
    assert not newcomers.look(frozenset(["head"]), list, 1, 0)
    assert not newcomers.look(frozenset(["body", "head"]), list, 500, 490)


def test_numbers_of_a_checkpoint_are_as_good_as_the_newcomers_themselves() -> None:
    names = ["never", "rested", "left", "moves"]
    newcomers = Newcomers()
    newcomers.look(frozenset(["rested", "left", "moves"]), list, 0, 0)
    newcomers.look(frozenset(["moves"]), lambda: ["rested"], 1, 0)
    numbers = newcomers.numbers(names, 2)
    assert numbers.tolist() == [[0, 0], [1, 1], [1, 0], [2, 0]]
    assert Newcomers.of(numbers, names, 2).numbers(names, 2).tolist() == numbers.tolist()
    assert Newcomers.of(numbers, names, 2).present == newcomers.present
    assert Newcomers.of(torch.zeros(4, 2), names, 0).present is None


class WithLoss(nn.Module):
    """Forward computes the loss, and leaves out cases without a target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y, ignore_index=-100)


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_check_on_cases_without_targets_undoes_nothing(
    parts: int, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over no cases is NaN at all weights, with a gradient of zero, so it is no loss that has risen."""
    if not on_host:  # as on an accelerator, where the host does not know that the gradient is zero
        monkeypatch.setattr(matrices, "on_host", lambda condition: False)
    x, y = digits()
    model = WithLoss()
    net = kfac_fx.compile(model, (x[:8], y[:8]))
    opt = kfac_fx.KFAC(net)

    def step(number: int, unknown: int) -> None:
        chosen = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(number))
        opt.zero_grad()
        for part, rows in enumerate(chosen.chunk(parts)):
            targets = torch.full_like(rows, -100) if part < unknown else y[rows]
            (net(x[rows], targets) / parts).backward()
        opt.step()

    for number in range(20):
        step(number, 0)
    with torch.no_grad():
        before = float(model(x, y))
    step(20, 1)  # this step has a check
    with torch.no_grad():
        assert float(model(x, y)) < 1.2 * before
    assert int(opt.skipped) == (parts == 1)


@pytest.mark.filterwarnings("ignore:.*have no target:UserWarning")
@pytest.mark.filterwarnings("ignore:1 of the first .* changed nothing:kfac_fx.StalledWarning")
def test_a_first_batch_without_targets_leaves_no_trace() -> None:
    """Its gradient of zero halved the means of gradients and of their squares, for a hundred steps."""
    x, y = digits()

    def trained(first: bool) -> tuple[list[Tensor], kfac_fx.KFAC]:
        net = kfac_fx.compile(WithLoss(), (x[:8], y[:8]))
        opt = kfac_fx.KFAC(net, estimation_mode="empirical")
        for number in range(0 if first else 1, 4):
            rows = slice(64 * number, 64 * number + 64)
            opt.zero_grad()
            net(x[rows], y[rows] if number else torch.full_like(y[rows], -100)).backward()
            opt.step()
        return [parameter.detach() for parameter in net.parameters()], opt

    (values, opt), (others, other) = trained(True), trained(False)
    assert all(map(torch.equal, values, others))
    assert (opt.counter, int(opt.skipped)) == (3, 1) and torch.equal(opt.rho, other.rho)
