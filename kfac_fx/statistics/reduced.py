"""Sums over one row and one gradient row per case, for weights that positions share: the statistics of `kron_reduce`.

The gradient of case n is Σ_s d_ns r_nsᵀ over its S positions. K-FAC has two settings for such weights (Eschenhagen et
al. 2023, "Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures", section 3). *Expand*
treats every position as a case of its own (`row_sums`). *Reduce* replaces the positions of a case by one pair:

    r_n = Σ_s r_ns / S      d_n = Σ_s d_ns      A = Σ r_n r_nᵀ / M      G = Σ d_n d_nᵀ / M      F = c A ⊗ G

with M pairs and c = M / N. The sums are

    count/reduced  M            A/reduced  Σ r_n r_nᵀ            G/reduced  Σ d_n d_nᵀ

The product d_n r_nᵀ is the gradient of the case if its rows, or its gradient rows, are the same at all positions. F is
exact for deep linear networks with a squared error that end in the mean, or in a multiple of the sum, over positions.

- The bias column of r_n is 1.
- With a mask, S is the number of real positions of the case. A case without real positions is no pair.
- Every use of a weight has its own pairs. With T uses of N cases c is T, which treats the uses as independent.
- In a transposed use the gradient rows are on the side of A. A gets their mean, and G the sum of the inputs. The
  product of the two is the same.
"""

from __future__ import annotations

from torch import Tensor

from kfac_fx.linalg.matrices import gram
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.statistics.row_sums import VARIANTS, Rows, homogeneous, statistic


@statistic(lambda g, o, i, n: (), VARIANTS, "count/reduced")
def reduced_count(rows: Rows) -> Tensor:
    if rows.mask is not None:
        return rows.mask.any(1).sum().to(rows.d.dtype)
    cases, positions = rows.d.shape[:2]
    return rows.d.new_full((), cases * min(1, positions))


@statistic(lambda g, o, i, n: (g, i, i), VARIANTS, "A/reduced")
def inputs(rows: Rows) -> Tensor:
    """Raises RegistrationError for rows that have no mean over positions."""
    if rows.ids or rows.routed:
        raise RegistrationError("'kron_reduce' takes the mean of rows over positions, and ids have none: take 'kron'")
    positions = max(1, rows.x.shape[1]) if rows.mask is None else rows.mask.sum(1).clamp(min=1).view(-1, 1, 1, 1)
    mean, mask = rows.x.sum(1, keepdim=True) / positions, None if rows.mask is None else rows.mask.any(1, keepdim=True)
    return gram(homogeneous(Rows(mean, rows.d, rows.bias, rows.matrix, mask))) * rows.repeats


@statistic(lambda g, o, i, n: (g, o, o), VARIANTS, "G/reduced")
def gradients(rows: Rows) -> Tensor:
    return gram(rows.d.sum(1, keepdim=True))
