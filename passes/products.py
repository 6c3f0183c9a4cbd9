"""Sums of products of rows.

A product of two numbers of float16 or bfloat16 fits into float32 without rounding. A GPU multiplies such numbers as
they are and adds up in float32, in a fraction of the time that the same rows take in float32. The sums are as exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_private import is_batched

HALVES = (torch.float16, torch.bfloat16)


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, also under autocast."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_n l_n r_nᵀ in every group, in at least float32: columns [g, a, n] and [g, b, n] -> [g, a, b]."""
    one = len(left) == 1  # `bmm` with one matrix is slower than `mm` on some devices
    if not multiplied_as_they_are(left, right):
        left, right = precise(left), precise(right)
        return (left[0] @ right[0].mT).unsqueeze(0) if one else left @ right.mT
    if one:
        return torch.mm(left[0], right[0].mT, torch.float32).unsqueeze(0)
    return torch.bmm(left, right.mT, torch.float32)


def multiplied_as_they_are(left: Tensor, right: Tensor) -> bool:
    """Whether torch has a product of these columns that adds up in float32: of halves, on CUDA, without vmap."""
    halves = left.is_cuda and left.dtype == right.dtype and left.dtype in HALVES
    return halves and (torch.compiler.is_compiling() or not is_batched(left, right))
