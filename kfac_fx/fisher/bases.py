"""Eigenbases of the Fisher blocks, with F = Q Λ Qᵀ; Qᵀ W is Q_Gᵀ W Q_A for a Kronecker product.

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
of the d rows. The report names them. An optimizer that loads the state of another kind of device keeps bases as the
state has them (`of_another_kind`): the second moments in it are of directions in these bases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockDiagonalFisher, key_text
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.entries import ORTHOGONAL, Values
from kfac_fx.linalg.matrices import (
    as_blocks,
    basis_dtype,
    blocks_of,
    copy_if_,
    full_precision,
    is_in_blocks,
    unsqueeze_like,
)
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.passes.approximations import Side
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.statistics import Key

DEVICE_KINDS = ("cpu", "accelerator")  # of devices, which keep wide bases in different ways
WIDEST = {"cpu": 768}  # basis, by kind of device; accelerators have whole ones
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
    """One of `DEVICE_KINDS`."""
    return "cpu" if device.type == "cpu" else "accelerator"


def block_width(group: BlockGroup, side: Side, kind: str | None = None) -> int:
    """The width of the diagonal blocks of the basis of a dense side: its own without such blocks.

    A bias is one more column of a layer, and does not count.

    kind: of device; None: as the group keeps its bases.
    """
    width, widest = group.size(side), WIDEST.get(kind or group.bases_as or kind_of(group.device))
    if widest is None or width <= widest + 1 or group.right is None:
        return width
    return -(-width // -(-(width - 1) // widest))


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
    for kind in (fisher.bases_as, None, *DEVICE_KINDS):
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
