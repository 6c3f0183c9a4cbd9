"""The Fisher by its eigenvectors: s F + δ I for any s and δ, with determinants, diagonals and samples.

All undamped blocks are F = Q Λ Qᵀ, so s F + δ I = Q (s Λ + δ) Qᵀ. After one decomposition, every power at every s and δ
takes two rotations, with operations on single numbers between them. δ is added as it is, whereas
`BlockDiagonalFisher.multiply` splits λ between the sides of a Kronecker product.

Let N be the number of training cases. If the losses are negative log-likelihoods and the prior is Gaussian with
precision δ, then N F + δ I is the precision of the Laplace approximation of the posterior (Ritter, Botev & Barber 2018,
"A scalable Laplace approximation for neural networks"). The marginal likelihood needs its determinant (Immer et al.
2021, "Scalable marginal likelihood estimation for model selection in deep learning").
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
from kfac_fx.statistics.moments import Key

Damping = float | Tensor | Mapping[Key, float | Tensor]


@dataclass(frozen=True)
class System:
    """F = Q Λ Qᵀ of the blocks of one group. values: Λ [L, g, o, i]; operators: what Q consists of."""

    group: BlockGroup
    values: Tensor
    operators: Sequence[Tensor]

    @staticmethod
    def of(group: BlockGroup) -> System:
        """Decompose a group. Raises FactorNotReady if its factors are missing or not finite; waits for the device."""
        values, operators = group.eigensystem()
        finite = values.flatten(1).isfinite().all(1).tolist()
        if failed := [str(block) for block, fine in zip(group.registrations, finite, strict=True) if not fine]:
            raise FactorNotReady(
                "every batch was skipped as not finite, or no eigenvalues were found, for\n  "
                + "\n  ".join(failed)
                + "\nLook for NaN in inputs, outputs and parameters, and call estimator.update_covariances again."
            )
        return System(group, values, operators)


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """s F + δ I by blocks, with the factors of the time when it was made.

    Vectors are dicts of tensors by parameter name. All tensors of a vector may have the same additional dimensions in
    front, for many vectors at once: a Jacobian is [cases, outputs, *shape].

    Elements of parameters that nothing reads are in no block, and zero in every result. The error of an eigenvalue is
    the precision of the factors times the largest eigenvalue. If δ is below s times that error, use a model in float64.

    Attributes:
        scale: s. Results are differentiable in it if it is a tensor.
        damping: δ, a number, a 0-d tensor, or one for every block by its key. Results are differentiable in it, too.
    """

    systems: Sequence[System]
    shapes: Mapping[str, torch.Size]
    scale: float | Tensor
    damping: Damping

    def __post_init__(self) -> None:
        """Raises ValueError for a negative number, RegistrationError for a damping of other blocks."""
        damping = self.damping
        dampings = list(damping.values()) if isinstance(damping, Mapping) else [damping]
        for name, value in (("scale", self.scale), *(("damping", value) for value in dampings)):
            if isinstance(value, (int, float)) and not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        if isinstance(damping, Mapping) and damping.keys() != set(self.keys):
            keys = [", ".join(key) for key in self.keys]
            wrong = [
                (repr(key), "is not a block." + nearest(", ".join(key), keys)) for key in damping.keys() - {*self.keys}
            ]
            wrong += [(repr(key), "is missing") for key in self.keys if key not in damping]
            raise RegistrationError(f"`damping` does not fit the blocks:\n{table(wrong)}")

    def at(self, *, scale: float | Tensor | None = None, damping: Damping | None = None) -> Spectrum:
        """The same spectrum with another s or δ, without a decomposition."""
        return replace(
            self,
            scale=self.scale if scale is None else scale,
            damping=self.damping if damping is None else damping,
        )

    @torch.no_grad()
    def corrected(self, gradients: Iterable[Vector]) -> Spectrum:
        """Replace Λ by the diagonal of the Fisher in the basis Q: E[(Qᵀ g)²] over the gradients g of single cases
        (George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis").

        Args:
            gradients: batches of vectors with one additional dimension for cases, as `torch.func.vmap` of a gradient
                makes them. With a second one, squares are summed over it. √H Jᵀ, with H the Hessian of the loss of a
                case by its outputs, yields the exact Fisher; gradients of true losses yield the empirical Fisher.

        Raises:
            ValueError: there are no cases.
            NotRegisteredError: a vector does not fit.
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
        systems = [replace(system, values=total / cases) for system, total in zip(self.systems, sums, strict=True)]
        return replace(self, systems=systems)

    def __repr__(self) -> str:
        return f"Spectrum(scale={self.scale}, damping={self.damping}, {len(self.keys)} blocks)"

    @property
    def registrations(self) -> list[Registration]:
        """The registrations of all blocks."""
        return [registration for system in self.systems for registration in system.group.registrations]

    @property
    def keys(self) -> list[Key]:
        """The keys of all blocks: the names of their parameters."""
        return [registration.parameters for registration in self.registrations]

    # --- eigenvalues ------------------------------------------------------------------------------------------------

    def shifted(self, system: System) -> Tensor:
        """s Λ + δ: [L, g, o, i]."""
        damping = self.damping
        if isinstance(damping, Mapping):
            keys = [registration.parameters for registration in system.group.registrations]
            damping = torch.stack([torch.as_tensor(damping[key]).to(system.values) for key in keys]).view(-1, 1, 1, 1)
        return self.scale * system.values + damping

    def eigenvalues(self) -> dict[Key, Tensor]:
        """The eigenvalues of s F + δ I, [g, o, i] of every block, not sorted."""
        return {
            registration.parameters: values
            for system in self.systems
            for registration, values in zip(system.group.registrations, self.shifted(system), strict=True)
        }

    def log_determinant(self) -> Tensor:
        """log det(s F + δ I) over all blocks, []."""
        return torch.stack([self.shifted(system).log().sum() for system in self.systems]).sum()

    def trace(self, exp: float = 1.0) -> Tensor:
        """tr (s F + δ I)^exp over all blocks, []."""
        return torch.stack([(self.shifted(system) ** exp).sum() for system in self.systems]).sum()

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I) v."""
        return self.multiply_matpower(1.0, vector)

    def multiply_inverse(self, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I)⁻¹ v."""
        return self.multiply_matpower(-1.0, vector)

    def multiply_matpower(self, exp: float, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I)^exp v for any real exp. Raises NotRegisteredError if the vector does not fit."""
        lead, parts = self.many(vector)

        def product(system: System) -> dict[str, Tensor]:
            group, operators = system.group, system.operators
            turned = group.to_eigenbasis(vmap(group.pack)(parts), operators) * self.shifted(system) ** exp
            unpacked: dict[str, Tensor] = vmap(group.unpack)(group.from_eigenbasis(turned, operators), parts)
            return unpacked

        products = self.of_all(product, (math.prod(lead),))
        return {name: products[name].reshape(tensor.shape) for name, tensor in vector.items()}

    def many(self, vector: Vector) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """(the additional dimensions, the vector by the names of the registrations with these flattened into one)."""
        lead = self.lead(vector)
        check_fits(vector, {name: (*lead, *shape) for name, shape in self.shapes.items()}, alone=True)
        many = {name: dense(tensor).reshape(math.prod(lead), *self.shapes[name]) for name, tensor in vector.items()}
        return lead, split(many, self.registrations, 1)

    def lead(self, vector: Vector) -> tuple[int, ...]:
        """The additional dimensions of a vector, in front of those of the parameters."""
        name = next((name for name in self.shapes if name in vector), None) if isinstance(vector, Mapping) else None
        if name is None:
            return ()
        return tuple(vector[name].shape[: max(0, vector[name].dim() - len(self.shapes[name]))])

    # --- diagonals and samples --------------------------------------------------------------------------------------

    def diagonal(self, exp: float = 1.0) -> dict[str, Tensor]:
        """The diagonal of (s F + δ I)^exp by parameter; with exp = -1 the variances of single elements."""

        def diagonal(system: System) -> dict[str, Tensor]:
            squares = [operator.square() for operator in system.operators]
            return self.unpacked(system, system.group.from_eigenbasis(self.shifted(system) ** exp, squares))

        return self.of_all(diagonal)

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw `count` samples from N(0, (s F + δ I)⁻¹), by parameter: [count, *shape]."""

        def drawn(system: System) -> dict[str, Tensor]:
            values = system.values
            noise = (
                torch.randn(count, *values.shape, dtype=values.dtype, device=values.device, generator=generator)
                * self.shifted(system).rsqrt()
            )
            turned = system.group.from_eigenbasis(noise, system.operators)
            unpacked: dict[str, Tensor] = vmap(lambda matrices: self.unpacked(system, matrices))(turned)
            return unpacked

        return self.of_all(drawn, lead=(count,))

    def unpacked(self, system: System, matrices: Tensor) -> dict[str, Tensor]:
        """From [L, g, o, i] to tensors by the names of the registrations, in the precision of the factors."""
        names = [name for registration in system.group.registrations for name in registration.parameters]
        return system.group.unpack(matrices, dict.fromkeys(names, matrices))

    def of_all(self, of: Callable[[System], Mapping[str, Tensor]], lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
        """The results of a function of all systems, joined to tensors [*lead, *shape] by parameter."""
        registrations = self.registrations
        parts = {name: tensor for system in self.systems for name, tensor in of(system).items()}
        like = {piece.parameter: parts[piece.name] for r in registrations for piece in r.pieces} | parts
        whole = {name: like[name].new_zeros(()).expand((*lead, *shape)) for name, shape in self.shapes.items()}
        return joined(parts, registrations, whole, len(lead))
