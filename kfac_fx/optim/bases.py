"""Eigenbases of the Fisher blocks, with F = Q Λ Qᵀ; Qᵀ W is Q_Gᵀ W Q_A for a Kronecker product.

They are computed when inverses would be (`invert_every`); the host waits for them. On a CPU they are eigenvectors. On
an accelerator only the first are; each later basis is one step of orthogonal iteration from the last one
(`kfac_fx.linalg.matrices.iterated_basis`), as in SOAP (Vyas et al. 2024). Blocks that are no Kronecker product have the
basis of their F, and diagonal blocks that of the parameters.

The bases and the eigenvalues are `extras` of the groups of blocks. They belong to the state of a block, and with owners
to the process that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockDiagonalFisher
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.matrices import copy_if_, full_precision, unsqueeze_like
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.passes.errors import ApproximationError, table
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.statistics import Key

# From a group and the operators of Q'ᵀ Q: pairs of a tensor that lies in the basis, and of its value in the new one.
Carried = Callable[[BlockGroup, Sequence[Tensor]], list[tuple[Tensor, Tensor]]]


def without_basis(registrations: Iterable[Registration]) -> list[Registration]:
    """The registrations whose blocks are no products of sides with eigenvectors of their own."""
    return [registration for registration in registrations if not registration.structure.has_eigenbasis]


def refuse_without_basis(rule: str, registrations: Iterable[Registration]) -> None:
    """Raises ApproximationError for blocks without an eigenbasis. rule: how the user wrote it."""
    wrong = [(str(registration), registration.approximation) for registration in without_basis(registrations)]
    if wrong:
        raise ApproximationError(
            f"{rule} turns gradients with the eigenvectors of A and G, and these blocks are no "
            f"products of A and G:\n{table(wrong)}\n"
            "Compile with 'kron', 'kron_indep', 'diagonal' or 'full' for them, as in approximations={'name': 'kron'}, "
            "or write momentum_type='adaptive'."
        )


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


def basis_of(group: BlockGroup, outputs: bool = True) -> list[Tensor]:
    """The operators that Q consists of; those of dense sides are zero for blocks without a decomposition. outputs:
    whether the output side turns anything."""
    operators = [
        torch.ones(1, dtype=group.dtype, device=group.device)  # a diagonal side turns nothing
        if side.diagonal
        else group.extras[f"basis/{side}"]
        for side in group.sides
    ]
    if not outputs and not group.left.diagonal:
        width = operators[0].shape[-1]
        operators[0] = torch.eye(width, dtype=group.dtype, device=group.device).expand_as(operators[0])
    return operators


def eigenvalues_of(group: BlockGroup) -> list[Tensor]:
    """Λ_G / λ_G + 1 and Λ_A / λ_A + 1, as they broadcast with [L, g, o, i]; their product is Λ̃ / (λ_G λ_A). Blocks that
    are no Kronecker product have Λ / λ + 1 alone."""
    outputs = group.extras["eigenvalues/outputs"]
    if group.right is None:
        return [outputs]
    return [outputs.unsqueeze(-1), group.extras["eigenvalues/inputs"].unsqueeze(-2)]


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
            turn(group, carried)


def iterates_bases(device: torch.device) -> bool:
    """Whether new bases on this device come from the old ones, and not from decompositions of their own."""
    return device.type != "cpu"


def turn(group: BlockGroup, carried: Carried) -> None:
    """Diagonal sides turn nothing. On an accelerator new bases are iterated from the old ones."""
    old = basis_of(group)
    dense = [basis for side, basis in zip(group.sides, old, strict=True) if not side.diagonal]
    iterates = iterates_bases(group.device) and any(bool(basis.any()) for basis in dense)
    of_sides, new = group.side_eigensystems(last=old if iterates else None)
    good = group.agreed(torch.stack([values.flatten(1).isfinite().all(1) for values in of_sides]).all(0))
    stored = [tensor for name, tensor in group.extras.items() if name.startswith("eigenvalues/")]
    renewed = list(zip(stored, damped(group, of_sides), strict=True))
    if group.decomposed:
        with full_precision():
            change = [of if side.diagonal else to.mT @ of for side, to, of in zip(group.sides, new, old, strict=True)]
            renewed += carried(group, change)
        renewed += [(of, to) for side, of, to in zip(group.sides, old, new, strict=True) if not side.diagonal]
    for last, tensor in renewed:
        copy_if_(unsqueeze_like(good, tensor), last, tensor)


def damped(group: BlockGroup, of_sides: Sequence[Tensor]) -> list[Tensor]:
    """Λ_G / λ_G + 1 and Λ_A / λ_A + 1 as the extras have them, from the eigenvalues of every side."""
    assert group.relative_damping is not None, "bug in kfac_fx: bases without a relative damping"
    means = [group.mean_eigenvalue(side) for side in group.sides]
    dampings = [torch.where(mean > 0, group.relative_damping * mean, 1) for mean in means]
    left, *right = [
        values / unsqueeze_like(damping, values) + 1 for damping, values in zip(dampings, of_sides, strict=True)
    ]
    return [left.view(len(group), *group.shape)] if group.right is None else [left, group.input_eigenvalues(right)]
