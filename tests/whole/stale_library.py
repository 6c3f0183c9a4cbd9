"""A library that a model of tests/whole/test_stale_captures.py uses."""

from __future__ import annotations

from torch import Tensor

SCALE = 1.0


def activation(x: Tensor) -> Tensor:
    return x
