"""Groups: Fisher blocks of one matrix shape and one kind of sides, stacked, so that one operation serves them all.

A block acts on the matrix W [g, o, i] of its parameters (`passes.matrix`), group by group, as

    F^p W    = c^p  G_λ^p W A_λ^p                 A_λ = A + λ_A I,  G_λ = G + λ_G I
    L W      = c^½  L_G W L_Aᵀ                    Lᵀ W = c^½ L_Gᵀ W L_A
    L⁻¹ W    = c^-½ L_G⁻¹ W L_A⁻ᵀ                 L⁻ᵀ W = c^-½ L_G⁻ᵀ W L_A⁻¹

All of these are X_G W X_Aᵀ with roots X of the damped sides (`linalg.matrices.dense_roots`). A block that is not a
Kronecker product has one side F, which acts on W as one column [g·o·i]. The factors A, G and F and the positions c are
averages over batches.

λ is split into λ_A = π √(λ/c) and λ_G = √(λ/c) / π with the π of every group, so that c λ_A λ_G = λ (Martens & Grosse
2015, section 6.3); F is damped by λ. Powers other than 1 are those of the last `update_inverses`; the power 1 uses the
present factors (sections 4.2 and 6.3 there). The factors of all groups are decomposed together, in one batch for every
size of matrix (`Inverter`).

**Normalization.** Gradient rows are gradients of the loss *summed* over cases. Let N be the number of cases, and M the
number of rows over all uses of a registration: M = N for a plain linear layer, N times the output pixels for a
convolution, N times the uses for a shared layer. The statistics (`kfac_fx.passes.approximations`) become

    A = Σ r rᵀ / M,   G = Σ d dᵀ / M,   positions c = M / N,   and the block is F = c A ⊗ G;
    F = Σ_n p_n p_nᵀ / N (full) or its diagonal, from per-case gradients p_n;
    F = g gᵀ / N (full) or its diagonal for generic parameters, from the gradient g of the summed loss.

Rows are counted and not computed from sizes, so padding, strides and dilation need no care. Series of uses also have A1
and G1, from products of consecutive rows, divided by M, and the number of such pairs, divided by N as positions are
(`kfac_fx.recording.statistics`). For "kron_sua" and its variants the rows of A are the pixels of the input with a 1
appended, and A is their mean (`fisher.block_diagonal`). For "kron_reduce" M is the number of pairs of a mean row
and a summed gradient row, one per case and use (`kfac_fx.recording.statistics`).

Every factor is a running average of these values over batches with weights 1, decay, decay², ... It has no bias towards
zero: after the first update it equals the value of the first batch. A batch without rows lowers c only.

Sources: Martens & Grosse 2015, sections 3 and 5; Grosse & Martens 2016, equation 23, whose A and G are here divided by
the positions; Martens, Ba & Johnson 2018, for several uses.

**Eigensystems**: F = Q Λ Qᵀ of the blocks of one group, and the gradients of cases in this basis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import A_COUNT, NOT_NEGATIVE, SYMMETRIC, Values
from kfac_fx.linalg.matrices import (
    HERE,
    HostCopy,
    Place,
    Root,
    all_true,
    are_finite,
    copy_if_,
    damp,
    dense_roots,
    diagonal_root,
    eigh_of_blocks,
    exponent,
    full_precision,
    is_in_blocks,
    mean_eigenvalue,
    multiply_both,
    multiply_left,
    multiply_right,
    pi_correction,
    renewed_eigh,
    rescued_roots,
    unsqueeze_like,
    zero_unless_,
)
from kfac_fx.linalg.vectors import Tensors, Vector, VectorForm
from kfac_fx.passes.approximations import PRODUCT_OF_SIDES, Approximation, Side, blocks_of
from kfac_fx.passes.errors import FactorNotReady, NotRegisteredError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import AlikeForms, Shape, stacked
from kfac_fx.passes.torch_private import StorageWeakRef, foreach_copy_
from kfac_fx.recording.case_gradients import Cases
from kfac_fx.recording.statistics import Key

ALL_BLOCKS = slice(None)
WORTH_DECOMPOSING_ALONE = 256  # width, from which a CPU gains nothing from a batch, which takes more memory
PART_OF_MEAN = 0.003  # of the mean eigenvalue of a side, which damps it where a rule with bases has no other damping
ValueT = TypeVar("ValueT")
Roots = tuple[Mapping[Root, Tensor], Tensor]  # of one side: [L·groups, d, d] by name, and which are valid [L·groups]

# --- stacks of factors ------------------------------------------------------------------------------------------------


@dataclass
class Stack:
    """One factor of L blocks: moment [L, *shape] and total_weight [L], whose quotient is the average."""

    moment: Tensor
    total_weight: Tensor

    @staticmethod
    def zeros(blocks: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Stack:
        return Stack(
            moment=torch.zeros(blocks, *shape, dtype=dtype, device=device),
            total_weight=torch.zeros(blocks, dtype=dtype, device=device),
        )

    @property
    def per_case(self) -> bool:
        """Whether it is a number, and a mean over cases; other factors are means over rows."""
        return self.moment.dim() == 1

    @property
    def value(self) -> Tensor:
        """The averages [L, *shape]; NaN before the first accepted update of a block."""
        return self.moment / unsqueeze_like(self.total_weight, self.moment)

    def __getitem__(self, members: slice) -> Stack:
        """Views of some of the blocks."""
        return Stack(self.moment[members], self.total_weight[members])

    def update(
        self, batch: Tensor, accepted: Tensor, decay: float | Tensor, weight: float | Tensor, anew: Tensor | None = None
    ) -> None:
        """moment <- decay moment + weight batch, for the accepted blocks [L].

        batch: overwritten. decay, weight: of all blocks, or [L]. anew: [L], blocks that drop the past.
        """
        if not isinstance(decay, Tensor) and not isinstance(weight, Tensor) and all_true(accepted):
            if anew is not None and all_true(anew):
                decay, anew = 0.0, None
            if anew is None or not anew.any():
                self.moment.mul_(decay).add_(batch, alpha=weight)
                self.total_weight.mul_(decay).add_(weight)
                return
        decays = decay if isinstance(decay, Tensor) else torch.full_like(self.total_weight, decay)
        decays = torch.where(accepted, decays if anew is None else torch.where(anew, 0, decays), 1)
        added = zero_unless_(unsqueeze_like(accepted, batch), batch)
        self.moment.mul_(unsqueeze_like(decays, self.moment))
        self.total_weight.mul_(decays)
        if isinstance(weight, Tensor):
            self.moment.add_(added * unsqueeze_like(weight, added))
            self.total_weight.add_(accepted * weight)
        else:
            self.moment.add_(added, alpha=weight)
            self.total_weight.add_(accepted, alpha=weight)


HOW_TO_UPDATE = (
    "call estimator.update_covariances(inputs) first, or estimator.fold() if batches were recorded with fold=False."
)


@dataclass(frozen=True)
class Factor:
    """The factor of one block: a view, so writing in place to `moment` or `total_weight` changes the stack."""

    name: str
    owner: str  # the registration, for errors
    stack: Stack
    index: int

    @property
    def moment(self) -> Tensor:
        return self.stack.moment[self.index]

    @property
    def total_weight(self) -> Tensor:
        return self.stack.total_weight[self.index]

    @property
    def value(self) -> Tensor:
        """The average; waits for the device.

        Raises FactorNotReady before the first update, NotRegisteredError if another process keeps it.
        """
        if self.moment.is_meta:
            raise NotRegisteredError(kept_elsewhere(self.owner))
        if not self.total_weight.item():
            raise FactorNotReady(f"factor {self.name} of {self.owner} read before its first update: {HOW_TO_UPDATE}")
        return self.moment / self.total_weight


class ByBlock(dict[Key, ValueT]):
    """Values by the names of the parameters of their block, in the order of the registrations."""

    def __missing__(self, key: object) -> ValueT:
        """Raises NotRegisteredError, a KeyError, with the keys that may have been meant."""
        names = {key} if isinstance(key, str) else set(key) if isinstance(key, tuple) else set()
        meant = [block for block in self if names & {*block, *(name.rpartition(".")[0] for name in block)}]
        raise NotRegisteredError(
            f"there is no block {key!r}: a key is the tuple of all parameters of a block, in their order, as in\n"
            + "\n".join(f"  {block!r}" for block in (meant or list(self))[:8])
        )


class Factors(dict[str, Factor]):
    """The factors of one block by name."""

    def __missing__(self, name: object) -> Factor:
        """Raises NotRegisteredError, a KeyError, with the names that there are."""
        raise NotRegisteredError(f"this block has no factor {name!r}, but {', '.join(map(repr, self))}")


def kept_elsewhere(registration: str, process: int | None = None) -> str:
    which = "another process" if process is None else f"process {process}"
    return (
        f"the factors and inverses of {registration} are kept by {which} of the group: read them there, or write "
        "KFAC(..., placement='replicated'), which keeps all of them in every process."
    )


def batch_values(approximation: Approximation, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
    """The factors of one batch for a stack of blocks, from sums [L, ...]: the division of the module's docstring."""
    left = approximation.left
    if approximation.kronecker:
        rows = sums["count"].clamp(min=1)  # without rows the sums are zero, and the update is not accepted
        of_sides = {side.factor: sums[side.statistic.whole.name] for side in approximation.sides}
        means = {name: total / unsqueeze_like(rows, total) for name, total in of_sides.items()}
        return {**means, "positions": sums["count"] / cases}
    if "gradient" in sums:
        g = sums["gradient"]  # [L, p], or [L, k, p] of k cotangents
        g = g.unsqueeze(1) if g.dim() == 2 else g
        return {left.factor: (g.square().sum(1) if left.diagonal else g.mT @ g) / cases}
    return {left.factor: sums[left.statistic.name] / cases}


