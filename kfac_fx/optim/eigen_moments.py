"""The momentum type "eigen_moments": Adam in the eigenbasis of the Fisher blocks.

With F = Q Λ Qᵀ of a block (Qᵀ W is Q_Gᵀ W Q_A for a Kronecker product), its gradient g and its numbers of steps t:

    m <- β₁ m + (1 - β₁) g           β₁: `momentum`
    v <- β₂ v + (1 - β₂) (Qᵀ g)²     β₂: `second_moment_decay`, elementwise
    Δ = Q [Qᵀ n / (√v̂ + ε)]          n = β₁ m̂ + (1 - β₁) g or n = m̂; m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ)

v is the diagonal of the second moment of gradients in the basis, which George et al. 2018 ("Fast approximate natural
gradient descent in a Kronecker-factored eigenbasis", algorithm 1) put in the place of Λ, here averaged over steps.
The first n is Nesterov's momentum in Adam (Dozat 2016, "Incorporating Nesterov momentum into Adam", algorithm 8, with
one bias correction for both terms); which of the two a step has is decided in `kfac_fx.optim.step_checks`. Adam in an
eigenbasis is SOAP (Vyas et al. 2024, "SOAP: improving and stabilizing Shampoo using Adam", algorithm 3), with n = m̂ and
factors that are averages of g gᵀ and gᵀ g; here they are K-FAC's A and G. Blocks that are no Kronecker product have the
basis of their F, and diagonal blocks that of the parameters, so these follow Adam itself.

Bases are computed when inverses would be (`invert_every`); the host waits for them. In a new basis Q', v becomes the
diagonal of Q'ᵀ Q diag(v) Qᵀ Q', which is (Q'ᵀ Q)² v with the squares of the elements, so the order and the signs of
eigenvectors do not matter. Eigenvalues are not used, and there is no damping.

The bases and v are the `extras` of the groups of blocks. They belong to the state of a block, and with owners to the
process that keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from kfac_fx.blocks.fisher import BlockDiagonalFisher
from kfac_fx.factors.factor import Stack
from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.linalg.matrices import are_finite, full_precision, unsqueeze_like
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.passes.errors import ApproximationError, table
from kfac_fx.passes.ir import Registration
from kfac_fx.statistics.moments import Key

EPSILON = 1e-8
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
    """The extras of a new group: zero bases of the dense sides, and second moments before the first update."""
    bases = {
        f"basis/{side}": torch.zeros_like(group.as_operator(side, group.factors[side.factor].moment))
        for side in group.decomposed
    }
    squares = Stack.zeros(len(group), group.shape, group.dtype, group.device)
    return {**bases, "squares/moment": squares.moment, "squares/total_weight": squares.total_weight}


def basis_of(group: BlockGroup) -> list[Tensor]:
    """The operators that Q consists of; those of dense sides are zero for blocks without a decomposition."""
    unit = torch.ones(1, dtype=group.dtype, device=group.device)  # a diagonal side turns nothing
    return [unit if side.diagonal else group.extras[f"basis/{side}"] for side in group.sides]


def squares_of(group: BlockGroup) -> Stack:
    """v as a running average, [L, g, o, i]."""
    return Stack(group.extras["squares/moment"], group.extras["squares/total_weight"])


@torch.no_grad()
def update_bases(fisher: BlockDiagonalFisher, keys: Collection[Key] | None = None) -> None:
    """Decompose the factors, and turn the second moments into the new bases.

    Blocks whose factors are not finite keep their bases. keys: as of `BlockDiagonalFisher.decompose`.

    Raises FactorNotReady before the first update of the factors.
    """
    for group in fisher.decompose(keys):
        if group.here:
            turn(group)


def turn(group: BlockGroup) -> None:
    """Diagonal sides turn nothing, and need no decomposition."""
    if not group.decomposed:
        return
    values, new = group.eigensystem()
    good = values.flatten(1).isfinite().all(1)
    old = basis_of(group)
    with full_precision():
        squared = [
            of if side.diagonal else (to.mT @ of).square() for side, to, of in zip(group.sides, new, old, strict=True)
        ]
        moment = squares_of(group).moment
        turned = group.applied(moment, squared)
    bases = [(of, to) for side, of, to in zip(group.sides, old, new, strict=True) if not side.diagonal]
    for last, tensor in ((moment, turned), *bases):
        torch.where(unsqueeze_like(good, tensor), tensor, last, out=last)


@torch.no_grad()
def adam_in_bases(
    fisher: BlockDiagonalFisher,
    gradient: Tensors,
    average: Tensors,
    decay: float,
    accept: Tensor,
    still: Collection[str],
) -> Tensors:
    """Q [Qᵀ n / (√v̂ + ε)] by parameter, after the gradient has entered v.

    Args:
        gradient, average: g and n, of all parameters in Fisher blocks of this process that are not idle.
        decay: β₂.
        accept: 0-dim; if it is false, v stays as it is. A block whose squares are not finite keeps its own, too.
        still: the parameters without a gradient. Blocks of these alone keep their v.
    """

    def adam(group: BlockGroup, m: Tensor, g: Tensor) -> Tensor:
        basis, squares = basis_of(group), squares_of(group)
        averaged, turned = (group.to_eigenbasis(matrix, basis) for matrix in (m, g))  # a stack takes longer
        square = turned.square()
        accepted = group.agreed(are_finite(square)) & accept
        moving = [not set(registration.owners).issubset(still) for registration in group.registrations]
        if not all(moving):
            accepted = accepted & torch.tensor(moving, device=accepted.device)
        squares.update(square, accepted, decay, 1.0)
        return group.from_eigenbasis(averaged / (squares.value.sqrt() + EPSILON), basis)

    groups = [group for group in fisher.kept if group.updated]
    return fisher.of_groups(groups, adam, average, gradient, kept=True)
