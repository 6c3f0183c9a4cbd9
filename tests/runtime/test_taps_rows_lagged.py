"""Sums over pairs of rows of consecutive uses."""

from __future__ import annotations

import pytest
import torch

from kfac_fx.passes.approximations import A1, PAIRS, named
from kfac_fx.recording.statistics import Rows
from kfac_fx.recording.taps import unfolded

pytestmark = pytest.mark.usefixtures("float64")


def test_lagged_rows_of_one_case_for_all() -> None:
    """Rows that all cases share, N = 1, stand for as many as there are gradient rows."""
    shared, own = torch.randn(1, 2, 1, 3), torch.randn(4, 2, 1, 3)
    d = torch.randn(4, 2, 1, 2)
    lag = A1.of
    for bias in (False, True):
        matrix = (1, 2, 3 + bias)
        for later, earlier in ((shared, own), (own, shared), (shared, shared)):
            got = lag(Rows(later, d, bias, matrix), Rows(earlier, d, bias, matrix))
            wide = lag(
                Rows(later.expand(4, 2, 1, 3), d, bias, matrix), Rows(earlier.expand(4, 2, 1, 3), d, bias, matrix)
            )
            torch.testing.assert_close(got, wide)


def test_a_pair_counts_where_both_rows_are_real() -> None:
    mask = torch.tensor([[True], [True], [False]])
    d = torch.randn(3, 1, 1, 2)
    rows = Rows(torch.randn(3, 1, 1, 4), d, False, (1, 2, 4), mask)
    whole = Rows(rows.x, d, False, (1, 2, 4))
    assert PAIRS.of(rows, rows) == 2
    other = Rows(rows.x, d, False, (1, 2, 4), torch.tensor([[False], [True], [True]]))
    assert PAIRS.of(rows, other) == PAIRS.of(other, rows) == 1
    assert PAIRS.of(whole, whole) == PAIRS.of(whole, rows) == 3
    assert PAIRS.of(rows, whole) == 3


@pytest.mark.parametrize("in_positions", [False, True])
def test_uses_that_lie_behind_each_other_become_pairs_one_step_apart(in_positions: bool) -> None:
    shape = (2, 3, 1) if in_positions else (6, 1, 1)  # three steps of two cases
    x = torch.arange(6.0).view(2, 3).view(*shape, 1) if in_positions else torch.arange(6.0).view(*shape, 1)
    rows = Rows(x, 10 * x, False, (1, 1, 1), x[..., 0, 0] < 5)
    later, earlier = unfolded(rows, 3, in_positions)
    step = 1 if in_positions else 2
    assert torch.equal(later.x, earlier.x + step) and torch.equal(later.d, 10 * later.x)
    assert later.mask is not None and torch.equal(later.mask, later.x[..., 0, 0] < 5)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_later_use_is_on_the_left(groups: int) -> None:
    x, d = torch.randn(2, 4, 3, groups, 3), torch.randn(2, 4, 3, groups, 2)
    earlier, later = (Rows(x[t], d[t], False, (groups, 2, 3)) for t in (0, 1))
    for name, rows in (("A1", x), ("G1", d)):
        for g in range(groups):
            wanted = sum(torch.outer(rows[1, n, s, g], rows[0, n, s, g]) for n in range(4) for s in range(3))
            torch.testing.assert_close(named(name).of(later, earlier)[g], wanted)
