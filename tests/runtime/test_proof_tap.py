"""Shapes of rows, and second moments that a layer declares, in the tap of the proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kfac_fx.checks.proof_tap import check_row_shapes, moments_apart, reaches_others


@pytest.mark.parametrize(
    ("rows", "grads", "sizes"),
    [((5, 2, 3), (5, 2, 4), (1, 4, 3)), ((1, 2, 3), (5, 2, 1, 4), (1, 4, 3)), ((5, 2, 6, 3), (5, 2, 6, 4), (6, 4, 3))],
)
def test_rows_of_the_right_shape(rows: Any, grads: Any, sizes: Any) -> None:
    check_row_shapes(torch.zeros(rows), torch.zeros(grads), sizes)
    if sizes[0] == 1:
        check_row_shapes(torch.zeros(rows[:2], dtype=torch.long), torch.zeros(grads), sizes)


@pytest.mark.parametrize(
    ("rows", "grads", "sizes"),
    [((5, 3, 3), (5, 2, 4), (1, 4, 3)), ((2, 2, 3), (5, 2, 4), (1, 4, 3)), ((5, 2, 3), (5, 2, 6, 4), (6, 4, 3))],
)
def test_rows_of_a_wrong_shape(rows: Any, grads: Any, sizes: Any) -> None:
    with pytest.raises(ValueError, match="rows of shape .*, wanted"):
        check_row_shapes(torch.zeros(rows), torch.zeros(grads), sizes)


def test_a_declared_second_moment_is_compared_with_that_of_the_rows() -> None:
    moment = torch.eye(3)
    assert moments_apart(moment, moment * (1 + 1e-6)) is None
    assert moments_apart(moment, 2 * moment) == "its second_moment is not that of its rows (100% apart)"
    assert moments_apart(0 * moment, moment) == "its second_moment is not that of its rows (theirs is zero)"
    assert moments_apart(torch.nan * moment, moment) is None  # the batch tells nothing
    assert moments_apart(moment, torch.eye(2)) == "its second_moment has the shape [2, 2], and that of its rows [3, 3]"


@pytest.mark.parametrize("case", [0, 1])
def test_a_gradient_of_another_case_than_the_first_is_seen(case: int) -> None:
    rows, grads = torch.ones(2, 1, 3), torch.zeros(2, 1, 4)
    grads[case] = 1
    assert reaches_others(rows, grads) is bool(case)
