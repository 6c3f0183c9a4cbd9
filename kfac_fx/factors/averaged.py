"""The factors of Fisher blocks of one matrix shape and one approximation, stacked: how a batch is averaged in, and how
their damping is split.

A product's λ is split: λ_A = π √(λ/c) and λ_G = √(λ/c) / π with the π of every group, so that c λ_A λ_G = λ (Martens &
Grosse 2015, section 6.3). A block that is no product has one side F, damped by λ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kfac_fx.factors.factor import SIDES, Failures, Side, Stack, batch_values
from kfac_fx.linalg.matrices import is_finite, mean_eigenvalue, pi_correction
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.words.matrix import alike, pack_all, stacked, unpack_all

ALL = slice(None)
A_CASE = ("positions", "pairs")  # numbers a case; the others are means over rows
Vector = Mapping[str, Tensor]


class Form(Protocol):
    """How the parameters of a registration become a matrix; `MatrixForm` is one."""

    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def shapes(self) -> Mapping[str, Sequence[int]]: ...
    def pack(self, tensors: Vector) -> Tensor: ...
    def unpack(self, matrix: Tensor) -> dict[str, Tensor]: ...


class AveragedBlocks:
    """L blocks whose matrices are [g, o, i]; every tensor in here has a leading dimension of blocks."""

    def __init__(
        self,
        registrations: Sequence[Registration],
        forms: Sequence[Form],
        *,
        damping: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.registrations, self.forms = tuple(registrations), tuple(forms)
        self.alike = alike(forms)
        self.shape = forms[0].shape
        self.approximation = registrations[0].approximation
        self.left, self.right = SIDES[self.approximation]
        whole = [side for side in (self.left, self.right) if side is not None]
        self.sides = [part for side in whole for part in self.parts(side)]
        self.decomposed = [side for side in self.sides if not side.diagonal]  # by `Inverter`
        self.damping, self.dtype, self.device = damping, dtype, device
        blocks = len(forms)
        self.factors = {side.factor: Stack.zeros(blocks, self.factor_shape(side), dtype, device) for side in whole}
        if self.right is not None:
            self.factors["positions"] = Stack.zeros(blocks, (), dtype, device)
        self.skipped = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.failed = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.updated = False

    def __len__(self) -> int:
        return len(self.forms)

    # --- sides ------------------------------------------------------------------------------------------------------

    def parts(self, side: Side) -> tuple[Side, ...]:
        """What is decomposed in the place of a side."""
        return (side,)

    def factor_shape(self, side: Side) -> tuple[int, ...]:
        return side.shape(self.shape)

    def size(self, side: Side) -> int:
        """d of one of its matrices [d, d]."""
        return side.size(self.shape)

    def as_operator(self, side: Side, factor: Tensor) -> Tensor:
        """[L, groups, d, d], or [L, groups, d] if diagonal; F has one group, of all parameters."""
        if side.factor != "F":
            return factor
        return factor.flatten(1).unsqueeze(1) if side.diagonal else factor.unsqueeze(1)

    # --- vectors ----------------------------------------------------------------------------------------------------

    def pack(self, vector: Vector, members: slice = ALL) -> Tensor:
        """Parameter-shaped tensors by name -> [L, g, o, i] in the factors' precision."""
        if self.alike:
            return pack_all(self.alike[members], vector).to(self.dtype)
        return stacked([form.pack(vector) for form in self.forms[members]]).to(self.dtype)

    def unpack(self, matrices: Tensor, vector: Vector, members: slice = ALL) -> dict[str, Tensor]:
        """The inverse of `pack`, in the precision of `vector`."""
        if self.alike:
            unpacked = unpack_all(self.alike[members], matrices)
        else:
            pairs = zip(self.forms[members], matrices.unbind(), strict=True)
            unpacked = {name: one for form, matrix in pairs for name, one in form.unpack(matrix).items()}
        dtypes = {name: vector[name].dtype for name in unpacked}
        return {n: one if one.dtype is dtypes[n] else one.to(dtypes[n]) for n, one in unpacked.items()}

    # --- factors ----------------------------------------------------------------------------------------------------

    def update(
        self,
        sums: Sequence[Mapping[str, Tensor]],
        cases: int | Tensor,
        *,
        decay: float,
        weight: float = 1.0,
        accept: Tensor | None = None,
        members: slice = ALL,
    ) -> None:
        """Average one batch in: additive sums of each block (`factors.additive`), over `cases` cases.

        Sums that are not finite do not enter and are counted, without asking the device; neither do any where `accept`,
        a 0-d bool tensor, is False.
        """
        total = {name: stacked([one[name] for one in sums]).to(self.dtype) for name in sums[0]}
        batch = batch_values(self.approximation, total, cases)
        finite = torch.stack([is_finite(value) for value in batch.values()]).all(0)
        accepted = finite if accept is None else finite & accept
        averaged, anew = accepted, None
        if "count" in total:  # a batch without rows has no mean of them, but zero before there were any
            anew = self.factors["positions"][members].moment * decay == 0
            averaged = accepted & ((total["count"] > 0) | anew)
        for name, stack in self.factors.items():
            value, own = batch[name].view(stack[members].moment.shape), stack[members]
            if name in A_CASE:
                own.update(value, accepted, decay, weight)
            else:
                own.update(value, averaged, decay, weight, anew)
        self.skipped[members] += ~finite
        self.updated = True

    def value(self, side: Side) -> Tensor:
        return self.as_operator(side, self.factors[side.factor].value)

    def mean_eigenvalue(self, side: Side) -> Tensor:
        """tr C / dim C of every matrix: [L, groups], without a copy of the factor."""
        stack = self.factors[side.factor]
        means = mean_eigenvalue(self.as_operator(side, stack.moment), side.diagonal)
        return means / stack.total_weight.unsqueeze(-1)

    def positions(self) -> Tensor:
        """c of every block: [L]; 1 of those that had no rows, whose A and G are zero, so that F + λ I is λ I."""
        if self.right is None:
            return torch.ones(len(self), dtype=self.dtype, device=self.device)
        c = self.factors["positions"].value
        return torch.where(c == 0, 1, c)

    def split_damping(self) -> dict[Side, Tensor]:
        """λ of every matrix of every side: [L, groups] each."""
        damping = self.damping.to(self.device, self.dtype)
        if self.right is None:
            return {self.left: damping.expand(len(self), 1)}
        inputs, outputs = (self.mean_eigenvalue(side) for side in (self.right, self.left))
        pi, root = pi_correction(inputs, outputs), (damping / self.positions()).sqrt().unsqueeze(-1)
        return {**dict.fromkeys(self.sides[1:], pi * root), self.left: root / pi}

    def failures(self, members: slice = ALL) -> Failures:
        """Waits for the device."""
        return Failures(int(self.failed[members].sum()), int(self.skipped[members].sum()))

    def check_updated(self) -> None:
        if not self.updated:
            raise FactorNotReady(
                f"factors of {self.registrations[0]} read before their first update: "
                "call estimator.update_covariances(inputs) first."
            )
