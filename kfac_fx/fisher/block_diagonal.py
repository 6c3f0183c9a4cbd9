"""Block-diagonal sides: Fisher blocks c G ⊗ A whose wide factors keep a few diagonal blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.matrices import HERE, Place, eigh_of_blocks, multiply_left, multiply_right
from kfac_fx.passes.approximations import OUTPUTS, Side
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import block_width
from kfac_fx.recording.statistics import split_rows


class WideGroup(BlockGroup):
    """Blocks c G ⊗ A with block-diagonal sides; all have the same number of blocks on each side.

    A side of width d in k blocks is C = diag(C_1, ..., C_k), each [b, b] with b = ⌈d / k⌉. The last block is filled up
    with a unit matrix, which is only ever multiplied with zeros. The roots of C + λ I are those of its blocks, so W [g,
    o, i] is multiplied block by block: the blocks are more groups of a batched product. π and λ are those of the whole
    side. With k = 1 a side is dense. A registration holds the number of blocks of both sides.
    """

    multiplies_whole = False

    @classmethod
    def alike_in(cls, registration: Registration) -> Hashable:
        return registration.blocks

    def blocks_of(self, side: Side) -> int:
        outputs, inputs = self.registrations[0].blocks
        return 1 if side.diagonal else outputs if side == OUTPUTS else inputs

    def real_columns(self, side: Side) -> Tensor:
        """1 for the rows of the blocks, 0 for the filling: [g·k, b]."""
        ones = torch.ones(self.shape[0], super().size(side), dtype=self.dtype, device=self.device)
        return split_rows(ones, self.blocks_of(side))

    def size(self, side: Side) -> int:
        return block_width(super().size(side), self.blocks_of(side))

    def value(self, side: Side) -> Tensor:
        value = super().value(side)
        if self.blocks_of(side) > 1:
            value.diagonal(dim1=-2, dim2=-1).add_(1 - self.real_columns(side))
        return value

    def mean_eigenvalue(self, side: Side) -> Tensor:
        blocks = self.blocks_of(side)
        if blocks == 1:
            return super().mean_eigenvalue(side)
        stack = self.factors[side.factor]
        traces: Tensor = stack.moment.diagonal(dim1=-2, dim2=-1).sum(-1).unflatten(-1, (-1, blocks)).sum(-1)
        return traces / super().size(side) / stack.total_weight.unsqueeze(-1)

    def side_eigensystem(
        self, side: Side, place: Place = HERE, last: Tensor | None = None, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The filling gets the largest eigenvalue, so that it comes last in its block and is removed. A step of
        orthogonal iteration would put it first, so a side that has filling is decomposed every time."""
        if self.blocks_of(side) == 1:
            return super().side_eigensystem(side, place, last, width)
        if last is not None and self.size(side) * self.blocks_of(side) == super().size(side):
            values, vectors = super().side_eigensystem(side, place, last, width)
            return values.view(len(self), self.shape[0], -1), vectors
        value, real, width = self.value(side), self.real_columns(side), width or self.size(side)
        diagonal = value.diagonal(dim1=-2, dim2=-1)
        trace = (diagonal * real).sum(-1, keepdim=True)
        diagonal.copy_(torch.where(real == 1, diagonal, torch.where(trace > 0, 2 * trace, 1)))
        values, vectors = eigh_of_blocks(value.flatten(0, 1), width, place)
        whole = values.clamp(min=0).view(len(self), self.shape[0], -1)
        return whole[..., : super().size(side)], vectors.view(*value.shape[:-1], width)

    def split_damping(self) -> dict[Side, Tensor]:
        dampings = super().split_damping()
        return {side: damping.repeat_interleave(self.blocks_of(side), -1) for side, damping in dampings.items()}

    def multiply_outputs(self, rows: Tensor, operator: Tensor) -> Tensor:
        blocks = self.blocks_of(self.left)
        if blocks == 1:
            return super().multiply_outputs(rows, operator)
        product = multiply_left(operator, split_rows(rows.mT.movedim(1, -2), blocks).movedim(-2, 1).mT, False)
        joined: Tensor = product.unflatten(1, (-1, blocks)).flatten(2, 3)
        return joined[:, :, : rows.shape[2]]

    def multiply_inputs(self, rows: Tensor, operators: Sequence[Tensor]) -> Tensor:
        (operator,), (_, side) = operators, self.sides
        blocks = self.blocks_of(side)
        if blocks == 1:
            return super().multiply_inputs(rows, operators)
        product = multiply_right(split_rows(rows.movedim(1, -2), blocks).movedim(-2, 1), operator, False)
        joined: Tensor = product.unflatten(1, (-1, blocks)).movedim(2, -2).flatten(-2)
        return joined[..., : rows.shape[3]]

    def joined_outputs(self, operator: Tensor) -> Tensor:
        return self.whole(self.left, operator)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return self.whole(self.sides[1], *parts)

    def whole(self, side: Side, operator: Tensor) -> Tensor:
        """[g·k, b, b] -> [g, d, d]."""
        blocks, width = self.blocks_of(side), super().size(side)
        if blocks == 1:
            return operator
        return torch.stack([torch.block_diag(*group)[:width, :width] for group in operator.unflatten(0, (-1, blocks))])
