"""Two processes of which one does something else: it leaves outputs out, gives a batch up, has none, has other options
or blocks, or is killed. Both take the steps of one process, or both raise an error.

One spawn serves all tests. Messages of different sizes end a process without an error, and so all of them.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from tests.processes import started

WORLD, CASES, STEPS, PATIENCE = 2, 12, 5, timedelta(seconds=60)
HALF = CASES // WORLD
REGULAR: dict[str, Any] = {"momentum_type": "regular", "lr": 0.05, "damping": 0.3}
RULES: dict[str, dict[str, Any]] = {
    "checked": {"damping_adaptation_interval": 1, "cov_update_every": 1},
    "qmodel": {"momentum_type": "qmodel", "momentum": None, "damping": 0.3},
    "regular": REGULAR,
}
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.body(x))
        return self.head(y), self.other(y)


class Training:
    """By one process, rank None, or by one of two."""

    def __init__(self, rank: int | None, approximations: dict[str, str] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = kfac_fx.compile(
            Heads().double(),
            loss=lambda outputs: [kfac_fx.losses.Categorical(output) for output in outputs],
            approximations=approximations,
        )
        group = None if rank is None else dist.new_group([0, 1], timeout=PATIENCE)
        self.opt = kfac_fx.KFAC(self.net, seed=0, process_group=group, **options)
        self.called: nn.Module = self.net
        if rank is not None:
            self.called = nn.parallel.DistributedDataParallel(
                self.net, process_group=group, find_unused_parameters=True
            )

    def loss(self, step: int, part: slice = slice(None), other: bool = True, size: float = 1.0) -> Tensor:
        """The part of this process in the mean loss of all cases in `part`."""
        x, y = batch(step)
        x, y = size * x[part], y[part]
        total, mine = len(x), slice(None) if self.rank is None else slice(self.rank * HALF, (self.rank + 1) * HALF)
        first, second = self.called(x[mine])
        result = F.cross_entropy(first, y[mine], reduction="sum")
        if other:
            result = result + F.cross_entropy(second, y[mine] % 2, reduction="sum")
        return result * (1 if self.rank is None else WORLD) / total

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    @property
    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(CASES, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (CASES,), generator=generator)


# --- trainings --------------------------------------------------------------------------------------------------------


def leaves_a_head_out(training: Training) -> None:
    for step in range(STEPS):
        training.step(training.loss(step, other=step < 2 or step == 4))


def gives_up(training: Training) -> None:
    """Both processes give a batch up, and the first one computes an accuracy in training mode."""
    for step in range(STEPS):
        if training.rank is not None and step in (1, 3):
            training.loss(step + 100, size=5.0).backward()
            training.opt.zero_grad()
        loss = training.loss(step)
        if training.rank == 0:
            training.net(batch(step + 200)[0])
        training.step(loss)


def averages_by_hand(training: Training) -> None:
    """In some steps the second process has no batch, or gives it up."""
    for step in range(STEPS):
        part = slice(HALF) if step in (2, 3) else slice(None)
        x, y = batch(step)
        mine = slice(None) if training.rank is None else slice(training.rank * HALF, (training.rank + 1) * HALF)
        has_batch = len(x[part][mine]) > 0
        if has_batch:
            first, second = training.net(x[part][mine])
            target = y[part][mine]
            loss = F.cross_entropy(first, target, reduction="sum") + F.cross_entropy(
                second, target % 2, reduction="sum"
            )
            (loss * (1 if training.rank is None else WORLD) / len(x[part])).backward()
        elif step == 3:
            training.net(5 * x)
        if training.rank is not None:
            for parameter in training.net.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD
        training.opt.step()
        training.opt.zero_grad()


TRAININGS: dict[str, tuple[Callable[[Training], None], dict[str, Any]]] = {
    **{
        f"leaves a head out, {rule}": (leaves_a_head_out, {**RULES[rule], "estimation_mode": "exact"}) for rule in RULES
    },
    "leaves a head out, empirical": (leaves_a_head_out, {**REGULAR, "estimation_mode": "empirical"}),
    "gives up, checked": (gives_up, {**RULES["checked"], "estimation_mode": "exact"}),
    "gives up, empirical": (gives_up, {**REGULAR, "estimation_mode": "empirical"}),
    "averages by hand": (averages_by_hand, {**REGULAR, "estimation_mode": "exact"}),
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {  # of the second process, and the row of the error
    "placement": ({"placement": "owners"}, "placement  'replicated' and 'owners'"),
    "block": (
        {"approximations": {"other": "diagonal"}},
        "the block of other.weight, other.bias  kron of [1, 2, 6] and diagonal of [1, 2, 6]",
    ),
}


def half_of_the_lr(training: Training, state: dict[str, Any]) -> None:
    training.opt.param_groups[0]["lr"] *= 0.5


def an_older_state(training: Training, state: dict[str, Any]) -> None:
    training.opt.load_state_dict(state)


# Changes of the second process between two steps, and the first row of the error.
LATER: dict[str, tuple[Callable[[Training, dict[str, Any]], None], str]] = {
    "half of the lr": (half_of_the_lr, "the group of "),
    "an older state": (an_older_state, "steps  2 and 1"),
}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    results: dict[str, Any] = {}
    for name, (train, options) in TRAININGS.items():
        training = Training(rank, **options)
        train(training)
        results[name] = training.parameters
    for name, (change, _) in LATER.items():
        training = Training(rank, **REGULAR)
        training.step(training.loss(0))
        kept = copy.deepcopy(training.opt.state_dict())
        training.step(training.loss(1))
        if rank:
            change(training, kept)
        with pytest.raises(ValueError) as error:
            training.step(training.loss(2))
        results[name] = str(error.value)
    for name, (others, _) in OTHERS.items():
        training = Training(rank, **{**REGULAR, **(others if rank else {})})
        with pytest.raises(ValueError) as error:
            training.step(training.loss(0))
        results[name] = str(error.value)
    torch.save(results, f"{folder}/{rank}.pt")
    training = Training(rank, **REGULAR)
    training.step(training.loss(0))
    training.loss(1).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as failure:
        training.opt.step()
    torch.save({**results, "killed": str(failure.value)}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, threads = tmp_path_factory.mktemp("processes"), torch.get_num_threads()
    (other,) = started(work, [1], str(folder))
    try:
        work(0, str(folder))  # this process is one of them: it has torch imported already
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()
    other.join(60)
    assert other.exitcode == -signal.SIGKILL
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_take_the_steps_of_one(results: list[dict[str, Any]], name: str) -> None:
    train, options = TRAININGS[name]
    whole = Training(None, **options)
    train(whole)
    for of_process in results:
        torch.testing.assert_close(of_process[name], whole.parameters, rtol=1e-7, atol=1e-8)
    assert torch.equal(results[0][name], results[1][name])


@pytest.mark.parametrize("name", LATER)
def test_other_options_of_a_later_step_are_refused(results: list[dict[str, Any]], name: str) -> None:
    for of_process in results:
        first, row, *_, last = of_process[name].splitlines()
        assert first == "2 processes train one model with different options:"
        assert row.strip().startswith(LATER[name][1])
        assert last.startswith("Give kfac_fx.compile and KFAC the same options in all processes.")


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_and_blocks_are_refused_before_the_first_message(
    results: list[dict[str, Any]], name: str
) -> None:
    for of_process in results:
        first, *rows, last = of_process[name].splitlines()
        assert first == "2 processes train one model with different options:"
        assert [row.strip() for row in rows] == [OTHERS[name][1]]
        assert last.startswith("Give kfac_fx.compile and KFAC the same options in all processes.")


def test_a_process_that_is_killed_ends_the_steps_of_the_others(results: list[dict[str, Any]]) -> None:
    assert results[0]["killed"].startswith("process 0 of 2 could not exchange ") and "killed" not in results[1]
