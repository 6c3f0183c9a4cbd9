"""Two and three processes that divide the Fisher blocks among themselves take the steps of one process.

One spawn of three processes serves all tests; the trainings of two processes run in a group of the first two.
"""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import kfac_fx
from examples.own_rule import OneSidedSoap
from kfac_fx.fisher import groups as stacks
from tests.processes import started

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*"),  # what torch itself loads late
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo looks at all
]

STEPS, CASES, WORLD = 8, 12, 3
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
    "adaptive": {"momentum_type": "adaptive", "estimation_mode": "exact"},
    "eigen_moments": {
        "lr": 0.03, "momentum_type": "eigen_moments", "estimation_mode": "empirical", "cov_update_every": 2,
        "invert_every": 3,
    },
    "a user's rule": {
        "lr": 0.01, "rule": OneSidedSoap(), "estimation_mode": "empirical", "cov_update_every": 2, "invert_every": 3,
    },
}  # fmt: skip
TRAININGS = [
    ("regular", 2, "owners"),
    ("regular", 3, "owners"),
    ("adam", 2, "owners"),
    ("qmodel", 2, "owners"),
    ("adaptive", 3, "owners"),
    ("eigen_moments", 3, "owners"),
    ("a user's rule", 2, "owners"),
    ("regular", 3, "round_robin"),
    ("regular", 2, "replicated"),
]

RESTARTED: dict[str, dict[str, Any]] = {
    "exact": {**OPTIONS["regular"], "estimation_mode": "exact"},
    "sampled": {"lr": 0.05, "damping": 0.3},
    "eigen_moments": OPTIONS["eigen_moments"],
}
RESTARTS = [
    *(("exact", *how) for how in ((2, "owners"), (2, "round_robin"), (3, "owners"), (3, "replicated"))),
    ("exact", 1, "replicated"),
    *(("sampled", size, "owners") for size in (2, 3)),
    *(("eigen_moments", size, "owners") for size in (2, 3)),
    ("eigen_moments", 1, "replicated"),
]

UNEVEN: dict[str, dict[str, Any]] = {
    "regular": {
        "lr": 0.05, "damping": 0.3, "norm_constraint": 1e-2, "weight_decay": 0.01, "invert_every": 3,
        "estimation_mode": "exact", "placement": "replicated",
    },
    "adaptive": {**OPTIONS["adaptive"], "damping_adaptation_interval": 2, "placement": "owners"},
    "eigen_moments": {**OPTIONS["eigen_moments"], "estimation_mode": "exact", "placement": "owners"},
}  # fmt: skip
UNEVEN_TRAININGS = [("regular", 2), ("regular", 3), ("adaptive", 2), ("eigen_moments", 3)]
NUMBERS = {2: (3, 6), 3: (4, 6, 2)}  # of the batches of every process, by their number


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


