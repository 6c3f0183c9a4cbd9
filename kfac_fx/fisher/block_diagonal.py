"""Sides that are cheaper than dense ones: a few diagonal blocks, or the pixels of an image instead of its patches.

**Block-diagonal sides**: Fisher blocks c G ⊗ A whose wide factors keep a few diagonal blocks.

**Spatially uncorrelated activations**: the input factor of a convolution from pixels instead of patches (Grosse &
Martens 2016, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.matrices import HERE, Place, bordered, eigh_of_blocks, multiply_left, multiply_right
from kfac_fx.passes.approximations import INPUTS, KRON_SUA, KRON_SUA_ZERO_MEAN, OUTPUTS, UNCORRELATED, Side, blocks_of
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


CENTERED_PART, MEAN_PART = replace(INPUTS, part="centered"), replace(INPUTS, part="mean")


@blocks_of(UNCORRELATED)
class UncorrelatedGroup(BlockGroup):
    """Blocks c G ⊗ A with spatially uncorrelated activations; all have one kernel size K.

    The input factor of a convolution comes from pixels instead of patches. Assume that activations at different places
    are uncorrelated and have the same mean μ [C] and covariance Σ [C, C] (Grosse & Martens 2016, section 4.2, theorem
    4). Then the second moment of a patch of K places, with the bias column, is

        A = Σ ⊗ I_K ⊕ [0] + m mᵀ,    m = [μ ⊗ 1_K; 1]

    Let e = 1_K / √K. Every patch is the sum of its mean over places, along e, and a part orthogonal to e. There A is

        Σ                                                     K - 1 times, orthogonal to e: the part "centered"
        B = [[Σ + K μ μᵀ, √K μ], [√K μᵀ, 1]]                  once, along e, with the bias: the part "mean"

    so the roots of A + λ I follow from those of Σ + λ I and B + λ I, whose width is the number of channels, and
    products take a K-th of the operations. The triangular factors are triangular in these parts; L Lᵀ = A + λ I holds
    as always.

    Two variants of "kron_sua" leave μ out of m, so that B = [[Σ, 0], [0, 1]]. "kron_sua_zero_mean" assumes a mean of
    zero, so Σ is the second moment of pixels. "kron_sua_centered" uses the covariance, as if the mean had been
    subtracted.

    The averaged factor is the second moment of pixels with a 1 appended, [[Σ + μ μᵀ, μ], [μᵀ, 1]]: [g, C+1, C+1].
    Padding and strides are ignored: every pixel of the input counts once.
    """

    @classmethod
    def alike_in(cls, registration: Registration) -> Hashable:
        return registration.approximation, registration.kernel

    separable = multiplies_whole = False

    @property
    def kernel(self) -> int:
        return self.registrations[0].kernel

    @property
    def bias(self) -> bool:
        matrix = self.registrations[0].matrix
        return matrix is not None and matrix.bias is not None

    @property
    def channels(self) -> int:
        return (self.shape[2] - self.bias) // self.kernel

    def parts(self, side: Side) -> tuple[Side, ...]:
        return (CENTERED_PART, MEAN_PART) if side == INPUTS else (side,)

    def batch_values(self, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
        """A is divided by the number of pixels, which is in its corner and differs from the number of outputs."""
        a = sums["A"] / sums["A"][..., -1:, -1:].clamp(min=1)
        return {**super().batch_values(sums, cases), "A": a}

    def rows_of_a_case(self, factor: str, sums: Mapping[str, Tensor], cases: int | Tensor) -> float | Tensor:
        if factor != "A":
            return super().rows_of_a_case(factor, sums, cases)
        pixels = sums["A"][..., -1, -1].flatten(1).amax(1)
        return torch.where(pixels > 0, pixels / cases, 1)

    def size(self, side: Side) -> int:
        return {CENTERED_PART: self.channels, MEAN_PART: self.channels + self.bias}.get(side) or super().size(side)

    def as_operator(self, side: Side, factor: Tensor) -> Tensor:
        """Σ or B, from the second moments of pixels."""
        if side not in (CENTERED_PART, MEAN_PART):
            return super().as_operator(side, factor)
        covariance, mean = self.assumed(factor)
        if side == CENTERED_PART:
            return covariance
        body = covariance + self.kernel * outer_product(mean)
        return bordered(body, math.sqrt(self.kernel) * mean, factor[..., -1, -1]) if self.bias else body

    def assumed(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(Σ, μ) as the approximation assumes them, from the second moments of pixels."""
        second, mean = factor[..., :-1, :-1], factor[..., :-1, -1]
        covariance = second if self.structure is KRON_SUA_ZERO_MEAN else second - outer_product(mean)
        return covariance, mean if self.structure is KRON_SUA else torch.zeros_like(mean)

    def mean_eigenvalue(self, side: Side) -> Tensor:
        if side != INPUTS:
            return super().mean_eigenvalue(side)
        centered, mean = (self.value(part).diagonal(dim1=-2, dim2=-1).sum(-1) for part in (CENTERED_PART, MEAN_PART))
        return ((self.kernel - 1) * centered + mean) / self.shape[2]

    def multiply_inputs(self, rows: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """W X: the root of Σ acts on the part orthogonal to e, the root of B on the mean over places and the bias."""
        across, along = operators
        patches, bias = self.patches(rows)
        mean = patches.sum(-1) / math.sqrt(self.kernel)
        mean_and_bias = torch.cat([mean, bias], dim=-1) @ along
        mean_out, bias_out = mean_and_bias.split([self.channels, int(self.bias)], dim=-1)
        centered = torch.einsum("...ock,...cd->...odk", patches - self.over_places(mean), across)
        return torch.cat([(centered + self.over_places(mean_out)).flatten(-2), bias_out], dim=-1)

    def over_places(self, mean: Tensor) -> Tensor:
        """x ⊗ e: [..., C] -> [..., C, K]."""
        return (mean / math.sqrt(self.kernel)).unsqueeze(-1).expand(*mean.shape, self.kernel)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        identity = torch.eye(self.shape[2], dtype=self.dtype, device=self.device)
        return self.multiply_inputs(identity.expand(self.shape[0], -1, -1), parts)

    # --- eigenvectors: those of Σ times each of K - 1 waves orthogonal to e, and those of B times e -------------------

    def eigensystem(self, place: Place = HERE) -> tuple[Tensor, list[Tensor]]:
        values, vectors = super().eigensystem(place)
        return values, [*vectors, waves(self.kernel).to(values)]

    def operators_of(self, index: int, operators: Sequence[Tensor]) -> list[Tensor]:
        *sides, places = operators
        return [*super().operators_of(index, sides), places]

    def stack_operators(self, each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [*super().stack_operators([sides for *sides, _ in each]), each[0][-1]]

    def input_eigenvalues(self, values: Sequence[Tensor]) -> Tensor:
        centered, mean = values
        along, bias = mean.split([self.channels, int(self.bias)], dim=-1)
        across = centered.unsqueeze(-1).expand(*centered.shape, self.kernel - 1)
        return torch.cat([torch.cat([along.unsqueeze(-1), across], dim=-1).flatten(-2), bias], dim=-1)

    def to_eigenbasis(self, matrix: Tensor, operators: Sequence[Tensor]) -> Tensor:
        *sides, places = operators
        patches, bias = self.patches(self.applied(matrix, sides, transpose=True))
        return torch.cat([(patches @ places).flatten(-2), bias], dim=-1)

    def from_eigenbasis(self, matrix: Tensor, operators: Sequence[Tensor]) -> Tensor:
        left, across, along, places = operators
        waved, bias = self.patches(self.turn_outputs(matrix, left))
        mean = torch.cat([waved[..., 0], bias], dim=-1) @ along.mT
        weight, bias = mean.split([self.channels, int(self.bias)], dim=-1)
        centered = torch.einsum("...odk,...cd->...ock", waved[..., 1:], across)
        patches = torch.cat([weight.unsqueeze(-1), centered], dim=-1) @ places.mT
        return torch.cat([patches.flatten(-2), bias], dim=-1)

    def patches(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[..., C K + bias] -> [..., C, K] and [..., bias]."""
        weight, bias = rows.split([self.channels * self.kernel, int(self.bias)], dim=-1)
        return weight.unflatten(-1, (self.channels, self.kernel)), bias


def outer_product(vector: Tensor) -> Tensor:
    """v vᵀ: [..., d] -> [..., d, d]."""
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)


def waves(size: int) -> Tensor:
    """An orthonormal basis of K places whose first column is e: the discrete cosine transform, in float64."""
    place, wave = torch.arange(size, dtype=torch.float64).unsqueeze(-1), torch.arange(size, dtype=torch.float64)
    return torch.cos(math.pi * (place + 0.5) * wave / size) * ((2 - (wave == 0).double()) / size).sqrt()