# --- groups -----------------------------------------------------------------------------------------------------------


class Failures(NamedTuple):
    """The numbers of failed decompositions, after which blocks kept their inverse, and of updates that were skipped."""

    decompositions: int
    updates: int


@blocks_of(PRODUCT_OF_SIDES)
class BlockGroup:
    """L blocks whose matrices are [g, o, i]. Every tensor has a leading dimension of blocks.

    Attributes:
        structure: the approximation.
        left, right: the sides of the outputs and of the inputs; right is None if the blocks are not Kronecker products.
        sides: the sides, or the parts that are decomposed in place of a side.
        decomposed: the sides that `Inverter` decomposes.
        factors: the stacks, by name.
        skipped: the number of skipped updates of every block, [L].
        updated: whether there are factors.
        roots: the operators of every root that is kept.
        failed: the number of failed decompositions of every block, [L].
        inverted: whether there are roots.
        extras: tensors [L, ...] that an optimizer keeps with the blocks, by name.
        relative_damping: c of λ_A = c tr A / dim A, and of every other side, instead of λ; None: λ is split.
        bases_as: the kind of device as of which an optimizer keeps the bases of wide sides; None: that of the group.
        owner: the process that keeps the factors; None: every process.
        here: whether this process keeps them. Otherwise they are on the meta device, without memory.
        divided: whether a process that keeps them has a part of the entries (`kfac_fx.fisher.placement`).
    """

    owner: int | None = None
    here = True
    divided = False
    relative_damping: float | None = None
    bases_as: str | None = None

    def __init__(
        self,
        registrations: Sequence[Registration],
        forms: Sequence[VectorForm],
        *,
        roots: Sequence[Root],
        damping: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.registrations, self.forms = tuple(registrations), tuple(forms)
        self.alike = AlikeForms.of(forms)
        self.shape = forms[0].shape
        self.structure = registrations[0].structure
        self.left, self.right = self.structure.left, self.structure.right
        self.sides = [part for side in self.structure.sides for part in self.parts(side)]
        self.decomposed = [side for side in self.sides if not side.diagonal]
        self.damping, self.dtype, self.device = damping, dtype, device
        self.factors = {
            side.factor: Stack.zeros(len(self), registrations[0].factor_shape(side, self.shape), dtype, device)
            for side in self.structure.sides
        }
        if self.right is not None:
            self.factors["positions"] = Stack.zeros(len(self), (), dtype, device)
        self.skipped = torch.zeros(len(self), dtype=torch.int64, device=device)
        self.updated = False
        # Zero until the first decomposition: products with the roots of a block without an inverse are zero.
        self.roots = {
            root: [torch.zeros_like(self.as_operator(side, self.factors[side.factor].moment)) for side in self.sides]
            for root in roots
        }
        self.extras: dict[str, Tensor] = {}
        self.failed = torch.zeros(len(self), dtype=torch.int64, device=device)
        self.inverted = False

    def __len__(self) -> int:
        return len(self.forms)

    @classmethod
    def alike_in(cls, registration: Registration) -> Hashable:
        """The properties that all registrations of a group share besides matrix and sides."""
        return registration.kernel

    # --- blocks of which other processes keep parts (`kfac_fx.fisher.placement`) --------------------------------------

    @property
    def whole_shape(self) -> tuple[int, int, int]:
        """[g, o, i] of whole blocks."""
        return self.shape

    def check_whole(self) -> None:
        """Raises NotRegisteredError if this process keeps a part."""

    def agreed(self, flags: Tensor) -> Tensor:
        """Whether flags of blocks are true of all their parts."""
        return flags

    def total(self, values: Tensor) -> Tensor:
        """The sums over all parts of blocks, from those over the part that is here."""
        return values

    symmetric_roots = True  # whether powers of the sides are operators of roots

    def declared(self) -> dict[str, Values]:
        """The values that tensors of a block may have in a state, by name; all finite numbers for others."""
        weights = {f"{name}/total_weight": NOT_NEGATIVE for name in self.factors}
        numbers = {f"{name}/moment": NOT_NEGATIVE for name, stack in self.factors.items() if stack.per_case}
        moments = {f"{s.factor}/moment": NOT_NEGATIVE if s.diagonal else SYMMETRIC for s in self.structure.sides}
        powers = [root for root in self.roots if not isinstance(root, str) and self.symmetric_roots]
        roots = {f"{s}/{root}": NOT_NEGATIVE if s.diagonal else SYMMETRIC for root in powers for s in self.sides}
        return {"skipped": A_COUNT, "failed": A_COUNT, **weights, **numbers, **moments, **roots}

    def in_state(self, entry: Tensor) -> Tensor:
        """A tensor of one block as the state has it, sharing memory: a diagonal F in the shape of the matrix."""
        diagonal = self.right is None and self.left.diagonal and entry.dim()
        return entry.view(self.shape) if diagonal else entry

    # --- sides ------------------------------------------------------------------------------------------------------

    def parts(self, side: Side) -> tuple[Side, ...]:
        """The parts that are decomposed in place of a side."""
        return (side,)

    def size(self, side: Side) -> int:
        """The width d of the matrices [d, d] of a side."""
        return side.size(self.shape)

    def as_operator(self, side: Side, factor: Tensor) -> Tensor:
        """The factor as [L, groups, d, d], or as [L, groups, d] if diagonal; F has one group of all parameters."""
        if side.factor != "F":
            return factor
        return factor.flatten(1).unsqueeze(1) if side.diagonal else factor.unsqueeze(1)

    # --- vectors ----------------------------------------------------------------------------------------------------

    def pack(self, vector: Vector, members: slice = ALL_BLOCKS) -> Tensor:
        """From tensors of the shapes of the parameters to [L, g, o, i] in the precision of the factors."""
        if self.alike is not None:
            return self.alike[members].pack(vector).to(self.dtype)
        return stacked([form.pack(vector) for form in self.forms[members]]).to(self.dtype)

    def by_name(self, matrices: Tensor, members: slice = ALL_BLOCKS) -> dict[str, Tensor]:
        """The parameters in matrices [L, g, o, i], in the precision of these; views where the layouts have views."""
        if self.alike is not None:
            return self.alike[members].unpack(matrices)
        pairs = zip(self.forms[members], matrices.unbind(), strict=True)
        return {name: tensor for form, matrix in pairs for name, tensor in form.unpack(matrix).items()}

    def unpack(self, matrices: Tensor, vector: Vector, members: slice = ALL_BLOCKS) -> dict[str, Tensor]:
        """The inverse of `pack`, in the precision of `vector`."""
        unpacked = self.by_name(matrices, members)
        dtypes = {name: vector[name].dtype for name in unpacked}
        return {n: tensor if tensor.dtype is dtypes[n] else tensor.to(dtypes[n]) for n, tensor in unpacked.items()}

    # --- factors ----------------------------------------------------------------------------------------------------

    def update(
        self,
        sums: Sequence[Mapping[str, Tensor]],
        cases: int | Tensor,
        *,
        decay: float,
        weight: float = 1.0,
        by_rows: bool = False,
        accept: Tensor | None = None,
        members: slice = ALL_BLOCKS,
    ) -> None:
        """Average the sums of one batch into the factors of some of the blocks, without waiting for the device.

        Sums that are not finite are skipped and counted.

        Args:
            sums: of each block (`additive`), over `cases` cases.
            weight: of the batch.
            by_rows: a mean over rows gets this weight for every row of a case, so that batches with other numbers of
                rows in a case make one mean over all rows.
            accept: a 0-d bool tensor; if it is False, nothing changes.
        """
        total = {name: stacked([block[name] for block in sums]).to(self.dtype) for name in sums[0]}
        batch = self.batch_values(total, cases)
        totals = [value.unsqueeze(-1).flatten(1).sum(1) for value in batch.values()]  # finite only if all numbers are
        finite = self.agreed(torch.stack(totals).isfinite().all(0))
        accepted = finite if accept is None else finite & accept
        averaged, anew = accepted, None
        if "count" in total:  # a batch without rows has no mean over rows; before the first rows the mean is zero
            anew = self.factors["positions"][members].moment * decay == 0
            averaged = accepted & ((total["count"] > 0) | anew)
        for name, stack in self.factors.items():
            part = stack[members]
            value = batch[name].view(part.moment.shape)
            if stack.per_case:
                part.update(value, accepted, decay, weight)
            else:
                of_rows = weight * self.rows_of_a_case(name, total, cases) if by_rows else weight
                part.update(value, averaged, decay, of_rows, anew)
        if not all_true(finite):
            self.skipped[members] += ~finite
        self.updated = True

    def batch_values(self, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
        """The factors of one batch, from sums [L, ...] of some of the blocks."""
        return batch_values(self.structure, sums, cases)

    def rows_of_a_case(self, factor: str, sums: Mapping[str, Tensor], cases: int | Tensor) -> float | Tensor:
        """The number of rows of a case that a factor is the mean over, [L], and 1 if there are none; 1 for means over
        cases."""
        if "count" not in sums:
            return 1.0
        return torch.where(sums["count"] > 0, sums["count"] / cases, 1)

    def value(self, side: Side) -> Tensor:
        return self.as_operator(side, self.factors[side.factor].value)

    def mean_eigenvalue(self, side: Side) -> Tensor:
        """tr C / dim C of every matrix, [L, groups], without a copy of the factor."""
        stack = self.factors[side.factor]
        means = mean_eigenvalue(self.as_operator(side, stack.moment), side.diagonal)
        return means / stack.total_weight.unsqueeze(-1)

    def part_of_mean(self, mean: Tensor) -> Tensor:
        """λ_A = c tr A / dim A of a `relative_damping`, from mean eigenvalues; 1 where that underflows, as of zeros.

        The bases of a rule that has λ are in such units, too, and these cancel.
        """
        part = (PART_OF_MEAN if self.relative_damping is None else self.relative_damping) * mean
        return torch.where(part >= torch.finfo(part.dtype).tiny, part, 1)

    def positions(self) -> Tensor:
        """c of every block, [L]. It is 1 for blocks without rows, whose A and G are zero, so that F + λ I is λ I."""
        if self.right is None:
            return torch.ones(len(self), dtype=self.dtype, device=self.device)
        c = self.factors["positions"].value
        return torch.where(c == 0, 1, c)

    def split_damping(self) -> dict[Side, Tensor]:
        """The damping of every matrix of every side, [L, groups] each."""
        damping = self.damping.to(self.device, self.dtype)
        if self.relative_damping is not None:
            each = {side: self.part_of_mean(self.mean_eigenvalue(side)) for side in self.structure.sides}
            inputs_too = {} if self.right is None else dict.fromkeys(self.sides[1:], each[self.right])
            return {**inputs_too, self.left: each[self.left]}
        if self.right is None:
            return {self.left: damping.expand(len(self), 1)}
        inputs, outputs = (self.mean_eigenvalue(side) for side in (self.right, self.left))
        pi, root = pi_correction(inputs, outputs), (damping / self.positions()).sqrt().unsqueeze(-1)
        return {**dict.fromkeys(self.sides[1:], pi * root), self.left: root / pi}

    @property
    def cost(self) -> int:
        """Σ d³ over all matrices [d, d] that are decomposed: the operations, up to a constant."""
        operators = [(self.as_operator(side, self.factors[side.factor].moment), side) for side in self.decomposed]
        return sum(operator.numel() * self.size(side) for operator, side in operators)

    def check_updated(self) -> None:
        """Raises FactorNotReady before the first update, NotRegisteredError if another process keeps the factors."""
        if not self.updated:
            raise FactorNotReady(f"factors of {self.registrations[0]} read before their first update: {HOW_TO_UPDATE}")
        if not self.here:
            raise NotRegisteredError(kept_elsewhere(str(self.registrations[0]), self.owner))

    @property
    def separable(self) -> bool:
        """Whether Qᵀ turns outputs and inputs of W apart, with one operator each."""
        return self.right is not None

    @property
    def multiplies_whole(self) -> bool:
        """Whether products with W [g, o, i] take one matrix for every side. Zeros around both change nothing then."""
        return self.right is not None

    @property
    def multiplies_dense(self) -> bool:
        """Whether both of these matrices are dense."""
        return self.multiplies_whole and not any(side.diagonal for side in self.sides)

    def operands(self, root: Root) -> list[str]:
        """The names of the operators of a root."""
        return [str(side) for side in self.sides]

    @property
    def elements(self) -> int:
        """The number of elements of all factors, roots and extras."""
        tensors = {id(tensor): tensor for operators in self.roots.values() for tensor in operators}
        others = (*self.extras.values(), *(stack.moment for stack in self.factors.values()))
        return sum(tensor.numel() for tensor in (*tensors.values(), *others))

    def failures(self, members: slice = ALL_BLOCKS) -> Failures:
        """The failures of some of the blocks, as far as this process keeps them; waits for the device."""
        if not self.here:
            return Failures(0, 0)
        return Failures(int(self.failed[members].sum()), int(self.skipped[members].sum()))

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, matrix: Tensor, root: Root, transpose: bool = False, members: slice = ALL_BLOCKS) -> Tensor:
        """A root, or its transpose, times W [L, g, o, i] of some of the blocks. Raises as `operators`."""
        return self.applied(matrix, [operator[members] for operator in self.operators(root)], transpose)

    def applied(self, matrix: Tensor, operators: Sequence[Tensor], transpose: bool = False) -> Tensor:
        """X_G W X_Aᵀ, or X_Gᵀ W X_A, of one W [L, g, o, i] or of B of them, [B, L, g, o, i]."""
        left, *right = operators
        if matrix.dim() == 4 and self.multiplies_dense and not any(map(is_in_blocks, operators)):
            return multiply_both(left, matrix, right[0], transpose)
        rows = matrix if right else matrix.flatten(-3).unsqueeze(-1).unsqueeze(-3)
        rows = self.turn_outputs(rows, left.mT if transpose and not self.left.diagonal else left)
        if right:
            as_is = [transpose or side.diagonal for side in self.sides[1:]]
            rows = self.turn_inputs(rows, [x if plain else x.mT for x, plain in zip(right, as_is, strict=True)])
        return rows.reshape(matrix.shape)

    def turn_outputs(self, rows: Tensor, operator: Tensor) -> Tensor:
        """X W of one vector, or of B vectors, which are more columns for X."""
        if rows.dim() == 4:
            return self.multiply_outputs(rows, operator)
        columns = rows.movedim(0, -1)
        return self.multiply_outputs(columns.flatten(-2), operator).view(columns.shape).movedim(-1, 0)

    def turn_inputs(self, rows: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """W X of one vector, or of B vectors, which are more rows for X."""
        if rows.dim() == 4:
            return self.multiply_inputs(rows, operators)
        turned = self.multiply_inputs(rows.movedim(0, 2).flatten(2, 3), operators)
        return turned.view(*turned.shape[:2], len(rows), -1, turned.shape[-1]).movedim(2, 0)

    def multiply_outputs(self, rows: Tensor, operator: Tensor) -> Tensor:
        """X W: [L, g, o, i] -> the same."""
        return multiply_left(operator, rows, self.left.diagonal)

    def multiply_inputs(self, rows: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """W X with the X of all parts of the input side: [L, g, o, i] -> the same."""
        (operator,), (_, side) = operators, self.sides
        return multiply_right(rows, operator, side.diagonal)

    def operators(self, root: Root) -> list[Tensor]:
        """The roots of all sides; the left one contains c.

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
        """The operators with c^p in the left one."""
        left, *right = operators
        return [left * unsqueeze_like(self.positions() ** exponent(root), left), *right]

    def dense(self, index: int) -> Tensor:
        """The undamped block c G ⊗ A as one matrix [g·o·i, g·o·i], in the order of the flattened [g, o, i]."""
        self.check_updated()
        values = [(side, self.value(side)[index]) for side in self.sides]
        left, *right = (torch.diag_embed(value) if side.diagonal else value for side, value in values)
        left = self.joined_outputs(left)
        a = self.joined(right) if right else torch.ones_like(left[:, :1, :1])
        same_group = torch.eye(left.shape[0], dtype=self.dtype, device=self.device)
        block = torch.einsum("gop,gij,gh->goihpj", left, a, same_group).flatten(0, 2).flatten(1)
        return block * self.positions()[index]

    def joined_outputs(self, operator: Tensor) -> Tensor:
        """The output side of one block, dense: [groups, o, o]."""
        return operator

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The input side of one block from its parts, dense: [groups, i, i]."""
        (a,) = parts
        return a

    # --- eigenvectors: F = Q Λ Qᵀ, undamped -------------------------------------------------------------------------

    def eigensystem(self, place: Place = HERE) -> tuple[Tensor, list[Tensor]]:
        """(Λ of all blocks [L, g, o, i], the operators that Q consists of).

        Λ is NaN for blocks whose factors are not finite. Raises FactorNotReady before the first update.
        """
        values, vectors = self.side_eigensystems(place)
        if self.right is None:
            return values[0].view(len(self), *self.shape), vectors
        left = values[0] * unsqueeze_like(self.positions(), values[0])
        return left.unsqueeze(-1) * self.input_eigenvalues(values[1:]).unsqueeze(-2), vectors

    def side_eigensystems(
        self, place: Place = HERE, last: Sequence[Tensor] | None = None, widths: Mapping[Side, int] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Eigenvalues and eigenvectors of every side, as of `side_eigensystem`. last: the eigenvectors of every side to
        iterate from. widths: of the diagonal blocks of dense sides that are decomposed; None: whole sides."""
        self.check_updated()
        with full_precision() if self.decomposed else nullcontext():
            systems = [
                self.side_eigensystem(side, place, None if last is None else last[n], (widths or {}).get(side))
                for n, side in enumerate(self.sides)
            ]
        return [values for values, _ in systems], [vectors for _, vectors in systems]

    def side_eigensystem(
        self, side: Side, place: Place = HERE, last: Tensor | None = None, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Eigenvalues [L, groups, d], none negative, and eigenvectors [L, groups, d, width], or ones if diagonal.

        last: the eigenvectors to iterate from, zero for blocks without any; None: decompose. width: of the diagonal
        blocks that are decomposed, which are kept as `linalg.matrices.blocks_of` takes them apart; None: whole sides.
        """
        value, width = self.value(side), width or self.size(side)
        if side.diagonal:
            return value.clamp(min=0), torch.ones_like(value)
        matrices = value.flatten(0, 1)
        if last is None or width < self.size(side):
            values, vectors = eigh_of_blocks(matrices, width, place)
        else:
            values, vectors = renewed_eigh(matrices, last.flatten(0, 1))
        return values.clamp(min=0).view(value.shape[:-1]), vectors.view(*value.shape[:-1], width)

    def input_eigenvalues(self, values: Sequence[Tensor]) -> Tensor:
        """The eigenvalues of the input side, [L, g, i], from those of its parts."""
        (a,) = values
        return a

    def to_eigenbasis(self, matrix: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """Qᵀ W of one W [L, g, o, i] or of B of them, [B, L, g, o, i]."""
        return self.applied(matrix, operators, transpose=True)

    def from_eigenbasis(self, matrix: Tensor, operators: Sequence[Tensor]) -> Tensor:
        """Q W. Every entry of Q is a product of one entry of each operator, so squared operators make Q squared."""
        return self.applied(matrix, operators)

    def operators_of(self, index: int, operators: Sequence[Tensor]) -> list[Tensor]:
        """The operators whose product is the Q of one block."""
        return [operator[index : index + 1] for operator in operators]

    def stack_operators(self, each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The inverse of `operators_of`, from all blocks."""
        return list(map(torch.cat, zip(*each, strict=True)))

    def without_factors(self, members: Sequence[int]) -> Self:
        """A group of some of the blocks that turns their vectors, and holds neither factors nor roots."""
        group = object.__new__(type(self))
        vars(group).update(vars(self))
        group.registrations = tuple(self.registrations[index] for index in members)
        group.forms = tuple(self.forms[index] for index in members)
        group.alike = self.alike if group.forms == self.forms else AlikeForms.of(group.forms)
        group.factors, group.roots, group.extras = {}, {}, {}
        return group

    # --- roots ------------------------------------------------------------------------------------------------------

    def store(self, decomposed: Mapping[Side, Roots], dampings: Mapping[Side, Tensor]) -> None:
        """Take new roots of the dense sides, and compute those of the diagonal sides.

        A block with an invalid root on any side keeps all its last valid roots and is counted.
        """
        valid = [side_valid.view(len(self), -1).all(1) for _, side_valid in decomposed.values()]
        new: dict[Root, list[Tensor]] = {}
        for root, last in self.roots.items():
            operators = [
                decomposed[side][0][root].view(like.shape) if side in decomposed
                else diagonal_root(self.value(side), dampings[side], root)
                for side, like in zip(self.sides, last, strict=True)
            ]  # fmt: skip
            new[root] = self.scaled(operators, root)
            valid += [are_finite(operator) for operator in new[root]]
        good = self.agreed(torch.stack(valid).all(0))
        for root, operators in new.items():
            for last_operator, operator in zip(self.roots[root], operators, strict=True):
                copy_if_(unsqueeze_like(good, operator), last_operator, operator)
        self.failed += ~good
        self.inverted = True


@dataclass(frozen=True)
class FixedMatrices:
    """The matrices of groups in memory that stays where it is, and views of the parameters in them.

    In small networks the host takes longer to make the views than to compute with their numbers.
    """

    matrices: list[Tensor]  # [L, g, o, i] of every group
    views: Tensors  # by the names of the registrations

    @staticmethod
    def of(groups: Sequence[BlockGroup], dtypes: Sequence[torch.dtype]) -> FixedMatrices | None:
        """None if the layout of a parameter has no views. dtypes: of the matrices of every group."""
        matrices = [
            torch.zeros(len(group), *group.shape, dtype=dtype, device=group.device)
            for group, dtype in zip(groups, dtypes, strict=True)
        ]
        views: Tensors = {}
        for group, matrix in zip(groups, matrices, strict=True):
            of_group = group.by_name(matrix)
            memory = StorageWeakRef(matrix.untyped_storage())
            if any(StorageWeakRef(view.untyped_storage()) != memory for view in of_group.values()):
                return None
            views |= of_group
        return FixedMatrices(matrices, views)

    def filled(self, tensors: Vector) -> list[Tensor]:
        """The matrices, after the tensors have been copied into them. Other names are ignored."""
        foreach_copy_([*self.views.values()], [tensors[name] for name in self.views])
        return self.matrices


class FailureWatch:
    """The failed matrices of a batch; deferred: known one call late, except at the first call, without waiting."""

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self.failed: HostCopy | None = None  # of the last call

    def known_failures(self, valid: Tensor) -> Tensor:
        """The indices of the matrices to decompose again now. valid: [m], of the present attempt."""
        if not self.deferred:
            return (~valid).nonzero().squeeze(-1)
        last, self.failed = self.failed, HostCopy(~valid)
        if last is None:
            return self.failed.wait().nonzero().squeeze(-1)
        return (last.value if last.arrived else torch.zeros_like(last.value)).nonzero().squeeze(-1)


class BatchKey(NamedTuple):
    """The properties that the matrices of a batch have in common."""

    size: int
    dtype: torch.dtype
    device: torch.device
    alone: tuple[int, Side] | None  # the only side in the batch, by the place of its group


class Inverter:
    """Updates the roots of the damped factors of all groups. deferred: see `FailureWatch`; None: except on a CPU.

    A failed decomposition is repeated with more damping and then in float64. If a block still fails, it keeps its last
    valid inverse. The host would have to wait for the device to learn of a failure. Except on a CPU, it therefore waits
    only at the first update, when there is no earlier inverse. Later it learns of a failure at the next update and
    repeats the decomposition then.
    """

    def __init__(self, groups: Sequence[BlockGroup], roots: Sequence[Root], deferred: bool | None = None) -> None:
        self.groups, self.roots = groups, roots
        self.batches: defaultdict[BatchKey, list[tuple[int, Side]]] = defaultdict(list)
        for g, group in enumerate(groups):
            for side in group.decomposed:
                alone = group.device.type == "cpu" and group.size(side) >= WORTH_DECOMPOSING_ALONE
                key = BatchKey(group.size(side), group.dtype, group.device, (g, side) if alone else None)
                self.batches[key].append((g, side))
        self.watches = {
            key: FailureWatch(key.device.type != "cpu" if deferred is None else deferred) for key in self.batches
        }

    @torch.no_grad()
    def update(self) -> None:
        if not self.roots:
            return
        with full_precision():
            dampings = [group.split_damping() for group in self.groups]
            decomposed: list[dict[Side, Roots]] = [{} for _ in self.groups]
            for g, group in enumerate(self.groups):
                if not group.decomposed:
                    group.store({}, dampings[g])
            for key, members in self.batches.items():
                stacks = [self.groups[g].value(side).flatten(0, 1) for g, side in members]
                sizes, matrices = [len(stack) for stack in stacks], torch.cat(stacks) if len(stacks) > 1 else stacks[0]
                del stacks
                roots, valid = self.decompose(
                    matrices, torch.cat([dampings[g][side].flatten() for g, side in members]), self.watches[key]
                )
                for part, (g, side) in enumerate(members):
                    of_side = {root: torch.split(of_all, sizes)[part] for root, of_all in roots.items()}
                    decomposed[g][side] = of_side, torch.split(valid, sizes)[part]
                del matrices, roots, of_side
                for g in dict.fromkeys(g for g, _ in members):
                    if len(decomposed[g]) == len(self.groups[g].decomposed):  # now, to free memory for the next batch
                        self.groups[g].store(decomposed[g], dampings[g])
                        decomposed[g] = {}

    def decompose(self, matrices: Tensor, damping: Tensor, watch: FailureWatch) -> tuple[dict[Root, Tensor], Tensor]:
        """From matrices [m, d, d] and damping [m]: the roots [m, d, d], and which of them are valid [m]."""
        roots, valid = dense_roots(matrices, damping, self.roots)
        again = watch.known_failures(valid)
        if len(again):
            again = again.to(valid.device)
            rescued, rescued_valid = rescued_roots(matrices[again], damping[again], self.roots)
            use = rescued_valid & ~valid[again]
            for root, better in rescued.items():
                roots[root][again] = torch.where(unsqueeze_like(use, better), better, roots[root][again])
            valid[again] |= rescued_valid
        return roots, valid


def unknown_root(root: Root, roots: Mapping[Root, object]) -> str:
    if isinstance(root, str):
        return f"no {root.replace('_', ' ')} is kept: pass compute_{root}=True to FisherEstimator."
    exps = tuple(sorted({exp for exp in roots if not isinstance(exp, str)} | {root}))
    return (
        f"the power {root:g} is not kept: pass exps={exps} to FisherEstimator, or write exps: ClassVar = {exps} in the "
        "class of your rule."
    )


@dataclass(frozen=True)
class System:
    """F = Q Λ Qᵀ of the blocks of one group.

    Attributes:
        values: Λ [L, g, o, i].
        operators: the tensors that Q consists of.
        factors: A, G and the positions, or F, [L, ...] each, of the time of the decomposition; none where nobody needs
            them any more.
        root: R [L, g, o, i] if Q and Λ are those of R⁻¹ F R⁻¹ (`kfac_fx.fisher.spectrum`); None: they are F's.
    """

    group: BlockGroup
    values: Tensor
    operators: Sequence[Tensor]
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    root: Tensor | None = None

    @staticmethod
    def of(group: BlockGroup, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> System:
        """Decompose a group. dtype, device: of the decompositions, see `FisherEstimator.spectrum`.

        Raises FactorNotReady if its factors are missing or not finite; waits for the device."""
        group.check_whole()
        values, operators = group.eigensystem(Place(dtype, device))
        if not math.isfinite(float(values.sum())):  # a sum is finite only if all its terms are
            finite = values.flatten(1).isfinite().all(1).tolist()
            if failed := [str(block) for block, fine in zip(group.registrations, finite, strict=True) if not fine]:
                raise FactorNotReady(
                    "every batch was skipped as not finite, or no eigenvalues were found, for\n  "
                    + "\n  ".join(failed)
                    + "\nLook for NaN in inputs, outputs and parameters, and record a finite batch."
                )
        factors = {name: stack.value for name, stack in group.factors.items()}
        return System(group.without_factors(range(len(group))), values, operators, factors)

    def part(self, members: Sequence[int]) -> System:
        """Some of the blocks."""
        operators = [self.group.operators_of(index, self.operators) for index in members]
        stacked = self.group.stack_operators(operators) if members else []
        factors = {name: factor[list(members)] for name, factor in self.factors.items()}
        return System(self.group.without_factors(members), self.values[list(members)], stacked, factors)

    @property
    def turns_rows(self) -> bool:
        """Whether Qᵀ turns rows and gradient rows apart: it is a product of two sides, or unit vectors."""
        return self.root is None and (self.group.separable or (len(self.group.sides) == 1 and self.group.left.diagonal))

    def in_basis(self, index: int, cases: Cases) -> Iterator[tuple[slice, Cases]]:
        """Qᵀ times the gradients of cases of one block, divided by R: (which cases, these cases) in parts.

        Rows are turned before they are multiplied if that takes fewer operations.
        """
        group, (o, i) = self.group, self.values.shape[-2:]
        of_rows = cases.positions * (o * o + i * i) < o * i * (o + i)
        if cases.whole is None and self.turns_rows and (of_rows or not group.separable):
            yield slice(0, len(cases)), self.turned_rows(cases, index)
            return
        operators = group.operators_of(index, self.operators)
        for part, some in cases.chunks():
            # A group of one block, in whose place the operators of that block stand.
            whole = some.gradients().to(self.values.dtype)
            scaled = whole if self.root is None else whole / self.root[index]
            turned = group.to_eigenbasis(scaled.unsqueeze(1), operators)
            yield part, replace(some, uses=(), whole=turned.squeeze(1))

    def turned_rows(self, cases: Cases, index: int) -> Cases:
        """Cases of one block with Q_Aᵀ r for every row and Q_Gᵀ d for every gradient row. Diagonal sides have unit
        vectors as Q."""
        group, dtype = self.group, self.operators[0].dtype
        if all(side.diagonal for side in group.sides) and all(dtype == r.d.dtype == r.x.dtype for r in cases.uses):
            return cases
        left, *right = group.operators_of(index, self.operators)

        def outputs(d: Tensor) -> Tensor:
            if group.left.diagonal:
                return d.to(left.dtype)
            columns = d.to(left.dtype).flatten(0, 1).movedim(0, -1).unsqueeze(0)
            turned = group.multiply_outputs(columns, left.mT)[0].movedim(-1, 0)
            return turned.reshape(d.shape)

        def inputs(x: Tensor) -> Tensor:
            rows = x.to(left.dtype).flatten(0, 1).movedim(0, 1).unsqueeze(0)
            turned = group.multiply_inputs(rows, right)[0].movedim(1, 0)
            return turned.reshape(x.shape)

        return cases.turned(None if all(side.diagonal for side in group.sides[1:]) else inputs, outputs)
