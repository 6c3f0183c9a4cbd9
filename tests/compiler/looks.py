"""Looks at values, in a file whose asserts pytest does not rewrite."""

from __future__ import annotations

import torch
from torch import Tensor


def asserts(x: Tensor) -> None:
    assert (x == x).all(), f"{x} is not a number"


def asserts_not(x: Tensor) -> None:
    assert not torch.isnan(x).any()


def asserts_close(x: Tensor) -> None:
    assert torch.allclose(x, x) and torch.equal(x, x)


def asserts_either(x: Tensor) -> None:
    assert (x == x).all() or (x > x).any(), f"{x} is not a number"


def asserts_either_in_front(x: Tensor) -> Tensor:
    assert (x == x).all() or (x > x).all()
    return x


def raises_error(x: Tensor) -> None:
    if torch.isnan(x).any():
        raise ValueError(f"{x} is not a number")


def branches(x: Tensor) -> None:
    if (x > 0).all():
        x.add_(1.0)


def handles(x: Tensor) -> None:
    try:
        assert (x > 0).all()
    except AssertionError:
        x.add_(1.0)
