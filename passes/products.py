"""Sums of products of rows.

A product of two numbers of float16 or bfloat16 fits into float32 without rounding. A GPU multiplies such numbers as
they are and adds up in float32, in a fraction of the time that the same rows take in float32. The sums are as exact.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .torch_private import is_batched

HALVES = (torch.float16, torch.bfloat16)


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, also under autocast."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Around sums that autocast must not round. To enter a context of autocast takes longer than to ask for it."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_n l_n r_nᵀ in every group, in at least float32: columns [g, a, n] and [g, b, n] -> [g, a, b]."""
    if len(left) == 1:  # `bmm` with one matrix is slower than `mm` on some devices
        return products_of_columns(left[0], right[0]).unsqueeze(0)
    if multiplied_as_they_are(left, right):
        return torch.bmm(left, right.mT, torch.float32)
    return precise(left) @ precise(right).mT


def products_of_columns(left: Tensor, right: Tensor) -> Tensor:
    """As `row_products`, of one group: columns [a, n] and [b, n] -> [a, b]."""
    if multiplied_as_they_are(left, right):
        return torch.mm(left, right.mT, torch.float32)
    return precise(left) @ precise(right).mT


def multiplied_as_they_are(left: Tensor, right: Tensor) -> bool:
    """Whether torch has a product of these columns that adds up in float32: of halves, on CUDA, without vmap."""
    halves = left.is_cuda and left.dtype == right.dtype and left.dtype in HALVES
    return halves and (torch.compiler.is_compiling() or not is_batched(left, right))
