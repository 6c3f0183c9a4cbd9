"""Eigenbases of the Fisher blocks, F = Q Λ Qᵀ, and means of gradients over the steps in these bases.

Qᵀ W is Q_Gᵀ W Q_A for a Kronecker product.

They are computed when inverses would be (`invert_every`); the host waits for them. On a CPU they are eigenvectors. On
an accelerator only the first are; each later basis is one step of orthogonal iteration from the last one
(`kfac_fx.linalg.matrices.iterated_basis`), as in SOAP (Vyas et al. 2024). Blocks that are no Kronecker product have the
basis of their F, and diagonal blocks that of the parameters.

The bases and the eigenvalues are `extras` of the groups of blocks. They belong to the state of a block, and with owners
to the process that keeps it. On processors with fast products in bfloat16 wide bases are kept in bfloat16, so turning
takes half of the time and half of the memory, and rounds every number of a gradient or of a step by up to 0.4 %. The
bases themselves are computed in the precision of the factors.

A side that is wider than `WIDEST` has a basis in diagonal blocks of equal width on a CPU: eigenvectors of the diagonal
blocks of its factor. To turn a matrix [o, i] by a whole basis takes o i (o + i) multiplications, and to decompose a
factor ten times d³, so wide layers would otherwise cost many training steps. The blocks lie one below the other, [d, w]
of the d rows. The report names them. The patches of a convolution are as many times as wide as its input as the kernel
has positions. So their blocks are at most `CHANNELS` times as wide as the input: those of a 3 x 3 kernel have a third
of the channels, each with all positions.

An optimizer that loads the state of another kind of device keeps bases as the state has them (`of_another_kind`): the
second moments in it are of directions in these bases.

**Means** of gradients and of their squares over the steps, in the eigenbases of the blocks, and Adam's step with them.

    m̂, v̂ = the means of h and h² over the steps so far, with weights 1, β, β², ... from the newest to the oldest
    a = n / (√v̂ + ε)                 n = β₁ m̂ + (1 - β₁) h or n = m̂

Both means are `extras` of the groups of blocks. A mean that is kept in the basis is not turned into it in every step,
which would be a third of the products of a step. In a new basis Q', m̂ becomes Q'ᵀ Q m̂, and v̂ the diagonal of
Q'ᵀ Q diag(v̂) Qᵀ Q', which is (Q'ᵀ Q)² v̂ with the squares of the elements, so the order and the signs of eigenvectors
do not matter.

The means are sums with their total weights. The sums of all groups lie one behind another in memory. So a step of
blocks with equal weights is a handful of operations on one vector, however many groups there are. In small networks the
host takes longer for operations on every group than the device for the numbers.

Blocks have other weights than the rest if they were unfrozen later, had no gradient in some step, or have a momentum of
their own. From then on every group has operations of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockDiagonalFisher, key_text
from kfac_fx.fisher.groups import BlockGroup, Stack
from kfac_fx.linalg.arguments import NOT_NEGATIVE, ORTHOGONAL, Values
from kfac_fx.linalg.matrices import (
    as_blocks,
    basis_dtype,
    blocks_of,
    copy_if_,
    full_precision,
    is_in_blocks,
    unsqueeze_like,
)
from kfac_fx.linalg.vectors import Tensors, joint_view
from kfac_fx.passes.approximations import Side
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.torch_private import version
from kfac_fx.recording.statistics import Key

WHOLE_PATCHES = "cpu, whole patches"  # as earlier versions kept them
BASES_AS = ("cpu", "accelerator", WHOLE_PATCHES)  # who keeps wide bases in a way of their own
WIDEST = {"cpu": 768, WHOLE_PATCHES: 768}  # basis, by kind of device; accelerators have whole ones
CHANNELS, WORTH_CUTTING = 4, 256  # the widest basis of patches: times as many channels, or this if that is less
BASIS_VALUES = {"basis": ORTHOGONAL, "eigenvalues": Values(least=1)}  # of the extras in a state
# From a group and the operators of Q'ᵀ Q: pairs of a tensor that lies in the basis, and of its value in the new one.
Carried = Callable[[BlockGroup, Sequence[Tensor]], list[tuple[Tensor, Tensor]]]


def without_basis(registrations: Iterable[Registration]) -> list[Registration]:
    """The registrations whose blocks are no products of sides with eigenvectors of their own."""
    return [registration for registration in registrations if not registration.structure.has_eigenbasis]


def new_bases(group: BlockGroup) -> Tensors:
    dtype = basis_dtype(group.device, group.dtype, max(map(group.size, group.decomposed), default=0))
    bases = {}
    for side in group.decomposed:
        matrices = group.as_operator(side, group.factors[side.factor].moment)
        width = block_width(group, side)
        bases[f"basis/{side}"] = torch.zeros(*matrices.shape[:-1], width, dtype=dtype, device=matrices.device)
    groups, outputs, inputs = group.shape
    shapes = (
        {"outputs": group.shape} if group.right is None else {"outputs": (groups, outputs), "inputs": (groups, inputs)}
    )
    eigenvalues = {
        f"eigenvalues/{side}": torch.ones(len(group), *shape, dtype=group.dtype, device=group.device)
        for side, shape in shapes.items()
    }
    return {**bases, **eigenvalues}


def basis_of(group: BlockGroup, outputs: bool = True) -> list[Tensor]:
    """The operators that Q consists of; those of dense sides are zero for blocks without a decomposition. outputs:
    whether the output side turns anything."""
    dtype = next((group.extras[f"basis/{side}"].dtype for side in group.decomposed), group.dtype)
    operators = [
        torch.ones(1, dtype=dtype, device=group.device)  # a diagonal side turns nothing
        if side.diagonal
        else group.extras[f"basis/{side}"]
        for side in group.sides
    ]
    if not outputs and not group.left.diagonal:
        *lead, width, _ = operators[0].shape  # the last is narrower where the basis is in blocks
        operators[0] = torch.eye(width, dtype=dtype, device=group.device).expand(*lead, width, width)
    return operators


def kind_of(device: torch.device) -> str:
    """The kind of a device among `BASES_AS`."""
    return "cpu" if device.type == "cpu" else "accelerator"


def block_width(group: BlockGroup, side: Side, kind: str | None = None) -> int:
    """The width of the diagonal blocks of the basis of a dense side: its own without such blocks.

    A bias is one more column of a layer, and does not count.

    kind: of device; None: as the group keeps its bases.
    """
    width, widest = group.size(side), widest_basis(group, side, kind or group.bases_as or kind_of(group.device))
    if widest is None or width <= widest + 1 or group.right is None:
        return width
    return -(-width // -(-(width - 1) // widest))


def widest_basis(group: BlockGroup, side: Side, kind: str) -> int | None:
    """The largest width of a basis without blocks, on this kind of device; None: any."""
    widest, kernel = WIDEST.get(kind), group.registrations[0].kernel
    if widest is None or kind == WHOLE_PATCHES or side.factor != "A" or kernel == 1:
        return widest
    return min(widest, max(WORTH_CUTTING, CHANNELS * (group.size(side) // kernel)))


def has_bases_in_blocks(groups: Iterable[BlockGroup]) -> bool:
    return any(is_in_blocks(group.extras[f"basis/{side}"]) for group in groups for side in group.decomposed)


def of_another_kind(fisher: BlockDiagonalFisher, state: Mapping[str, object]) -> tuple[str | None, Tensors]:
    """(the kind of device as of which a state has the bases of wide sides, bases like those that have another shape
    than now, by their names in the state). The kind is that of `fisher` now if all bases fit, and if they are of no
    kind."""
    present = {
        f"{key_text(key)}/basis/{side}": (block.group, side)
        for key, block in fisher.blocks.items()
        for side in block.group.decomposed
        if f"basis/{side}" in block.group.extras and block.group.here
    }
    for kind in (fisher.bases_as, None, *BASES_AS):
        like: Tensors = {}
        for name, (group, side) in present.items():
            basis = group.extras[f"basis/{side}"]
            width = block_width(group, side, kind or kind_of(group.device))
            if width != basis.shape[-1]:
                like[name] = basis.new_empty(*basis.shape[1:-1], width)
            entry = state.get(name)
            if not isinstance(entry, Tensor) or entry.shape != (*basis.shape[1:-1], width):
                break
        else:
            return kind, like
    return fisher.bases_as, {}


def described(groups: Iterable[BlockGroup]) -> list[str]:
    """For the report: the sides whose bases are in blocks, and the precision of bases."""
    sides = [(group, side, group.extras[f"basis/{side}"]) for group in groups for side in group.decomposed]
    cut: Counter[tuple[int, int]] = Counter()
    for group, side, basis in sides:
        if is_in_blocks(basis):
            cut[group.size(side), basis.shape[-1]] += len(group)
    of_widths = [f"{number} x {size:,} in blocks of {width:,}" for (size, width), number in sorted(cut.items())]
    lines = [f"eigenbases of wide sides are in blocks, which cost less: {', '.join(of_widths)}"] if cut else []
    halves = sum(len(group) for group, _, basis in sides if basis.dtype is torch.bfloat16)
    if halves:
        lines.append(f"{halves} of {sum(len(group) for group, *_ in sides)} eigenbases are in bfloat16")
    return lines


def turned(group: BlockGroup, matrices: Tensor, basis: Sequence[Tensor], transpose: bool = False) -> Tensor:
    """Q W, or Qᵀ W, in the precision of the basis: [L, g, o, i]. basis: of `basis_of`."""
    return group.applied(matrices.to(basis[0].dtype), basis, transpose)


def eigenvalues_of(group: BlockGroup) -> list[Tensor]:
    """Λ_G / λ_G + 1 and Λ_A / λ_A + 1, as they broadcast with [L, g, o, i]; their product is Λ̃ / (λ_G λ_A). Blocks that
    are no Kronecker product have Λ / λ + 1 alone."""
    outputs = group.extras["eigenvalues/outputs"]
    if group.right is None:
        return [outputs]
    return [outputs.unsqueeze(-1), group.extras["eigenvalues/inputs"].unsqueeze(-2)]


def spectrum(group: BlockGroup) -> Tensor:
    """Λ of F = Q Λ Qᵀ, as it broadcasts with [L, g, o, i]: the eigenvalues of the last decomposition, with the mean
    eigenvalues of the present factors."""
    values = group.positions().view(-1, 1, 1, 1)
    for side, relative in zip(group.sides, eigenvalues_of(group), strict=True):
        means = group.part_of_mean(group.mean_eigenvalue(side))  # [L, groups], or of F [L, 1]
        values = values * (relative - 1) * means.view(*means.shape, 1, 1)
    return values


def solved(group: BlockGroup, matrices: Tensor, damping: Tensor) -> Tensor:
    """(F + λ I)⁻¹ W by the bases: [L, g, o, i]. damping: λ, 0-dim."""
    basis = basis_of(group)
    in_bases = turned(group, matrices, basis, transpose=True).to(group.dtype)
    return turned(group, in_bases / (spectrum(group) + damping), basis)


@torch.no_grad()
def update_bases(
    fisher: BlockDiagonalFisher, keys: Collection[Key] | None = None, carried: Carried = lambda group, change: []
) -> None:
    """Decompose the factors, and keep their eigenvectors and eigenvalues.

    Blocks whose factors are not finite keep their bases.

    Args:
        keys: as of `BlockDiagonalFisher.decompose`.
        carried: what is kept in the basis, with what it is in the new one.

    Raises FactorNotReady before the first update of the factors.
    """
    for group in fisher.decompose(keys):
        if group.here:
            turn(group, carried, keys)


def iterates_bases(device: torch.device) -> bool:
    """Whether new bases on this device come from the old ones, and not from decompositions of their own."""
    return device.type != "cpu"


def turn(group: BlockGroup, carried: Carried, keys: Collection[Key] | None = None) -> None:
    """Diagonal sides turn nothing. On an accelerator new bases are iterated from the old ones.

    keys: blocks of these registrations get new bases; others that are stacked with them keep theirs, because which
        blocks are stacked depends on the calls before the first step, and a training does not. None: all.
    """
    stored = basis_of(group)
    old = [basis.to(group.dtype) for basis in stored]
    of_dense = [basis for side, basis in zip(group.sides, old, strict=True) if not side.diagonal]
    iterates = iterates_bases(group.device) and any(bool(basis.any()) for basis in of_dense)
    widths = {side: group.extras[f"basis/{side}"].shape[-1] for side in group.decomposed}
    of_sides, new = group.side_eigensystems(last=old if iterates else None, widths=widths)
    good = group.agreed(torch.stack([values.flatten(1).isfinite().all(1) for values in of_sides]).all(0))
    due = [keys is None or registration.parameters in keys for registration in group.registrations]
    if not all(due):
        good = good & torch.tensor(due, device=good.device)
    eigenvalues = [tensor for name, tensor in group.extras.items() if name.startswith("eigenvalues/")]
    renewed = list(zip(eigenvalues, damped(group, of_sides), strict=True))
    if group.decomposed:
        with full_precision():
            change = [
                of if side.diagonal else basis_change(of, to)
                for side, of, to in zip(group.sides, old, new, strict=True)
            ]
            renewed += carried(group, change)
        renewed += [(of, to) for side, of, to in zip(group.sides, stored, new, strict=True) if not side.diagonal]
    for last, tensor in renewed:
        copy_if_(unsqueeze_like(good, tensor), last, tensor)


def basis_change(old: Tensor, new: Tensor) -> Tensor:
    """Q'ᵀ Q of one dense side, in blocks if the bases are."""
    if not is_in_blocks(old):
        return new.mT @ old
    pairs = zip(blocks_of(old), blocks_of(new), strict=True)
    return as_blocks([after.mT @ before for (_, before), (_, after) in pairs], old.shape[-1])


