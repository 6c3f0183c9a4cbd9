"""What series blocks need beside the statistics of single uses: sums over pairs of rows of consecutive uses.

    A1  Σ r_t+1 r_tᵀ        G1  Σ d_t+1 d_tᵀ        pairs  Σ 1

over all cases, positions and pairs of uses one step apart, the later one on the left. With `count` rows in all, and not
one use less, in the denominator they are moments of sequences with zeros before and behind (a use without a neighbor
has a neighbor of zeros), so that [[A, A1ᵀ], [A1, A]] has no negative eigenvalues, whatever the batch is. A sequence has
one pair less than it has rows, so the mean length of the sequences is count / (count - pairs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.statistics.row_sums import Matrix, Rows, Shape, homogeneous


@dataclass(frozen=True)
class Lagged:
    """`shape(matrix)` is the shape of what `compute(later, earlier)` returns; matrix: (g, o, i) with bias."""

    shape: Callable[[Matrix], Shape]
    compute: Callable[[Rows, Rows], Tensor]


def input_lag(later: Rows, earlier: Rows) -> Tensor:
    if later.x.shape[0] == earlier.x.shape[0] == 1 and later.kept is None:
        return cross(homogeneous(later), homogeneous(earlier)) * later.repeats
    return cross(*(homogeneous(rows).expand(rows.d.shape[0], -1, -1, -1) for rows in (later, earlier)))


def gradient_lag(later: Rows, earlier: Rows) -> Tensor:
    return cross(later.d, earlier.d)


def pairs(later: Rows, earlier: Rows) -> Tensor:
    if later.kept is None or earlier.kept is None:
        return later.d.new_full((), later.d.shape[0] * later.d.shape[1])
    return (later.kept & earlier.kept).sum().to(later.d.dtype)


LAGGED = {
    "A1": Lagged(lambda matrix: (matrix[0], matrix[2], matrix[2]), input_lag),
    "G1": Lagged(lambda matrix: (matrix[0], matrix[1], matrix[1]), gradient_lag),
    "pairs": Lagged(lambda matrix: (), pairs),
}


def cross(later: Tensor, earlier: Tensor) -> Tensor:
    """Σ later earlierᵀ in every group: [N, S, g, d] twice -> [g, d, d]."""
    if later.shape[2] == 1:  # `mm` is as fast as can be
        return (later.flatten(0, 2).mT @ earlier.flatten(0, 2)).unsqueeze(0)
    return torch.einsum("nsgi,nsgj->gij", later, earlier)


def unfolded(rows: Rows, steps: int, in_positions: bool) -> tuple[Rows, Rows]:
    """(all later uses, all earlier ones) of `steps` uses that lie one after another in the rows of one, in time-major
    order: along the cases [T·N, S] or, `in_positions`, along the positions [N, T·S]."""

    def by_time(tensor: Tensor) -> Tensor:
        found: Tensor = tensor.unflatten(int(in_positions), (steps, -1))
        return found.movedim(int(in_positions), 0)

    x, d = by_time(rows.expanded()), by_time(rows.d)
    kept = None if rows.kept is None else by_time(rows.kept)

    def taken(steps: slice) -> Rows:
        own = None if kept is None else kept[steps].flatten(0, 1)
        return Rows(x[steps].flatten(0, 1), d[steps].flatten(0, 1), rows.bias, rows.matrix, own)

    return taken(slice(1, None)), taken(slice(None, -1))
