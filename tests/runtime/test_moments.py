"""The statistics of one batch: scales of pending moments, and one backward of a forward."""

from __future__ import annotations

import pytest
import torch

from kfac_fx.passes.approximations import G1, A, G, Statistic
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.parametrization import Piece
from kfac_fx.recording.statistics import PendingMoments, flat
from tests.runtime.fisher_cases import FORMS, register

REGISTRATION = register(FORMS["linear"], "kron")
PIECE = Piece("w", 0, 1, 3)
GENERIC = Registration("generic", None, (PIECE.name, "b"), (), "diagonal", pieces=(PIECE,))


def pending() -> PendingMoments:
    probes = {name: torch.zeros(2, requires_grad=True) for name in ("count", "A", "G", "per_case")}
    generic = {"w": torch.ones(4, 2, requires_grad=True), "b": torch.ones(3, requires_grad=True)}
    return PendingMoments([probes, {}], (REGISTRATION, GENERIC), generic, cases=5)


def backward(of: PendingMoments) -> None:
    total = sum(probe.sum() for probe in of.probes[0].values()) + (2 * of.generic["w"]).sum()
    assert isinstance(total, torch.Tensor)
    total.backward()


def test_transposed_uses_have_the_power_of_the_other_side() -> None:
    def twin_of(statistic: Statistic) -> tuple[str, int]:
        assert statistic.twin is not None
        return statistic.twin.name, statistic.twin.power

    assert G.in_blocks(8).power == G.power == 2 and A.in_blocks(8).power == A.power == 0
    assert twin_of(G.in_blocks(8)) == ("G/8/turned", 0) and twin_of(A) == ("A/turned", 2)
    assert G1.twin is None


@pytest.mark.parametrize(("reduction", "cases", "scale"), [("sum", None, 1), ("mean", None, 5), ("mean", 20, 20)])
def test_statistics_are_those_of_the_sum_over_cases(reduction: str, cases: int | None, scale: int) -> None:
    of = pending()
    backward(of)
    moments = of.moments(reduction, cases)
    sums = moments.statistics[REGISTRATION.parameters]
    assert moments.cases == 5
    assert [sums[name][0].item() for name in ("count", "A", "per_case", "G")] == [1, 1, scale, scale**2]


def test_a_loss_scale_is_taken_out_by_the_power_of_the_gradient() -> None:
    of = pending()
    backward(of)
    moments = of.moments("mean", 16, loss_scale=8.0).statistics
    sums = moments[REGISTRATION.parameters]
    assert [sums[name][0].item() for name in ("count", "A", "per_case", "G")] == [1, 1, 2, 4]
    assert moments[GENERIC.parameters]["gradient"].tolist() == [4] * 4 + [0] * 3


def test_generic_gradients_are_flat_by_piece_and_zero_where_the_backward_did_not_come() -> None:
    of = pending()
    backward(of)
    gradient = of.moments("sum").statistics[GENERIC.parameters]["gradient"]
    assert gradient.tolist() == [2] * 4 + [0] * 3


def test_the_sparse_gradient_of_a_generic_table_counts_as_a_dense_one() -> None:
    of = pending()
    of.generic["w"].grad = torch.ones(4, 2).to_sparse()
    assert of.moments("sum").statistics[GENERIC.parameters]["gradient"].tolist() == [1] * 4 + [0] * 3


def test_without_a_backward_all_sums_are_zero() -> None:
    sums = pending().moments().statistics[REGISTRATION.parameters]
    assert not any(value.any() for value in sums.values())


def test_a_second_backward_of_a_forward_is_refused() -> None:
    of = pending()
    for _ in range(2):
        backward(of)
    with pytest.raises(RuntimeError, match=r"there were 2 of this one. They reached weight"):
        of.moments()


def test_flat_gradients_are_float32_at_least() -> None:
    assert flat([torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)]).dtype is torch.float32
    assert flat([torch.ones(2), torch.ones(1, dtype=torch.float64)]).dtype is torch.float64
