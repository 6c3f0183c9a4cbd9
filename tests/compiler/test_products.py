"""Sums of products of rows: halves are multiplied exactly, and summed in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kfac_fx.passes import matrix
from kfac_fx.passes.matrix import HALVES, multiplied_as_they_are, precise, row_products


def columns(groups: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(groups, width, 500).to(dtype)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
def test_products_have_the_digits_of_float32(dtype: torch.dtype, groups: int) -> None:
    left, right = columns(groups, 3, dtype), columns(groups, 4, dtype)
    found = row_products(left, right)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    expected = torch.einsum("gan,gbn->gab", left.double(), right.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_numbers_of_different_precision_are_widened() -> None:
    left, right = columns(1, 3, torch.bfloat16), columns(1, 4, torch.float32)
    torch.testing.assert_close(row_products(left, right), left.float() @ right.mT)


def test_only_halves_on_cuda_outside_of_vmap_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda = True

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

    def decided(*dtypes: torch.dtype, batched: bool = False) -> bool:
        monkeypatch.setattr(matrix, "is_batched", lambda *tensors: batched)
        tensors: Any = [OnCuda(dtype) for dtype in dtypes]
        return multiplied_as_they_are(*tensors)

    half, single = torch.bfloat16, torch.float32
    assert decided(half, half) and decided(torch.float16, torch.float16)
    assert not decided(half, half, batched=True)
    assert not (decided(half, single) or decided(single, single) or decided(half, torch.float16))
    assert not multiplied_as_they_are(*columns(2, 3, half).unbind())  # a CPU has no such product


def test_what_is_widened_has_float32_at_least() -> None:
    assert [precise(torch.zeros(1, dtype=dtype)).dtype for dtype in (torch.float16, torch.float64)] == [
        torch.float32,
        torch.float64,
    ]
