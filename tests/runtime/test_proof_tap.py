"""Second moments that a layer declares, in the tap of the proof."""

from __future__ import annotations

import pytest
import torch

from kfac_fx.recording.proof import moments_apart, reaches_others


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
