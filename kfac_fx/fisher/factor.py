"""Factors: running averages of statistics over batches, in stacks of equal blocks, and how they are damped.

**Normalization.** Gradient rows are gradients of the loss summed over cases. Let N be the number of cases, and M the
number of rows over all uses of a registration: M = N for a plain linear layer, N times the output pixels for a
convolution, N times the uses for a shared layer. The sums of `statistics` become

    A = Σ r rᵀ / M,   G = Σ d dᵀ / M,   positions c = M / N,   and the block is F = c A ⊗ G;
    F = Σ_n p_n p_nᵀ / N (full) or its diagonal, from per-case gradients p_n;
    F = g gᵀ / N (full) or its diagonal for generic parameters, from the gradient g of the summed loss.

Series of uses also have A1 and G1, from products of consecutive rows, divided by M, and the number of such pairs,
divided by N as positions are (`kfac_fx.recording.taps.rows`). For "kron_sua" and its variants the rows of A are the
pixels of the input with a 1 appended, and A is their mean (`kfac_fx.fisher.group_kinds`). For "kron_reduce" M is the
number of pairs of a mean row and a summed gradient row, one per case and use (`kfac_fx.recording.statistics.row_sums`).

Every factor is a running average of these values over batches with weights 1, decay, decay², ... It has no bias towards
zero: after the first update it equals the value of the first batch. A batch without rows lowers c only.

**Damping.** λ is split into λ_A = π √(λ/c) and λ_G = √(λ/c) / π with the π of every group, so that c λ_A λ_G = λ. A
block that is not a Kronecker product has one side F, which is damped by λ.

Sources: Martens & Grosse 2015, sections 3, 5 and 6.3; Grosse & Martens 2016, equation 23, whose A and G are here
divided by the positions; Martens, Ba & Johnson 2018, for several uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_fx.linalg.host import zero_unless_
from kfac_fx.linalg.matrices import are_finite, mean_eigenvalue, pi_correction, unsqueeze_like
from kfac_fx.linalg.vectors import Vector, VectorForm
from kfac_fx.passes.approximations import Approximation, Side
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import AlikeForms, Shape, stacked

ALL_BLOCKS = slice(None)
A_CASE = ("positions", "pairs")  # numbers a case; the other factors are means over rows


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


# --- failures -------------------------------------------------------------------------------------------------------


class Failures(NamedTuple):
    """The numbers of failed decompositions, after which blocks kept their inverse, and of updates that were skipped."""

    decompositions: int
    updates: int


class NotRegisteredError(KeyError):
    """A power or Cholesky factor that the estimator does not keep, or a vector or key that does not fit its blocks."""

    __module__ = "kfac_fx"

    def __str__(self) -> str:  # KeyError would print its argument's repr
        return str(self.args[0])


def kept_elsewhere(registration: str, process: int | None = None) -> str:
    which = "another process" if process is None else f"process {process}"
    return (
        f"the factors and inverses of {registration} are kept by {which} of the group: read them there, or write "
        "KFAC(..., placement='replicated'), which keeps all of them in every process."
    )


# --- from sums over rows to the values of one batch -----------------------------------------------------------------


def batch_values(approximation: Approximation, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
    """The factors of one batch for a stack of blocks, from sums [L, ...]: the division of the module's docstring."""
    left, right = approximation.left, approximation.right
    if right is not None:
        rows = sums["count"].clamp(min=1)  # without rows the sums are zero, and the update is not accepted
        means = {
            side.factor: sums[side.statistic] / unsqueeze_like(rows, sums[side.statistic]) for side in (left, right)
        }
        return {**means, "positions": sums["count"] / cases}
    if "gradient" in sums:
        g = sums["gradient"]  # [L, p], or [L, k, p] of k cotangents
        g = g.unsqueeze(1) if g.dim() == 2 else g
        return {left.factor: (g.square().sum(1) if left.diagonal else g.mT @ g) / cases}
    return {left.factor: sums[left.statistic] / cases}


# --- a group of blocks ------------------------------------------------------------------------------------------------


