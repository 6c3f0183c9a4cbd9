"""Models that FSDP2 shards: two or three processes take the steps of one process with all cases."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils import checkpoint as recomputation

import kfac_fx
from kfac_fx.fisher.groups import Inverter
from kfac_fx.linalg import processes as sharded
from kfac_fx.linalg.processes import ShardLayout, is_sharded
from kfac_fx.linalg.processes import shard as shard_of
from kfac_fx.optim.schedule import LayerFlops
from kfac_fx.optim.standstill import check_coverage
from tests.errors.test_floors import ROOT
from tests.processes import started
from tests.whole.test_docs import run_blocks

pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")

WORLD, CASES, CLASSES = 3, 12, 4
EXACT = {"estimation_mode": "exact"}
ADAPTIVE = {"momentum_type": "adaptive", **EXACT}
EIGEN_MOMENTS = {"momentum_type": "eigen_moments", "lr": 0.03, "cov_update_every": 2, "invert_every": 3, **EXACT}
ADAPTED = {
    "momentum_type": "qmodel", "momentum": None, "damping": 0.3, "adapt_damping": True,
    "damping_adaptation_interval": 1, "invert_every": 2, **EXACT,
}  # fmt: skip
# A norm, a linear layer with more rows than processes, and one of which the last of three processes has no rows.
DIAGONALS = {"blocks.*.norm": "diagonal", "blocks.0.down": "diagonal", "last": "diagonal"}
RESTARTED: dict[str, dict[str, Any]] = {
    "adaptive": {"placement": "owners", **ADAPTIVE},
    "eigen_moments": {"placement": "owners", **EIGEN_MOMENTS},
    "diagonals, adaptive": {"placement": "owners", **ADAPTIVE},
    "diagonals, eigen_moments": {"placement": "owners", **EIGEN_MOMENTS},
}
QUICK_RESTARTED = ("adaptive", "diagonals, eigen_moments")
OWNED = (
    "gradients of these diagonal blocks travel to an owner, because the diagonals are not divided as the parameters "
    "are: generic(steps)"
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Widths that no number of processes divides, parameters with fewer rows than processes, a generic parameter and a
    weight with two uses.

    Every layer has a function behind it that is not linear, so that its factors have full rank: the eigenvectors of a
    null space, in which "eigen_moments" takes its steps, depend on rounding.
    """

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(5, 5, bias=False)
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.last = nn.Linear(5, CLASSES)
        self.steps = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + torch.cumsum(self.steps, 0)
        for block in self.blocks:
            x = recomputation.checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(torch.tanh(self.first(torch.tanh(x))))