def damped(group: BlockGroup, of_sides: Sequence[Tensor]) -> list[Tensor]:
    """Λ_G / λ_G + 1 and Λ_A / λ_A + 1 as the extras have them, from the eigenvalues of every side."""
    dampings = [group.part_of_mean(group.mean_eigenvalue(side)) for side in group.sides]
    left, *right = [
        values / unsqueeze_like(damping, values) + 1 for damping, values in zip(dampings, of_sides, strict=True)
    ]
    return [left.view(len(group), *group.shape)] if group.right is None else [left, group.input_eigenvalues(right)]


EPSILON = 1e-8
MEANS = ("average", "squares")
MEAN_VALUES = {"average/total_weight": NOT_NEGATIVE, "squares": NOT_NEGATIVE}  # in a state
WORTH_PARTS = 1 << 20  # numbers of all blocks
PART = 1 << 16  # numbers that are taken at a time


def new_means(groups: Sequence[BlockGroup]) -> list[Tensors]:
    """The means as extras of new groups: zeros, those of groups with one precision and one device in one tensor."""
    extras: list[Tensors] = [{} for _ in groups]
    kinds = [(group.dtype, group.device) for group in groups]
    for kind in dict.fromkeys(kinds):
        members = [n for n, of_group in enumerate(kinds) if of_group == kind]
        shapes = [torch.Size((len(groups[n]), *groups[n].shape)) for n in members]
        for name in MEANS:
            moments, weights = adjoining(shapes, *kind), adjoining([shape[:1] for shape in shapes], *kind)
            for n, moment, weight in zip(members, moments, weights, strict=True):
                extras[n] |= {f"{name}/moment": moment, f"{name}/total_weight": weight}
    return extras


