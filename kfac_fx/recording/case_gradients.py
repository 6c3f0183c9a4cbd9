"""The gradients of single cases of one registration, from the rows of all its uses.

The gradient of case n is the matrix W_n [g, o, i] = Σ d rᵀ, summed over the uses and the positions of the case. A case
may also be one position of an example. Functions of these matrices are computed for a few cases at a time, so that they
take no more than `CHUNK` numbers, or one matrix if that is larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kfac_fx.passes.approximations import Matrix
from kfac_fx.recording.row_sums import CHUNK, Rows, case_matrices, homogeneous, squared_sums_of_ids, with_bias

ADDED_AT_ONCE = 2**16  # numbers that are added in one product


@dataclass(frozen=True)
class Cases:
    """The gradients of N cases of one registration.

    Attributes:
        matrix: (g, o, i).
        uses: the rows of every use, all with N cases; () if `whole` has the gradients.
        whole: the gradients themselves, [N, g, o, i]; None: they are those of the rows.
        first: the number of the first case in its batch.
    """

    matrix: Matrix
    uses: tuple[Rows, ...] = ()
    whole: Tensor | None = None
    first: int = 0

    def __len__(self) -> int:
        return len(self.uses[0].d) if self.whole is None else len(self.whole)

    @property
    def positions(self) -> int:
        """The number of positions of a case, over all uses."""
        return sum(rows.d.shape[1] for rows in self.uses)

    def chunks(self, numbers: int = 0) -> Iterator[tuple[slice, Cases]]:
        """The cases in parts whose gradients have at most `CHUNK` numbers. numbers: of a case, if more than these."""
        step = max(1, CHUNK // max(1, numbers, math.prod(self.matrix)))
        for start in range(0, len(self), step):
            part = slice(start, min(start + step, len(self)))
            yield (
                part,
                replace(
                    self,
                    uses=tuple(narrowed(rows, part) for rows in self.uses),
                    whole=None if self.whole is None else self.whole[part],
                    first=self.first + start,
                ),
            )

    def gradients(self) -> Tensor:
        """[N, g, o, i]."""
        if self.whole is not None:
            return self.whole
        each = [case_matrices(rows) for rows in side_by_side(self.uses)]
        return each[0] if len(each) == 1 else torch.stack(each).sum(0)

    def by_position(self) -> list[Cases]:
        """With every position as a case of its own, N·S in the order of the examples: the uses with equally many
        positions together, since they meet at these."""
        if self.whole is not None:
            return [self]
        sizes = dict.fromkeys(rows.d.shape[1] for rows in self.uses)
        alike = ([rows for rows in self.uses if rows.d.shape[1] == size] for size in sizes)
        return [replace(self, uses=tuple(map(as_cases, uses))) for uses in alike]

    def turned(self, inputs: Callable[[Tensor], Tensor] | None, outputs: Callable[[Tensor], Tensor]) -> Cases:
        """The cases with functions of their rows [N, S, g, i] and gradient rows [N, S, g, o].

        inputs: None leaves the rows as they are, which may then be ids.
        """
        assert self.whole is None, "bug in kfac_fx: gradients without rows are turned"

        def both(rows: Rows) -> Rows:
            d = outputs(rows.d)
            if inputs is None:
                return replace(rows, d=d, x=rows.x if rows.ids else rows.x.to(d.dtype))
            return Rows(inputs(one_hot(rows) if rows.ids else homogeneous(rows)), d, False, rows.matrix)

        return replace(self, uses=tuple(map(both, self.uses)))


def narrowed(rows: Rows, cases: slice) -> Rows:
    """The rows of some cases; rows that all cases share stay."""
    x = rows.x if rows.x.shape[0] == 1 else rows.x[cases]
    return replace(rows, x=x, d=rows.d[cases], mask=None if rows.mask is None else rows.mask[cases])


def as_cases(rows: Rows) -> Rows:
    """[N, S, ...] -> [N·S, 1, ...]."""
    x = rows.expanded().flatten(0, 1).unsqueeze(1)
    mask = None if rows.mask is None else rows.mask.flatten(0, 1).unsqueeze(1)
    return replace(rows, x=x, d=rows.d.flatten(0, 1).unsqueeze(1), mask=mask)


def one_hot(rows: Rows) -> Tensor:
    """The rows of ids [N, S, 1, i], with the bias column, if there is one."""
    size = rows.matrix[2] - rows.bias
    numbers = torch.arange(size, device=rows.x.device)
    hot = (rows.x.unsqueeze(-1) == numbers).to(rows.d.dtype).unsqueeze(2)
    return homogeneous(replace(rows, x=hot)) if rows.bias else hot


def side_by_side(uses: Sequence[Rows]) -> list[Rows]:
    """The uses whose rows are values as one use, whose positions are theirs one after another; ids stay apart."""
    values, ids = ([rows for rows in uses if rows.ids is of_ids] for of_ids in (False, True))
    if len(values) < 2:
        return [*values, *ids]
    x = torch.cat([homogeneous(rows).expand(len(rows.d), -1, -1, -1) for rows in values], dim=1)
    return [Rows(x, torch.cat([rows.d for rows in values], dim=1), False, values[0].matrix), *ids]


# --- sums and products ------------------------------------------------------------------------------------------------


def sum_of_squares(cases: Cases) -> Tensor:
    """Σ_n W_n², element by element: [g, o, i]."""
    rows = lone_rows(cases)
    if rows is not None:
        return torch.einsum("ngo,ngi->goi", rows.d[:, 0].square(), homogeneous_of_cases(rows).square())
    if cases.whole is None and len(cases.uses) == 1 and cases.uses[0].ids:
        return squares_of_ids(cases.uses[0])
    total = None
    for _, part in cases.chunks():
        squares = part.gradients().square().sum(0)
        total = squares if total is None else total + squares
    assert total is not None, "bug in kfac_fx: squares of no cases"
    return total


def squares_of_ids(rows: Rows) -> Tensor:
    """`sum_of_squares` for one use of ids, without matrices of the size of the vocabulary."""
    step = max(1, CHUNK // max(1, rows.d.shape[1] ** 2))
    parts = zip(torch.split(rows.expanded(), step), torch.split(rows.d, step), strict=True)
    weight = torch.stack([squared_sums_of_ids(x, d, rows.matrix[2] - rows.bias) for x, d in parts]).sum(0)
    return with_bias(rows, weight, rows.d.sum(1).square().sum(0))


def weighted_squares(cases: Cases, weights: Tensor) -> Tensor:
    """Σ W_n² · weights over the elements of every case: [N]. weights: [g, o, i]."""
    rows = lone_rows(cases)
    if rows is not None:
        squares = torch.einsum("goi,ngi->ngo", weights, homogeneous_of_cases(rows).square())
        return (squares * rows.d[:, 0].square()).sum((1, 2))
    return torch.cat([(part.gradients().square() * weights).sum((1, 2, 3)) for _, part in cases.chunks()])


@dataclass(frozen=True, eq=False)
class LowRank:
    """Matrices P = left @ right of a low rank: left [Q, g, o, k], right [Q, g, k, i]."""

    left: Tensor
    right: Tensor

    @staticmethod
    def of(matrices: Tensor, rank: int) -> LowRank:
        """The nearest matrices of this rank to [Q, g, o, i]."""
        u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
        return LowRank(u[..., :rank] * s[..., None, :rank], vh[..., :rank, :])

    def __len__(self) -> int:
        return len(self.left)

    def dense(self) -> Tensor:
        return self.left @ self.right


QueryGradients = Tensor | LowRank  # [Q, g, o, i]


def query_products(cases: Cases, queries: QueryGradients) -> Tensor:
    """<W_n, P_q> for all cases and queries P: [Q, N]."""
    if cases.whole is not None:
        whole = queries.dense() if isinstance(queries, LowRank) else queries
        return products_of_all(whole, cases.whole)
    each = [products_of_use(Cases(cases.matrix, (rows,)), rows, queries) for rows in side_by_side(cases.uses)]
    return torch.stack(each).sum(0)


def products_of_use(cases: Cases, rows: Rows, queries: QueryGradients) -> Tensor:
    """As `inner_products`, in the cheaper order: P r first, for every position, or d rᵀ first, for every query."""
    positions, many = rows.d.shape[1], len(queries)
    if isinstance(queries, LowRank) or rows.ids or positions * many <= positions + many:
        return torch.cat([part.sum(-1) for part in by_rows(cases, queries)], dim=1)
    return torch.cat([products_of_all(queries, part.gradients()) for _, part in cases.chunks()], dim=1)


def products_of_all(queries: Tensor, gradients: Tensor) -> Tensor:
    """<W_n, P_q> of matrices [N, g, o, i] and [Q, g, o, i]: [Q, N].

    Summed piece by piece: BLAS adds the products of float32 one after another, which loses four digits in an embedding
    of a large vocabulary."""
    pieces = (matrices.flatten(1).split(ADDED_AT_ONCE, dim=1) for matrices in (queries, gradients.to(queries.dtype)))
    return torch.stack([left @ right.mT for left, right in zip(*pieces, strict=True)]).sum(0)


def by_rows(cases: Cases, queries: QueryGradients) -> Iterator[Tensor]:
    """dᵀ P r of every row of one use: [Q, N, S], in parts of the cases."""
    g, o, i = cases.matrix
    wide = queries.left.shape[-1] if isinstance(queries, LowRank) else o
    for _, part in cases.chunks(len(queries) * g * wide * cases.positions):
        (rows,) = part.uses
        yield products_of_low_rank(rows, queries) if isinstance(queries, LowRank) else products_of_rows(rows, queries)


def products_of_rows(rows: Rows, queries: Tensor) -> Tensor:
    d = rows.d.to(queries.dtype)
    if rows.ids:
        return torch.einsum("qgons,nsgo->qns", columns_of_ids(rows, queries), d)
    x = homogeneous(rows).expand(len(d), -1, -1, -1).to(queries.dtype)
    return torch.einsum("qgoi,nsgi,nsgo->qns", queries, x, d)


def products_of_low_rank(rows: Rows, queries: LowRank) -> Tensor:
    outputs = torch.einsum("qgok,nsgo->qgkns", queries.left, rows.d.to(queries.left.dtype))
    if rows.ids:
        inputs = columns_of_ids(rows, queries.right)
    else:
        x = homogeneous(rows).expand(len(rows.d), -1, -1, -1).to(queries.right.dtype)
        inputs = torch.einsum("qgki,nsgi->qgkns", queries.right, x)
    return (outputs * inputs).sum((1, 2))


def columns_of_ids(rows: Rows, matrices: Tensor) -> Tensor:
    """The columns of [Q, 1, o, i] at the ids, with that of the bias added: [Q, 1, o, N, S]."""
    ids = rows.expanded()
    columns = torch.where(ids >= 0, matrices[..., ids.clamp(min=0)], 0)
    return columns + matrices[..., -1, None, None] if rows.bias else columns


def lone_rows(cases: Cases) -> Rows | None:
    """The rows of cases with a single row of values each, and None if a case has more, or has ids."""
    if cases.whole is not None or len(cases.uses) != 1:
        return None
    (rows,) = cases.uses
    return rows if rows.d.shape[1] == 1 and not rows.ids else None


def homogeneous_of_cases(rows: Rows) -> Tensor:
    """The rows of cases with one row each, with the bias column: [N, g, i]."""
    return homogeneous(rows).expand(len(rows.d), -1, -1, -1)[:, 0]
