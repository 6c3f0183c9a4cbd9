"""Statistics: sums over the rows and gradient rows of one use, or of two consecutive uses, and those of a whole batch.

`passes.approximations` declares the statistics; here every one gets its function. A tap calls it in the backward pass.
The sums are additive over uses and micro-batches. The row `r` ([i], with the bias column 1 appended) and the gradient
row `d` ([o]) of a group (forms: `passes.layers.declaration`) enter

    count     number of rows            A  Σ r rᵀ     A_diag  Σ r²
    gradient  Σ d rᵀ                    G  Σ d dᵀ     G_diag  Σ d²
    per_case  p_n = Σ_s d rᵀ, flat      square  Σ_n p_n²     outer   Σ_n p_n p_nᵀ

with sums over all N·S rows, or over those that a mask selects; padding also does not enter `count`. Statistics never
divide: the only division of the project is in `kfac_fx.fisher.groups`. Integer rows are one-hot and are never
materialized. The id -1 stands for no row, or for the bias column alone if the layer has a bias. Statistics are at least
float32, whatever the precision of the network, and compile without graph breaks.

The statistics of one batch are its `Moments`, or `PendingMoments` while the user's backward is still to come.

**Examples** that are not the entries of one dimension: graphs of many nodes, documents that are packed into one row,
and pairs in two halves of a batch.

`compile(..., examples=...)` gives a function of forward's arguments that returns the number of the example of every
row: [rows], or [rows, positions] of packed sequences; a negative number is of no example, as padding is. The rows of an
example are brought together, so that its gradient is one matrix, with zeros behind those of smaller examples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.linalg.matrices import bordered, dense, gram, unsqueeze_like
from kfac_fx.linalg.vectors import split
from kfac_fx.passes import approximations as declared
from kfac_fx.passes.approximations import PER_CASE, SQUARE, Approximation, Matrix, Statistic, computes, named
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import HALVES, block_width, without_autocast
from kfac_fx.recording.model_checks import refuse_misfit_of_function

ExamplesOf = Callable[..., Tensor]
WANTED = "whole numbers, [rows] or [rows, positions], counted from 0; -1 where a row is of no example"


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one batch.

    Attributes:
        numbers: of the example of every row, [rows] or [rows, positions].
        count: how many examples there are.
    """

    numbers: Tensor
    count: int

    @staticmethod
    def of_call(function: ExamplesOf, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Examples:
        """Raises RegistrationError if the function does not take the call, or returns something else than numbers of
        examples."""
        refuse_misfit_of_function("examples", function, args, kwargs)
        numbers = function(*args, **kwargs)
        whole = isinstance(numbers, Tensor) and not numbers.is_floating_point() and not numbers.is_complex()
        if not whole or numbers.dim() not in (1, 2):
            what = f"{numbers.dtype} {list(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
            raise RegistrationError(f"examples= returned a {what}, wanted {WANTED}")
        return Examples(numbers, 1 + int(numbers.max()) if numbers.numel() else 0)

    def owners(self, shape: Sequence[int]) -> Tensor | None:
        """The example of every row of a tensor with these leading sizes; None if they are not those of rows."""
        numbers, shape = self.numbers, tuple(shape)
        if shape == tuple(numbers.shape):
            return numbers
        if numbers.dim() == 2:
            if shape == tuple(numbers.shape[::-1]):
                return numbers.T
            if math.prod(shape) == numbers.numel() and shape[0] == numbers.numel():
                return numbers.reshape(shape)
        elif shape[:1] == tuple(numbers.shape):
            return numbers.view(-1, *[1] * (len(shape) - 1)).expand(shape)
        if shape[:1] == (self.count,):  # one row for every example already
            every = torch.arange(self.count, device=numbers.device)
            return every.view(-1, *[1] * (len(shape) - 1)).expand(shape)
        return None

    def places(self, owners: Tensor) -> tuple[Tensor, Tensor]:
        """(the rows that are of an example, in the order of the examples; the place of each within its example).

        owners: of every row, flat.
        """
        order = owners.argsort(stable=True)
        order = order[int((owners < 0).sum()) :]
        of_row = owners[order]
        starts = torch.bincount(of_row, minlength=self.count).cumsum(0).roll(1)
        starts[:1] = 0
        return order, torch.arange(len(order), device=owners.device) - starts[of_row]

    def together(self, rows: Rows) -> Rows | None:
        """The rows [N, S, ...] of a use as those of examples, [examples, most rows, ...]; None if they are of none."""
        owners = None if rows.routed else self.owners(rows.d.shape[:2])
        if owners is None:
            return None
        owners = owners.reshape(-1)
        order, place = self.places(owners)
        of_row, most = owners[order], 1 + int(place.max()) if len(place) else 1

        def placed(tensor: Tensor, empty: Any) -> Tensor:
            flat = tensor.flatten(0, 1)
            result = flat.new_full((self.count, most, *flat.shape[1:]), empty)
            result[of_row, place] = flat[order]
            return result

        mask = torch.ones_like(rows.d[..., 0, 0], dtype=torch.bool) if rows.mask is None else rows.mask
        return replace(
            rows,
            x=placed(rows.expanded(), -1 if rows.ids else 0),
            d=placed(rows.d, 0),
            mask=placed(mask, False),
        )

    def by_example(self, rows: Tensor, owners: Tensor) -> Tensor:
        """The rows [rows, ...] of all examples as [examples, most rows, ...], zero where an example has fewer."""
        order, place = self.places(owners)
        most = 1 + int(place.max()) if len(place) else 1
        empty = rows.new_zeros(self.count, most, *rows.shape[1:])
        return empty.index_put((owners[order], place), rows[order])

    def slots(self, owners: Tensor) -> Tensor:
        """The place of every row within its example; 0 for rows of none."""
        flat = owners.reshape(-1)
        order, place = self.places(flat)
        slots = torch.zeros_like(flat)
        slots[order] = place
        return slots.view(owners.shape)


CHUNK = 1 << 24  # elements of per-case gradients that `square` holds at once
Key = tuple[str, ...]  # the names of the parameters of a registration


@dataclass(frozen=True)
class Rows:
    """The rows and gradient rows of one use, by group, in float16 or bfloat16 if the network has them so, else wider.

    Attributes:
        x: [N, S, g, i] floats without the bias column, or ids [N, S]. With N = 1 all cases share the rows.
        d: [N, S, g, o].
        bias: whether the matrix has a bias column.
        matrix: (g, o, i) with the bias column.
        mask: [N, S], which rows exist, or [N, S, g], which rows belong to which group. x is zero or -1, and d is zero,
            where it is false. None: all rows exist.
    """

    x: Tensor
    d: Tensor
    bias: bool
    matrix: Matrix
    mask: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of all sums over the rows: at least float32."""
        return torch.promote_types(self.d.dtype, torch.float32)

    def widened(self) -> Rows:
        """The same rows in at least float32."""
        if self.d.dtype == self.dtype and (self.ids or self.x.dtype == self.dtype):
            return self
        return replace(self, x=self.x if self.ids else self.x.to(self.dtype), d=self.d.to(self.dtype))

    @property
    def ids(self) -> bool:
        return not self.x.is_floating_point()

    @property
    def routed(self) -> bool:
        """Whether every group has rows of its own, as experts have."""
        return self.mask is not None and self.mask.dim() == 3

    @property
    def repeats(self) -> int:
        """The number of cases that share one row."""
        cases, rows = self.d.shape[0], self.x.shape[0]
        return 1 if rows == cases else cases // rows  # both are 0 for an expert without rows

    def expanded(self) -> Tensor:
        """x with a first dimension of N."""
        return self.x.expand(self.d.shape[0], *self.x.shape[1:])


def canonical(rows: Tensor, grad_rows: Tensor, bias: bool, matrix: Matrix, mask: Tensor | None = None) -> Rows:
    """The rows of a tap as `Rows`: with a dimension of groups, at least float32, zero where the mask is false."""
    return in_groups(rows, grad_rows, bias, matrix, mask).widened()


def in_groups(rows: Tensor, grad_rows: Tensor, bias: bool, matrix: Matrix, mask: Tensor | None = None) -> Rows:
    """As `canonical`, but what has half precision stays as it is."""
    if mask is not None:
        rows = masked(rows.expand(len(mask), *rows.shape[1:]), mask, 0 if rows.is_floating_point() else -1)
        grad_rows = masked(grad_rows, mask, 0)
    d = grad_rows.unsqueeze(2) if grad_rows.dim() == 3 else grad_rows
    if not rows.is_floating_point():
        d = d if bias else torch.where((rows >= 0)[..., None, None], d, 0)
        return Rows(rows, d, bias, matrix, mask)
    x = rows.unsqueeze(2) if rows.dim() == 3 else rows
    x = x if x.dtype in HALVES else x.to(torch.promote_types(d.dtype, torch.float32))
    return Rows(x, d, bias, matrix, mask)


def behind_each_other(uses: Sequence[Rows]) -> Rows:
    """The rows of several uses as those of one with all their cases. They differ in the number of cases at most."""
    if len(uses) == 1:
        return uses[0]
    x, d = (torch.cat([getattr(rows, side) for rows in uses]) for side in ("x", "d"))
    masks = [rows.mask for rows in uses if rows.mask is not None]
    return replace(uses[0], x=x, d=d, mask=torch.cat(masks) if masks else None)


def masked(rows: Tensor, mask: Tensor, empty: int) -> Tensor:
    """`rows` [N, S, ...], with `empty` where the mask [N, S] or [N, S, g] is false."""
    return torch.where(mask[(..., *(None,) * (rows.dim() - mask.dim()))], rows, empty)


def homogeneous(rows: Rows) -> Tensor:
    """x with the bias column, if there is one: ones, and zeros where the mask is false."""
    if not rows.bias:
        return rows.x
    ones = rows.x.new_ones(*rows.x.shape[:-1], 1)  # x may have no columns: a layer that only shifts
    return torch.cat([rows.x, ones if rows.mask is None else masked(ones, rows.mask, 0)], dim=-1)


def sum_of(
    name: str, rows: Tensor, grad_rows: Tensor, bias: bool, matrix: Matrix, mask: Tensor | None = None
) -> Tensor:
    """The statistic of this name over the rows of a tap; see `canonical`. mask: [N, S], the rows without padding."""
    with without_autocast(grad_rows.device):
        return named(name).of(canonical(rows, grad_rows, bias, matrix, mask))


# --- second moments -------------------------------------------------------------------------------------------------


@computes(declared.COUNT)
def row_count(rows: Rows) -> Tensor:
    """The number of rows, []. Routed rows of several groups are counted once."""
    if rows.ids and not rows.bias:
        return (rows.x >= 0).sum().to(rows.dtype) * rows.repeats
    if rows.mask is not None:
        return rows.mask.flatten(2).any(-1).sum().to(rows.dtype) if rows.routed else rows.mask.sum().to(rows.dtype)
    return rows.d.new_full((), rows.d.shape[0] * rows.d.shape[1], dtype=rows.dtype)


@computes(declared.A)
def A(rows: Rows, blocks: int = 1) -> Tensor:
    if blocks > 1:
        assert not rows.ids, "bug in kfac_fx: the input side of one-hot rows is diagonal and needs no blocks"
        return scaled_by_group(rows, gram(split_rows(homogeneous(rows), blocks)) * rows.repeats)
    body = torch.diag_embed(squares(rows)) if rows.ids else repeated(rows, gram(rows.x))
    return scaled_by_group(rows, bordered(body, total(rows), corner(rows)) if rows.bias else body)


@computes(declared.A_DIAG)
def A_diag(rows: Rows) -> Tensor:
    rows = rows.widened()
    return scaled_by_group(
        rows, torch.cat([squares(rows), corner(rows).unsqueeze(-1)], -1) if rows.bias else squares(rows)
    )


def split_rows(rows: Tensor, blocks: int) -> Tensor:
    """Rows [..., g, d] in blocks, [..., g·k, b], filled up with zeros."""
    missing = block_width(rows.shape[-1], blocks) * blocks - rows.shape[-1]
    filled: Tensor = F.pad(rows, (0, missing)).unflatten(-1, (blocks, -1))
    return filled.flatten(-3, -2)


@computes(declared.G)
def G(rows: Rows, blocks: int = 1) -> Tensor:
    return gram(rows.d if blocks == 1 else split_rows(rows.d, blocks))


@computes(declared.G_DIAG)
def G_diag(rows: Rows) -> Tensor:
    return rows.widened().d.square().sum((0, 1))


def repeated(rows: Rows, sums: Tensor) -> Tensor:
    """Sums over x as sums over all cases."""
    return sums if rows.repeats == 1 else sums * rows.repeats


def squares(rows: Rows) -> Tensor:
    """Σ x²: [g, i] without the bias column."""
    return total(rows) if rows.ids else rows.x.square().sum((0, 1)) * rows.repeats


def total(rows: Rows) -> Tensor:
    """Σ x: [g, i] without the bias column; of ids, how often each occurs."""
    if not rows.ids:
        return repeated(rows, rows.x.sum((0, 1), dtype=rows.dtype))
    present = (rows.x >= 0).to(rows.dtype) * rows.repeats
    return by_id(rows.x, present.unsqueeze(-1), rows.matrix[2] - rows.bias).squeeze(-1).unsqueeze(0)


def corner(rows: Rows) -> Tensor:
    """The number of rows of every group, [g]. Where rows are pixels it differs from the number of gradient rows."""
    g = rows.matrix[0]
    if rows.mask is not None:
        return rows.mask.sum((0, 1)).to(rows.dtype) if rows.routed else rows.mask.sum().to(rows.dtype).expand(g)
    return rows.d.new_full((g,), rows.repeats * rows.x.shape[0] * rows.x.shape[1], dtype=rows.dtype)


def scaled_by_group(rows: Rows, sums: Tensor) -> Tensor:
    """Sums of inputs, [g, ...] or [g·k, ...] of k blocks a group, times (all rows / rows of the group) if rows are
    routed. The division by all rows then yields the mean over the rows of the group, so `c A ⊗ G` contains the share of
    the group only once, in G."""
    if not rows.routed:
        return sums
    scale = row_count(rows) / corner(rows).clamp(min=1)
    return sums * unsqueeze_like(scale.repeat_interleave(sums.shape[0] // len(scale)), sums)


# --- gradients ------------------------------------------------------------------------------------------------------


@computes(declared.GRADIENT)
def gradient(rows: Rows) -> Tensor:
    rows = rows.widened()
    if rows.ids:
        ids = rows.expanded()
        weight = by_id(ids, visible(ids, rows.d), rows.matrix[2] - rows.bias).mT.unsqueeze(0)
    else:
        d = rows.d.sum(0, keepdim=True) if rows.x.shape[0] == 1 else rows.d
        weight = case_gradients(rows.x.flatten(0, 1).unsqueeze(0), d.flatten(0, 1).unsqueeze(0)).squeeze(0)
    return with_bias(rows, weight, rows.d.sum((0, 1)))


@computes(declared.PER_CASE)
def per_case(rows: Rows) -> Tensor:
    return case_matrices(rows.widened()).flatten(1)


def case_matrices(rows: Rows) -> Tensor:
    """Σ_s d rᵀ of every case: [N, g, o, i] with the bias column."""
    if rows.ids:
        n, size, ids = rows.d.shape[0], rows.matrix[2] - rows.bias, rows.expanded()
        offset = torch.arange(n, device=ids.device).unsqueeze(-1) * size
        sums = by_id(ids.clamp(min=0) + offset, visible(ids, rows.d), n * size)
        return with_bias(rows, sums.view(n, size, -1).mT.unsqueeze(1), rows.d.sum(1))
    # A bias column behind the sums would copy them: they are much larger than the rows.
    return case_gradients(homogeneous(rows).expand(len(rows.d), -1, -1, -1), rows.d)


@computes(declared.SQUARE)
def square(rows: Rows) -> Tensor:
    """Valid for one use only: the square of a sum over uses is not the sum of the squares."""
    rows = rows.widened()
    if rows.d.shape[1] == 1 and not rows.ids:
        d, x = rows.d.squeeze(1).square(), rows.expanded().squeeze(1).square()
        return with_bias(rows, d.permute(1, 2, 0) @ x.transpose(0, 1), d.sum(0))
    chunk = squared_sums_of_ids if rows.ids else squared_sums
    held = rows.d.shape[1] ** 2 if rows.ids else math.prod(rows.matrix)
    step = max(1, CHUNK // max(1, held))
    weight = rows.d.new_zeros(rows.matrix[0], rows.matrix[1], rows.matrix[2] - rows.bias)
    for x, d in zip(torch.split(rows.expanded(), step), torch.split(rows.d, step), strict=True):
        weight = weight + chunk(x, d, weight.shape[2])
    return with_bias(rows, weight, rows.d.sum(1).square().sum(0))


@computes(declared.OUTER)
def outer(rows: Rows) -> Tensor:
    """Valid for one use a case only, as `square`."""
    return of_vectors(per_case(rows))


def of_vectors(vectors: Tensor) -> Tensor:
    """Σ v vᵀ: [n, p] -> [p, p]."""
    return gram(vectors.unsqueeze(-2)).squeeze(0)


def squared_sums(x: Tensor, d: Tensor, inputs: int) -> Tensor:
    return case_gradients(x, d).square().sum(0)


def squared_sums_of_ids(ids: Tensor, d: Tensor, inputs: int) -> Tensor:
    """Σ_n (Σ_{s of id} d)² = Σ_{n, s, t of one id} d_s d_t: as many sums as rows, for a vocabulary of any size."""
    d = visible(ids, d)
    same = (ids.unsqueeze(1) == ids.unsqueeze(2)).to(d.dtype)
    return by_id(ids, d * (same @ d), inputs).mT.unsqueeze(0)


def case_gradients(x: Tensor, d: Tensor) -> Tensor:
    """Σ_s d xᵀ for every case and group: [N, S, g, i] and [N, S, g, o] -> [N, g, o, i]."""
    if 1 in (x.shape[-1], d.shape[-1]):  # one matrix product for every number is slow
        return (d.unsqueeze(-1) * x.unsqueeze(-2)).sum(1)
    return torch.einsum("nsgo,nsgi->ngoi", d, x)


def with_bias(rows: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """The weight [..., g, o, i] with the bias [..., g, o] as its last column, if there is one."""
    return torch.cat([weight, bias.unsqueeze(-1)], dim=-1) if rows.bias else weight


# --- integer rows ---------------------------------------------------------------------------------------------------


def visible(ids: Tensor, d: Tensor) -> Tensor:
    """The gradient rows [N, S, o] of integer rows, which have one group; zero where the id is -1."""
    return torch.where((ids >= 0).unsqueeze(-1), d.squeeze(2), 0)


def by_id(ids: Tensor, values: Tensor, size: int) -> Tensor:
    """Sums of the values of each id: ids of any shape, values [*ids.shape, k] -> [size, k]. Values at -1 are zero."""
    values = values.flatten(0, -2)
    return values.new_zeros(size, values.shape[-1]).index_add(0, ids.clamp(min=0).flatten(), values)


# --- one row per case: the statistics of `kron_reduce` ----------------------------------------------------------------
# The gradient of case n is Σ_s d_ns r_nsᵀ over its S positions. K-FAC has two settings for such weights (Eschenhagen et
# al. 2023, "Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures", section 3). *Expand*
# treats every position as a case of its own, as the statistics above do. *Reduce* replaces the positions of a case by
# one pair:
#
#     r_n = Σ_s r_ns / S      d_n = Σ_s d_ns      A = Σ r_n r_nᵀ / M      G = Σ d_n d_nᵀ / M      F = c A ⊗ G
#
# with M pairs and c = M / N. The sums are
#
#     count/reduced  M            A/reduced  Σ r_n r_nᵀ            G/reduced  Σ d_n d_nᵀ
#
# The product d_n r_nᵀ is the gradient of the case if its rows, or its gradient rows, are the same at all positions. F
# is exact for deep linear networks with a squared error that end in the mean, or in a multiple of the sum, over
# positions.
#
# - The bias column of r_n is 1.
# - With a mask, S is the number of real positions of the case. A case without real positions is no pair.
# - Every use of a weight has its own pairs. With T uses of N cases c is T, which treats the uses as independent.
# - In a transposed use the gradient rows are on the side of A. A gets their mean, and G the sum of the inputs. The
#   product of the two is the same.


@computes(declared.COUNT_REDUCED)
def count_reduced(rows: Rows) -> Tensor:
    rows = rows.widened()
    if rows.mask is not None:
        return rows.mask.any(1).sum().to(rows.d.dtype)
    cases, positions = rows.d.shape[:2]
    return rows.d.new_full((), cases * min(1, positions))


@computes(declared.A_REDUCED)
def A_reduced(rows: Rows) -> Tensor:
    """Raises RegistrationError for rows that have no mean over positions."""
    rows = rows.widened()
    if rows.ids or rows.routed:
        raise RegistrationError("'kron_reduce' takes the mean of rows over positions, and ids have none: take 'kron'")
    positions = max(1, rows.x.shape[1]) if rows.mask is None else rows.mask.sum(1).clamp(min=1).view(-1, 1, 1, 1)
    mean, mask = rows.x.sum(1, keepdim=True) / positions, None if rows.mask is None else rows.mask.any(1, keepdim=True)
    return gram(homogeneous(Rows(mean, rows.d, rows.bias, rows.matrix, mask))) * rows.repeats


@computes(declared.G_REDUCED)
def G_reduced(rows: Rows) -> Tensor:
    return gram(rows.widened().d.sum(1, keepdim=True))


# --- pairs of consecutive uses: the statistics of series --------------------------------------------------------------
#
#     A1  Σ r_t+1 r_tᵀ        G1  Σ d_t+1 d_tᵀ        pairs  Σ 1
#
# are sums over all cases, positions and pairs of uses one step apart, the later use on the left. They are divided by
# the `count` of all rows. They are thus moments of sequences with zeros before and behind: a use without a neighbor has
# a neighbor of zeros. So [[A, A1ᵀ], [A1, A]] has no negative eigenvalues in any batch. A sequence has one pair less
# than rows, so the mean length of the sequences is count / (count - pairs).


@computes(declared.A1)
def A1(later: Rows, earlier: Rows) -> Tensor:
    if later.x.shape[0] == earlier.x.shape[0] == 1:  # without a mask, or of one case
        return cross(homogeneous(later), homogeneous(earlier)) * later.repeats
    return cross(*(homogeneous(rows).expand(rows.d.shape[0], -1, -1, -1) for rows in (later, earlier)))


@computes(declared.G1)
def G1(later: Rows, earlier: Rows) -> Tensor:
    return cross(later.d, earlier.d)


@computes(declared.PAIRS)
def pairs(later: Rows, earlier: Rows) -> Tensor:
    if later.mask is None or earlier.mask is None:
        return later.d.new_full((), later.d.shape[0] * later.d.shape[1])
    return (later.mask & earlier.mask).sum().to(later.d.dtype)


def cross(later: Tensor, earlier: Tensor) -> Tensor:
    """Σ later earlierᵀ in every group: [N, S, g, d] twice -> [g, d, d]."""
    if later.shape[2] == 1:  # `mm` is as fast as can be
        return (later.flatten(0, 2).mT @ earlier.flatten(0, 2)).unsqueeze(0)
    return torch.einsum("nsgi,nsgj->gij", later, earlier)


# --- the sums of a batch ----------------------------------------------------------------------------------------------


def with_twins(registration: Registration, statistics: Iterable[Statistic]) -> list[Statistic]:
    """The statistics of a registration, and those that its transposed uses sum apart."""
    statistics = list(statistics)
    if not any(use.transposed for use in registration.uses):
        return statistics
    return statistics + [statistic.twin for statistic in statistics if statistic.twin is not None]


def without_twins(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums over all uses, once all of them are of one loss."""
    total = {name: value for name, value in sums.items() if not named(name).transposed}
    for name, value in sums.items():
        if (plain := named(name).kind_of) is not None and named(name).transposed:
            total[plain.name] = total[plain.name] + value
    return total


@dataclass
class Moments:
    """Statistics of one batch, summed over its cases.

    Attributes:
        statistics: by the parameters of the registrations; of a generic one {"gradient": the flat gradient of the sum
            of the losses}, or sums over cases of its squares.
        cases: the number of terms in the mean of the loss; the statistics will be divided by it.
        gradients: of the parameters by name, summed over sources, if they were requested.
        frozen: the parameters that were frozen. Registrations that have no others have no statistics.
        only: the registrations whose statistics are due; None: all.
        used: the registrations that the call uses; None: all. Others have no statistics.
        multiplied: the number of cases that gradients of a mean were multiplied by; None: they were those of a sum.
    """

    statistics: dict[Key, dict[str, Tensor]]
    cases: int | Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    only: frozenset[Key] | None = None
    used: frozenset[Key] | None = None
    multiplied: int | Tensor | None = None


@dataclass
class PendingMoments:
    """The statistics that the user's own backward will leave in the `.grad` of probes.

    Attributes:
        probes: of every registration, by the name of the statistic.
        generic: views of the generic parameters, which hold the gradient of this forward alone.
        cases: the number of cases of this forward.
        frozen, only, used: see `Moments`.
        backwards: how often a backward reached the probes of a registration.
    """

    probes: list[dict[str, Tensor]]
    registrations: tuple[Registration, ...]
    generic: Mapping[str, Tensor]
    cases: int | Tensor
    frozen: frozenset[str] = frozenset()
    only: frozenset[Key] | None = None
    used: frozenset[Key] | None = None
    backwards: Counter[Key] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for registration, probes in zip(self.registrations, self.probes, strict=True):
            for probe in list(probes.values())[:1]:
                if probe.requires_grad:
                    probe.register_hook(partial(count_backward, self.backwards, registration.parameters))

    @property
    def filled(self) -> bool:
        """Whether a backward has left anything; also where there is nothing to leave."""
        receivers = [*(probe for probes in self.probes for probe in probes.values()), *self.generic.values()]
        return not receivers or any(receiver.grad is not None for receiver in receivers)

    def empty(self) -> None:
        """Forget the backwards so far. Another one may come where the user kept the graph."""
        for receiver in (*(probe for probes in self.probes for probe in probes.values()), *self.generic.values()):
            receiver.grad = None
        self.backwards.clear()

    def check_backwards(self) -> None:
        """Raises RuntimeError after a second backward of this forward, because squares of gradients do not add up."""
        if twice := [", ".join(key) for key, times in self.backwards.items() if times > 1]:
            raise RuntimeError(
                "the empirical Fisher is recorded in one backward of a forward, and there were "
                f"{max(self.backwards.values())} of this one. They reached {'; '.join(twice)}.\nAdd the losses up and "
                'call backward once, or record in a pass of its own: estimation_mode="gradients".'
            )

    def moments(self, reduction: str = "mean", cases: int | Tensor | None = None, loss_scale: float = 1.0) -> Moments:
        """The recorded statistics, for the gradient of the sum over cases. To be called once, as the recorded tensors
        are scaled in place. Raises RuntimeError as `check_backwards`.

        reduction: of the user's loss; the gradient of a mean is N times smaller, so second moments are multiplied by
            N². cases: the N of the user's mean, if it contains more cases than this forward. loss_scale: the factor
            of the loss in the backward, as that of a GradScaler.
        """
        self.check_backwards()
        multiplied = None if reduction != "mean" else self.cases if cases is None else cases
        scale: Any = 1.0 if multiplied is None else multiplied
        scale = scale if loss_scale == 1.0 else scale / loss_scale
        statistics: dict[Key, dict[str, Tensor]] = {}
        for registration, probes in zip(self.registrations, self.probes, strict=True):
            if registration.generic:
                gradients = {name: self.gradient(name) for name in registration.owners}
                pieces = list(split(gradients, [registration]).values())
                statistics[registration.parameters] = {"gradient": flat(pieces) * scale}
                continue
            sums = {
                name: probe.grad if probe.grad is not None else torch.zeros_like(probe)
                for name, probe in probes.items()
            }
            statistics[registration.parameters] = without_twins(of_loss_times(sums, scale))
        return Moments(
            statistics, self.cases, frozen=self.frozen, only=self.only, used=self.used, multiplied=multiplied
        )

    def gradient(self, name: str) -> Tensor:
        view = self.generic[name]
        return torch.zeros_like(view) if view.grad is None else dense(view.grad)


def count_backward(backwards: Counter[Key], key: Key, gradient: Tensor | None) -> None:
    """gradient: None if the loss leaves the registration out."""
    backwards[key] += gradient is not None


def flat(gradients: Sequence[Tensor]) -> Tensor:
    """The gradients as one vector, in float32 at least, as all statistics are."""
    vector = torch.cat([gradient.reshape(-1) for gradient in gradients])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def of_loss_times(sums: Mapping[str, Tensor], scale: Any) -> dict[str, Tensor]:
    """The statistics of one block of a loss that is multiplied with a number. They are written into."""
    return {name: value.mul_(scale**power) if (power := named(name).power) else value for name, value in sums.items()}


def additive(approximation: Approximation, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moments of one block in a form that adds up over micro-batches and processes: per-case gradients become the
    statistic of the factor F. Gradients of all cases together stay, because they are squared when the batch is
    complete.
    """
    sums = {named(name).whole.name: moment for name, moment in moments.items() if name != PER_CASE.name}
    if SQUARE.name in sums:
        sums[SQUARE.name] = sums[SQUARE.name].flatten()  # as it is when it comes from per-case gradients
    if PER_CASE.name in moments:
        p, side = moments[PER_CASE.name].flatten(0, -2), approximation.left
        with without_autocast(p.device):
            sums[side.statistic.name] = p.square().sum(0) if side.diagonal else of_vectors(p)
    return sums