class FactorGroup:
    """The factors of L blocks whose matrices are [g, o, i]. Every tensor has a leading dimension of blocks.

    Attributes:
        structure: the approximation.
        left, right: the sides of the outputs and of the inputs; right is None if the blocks are not Kronecker products.
        sides: the sides, or the parts that are decomposed in place of a side.
        decomposed: the sides that `Inverter` decomposes.
        factors: the stacks, by name.
        skipped: the number of skipped updates of every block, [L].
        updated: whether there are factors.
        relative_damping: c of λ_A = c tr A / dim A, and of every other side, in the place of λ; None: λ is split.
        owner: the process that keeps the factors; None: every process.
        here: whether this process keeps them. Otherwise they are on the meta device, without memory.
        divided: whether a process that keeps them has a part of the entries (`kfac_fx.fisher.group_kinds`).
    """

    owner: int | None = None
    here = True
    divided = False
    relative_damping: float | None = None

    def __init__(
        self,
        registrations: Sequence[Registration],
        forms: Sequence[VectorForm],
        *,
        damping: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.registrations, self.forms = tuple(registrations), tuple(forms)
        self.alike = AlikeForms.of(forms)
        self.shape = forms[0].shape
        self.structure = registrations[0].structure
        self.left, self.right = self.structure.left, self.structure.right
        whole_sides = [side for side in (self.left, self.right) if side is not None]
        self.sides = [part for side in whole_sides for part in self.parts(side)]
        self.decomposed = [side for side in self.sides if not side.diagonal]
        self.damping, self.dtype, self.device = damping, dtype, device
        self.factors = {
            side.factor: Stack.zeros(len(self), self.factor_shape(side), dtype, device) for side in whole_sides
        }
        if self.right is not None:
            self.factors["positions"] = Stack.zeros(len(self), (), dtype, device)
        self.skipped = torch.zeros(len(self), dtype=torch.int64, device=device)
        self.updated = False

    def __len__(self) -> int:
        return len(self.forms)

    @classmethod
    def alike_in(cls, registration: Registration) -> Hashable:
        """The properties that all registrations of a group share besides matrix and sides."""
        return None

    # --- blocks of which other processes keep parts (`kfac_fx.fisher.group_kinds`) -----------------------------------

    @property
    def whole_shape(self) -> tuple[int, int, int]:
        """[g, o, i] of whole blocks."""
        return self.shape

    def check_whole(self) -> None:
        """Raises NotRegisteredError if this process keeps a part."""

    def agreed(self, flags: Tensor) -> Tensor:
        """Whether flags of blocks are true of all their parts."""
        return flags

    def total(self, values: Tensor) -> Tensor:
        """The sums over all parts of blocks, from those over the part that is here."""
        return values

    def in_state(self, entry: Tensor) -> Tensor:
        """A tensor of one block as the state has it, sharing memory: a diagonal F in the shape of the matrix."""
        diagonal = self.right is None and self.left.diagonal and entry.dim()
        return entry.view(self.shape) if diagonal else entry

    # --- sides ------------------------------------------------------------------------------------------------------

    def parts(self, side: Side) -> tuple[Side, ...]:
        """The parts that are decomposed in place of a side."""
        return (side,)

    def factor_shape(self, side: Side) -> tuple[int, ...]:
        return side.shape(self.shape)

    def size(self, side: Side) -> int:
        """The width d of the matrices [d, d] of a side."""
        return side.size(self.shape)

    def as_operator(self, side: Side, factor: Tensor) -> Tensor:
        """The factor as [L, groups, d, d], or as [L, groups, d] if diagonal; F has one group of all parameters."""
        if side.factor != "F":
            return factor
        return factor.flatten(1).unsqueeze(1) if side.diagonal else factor.unsqueeze(1)

    # --- vectors ----------------------------------------------------------------------------------------------------

    def pack(self, vector: Vector, members: slice = ALL_BLOCKS) -> Tensor:
        """From tensors of the shapes of the parameters to [L, g, o, i] in the precision of the factors."""
        if self.alike is not None:
            return self.alike[members].pack(vector).to(self.dtype)
        return stacked([form.pack(vector) for form in self.forms[members]]).to(self.dtype)

    def by_name(self, matrices: Tensor, members: slice = ALL_BLOCKS) -> dict[str, Tensor]:
        """The parameters in matrices [L, g, o, i], in the precision of these; views where the layouts have views."""
        if self.alike is not None:
            return self.alike[members].unpack(matrices)
        pairs = zip(self.forms[members], matrices.unbind(), strict=True)
        return {name: tensor for form, matrix in pairs for name, tensor in form.unpack(matrix).items()}

    def unpack(self, matrices: Tensor, vector: Vector, members: slice = ALL_BLOCKS) -> dict[str, Tensor]:
        """The inverse of `pack`, in the precision of `vector`."""
        unpacked = self.by_name(matrices, members)
        dtypes = {name: vector[name].dtype for name in unpacked}
        return {n: tensor if tensor.dtype is dtypes[n] else tensor.to(dtypes[n]) for n, tensor in unpacked.items()}

    # --- factors ----------------------------------------------------------------------------------------------------

    def update(
        self,
        sums: Sequence[Mapping[str, Tensor]],
        cases: int | Tensor,
        *,
        decay: float,
        weight: float = 1.0,
        accept: Tensor | None = None,
        members: slice = ALL_BLOCKS,
    ) -> None:
        """Average the sums of one batch into the factors of some of the blocks, without waiting for the device.

        Sums that are not finite are skipped and counted. sums: of each block (`additive`), over `cases`
        cases. accept: a 0-d bool tensor; if it is False, nothing changes.
        """
        total = {name: stacked([block[name] for block in sums]).to(self.dtype) for name in sums[0]}
        batch = self.batch_values(total, cases)
        finite = self.agreed(torch.stack([are_finite(value) for value in batch.values()]).all(0))
        accepted = finite if accept is None else finite & accept
        averaged, anew = accepted, None
        if "count" in total:  # a batch without rows has no mean over rows; before the first rows the mean is zero
            anew = self.factors["positions"][members].moment * decay == 0
            averaged = accepted & ((total["count"] > 0) | anew)
        for name, stack in self.factors.items():
            part = stack[members]
            value = batch[name].view(part.moment.shape)
            if name in A_CASE:
                part.update(value, accepted, decay, weight)
            else:
                part.update(value, averaged, decay, weight, anew)
        self.skipped[members] += ~finite
        self.updated = True

    def batch_values(self, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
        """The factors of one batch, from sums [L, ...] of some of the blocks."""
        return batch_values(self.structure, sums, cases)

    def value(self, side: Side) -> Tensor:
        return self.as_operator(side, self.factors[side.factor].value)

    def mean_eigenvalue(self, side: Side) -> Tensor:
        """tr C / dim C of every matrix, [L, groups], without a copy of the factor."""
        stack = self.factors[side.factor]
        means = mean_eigenvalue(self.as_operator(side, stack.moment), side.diagonal)
        return means / stack.total_weight.unsqueeze(-1)

    def positions(self) -> Tensor:
        """c of every block, [L]. It is 1 for blocks without rows, whose A and G are zero, so that F + λ I is λ I."""
        if self.right is None:
            return torch.ones(len(self), dtype=self.dtype, device=self.device)
        c = self.factors["positions"].value
        return torch.where(c == 0, 1, c)

    def split_damping(self) -> dict[Side, Tensor]:
        """The damping of every matrix of every side, [L, groups] each."""
        damping = self.damping.to(self.device, self.dtype)
        if self.relative_damping is not None:
            by_side = {side: self.mean_eigenvalue(side) for side in (self.left, self.right) if side is not None}
            each = {s: torch.where(mean > 0, self.relative_damping * mean, 1) for s, mean in by_side.items()}
            inputs_too = {} if self.right is None else dict.fromkeys(self.sides[1:], each[self.right])
            return {**inputs_too, self.left: each[self.left]}
        if self.right is None:
            return {self.left: damping.expand(len(self), 1)}
        inputs, outputs = (self.mean_eigenvalue(side) for side in (self.right, self.left))
        pi, root = pi_correction(inputs, outputs), (damping / self.positions()).sqrt().unsqueeze(-1)
        return {**dict.fromkeys(self.sides[1:], pi * root), self.left: root / pi}

    @property
    def cost(self) -> int:
        """Σ d³ over all matrices [d, d] that are decomposed: the operations, up to a constant."""
        operators = [(self.as_operator(side, self.factors[side.factor].moment), side) for side in self.decomposed]
        return sum(operator.numel() * self.size(side) for operator, side in operators)

    def check_updated(self) -> None:
        """Raises FactorNotReady before the first update, NotRegisteredError if another process keeps the factors."""
        if not self.updated:
            raise FactorNotReady(
                f"factors of {self.registrations[0]} read before their first update: "
                "call estimator.update_covariances(inputs) first."
            )
        if not self.here:
            raise NotRegisteredError(kept_elsewhere(str(self.registrations[0]), self.owner))
