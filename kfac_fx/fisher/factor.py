"""Factors: running averages of the sums of batches, and the normalization of these.

Gradient rows are gradients of the loss *summed* over cases. Let N be the number of cases, and M the number of rows over
all uses of a registration: M = N for a plain linear layer, N times the output pixels for a convolution, N times the
uses for a shared layer. The statistics (`kfac_fx.passes.approximations`) become

    A = Σ r rᵀ / M,   G = Σ d dᵀ / M,   positions c = M / N,   and the block is F = c A ⊗ G;
    F = Σ_n p_n p_nᵀ / N (full) or its diagonal, from per-case gradients p_n;
    F = g gᵀ / N (full) or its diagonal for generic parameters, from the gradient g of the summed loss.

Rows are counted and not computed from sizes, so padding, strides and dilation need no care. Series of uses also have A1
and G1, from products of consecutive rows, divided by M, and the number of such pairs, divided by N as positions are
(`kfac_fx.recording.row_sums`). For "kron_sua" and its variants the rows of A are the pixels of the input with a 1
appended, and A is their mean (`kfac_fx.fisher.uncorrelated`). For "kron_reduce" M is the number of pairs of a mean row
and a summed gradient row, one per case and use (`kfac_fx.recording.row_sums`).

Every factor is a running average of these values over batches with weights 1, decay, decay², ... It has no bias towards
zero: after the first update it equals the value of the first batch. A batch without rows lowers c only.

Sources: Martens & Grosse 2015, sections 3 and 5; Grosse & Martens 2016, equation 23, whose A and G are here divided by
the positions; Martens, Ba & Johnson 2018, for several uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import unsqueeze_like, zero_unless_
from kfac_fx.passes.approximations import Approximation
from kfac_fx.passes.errors import FactorNotReady, NotRegisteredError
from kfac_fx.passes.matrix import Shape


@dataclass
class Stack:
    """One factor of L blocks: moment [L, *shape] and total_weight [L], whose quotient is the average."""

    moment: Tensor
    total_weight: Tensor

    @staticmethod
    def zeros(blocks: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Stack:
        return Stack(
            moment=torch.zeros(blocks, *shape, dtype=dtype, device=device),
            total_weight=torch.zeros(blocks, dtype=dtype, device=device),
        )

    @property
    def per_case(self) -> bool:
        """Whether it is a number and its average one over cases; other factors are means over rows."""
        return self.moment.dim() == 1

    @property
    def value(self) -> Tensor:
        """The averages [L, *shape]; NaN before the first accepted update of a block."""
        return self.moment / unsqueeze_like(self.total_weight, self.moment)

    def __getitem__(self, members: slice) -> Stack:
        """Views of some of the blocks."""
        return Stack(self.moment[members], self.total_weight[members])

    def update(
        self, batch: Tensor, accepted: Tensor, decay: float | Tensor, weight: float, anew: Tensor | None = None
    ) -> None:
        """moment <- decay moment + weight batch, for the accepted blocks [L].

        batch: overwritten. decay: of all blocks, or [L]. anew: [L], blocks that drop the past.
        """
        decays = decay if isinstance(decay, Tensor) else torch.full_like(self.total_weight, decay)
        decays = torch.where(accepted, decays if anew is None else torch.where(anew, 0, decays), 1)
        added = zero_unless_(unsqueeze_like(accepted, batch), batch)
        self.moment.mul_(unsqueeze_like(decays, self.moment)).add_(added, alpha=weight)
        self.total_weight.mul_(decays).add_(accepted, alpha=weight)


@dataclass(frozen=True)
class Factor:
    """The factor of one block: a view, so writing in place to `moment` or `total_weight` changes the stack."""

    name: str
    owner: str  # the registration, for errors
    stack: Stack
    index: int

    @property
    def moment(self) -> Tensor:
        return self.stack.moment[self.index]

    @property
    def total_weight(self) -> Tensor:
        return self.stack.total_weight[self.index]

    @property
    def value(self) -> Tensor:
        """The average; waits for the device.

        Raises FactorNotReady before the first update, NotRegisteredError if another process keeps it.
        """
        if self.moment.is_meta:
            raise NotRegisteredError(kept_elsewhere(self.owner))
        if not self.total_weight.item():
            raise FactorNotReady(
                f"factor {self.name} of {self.owner} read before its first update: "
                "call estimator.update_covariances(inputs) first."
            )
        return self.moment / self.total_weight


def kept_elsewhere(registration: str, process: int | None = None) -> str:
    which = "another process" if process is None else f"process {process}"
    return (
        f"the factors and inverses of {registration} are kept by {which} of the group: read them there, or write "
        "KFAC(..., placement='replicated'), which keeps all of them in every process."
    )


def batch_values(approximation: Approximation, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
    """The factors of one batch for a stack of blocks, from sums [L, ...]: the division of the module's docstring."""
    left = approximation.left
    if approximation.kronecker:
        rows = sums["count"].clamp(min=1)  # without rows the sums are zero, and the update is not accepted
        of_sides = {side.factor: sums[side.statistic.whole.name] for side in approximation.sides}
        means = {name: total / unsqueeze_like(rows, total) for name, total in of_sides.items()}
        return {**means, "positions": sums["count"] / cases}
    if "gradient" in sums:
        g = sums["gradient"]  # [L, p], or [L, k, p] of k cotangents
        g = g.unsqueeze(1) if g.dim() == 2 else g
        return {left.factor: (g.square().sum(1) if left.diagonal else g.mT @ g) / cases}
    return {left.factor: sums[left.statistic.name] / cases}
