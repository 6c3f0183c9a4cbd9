"""The rows and gradient rows of one use, as statistics take them: by group, at least float32, zero where none are.

What a tap computes in the backward pass: sums over rows, additive over uses and micro-batches.

A statistic gets the rows and the gradient rows of one use (forms: `passes.layers.declaration`) and never divides: the
row `r` ([i], with the bias column 1 appended) and the gradient row `d` ([o]) of a group enter

    count     number of rows            A  Σ r rᵀ     A_diag  Σ r²
    gradient  Σ d rᵀ                    G  Σ d dᵀ     G_diag  Σ d²
    per_case  p_n = Σ_s d rᵀ, flat      square  Σ_n p_n²     outer   Σ_n p_n p_nᵀ

with sums over all N·S rows, or over those that a mask keeps: what is padding enters nothing, the number of rows
included. The one division of the project is in `factors`. Integer rows are one-hot and never materialized; a row of id
-1 is no row at all, or, in a layer with a bias, the bias column alone. Everything is at least float32, whatever the
network computes in, and compiles without graph breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import bordered, gram, spread

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


# --- row sums ---------------------------------------------------------------------------------------------------------


Shape = tuple[int, ...]
CHUNK = 1 << 24  # elements of per-case gradients held at once by `square`


@dataclass(frozen=True)
class Statistic:
    """`shape(matrix, N)` is the shape of what `compute(rows, grad_rows, has_bias, matrix, kept=None)` returns;
    matrix: (g, o, i) with the bias column; kept: [N, S], the rows that are no padding, if not all."""

    name: str
    shape: Callable[[Matrix, int], Shape]
    compute: Callable[..., Tensor]


STATISTICS: dict[str, Statistic] = {}
IN_BLOCKS: dict[str, Statistic] = {}  # those that some registration asked for, see `kfac_fx.factors.wide`


def named(name: str) -> Statistic:
    return STATISTICS[name] if name in STATISTICS else IN_BLOCKS[name]


def whole(name: str) -> str:
    """`"A/8"`, A in eight diagonal blocks -> `"A"`."""
    return name.partition("/")[0]


def statistic(
    shape: Callable[[int, int, int, int], Shape], known: dict[str, Statistic] = STATISTICS
) -> Callable[[Callable[[Rows], Tensor]], Statistic]:
    """Decorator: adds a function of rows to `known`; shape: its result's, from g, o, i and N."""

    def add(function: Callable[[Rows], Tensor]) -> Statistic:
        def compute(rows: Tensor, grad_rows: Tensor, bias: bool, matrix: Matrix, kept: Tensor | None = None) -> Tensor:
            with torch.autocast(grad_rows.device.type, enabled=False):
                return function(canonical(rows, grad_rows, bias, matrix, kept))

        name = function.__name__
        known[name] = Statistic(name, lambda matrix, cases: shape(*matrix, cases), compute)
        return known[name]

    return add


# --- second moments -------------------------------------------------------------------------------------------------


@statistic(shape=lambda g, o, i, n: ())
def count(rows: Rows) -> Tensor:
    return number(rows)


def number(rows: Rows) -> Tensor:
    """Of rows, those of all groups together where every group has its own."""
    if rows.ids and not rows.bias:
        return (rows.x >= 0).sum().to(rows.d.dtype) * rows.repeats
    if rows.kept is not None:
        return rows.kept.flatten(2).any(-1).sum().to(rows.d.dtype) if rows.apart else rows.kept.sum().to(rows.d.dtype)
    return rows.d.new_full((), rows.d.shape[0] * rows.d.shape[1])


@statistic(shape=lambda g, o, i, n: (g, i, i))
def A(rows: Rows) -> Tensor:
    body = torch.diag_embed(squares(rows)) if rows.ids else gram(rows.x) * rows.repeats
    return of_group(rows, bordered(body, total(rows), corner(rows)) if rows.bias else body)


@statistic(shape=lambda g, o, i, n: (g, i))
def A_diag(rows: Rows) -> Tensor:
    return of_group(rows, torch.cat([squares(rows), corner(rows).unsqueeze(-1)], -1) if rows.bias else squares(rows))


@statistic(shape=lambda g, o, i, n: (g, o, o))
def G(rows: Rows) -> Tensor:
    return gram(rows.d)


@statistic(shape=lambda g, o, i, n: (g, o))
def G_diag(rows: Rows) -> Tensor:
    return rows.d.square().sum((0, 1))


def squares(rows: Rows) -> Tensor:
    """Σ x², [g, i] without the bias column."""
    return total(rows) if rows.ids else rows.x.square().sum((0, 1)) * rows.repeats


def total(rows: Rows) -> Tensor:
    """Σ x, [g, i] without the bias column; how often each id occurs."""
    if not rows.ids:
        return rows.x.sum((0, 1)) * rows.repeats
    present = (rows.x >= 0).to(rows.d.dtype) * rows.repeats
    return by_id(rows.x, present.unsqueeze(-1), rows.matrix[2] - rows.bias).squeeze(-1).unsqueeze(0)


