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

Bases are computed when inverses would be (`invert_every`); the host waits for them. In a new basis Q', m̂ becomes
Q'ᵀ Q m̂, and v̂ the diagonal of Q'ᵀ Q diag(v̂) Qᵀ Q', which is (Q'ᵀ Q)² v̂ with the squares of the elements, so the order
and the signs of eigenvectors do not matter.

The bases, the eigenvalues and both means are the `extras` of the groups of blocks. They belong to the state of a block,
and with owners to the process that keeps it. A mean that is kept in the basis is not turned into it in every step,
which would be a third of the products of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_fx.blocks.fisher import BlockDiagonalFisher
from kfac_fx.factors.factor import Stack
from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.linalg.matrices import full_precision, unsqueeze_like, zero_unless_
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.passes.errors import ApproximationError, table
from kfac_fx.passes.ir import Registration
from kfac_fx.statistics.moments import Key

EPSILON = 1e-8
MEANS = ("average", "squares")
HAVE_BASIS = ("stacked",)  # of `Approximation.group`: every side has its own eigenvectors


def without_basis(registrations: Iterable[Registration]) -> list[Registration]:
    """The registrations whose blocks are no products of sides with eigenvectors of their own."""
    return [registration for registration in registrations if registration.structure.group not in HAVE_BASIS]


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


def new_moments(group: BlockGroup) -> Tensors:
    """The extras of a new group: zero bases of the dense sides, eigenvalues of 1, and both means before the first
    update."""
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
    means = {name: Stack.zeros(len(group), group.shape, group.dtype, group.device) for name in MEANS}
    moments = {f"{name}/moment": stack.moment for name, stack in means.items()}
    return {
        **bases,
        **eigenvalues,
        **moments,
        **{f"{name}/total_weight": stack.total_weight for name, stack in means.items()},
    }


def basis_of(group: BlockGroup) -> list[Tensor]:
    """The operators that Q consists of; those of dense sides are zero for blocks without a decomposition."""
    return [
        torch.ones(1, dtype=group.dtype, device=group.device)  # a diagonal side turns nothing
        if side.diagonal
        else group.extras[f"basis/{side}"]
        for side in group.sides
    ]


def means_of(group: BlockGroup) -> tuple[Stack, Stack]:
    """m̂ and v̂ as running averages, [L, g, o, i] each."""
    average, squares = (Stack(group.extras[f"{n}/moment"], group.extras[f"{n}/total_weight"]) for n in MEANS)
    return average, squares


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


def turn(group: BlockGroup) -> None:
    """Diagonal sides turn nothing."""
    of_sides, new = group.side_eigensystems()
    good = group.agreed(torch.stack([values.flatten(1).isfinite().all(1) for values in of_sides]).all(0))
    stored = [tensor for name, tensor in group.extras.items() if name.startswith("eigenvalues/")]
    renewed = list(zip(stored, damped(group, of_sides), strict=True))
    if group.decomposed:
        old, (average, squares) = basis_of(group), means_of(group)
        with full_precision():
            change = [of if side.diagonal else to.mT @ of for side, to, of in zip(group.sides, new, old, strict=True)]
            renewed += [
                (average.moment, group.applied(average.moment, change)),
                (squares.moment, group.applied(squares.moment, [operator.square() for operator in change])),
            ]
        renewed += [(of, to) for side, of, to in zip(group.sides, old, new, strict=True) if not side.diagonal]
    for last, tensor in renewed:
        torch.where(unsqueeze_like(good, tensor), tensor, last, out=last)


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
def forget_averages(fisher: BlockDiagonalFisher, where: Tensor) -> None:
    """Begin m̂ anew in all blocks where `where`, 0-dim, is true."""
    for group in fisher.kept:
        average, _ = means_of(group)
        average.moment.masked_fill_(where, 0)
        average.total_weight.masked_fill_(where, 0)


@torch.no_grad()
def step_in_bases(
    fisher: BlockDiagonalFisher,
    gradient: Tensors,
    momentum: Mapping[str, Tensor],
    decay: float,
    exponent: float,
    nesterov: Tensor,
    accept: Tensor,
    still: Collection[str] = (),
) -> Tensors:
    """Δ by parameter, after the gradient has entered both means.

    Args:
        gradient: g, of all parameters in Fisher blocks of this process that are not idle.
        momentum: β₁ by parameter, 0-dim. The parameters of a block have the same.
        decay: β₂.
        exponent: w.
        nesterov: 0-dim; whether n is not m̂ alone.
        accept: 0-dim; if it is false, the means stay as they are. A block whose squares are not finite keeps its own,
            too.
        still: the parameters without a gradient. Blocks of these alone keep their means.
    """

    def updates(groups: Sequence[BlockGroup], matrices: Iterable[Tensor]) -> Iterator[Tensor]:
        turned = [group.to_eigenbasis(g, basis_of(group)) for group, g in zip(groups, matrices, strict=True)]
        accepted = blocks_in_means(groups, turned, accept, still)
        scalars = scalars_of_blocks(groups, accepted, momentum_of(groups, momentum), decay, nesterov)
        steps, lengths = [], []
        for group, h, accepts, of_group in zip(groups, turned, split_by_group(groups, accepted), scalars, strict=True):
            (average, squares), new = means_of(group), zero_unless_(accepts, h.clone())
            average.moment.mul_(of_group.keep_average).add_(new)
            squares.moment.mul_(of_group.keep_squares).addcmul_(new, new)
            n = h.mul_(of_group.gradient).addcmul_(average.moment, of_group.average)
            root = squares.moment.sqrt().add_(of_group.epsilon)
            step = n.div_(root)
            if exponent:
                direction = with_curvature(group, step, root, exponent)
                lengths.append(norms(group, step, direction))
                step = direction
            steps.append(step)
        if exponent:
            of_steps, of_directions = torch.cat(lengths, dim=1)
            scales = of_steps / of_directions.clamp(min=torch.finfo(of_steps.dtype).tiny)
            for step, scale in zip(steps, split_by_group(groups, scales), strict=True):
                step.mul_(scale)
        for group, step in zip(groups, steps, strict=True):
            yield group.from_eigenbasis(step, basis_of(group))

    updated = [group for group in fisher.kept if group.updated]
    return fisher.of_groups(updated, updates, gradient, kept=True) if updated else {}


