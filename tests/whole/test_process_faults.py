"""Two processes with batches that are empty, uneven or not finite, and processes that raise an error or end.

One spawn serves all tests. Every fault has a process group of its own, which it leaves broken.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import kfac_fx
from tests.processes import started

pytestmark = pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")  # of batches that are not finite
WORLD, CASES, PATIENCE = 2, 12, timedelta(seconds=5)
ENDS = {3: 12, 4: 9, 5: 12, 6: 1}  # by step, the number of cases of the first process where it is not one half
BROKEN = (2, 7)  # the steps of which the last case is not finite
OPTIONS: dict[str, dict[str, Any]] = {
    "regular": {"lr": 0.05, "damping": 0.3, "estimation_mode": "exact", "placement": "owners"},
    "qmodel": {"momentum_type": "qmodel", "momentum": None, "damping": 0.3, "estimation_mode": "exact"},
    "adaptive": {
        "momentum_type": "adaptive",
        "estimation_mode": "exact",
        "damping_adaptation_interval": 1,
        "placement": "owners",
    },
    "empirical": {"lr": 0.05, "damping": 0.3, "estimation_mode": "empirical"},
}


class Net(nn.Module):
    """With a generic parameter and one behind a Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)
        self.floor, self.steps = nn.Parameter(torch.zeros(5) - 1), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.maximum(torch.tanh(self.first(x)), self.floor) + torch.cumsum(self.steps, 0)
        z: Tensor = self.last(y)
        return z


class Training:
    """By this process and, with a group, the other one."""

    def __init__(self, options: dict[str, Any], rank: int | None, group: Any = None) -> None:
        torch.manual_seed(0)
        self.rank, self.net = rank, kfac_fx.compile(Net().double(), loss="categorical")
        self.opt = kfac_fx.KFAC(self.net, seed=0, process_group=group, **options)
        self.called: nn.Module = self.net
        if rank is not None:
            self.called = nn.parallel.DistributedDataParallel(self.net, process_group=group)

    def backward(self, step: int, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(CASES, 3, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (CASES,), generator=generator)
        if step in BROKEN:
            x[-1] = torch.nan
        end = ENDS.get(step, CASES // 2)
        part = slice(None) if self.rank is None else slice(end, None) if self.rank else slice(end)
        processes = 1 if self.rank is None else WORLD
        self.opt.zero_grad()
        loss = F.cross_entropy(self.called(x[part]), y[part], reduction="sum") * processes / CASES
        (factor * loss).backward()

    def steps(self, number: int) -> dict[str, Any]:
        for step in range(number):
            self.backward(step)
            self.opt.step()
        parameters = torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])
        return {"parameters": parameters, "damping": float(self.opt.damping), "skipped": int(self.opt.skipped)}


def factors_told(rank: int, options: dict[str, Any], factor: float = 1.0) -> list[str]:
    """The first lines of the warnings of a first step with uneven parts of a batch."""
    training = Training(options, rank, new_group())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.backward(4, factor)
        training.opt.step()
    return [str(seen.message).splitlines()[0] for seen in caught if seen.category is kfac_fx.LossScaleWarning]


def new_group() -> Any:
    return dist.new_group([0, 1], timeout=PATIENCE)


def raises_between_backward_and_step(rank: int) -> str:
    training = Training(OPTIONS["regular"], rank, new_group())
    training.steps(2)
    training.backward(8)
    try:
        if rank == 1:
            raise ValueError("no memory for this batch")
        training.opt.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("a step without the other process")


def raises_while_saving(rank: int, folder: str) -> list[bool]:
    """Whether the checkpoints before and of the fault are whole."""
    group = new_group()
    training = Training(OPTIONS["regular"], rank, group)
    training.steps(2)
    dcp.save(training.opt.state_dict()["state"], checkpoint_id=f"{folder}/before", process_group=group)
    if rank == 0:
        with pytest.raises((RuntimeError, dcp.api.CheckpointException)):
            dcp.save(training.opt.state_dict()["state"], checkpoint_id=f"{folder}/after", process_group=group)
    return [Path(f"{folder}/{name}/.metadata").exists() for name in ("before", "after")]


def joins(rank: int) -> str:
    training = Training(OPTIONS["regular"], rank, new_group())
    with pytest.raises(ValueError) as error, training.called.join():  # type: ignore[operator]
        training.backward(8)
    return str(error.value)


def dies(rank: int) -> str:
    training = Training(OPTIONS["regular"], rank, new_group())
    training.steps(2)
    training.backward(8)
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as error:
        training.opt.step()
    return str(error.value)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    results: dict[str, Any] = {name: Training(o, rank, new_group()).steps(10) for name, o in OPTIONS.items()}
    results["right factor"] = factors_told(rank, OPTIONS["regular"])
    results["wrong factor"] = factors_told(rank, OPTIONS["regular"], 3.0)
    results["joined"] = joins(rank)
    results["raised"] = raises_between_backward_and_step(rank)
    results["saved"] = raises_while_saving(rank, folder)
    torch.save(results, f"{folder}/{rank}.pt")
    results["died"] = dies(rank)
    torch.save(results, f"{folder}/{rank}.pt")


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
    assert other.exitcode == 3
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", OPTIONS)
def test_empty_uneven_and_broken_batches_are_those_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    whole = Training({**OPTIONS[name], "placement": "replicated"}, None).steps(10)
    assert whole["skipped"] == len(BROKEN)
    for of_process in results:
        torch.testing.assert_close(of_process[name]["parameters"], whole["parameters"], rtol=1e-9, atol=1e-9)
        assert of_process[name]["damping"] == pytest.approx(whole["damping"], rel=1e-9)
        assert of_process[name]["skipped"] == whole["skipped"]


def test_a_factor_is_told_of_the_mean_over_the_cases_of_all_processes(results: list[dict[str, Any]]) -> None:
    """Parts of 9 and 3 cases: sums that are divided by 6 are 1.5 and 0.5 times the means over their own cases."""
    for of_process in results:
        assert of_process["right factor"] == []
        (line,) = of_process["wrong factor"]
        told = "the trained loss is 3 times the mean of the registered Categorical loss over its 12 cases; "
        assert line.startswith(told)


def test_a_process_that_raises_an_error_ends_the_steps_of_the_others(results: list[dict[str, Any]]) -> None:
    assert results[1]["raised"] == "no memory for this batch"
    first, second = results[0]["raised"].splitlines()
    assert first.startswith("process 0 of 2 could not exchange sums with the others: ")
    assert second.startswith("Another process has ended or raised an error, was slower than the timeout")
    assert second.endswith("Start all processes again, from the last checkpoint.")


def test_a_process_that_ends_ends_the_steps_of_the_others(results: list[dict[str, Any]]) -> None:
    assert results[0]["died"].startswith("process 0 of 2 could not exchange sums with the others: ")
    assert "died" not in results[1]


def test_a_join_is_refused_in_all_processes(results: list[dict[str, Any]]) -> None:
    for of_process in results:
        assert of_process["joined"].startswith("inside of join(), processes without batches take part in the messages")
        assert "Write Join([wrapped, optimizer]) in its place" in of_process["joined"]
        assert "calls the net with an empty batch, x[:0], and takes all steps with the others" in of_process["joined"]


def test_a_checkpoint_that_one_process_did_not_save_is_none(results: list[dict[str, Any]]) -> None:
    assert results[0]["saved"] == [True, False]
