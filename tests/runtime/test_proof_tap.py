"""Second moments that a layer declares, in the tap of the proof."""

from __future__ import annotations

import torch

from kfac_fx.recording.proof import moments_apart


def test_a_declared_second_moment_is_compared_with_that_of_the_rows() -> None:
    moment = torch.eye(3)
    assert moments_apart(moment, moment * (1 + 1e-6)) is None
    assert moments_apart(moment, 2 * moment) == "its second_moment is not that of its rows (100% apart)"
    assert moments_apart(0 * moment, moment) == "its second_moment is not that of its rows (theirs is zero)"
    assert moments_apart(torch.nan * moment, moment) is None  # the batch tells nothing
    assert moments_apart(moment, torch.eye(2)) == "its second_moment has the shape [2, 2], and that of its rows [3, 3]"
