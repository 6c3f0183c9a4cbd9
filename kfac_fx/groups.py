"""Groups: Fisher blocks of one matrix shape and one approximation, stacked, so that one operation serves them all.

A block acts on its parameters' matrix W [g, o, i] (`passes.matrix`), group by group, as

    F^p W    = c^p  G_λ^p W A_λ^p                 A_λ = A + λ_A I,  G_λ = G + λ_G I
    L W      = c^½  L_G W L_Aᵀ                    Lᵀ W = c^½ L_Gᵀ W L_A
    L⁻¹ W    = c^-½ L_G⁻¹ W L_A⁻ᵀ                 L⁻ᵀ W = c^-½ L_G⁻ᵀ W L_A⁻¹

so all of it is X_G W X_Aᵀ with roots X of the damped sides (`linalg.dense_roots`). A block that is no Kronecker product
has one side F on W as one column [g·o·i], damped by λ. A product's λ is split: λ_A = π √(λ/c) and λ_G = √(λ/c) / π with
the π of every group, so that c λ_A λ_G = λ.

Powers other than 1 are those of the last `update_inverses`; the power 1 is fresh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kfac_fx.factors import SIDES, Failures, NotRegisteredError, Side, Stack, batch_values, unknown_root
from kfac_fx.linalg import (
    Root,
    damp,
    diagonal_root,
    exponent,
    is_finite,
    mean_eigenvalue,
    multiply_left,
    multiply_right,
    pi_correction,
    spread,
)
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Registration

ALL = slice(None)
Vector = Mapping[str, Tensor]
Roots = tuple[Mapping[Root, Tensor], Tensor]  # of one side, by name [L·groups, d, d], and which are right [L·groups]


class Form(Protocol):
    """How the parameters of a registration become a matrix; `MatrixForm` is one."""

    @property
    def shape(self) -> tuple[int, int, int]: ...
    def pack(self, tensors: Vector) -> Tensor: ...
    def unpack(self, matrix: Tensor) -> dict[str, Tensor]: ...


class BlockGroup:
    """L blocks whose matrices are [g, o, i]; every tensor in here has a leading dimension of blocks."""

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
        self.registrations, self.forms = tuple(registrations), tuple(forms)
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
        # Zero until the first decomposition: a block without an inverse stands still.
        self.roots = {
            root: [torch.zeros_like(self.as_operator(side, self.factors[side.factor].moment)) for side in self.sides]
            for root in roots
        }
        self.skipped = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.failed = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.updated = self.inverted = False

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

    def operands(self, root: Root) -> list[str]:
        """The names of what is kept for a root."""
        return [str(side) for side in self.sides]

    def as_operator(self, side: Side, factor: Tensor) -> Tensor:
        """[L, groups, d, d], or [L, groups, d] if diagonal; F has one group, of all parameters."""
        if side.factor != "F":
            return factor
        return factor.flatten(1).unsqueeze(1) if side.diagonal else factor.unsqueeze(1)

    # --- vectors ----------------------------------------------------------------------------------------------------

    def pack(self, vector: Vector, members: slice = ALL) -> Tensor:
        """Parameter-shaped tensors by name -> [L, g, o, i] in the factors' precision."""
        return stacked([form.pack(vector) for form in self.forms[members]]).to(self.dtype)

    def unpack(self, matrices: Tensor, vector: Vector, members: slice = ALL) -> dict[str, Tensor]:
        """The inverse of `pack`, in the precision of `vector`."""
        unpacked: dict[str, Tensor] = {}
        for form, matrix in zip(self.forms[members], matrices.unbind(), strict=True):
            unpacked |= {name: tensor.to(vector[name].dtype) for name, tensor in form.unpack(matrix).items()}
        return unpacked

    # --- factors ----------------------------------------------------------------------------------------------------

    def update(
        self,
        sums: Sequence[Mapping[str, Tensor]],
        cases: int,
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
        averaged = accepted & (total["count"] > 0) if "count" in total else accepted  # a batch without rows has no A
        for name, stack in self.factors.items():
            taken = accepted if name == "positions" else averaged
            stack[members].update(batch[name].view(stack[members].moment.shape), taken, decay, weight)
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
        """c of every block: [L]."""
        if self.right is None:
            return torch.ones(len(self), dtype=self.dtype, device=self.device)
        return self.factors["positions"].value

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

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, matrix: Tensor, root: Root, transpose: bool = False, members: slice = ALL) -> Tensor:
        """X_G W X_Aᵀ, or X_Gᵀ W X_A: [L, g, o, i] -> the same."""
        left, *right = (operator[members] for operator in self.operators(root))
        rows = matrix if right else matrix.reshape(matrix.shape[0], 1, -1, 1)
        rows = self.multiply_outputs(rows, left.mT if transpose and not self.left.diagonal else left)
        if right:
            as_is = [transpose or side.diagonal for side in self.sides[1:]]
            rows = self.multiply_inputs(rows, [x if same else x.mT for x, same in zip(right, as_is, strict=True)])
        return rows.reshape(matrix.shape)

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

    def check_updated(self) -> None:
        if not self.updated:
            raise FactorNotReady(
                f"factors of {self.registrations[0]} read before their first update: "
                "call estimator.update_covariances(inputs) first."
            )

    def scaled(self, operators: list[Tensor], root: Root) -> list[Tensor]:
        """c^p moves into the left side."""
        left, *right = operators
        return [left * spread(self.positions() ** exponent(root), left), *right]

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
                torch.where(spread(good, operator), operator, last, out=last)
        self.failed += ~good
        self.inverted = True


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Without a copy if there is only one."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)
