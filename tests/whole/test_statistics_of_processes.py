"""Statistics of two processes, each with a part of the data, replicated and under FSDP2: the numbers of one process."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import kfac_fx
from tests.processes import started
from tests.whole.test_docs import ROOT, run_blocks

WORLD, CUT, CASES = 2, 5, 8
CASES_OF = {"row": "exact", "sequence": "empirical"}
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.norm = nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.table
        return (x + torch.tanh(self.hidden(self.norm(x.cumsum(1))))) @ self.words.weight.T


def compiled(shard: bool) -> kfac_fx.CompiledModule:
    torch.manual_seed(0)
    model = Net().double()
    net = kfac_fx.compile(model, (data()[0][:2],), loss="categorical")
    if shard:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return net


def data() -> tuple[Tensor, Tensor]:
    ids = torch.randint(6, (CASES, 4), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def trace(spectrum: kfac_fx.ModelSpectrum) -> dict[Any, Tensor]:
    return {key: values.sum() for key, values in spectrum.at(damping=0.0).eigenvalues().items()}


def part_of(rank: int | None) -> list[tuple[Tensor, Tensor]]:
    """The batches of a process, the same number for both; None: all of them, of one process."""
    x, y = data()
    if rank is None:
        return [(x[:3], y[:3]), (x[3:], y[3:])]
    return [(x[:3], y[:3]), (x[3:CUT], y[3:CUT])] if rank == 0 else [(x[CUT:7], y[CUT:7]), (x[7:], y[7:])]


def statistics(rank: int | None, shard: bool, folder: Path) -> dict[str, Any]:
    """rank: None for one process with all data."""
    group, results = None if rank is None else dist.group.WORLD, {}
    net, batches, (x, y) = compiled(shard), part_of(rank), data()
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact", process_group=group)
    for batch, _ in batches:
        estimator.update_covariances(batch, fold=False)
    estimator.fold()
    spectrum = estimator.spectrum(damping=0.1)
    for case, mode in CASES_OF.items():
        corrected = spectrum.correct(batches, case, mode=mode)
        results[f"corrected {case}"] = trace(corrected)
        results[f"self-scores {case}"] = corrected.self_scores((x[:2], y[:2]))
    fits: dict[str | None, int] = {"sequence": 1} if shard else {None: 2, "sequence": 1}
    for case, parts in fits.items():
        path = folder / f"fit {case}"
        fitted = kfac_fx.fit_spectrum(
            net, batches, mode="exact", case=case, parts=parts, folder=path, damping=0.1, process_group=group
        )
        again = kfac_fx.fit_spectrum(  # which reads all of it
            net, batches, mode="exact", case=case, parts=parts, folder=path, damping=0.1, process_group=group
        )
        loaded = kfac_fx.load_spectrum(net, path, damping=0.1, process_group=group)
        for kind, of in (("fitted", fitted), ("again", again), ("loaded", loaded)):
            results[f"{kind} {case}"] = trace(of), of.self_scores((x[:2], y[:2]))
    queries = fitted.precondition((x[:3], y[:3]))
    everything = [(x[:2], y[:2]), (x[2:5], y[2:5]), (x[5:], y[5:])]  # in all processes
    for name in ("scores", "scores again"):
        results[name] = queries.scores_of_all(everything, folder=folder / "scores", process_group=group)
    results["in memory"] = queries.scores_of_all(everything, process_group=group)
    if group is not None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            kfac_fx.fit_spectrum(net, batches, mode="empirical")
        results["no group"] = [str(warning.message) for warning in seen]
    if shard:
        results["numbers"] = error_of(
            lambda: kfac_fx.fit_spectrum(net, batches[: 1 + (rank or 0)], process_group=group)
        )
    kfac_fx.save_spectrum(fitted, folder / "saved")
    if group is not None:
        dist.barrier()
    results["saved"] = trace(kfac_fx.load_spectrum(net, folder / "saved"))
    return results


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def refusals(rank: int, folder: Path) -> dict[str, Any]:
    group, net, (x, y) = dist.group.WORLD, compiled(False), data()
    fit = kfac_fx.fit_spectrum
    results: dict[str, Any] = {
        "none": error_of(lambda: fit(net, [(x, y)] if rank else [], process_group=group)),
        "save_every": error_of(lambda: fit(net, [(x, y)], folder=folder / "n", save_every=1, process_group=group)),
    }
    fit(net, part_of(rank), mode="exact", folder=folder / "one", process_group=group)
    dist.barrier()
    if rank == 0:
        (folder / "one" / "manifest.json").write_text("{")
    dist.barrier()
    results["damaged"] = error_of(
        lambda: fit(net, part_of(rank), mode="exact", folder=folder / "one", process_group=group)
    )
    blocked = folder / "blocked"
    if rank == 0:
        blocked.write_text("")
    dist.barrier()
    results["no folder"] = error_of(lambda: fit(net, part_of(rank), folder=blocked, process_group=group))
    queries = fit(net, part_of(rank), mode="exact", damping=0.1, process_group=group).precondition((x[:1], y[:1]))
    results["others"] = error_of(lambda: queries.scores_of_all(part_of(rank), process_group=group))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(net, [(x, y)], process_group=group)
    results["same"] = [str(warning.message) for warning in seen]
    sampled = fit(net, part_of(rank), case="sequence", process_group=group)
    results["sampled"] = trace(sampled)
    return results


def work(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    results: dict[str, Any] = {}
    for name, shard in (("replicated", False), ("sharded", True)):
        results[name] = statistics(rank, shard, Path(folder) / name)
    results["refusals"] = refusals(rank, Path(folder))
    dist.destroy_process_group()
    environment = {"RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in environment.items()}
    os.chdir(folder)
    page = (ROOT / "docs" / "spectra.md").read_text(encoding="utf-8")
    assert run_blocks(page[page.index("## Several processes") :], "spectra.md") == 1
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for process in started(work, range(WORLD), str(folder), port):
        process.join(120)
        assert process.exitcode == 0
    yield folder, [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, statistics(None, False, folder)


Found = tuple[Path, list[dict[str, Any]]]


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_have_the_numbers_of_one(kind: str, found: Found, alone: tuple[Path, Any]) -> None:
    _, expected = alone
    _, (first, second) = found
    for result in (first[kind], second[kind]):
        if kind == "sharded":
            assert "the processes of a sharded model have 1, 2 batches" in result.pop("numbers")
        begins = "the model is sharded" if kind == "sharded" else "there are 2 processes"
        (told,) = result.pop("no group")
        assert told == (
            f"{begins}, and fit_spectrum has no process_group: every process fits its own data, and has another "
            "spectrum. Pass process_group=torch.distributed.group.WORLD."
            + ("" if kind == "sharded" else " Nothing is wrong if this process has all data.")
        )
        assert len(result) >= 10 and expected.keys() >= result.keys()
        of_one = {name: expected[name] for name in result}
        torch.testing.assert_close(result, of_one, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(first[kind], second[kind], rtol=1e-12, atol=1e-12)


def test_files_are_written_once_and_are_those_of_one_process(found: Found, alone: tuple[Path, Any]) -> None:
    (folder, _), (tmp_path, _) = found, alone
    for kind in ("replicated", "sharded"):
        for mine in ("fit sequence", "scores", "saved"):
            names = [
                sorted(path.name.split("-")[:2] for path in of.iterdir())
                for of in (folder / kind / mine, tmp_path / mine)
            ]
            assert names[0] == names[1]
        net, (x, y) = compiled(False), data()
        loaded, of_one = (
            kfac_fx.load_spectrum(net, of / "fit sequence", damping=0.1) for of in (folder / kind, tmp_path)
        )
        torch.testing.assert_close(loaded.self_scores((x, y)), of_one.self_scores((x, y)), rtol=1e-10, atol=1e-10)


def test_an_error_of_one_process_is_one_of_all(found: Found) -> None:
    _, (first, second) = found
    one, other = first["refusals"], second["refusals"]
    assert one["none"] == "ValueError: `batches` has no batches."
    assert other["none"] == "RuntimeError: process 0 of 2 raised ValueError: `batches` has no batches."
    for result in (one, other):
        assert "manifest.json' is no manifest" in result["damaged"] and "is no folder" in result["no folder"]
        assert result["save_every"].startswith("ValueError: save_every is for one process")
        assert "the processes have different batches: with a process_group, scores_of_all takes" in result["others"]
        assert len(result["same"]) == 1 and "2 processes begin with the same batch" in result["same"][0]
    torch.testing.assert_close(one["sampled"], other["sampled"], rtol=0, atol=0)