class Training:
    """A training by the processes of `group`; None: by this process alone."""

    def __init__(self, options: dict[str, Any], part: slice, group: Any = None, backend: str = "eager") -> None:
        torch.manual_seed(0)
        self.part = part
        self.net = kfac_fx.compile(Net().double(), loss="categorical")
        self.net.backend = backend  # of the update alone; tests of recordings compile those
        self.opt = kfac_fx.KFAC(self.net, seed=0, process_group=group, **options)
        self.called: nn.Module = self.net
        if group is not None and dist.get_world_size(group) > 1:
            self.called = nn.parallel.DistributedDataParallel(self.net, process_group=group)

    def steps(self, first: int, last: int) -> Tensor:
        """All parameters after some steps; the same numbers have the same batches."""
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(CASES, 3, generator=generator, dtype=torch.float64)[self.part]
            y = torch.randint(4, (CASES,), generator=generator)[self.part]

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                self.opt.zero_grad()
                loss = F.cross_entropy(self.called(x), y)
                loss.backward()
                return loss

            self.opt.step(closure)
        return torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])

    def uneven_steps(self, numbers: tuple[int, ...], rank: int | None) -> None:
        """The steps of processes with different numbers of batches, and a schedule that only those with a batch see.

        rank: None for one process with the cases of all. Gradients are divided by the number of all processes, or where
            there are two by the number of those that have a batch.
        """
        by_all, everyone = len(numbers) > 2, len(numbers)
        parts: Any = [self.called, self.opt]
        join = nullcontext() if rank is None else Join(parts, divide_by_initial_world_size=by_all)
        with join:
            for step in range(max(numbers) if rank is None else numbers[rank]):
                active = [r for r, number in enumerate(numbers) if step < number]
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(len(numbers), CASES, 3, generator=generator, dtype=torch.float64)
                y = torch.randint(4, (len(numbers), CASES), generator=generator)
                mine = active if rank is None else [rank]
                for group in self.opt.param_groups:
                    group["lr"] *= 0.9
                self.opt.zero_grad()
                total = F.cross_entropy(self.called(x[mine].flatten(0, 1)), y[mine].flatten(), reduction="sum")
                alone = 1.0 if not by_all else len(active) / everyone
                means = len(active) if rank is None else alone
                (total / CASES / means).backward()
                self.opt.step(loss=None if step % 2 else total.detach())

    def kept(self) -> dict[tuple[str, str], int]:
        """The bytes of every tensor that the state of this process has, by parameter and name, without those of no
        block and the flags of blocks, which all processes have."""
        return {
            (name, entry): tensor.nbytes
            for name, parameter in self.net.named_parameters()
            for entry, tensor in self.opt.state.get(parameter, {}).items()
            if not entry.startswith("kfac/") and not entry.endswith("/ready")
        }

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.called),
            "optimizer": get_optimizer_state_dict(self.called, self.opt),
        }

    def save(self, folder: str, group: Any) -> None:
        dcp.save(self.state(), checkpoint_id=folder, process_group=group)

    def load(self, folder: str, group: Any) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_model_state_dict(self.called, state["model"])
        set_optimizer_state_dict(self.called, self.opt, state["optimizer"])


