"""Batched linear algebra: against numpy-plain formulas, and what happens when a decomposition fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kfac_fx.linalg import full_precision


@pytest.fixture
def user_precision() -> Iterator[Any]:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


@pytest.mark.parametrize("chosen", ["tf32", "ieee", "none"])
def test_full_precision_puts_the_users_setting_back(chosen: str, user_precision: Any) -> None:
    user_precision.fp32_precision = chosen
    with pytest.raises(KeyError), full_precision():
        assert user_precision.fp32_precision == "ieee"
        raise KeyError
    assert user_precision.fp32_precision == chosen


def test_full_precision_serves_the_older_setting(user_precision: Any) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision():
            assert user_precision.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
