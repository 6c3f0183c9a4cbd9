"""Meshes of processes: hybrid sharding, tensor parallelism, and FSDP2 with tensor parallelism. Two and four processes
take the steps of one, and go on from the checkpoints of each other.

One spawn of two serves all tests, and one of four the slow ones. Where processes have the same cases, as those of
tensor parallelism do, their shares of the batch are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import set_state_dict

import kfac_fx
from kfac_fx.estimator import estimator
from tests.processes import started
from tests.whole.test_fsdp import (
    ADAPTIVE,
    EIGEN_MOMENTS,
    EXACT,
    Block,
    Results,
    state_of,
    whole_of,
)

pytest.importorskip("torch.distributed.fsdp")
pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # which is meant
]

CASES, LENGTH, CLASSES, STEPS = 8, 4, 4, 3
EMPIRICAL = {"lr": 0.1, "damping": 0.3, "estimation_mode": "empirical"}
REGULAR = {"lr": 0.1, "damping": 0.3, "weight_decay": 0.1, **EXACT}


class Net(nn.Module):
    """A net of sequences, whose positions tensor parallelism divides between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8, bias=False)
        self.blocks = nn.ModuleList(Block(8) for _ in range(1))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        z: Tensor = self.last(torch.tanh(x))
        return z.mean(1)


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[2 - len(shape) :])


