"""Symmetric matrices in half of their memory, for messages between processes.

A symmetric M [d, d] is determined by its elements on and above the diagonal. Row i has d - i of them, and row d - 1 - i
has i + 1, so the two fill one row of d + 1 elements. With h = ⌈d / 2⌉ such rows,

    R [h, d + 1]:    R[i, j + 1] = M[i, j] for j >= i          R[i, j] = M[d - 1 - i, d - 1 - j] for j <= i

is M without indices and with a few operations on whole matrices (rectangular full packed storage; Gustavson et al.
2010, "Rectangular Full Packed Format for Cholesky's Algorithm"). If d is odd, the middle row is there twice.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def pack_symmetric(matrices: Tensor) -> Tensor:
    """[..., d, d] -> [..., ⌈d / 2⌉, d + 1]. Only the elements on and above the diagonal are read."""
    half = (matrices.shape[-1] + 1) // 2
    top, bottom = matrices[..., :half, :], matrices.flip(-2, -1)[..., :half, :]
    return F.pad(top, (1, 0)).triu(1) + F.pad(bottom, (0, 1)).tril()


def unpack_symmetric(rows: Tensor) -> Tensor:
    """The inverse of `pack_symmetric`, for symmetric matrices."""
    half, width = rows.shape[-2], rows.shape[-1] - 1
    upper = rows.new_zeros(*rows.shape[:-2], width, width)
    upper[..., width - half :, :] = rows[..., :-1].tril().flip(-2, -1)
    upper[..., :half, :] = rows[..., 1:].triu()
    return upper + upper.triu(1).mT
