"""The additional statistics of series blocks: sums over pairs of rows of consecutive uses.

    A1  Σ r_t+1 r_tᵀ        G1  Σ d_t+1 d_tᵀ        pairs  Σ 1

over all cases, positions and pairs of uses one step apart, the later use on the left. The sums are divided by the
`count` of all rows. They are thus moments of sequences with zeros before and behind: a use without a neighbor has a
neighbor of zeros. So [[A, A1ᵀ], [A1, A]] has no negative eigenvalues in any batch. A sequence has one pair less than
rows, so the mean length of the sequences is count / (count - pairs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.passes.matrix import Shape
from kfac_fx.statistics.row_sums import Matrix, Rows, homogeneous


@dataclass(frozen=True)
class Lagged:
    """`compute(later, earlier)` returns a tensor of the shape `shape(matrix)`; matrix: (g, o, i) with the bias."""

    shape: Callable[[Matrix], Shape]
    compute: Callable[[Rows, Rows], Tensor]


def input_lag(later: Rows, earlier: Rows) -> Tensor:
    if later.x.shape[0] == earlier.x.shape[0] == 1:  # without a mask, or of one case
        return cross(homogeneous(later), homogeneous(earlier)) * later.repeats
    return cross(*(homogeneous(rows).expand(rows.d.shape[0], -1, -1, -1) for rows in (later, earlier)))


def gradient_lag(later: Rows, earlier: Rows) -> Tensor:
    return cross(later.d, earlier.d)


def pairs(later: Rows, earlier: Rows) -> Tensor:
    if later.mask is None or earlier.mask is None:
        return later.d.new_full((), later.d.shape[0] * later.d.shape[1])
    return (later.mask & earlier.mask).sum().to(later.d.dtype)


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
    """(the rows of all later uses, the rows of all earlier ones) of `steps` uses whose rows lie behind each other.

    The order is time-major: along the cases [T·N, S], or along the positions [N, T·S] if `in_positions`.
    """

    def by_time(tensor: Tensor) -> Tensor:
        by_step: Tensor = tensor.unflatten(int(in_positions), (steps, -1))
        return by_step.movedim(int(in_positions), 0)

    x, d = by_time(rows.expanded()), by_time(rows.d)
    mask = None if rows.mask is None else by_time(rows.mask)

    def at(steps: slice) -> Rows:
        mask_at = None if mask is None else mask[steps].flatten(0, 1)
        return Rows(x[steps].flatten(0, 1), d[steps].flatten(0, 1), rows.bias, rows.matrix, mask_at)

    return at(slice(1, None)), at(slice(None, -1))