def sharded(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    assert isinstance(model, Net)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def hybrid(model: nn.Module) -> int:
    sharded(model, mesh_of(2, dist.get_world_size() // 2))
    return dist.get_world_size()


def parallel(model: nn.Module, mesh: Any, sequence: bool) -> None:
    """sequence: whether the norms have a part of the positions each, or all of them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {}
    for n in range(1):
        plan |= {f"blocks.{n}.up": ColwiseParallel(), f"blocks.{n}.down": RowwiseParallel()}
        if sequence:
            plan[f"blocks.{n}.norm"] = SequenceParallel(use_local_output=True)
            plan[f"blocks.{n}.up"] = ColwiseParallel(input_layouts=Shard(1))
            plan[f"blocks.{n}.down"] = RowwiseParallel(output_layouts=Shard(1))
    if sequence:
        plan["first"] = ColwiseParallel(output_layouts=Shard(1))
        plan["last"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def tensor(model: nn.Module, sequence: bool = True) -> int:
    parallel(model, mesh_of(dist.get_world_size()), sequence)
    return 1


def both(model: nn.Module) -> int:
    parts = dist.get_world_size() // 2
    mesh = mesh_of(parts, 2)
    parallel(model, mesh["inner"], sequence=True)
    sharded(model, mesh["outer"])
    return parts


# Each shards a model, and returns the number of different parts of a batch.
MESHES: dict[str, Callable[[nn.Module], int]] = {
    "hybrid": hybrid,
    "tensor": tensor,
    "tensor, whole positions": partial(tensor, sequence=False),
    "both": both,
}
OWNERS = {"placement": "owners"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid, adaptive": ("hybrid", ADAPTIVE),
    "tensor, owners, empirical": ("tensor", {**OWNERS, **EMPIRICAL}),
    "both, regular": ("both", REGULAR),
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{mesh}, eigen_moments": (mesh, EIGEN_MOMENTS) for mesh in MESHES},
    **{f"{mesh}, empirical": (mesh, EMPIRICAL) for mesh in MESHES},
    "tensor, whole positions, regular": ("tensor, whole positions", REGULAR),
    "both, adaptive": ("both", ADAPTIVE),
    "hybrid, replicated": ("hybrid", {"placement": "replicated", **EIGEN_MOMENTS}),
    "tensor, owners, eigen_moments": ("tensor", {**OWNERS, **EIGEN_MOMENTS}),
    "tensor, owners, adaptive": ("tensor", {**OWNERS, **ADAPTIVE}),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, CASES, LENGTH, 5, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(CLASSES, (STEPS, CASES), generator=generator), strict=True))


class Training:
    """A training of all processes, or of one."""

    def __init__(self, mesh: str | None, options: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        example = (torch.randn(2, LENGTH, 5, dtype=torch.float64),)
        self.net = kfac_fx.compile(Net().double(), example, loss="categorical")
        self.part = slice(None)
        if mesh is not None:
            parts = MESHES[mesh](self.net.model)
            of_part, size = dist.get_rank() * parts // dist.get_world_size(), CASES // parts
            self.part = slice(of_part * size, (of_part + 1) * size)
        self.opt = kfac_fx.KFAC(self.net, seed=0, **options)

    def steps(self, first: int, last: int) -> Tensor:
        for x, y in batches()[first:last]:
            self.opt.zero_grad()
            F.cross_entropy(self.net(x[self.part]), y[self.part]).backward()
            self.opt.step()
        return torch.cat([whole_of(parameter).flatten() for parameter in self.net.parameters()])

    def load(self, folder: str, **how: Any) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.zero_()
        state = state_of(self.net, self.opt)
        checkpoint.load(state, checkpoint_id=folder, **how)
        set_state_dict(self.net.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


RESTARTED = {"hybrid": ADAPTIVE, "tensor": {**OWNERS, **ADAPTIVE}, "both": ADAPTIVE}


def start(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def work(rank: int, world: int, folder: str, runs: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
    start(rank, world, folder)
    results: dict[str, Any] = {}
    for name, (mesh, options) in runs.items():
        training = Training(mesh, options)
        results[name] = training.steps(0, STEPS)
        results[f"report of {name}"] = list(training.opt.fallbacks())
    mesh = "tensor" if world == 2 else "hybrid"
    results["sums"] = sums_sent(mesh, estimator.EARLY), sums_sent(mesh, 0)
    if world == 2:
        results["other gradients"] = refusal_of_other_gradients()
        results["owners"] = refusals_of_owners()
        results["parts"] = [refusal_of_outputs(local) for local in (True, False)]
    else:
        for saved, options in RESTARTED.items():
            training = Training(saved, options)
            training.steps(0, 2)
            checkpoint.save(state_of(training.net, training.opt), checkpoint_id=f"{folder}/{saved}")
        for saved in RESTARTED:
            for loading, options in RESTARTED.items():
                training = Training(loading, options)
                training.load(f"{folder}/{saved}")
                results[f"{saved} in {loading}"] = training.steps(2, STEPS)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def refusal_of_other_gradients() -> str:
    """The error of a norm that every process has as a whole and applies to its own positions."""
    training = Training("tensor, whole positions", REGULAR)
    x, y = batches()[0]
    F.cross_entropy(training.net(x), y).backward()
    norm = training.net.model.blocks[0].norm  # type: ignore[union-attr, index]
    norm.weight.grad *= dist.get_rank()
    with pytest.raises(RuntimeError) as error:
        training.opt.step()
    return str(error.value)


def sums_sent(mesh: str, least: int) -> tuple[Tensor, int]:
    """The parameters after steps of two micro-batches each, and the bytes of the sums that wait for the last step.

    least: the bytes of dense sums from which on they travel in the backward, in small messages.
    """
    training = Training(mesh, {**OWNERS, "lr": 0.1, "damping": 0.3})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(estimator, "EARLY", least)
        patched.setattr(estimator, "BUCKET", 2000)
        for x, y in batches():
            training.opt.zero_grad()
            cases = torch.arange(CASES)[training.part]
            for some in (cases[::2], cases[1::2]):
                (F.cross_entropy(training.net(x[some]), y[some]) / 2).backward()
            seen = training.opt._step_state.forwards.seen
            held = [batch for batch in (seen.sums, *(micro.sums for micro in seen.batches)) if batch is not None]
            sums = [tensor for batch in held for of_block in batch.sums.values() for tensor in of_block.values()]
            training.opt.step()
    parameters = torch.cat([whole_of(parameter).flatten() for parameter in training.net.parameters()])
    return parameters, sum(tensor.untyped_storage().nbytes() for tensor in sums)


def refusals_of_owners() -> list[str]:
    """The errors of owners in two dimensions of processes, and in a part of them."""
    texts = []
    for shard in (both, lambda model: parallel(model, mesh_of(2, 1)["inner"], sequence=False)):
        torch.manual_seed(0)
        net = kfac_fx.compile(Net(), (torch.randn(2, LENGTH, 5),), loss="categorical")
        shard(net.model)  # type: ignore[operator]
        with pytest.raises(ValueError) as error:
            kfac_fx.KFAC(net, placement="owners")
        texts.append(str(error.value))
    return texts


def refusal_of_outputs(local: bool) -> str:
    """The error of outputs of which every process has a part, as tensors of its own or as DTensors."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.randint(2, (4,))
    net = kfac_fx.compile(nn.Sequential(nn.Linear(5, 4)), (x,), loss="categorical")
    parallelize_module(net.model, mesh_of(dist.get_world_size()), {"0": ColwiseParallel(use_local_output=local)})
    opt = kfac_fx.KFAC(net, seed=0)
    with pytest.raises((ValueError, RuntimeError)) as error:
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return str(error.value)


def processes(world: int, folder: Path, runs: Mapping[str, tuple[str, dict[str, Any]]]) -> Results:
    for other in started(work, range(world), world, str(folder), runs):
        other.join(600)
        assert other.exitcode == 0
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return processes(2, tmp_path_factory.mktemp("processes"), RUNS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def long_results(folder: Path) -> Results:
    return processes(4, folder, RUNS | LONG)


def assert_steps_of_one(results: Results, name: str, mesh: str, options: Mapping[str, Any]) -> None:
    alone = Training(None, {**options, "placement": "replicated"})
    before = torch.cat([parameter.detach().flatten().clone() for parameter in alone.net.parameters()])
    expected = alone.steps(0, STEPS)
    assert (expected - before).abs().max() > 1e-3
    # The eigenvectors of nearly equal eigenvalues depend on rounding, and "eigen_moments" takes its steps in them.
    tolerance = 1e-9 if "eigen_moments" in name else 1e-10
    for result in results:
        torch.testing.assert_close(result[name], expected, rtol=tolerance, atol=tolerance)
        gathers = [line for line in result[f"report of {name}"] if "run the whole model in every process" in line]
        assert len(gathers) == (mesh != "hybrid")


@pytest.mark.parametrize("name", RUNS)
def test_meshes_take_the_steps_of_one_process(results: Results, name: str) -> None:
    assert_steps_of_one(results, name, *RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS | LONG)
def test_meshes_take_many_kinds_of_steps_of_one_process(long_results: Results, name: str) -> None:
    assert_steps_of_one(long_results, name, *(RUNS | LONG)[name])


@pytest.mark.slow
@pytest.mark.parametrize("saved", RESTARTED)
def test_a_checkpoint_of_each_mesh_continues_in_each_and_in_one_process(
    long_results: Results, folder: Path, saved: str
) -> None:
    expected = Training(None, ADAPTIVE).steps(0, STEPS)
    alone = Training(None, ADAPTIVE)
    alone.load(str(folder / saved), no_dist=True)
    others = [result[f"{saved} in {loading}"] for result in long_results for loading in RESTARTED]
    for parameters in (alone.steps(2, STEPS), *others):
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-10)


def test_a_gradient_that_is_another_one_in_every_process_is_refused_by_the_name_of_its_parameter(
    results: Results,
) -> None:
    for result in results:
        assert "processes have other gradients of parameters that all of them have" in result["other gradients"]
        assert "blocks.0.norm.weight  0 to " in result["other gradients"]
        assert "norm.bias" not in result["other gradients"]
        assert "needs SequenceParallel() in the plan of parallelize_module" in result["other gradients"]


def test_outputs_of_which_every_process_has_a_part_are_refused_with_what_to_write(results: Results) -> None:
    for result in results:
        of_local, of_dtensors = result["parts"]
        assert of_local.startswith("Sequential computes other outputs now") and "returns DTensors" in of_dtensors
        for text in (of_local, of_dtensors):
            assert "write output_layouts=Replicate() in the plan of the modules that compute them" in text


def assert_same_steps_with_early_sums(results: Results) -> None:
    for result in results:
        (late, waiting), (early, rest) = result["sums"]
        torch.testing.assert_close(early, late, rtol=1e-12, atol=1e-12)
        assert 0 < 2 * rest < waiting  # those of cases, as of the norm, stay


def test_sums_that_travel_in_the_backward_make_the_same_steps_and_do_not_wait_for_them(results: Results) -> None:
    assert_same_steps_with_early_sums(results)


@pytest.mark.slow
def test_early_sums_of_hybrid_sharding_make_the_same_steps(long_results: Results) -> None:
    assert_same_steps_with_early_sums(long_results)


def test_owners_that_a_mesh_cannot_have_are_refused_with_what_to_write(results: Results) -> None:
    for result in results:
        in_grid, in_part = result["owners"]
        assert in_grid.startswith("FSDP2 and tensor parallelism divide the parameters together")
        assert in_part.startswith("tensor parallelism divides the parameters among 1 of 2 processes")
        assert all("write KFAC(..., placement='replicated')" in text for text in (in_grid, in_part))