def train(options: dict[str, Any], part: slice, group: Any = None) -> dict[str, Any]:
    """All parameters after the steps, the damping, the multiplier, and what this process kept and decomposed."""
    training = Training(options, part, group)
    decomposed = 0

    def counted(matrices: Tensor, *args: Any) -> Any:
        nonlocal decomposed
        decomposed += len(matrices)
        return dense_roots(matrices, *args)

    def counted_eigh(matrices: Tensor, *args: Any) -> Any:
        nonlocal decomposed
        decomposed += len(matrices)
        return eigh_of_blocks(matrices, *args)

    dense_roots, stacks.dense_roots = stacks.dense_roots, counted
    eigh_of_blocks, stacks.eigh_of_blocks = stacks.eigh_of_blocks, counted_eigh
    try:
        parameters = training.steps(0, STEPS)
    finally:
        stacks.dense_roots, stacks.eigh_of_blocks = dense_roots, eigh_of_blocks
    blocks = training.opt.estimator.blocks
    return {
        "parameters": parameters,
        "damping": float(training.opt.damping),
        "multiplier": float(training.opt.scalars.get("multiplier", 0.0)),
        "decomposed": decomposed,
        "elements": {key: sum(t.numel() for t in block.state().values()) - 2 for key, block in blocks.items()},
        "owners": {key: block.group.owner for key, block in blocks.items()},
        "refused": [read(block) for block in blocks.values() if not block.group.here],
        "counters": training.opt.counters(),
        "kept": training.kept(),
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


def uneven(name: str, size: int, rank: int | None, group: Any = None) -> Tensor:
    """All parameters after uneven steps, two common ones, and uneven ones again."""
    training = Training(UNEVEN[name], slice(None) if rank is None else part_of(rank, size), group)
    training.uneven_steps(NUMBERS[size], rank)
    training.steps(0, 2)
    training.uneven_steps(NUMBERS[size][::-1], rank)
    return torch.cat([parameter.detach().flatten() for parameter in training.net.parameters()])


def part_of(rank: int, size: int) -> slice:
    return slice(rank * CASES // size, (rank + 1) * CASES // size)


def restarts(rank: int, folder: str, groups: dict[int, Any]) -> dict[str, Any]:
    """Steps after a checkpoint of two processes: the same two, two with another placement, three, and one."""
    after: dict[str, Any] = {}
    for kind, options in RESTARTED.items():
        file = f"{folder}/{kind}"
        if rank < 2:
            training = Training({**options, "placement": "owners"}, part_of(rank, 2), groups[2])
            training.steps(0, 5)
            training.save(file, groups[2])
            after[kind, "saved"] = training.steps(5, 10)
        dist.barrier()
        for of_kind, size, placement in RESTARTS:
            if of_kind == kind and rank < size:
                training = Training({**options, "placement": placement}, part_of(rank, size), groups[size])
                training.load(file, groups[size])
                after[kind, size, placement] = training.steps(5, 10)
    if rank < 2:  # a file of one process, read by the other
        training = Training({**RESTARTED["exact"], "placement": "owners"}, part_of(rank, 2), groups[2])
        states: list[Any] = [None, None]
        dist.all_gather_object(states, training.opt.state_dict(), group=groups[2])
        with pytest.raises(ValueError) as error:
            training.opt.load_state_dict(states[1 - rank])
        after["other"] = str(error.value)
        after["earlier"] = after_an_earlier_version(training)
    return after


def after_an_earlier_version(training: Training) -> bool:
    """Whether the state is the same after a file in which every process has the momentum of all parameters."""
    training.steps(0, 2)
    kept, state = training.kept(), training.opt.state_dict()
    for number, parameter in enumerate(p for group in training.opt.param_groups for p in group["params"]):
        state["state"][number].setdefault("velocity", torch.ones_like(parameter))
    training.opt.load_state_dict(state)
    return training.kept() == kept


def compiled(part: slice, group: Any = None, backend: str = "eager") -> Tensor:
    options = OPTIONS["adam"] if group is None else {**OPTIONS["adam"], "placement": "owners"}
    return Training(options, part, group, backend).steps(0, 3)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    groups = {1: [dist.new_group([n]) for n in range(WORLD)][rank], 2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    results: dict[Any, Any] = {
        (name, size, placement): train(
            {**OPTIONS[name], "placement": placement},
            part_of(rank, size),
            groups[size],
        )
        for name, size, placement in TRAININGS
        if rank < size
    }
    results["uneven"] = {(name, n): uneven(name, n, rank, groups[n]) for name, n in UNEVEN_TRAININGS if rank < n}
    results["restarts"] = restarts(rank, folder, groups)
    if rank < 2:
        results["compiled"] = compiled(part_of(rank, 2), groups[2], "aot_eager")
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


Results = list[dict[Any, dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder, threads = tmp_path_factory.mktemp("processes"), torch.get_num_threads()
    others = started(work, range(1, WORLD), str(folder))
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
    assert trainings
    for training in trainings:
        for result in of_all(results, training):
            torch.testing.assert_close(result["parameters"], whole["parameters"], rtol=1e-9, atol=1e-9)
            assert result["damping"] == pytest.approx(whole["damping"], rel=1e-9)
            assert result["multiplier"] == pytest.approx(whole["multiplier"], rel=1e-7)  # of a difference quotient
            assert result["counters"] == whole["counters"]
    assert whole["multiplier"] not in (0, 1) if name == "eigen_moments" else whole["multiplier"] == 0


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


@pytest.mark.parametrize("training", [("regular", 2, "owners"), ("regular", 3, "owners"), ("adaptive", 3, "owners")])
def test_the_momentum_of_a_block_is_kept_by_its_owner_alone(results: Results, training: tuple[str, int, str]) -> None:
    name, size, _ = training
    whole, of_each = alone(name), [result["kept"] for result in of_all(results, training)]
    assert sum(map(len, of_each)) == len(whole["kept"]) and dict(chain(*(k.items() for k in of_each))) == whole["kept"]
    vectors = {"velocity", "checkpoint"} if name == "adaptive" else {"velocity"}
    for rank, kept in enumerate(of_each):
        owned = {parameter for block, owner in whole_owners(results, training) if owner == rank for parameter in block}
        assert {parameter for parameter, entry in kept if entry in vectors} == owned
    blocks = [block for block, _ in whole_owners(results, training)]
    largest = max(sum(b for (p, entry), b in whole["kept"].items() if belongs(p, entry, block)) for block in blocks)
    assert max(sum(kept.values()) for kept in of_each) <= sum(whole["kept"].values()) / size + largest


def whole_owners(results: Results, training: tuple[str, int, str]) -> list[tuple[tuple[str, ...], int]]:
    """The whole parameters of every block, and its owner."""
    owners = of_all(results, training)[0]["owners"]
    return [(tuple(name.partition("[")[0] for name in block), owner) for block, owner in owners.items()]


def belongs(parameter: str, entry: str, block: tuple[str, ...]) -> bool:
    """Whether an entry of a state is of a block: of one of its parameters, or a tensor of it with the first of them."""
    return parameter in block and ("/" not in entry or parameter == block[0])


def test_a_compiled_update_with_owners_is_that_of_one_process(results: Results) -> None:
    for of_process in results[:2]:
        torch.testing.assert_close(of_process["compiled"], compiled(slice(None)), rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize(("kind", "size", "placement"), [how for how in RESTARTS if how[0] != "sampled"])
def test_a_checkpoint_of_two_processes_continues_in_any_number(
    results: Results, kind: str, size: int, placement: str
) -> None:
    tolerance = 1e-9 if kind == "eigen_moments" else 1e-12  # the former divides by small roots
    saved = results[0]["restarts"][kind, "saved"]
    for of_process in results[:size]:
        after = of_process["restarts"][kind, size, placement]
        torch.testing.assert_close(after, saved, rtol=tolerance, atol=tolerance)


def test_the_same_processes_continue_bit_for_bit_with_the_same_samples(results: Results) -> None:
    for of_process in results[:2]:
        after = of_process["restarts"]
        for kind in RESTARTED:
            assert torch.equal(after[kind, 2, "owners"], after[kind, "saved"])


def test_momentum_of_others_in_a_file_of_an_earlier_version_is_left_out(results: Results) -> None:
    assert [of_process["restarts"]["earlier"] for of_process in results[:2]] == [True, True]


def test_samples_of_other_numbers_of_processes_are_others(results: Results) -> None:
    after = results[0]["restarts"]
    assert not torch.equal(after["sampled", 3, "owners"], after["sampled", "saved"])


def test_a_state_of_another_process_says_to_use_distributed_checkpoints(results: Results) -> None:
    for of_process in results[:2]:
        message = of_process["restarts"]["other"]
        assert re.match(r"the state does not fit this optimizer, and nothing of it is loaded: \d+ entries are", message)
        assert re.search(r"\n  \w+.weight,\w+.bias/skipped +is missing\n", message)
        assert (
            "Each process has the state of its own blocks only: save and load with torch.distributed.checkpoint"
            in message
        )


@pytest.mark.parametrize(("name", "size"), UNEVEN_TRAININGS)
def test_processes_without_batches_take_the_steps_of_the_others(results: Results, name: str, size: int) -> None:
    expected = uneven(name, size, None)
    for of_process in results[:size]:
        torch.testing.assert_close(of_process["uneven"][name, size], expected, rtol=1e-9, atol=1e-9)
