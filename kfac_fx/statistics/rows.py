"""The rows and gradient rows of one use, as statistics take them: by group, at least float32, zero where none are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Matrix = tuple[int, int, int]


@dataclass(frozen=True)
class Rows:
    """The rows of one use.

    x: [N, S, g, i] floats without the bias column, or ids [N, S]; N = 1: shared by all cases.
    d: [N, S, g, o].
    matrix: (g, o, i) with the bias column.
    kept: [N, S], which rows there are, or [N, S, g], which are in which group; x and d are zero, or -1, where it is
        false. None: all.
    """

    x: Tensor
    d: Tensor
    bias: bool
    matrix: Matrix
    kept: Tensor | None = None

    @property
    def ids(self) -> bool:
        return not self.x.is_floating_point()

    @property
    def apart(self) -> bool:
        """Whether every group has rows of its own."""
        return self.kept is not None and self.kept.dim() == 3

    @property
    def repeats(self) -> int:
        """How many cases share one row."""
        cases, rows = self.d.shape[0], self.x.shape[0]
        return 1 if rows == cases else cases // rows  # both may be none: an expert that nothing was sent to

    def expanded(self) -> Tensor:
        """x with N its first dimension."""
        return self.x.expand(self.d.shape[0], *self.x.shape[1:])


def canonical(rows: Tensor, grad_rows: Tensor, bias: bool, matrix: Matrix, kept: Tensor | None = None) -> Rows:
    """One group where no groups are, at least float32, and no gradient where no row is."""
    if kept is not None:
        rows = masked(rows.expand(len(kept), *rows.shape[1:]), kept, 0 if rows.is_floating_point() else -1)
        grad_rows = masked(grad_rows, kept, 0)
    d = grad_rows.unsqueeze(2) if grad_rows.dim() == 3 else grad_rows
    d = d.to(torch.promote_types(d.dtype, torch.float32))
    if not rows.is_floating_point():
        d = d if bias else torch.where((rows >= 0)[..., None, None], d, 0)
        return Rows(rows, d, bias, matrix, kept)
    x = rows.unsqueeze(2) if rows.dim() == 3 else rows
    return Rows(x.to(d.dtype), d, bias, matrix, kept)


def masked(rows: Tensor, kept: Tensor, empty: int) -> Tensor:
    """`rows` [N, S, ...], and `empty` where `kept` [N, S] or [N, S, g] is false."""
    return torch.where(kept[(..., *(None,) * (rows.dim() - kept.dim()))], rows, empty)


def homogeneous(rows: Rows) -> Tensor:
    """x with the bias column, if there is one: ones, and zeros where there is no row."""
    if not rows.bias:
        return rows.x
    ones = rows.x.new_ones(*rows.x.shape[:-1], 1)  # not like a column: a layer that only shifts has none
    return torch.cat([rows.x, ones if rows.kept is None else masked(ones, rows.kept, 0)], dim=-1)
