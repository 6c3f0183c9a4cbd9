"""The sums of a batch, before they enter the factors."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.estimator import estimator
from kfac_fx.estimator.estimator import EarlySums, PendingBatch, with_symmetric
from kfac_fx.linalg.matrices import pack_symmetric, unpack_symmetric
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.errors import ModelChangedError

KEY, OTHER = ("0.weight",), ("1.weight",)
CPU = torch.device("cpu")


def added(batch: PendingBatch, value: float, *, guarded: bool = False) -> Tensor | None:
    recorded = {KEY: {"A": torch.full((2, 2), value)}, OTHER: {"A": torch.ones(3, 3)}}
    return batch.add(recorded, {"0.weight": torch.full((2,), value)}, 4, (), guarded, CPU)


def test_micro_batches_add_up() -> None:
    batch = PendingBatch()
    assert added(batch, 1.0) is None and added(batch, 2.0) is None
    assert torch.equal(batch.sums[KEY]["A"], torch.full((2, 2), 3.0))
    assert torch.equal(batch.gradients["0.weight"], torch.full((2,), 3.0))
    assert batch.cases == 8 and batch.total(None, {}, torch.ones(())) == 8


def test_a_guarded_micro_batch_that_is_not_finite_is_left_out_with_its_cases() -> None:
    batch = PendingBatch()
    finite, broken = added(batch, 1.0, guarded=True), added(batch, float("nan"), guarded=True)
    assert finite is not None and bool(finite) and broken is not None and not bool(broken)
    assert torch.equal(batch.sums[KEY]["A"], torch.ones(2, 2)) and torch.equal(batch.sums[OTHER]["A"], torch.ones(3, 3))
    assert torch.equal(batch.gradients["0.weight"], torch.ones(2))
    assert batch.cases == 8 and int(batch.total(None, {}, torch.ones(()))) == 4


def test_a_micro_batch_that_is_not_guarded_makes_the_whole_batch_not_finite() -> None:
    batch = PendingBatch()
    added(batch, 1.0)
    added(batch, float("inf"))
    assert not torch.isfinite(batch.sums[KEY]["A"]).any()


def test_a_copy_does_not_change_with_the_batch() -> None:
    batch = PendingBatch()
    added(batch, 1.0)
    before = batch.copy()
    batch.add({}, {}, 3, {OTHER}, False, CPU)
    added(batch, 1.0)
    batch.keep({OTHER})
    assert before.cases == 4 and before.paused == set() and before.sums.keys() == {KEY, OTHER}
    assert torch.equal(before.sums[KEY]["A"], torch.ones(2, 2))
    assert torch.equal(before.gradients["0.weight"], torch.ones(2))
    assert batch.sums.keys() == {OTHER} and batch.paused == {OTHER}


@pytest.mark.parametrize(
    "approximation", ["kron", "kron_in_diag", "kron_out_diag", "kron_both_diag", "full", "diagonal"]
)
def test_of_symmetric_sums_alone_messages_carry_a_half(approximation: str) -> None:
    """A diagonal has no half to spare, even if it has as many groups as elements."""
    kind = APPROXIMATIONS[approximation]
    sums = {"count": torch.tensor(4.0)}
    for side in kind.sides:
        value = torch.randn(2, 3, 3)
        sums[side.statistic.name] = torch.randn(3, 3) if side.diagonal else value + value.mT
    packed = with_symmetric(kind, sums, pack_symmetric)
    assert {name: value.shape == sums[name].shape for name, value in packed.items()} == {
        name: name in ("count", "A_diag", "G_diag", "square") for name in sums
    }
    torch.testing.assert_close(with_symmetric(kind, packed, unpack_symmetric), sums)


class Twice:
    """Two processes, of which the other one has the same tensors, or marks another set of registrations."""

    number = 2

    def __init__(self, others_mark: float | None) -> None:
        self.others_mark = others_mark

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        totals = [2 * tensor for tensor in tensors]
        if self.others_mark is not None and totals and not totals[0].dim():
            totals[1] = tensors[1] + self.others_mark
        return totals


@pytest.mark.parametrize("others_mark", [None, 7.0])
def test_processes_on_different_paths_are_told_and_their_sums_are_not_mixed(others_mark: float | None) -> None:
    """Two adapters of one shape have messages of one length."""
    batch = PendingBatch()
    batch.add({KEY: {"A": torch.eye(2), "G": torch.eye(2)}}, {}, 4, (), False, CPU)
    group: Any = SimpleNamespace(structure=APPROXIMATIONS["kron"], here=True, owner=None)
    replicas: Any = Twice(others_mark)
    if others_mark is None:
        assert float(batch.total(replicas, {KEY: group}, torch.ones(()))) == 8
        assert torch.equal(batch.sums[KEY]["A"], 2 * torch.eye(2))
        return
    with pytest.raises(ModelChangedError) as failure:
        batch.total(replicas, {KEY: group}, torch.ones(()))
    first, advice = str(failure.value).splitlines()
    assert first.startswith("the processes of a step took different paths") and first.endswith("used 0.weight.")
    assert advice.startswith("Let the argument, the attribute or the random number")
    assert torch.equal(batch.sums[KEY]["A"], torch.eye(2))


@pytest.mark.parametrize("backward", [1, -1])
def test_early_sums_leave_in_one_order_whatever_the_order_of_the_backward_is(
    backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that no backward makes is zero, and one of a diagonal side does not travel."""
    monkeypatch.setattr(estimator, "BUCKET", 1)
    net = kfac_fx.compile(
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 2)), (torch.ones(2, 2),), loss="normal",
        approximations={"1": "kron_in_diag"},
    )  # fmt: skip
    blocks = kfac_fx.FisherEstimator(net).blocks
    for owner, block in enumerate(blocks.values()):
        block.group.owner, block.group.here = owner % 2, owner % 2 == 0
    sent: list[list[list[int]]] = []

    def reduce(by_owner: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        sent.append([[tensor.numel() for tensor in tensors] for tensors in by_owner])
        return [2 * tensor for tensor in by_owner[0]]

    owners: Any = SimpleNamespace(replicas=SimpleNamespace(number=2), reduce=reduce)
    early = EarlySums(blocks, owners, torch.zeros(()))
    first, middle, last = blocks
    made = {(first, "A"): (1, 3, 3), (first, "G"): (1, 3, 3), (middle, "G"): (1, 4, 4), (last, "G"): (1, 2, 2)}
    for (key, name), shape in [*made.items()][::backward]:
        zeros = early.take(key, name, torch.ones(shape))
        assert zeros is not None and zeros.shape == shape and zeros.untyped_storage().nbytes() == 4
    assert (
        early.take(middle, "A_diag", torch.ones(1, 4)) is None and early.take(middle, "count", torch.ones(())) is None
    )
    early.finish()
    assert sent == [[[3], []], [[18], []], [[], [10]], [[8], []], [[8], []]]  # G and A, from the last layer on
    assert early.totals.keys() == {first, last} and torch.equal(early.totals[last]["A"], torch.zeros(1, 5, 5))
    assert torch.equal(early.totals[first]["A"], 2 * torch.ones(1, 3, 3))
