"""The Fisher by its eigenvectors: s F + δ I for any s and δ, with determinants, diagonals and samples.

All blocks are F = Q Λ Qᵀ, undamped, and so s F + δ I = Q (s Λ + δ) Qᵀ: after one decomposition every power of it, at
every s and δ, is two rotations and what happens to single numbers between them. δ is added as it is, where
`BlockDiagonalFisher.multiply` splits it between the sides of a Kronecker product.

With N training cases, losses that are negative log-likelihoods and a Gaussian prior of precision δ, N F + δ I is the
precision of the Laplace approximation of the posterior (Ritter, Botev & Barber 2018, "A scalable Laplace approximation
for neural networks"), and its determinant what the marginal likelihood needs (Immer et al. 2021, "Scalable marginal
likelihood estimation for model selection in deep learning").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from kfac_fx.blocks.block import check_fits
from kfac_fx.factors.stacks import BlockGroup, Vector
from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.vectors import joined, split
from kfac_fx.passes.errors import FactorNotReady, RegistrationError, nearest, table
from kfac_fx.passes.ir import Registration

Key = tuple[str, ...]
Damping = float | Tensor | Mapping[Key, float | Tensor]


@dataclass(frozen=True)
class System:
    """F = Q Λ Qᵀ of blocks of equal shape. values: [L, g, o, i]."""

    group: BlockGroup
    values: Tensor
    operators: Sequence[Tensor]

    @staticmethod
    def of(group: BlockGroup) -> System:
        """Raises FactorNotReady if there is nothing to decompose yet; waits for the device."""
        values, operators = group.eigensystem()
        finite = values.flatten(1).isfinite().all(1).tolist()
        if wrong := [str(one) for one, fine in zip(group.registrations, finite, strict=True) if not fine]:
            raise FactorNotReady(
                "every batch was skipped as not finite, or no eigenvalues were found, for\n  "
                + "\n  ".join(wrong)
                + "\nLook for NaN in inputs, outputs and parameters, and call estimator.update_covariances again."
            )
        return System(group, values, operators)


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """s F + δ I by blocks, with the factors of the moment when it was made.

    Vectors are dicts as everywhere; many at once have the same dimensions more in front of every tensor, as Jacobians
    have: [cases, outputs, *shape].

    scale: s. damping: δ, a number, a 0-d tensor, or one for every block under its key. Results are differentiable in
    both where they are tensors. Elements of parameters that nothing reads are in no block, and zero in every result.
    Eigenvalues are right to the precision of the factors times the largest: where δ is below s times that, `double()`
    the model.
    """

    systems: Sequence[System]
    shapes: Mapping[str, torch.Size]
    scale: float | Tensor
    damping: Damping

    def __post_init__(self) -> None:
        """Raises ValueError for a negative number, RegistrationError for a damping of other blocks."""
        damping = self.damping
        each = list(damping.values()) if isinstance(damping, Mapping) else [damping]
        for name, value in (("scale", self.scale), *(("damping", one) for one in each)):
            if isinstance(value, (int, float)) and not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        if isinstance(damping, Mapping) and damping.keys() != set(self.keys):
            known = [", ".join(key) for key in self.keys]
            wrong = [
                (repr(key), "is no block." + nearest(", ".join(key), known)) for key in damping.keys() - {*self.keys}
            ]
            wrong += [(repr(key), "is missing") for key in self.keys if key not in damping]
            raise RegistrationError(f"`damping` does not fit the blocks:\n{table(wrong)}")

    def at(self, *, scale: float | Tensor | None = None, damping: Damping | None = None) -> Spectrum:
        """The same with another s or δ, without a decomposition."""
        return replace(
            self,
            scale=self.scale if scale is None else scale,
            damping=self.damping if damping is None else damping,
        )

    @torch.no_grad()
    def corrected(self, gradients: Iterable[Vector]) -> Spectrum:
        """Λ replaced by what the Fisher has along the same eigenvectors: E[(Qᵀ g)²] of gradients g of single cases
        (George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis").

        gradients: batches of vectors with one dimension more for cases, as `torch.func.vmap` of a gradient makes them,
            or with two: squares are summed over the second, and the mean is over cases. With √H Jᵀ, whose H is the
            Hessian of a case's loss by its outputs, the exact Fisher; with gradients of true losses the empirical one.

        Raises ValueError for no cases, NotRegisteredError for vectors that do not fit.
        """
        cases, sums = 0, [torch.zeros_like(system.values) for system in self.systems]
        for batch in gradients:
            lead, parts = self.many(batch)
            cases += lead[0] if lead else 0
            for total, system in zip(sums, self.systems, strict=True):
                turned = system.group.to_eigenbasis(vmap(system.group.pack)(parts), system.operators)
                total += turned.square().sum(0)
        if not cases:
            raise ValueError("the gradients have no cases: every tensor needs a first dimension that counts them.")
        return replace(
            self, systems=[replace(one, values=v / cases) for one, v in zip(self.systems, sums, strict=True)]
        )

    def __repr__(self) -> str:
        return f"Spectrum(scale={self.scale}, damping={self.damping}, {len(self.keys)} blocks)"

    @property
    def registrations(self) -> list[Registration]:
        return [one for system in self.systems for one in system.group.registrations]

    @property
    def keys(self) -> list[Key]:
        """Of the blocks."""
        return [one.parameters for one in self.registrations]

    # --- eigenvalues ------------------------------------------------------------------------------------------------

    def shifted(self, system: System) -> Tensor:
        """s Λ + δ: [L, g, o, i]."""
        damping = self.damping
        if isinstance(damping, Mapping):
            like = system.values
            each = [torch.as_tensor(damping[one.parameters]).to(like) for one in system.group.registrations]
            damping = torch.stack(each).view(-1, 1, 1, 1)
        return self.scale * system.values + damping

    def eigenvalues(self) -> dict[Key, Tensor]:
        """Of s F + δ I: [g, o, i] of every block, not in the order of their size."""
        return {
            one.parameters: values
            for system in self.systems
            for one, values in zip(system.group.registrations, self.shifted(system), strict=True)
        }

    def log_determinant(self) -> Tensor:
        """log det(s F + δ I), over all blocks."""
        return torch.stack([self.shifted(system).log().sum() for system in self.systems]).sum()

    def trace(self, exp: float = 1.0) -> Tensor:
        """tr (s F + δ I)^exp, over all blocks."""
        return torch.stack([(self.shifted(system) ** exp).sum() for system in self.systems]).sum()

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I) v."""
        return self.multiply_matpower(1.0, vector)

    def multiply_inverse(self, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I)⁻¹ v."""
        return self.multiply_matpower(-1.0, vector)

    def multiply_matpower(self, exp: float, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I)^exp v, for every exp."""
        lead, parts = self.many(vector)

        def product(system: System) -> dict[str, Tensor]:
            group, operators = system.group, system.operators
            turned = group.to_eigenbasis(vmap(group.pack)(parts), operators) * self.shifted(system) ** exp
            found: dict[str, Tensor] = vmap(group.unpack)(group.from_eigenbasis(turned, operators), parts)
            return found

        found = self.of_all(product, (math.prod(lead),))
        return {name: found[name].reshape(one.shape) for name, one in vector.items()}

    def many(self, vector: Vector) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """(the dimensions in front of those of the parameters, the vector by the registrations' names with one in their
        place). Raises NotRegisteredError for a vector that does not fit."""
        lead = self.lead(vector)
        check_fits(vector, {name: (*lead, *shape) for name, shape in self.shapes.items()}, alone=True)
        many = {n: dense(one).reshape(math.prod(lead), *self.shapes[n]) for n, one in vector.items()}
        return lead, split(many, self.registrations, 1)

    def lead(self, vector: Vector) -> tuple[int, ...]:
        """The dimensions in front of those of the parameters."""
        known = [name for name in self.shapes if name in vector] if isinstance(vector, Mapping) else []
        more = vector[known[0]].dim() - len(self.shapes[known[0]]) if known else 0
        return tuple(vector[known[0]].shape[: max(0, more)]) if known else ()

    # --- what has no vector to begin with -----------------------------------------------------------------------------

    def diagonal(self, exp: float = 1.0) -> dict[str, Tensor]:
        """The diagonal of (s F + δ I)^exp, shaped as the parameters: with -1 the variances of single parameters."""

        def diagonal(system: System) -> dict[str, Tensor]:
            squares = [operator.square() for operator in system.operators]
            return self.unpacked(system, system.group.from_eigenbasis(self.shifted(system) ** exp, squares))

        return self.of_all(diagonal)

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """So many draws from N(0, (s F + δ I)⁻¹), by parameter: [count, *shape]."""

        def drawn(system: System) -> dict[str, Tensor]:
            values = system.values
            noise = (
                torch.randn(count, *values.shape, dtype=values.dtype, device=values.device, generator=generator)
                * self.shifted(system).rsqrt()
            )
            turned = system.group.from_eigenbasis(noise, system.operators)
            found: dict[str, Tensor] = vmap(lambda one: self.unpacked(system, one))(turned)
            return found

        return self.of_all(drawn, lead=(count,))

    def unpacked(self, system: System, matrices: Tensor) -> dict[str, Tensor]:
        """[L, g, o, i] -> by the registrations' names, in the precision of the factors."""
        names = [name for one in system.group.registrations for name in one.parameters]
        return system.group.unpack(matrices, dict.fromkeys(names, matrices))

    def of_all(self, of: Callable[[System], Mapping[str, Tensor]], lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
        """What the systems have under the registrations' names, by parameter, behind `lead` dimensions."""
        parts = {name: one for system in self.systems for name, one in of(system).items()}
        like = {piece.parameter: parts[piece.name] for one in self.registrations for piece in one.pieces} | parts
        whole = {name: like[name].new_zeros(()).expand((*lead, *shape)) for name, shape in self.shapes.items()}
        return joined(parts, self.registrations, whole, len(lead))
