"""The momentum type "eigen_moments": between Adam and K-FAC, in the eigenbasis of the Fisher blocks.

With F = Q Λ Qᵀ of a block (Qᵀ W is Q_Gᵀ W Q_A for a Kronecker product), and its gradient g:

    h = Qᵀ g
    m̂, v̂ = the means of h and h² over the steps so far, with weights 1, β, β², ... from the newest to the oldest
                                     β₁ of m̂: `momentum`; β₂ of v̂: `second_moment_decay`; the squares are elementwise
    a = n / (√v̂ + ε)                 Adam's step; n = β₁ m̂ + (1 - β₁) h or n = m̂
    d = n / ((√v̂ + ε)¹⁻ʷ Λ̃ʷ)         w: `eigenvalue_exponent`; Λ̃: the damped eigenvalues
    Δ = Q d |a| / |d|                the norms are those of the block

**w = 0** is Adam in the basis of K-FAC. v̂ is the diagonal of the second moment of gradients in the basis, which George
et al. 2018 ("Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", algorithm 1) put in the
place of Λ, here averaged over steps. The first n is Nesterov's momentum in Adam (Dozat 2016, "Incorporating Nesterov
momentum into Adam", algorithm 8, with one bias correction for both terms); which of the two a step has is decided in
`kfac_fx.optim.step_checks`. Adam in an eigenbasis is SOAP (Vyas et al. 2024, "SOAP: improving and stabilizing Shampoo
using Adam", algorithm 3), with n = m̂ and factors that are averages of g gᵀ and gᵀ g; here they are K-FAC's A and G.
Blocks that are no Kronecker product have the basis of their F, and diagonal blocks that of the parameters.

**w = 1** is the direction of K-FAC, with factored damping as Martens & Grosse 2015, section 6.3, have it:

    Λ̃ = (Λ_G + λ_G) ⊗ (Λ_A + λ_A)   λ_A = δ tr A / dim A, λ_G = δ tr G / dim G; δ: `relative_damping`

It is grafted on Adam's length (Agarwal et al. 2020, "Disentangling adaptive gradient methods from learning rates"), so
the scale of Λ̃ does not matter. `eigenvalues` has Λ_G / λ_G + 1 and Λ_A / λ_A + 1.

**Between them**, w = 1/2 is the geometric mean of both divisors. v̂ has what the Kronecker product leaves out, and the
noise of batches, whose root takes most of the curvature out of a direction; Λ̃ has the curvature alone.

Bases are computed when inverses would be (`invert_every`); the host waits for them. On a CPU they are eigenvectors. On
an accelerator only the first are; each later basis is one step of orthogonal iteration from the last one
(`kfac_fx.linalg.matrices.iterated_basis`), as in SOAP. In a new basis Q', m̂ becomes Q'ᵀ Q m̂, and v̂ the diagonal of
Q'ᵀ Q diag(v̂) Qᵀ Q', which is (Q'ᵀ Q)² v̂ with the squares of the elements, so the order and the signs of eigenvectors
do not matter.

The bases, the eigenvalues and both means are the `extras` of the groups of blocks. They belong to the state of a block,
and with owners to the process that keeps it. A mean that is kept in the basis is not turned into it in every step,
which would be a third of the products of a step.

**Means** are sums with their total weights. The sums of all groups lie one behind another in memory. So a step of
blocks with equal weights is a handful of operations on one vector, however many groups there are. In small networks the
host takes longer for operations on every group than the device for the numbers.

Blocks have other weights than the rest if they were unfrozen later, had no gradient in some step, or have a momentum of
their own. From then on every group has operations of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockDiagonalFisher
from kfac_fx.fisher.groups import BlockGroup, Stack
from kfac_fx.linalg.matrices import copy_if_, full_precision, unsqueeze_like
from kfac_fx.linalg.vectors import Tensors, joint_view
from kfac_fx.passes.errors import ApproximationError, table
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.torch_private import version
from kfac_fx.recording.statistics import Key

EPSILON = 1e-8
MEANS = ("average", "squares")

# --- means over steps, and Adam's step --------------------------------------------------------------------------------


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
            gradients: h of every group, [L, g, o, i]; zero in blocks that do not take them.
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
        pairs = [torch.stack([h, h]) for h in gradients]
        for pair, average, squares, of_group in zip(pairs, self.averages, self.squares, scalars, strict=True):
            adam_step(pair, average.moment, squares.moment, of_group)
        return pairs

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


def joint_stack(stacks: Sequence[Stack]) -> Stack | None:
    """One vector [P] with the weights of all blocks, [blocks], which share the memory; None if the stacks lie apart."""
    if not stacks:
        return None
    moment = joint_view([stack.moment for stack in stacks])
    weights = joint_view([stack.total_weight for stack in stacks])
    return None if moment is None or weights is None else Stack(moment, weights)


def groups_with_factors(fisher: BlockDiagonalFisher) -> list[BlockGroup]:
    return [group for group in fisher.kept if group.updated]


# --- bases, eigenvalues and the step of the momentum type -------------------------------------------------------------


def without_basis(registrations: Iterable[Registration]) -> list[Registration]:
    """The registrations whose blocks are no products of sides with eigenvectors of their own."""
    return [registration for registration in registrations if not registration.structure.has_eigenbasis]


def refuse_without_basis(registrations: Iterable[Registration]) -> None:
    """Raises ApproximationError for blocks without an eigenbasis."""
    wrong = [(str(registration), registration.approximation) for registration in without_basis(registrations)]
    if wrong:
        raise ApproximationError(
            "momentum_type='eigen_moments' turns gradients with the eigenvectors of A and G, and these blocks are no "
            f"products of A and G:\n{table(wrong)}\n"
            "Compile with 'kron', 'kron_indep', 'diagonal' or 'full' for them, as in approximations={'name': 'kron'}, "
            "or write momentum_type='adaptive'."
        )


def new_extras(groups: Sequence[BlockGroup]) -> list[Tensors]:
    """The extras of new groups: zero bases of the dense sides, eigenvalues of 1, and both means before the first
    update."""
    return [new_bases(group) | means for group, means in zip(groups, new_means(groups), strict=True)]


def new_bases(group: BlockGroup) -> Tensors:
    bases = {
        f"basis/{side}": torch.zeros_like(group.as_operator(side, group.factors[side.factor].moment))
        for side in group.decomposed
    }
    groups, outputs, inputs = group.shape
    shapes = (
        {"outputs": group.shape} if group.right is None else {"outputs": (groups, outputs), "inputs": (groups, inputs)}
    )
    eigenvalues = {
        f"eigenvalues/{side}": torch.ones(len(group), *shape, dtype=group.dtype, device=group.device)
        for side, shape in shapes.items()
    }
    return {**bases, **eigenvalues}


def basis_of(group: BlockGroup) -> list[Tensor]:
    """The operators that Q consists of; those of dense sides are zero for blocks without a decomposition."""
    return [
        torch.ones(1, dtype=group.dtype, device=group.device)  # a diagonal side turns nothing
        if side.diagonal
        else group.extras[f"basis/{side}"]
        for side in group.sides
    ]


def eigenvalues_of(group: BlockGroup) -> list[Tensor]:
    """Λ_G / λ_G + 1 and Λ_A / λ_A + 1, as they broadcast with [L, g, o, i]; their product is Λ̃ / (λ_G λ_A). Blocks that
    are no Kronecker product have Λ / λ + 1 alone."""
    outputs = group.extras["eigenvalues/outputs"]
    if group.right is None:
        return [outputs]
    return [outputs.unsqueeze(-1), group.extras["eigenvalues/inputs"].unsqueeze(-2)]


@torch.no_grad()
def update_bases(fisher: BlockDiagonalFisher, keys: Collection[Key] | None = None) -> None:
    """Decompose the factors, and turn both means into the new bases.

    Blocks whose factors are not finite keep their bases. keys: as of `BlockDiagonalFisher.decompose`.

    Raises FactorNotReady before the first update of the factors.
    """
    for group in fisher.decompose(keys):
        if group.here:
            turn(group)


def iterates_bases(device: torch.device) -> bool:
    """Whether new bases on this device come from the old ones, and not from decompositions of their own."""
    return device.type != "cpu"


def turn(group: BlockGroup) -> None:
    """Diagonal sides turn nothing. On an accelerator new bases are iterated from the old ones."""
    old = basis_of(group)
    dense = [basis for side, basis in zip(group.sides, old, strict=True) if not side.diagonal]
    iterates = iterates_bases(group.device) and any(bool(basis.any()) for basis in dense)
    of_sides, new = group.side_eigensystems(last=old if iterates else None)
    good = group.agreed(torch.stack([values.flatten(1).isfinite().all(1) for values in of_sides]).all(0))
    stored = [tensor for name, tensor in group.extras.items() if name.startswith("eigenvalues/")]
    renewed = list(zip(stored, damped(group, of_sides), strict=True))
    if group.decomposed:
        average, squares = means_of(group)
        with full_precision():
            change = [of if side.diagonal else to.mT @ of for side, to, of in zip(group.sides, new, old, strict=True)]
            renewed += [
                (average.moment, group.applied(average.moment, change)),
                (squares.moment, group.applied(squares.moment, [operator.square() for operator in change])),
            ]
        renewed += [(of, to) for side, of, to in zip(group.sides, old, new, strict=True) if not side.diagonal]
    for last, tensor in renewed:
        copy_if_(unsqueeze_like(good, tensor), last, tensor)


def damped(group: BlockGroup, of_sides: Sequence[Tensor]) -> list[Tensor]:
    """Λ_G / λ_G + 1 and Λ_A / λ_A + 1 as the extras have them, from the eigenvalues of every side."""
    assert group.relative_damping is not None, "bug in kfac_fx: eigenvalues without a relative damping"
    means = [group.mean_eigenvalue(side) for side in group.sides]
    dampings = [torch.where(mean > 0, group.relative_damping * mean, 1) for mean in means]
    left, *right = [
        values / unsqueeze_like(damping, values) + 1 for damping, values in zip(dampings, of_sides, strict=True)
    ]
    return [left.view(len(group), *group.shape)] if group.right is None else [left, group.input_eigenvalues(right)]


@torch.no_grad()
def step_in_bases(
    fisher: BlockDiagonalFisher,
    means: Means,
    gradient: Tensors,
    momentum: Mapping[str, Tensor],
    decay: float,
    exponent: float,
    nesterov: Tensor,
    accept: Tensor,
    still: Collection[str] = (),
    run: Callable[..., Tensors] | None = None,
) -> Tensors:
    """Δ by parameter, after the gradient has entered both means.

    Args:
        means: those of `fisher`.
        gradient: g, of all parameters in Fisher blocks of this process that are not idle; zero if `accept` is false.
        momentum: β₁ by parameter, 0-dim. The parameters of a block have the same.
        decay: β₂.
        exponent: w.
        nesterov: 0-dim; whether n is not m̂ alone.
        accept: 0-dim; if it is false, the means stay as they are.
        still: the parameters without a gradient, which have zeros. Blocks of these alone keep their means.
        run: `directions`, or what a compiler made of it.
    """
    if not means.groups:
        return {}
    accepted, beta = moving(means.groups, accept, still), momentum_of(means.groups, momentum)
    scalars = means.advance(accepted, beta, decay, nesterov)
    bases, eigenvalues = ([of(group) for group in means.groups] for of in (basis_of, eigenvalues_of))
    return (run or directions)(fisher, means, gradient, scalars, exponent, bases, eigenvalues)


@torch.no_grad()
def directions(
    fisher: BlockDiagonalFisher,
    means: Means,
    gradient: Tensors,
    scalars: Sequence[StepScalars],
    exponent: float,
    bases: Sequence[Sequence[Tensor]],
    eigenvalues: Sequence[Sequence[Tensor]],
) -> Tensors:
    """Δ by parameter; the gradient enters the sums of both means. scalars: of `Means.advance`. bases, eigenvalues: of
    every group."""

    def updates(groups: Sequence[BlockGroup], matrices: Iterable[Tensor]) -> list[Tensor]:
        turned = [group.to_eigenbasis(g, q) for group, g, q in zip(groups, matrices, bases, strict=True)]
        pairs = means.adam_steps(turned, scalars)
        by_group = means.pairs_by_group(pairs)
        if exponent:
            graft(means, pairs, by_group, eigenvalues, exponent)
        each = zip(groups, by_group, bases, strict=True)
        return [group.from_eigenbasis(pair[1 if exponent else 0], q) for group, pair, q in each]

    return fisher.of_groups(means.groups, updates, gradient, kept=True)


def graft(
    means: Means,
    pairs: Sequence[Tensor],
    by_group: Sequence[Tensor],
    eigenvalues: Sequence[Sequence[Tensor]],
    exponent: float,
) -> None:
    """Overwrite √v̂ with d |a| / |d|; d is a (√v̂ / Λ̃)ʷ, up to a factor for each block.

    pairs: the result of `Means.adam_steps`. by_group: views of it, of `Means.pairs_by_group`.
    """
    for of_group, pair in zip(eigenvalues, by_group, strict=True):
        divide_root(pair, of_group)
    for pair in pairs:
        combine(pair, exponent)
    of_blocks = [norms(group, pair) for group, pair in zip(means.groups, by_group, strict=True)]
    of_adam, of_directions = torch.cat(of_blocks, dim=1)
    scales = of_adam / of_directions.clamp(min=torch.finfo(of_adam.dtype).tiny)
    for pair, scale in zip(by_group, means.split(scales), strict=True):
        pair[1].mul_(scale)


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


def momentum_of(groups: Sequence[BlockGroup], momentum: Mapping[str, Tensor]) -> Tensor:
    """β₁ of every block of all groups, [blocks]; 0-dim if all have it from one parameter group. Blocks outside of all
    parameter groups stand still, so theirs does not matter."""
    anywhere = next(iter(momentum.values()))
    each = [
        next((momentum[name] for name in registration.owners if name in momentum), anywhere)
        for group in groups
        for registration in group.registrations
    ]
    beta = each[0] if len(set(map(id, each))) == 1 else torch.stack(each)
    return beta.to(max((group.dtype for group in groups), key=lambda dtype: dtype.itemsize))


def refuse_divided_momentum(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str], fisher: BlockDiagonalFisher
) -> None:
    """Raises ValueError for blocks whose parameters have different momenta in the parameter groups.

    names: of the parameters in the groups. With one momentum for all it costs nothing.
    """
    in_blocks = [group for group in groups if not group["first_order"]]
    if all(equal_numbers(group["momentum"], in_blocks[0]["momentum"]) for group in in_blocks):
        return
    momenta = {names[parameter]: group["momentum"] for group in in_blocks for parameter in group["params"]}
    rows = []
    for block in fisher.blocks.values():
        of_block = {name: momenta[name] for name in block.registration.owners if name in momenta}
        if any(not equal_numbers(beta, next(iter(of_block.values()))) for beta in of_block.values()):
            described = ", ".join(f"{float(beta)} of {name}" for name, beta in of_block.items())
            rows.append((str(block.registration), described))
    if rows:
        raise ValueError(
            "momentum_type='eigen_moments' averages the gradient of a Fisher block in the block's eigenbasis, so all "
            f"parameters of a block have one momentum. {len(rows)} blocks have several:\n{table(rows)}\n"
            "Give the parameter groups of these parameters the same momentum."
        )


def equal_numbers(first: float | Tensor, second: float | Tensor) -> bool:
    """Whether two numbers are equal; waits for the device only for different tensors."""
    return first is second or float(first) == float(second)
