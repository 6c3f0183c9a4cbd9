"""The factors of Fisher blocks of one matrix shape and one approximation, stacked: how a batch is averaged in, and how
their damping is split.

A product's λ is split: λ_A = π √(λ/c) and λ_G = √(λ/c) / π with the π of every group, so that c λ_A λ_G = λ (Martens &
Grosse 2015, section 6.3). A block that is no product has one side F, damped by λ.

Groups: Fisher blocks of one matrix shape and one approximation, stacked, so that one operation serves them all.

A block acts on its parameters' matrix W [g, o, i] (`passes.matrix`), group by group, as

    F^p W    = c^p  G_λ^p W A_λ^p                 A_λ = A + λ_A I,  G_λ = G + λ_G I
    L W      = c^½  L_G W L_Aᵀ                    Lᵀ W = c^½ L_Gᵀ W L_A
    L⁻¹ W    = c^-½ L_G⁻¹ W L_A⁻ᵀ                 L⁻ᵀ W = c^-½ L_G⁻ᵀ W L_A⁻¹

so all of it is X_G W X_Aᵀ with roots X of the damped sides (`linalg.dense_roots`). A block that is no Kronecker product
has one side F on W as one column [g·o·i], damped by λ. How a product's λ is
split between its sides: `kfac_fx.factors.stacks`.

Powers other than 1 are those of the last `update_inverses`; the power 1 is fresh (Martens & Grosse 2015, sections 4.2
and 6.3).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kfac_fx.factors.factor import Failures, NotRegisteredError, Stack, batch_values, unknown_root
from kfac_fx.linalg.matrices import (
    Root,
    damp,
    diagonal_root,
    exponent,
    full_precision,
    is_finite,
    mean_eigenvalue,
    multiply_left,
    multiply_right,
    pi_correction,
    rescued_eigh,
    unsqueeze_like,
)
from kfac_fx.passes.approximations import Side
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import alike, pack_all, stacked, unpack_all

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
        self.structure = registrations[0].structure
        self.left, self.right = self.structure.left, self.structure.right
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
        batch = self.batch_values(total, cases)
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

    def batch_values(self, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
        """The factors of one batch, from the sums of some of the blocks [L, ...]."""
        return batch_values(self.structure, sums, cases)

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


# --- groups -----------------------------------------------------------------------------------------------------------


Roots = tuple[Mapping[Root, Tensor], Tensor]  # of one side, by name [L·groups, d, d], and which are right [L·groups]


class BlockGroup(AveragedBlocks):
    """L blocks with their roots, one list of operators for each."""

    def __init__(
        self,
        registrations: Sequence[Registration],
        forms: Sequence[Form],
        *,
        roots: Sequence[Root],
        damping: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(registrations, forms, damping=damping, dtype=dtype, device=device)
        # Zero until the first decomposition: a block without an inverse stands still.
        self.roots = {
            root: [torch.zeros_like(self.as_operator(side, self.factors[side.factor].moment)) for side in self.sides]
            for root in roots
        }
        self.inverted = False

    @classmethod
    def alike_in(cls, registration: Registration) -> Hashable:
        """What the registrations of one group have in common beside their matrix and the sides of their factors."""
        return None

    def operands(self, root: Root) -> list[str]:
        """The names of what is kept for a root."""
        return [str(side) for side in self.sides]

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, matrix: Tensor, root: Root, transpose: bool = False, members: slice = ALL) -> Tensor:
        return self.applied(matrix, [operator[members] for operator in self.operators(root)], transpose)

    def applied(self, matrix: Tensor, operators: Sequence[Tensor], transpose: bool = False) -> Tensor:
        """X_G W X_Aᵀ, or X_Gᵀ W X_A: [L, g, o, i] -> the same; or [B, L, g, o, i], of as many vectors."""
        left, *right = operators
        rows = matrix if right else matrix.reshape(*matrix.shape[:-3], 1, -1, 1)
        rows = self.turn_outputs(rows, left.mT if transpose and not self.left.diagonal else left)
        if right:
            as_is = [transpose or side.diagonal for side in self.sides[1:]]
            rows = self.turn_inputs(rows, [x if same else x.mT for x, same in zip(right, as_is, strict=True)])
        return rows.reshape(matrix.shape)

    def turn_outputs(self, rows: Tensor, operator: Tensor) -> Tensor:
        """X W of one vector or of B of them, which are more columns to X."""
        if rows.dim() == 4:
            return self.multiply_outputs(rows, operator)
        columns = rows.movedim(0, -1)
        return self.multiply_outputs(columns.flatten(-2), operator).view(columns.shape).movedim(-1, 0)

    def turn_inputs(self, rows: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """W X of one vector or of B of them, which are more rows to X."""
        if rows.dim() == 4:
            return self.multiply_inputs(rows, operators)
        turned = self.multiply_inputs(rows.movedim(0, 2).flatten(2, 3), operators)
        return turned.view(*turned.shape[:2], len(rows), -1, turned.shape[-1]).movedim(2, 0)

    def multiply_outputs(self, rows: Tensor, operator: Tensor) -> Tensor:
        """X W: [L, g, o, i] -> the same."""
        return multiply_left(operator, rows, self.left.diagonal)

    def multiply_inputs(self, rows: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """W X with the X of every part of the input side: [L, g, o, i] -> the same."""
        (operator,), (_, side) = operators, self.sides
        return multiply_right(rows, operator, side.diagonal)

    def operators(self, root: Root) -> list[Tensor]:
        """The roots of all sides; c is in the left one.

        Raises NotRegisteredError for a root that is not kept, FactorNotReady before the first update.
        """
        self.check_updated()
        if root == 1:
            dampings = self.split_damping()
            return self.scaled([damp(self.value(s), dampings[s], s.diagonal) for s in self.sides], root)
        if root not in self.roots:
            raise NotRegisteredError(unknown_root(root, self.roots))
        if not self.inverted:
            raise FactorNotReady(
                f"inverse of {self.registrations[0]} read before its first update: "
                "call estimator.update_inverses() first."
            )
        return self.roots[root]

    def scaled(self, operators: list[Tensor], root: Root) -> list[Tensor]:
        """c^p moves into the left side."""
        left, *right = operators
        return [left * unsqueeze_like(self.positions() ** exponent(root), left), *right]

    def dense(self, index: int) -> Tensor:
        """The undamped block c G ⊗ A as one matrix in the order of the flattened [g, o, i]: [g·o·i, g·o·i]."""
        self.check_updated()
        values = [(side, self.value(side)[index]) for side in self.sides]
        left, *right = (torch.diag_embed(value) if side.diagonal else value for side, value in values)
        left = self.joined_outputs(left)
        a = self.joined(right) if right else torch.ones_like(left[:, :1, :1])
        same_group = torch.eye(left.shape[0], dtype=self.dtype, device=self.device)
        block = torch.einsum("gop,gij,gh->goihpj", left, a, same_group).flatten(0, 2).flatten(1)
        return block * self.positions()[index]

    def joined_outputs(self, operator: Tensor) -> Tensor:
        """The output side [groups, o, o] of one block."""
        return operator

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The input side [groups, i, i] of one block from its parts, dense."""
        (a,) = parts
        return a

    # --- eigenvectors: F = Q Λ Qᵀ, undamped -------------------------------------------------------------------------

    def eigensystem(self) -> tuple[Tensor, list[Tensor]]:
        """(Λ of all blocks [L, g, o, i], what Q is made of). NaN for blocks whose factors are not finite."""
        self.check_updated()
        with full_precision():
            found = [self.side_eigensystem(side) for side in self.sides]
        values, vectors = [one for one, _ in found], [one for _, one in found]
        left = values[0] * unsqueeze_like(self.positions(), values[0])
        if self.right is None:
            return left.view(len(self), *self.shape), vectors
        return left.unsqueeze(-1) * self.input_eigenvalues(values[1:]).unsqueeze(-2), vectors

    def side_eigensystem(self, side: Side) -> tuple[Tensor, Tensor]:
        """Eigenvalues [L, groups, d], none negative, and vectors [L, groups, d, d]; ones if diagonal."""
        value = self.value(side)
        if side.diagonal:
            return value.clamp(min=0), torch.ones_like(value)
        values, vectors = rescued_eigh(value.flatten(0, 1))
        return values.clamp(min=0).view(value.shape[:-1]), vectors.view(value.shape)

    def input_eigenvalues(self, values: Sequence[Tensor]) -> Tensor:
        """Of the input side [L, g, i], from those of its parts."""
        (a,) = values
        return a

    def to_eigenbasis(self, matrix: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """Qᵀ W: [L, g, o, i] -> the same; or [B, L, g, o, i], of as many vectors."""
        return self.applied(matrix, operators, transpose=True)

    def from_eigenbasis(self, matrix: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """Q W. Every entry of Q is a product of one entry of each operator, so their squares make its squares."""
        return self.applied(matrix, operators)

    # --- roots ------------------------------------------------------------------------------------------------------

    def store(self, found: Mapping[Side, Roots], dampings: Mapping[Side, Tensor]) -> None:
        """Take new roots of the dense sides.

        A block with a root that is not right, on any side, keeps all its last good ones and is counted.
        """
        right = [fine.view(len(self), -1).all(1) for _, fine in found.values()]
        new: dict[Root, list[Tensor]] = {}
        for root, kept in self.roots.items():
            operators = [
                found[side][0][root].view(like.shape) if side in found
                else diagonal_root(self.value(side), dampings[side], root)
                for side, like in zip(self.sides, kept, strict=True)
            ]  # fmt: skip
            new[root] = self.scaled(operators, root)
            right += [is_finite(operator) for operator in new[root]]
        good = torch.stack(right).all(0)
        for root, operators in new.items():
            for last, operator in zip(self.roots[root], operators, strict=True):
                torch.where(unsqueeze_like(good, operator), operator, last, out=last)
        self.failed += ~good
        self.inverted = True
