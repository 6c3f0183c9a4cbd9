"""Groups: Fisher blocks of one matrix shape and one approximation, stacked, so that one operation serves them all.

A block acts on its parameters' matrix W [g, o, i] (`passes.words.matrix`), group by group, as

    F^p W    = c^p  G_λ^p W A_λ^p                 A_λ = A + λ_A I,  G_λ = G + λ_G I
    L W      = c^½  L_G W L_Aᵀ                    Lᵀ W = c^½ L_Gᵀ W L_A
    L⁻¹ W    = c^-½ L_G⁻¹ W L_A⁻ᵀ                 L⁻ᵀ W = c^-½ L_G⁻ᵀ W L_A⁻¹

so all of it is X_G W X_Aᵀ with roots X of the damped sides (`linalg.dense_roots`). A block that is no Kronecker product
has one side F on W as one column [g·o·i], damped by λ. How a product's λ is
split between its sides: `kfac_fx.factors.averaged`.

Powers other than 1 are those of the last `update_inverses`; the power 1 is fresh (Martens & Grosse 2015, sections 4.2
and 6.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfac_fx.factors.averaged import ALL, AveragedBlocks, Form
from kfac_fx.factors.factor import NotRegisteredError, Side, unknown_root
from kfac_fx.linalg.matrices import (
    Root,
    damp,
    diagonal_root,
    exponent,
    is_finite,
    multiply_left,
    multiply_right,
    rescued_eigh,
    spread,
)
from kfac_fx.linalg.precision import full_precision
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Registration

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

    # --- eigenvectors: F = Q Λ Qᵀ, undamped -------------------------------------------------------------------------

    def eigensystem(self) -> tuple[Tensor, list[Tensor]]:
        """(Λ of all blocks [L, g, o, i], what Q is made of). NaN for blocks whose factors are not finite."""
        self.check_updated()
        with full_precision():
            found = [self.side_eigensystem(side) for side in self.sides]
        values, vectors = [one for one, _ in found], [one for _, one in found]
        left = values[0] * spread(self.positions(), values[0])
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
                torch.where(spread(good, operator), operator, last, out=last)
        self.failed += ~good
        self.inverted = True
