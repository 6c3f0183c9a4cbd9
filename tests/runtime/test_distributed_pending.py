"""The sums of a batch, before they enter the factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kfac_fx.estimator.estimator import PendingBatch, with_symmetric
from kfac_fx.linalg.matrices import pack_symmetric, unpack_symmetric
from kfac_fx.passes.approximations import APPROXIMATIONS

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
    assert batch.cases == 8 and batch.total(None, {}, torch.ones(()), divided=False) == 8


def test_a_guarded_micro_batch_that_is_not_finite_is_left_out_with_its_cases() -> None:
    batch = PendingBatch()
    finite, broken = added(batch, 1.0, guarded=True), added(batch, float("nan"), guarded=True)
    assert finite is not None and bool(finite) and broken is not None and not bool(broken)
    assert torch.equal(batch.sums[KEY]["A"], torch.ones(2, 2)) and torch.equal(batch.sums[OTHER]["A"], torch.ones(3, 3))
    assert torch.equal(batch.gradients["0.weight"], torch.ones(2))
    assert batch.cases == 8 and int(batch.total(None, {}, torch.ones(()), divided=False)) == 4


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
