"""On a GPU: products of halves are those of the same numbers in float32, in eager mode, compiled and under vmap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.linalg.matrices import full_precision
from kfac_fx.passes.matrix import HALVES, row_products
from tests.cuda.on_cuda import ON_CUDA

pytestmark = ON_CUDA
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": row_products,
    "inductor": lambda left, right: torch.compile(row_products, fullgraph=True)(left, right),
    "vmap": lambda left, right: torch.func.vmap(row_products)(left.unsqueeze(0), right.unsqueeze(0)).squeeze(0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_multiplied_without_loss(dtype: torch.dtype, groups: int, way: str) -> None:
    left, right = (torch.randn(groups, width, 5000, device="cuda").to(dtype) for width in (40, 70))
    with full_precision():
        found = WAYS[way](left, right)
        expected = left.double() @ right.double().mT
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)  # numbers of size 70


def test_halves_are_not_widened_on_the_device() -> None:
    """Ten thousand rows of width 512 would take 20 MB in float32."""
    columns = torch.randn(1, 512, 10_000, device="cuda").bfloat16()
    row_products(columns, columns)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row_products(columns, columns)
    assert torch.cuda.max_memory_allocated() - before < 4e6


@pytest.mark.parametrize("mode", ["empirical", "exact"])
def test_factors_under_autocast_are_those_of_the_rounded_rows(mode: str) -> None:
    """The gradient rows of the exact Fisher have a dimension of vmap."""
    torch.manual_seed(0)
    model, x = nn.Linear(40, 6).cuda(), torch.randn(1000, 40, device="cuda")
    labels = torch.zeros(1000, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        net = kfac_fx.compile(model, (x,), loss="categorical")
        moments = net.record((x,), {}, mode=mode, targets=labels if mode == "empirical" else None)
    factor = moments.statistics["weight", "bias"]
    rounded = x.bfloat16().double()
    torch.testing.assert_close(factor["A"][0, :-1, :-1].double(), rounded.mT @ rounded, rtol=1e-5, atol=1e-3)
    assert factor["G"].dtype is torch.float32 and bool(factor["G"].isfinite().all())