def adjoining(shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Zeros of these shapes, one behind another in memory."""
    sizes = [shape.numel() for shape in shapes]
    vector = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]


def means_of(group: BlockGroup) -> tuple[Stack, Stack]:
    """m̂ and v̂ as running averages, [L, g, o, i] each."""
    average, squares = (Stack(group.extras[f"{n}/moment"], group.extras[f"{n}/total_weight"]) for n in MEANS)
    return average, squares


class StepScalars(NamedTuple):
    """The scalars of a step, 0-dim for all blocks, or [L, 1, 1, 1] for those of one group.

    With m̂ = S / s and v̂ = T / t of sums and their total weights, and n = m m̂ + (1 - m) h:

        n / (√v̂ + ε) = √t (m S / s + (1 - m) h) / (√T + ε √t)

    so that the tensors themselves are divided once.
    """

    keep_average: Tensor  # β₁, or 1 for blocks that keep their means
    keep_squares: Tensor  # β₂, or 1
    gradient: Tensor  # √t (1 - m)
    average: Tensor  # √t m / s
    epsilon: Tensor  # ε √t


@dataclass
class Means:
    """The means of the groups of one process that have factors.

    Attributes:
        averages, squares: m̂ and v̂ of every group.
        joint: both as running averages of one vector [P] with the weights of all blocks, [blocks]; None if the groups
            lie apart.
        equal: whether all blocks had the same weights when these had `versions`.
    """

    groups: Sequence[BlockGroup]
    averages: Sequence[Stack]
    squares: Sequence[Stack]
    joint: tuple[Stack, Stack] | None
    equal: bool = False
    versions: tuple[int, ...] = ()

    @staticmethod
    def of(fisher: BlockDiagonalFisher) -> Means:
        groups = groups_with_factors(fisher)
        averages, squares = ([means_of(group)[n] for group in groups] for n in range(len(MEANS)))
        both = joint_stack(averages), joint_stack(squares)
        return Means(groups, averages, squares, None if both[0] is None or both[1] is None else (both[0], both[1]))

    def are_of(self, fisher: BlockDiagonalFisher) -> bool:
        """Whether the groups with factors are still the same."""
        return list(map(id, groups_with_factors(fisher))) == list(map(id, self.groups))

    @cached_property
    def bases(self) -> list[list[Tensor]]:
        """`basis_of` every group. The tensors stay where they are, and new bases are written into them."""
        return [basis_of(group) for group in self.groups]

    @cached_property
    def eigenvalues(self) -> list[list[Tensor]]:
        """`eigenvalues_of` every group, as the bases."""
        return [eigenvalues_of(group) for group in self.groups]

    @property
    def sizes(self) -> list[int]:
        """The number of blocks of every group."""
        return [len(group) for group in self.groups]

    def have_equal_weights(self) -> bool:
        """Whether all blocks have the same weights. The host waits for them if others have written into them."""
        if self.joint is None:
            return False
        if self.versions != self.present_versions():
            each = [stack.total_weight for stack in self.joint]
            self.written(equal=all(bool((weights == weights[0]).all()) for weights in each))
        return self.equal

    def present_versions(self) -> tuple[int, ...]:
        return tuple(version(stack.total_weight) for stack in self.joint or ())

    def written(self, equal: bool) -> None:
        """Note whether the weights are equal, as they are at present."""
        self.equal, self.versions = equal, self.present_versions()

    def forget_average(self, where: Tensor) -> None:
        """Begin m̂ anew where `where`, 0-dim, is true."""
        equal = self.have_equal_weights()
        for stack in self.averages if self.joint is None else self.joint[:1]:
            stack.moment.masked_fill_(where, 0)
            stack.total_weight.masked_fill_(where, 0)
        self.written(equal)

    def advance(self, accept: Tensor, beta: Tensor, decay: float, nesterov: Tensor) -> list[StepScalars]:
        """Take a gradient into the total weights.

        Args:
            accept: whether blocks take their gradient into the means, 0-dim for all, or [blocks].
            beta: β₁ in the same way, in the widest precision of the groups.
            decay: β₂.
            nesterov: 0-dim; whether n is not m̂ alone.

        Returns the scalars of the step: those of all groups if all blocks have the same, or else those of every group.
        """
        equal = accept.dim() == beta.dim() == 0 and self.have_equal_weights()
        keep_average = torch.where(accept, beta, 1)
        keep_squares = torch.where(accept, beta.new_full((), decay), 1)
        s = self.new_weights(0, keep_average, accept)
        t = self.new_weights(1, keep_squares, accept)
        self.written(equal)
        if equal:
            s, t = s[0], t[0]
        root, m = t.sqrt(), torch.where(nesterov, beta, 1)
        scalars = StepScalars(keep_average, keep_squares, root * (1 - m), root * m / s, EPSILON * root)
        return [scalars] if equal else self.scalars_by_group(scalars)

    def new_weights(self, mean: int, keep: Tensor, accept: Tensor) -> Tensor:
        """Store the new total weights of m̂ (0) or v̂ (1). Returns them, [blocks]."""
        if self.joint is not None:
            return self.joint[mean].total_weight.mul_(keep).add_(accept)
        stacks = (self.averages, self.squares)[mean]
        new = torch.cat([stack.total_weight for stack in stacks]) * keep + accept
        for stack, part in zip(stacks, new.split(self.sizes), strict=True):
            stack.total_weight.copy_(part)
        return new

    def scalars_by_group(self, scalars: StepScalars) -> list[StepScalars]:
        """Those of all blocks, [blocks] or 0-dim, as those of every group."""
        columns = [self.split(scalar.expand(sum(self.sizes))) for scalar in scalars]
        return [StepScalars(*of_group) for of_group in zip(*columns, strict=True)]

    def split(self, blocks: Tensor) -> Iterator[Tensor]:
        """Scalars of all blocks as those of every group, [L, 1, 1, 1], in its precision."""
        for group, part in zip(self.groups, blocks.split(self.sizes), strict=True):
            yield part.view(-1, 1, 1, 1).to(group.dtype)

    def adam_steps(self, gradients: Sequence[Tensor], scalars: Sequence[StepScalars]) -> list[Tensor]:
        """Take the gradients into the sums.

        Args:
            gradients: h of every group, [L, g, o, i], in any precision; zero in blocks that do not take them.
            scalars: the result of `advance`.

        Returns a and √v̂ + ε, the latter up to a factor for every block: one tensor [2, P] of all groups if they have
        the same scalars, or [2, L, g, o, i] of every group.
        """
        if self.joint is not None and scalars[0].gradient.dim() == 0:
            average, squares = self.joint
            pair = average.moment.new_empty(2, *average.moment.shape)
            torch.cat([h.reshape(-1) for h in gradients], out=pair[0])
            adam_step(pair, average.moment, squares.moment, scalars[0])
            return [pair]
        pairs = [torch.stack([h, h]).to(group.dtype) for h, group in zip(gradients, self.groups, strict=True)]
        for pair, average, squares, of_group in zip(pairs, self.averages, self.squares, scalars, strict=True):
            adam_step(pair, average.moment, squares.moment, of_group)
        return pairs

    @property
    def worth_parts(self) -> bool:
        """Whether a step should take the numbers part by part: they do not fit into the cache of a CPU, and some ten
        operations read and write all of them."""
        return self.are_large and self.groups[0].device.type == "cpu" and not torch.compiler.is_compiling()

    @property
    def are_large(self) -> bool:
        return sum(stack.moment.numel() for stack in self.averages) >= WORTH_PARTS

    def directions_by_parts(
        self,
        gradients: Sequence[Tensor],
        scalars: Sequence[StepScalars],
        eigenvalues: Sequence[Sequence[Tensor]],
        exponent: float,
    ) -> list[Tensor]:
        """d |a| / |d| of every group, written over h. The gradients enter the sums as in `adam_steps`.

        eigenvalues: of every group. exponent: w.
        """
        of_blocks = []
        for n, h in enumerate(gradients):
            of_group, together = scalars[0 if len(scalars) == 1 else n], max(1, PART // max(1, h[0].numel()))
            lengths_of = [
                lengths_by_parts(
                    h[blocks],
                    self.averages[n].moment[blocks],
                    self.squares[n].moment[blocks],
                    StepScalars(*(scalar[blocks] if scalar.dim() else scalar for scalar in of_group)),
                    [values[blocks] for values in eigenvalues[n]],
                    exponent,
                )
                for blocks in (slice(start, start + together) for start in range(0, len(h), together))
            ]
            of_blocks.append(torch.cat(lengths_of, dim=1))
        for h, scale in zip(gradients, self.grafting_scales(of_blocks), strict=True):
            h.mul_(scale)
        return list(gradients)

    def grafting_scales(self, lengths: Sequence[Tensor]) -> Iterator[Tensor]:
        """|a| / |d| of every group, [L, 1, 1, 1]. lengths: |a| and |d| of its blocks, [2, L]."""
        of_adam, of_directions = torch.cat(list(lengths), dim=1)
        return self.split(of_adam / of_directions.clamp(min=torch.finfo(of_adam.dtype).tiny))

    def pairs_by_group(self, pairs: Sequence[Tensor]) -> list[Tensor]:
        """The result of `adam_steps` as tensors [2, L, g, o, i] of every group, which are views."""
        if len(pairs) == len(self.groups) and pairs[0].dim() > 2:
            return list(pairs)
        (pair,), shapes = pairs, [stack.moment.shape for stack in self.averages]
        parts = pair.split([shape.numel() for shape in shapes], dim=1)
        return [part.view(2, *shape) for part, shape in zip(parts, shapes, strict=True)]


def adam_step(pair: Tensor, average: Tensor, squares: Tensor, scalars: StepScalars) -> None:
    """pair: h, and place for √v̂ + ε; h is overwritten with a. average, squares: the sums S and T."""
    h, root = pair[0], pair[1]
    average.mul_(scalars.keep_average).add_(h)
    squares.mul_(scalars.keep_squares).addcmul_(h, h)
    torch.sqrt(squares, out=root).add_(scalars.epsilon)
    h.mul_(scalars.gradient).addcmul_(average, scalars.average).div_(root)


def lengths_by_parts(
    h: Tensor,
    average: Tensor,
    squares: Tensor,
    scalars: StepScalars,
    eigenvalues: Sequence[Tensor],
    exponent: float,
) -> Tensor:
    """Overwrite h of B blocks, [B, g, o, i], with d; it enters the sums S and T. Returns |a| and |d|, [2, B].

    eigenvalues: Λ̃ of every side, as they broadcast with h. exponent: w.
    """
    blocks, groups, outputs, inputs = h.shape
    rows = max(1, PART // max(1, blocks * groups * inputs))
    buffer = average.new_empty(2, blocks, groups, min(rows, outputs), inputs)
    each = []
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        pair = buffer[:, :, :, : min(rows, outputs - start)]
        pair[0].copy_(h[:, :, part])
        adam_step(pair, average[:, :, part], squares[:, :, part], scalars)
        if exponent:
            divide_root(pair, [values if values.shape[2] == 1 else values[:, :, part] for values in eigenvalues])
            combine(pair, exponent)
        h[:, :, part].copy_(pair[1 if exponent else 0])
        each.append(lengths(pair))
    lengths_of: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return lengths_of if exponent else lengths_of[:1].expand(2, -1)


def joint_stack(stacks: Sequence[Stack]) -> Stack | None:
    """One vector [P] with the weights of all blocks, [blocks], which share the memory; None if the stacks lie apart."""
    if not stacks:
        return None
    moment = joint_view([stack.moment for stack in stacks])
    weights = joint_view([stack.total_weight for stack in stacks])
    return None if moment is None or weights is None else Stack(moment, weights)


def groups_with_factors(fisher: BlockDiagonalFisher) -> list[BlockGroup]:
    return [group for group in fisher.kept if group.updated]


def in_new_basis(group: BlockGroup, change: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Both means of a group, each with what it is in the basis Q'. change: the operators of Q'ᵀ Q."""
    average, squares = means_of(group)
    return [
        (average.moment, turned(group, average.moment, change)),
        (squares.moment, turned(group, squares.moment, [operator.square() for operator in change])),
    ]


def divide_root(pair: Tensor, eigenvalues: Sequence[Tensor]) -> None:
    """Divide √v̂ of a pair (a, √v̂) by Λ̃, of which every side has a factor."""
    for of_side in eigenvalues:
        pair[1].div_(of_side)


def combine(pair: Tensor, exponent: float) -> None:
    """Overwrite √v̂ / Λ̃ of a pair (a, √v̂ / Λ̃) with a (√v̂ / Λ̃)ʷ."""
    pair[1].pow_(exponent).mul_(pair[0])


def norms(group: BlockGroup, matrices: Tensor) -> Tensor:
    """|W| of the blocks, [B, L], in B matrices [B, L, g, o, i]."""
    each = lengths(matrices)
    return group.total(each.square()).sqrt() if group.divided else each


def lengths(matrices: Tensor) -> Tensor:
    """|W| of those parts of the blocks that are here, [B, L], in B matrices [B, L, g, o, i]."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(2, 3, 4))
    return norms


def moving(groups: Sequence[BlockGroup], accept: Tensor, still: Collection[str]) -> Tensor:
    """Which blocks of all groups take their gradient into the means: `accept`, or [blocks] if some have none."""
    each = [not still or not set(r.owners).issubset(still) for group in groups for r in group.registrations]
    return accept if all(each) else accept & torch.tensor(each, device=accept.device)  # the host waits for the copy


def momentum_of(groups: Sequence[BlockGroup], momentum: Mapping[str, Tensor], most: Tensor | None = None) -> Tensor:
    """β₁ of every block of all groups, [blocks]; 0-dim if all have it from one parameter group. Blocks outside of all
    parameter groups stand still, so theirs does not matter. most: the largest, 0-dim, if there is one."""
    anywhere = next(iter(momentum.values()))
    each = [
        next((momentum[name] for name in registration.owners if name in momentum), anywhere)
        for group in groups
        for registration in group.registrations
    ]
    beta = each[0] if len(set(map(id, each))) == 1 else torch.stack(each)
    beta = beta if most is None else torch.minimum(beta, most)
    return beta.to(max((group.dtype for group in groups), key=lambda dtype: dtype.itemsize))