def corner(rows: Rows) -> Tensor:
    """Σ 1 over the rows, [g]; `count` is over the gradient rows, which are others where rows are pixels."""
    g = rows.matrix[0]
    if rows.kept is not None:
        return rows.kept.sum((0, 1)).to(rows.d.dtype) if rows.apart else rows.kept.sum().to(rows.d.dtype).expand(g)
    return rows.d.new_full((g,), rows.repeats * rows.x.shape[0] * rows.x.shape[1])


def of_group(rows: Rows, sums: Tensor) -> Tensor:
    """Sums of inputs, [g, ...] or of k blocks a group [g·k, ...], times all rows by the rows of the group, where groups
    have rows of their own: the mean over all rows is then that over the group's own, and `c A ⊗ G` has the share of the
    group once, in G, and not twice."""
    if not rows.apart:
        return sums
    scale = number(rows) / corner(rows).clamp(min=1)
    return sums * spread(scale.repeat_interleave(sums.shape[0] // len(scale)), sums)


# --- gradients ------------------------------------------------------------------------------------------------------


@statistic(shape=lambda g, o, i, n: (g, o, i))
def gradient(rows: Rows) -> Tensor:
    if rows.ids:
        ids = rows.expanded()
        weight = by_id(ids, visible(ids, rows.d), rows.matrix[2] - rows.bias).mT.unsqueeze(0)
    else:
        d = rows.d.sum(0, keepdim=True) if rows.x.shape[0] == 1 else rows.d
        weight = products(rows.x.flatten(0, 1).unsqueeze(0), d.flatten(0, 1).unsqueeze(0)).squeeze(0)
    return with_bias(rows, weight, rows.d.sum((0, 1)))


@statistic(shape=lambda g, o, i, n: (n, g * o * i))
def per_case(rows: Rows) -> Tensor:
    if rows.ids:
        n, size, ids = rows.d.shape[0], rows.matrix[2] - rows.bias, rows.expanded()
        offset = torch.arange(n, device=ids.device).unsqueeze(-1) * size
        sums = by_id(ids.clamp(min=0) + offset, visible(ids, rows.d), n * size)
        weight = sums.view(n, size, -1).mT.unsqueeze(1)
    else:
        weight = products(rows.expanded(), rows.d)
    return with_bias(rows, weight, rows.d.sum(1)).flatten(1)


@statistic(shape=lambda g, o, i, n: (g, o, i))
def square(rows: Rows) -> Tensor:
    """One use only: the square of a sum over uses is not the sum of squares."""
    if rows.d.shape[1] == 1 and not rows.ids:
        weight = torch.einsum("ngo,ngi->goi", rows.d.squeeze(1).square(), rows.expanded().squeeze(1).square())
    else:
        chunk = squares_of_ids if rows.ids else squares_of_sums
        held = rows.d.shape[1] ** 2 if rows.ids else math.prod(rows.matrix)
        step = max(1, CHUNK // max(1, held))
        weight = rows.d.new_zeros(rows.matrix[0], rows.matrix[1], rows.matrix[2] - rows.bias)
        for x, d in zip(torch.split(rows.expanded(), step), torch.split(rows.d, step), strict=True):
            weight = weight + chunk(x, d, weight.shape[2])
    return with_bias(rows, weight, rows.d.sum(1).square().sum(0))


@statistic(shape=lambda g, o, i, n: (g * o * i, g * o * i))
def outer(rows: Rows) -> Tensor:
    """One use a case only, as `square`."""
    p = per_case.compute(rows.x, rows.d, rows.bias, rows.matrix)
    return p.mT @ p


def squares_of_sums(x: Tensor, d: Tensor, inputs: int) -> Tensor:
    return products(x, d).square().sum(0)


def squares_of_ids(ids: Tensor, d: Tensor, inputs: int) -> Tensor:
    """Σ_n (Σ_{s of id} d)² = Σ_{n, s, t of one id} d_s d_t: as many sums as rows, however large the vocabulary is."""
    d = visible(ids, d)
    same = (ids.unsqueeze(1) == ids.unsqueeze(2)).to(d.dtype)
    return by_id(ids, d * (same @ d), inputs).mT.unsqueeze(0)


def products(x: Tensor, d: Tensor) -> Tensor:
    """Σ_s d xᵀ for every case and group: [N, S, g, i] and [N, S, g, o] -> [N, g, o, i]."""
    if 1 in (x.shape[-1], d.shape[-1]):  # thousands of matrix products of one number each are slow
        return (d.unsqueeze(-1) * x.unsqueeze(-2)).sum(1)
    return torch.einsum("nsgo,nsgi->ngoi", d, x)


def with_bias(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """The bias column, [..., g, o], after the weight's, [..., g, o, i]."""
    return torch.cat([weight, bias.unsqueeze(-1)], dim=-1) if rows.bias else weight


# --- integer rows ---------------------------------------------------------------------------------------------------


def visible(ids: Tensor, d: Tensor) -> Tensor:
    """The gradient rows [N, S, o] of the one group of integer rows, zero where there is no input."""
    return torch.where((ids >= 0).unsqueeze(-1), d.squeeze(2), 0)


def by_id(ids: Tensor, values: Tensor, size: int) -> Tensor:
    """Sums of values with one id: ids of any shape, values [*ids.shape, k] -> [size, k]; -1 comes with zeros."""
    values = values.flatten(0, -2)
    return values.new_zeros(size, values.shape[-1]).index_add(0, ids.clamp(min=0).flatten(), values)
