"""Checkpoints are run as what they wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kfac_fx.passes.tracing.substitutes import checkpoints_off
from kfac_fx.passes.tracing.watch import custom_functions


def runs(x: Tensor, **options: Any) -> tuple[int, Tensor]:
    """(how often a checkpointed function runs, the gradient of it)."""
    times = []

    def function(value: Tensor) -> Tensor:
        times.append(1)
        return value.sin() * torch.rand_like(value)

    torch.manual_seed(0)
    output: Any = checkpoint(function, x, **options)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    return len(times), gradient


def test_a_checkpoint_that_is_not_reentrant_runs_once() -> None:
    x = torch.ones(3, requires_grad=True)
    twice, wanted = runs(x, use_reentrant=False)
    with checkpoints_off():
        once, gradient = runs(x, use_reentrant=False)
    assert (twice, once) == (2, 1)
    assert torch.equal(gradient, wanted)
    assert runs(x, use_reentrant=False)[0] == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_are_off_where_custom_functions_are_watched(reentrant: bool) -> None:
    with custom_functions() as seen:
        assert runs(torch.ones(3, requires_grad=True), use_reentrant=reentrant)[0] == 1
    assert seen == set()
