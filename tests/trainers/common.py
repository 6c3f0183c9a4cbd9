"""Helpers of the tests of all trainers: how warnings count, and how results are compared."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

# The packages warn of themselves and of torch, which is theirs to settle; ours are errors.
WARNINGS = [
    pytest.mark.filterwarnings(f"{action}")
    for action in ("ignore", "error::kfac_fx.LossScaleWarning", "error:a step takes factors:RuntimeWarning")
]


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    """Bit for bit."""
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for values in optimizer.state_dict()["state"].values() for tensor in values.values()]
