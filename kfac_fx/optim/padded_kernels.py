"""Triton kernels of a padded step: what is done element by element reads and writes every number once.

torch.compile makes several kernels of the same operations, and takes many seconds for them in the first step. Triton
comes with torch's builds for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfac_fx.fisher.bases import StepScalars

ROWS, COLUMNS = 16, 128  # of a tile


@triton.jit
def direction_kernel(
    h_pointer,
    average_pointer,
    squares_pointer,
    outputs_pointer,
    inputs_pointer,
    out_pointer,
    partial_pointer,
    scalars_pointer,
    accept_pointer,
    exponent,
    rows,
    columns,
    outputs,
    row_stride,
    matrix_stride,
    scalar_stride,
    SIDES: tl.constexpr,
    ROOT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A tile of a block. h and out are padded, the means are not. partial: [tiles, 2, L] squared norms of a and d."""
    tile, block = tl.program_id(0), tl.program_id(1)
    tiles_across = tl.cdiv(columns, COLUMNS)
    row = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    group = row // outputs
    groups = rows // outputs
    padded_row = (block * groups + group).to(tl.int64) * matrix_stride + (row % outputs) * row_stride
    padded = padded_row[:, None] + column[None, :]
    plain = (block.to(tl.int64) * rows + row)[:, None] * columns + column[None, :]

    of_block = scalars_pointer + block * scalar_stride
    keep_average, keep_squares = tl.load(of_block), tl.load(of_block + 1)
    of_gradient, of_average, epsilon = tl.load(of_block + 2), tl.load(of_block + 3), tl.load(of_block + 4)
    accept = tl.load(accept_pointer) != 0

    h = tl.load(h_pointer + padded, mask=inside & accept, other=0.0).to(tl.float32)
    average = tl.load(average_pointer + plain, mask=inside, other=0.0) * keep_average + h
    squares = tl.load(squares_pointer + plain, mask=inside, other=0.0) * keep_squares + h * h
    tl.store(average_pointer + plain, average, mask=inside)
    tl.store(squares_pointer + plain, squares, mask=inside)
    root = tl.sqrt(squares) + epsilon
    a = tl.where(inside, (h * of_gradient + average * of_average) / root, 0.0)
    d = a
    if SIDES == 1:
        weight = root / tl.load(outputs_pointer + plain, mask=inside, other=1.0)
        d = a * (tl.sqrt(weight) if ROOT else tl.exp2(exponent * tl.log2(weight)))
    if SIDES == 2:
        of_rows = tl.load(outputs_pointer + block * rows + row, mask=row < rows, other=1.0)
        of_groups = inputs_pointer + ((block * groups + group) * columns)[:, None] + column[None, :]
        weight = root / (of_rows[:, None] * tl.load(of_groups, mask=inside, other=1.0))
        d = a * (tl.sqrt(weight) if ROOT else tl.exp2(exponent * tl.log2(weight)))
    d = tl.where(inside, d, 0.0)
    tl.store(out_pointer + padded, d.to(out_pointer.dtype.element_ty), mask=inside)
    blocks = tl.num_programs(1)
    tl.store(partial_pointer + tile * 2 * blocks + block, tl.sum(tl.sum(a * a, 1), 0))
    tl.store(partial_pointer + (tile * 2 + 1) * blocks + block, tl.sum(tl.sum(d * d, 1), 0))


@triton.jit
def scale_kernel(directions_pointer, scales_pointer, elements, SIZE: tl.constexpr) -> None:
    """Directions of a block times its scale; zeros where that is zero, whatever the directions are."""
    block = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    scale = tl.load(scales_pointer + block)
    pointer = directions_pointer + block.to(tl.int64) * elements + place
    inside = place < elements
    directions = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.where(scale == 0.0, 0.0, directions * scale)
    tl.store(pointer, scaled.to(directions_pointer.dtype.element_ty), mask=inside)


def graft_by_kernel(
    h: Tensor,
    average: Tensor,
    squares: Tensor,
    scalars: StepScalars,
    eigenvalues: Sequence[Tensor],
    exponent: float,
    accept: Tensor,
    out: Tensor,
) -> Tensor:
    """As `kfac_fx.optim.padded_step.grafted_direction`, in float32."""
    blocks, groups, outputs, columns = average.shape
    rows = groups * outputs
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    partial = h.new_empty(tiles, 2, blocks)
    packed = torch.stack([scalar.expand(blocks, 1, 1, 1).flatten() for scalar in scalars], dim=-1)
    assert h.stride()[1:] == out.stride()[1:], "bug in kfac_fx: a gradient and a direction with other strides"
    sides = eigenvalues if exponent else []
    direction_kernel[(tiles, blocks)](
        h,
        average,
        squares,
        sides[0] if sides else h,
        sides[1] if len(sides) > 1 else h,
        out,
        partial,
        packed,
        accept,
        exponent,
        rows,
        columns,
        outputs,
        h.stride(2),
        h.stride(1),
        packed.stride(0),
        SIDES=len(sides),
        ROOT=exponent == 0.5,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return partial.sum(0).sqrt()


def scale_by_kernel(directions: Tensor, scales: Tensor) -> None:
    """As `kfac_fx.optim.padded_step.scaled_directions`."""
    size, elements = 4096, directions[0].numel()
    scale_kernel[(triton.cdiv(elements, size), len(directions))](directions, scales.contiguous(), elements, SIZE=size)
