"""Pure functions on batches of matrices; the leading dimension counts matrices (groups, or layers of one shape)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# --- products -------------------------------------------------------------------------------------------------------


@contextmanager
def full_precision() -> Iterator[None]:
    """Float32 matrix products in float32, whatever the user allowed for the network; the setting is put back.

    A factor is decomposed later: ten bits of mantissa in it are not enough. Inside a compiled region the setting counts
    while the region runs, and for inductor's own kernels while it compiles: enter outside of it.
    """
    known: Any = torch.backends  # not all of it is in torch's type stubs
    backends = (known.cuda.matmul, known.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def gram(rows: Tensor) -> Tensor:
    """Sum of rows rowsᵀ in every group: [n, g, d] -> [g, d, d]."""
    if rows.shape[-1] == 1:  # as many products of one number as groups are slow
        return rows.square().sum(0).unsqueeze(-1)
    if rows.shape[1] == 1:  # `mm` is as fast as can be; `bmm` with one matrix is not everywhere
        return (rows.squeeze(1).mT @ rows.squeeze(1)).unsqueeze(0)
    columns = rows.transpose(0, 1)
    return columns.mT @ columns


def bordered(body: Tensor, border: Tensor, corner: Tensor) -> Tensor:
    """[[body, border], [borderᵀ, corner]] in every group: [g, d, d], [g, d] and [g] -> [g, d + 1, d + 1]."""
    above = torch.cat([body, border.unsqueeze(-1)], dim=-1)
    below = torch.cat([border, corner.unsqueeze(-1)], dim=-1)
    return torch.cat([above, below.unsqueeze(-2)], dim=-2)
