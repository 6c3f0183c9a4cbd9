"""Whatever precision the user allowed: full where it must be, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.linalg.matrices import full_precision, without_cudnn
from kfac_fx.statistics import row_sums as statistics

CUDNN: Any = torch.backends.cudnn


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


@pytest.fixture
def convolutions() -> Iterator[Any]:
    before = CUDNN.conv.fp32_precision
    yield CUDNN.conv
    CUDNN.conv.fp32_precision = before


def chosen() -> list[str]:
    return [CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision]


def test_convolutions_and_recurrent_layers_are_left_alone_but_in_full_precision_of_everything() -> None:
    before = chosen()
    with full_precision():
        assert chosen() == before
    with full_precision(everything=True):
        assert chosen() == ["ieee", "ieee"]
        assert not CUDNN.allow_tf32  # which raises where the older setting and the newer ones differ
    assert chosen() == before and CUDNN.allow_tf32


def test_who_set_convolutions_by_the_newer_setting_has_it_back(convolutions: Any) -> None:
    convolutions.fp32_precision = "ieee"
    before = chosen()
    assert before[0] != before[1]
    with full_precision(everything=True):
        assert chosen() == ["ieee", "ieee"]
    assert chosen() == before


def test_the_older_setting_can_be_read_inside(user_precision: Any) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_without_cudnn_nothing_else_changes(convolutions: Any) -> None:
    convolutions.fp32_precision = "ieee"  # torch.backends.cudnn.flags raises then
    before = chosen()
    with pytest.raises(KeyError), without_cudnn():
        assert not CUDNN.enabled and chosen() == before
        raise KeyError
    assert CUDNN.enabled and chosen() == before


@pytest.mark.parametrize("way", ["ride", "record"])
def test_factors_are_products_in_full_precision(way: str, user_precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ride, too, whose backward is the user's."""
    x = torch.randn(6, 4)
    net = kfac_fx.compile(nn.Linear(4, 3), (x,), loss="categorical")
    seen: list[str] = []

    def gram(*rows: Tensor) -> Tensor:
        seen.append(user_precision.fp32_precision)
        return product(*rows)

    product = statistics.gram
    monkeypatch.setattr(statistics, "gram", gram)
    user_precision.fp32_precision = "tf32"
    if way == "record":
        net.record((x,), {})
    else:
        outputs, _ = net.ride((x,), {})
        F.cross_entropy(outputs, torch.zeros(6, dtype=torch.int64)).backward()
    assert seen == ["ieee", "ieee"]
    assert user_precision.fp32_precision == "tf32"