def with_curvature(group: BlockGroup, step: Tensor, root: Tensor, exponent: float) -> Tensor:
    """d up to a factor for each block: a (√v̂ / Λ̃)ʷ. step: a. root: √v̂, up to a factor for each block; overwritten."""
    for eigenvalues in eigenvalues_of(group):
        root.div_(eigenvalues)
    return root.pow_(exponent).mul_(step)


def norms(group: BlockGroup, *matrices: Tensor) -> Tensor:
    """|W| of the blocks in matrices W [L, g, o, i], one row for each of them."""
    each = torch.stack([torch.linalg.vector_norm(matrix, dim=(1, 2, 3)) for matrix in matrices])
    return group.total(each.square()).sqrt() if group.divided else each


def blocks_in_means(
    groups: Sequence[BlockGroup], turned: Sequence[Tensor], accept: Tensor, still: Collection[str]
) -> Tensor:
    """Which blocks of all groups take their gradient into the means, [blocks]."""
    accepted = torch.cat([torch.linalg.vector_norm(h, dim=(1, 2, 3)) for h in turned]).isfinite() & accept
    if any(group.divided for group in groups):
        of_groups = accepted.split([len(group) for group in groups])
        accepted = torch.cat([group.agreed(flags) for group, flags in zip(groups, of_groups, strict=True)])
    moving = [not still or not set(r.owners).issubset(still) for group in groups for r in group.registrations]
    if not all(moving):  # the host waits for a copy to the device
        accepted = accepted & torch.tensor(moving, device=accepted.device)
    return accepted


class StepScalars(NamedTuple):
    """The scalars of a step for the blocks of one group, [L, 1, 1, 1] each.

    With m̂ = S / s and v̂ = T / t of sums and their total weights, and n = m m̂ + (1 - m) h:

        n / (√v̂ + ε) = √t (m S / s + (1 - m) h) / (√T + ε √t)

    so that the tensors themselves are divided once.
    """

    keep_average: Tensor  # β₁, or 1 for blocks that keep their means
    keep_squares: Tensor  # β₂, or 1
    gradient: Tensor  # √t (1 - m)
    average: Tensor  # √t m / s
    epsilon: Tensor  # ε √t


def scalars_of_blocks(
    groups: Sequence[BlockGroup], accepted: Tensor, beta: Tensor, decay: float, nesterov: Tensor
) -> list[StepScalars]:
    """The scalars of every group. Stores the new total weights.

    They are computed for all blocks at once, because an operation on a few numbers takes as long as one on thousands.
    """
    of_averages, of_squares = zip(*map(means_of, groups), strict=True)
    keep_average = torch.where(accepted, beta, 1)
    s = torch.cat([stack.total_weight for stack in of_averages]) * keep_average + accepted
    keep_squares = torch.where(accepted, torch.full_like(s, decay), 1)
    t = torch.cat([stack.total_weight for stack in of_squares]) * keep_squares + accepted
    for stacks, weights in ((of_averages, s), (of_squares, t)):
        for stack, weight in zip(stacks, weights.split([len(group) for group in groups]), strict=True):
            stack.total_weight.copy_(weight)
    root, m = t.sqrt(), torch.where(nesterov, beta, 1)
    rows = keep_average, keep_squares, root * (1 - m), root * m / s, EPSILON * root
    return [StepScalars(*part.unbind(-1)) for part in split_by_group(groups, torch.stack(rows, -1))]


def split_by_group(groups: Sequence[BlockGroup], blocks: Tensor) -> Iterator[Tensor]:
    """Scalars of all blocks, [blocks, ...], as those of every group, [L, 1, 1, 1, ...], in its precision."""
    for group, part in zip(groups, blocks.split([len(group) for group in groups]), strict=True):
        scalars = part.reshape(len(part), 1, 1, 1, *part.shape[1:])
        yield scalars.to(group.dtype) if part.is_floating_point() else scalars


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
