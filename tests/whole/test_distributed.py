"""Two processes, each with half of every batch: the steps are those of one process with all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.linalg import processes
from kfac_fx.linalg.processes import Replicas
from tests.processes import started

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


def error_of_wrapper_inside() -> str:
    inside = kfac_fx.compile(nn.parallel.DistributedDataParallel(Net().double()), loss="categorical")
    kept = kfac_fx.KFAC(inside, lr=0.1, damping=0.1, estimation_mode="empirical")
    with pytest.raises(ValueError) as error:
        inside(batches()[0][0])
    assert kept.counter == 0
    return str(error.value)


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
    found["inside"] = error_of_wrapper_inside()
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
    (other,) = started(work, [1], str(folder))
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
        assert last.startswith("Give kfac_fx.compile and KFAC the same options in all processes.")
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


# --- the parts of it, without processes -------------------------------------------------------------------------------


class Process(Replicas):
    """One of several processes; `together` lets threads stand for them."""

    def __init__(self, rank: int = 0, number: int = WORLD) -> None:
        super().__init__()
        self._rank, self._number = rank, number

    number, rank = property(lambda self: self._number), property(lambda self: self._rank)  # type: ignore[assignment]


def together(
    number: int, task: Callable[[Process], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], set[str]]:
    """(what every process returns, the kinds of messages that they sent)."""
    barrier, here = threading.Barrier(number, timeout=60), threading.local()
    sent: dict[int, Tensor] = {}
    kinds: set[str] = set()

    def exchanged(tensor: Tensor) -> list[Tensor]:
        sent[here.rank] = tensor.clone()
        barrier.wait()
        everything = [sent[rank] for rank in range(number)]
        barrier.wait()
        return everything

    def all_reduce(tensor: Tensor, **_: Any) -> None:
        kinds.add("sum")
        tensor.copy_(torch.stack(exchanged(tensor)).sum(0))

    def fill_shares(whole: Tensor, sizes: list[int], _: str) -> None:
        kinds.add("shares")
        everything = exchanged(whole)
        for process, share in enumerate(whole.split(sizes)):
            share.copy_(everything[process].split(sizes)[process])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(processes, "fill_shares", fill_shares)

    def run(rank: int) -> Any:
        here.rank = rank
        return task(Process(rank, number))

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number))), kinds


@pytest.mark.parametrize(
    "sizes",
    [
        [(2, 3), (5,), (6,)],
        [(2,), (7,), (1, 3)],
        [(30,), (1,), (1, 1)],
        [(1,), (0,), (30, 1)],
        [(4,), (4,)],  # the third process has none
    ],
)
def test_all_processes_gather_what_each_has(sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sends its own share, which may be longer than the others."""
    tensors = [[torch.randn(size), torch.randn(2, dtype=torch.float64)] for size in sizes]

    def gather(process: Process) -> Any:
        mine = tensors[process.rank] if process.rank < len(tensors) else []
        return process.gather(mine, [[torch.empty_like(tensor) for tensor in of_process] for of_process in tensors])

    expected = [tensor for of_process in tensors for tensor in of_process]
    results, kinds = together(3, gather, monkeypatch)
    assert kinds == {"shares"}
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_sums_keep_their_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of float64 rounds no float64 and widens no float32; the sums come back in their order."""
    tensors = [torch.tensor([1 / 3, 2.0]), torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([[3.0]])]
    results, _ = together(2, lambda process: process.total([(process.rank + 1) * t for t in tensors]), monkeypatch)
    for result in results:
        torch.testing.assert_close(result, [3 * tensor for tensor in tensors])
        assert result[1] == 3 * tensors[1]


def test_the_random_stream_of_a_process_is_that_of_the_seed_the_place_and_its_rank() -> None:
    def draw(*place: int, rank: int = 0, seed: int = 0) -> float:
        common = torch.Generator().manual_seed(seed)
        state = common.get_state()
        number = torch.rand((), generator=Process(rank).stream(common, *place)).item()
        assert torch.equal(common.get_state(), state)
        return number

    streams = [{}, {"rank": 1}, {"seed": 1}]
    numbers = [draw(*place, **other) for place in [(0, 0), (0, 1), (1, 0), (0, 0, 1)] for other in streams]
    assert len(set(numbers)) == len(numbers)
    assert draw(0, 1, rank=1) == draw(0, 1, rank=1)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("apart", [0.0, 1e-4, -1e-4, 1e-2, -1e-2])
def test_gradients_are_compared_relative_to_their_norm(
    size: float, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(ends: Tensor, **_: Any) -> None:
        other = size * (1 + apart)
        ends.copy_(torch.maximum(ends, torch.tensor([other, -other], dtype=ends.dtype)))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    gradients = [torch.tensor([0.6 * size]), torch.tensor([[0.8 * size]])]
    if abs(apart) < 1e-3:
        Process().check_gradients(gradients)
        return
    with pytest.raises(RuntimeError, match="the gradients of 2 processes differ: their norms are"):
        Process().check_gradients(gradients)
