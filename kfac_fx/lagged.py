"""What series blocks need beside the statistics of single uses: second moments of the rows of consecutive uses.

    A1  Σ r_t+1 r_tᵀ        G1  Σ d_t+1 d_tᵀ

over all cases, positions and pairs of uses one step apart, the later one on the left. With `count` rows in all, and not
one use less, in the denominator they are moments of sequences with zeros before and behind (a use without a neighbor
has a neighbor of zeros), so that [[A, A1ᵀ], [A1, A]] has no negative eigenvalues, whatever the batch is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .statistics import Matrix, Rows, Shape


def input_lag(later: Rows, earlier: Rows) -> Tensor:
    """A1 [g, i, i] of two uses."""
    if later.x.shape[0] == earlier.x.shape[0]:
        body, after, before, repeats = cross(later.x, earlier.x), later.x, earlier.x, later.repeats
    else:
        after, before, repeats = later.expanded(), earlier.expanded(), 1
        body = cross(after, before)
    if not later.bias:
        return body * repeats
    corner = body.new_full((*body.shape[:-2], 1, 1), before.shape[0] * before.shape[1])
    above = torch.cat([body, after.sum((0, 1)).unsqueeze(-1)], dim=-1)
    below = torch.cat([before.sum((0, 1)).unsqueeze(-2), corner], dim=-1)
    return torch.cat([above, below], dim=-2) * repeats


def gradient_lag(later: Rows, earlier: Rows) -> Tensor:
    """G1 [g, o, o] of two uses."""
    return cross(later.d, earlier.d)


def cross(later: Tensor, earlier: Tensor) -> Tensor:
    """Σ later earlierᵀ in every group: [N, S, g, d] twice -> [g, d, d]."""
    return torch.einsum("nsgi,nsgj->gij", later, earlier)


def unfolded(rows: Rows, steps: int, in_positions: bool) -> tuple[Rows, Rows]:
    """(all later uses, all earlier ones) of `steps` uses that lie one after another in the rows of one, in time-major
    order: along the cases [T·N, S] or, `in_positions`, along the positions [N, T·S]."""

    def by_time(tensor: Tensor) -> Tensor:
        found: Tensor = tensor.unflatten(int(in_positions), (steps, -1))
        return found.movedim(int(in_positions), 0)

    x, d = by_time(rows.expanded()), by_time(rows.d)
    return (
        Rows(x[1:].flatten(0, 1), d[1:].flatten(0, 1), rows.bias, rows.matrix),
        Rows(x[:-1].flatten(0, 1), d[:-1].flatten(0, 1), rows.bias, rows.matrix),
    )


@dataclass(frozen=True)
class Lagged:
    """`shape(matrix)` is the shape of what `compute(later, earlier)` returns; matrix: (g, o, i) with bias."""

    shape: Callable[[Matrix], Shape]
    compute: Callable[[Rows, Rows], Tensor]


LAGGED = {
    "A1": Lagged(lambda matrix: (matrix[0], matrix[2], matrix[2]), input_lag),
    "G1": Lagged(lambda matrix: (matrix[0], matrix[1], matrix[1]), gradient_lag),
}
