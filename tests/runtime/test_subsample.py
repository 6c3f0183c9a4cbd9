"""Samples of rows: equal probabilities, and multipliers that make sums right in expectation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx

from kfac_fx.passes.ir import ROW_MASK, Sampling
from kfac_fx.passes.layers import LAYERS
from kfac_fx.recording.taps import (
    as_ratio,
    fewer_cases,
    fewer_rows,
    read_sampling,
    sample,
    sampled_parts,
    share_of,
    systematic,
)
from tests.runtime.fisher_cases import FORMS, register


@pytest.mark.parametrize(("total", "number"), [(7, 3), (12, 4), (5, 5), (9, 1), (1000, 7)])
def test_every_row_is_taken_with_the_same_probability_and_once(total: int, number: int) -> None:
    counts = torch.zeros(total, dtype=torch.long)
    for k in range(total):
        rows = systematic(torch.tensor((k + 0.5) / total), total, number)
        assert rows.unique().numel() == number and int(rows.min()) >= 0 and int(rows.max()) < total
        counts[rows] += 1
    assert counts.tolist() == [number] * total


def test_true_is_the_default_of_tf_and_false_takes_all_rows() -> None:
    assert read_sampling(False, False) is None and read_sampling(1.0, False) is None
    assert read_sampling(True, True) == Sampling(0.2, 3.0)


def test_a_share_is_rounded_up_and_never_nothing() -> None:
    assert [share_of(total, as_ratio(0.2)) for total in (1, 5, 6, 10)] == [1, 1, 2, 2]
    assert share_of(7, as_ratio(1e-9)) == 1 and as_ratio(0.5) == (1, 2)


def test_sums_over_a_sample_are_right_in_expectation() -> None:
    rows = torch.randn(4, 6, 3, dtype=torch.float64)
    phases = (torch.arange(24) + 0.5) / 24
    sums = []
    for phase in phases:
        fewer, mask, scale = fewer_rows(as_ratio(2.0), phase, rows, None)
        assert fewer.shape == (6, 1, 3) and mask is None and scale == 4
        sums.append(fewer.sum((0, 1)) * scale)
    torch.testing.assert_close(torch.stack(sums).mean(0), rows.sum((0, 1)))


def test_a_mask_is_sampled_with_its_rows_and_few_rows_are_all_taken() -> None:
    rows, mask = torch.arange(8.0).view(2, 4, 1), torch.arange(8).view(2, 4) % 2 == 0
    fewer, fewer_mask, _ = fewer_rows(as_ratio(3.0), torch.tensor(0.5), rows, mask)
    assert fewer_mask is not None and torch.equal(fewer_mask, fewer.squeeze(-1) % 2 == 0)
    assert fewer_rows(as_ratio(8.0), torch.tensor(0.5), rows, mask)[0] is rows
    cases, scale = fewer_cases(as_ratio(0.5), torch.tensor(0.0), 6)
    assert cases.tolist() == [0, 2, 4] and scale == 2


def test_the_sums_of_a_sample_count_both_shares() -> None:
    """Half of the cases, and of their rows two for the only input; the mask goes with them."""
    x, mask = torch.arange(24.0).view(4, 6, 1), torch.arange(24).view(4, 6) % 2 == 0

    def both(output_grad: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
        return input, output_grad

    phases = torch.tensor([0.5, 0.25], dtype=torch.float64)
    sampled = sample(both, (as_ratio(0.5), as_ratio(2.0)), phases, 0, x, x, (), mask)
    assert sampled is not None and sampled[1] is not None and sampled[2] == 2 * 6
    assert sampled[0].flatten().tolist() == [7.0, 19.0]  # cases 1 and 3, rows 1 and 7 of their twelve
    assert sampled[1].flatten().tolist() == [False, False]


@pytest.mark.parametrize("input", [torch.zeros(1, 6, 3), torch.zeros(6, 3), torch.zeros(4, 6, dtype=torch.int64)])
def test_rows_that_are_ids_or_that_cases_share_are_taken_whole(input: Tensor) -> None:
    def both(*_: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError

    phases = torch.zeros(2, dtype=torch.float64)
    assert sample(both, (as_ratio(0.5), None), phases, 0, torch.zeros(4, 6, 3), input, (), None) is None


@pytest.mark.parametrize(("attribute", "sampled"), [(ROW_MASK, True), ("scale", False)])
def test_a_use_is_sampled_with_its_padding_mask_and_with_no_other_tensor(attribute: str, sampled: bool) -> None:
    registration = replace(register(FORMS["linear"], "kron"), sampling=Sampling(0.5, None))
    node = fx.Graph().placeholder("tensor")
    use = replace(registration.uses[0], attrs={attribute: cast(Any, node)})
    assert sampled_parts(registration, use, LAYERS["linear"]) == (((1, 2), None) if sampled else None)
