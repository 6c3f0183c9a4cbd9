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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.arguments import not_negative, one_element, whole_number
from kfac_fx.linalg.matrices import Place, dense
from kfac_fx.linalg.processes import unsharded
from kfac_fx.linalg.vectors import Vector, check_fits, check_kinds, joined, leading, split
from kfac_fx.passes.errors import FactorNotReady, RegistrationError, nearest, table
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.case_gradients import Cases
from kfac_fx.recording.statistics import Key


@dataclass(frozen=True)
class Relative:
    """A damping of c times the mean eigenvalue of s F, for every block its own.

    Attributes:
        factor: c, a number or a 0-d tensor, in which results are differentiable.
    """

    factor: float | Tensor


Amount = float | Tensor | Relative
Damping = Amount | Mapping[Key, Amount] | Mapping[str, Amount]


@dataclass(frozen=True)
class System:
    """F = Q Λ Qᵀ of the blocks of one group.

    Attributes:
        values: Λ [L, g, o, i].
        operators: the tensors that Q consists of.
        factors: A, G and the positions, or F, [L, ...] each, of the time of the decomposition; none where nobody needs
            them any more.
    """

    group: BlockGroup
    values: Tensor
    operators: Sequence[Tensor]
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(group: BlockGroup, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> System:
        """Decompose a group. dtype, device: of the decompositions, see `FisherEstimator.spectrum`.

        Raises FactorNotReady if its factors are missing or not finite; waits for the device."""
        group.check_whole()
        values, operators = group.eigensystem(Place(dtype, device))
        finite = values.flatten(1).isfinite().all(1).tolist()
        if failed := [str(block) for block, fine in zip(group.registrations, finite, strict=True) if not fine]:
            raise FactorNotReady(
                "every batch was skipped as not finite, or no eigenvalues were found, for\n  "
                + "\n  ".join(failed)
                + "\nLook for NaN in inputs, outputs and parameters, and call estimator.update_covariances again."
            )
        factors = {name: stack.value for name, stack in group.factors.items()}
        return System(group.without_factors(range(len(group))), values, operators, factors)

    def part(self, members: Sequence[int]) -> System:
        """Some of the blocks."""
        operators = [self.group.operators_of(index, self.operators) for index in members]
        stacked = self.group.stack_operators(operators) if members else []
        factors = {name: factor[list(members)] for name, factor in self.factors.items()}
        return System(self.group.without_factors(members), self.values[list(members)], stacked, factors)

    def in_basis(self, index: int, cases: Cases) -> Iterator[tuple[slice, Cases]]:
        """Qᵀ times the gradients of cases of one block: (which cases, these cases) in parts.

        Rows are turned before they are multiplied if that takes fewer operations.
        """
        group, (o, i) = self.group, self.values.shape[-2:]
        operators = group.operators_of(index, self.operators)
        of_rows = cases.positions * (o * o + i * i) < o * i * (o + i)
        if cases.whole is None and group.separable and of_rows:
            yield slice(0, len(cases)), self.turned_rows(cases, operators)
            return
        for part, some in cases.chunks():
            # A group of one block, in whose place the operators of that block stand.
            turned = group.to_eigenbasis(some.gradients().to(self.values.dtype).unsqueeze(1), operators)
            yield part, replace(some, uses=(), whole=turned.squeeze(1))

    def turned_rows(self, cases: Cases, operators: Sequence[Tensor]) -> Cases:
        """With Q_Aᵀ r for every row and Q_Gᵀ d for every gradient row. Diagonal sides have unit vectors as Q."""
        group, (left, *right) = self.group, operators

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


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """s F + δ I by blocks, with the factors of the time when it was made.

    Vectors are dicts of tensors by parameter name. All tensors of a vector may have the same additional dimensions in
    front, for many vectors at once: a Jacobian is [cases, outputs, *shape].

    Elements of parameters that nothing reads are in no block, and zero in every result. The error of an eigenvalue is
    the precision of the factors times the largest eigenvalue. If δ is below s times that error, use a model in float64.

    Attributes:
        scale: s. Results are differentiable in it if it is a tensor.
        damping: δ, a number, a 0-d tensor or `Relative`. It may also be a mapping from the keys of all blocks, or from
            patterns of parameter names such as "layers.*" and "*", of which the first that matches counts; a block has
            one damping. Results are differentiable in it, too.
    """

    systems: Sequence[System]
    shapes: Mapping[str, torch.Size]
    scale: float | Tensor
    damping: Damping

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that are negative or not finite, RegistrationError for a damping of other
        blocks."""
        damping = self.damping
        for name, value in (("scale", self.scale), *(("damping", value) for value in amounts_in(damping))):
            if isinstance(value, Tensor) and value.device.type != "cpu":  # the host would wait to read it
                one_element(name, value)
            else:
                not_negative(name, value)
        if isinstance(damping, Mapping):
            self.check_damping(damping)

    def check_damping(self, damping: Mapping[Any, Amount]) -> None:
        """Raises RegistrationError unless there is one amount for every block."""
        keys = [", ".join(key) for key in self.keys]
        wrong = []
        for key in damping:
            if isinstance(key, str) and not any(matches(name, key) for names in self.keys for name in names):
                wrong.append((repr(key), "matches no parameter." + nearest(key, self.shapes)))
            if not isinstance(key, str) and key not in self.keys:
                wrong.append((repr(key), "is not a block." + nearest(", ".join(key), keys)))
        for names in self.keys:
            matching = {pattern_of(name, damping) for name in names} if names not in damping else {None}
            patterns = [repr(pattern) for pattern in sorted(filter(None, matching))]
            if len(patterns) > 1:
                wrong.append((repr(names), f"is one block with the dampings of {' and '.join(patterns)}"))
            elif len(matching) > 1:
                wrong.append((repr(names), f"is one block, of which {patterns[0]} matches a part"))
            elif matching == {None} and names not in damping:
                wrong.append((repr(names), "is missing"))
        if wrong:
            raise RegistrationError(f"`damping` does not fit the blocks:\n{table(wrong)}")

    def at(self, *, scale: float | Tensor | None = None, damping: Damping | None = None) -> Spectrum:
        """The same spectrum with another s or δ, without a decomposition."""
        return replace(
            self, scale=self.scale if scale is None else scale, damping=self.damping if damping is None else damping
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
        values = self.scale * system.values
        if not isinstance(self.damping, (Mapping, Relative)):
            return values + self.damping
        amounts = [self.amount_of(registration.parameters) for registration in system.group.registrations]
        means = values.flatten(1).mean(1)
        each = [
            amount.factor * mean if isinstance(amount, Relative) else torch.as_tensor(amount).to(values)
            for amount, mean in zip(amounts, means, strict=True)
        ]
        return values + torch.stack(each).view(-1, 1, 1, 1)

    def amount_of(self, key: Key) -> Amount:
        """The damping of one block."""
        if not isinstance(self.damping, Mapping):
            return self.damping
        by_name: Mapping[Any, Amount] = self.damping
        return by_name[key if key in by_name else pattern_of(key[0], by_name)]

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
        check_kinds(vector, self.shapes)
        lead = leading(vector, self.shapes)
        check_fits(vector, {name: (*lead, *shape) for name, shape in self.shapes.items()}, alone=True)
        whole = {name: dense(unsharded(tensor)) for name, tensor in vector.items()}
        many = {name: tensor.reshape(math.prod(lead), *self.shapes[name]) for name, tensor in whole.items()}
        return lead, split(many, self.registrations, 1)

    # --- diagonals and samples --------------------------------------------------------------------------------------

    def diagonal(self, exp: float = 1.0) -> dict[str, Tensor]:
        """The diagonal of (s F + δ I)^exp by parameter; with exp = -1 the variances of single elements."""

        def diagonal(system: System) -> dict[str, Tensor]:
            squares = [operator.square() for operator in system.operators]
            return self.unpacked(system, system.group.from_eigenbasis(self.shifted(system) ** exp, squares))

        return self.of_all(diagonal)

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw `count` samples from N(0, (s F + δ I)⁻¹), by parameter: [count, *shape]."""
        whole_number(1, "samples")("count", count)

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


def amounts_in(damping: Damping) -> list[float | Tensor]:
    """The numbers that a damping consists of."""
    amounts = list(damping.values()) if isinstance(damping, Mapping) else [damping]
    return [amount.factor if isinstance(amount, Relative) else amount for amount in amounts]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of this parameter or piece, or of a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def pattern_of(name: str, damping: Mapping[Any, Any]) -> str | None:
    """The first pattern that matches the name of a parameter."""
    return next((pattern for pattern in damping if isinstance(pattern, str) and matches(name, pattern)), None)
