"""Two and three processes that divide the Fisher blocks among themselves take the steps of one process.

One spawn of three processes serves all tests; the trainings of two processes run in a group of the first two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.factors import inverses

STEPS, CASES, WORLD = 20, 12, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "regular": {
        "lr": 0.05, "damping": 0.3, "estimation_mode": "empirical", "norm_constraint": 1e-2, "weight_decay": 0.01,
        "adapt_damping": True, "damping_adaptation_interval": 2, "invert_every": 3,
    },
    "adam": {
        "lr": 0.05, "damping": 0.3, "momentum_type": "adam", "estimation_mode": "empirical", "norm_constraint": 1e-2,
        "norm_constraint_form": "gradient", "cov_update_every": 2,
    },
    "qmodel": {
        "momentum_type": "qmodel", "momentum": None, "damping": 0.3, "estimation_mode": "exact", "adapt_damping": True,
        "damping_adaptation_interval": 1, "invert_every": 2,
    },
    "adaptive": {"estimation_mode": "exact"},
}  # fmt: skip
TRAININGS = [
    *((name, size, "owners") for name in OPTIONS for size in (2, 3)),
    ("regular", 3, "round_robin"),
    ("regular", 2, "replicated"),
]


class Net(nn.Module):
    """With blocks of several shapes, a layer of two uses, a generic parameter, and a parameter of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.norm, self.steps = nn.LayerNorm(5), nn.Parameter(torch.zeros(5))
        self.halves = nn.Parameter(torch.randn(10, 5) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.middle(torch.tanh(self.first(x)))) + torch.cumsum(self.steps, 0)
        y = torch.tanh(F.linear(y, self.halves[:5])) * torch.sigmoid(F.linear(y, self.halves[5:]))
        z: Tensor = self.last(torch.tanh(self.middle(y)))
        return z


def train(options: dict[str, Any], part: slice, group: Any = None) -> dict[str, Any]:
    """All parameters after the steps, the damping, and what this process kept and decomposed."""
    torch.manual_seed(0)
    net = kfac_fx.compile(Net().double(), loss="categorical")
    opt = kfac_fx.KFAC(net, seed=0, process_group=group, **options)
    called: Callable[..., Any] = net if group is None else nn.parallel.DistributedDataParallel(net, process_group=group)
    generator = torch.Generator().manual_seed(1)
    decomposed = 0

    def counted(matrices: Tensor, *args: Any) -> Any:
        nonlocal decomposed
        decomposed += len(matrices)
        return dense_roots(matrices, *args)

    dense_roots, inverses.dense_roots = inverses.dense_roots, counted
    try:
        for _ in range(STEPS):
            x = torch.randn(CASES, 3, generator=generator, dtype=torch.float64)
            y = torch.randint(4, (CASES,), generator=generator)

            def closure(x: Tensor = x[part], y: Tensor = y[part]) -> Tensor:
                opt.zero_grad()
                loss = F.cross_entropy(called(x), y)
                loss.backward()
                return loss

            opt.step(closure)
    finally:
        inverses.dense_roots = dense_roots
    est = opt.estimator
    return {
        "parameters": torch.cat([parameter.detach().flatten() for parameter in net.parameters()]),
        "damping": float(opt.damping),
        "decomposed": decomposed,
        "elements": {block: sum(t.numel() for t in b.state().values()) - 2 for block, b in est.blocks.items()},
        "owners": {block: b.group.owner for block, b in est.blocks.items()},
        "refused": None if group is None else [read(b) for b in est.blocks.values() if not b.group.here],
        "counters": opt.counters(),
    }


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """The training of one process with the whole of every batch."""
    return train(OPTIONS[name], slice(None))


def read(block: Any) -> list[str]:
    """The errors of reading a block that another process keeps."""
    said = []
    for read_it in (lambda: next(iter(block.factors.values())).value, block.full_fisher_block):
        with pytest.raises(kfac_fx.NotRegisteredError) as error:
            read_it()
        said.append(str(error.value))
    return said


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    results = {
        (name, size, placement): train(
            {**OPTIONS[name], "placement": placement},
            slice(rank * CASES // size, (rank + 1) * CASES // size),
            groups[size],
        )
        for name, size, placement in TRAININGS
        if rank < size
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


Results = list[dict[tuple[str, int, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder, threads = tmp_path_factory.mktemp("processes"), torch.get_num_threads()
    spawn = mp.get_context("spawn")
    others = [spawn.Process(target=work, args=(rank, str(folder)), daemon=True) for rank in range(1, WORLD)]
    for other in others:
        other.start()
    work(0, str(folder))  # this process is one of them: it has torch imported already
    torch.set_num_threads(threads)
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


def of_all(results: Results, training: tuple[str, int, str]) -> list[dict[str, Any]]:
    return [of_process[training] for of_process in results if training in of_process]


@pytest.mark.parametrize("name", OPTIONS)
def test_processes_take_the_steps_of_one(results: Results, name: str) -> None:
    whole = alone(name)
    trainings = [training for training in TRAININGS if training[0] == name]
    assert len(trainings) >= 2
    for training in trainings:
        for result in of_all(results, training):
            torch.testing.assert_close(result["parameters"], whole["parameters"], rtol=1e-9, atol=1e-9)
            assert result["damping"] == pytest.approx(whole["damping"], rel=1e-9)
            assert result["counters"] == whole["counters"]


@pytest.mark.parametrize("training", [t for t in TRAININGS if t[2] != "replicated"])
def test_every_inverse_is_computed_once_over_all_processes(results: Results, training: tuple[str, int, str]) -> None:
    total = alone(training[0])["decomposed"]
    of_each = [result["decomposed"] for result in of_all(results, training)]
    assert sum(of_each) == total > 0
    assert max(of_each) < total


def test_replicated_blocks_are_decomposed_everywhere(results: Results) -> None:
    of_each = [result["decomposed"] for result in of_all(results, ("regular", 2, "replicated"))]
    assert of_each == 2 * [alone("regular")["decomposed"]]


@pytest.mark.parametrize("size", [2, 3])
def test_the_fullest_process_has_its_part_and_at_most_a_largest_block(results: Results, size: int) -> None:
    everything = alone("regular")["elements"]
    of_each = [result["elements"] for result in of_all(results, ("regular", size, "owners"))]
    for block, elements in everything.items():
        assert sorted(of_process[block] for of_process in of_each) == [0] * (size - 1) + [elements]
    fullest = max(sum(of_process.values()) for of_process in of_each)
    assert fullest <= sum(everything.values()) / size + max(everything.values())


def test_all_processes_know_the_owners(results: Results) -> None:
    for training in TRAININGS:
        first, *others = [result["owners"] for result in of_all(results, training)]
        assert all(owners == first for owners in others)
    assert set(of_all(results, ("regular", 3, "owners"))[0]["owners"].values()) == {0, 1, 2}


def test_a_block_of_another_process_says_who_keeps_it(results: Results) -> None:
    for result in of_all(results, ("regular", 3, "owners")):
        assert result["refused"]
        for value, whole in result["refused"]:
            assert "kept by another process of the group" in value and "placement='replicated'" in value
            assert "are kept by process " in whole
