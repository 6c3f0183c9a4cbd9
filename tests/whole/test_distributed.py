"""Two processes, each with half of every batch: the steps are those of one process with all of it."""

from __future__ import annotations

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

STEPS, CASES, WORLD = 3, 6, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "empirical": {"lr": 0.1, "estimation_mode": "empirical"},
    "qmodel": {
        "momentum_type": "qmodel", "momentum": None, "estimation_mode": "exact",
        "adapt_damping": True, "damping_adaptation_interval": 1, "invert_every": 2,
    },
    "sampled": {"lr": 0.1},
}  # fmt: skip


class Net(nn.Module):
    """With a generic parameter, whose statistics are no sums over cases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)
        self.steps = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)) + torch.cumsum(self.steps, 0))
        return y


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, CASES, 3, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(4, (STEPS, CASES), generator=generator), strict=True))


def train(
    options: dict[str, Any], part: slice, wrap: Callable[[nn.Module], nn.Module] = lambda net: net
) -> tuple[Tensor, float]:
    """All parameters after the steps, and the damping."""
    torch.manual_seed(0)
    net = kfac_fx.compile(Net().double(), loss="categorical")
    opt, called = kfac_fx.KFAC(net, **{"damping": 0.3, "seed": 0, **options}), wrap(net)
    for x, y in batches():

        def closure(x: Tensor = x[part], y: Tensor = y[part]) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(called(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    return torch.cat([p.detach().flatten() for p in net.parameters()]), float(opt.damping)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    half = slice(rank * CASES // WORLD, (rank + 1) * CASES // WORLD)
    found: dict[str, Any] = {
        name: train(options, half, nn.parallel.DistributedDataParallel) for name, options in OPTIONS.items()
    }
    try:
        train(OPTIONS["sampled"], half)
    except RuntimeError as error:
        found["apart"] = str(error)
    for case, options in {
        "options": {"damping": 0.1 * (rank + 1)},
        "intervals": {"cov_update_every": rank + 1},
    }.items():
        try:
            train({**OPTIONS["empirical"], **options}, half, nn.parallel.DistributedDataParallel)
        except ValueError as error:
            found[case] = str(error)
    inside = kfac_fx.compile(nn.parallel.DistributedDataParallel(Net().double()), loss="categorical")
    kfac_fx.KFAC(inside, lr=0.1, damping=0.1, estimation_mode="empirical")
    try:
        inside(batches()[0][0])
    except ValueError as error:
        found["inside"] = str(error)
    alone = dist.new_group([rank], use_local_synchronization=True)
    found["alone"] = train({**OPTIONS["empirical"], "process_group": alone}, half)
    model = Net().double()
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})
    net = kfac_fx.compile(model, loss="categorical")
    est = kfac_fx.FisherEstimator(net, estimation_mode="exact", process_group=dist.group.WORLD)
    est.update_covariances(batches()[0][0][: 2 + 2 * rank])  # batches of different sizes
    found["fisher"] = est.blocks["first.weight", "first.bias"].full_fisher_block()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, threads = tmp_path_factory.mktemp("processes"), torch.get_num_threads()
    other = mp.get_context("spawn").Process(target=work, args=(1, str(folder)), daemon=True)
    other.start()
    work(0, str(folder))  # this process is one of them: it has torch imported already
    torch.set_num_threads(threads)
    other.join(60)
    assert other.exitcode == 0
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", ["empirical", "qmodel"])
def test_two_processes_take_the_steps_of_one(found: list[dict[str, Any]], name: str) -> None:
    whole, damping = train(OPTIONS[name], slice(None))
    for result in found:
        torch.testing.assert_close(result[name][0], whole)
        assert result[name][1] == pytest.approx(damping)


def test_sampled_statistics_are_the_same_in_all_processes_and_their_samples_are_not(
    found: list[dict[str, Any]],
) -> None:
    torch.testing.assert_close(found[0]["sampled"][0], found[1]["sampled"][0], rtol=0, atol=0)
    assert not torch.equal(found[0]["sampled"][0], train(OPTIONS["sampled"], slice(None))[0])


def test_gradients_that_nobody_averages_are_refused(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["apart"].startswith("the gradients of 2 processes differ: their norms are ")
        assert "DistributedDataParallel(net)" in result["apart"] and "process_group=g" in result["apart"]


def test_processes_with_different_options_are_refused_at_the_first_step(found: list[dict[str, Any]]) -> None:
    for result in found:
        first, *rows, last = result["options"].splitlines()
        assert first == "2 processes train one model with different options:"
        assert [row.split(maxsplit=1) for row in rows] == [["damping", "0.1 and 0.2"]]
        assert last.startswith("Give KFAC the same options in all processes.")
        assert "cov_update_every  1 and 2" in result["intervals"]


def test_recording_in_training_inside_of_data_parallel_is_refused(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert "with Net in DistributedDataParallel inside of the compiled module" in result["inside"]
        assert result["inside"].endswith("net = kfac_fx.compile(model), and train with DistributedDataParallel(net).")


def test_a_process_in_a_group_of_its_own_trains_alone(found: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        half = slice(rank * CASES // WORLD, (rank + 1) * CASES // WORLD)
        torch.testing.assert_close(result["alone"][0], train(OPTIONS["empirical"], half)[0])


def test_an_estimator_adds_up_batches_of_different_sizes(found: list[dict[str, Any]]) -> None:
    model = Net().double()
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})
    x = batches()[0][0]
    est = kfac_fx.FisherEstimator(kfac_fx.compile(model, loss="categorical"), estimation_mode="exact")
    est.update_covariances(torch.cat([x[:2], x[:4]]))
    for result in found:
        torch.testing.assert_close(result["fisher"], est.blocks["first.weight", "first.bias"].full_fisher_block())
