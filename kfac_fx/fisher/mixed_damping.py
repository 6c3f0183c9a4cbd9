"""Blocks with several dampings: s F + D, where the diagonal matrix D has another number for each parameter of a block.

D does not have the eigenvectors of F. With R = D^½,

    s F + D = R (s R⁻¹ F R⁻¹ + I) R = R Q (s Λ + I) Qᵀ R,

where Q and Λ are those of R⁻¹ F R⁻¹, which do not depend on s. So inverses, products, determinants, diagonals and
samples are those of the scaled matrix between two R. Other powers have no such form.

R⁻¹ F R⁻¹ is decomposed once for every D. A diagonal F has the same eigenvectors. If D is one for all outputs of
F = G ⊗ A, as for a weight and its bias, only A is decomposed. Other blocks are written out if they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.fisher.systems import System
from kfac_fx.linalg.matrices import full_precision, rescued_eigh
from kfac_fx.passes.errors import ApproximationError

WRITTEN_OUT = 2048  # elements of a block, at most
ROUNDINGS = 64  # ε, in the eigenvalues of a product of two sides


class DenseBasis(BlockGroup):
    """One block with any eigenvectors [1, P, P], for matrices of P elements."""

    separable = False

    @staticmethod
    def of(group: BlockGroup) -> DenseBasis:
        """group: of one block, without factors."""
        dense = DenseBasis.__new__(DenseBasis)
        dense.__dict__.update(group.__dict__)
        return dense

    def applied(self, matrix: Tensor, operators: Sequence[Tensor], transpose: bool = False) -> Tensor:
        (vectors,) = operators
        columns = matrix.flatten(-4).unsqueeze(-1)
        return ((vectors[0].mT if transpose else vectors[0]) @ columns).view(matrix.shape)


def scaled(system: System, damping: Tensor) -> System:
    """Q and Λ of R⁻¹ F R⁻¹ for the system of one block.

    damping: D [1, g, o, i]. The eigenvalues are differentiable in it, and the eigenvectors are constants.

    Raises ValueError if one of its numbers is not positive, ApproximationError for a block without a structure that is
    too wide to be written out. Waits for the device.
    """
    (registration,), group = system.group.registrations, system.group
    if not bool((damping > 0).all()):
        raise ValueError(
            f"{registration} has several dampings, and one of them is zero: all of them must be positive. Pass a small "
            "number instead."
        )
    root = damping.sqrt()
    by_input = bool((damping == damping[:, :, :1]).all())
    kronecker = type(group) is BlockGroup and group.right is not None
    plain = type(group) is BlockGroup and all(side.diagonal for side in group.sides)
    with full_precision():
        if plain or (kronecker and by_input and group.sides[1].diagonal):  # R commutes with Q
            return replace(system, values=system.values / damping, factors={}, root=root)
        product = sides_of(system.values) if kronecker and by_input else None
        if product is not None:
            outputs, inputs = product
            left, right = system.operators
            values, vectors = decomposed(right, inputs, root[:, :, 0])
            whole = outputs.unsqueeze(-1) * values.unsqueeze(-2)
            return System(group, whole, [left, vectors], root=root)
        rows = system.values.numel()
        if rows > WRITTEN_OUT:
            raise ApproximationError(
                f"{registration} has several dampings and {rows:,} elements, of which at most {WRITTEN_OUT:,} can be "
                "written out. The structure of a Kronecker product would be needed: one damping for all outputs of a "
                "layer, and eigenvalues of factors, without `correct`. Pass one damping for this block."
            )
        basis = torch.eye(rows, dtype=system.values.dtype, device=system.values.device).view(rows, *system.values.shape)
        columns = group.from_eigenbasis(basis, system.operators).flatten(1).mT
        values, vectors = decomposed(columns.unsqueeze(0), system.values.flatten().unsqueeze(0), root.flatten(1))
    return System(DenseBasis.of(group), values.view(system.values.shape), [vectors], root=root)


def sides_of(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """γ [..., o] and α [..., i] of eigenvalues γ αᵀ; None if they are no such products, as corrected ones."""
    inputs = values.sum(-2)
    outputs = values.sum(-1) / inputs.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    rounding = ROUNDINGS * torch.finfo(values.dtype).eps * values.amax((-1, -2), keepdim=True)
    whole = outputs.unsqueeze(-1) * inputs.unsqueeze(-2)
    return (outputs, inputs) if bool(((whole - values).abs() <= rounding).all()) else None


def decomposed(vectors: Tensor, values: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues [..., d] and eigenvectors [..., d, d] of R⁻¹ V diag(values) Vᵀ R⁻¹."""
    matrices = (vectors * values.unsqueeze(-2)) @ vectors.mT / (root.unsqueeze(-1) * root.unsqueeze(-2))
    flat = matrices.flatten(0, -3)
    with torch.no_grad():
        found, turned = rescued_eigh(flat)
    if flat.requires_grad and torch.is_grad_enabled():
        found = torch.linalg.eigvalsh(flat)
    return found.clamp(min=0).view(values.shape), turned.view(vectors.shape)