class Divided(Net):
    """No single graph holds it: Python reads numbers between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + torch.cumsum(self.steps, 0)
        for block in self.blocks:
            x = block(x) if x.abs().max() < 1e6 else x
        return self.last(torch.tanh(self.first(torch.tanh(x))))


Shard = Callable[[nn.Module], None]


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, CASES, 5, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(CLASSES, (steps, CASES), generator=generator), strict=True))


def compiled(
    in_place: bool = False,
    checkpointed: bool = False,
    steps: str = "generic",
    divided: bool = False,
    others: Mapping[str, str] = MappingProxyType({}),
) -> kfac_fx.CompiledModule:
    """others: approximations of layers other than `Net.steps`."""
    torch.manual_seed(0)
    example, approximations = (torch.randn(4, 5, dtype=torch.float64),), {"steps": steps, **others}
    model = (Divided if divided else Net)(checkpointed).double()
    return kfac_fx.compile(model, example, loss="categorical", in_place=in_place, approximations=approximations)


def train(
    options: Mapping[str, Any],
    part: slice,
    shard: Shard | None = None,
    number: int = 11,
    evaluated: bool = False,
    reverse: bool = False,
    **how: Any,
) -> tuple[Tensor, float, kfac_fx.KFAC]:
    """All parameters after the steps, the damping, and the optimizer.

    evaluated: the step measures its loss with a closure that calls no backward.
    reverse: products with the Jacobian take reverse mode twice, as behind an operation without forward mode.
    """
    net = compiled(**how)
    if shard is not None:
        shard(net.model)
    opt = kfac_fx.KFAC(net, seed=0, **{"placement": "replicated", **options})
    if reverse:
        opt._step_state.multiply_jacobian.reason = "the test says so"
    called = net.model if net.in_place else net
    for x, y in batches(number):

        def closure(x: Tensor = x[part], y: Tensor = y[part]) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(called(x), y)
            loss.backward()
            return loss

        if evaluated:
            closure()
            opt.step(evaluate=lambda x=x[part], y=y[part]: F.cross_entropy(called(x), y))  # type: ignore[misc]
        else:
            opt.step(closure)
    return torch.cat([whole_of(parameter).flatten() for parameter in net.parameters()]), float(opt.damping), opt


def whole_of(tensor: Any) -> Tensor:
    result: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()
    return result


RUNS: dict[str, dict[str, Any]] = {
    "adaptive": {"options": ADAPTIVE},
    "owners": {"options": {"placement": "owners", **ADAPTIVE}},
    "adaptive, in place": {"options": ADAPTIVE, "in_place": True, "number": 4},
    "adaptive, checkpointed": {"options": ADAPTIVE, "checkpointed": True, "number": 4},
    "empirical": {"options": {"lr": 0.1, "damping": 0.3, "estimation_mode": "empirical"}, "number": 4},
    "qmodel, damping adapted": {"options": ADAPTED},
    "loss evaluated": {"options": ADAPTED, "evaluated": True, "number": 4},
    "adam, bounded": {
        "options": {"lr": 0.1, "damping": 0.1, "momentum_type": "adam", "norm_constraint": 1e-3, **EXACT},
        "number": 4,
    },
    "eigen_moments": {"options": EIGEN_MOMENTS},
    "eigen_moments, owners": {"options": {**EIGEN_MOMENTS, "weight_decay": 0.1, "placement": "owners"}, "number": 6},
    "divided": {"options": {"placement": "owners", **ADAPTIVE}, "divided": True, "number": 6},
    "divided, eigen_moments": {"options": EIGEN_MOMENTS, "divided": True, "number": 4},
    "divided, empirical": {
        "options": {"lr": 0.1, "damping": 0.3, "estimation_mode": "empirical"},
        "divided": True,
        "number": 4,
    },
    "full blocks": {"options": ADAPTIVE, "steps": "full", "number": 4},
    "in reverse mode": {"options": ADAPTIVE, "steps": "full", "number": 4, "reverse": True},
    "groups": {"options": {"lr": 0.1, "damping": 0.1, "weight_decay": 0.1, **EXACT}, "number": 4},
    "diagonals, adaptive": {"options": {"placement": "owners", **ADAPTIVE}, "others": DIAGONALS},
    "diagonals, regular": {
        "options": {"lr": 0.1, "damping": 0.1, "norm_constraint": 1e-3, "placement": "owners", **EXACT},
        "others": DIAGONALS,
    },
    "diagonals, adapted": {"options": {"placement": "owners", **ADAPTED}, "others": DIAGONALS},
    "diagonals, eigen_moments": {"options": {"placement": "owners", **EIGEN_MOMENTS}, "others": DIAGONALS},
    "diagonals, relative damping": {
        "options": {"lr": 0.1, "relative_damping": 0.5, "momentum_type": "adam", "placement": "owners", **EXACT},
        "others": DIAGONALS,
        "number": 4,
    },
}
# With their few steps in every run of the tests: a step of sharded processes waits for some 80 messages.
QUICK = {
    "adaptive, in place": 2,
    "adaptive, checkpointed": 2,
    "eigen_moments, owners": 4,
    "divided, empirical": 3,
    "in reverse mode": 2,
    "diagonals, relative damping": 3,
}
SHORT = {name: {**RUNS[name], "number": number} for name, number in QUICK.items()}
Results = list[dict[str, Any]]  # of every process


def fully_sharded(ranks: Sequence[int]) -> Shard:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh("cpu", list(ranks))

    def shard(model: nn.Module) -> None:
        assert isinstance(model, Net)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    return shard


def start(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))


def trained(rank: int, number: int, runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of trainings by the first processes, this one among them."""
    shard, part = fully_sharded(range(number)), slice(rank * CASES // number, (rank + 1) * CASES // number)
    results: dict[str, Any] = {}
    for name, run in runs.items() if rank < number else ():
        parameters, damping, opt = train(part=part, shard=shard, **run)
        results[f"{name} {number}"] = parameters, damping, list(opt.net.report.fallbacks())
        results[f"state of {name} {number}"] = kinds_of_tensors(opt)
    return results


def work(rank: int, folder: str, port: int) -> None:
    start(rank, folder)
    results = trained(rank, WORLD, SHORT)
    shard, part = fully_sharded(range(WORLD)), slice(rank * CASES // WORLD, (rank + 1) * CASES // WORLD)
    results["memory"] = memory(shard, part)
    results["estimated"] = estimated(part, slice(rank + 1), shard)
    results["messages"] = messages(shard, part)
    results["parts"] = parts_together(shard, part, rank)
    results["checkpoint"] = {name: saved_and_continued(rank, name, f"{folder}/{name}") for name in QUICK_RESTARTED}
    dist.destroy_process_group()
    environment = {"RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in environment.items()}
    run_blocks((ROOT / "docs" / "sharded.md").read_text(encoding="utf-8"), "sharded.md")
    torch.save(results, f"{folder}/{rank}.pt")


def work_long(rank: int, folder: str, _: int) -> None:
    start(rank, folder)
    results = trained(rank, 2, RUNS) | trained(rank, WORLD, RUNS)
    results["checkpoint"] = {name: saved_and_continued(rank, name, f"{folder}/{name}") for name in RESTARTED}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def go_on(net: kfac_fx.CompiledModule, opt: kfac_fx.KFAC, part: slice, steps: slice) -> None:
    for x, y in batches(4)[steps]:
        opt.zero_grad()
        F.cross_entropy(net(x[part]), y[part]).backward()
        opt.step()


def state_of(net: kfac_fx.CompiledModule, opt: kfac_fx.KFAC) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(net.model, opt), strict=True))


def training_of(name: str, shard: Shard | None = None) -> tuple[kfac_fx.CompiledModule, kfac_fx.KFAC]:
    net = compiled(others=DIAGONALS if "diagonals" in name else {})
    if shard is not None:
        shard(net.model)
    return net, kfac_fx.KFAC(net, seed=0, **RESTARTED[name])


def continued(net: kfac_fx.CompiledModule, opt: kfac_fx.KFAC, part: slice, folder: str, **how: Any) -> Tensor:
    """The parameters after two steps behind a checkpoint, which takes the place of zeros."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    state = state_of(net, opt)
    checkpoint.load(state, checkpoint_id=folder, **how)
    set_state_dict(net.model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    go_on(net, opt, part, slice(2, 4))
    return torch.cat([whole_of(parameter).flatten() for parameter in net.parameters()])


def saved_and_continued(rank: int, name: str, folder: str) -> list[Tensor]:
    """The parameters after two steps of two processes before a checkpoint, and two behind it: of these two and of
    three."""
    group, results = dist.new_group([0, 1]), []
    two, three = fully_sharded(range(2)), fully_sharded(range(WORLD))
    if rank < 2:
        part = slice(rank * CASES // 2, (rank + 1) * CASES // 2)
        net, opt = training_of(name, two)
        go_on(net, opt, part, slice(2))
        checkpoint.save(state_of(net, opt), checkpoint_id=folder, process_group=group)
        go_on(net, opt, part, slice(2, 4))
        results = [torch.cat([whole_of(parameter).flatten() for parameter in net.parameters()])]
    dist.barrier()
    part = slice(rank * CASES // WORLD, (rank + 1) * CASES // WORLD)
    return [*results, continued(*training_of(name, three), part, folder)]


def kinds_of_tensors(opt: kfac_fx.KFAC) -> list[str]:
    """Those of the rule that moves the parameters, which tools save."""
    of_rule = [tensor for state in opt.state.values() for name, tensor in state.items() if "/" not in name]
    return sorted({type(tensor).__name__ for tensor in of_rule})


def estimated(part: slice, scored: slice, shard: Shard | None = None) -> dict[Any, Any]:
    """Factors, products and scores of a FisherEstimator, and the products of a KFAC's with owners.

    scored: the cases of a batch that this process scores. Every process has another number of them.
    """
    results: dict[Any, Any] = {}
    net = compiled()
    if shard is not None:
        shard(net.model)
    group = None if shard is None else dist.group.WORLD
    estimator = kfac_fx.FisherEstimator(net, damping=0.1, estimation_mode="exact", process_group=group)
    for x, _ in batches(2):
        estimator.update_covariances(x[part], fold=False)
    estimator.fold()
    estimator.update_inverses()
    for key, block in estimator.blocks.items():
        results["factors", key] = {name: factor.value for name, factor in block.factors.items()}
    (x, y), *_ = batches(1)
    vector = {name: torch.arange(tensor.numel()).view(tensor.shape).double() for name, tensor in net.named_parameters()}
    F.cross_entropy(net(x), y).backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in net.named_parameters()}
    spectrum = estimator.spectrum(scale=10.0, damping=0.1)
    results["of a vector"] = estimator.multiply_inverse(vector)
    results["of gradients"] = estimator.multiply_inverse(gradients)
    results["of a spectrum"] = spectrum.multiply_inverse(gradients)
    results["scores"] = spectrum.correct([(x, y)]).self_scores((x[scored], y[scored]))
    for name, others in (("of owners", {}), ("of divided blocks", DIAGONALS)):
        net = compiled(others=others)
        if shard is not None:
            shard(net.model)
        opt = kfac_fx.KFAC(net, seed=0, placement="owners", **ADAPTIVE)
        go_on(net, opt, part, slice(2))
        results[name] = opt.estimator.multiply_inverse(vector)
        rows = dict.fromkeys(opt.estimator.blocks, 6.0)
        results[f"flops {name}"] = torch.tensor(astuple(LayerFlops.of(opt.estimator.groups, rows)))
    return results


def counted(send: Callable[..., Any], kind: str, sent: dict[str, list[int]], *args: Any, **how: Any) -> Any:
    sent.setdefault(kind, []).append(args[0 if kind in ("all_reduce", "reduce", "broadcast") else 1].numel())
    return send(*args, **how)


def messages(shard: Shard, part: slice) -> dict[str, dict[str, list[int]]]:
    """The numbers of elements that this process sends in a step with statistics and in one without, by the kind of the
    message, where all blocks that are trained are diagonal."""
    net = compiled(others={"first": "diagonal", "blocks": "diagonal", "last": "diagonal"})
    net.model.steps.requires_grad_(False)
    shard(net.model)
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1, placement="owners", seed=0, cov_update_every=2, **EXACT)
    go_on(net, opt, part, slice(2))
    kinds = ("all_reduce", "reduce", "all_gather", "all_to_all_single", "broadcast")
    senders: list[tuple[Any, str]] = [(dist, kind) for kind in kinds]
    senders += [(sharded, "all_gather"), (sharded, "reduce_scatter")]
    results: dict[str, dict[str, list[int]]] = {}
    for step, name in ((2, "due"), (3, "not due")):
        x, y = batches(4)[step]
        opt.zero_grad()
        F.cross_entropy(net(x[part]), y[part]).backward()
        results[name] = {}
        with pytest.MonkeyPatch.context() as patched:
            for module, kind in senders:
                patched.setattr(module, kind, partial(counted, getattr(module, kind), kind, results[name]))
            opt.step()
    return results


def parts_together(shard: Shard, part: slice, rank: int) -> dict[str, Any]:
    """The judgment of blocks of which only the part of one process is not finite, or without curvature."""
    net = compiled(others=DIAGONALS)
    shard(net.model)
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1, placement="owners", seed=0, **EXACT)
    go_on(net, opt, part, slice(1))
    blocks = [block for block in opt.estimator.blocks.values() if block.group.divided]
    before = [block.factors["F"].moment.clone() for block in blocks]
    for block in blocks:
        squares = torch.full_like(block.factors["F"].moment, torch.nan if rank == 1 else 1.0)
        block.group.update([{"square": squares}], 6, decay=0.5, members=block.member)
    kept = all(torch.equal(block.factors["F"].moment, moment) for block, moment in zip(blocks, before, strict=True))
    opt.estimator.damping = 0.0  # a part without curvature has no inverse
    for block in blocks:
        if rank == 1:
            block.factors["F"].moment.zero_()
    gradients = {name: torch.ones_like(shard_of(parameter)) for name, parameter in net.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_coverage(opt.estimator, gradients, True)
    inverses = [block.group.roots[-1.0][0].clone() for block in blocks]
    for group in dict.fromkeys(block.group for block in blocks):
        Inverter([group], (-1.0,)).update()
    same = all(torch.equal(block.group.roots[-1.0][0], old) for block, old in zip(blocks, inverses, strict=True))
    return {"kept": kept, "same": same, "failures": [tuple(block.failures) for block in blocks]}


def memory(shard: Shard, part: slice) -> dict[str, Any]:
    """In a recording: the numbers of whole parameters that were alive at once, and that were gathered."""
    net = compiled()
    before = [parameter for _, parameter in net.named_parameters()]
    shard(net.model)
    alive: WeakSet[Tensor] = WeakSet()
    counts: list[int] = []
    gather = ShardLayout.gather

    def counted(layout: ShardLayout, local: Tensor) -> Tensor:
        result = gather(layout, local)
        alive.add(result)
        counts.append(len(alive))
        return result

    ShardLayout.gather = counted  # type: ignore[method-assign]
    try:
        net.record((batches(1)[0][0][part],), {})
    finally:
        ShardLayout.gather = gather  # type: ignore[method-assign]
    storages = [parameter.untyped_storage().nbytes() for parameter in before]
    return {"gathered": len(counts), "alive": max(counts), "parameters": len(before), "whole": max(storages)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


def processes(target: Callable[[int, str, int], None], folder: Path, here: bool) -> Iterator[Results]:
    """here: whether this process is the first of them, which saves an import of torch. It can be one only once: after
    that torch takes the groups of before for meshes of the same ranks."""
    threads, environment = torch.get_num_threads(), dict(os.environ)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = started(target, range(int(here), WORLD), str(folder), port)
    if here:
        target(0, str(folder), port)
        torch.set_num_threads(threads)
    for other in others:
        other.join(60 if here else 900)
        assert other.exitcode == 0
    yield [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def results(folder: Path) -> Iterator[Results]:
    yield from processes(work, folder, here=True)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def long_results(long_folder: Path) -> Iterator[Results]:
    yield from processes(work_long, long_folder, here=False)


SLOWER_CHECKS = ("in reverse mode", "divided, eigen_moments")  # the report says why


def assert_steps_of_one(results: Results, name: str, number: int, run: dict[str, Any]) -> None:
    expected, damping, alone = train(part=slice(None), **run)
    for result in results[:number]:
        parameters, of_rank, fallbacks = result[f"{name} {number}"]
        owned = [OWNED] if run["options"].get("placement") and run.get("steps") != "full" else []
        expected_fallbacks = list(alone.net.report.fallbacks())
        assert fallbacks == [*owned, *expected_fallbacks] and bool(expected_fallbacks) == (name in SLOWER_CHECKS)
        torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-9)
        assert of_rank == pytest.approx(damping, rel=1e-9)


@pytest.mark.parametrize("name", SHORT)
def test_sharded_processes_take_the_steps_of_one(results: Results, name: str) -> None:
    assert_steps_of_one(results, name, WORLD, SHORT[name])


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, WORLD])
@pytest.mark.parametrize("name", RUNS)
def test_two_or_three_sharded_processes_take_many_steps_of_one(long_results: Results, name: str, number: int) -> None:
    assert_steps_of_one(long_results, name, number, RUNS[name])


def test_a_gradient_of_a_diagonal_block_does_not_leave_its_process(results: Results) -> None:
    """Flags of 7 blocks and single numbers travel; where statistics are due, one message has their sums."""
    for result in results:
        due, others = (result["messages"][name] for name in ("due", "not due"))
        assert set(due) == {"all_reduce", "reduce_scatter"} and set(others) == {"all_reduce"}
        assert max(due["all_reduce"] + others["all_reduce"]) <= 7 and len(due["reduce_scatter"]) == 1


def test_the_parts_of_a_block_are_judged_together(results: Results) -> None:
    for result in results:
        assert result["parts"] == {"kept": True, "same": True, "failures": [(1, 1)] * 4}


def test_the_state_of_sharded_parameters_is_sharded(results: Results) -> None:
    assert all(result[f"state of adaptive, in place {WORLD}"] == ["DTensor"] for result in results)


def test_a_recording_gathers_parameters_where_they_are_read_and_drops_them(results: Results) -> None:
    """The weight of two uses, one more weight with its bias, and the one that is gathered; most of them twice, for the
    backward gathers again. `whole` is the memory of a scalar: that of the parameters before they were sharded."""
    for result in results:
        assert result["memory"]["alive"] <= 4 < result["memory"]["parameters"] < result["memory"]["gathered"]
        assert result["memory"]["whole"] == 8


def test_an_estimator_of_sharded_processes_is_that_of_one(results: Results) -> None:
    whole = estimated(slice(None), slice(None))
    for rank, result in enumerate(results):
        of_rank = result["estimated"]
        assert of_rank.keys() == whole.keys()
        torch.testing.assert_close(of_rank.pop("scores"), whole["scores"][: rank + 1], rtol=1e-9, atol=1e-9)
        for name, tensors in of_rank.items():
            torch.testing.assert_close(tensors, whole[name], rtol=1e-9, atol=1e-9)


def assert_continues_in_one_and_in_three(results: Results, folder: Path, name: str) -> None:
    saved, *others = [tensor for result in results for tensor in result["checkpoint"][name]]
    alone = continued(*training_of(name), slice(None), str(folder / name), no_dist=True)
    assert len(others) == 4
    for parameters in (alone, *others):
        torch.testing.assert_close(parameters, saved, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # which is meant
@pytest.mark.parametrize("name", QUICK_RESTARTED)
def test_a_checkpoint_of_two_sharded_processes_continues_in_one_and_in_three(
    results: Results, folder: Path, name: str
) -> None:
    assert_continues_in_one_and_in_three(results, folder, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # which is meant
@pytest.mark.parametrize("name", RESTARTED)
def test_every_checkpoint_of_two_sharded_processes_continues_in_one_and_in_three(
    long_results: Results, long_folder: Path, name: str
) -> None:
    assert_continues_in_one_and_in_three(long_results, long_folder, name)
