"""The Fisher by its eigenvectors: s F + δ I for any s and δ, with determinants, diagonals and samples.

All undamped blocks are F = Q Λ Qᵀ, so s F + δ I = Q (s Λ + δ) Qᵀ. After one decomposition, every power at every s and δ
takes two rotations, with operations on single numbers between them. δ is added as it is, whereas
`BlockDiagonalFisher.multiply` splits λ between the sides of a Kronecker product.

Let N be the number of training cases. If the losses are negative log-likelihoods and the prior is Gaussian with
precision δ, then N F + δ I is the precision of the Laplace approximation of the posterior (Ritter, Botev & Barber 2018,
"A scalable Laplace approximation for neural networks"). The marginal likelihood needs its determinant (Immer et al.
2021, "Scalable marginal likelihood estimation for model selection in deep learning").

**Several dampings** in one block: s F + D, where the diagonal matrix D has another number for each parameter of a
block.

D does not have the eigenvectors of F. With R = D^½,

    s F + D = R (s R⁻¹ F R⁻¹ + I) R = R Q (s Λ + I) Qᵀ R,

where Q and Λ are those of R⁻¹ F R⁻¹, which do not depend on s. So inverses, products, determinants, diagonals and
samples are those of the scaled matrix between two R. Other powers have no such form.

R⁻¹ F R⁻¹ is decomposed once for every D. A diagonal F has the same eigenvectors. If D is one for all outputs of
F = G ⊗ A, as for a weight and its bias, only A is decomposed. Other blocks are written out if they are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.func import vmap

from kfac_fx.fisher.groups import BlockGroup, ByBlock, System
from kfac_fx.linalg.arguments import explains_calls, finite, not_negative, one_element, whole_number
from kfac_fx.linalg.matrices import dense, full_precision, rescued_eigh
from kfac_fx.linalg.processes import unsharded
from kfac_fx.linalg.vectors import Vector, check_fits, check_kinds, joined, leading, like_vector, real_vector, split
from kfac_fx.passes.errors import ApproximationError, RegistrationError, nearest, table
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import without_autocast
from kfac_fx.recording.statistics import Key

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
    with full_precision(), without_autocast(system.values.device):
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


@dataclass(frozen=True)
class Relative:
    """A damping of c times the mean eigenvalue of s F, for every block its own.

    Attributes:
        factor: c, a number or a 0-d tensor, in which results are differentiable.
    """

    factor: float | Tensor

    def __post_init__(self) -> None:
        """Raises ValueError for a factor that is no number, or negative."""
        check_amount("the factor of Relative", self.factor)


def check_amount(name: str, value: Any) -> None:
    """Raises ValueError for what is no number, and for a negative or infinite one unless the host would wait to read
    it."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        one_element(name, value)
    else:
        not_negative(name, value)


MISSING = "is missing"
Amount = float | Tensor | Relative
Damping = Amount | Mapping[Key, Amount] | Mapping[str, Amount]


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
            patterns of parameter names such as "layers.*" and "*", of which the first that matches counts. Results are
            differentiable in it, too. The parameters of a block may have several dampings, as in {"*.bias": 1e-3, "*":
            1.0}: then s F + D has no eigenvectors in common with F, and only inverses, products, determinants,
            diagonals, samples and scores (`kfac_fx.fisher.spectrum`), of which the determinant alone is
            differentiable in these dampings.
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
            check_amount(name, value)
        if isinstance(damping, Mapping):
            self.check_damping(damping)

    def check_damping(self, damping: Mapping[Any, Amount]) -> None:
        """Raises RegistrationError unless there is an amount for every parameter."""
        keys = [", ".join(key) for key in self.keys]
        wrong = []
        for key in damping:
            if isinstance(key, str) and not any(matches(name, key) for names in self.keys for name in names):
                wrong.append((repr(key), "matches no parameter." + nearest(key, self.shapes)))
            if not isinstance(key, str) and key not in self.keys:
                wrong.append((repr(key), "is not a block." + nearest(", ".join(key), keys)))
        for names in self.keys:
            if names in damping:
                continue
            absent = [name for name in names if pattern_of(name, damping) is None]
            if absent and len(absent) < len(names):
                wrong.append((repr(names), f"is one block, of which {', '.join(absent)} has no damping"))
            elif absent:
                wrong.append((repr(names), MISSING))
        if wrong:
            missing = any(words == MISSING for _, words in wrong)
            rest = '\nGive the rest one damping by the pattern "*", as in {"fc.*": 0.1, "*": 0.01}.' if missing else ""
            raise RegistrationError(f"`damping` does not fit the blocks:\n{table(wrong)}{rest}")

    def at(self, *, scale: float | Tensor | None = None, damping: Damping | None = None) -> Self:
        """The same spectrum with another s or δ, without a decomposition."""
        return replace(
            self, scale=self.scale if scale is None else scale, damping=self.damping if damping is None else damping
        )

    @torch.no_grad()
    def corrected(self, gradients: Iterable[Vector]) -> Self:
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
        if system.root is not None:
            return values + 1
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
        """The damping of one block that has a single one."""
        return self.amounts_of(key)[0]

    def amounts_of(self, key: Key) -> list[Amount]:
        """The dampings of the parameters of one block."""
        if not isinstance(self.damping, Mapping):
            return [self.damping] * len(key)
        by_name: Mapping[Any, Amount] = self.damping
        return [by_name[key if key in by_name else pattern_of(name, by_name)] for name in key]

    def is_mixed(self, key: Key) -> bool:
        """Whether the parameters of a block have several dampings."""
        first, *others = self.amounts_of(key)
        return any(amount is not first and not same_number(amount, first) for amount in others)

    @cached_property
    def used(self) -> Sequence[System]:
        """The systems that results are computed with: a block with several dampings has one of its own."""
        if not isinstance(self.damping, Mapping):
            return self.systems
        used: list[System] = []
        for system in self.systems:
            mixed = [self.is_mixed(registration.parameters) for registration in system.group.registrations]
            if not any(mixed):
                used.append(system)
                continue
            if not all(mixed):
                used.append(system.part([index for index, several in enumerate(mixed) if not several]))
            used += [scaled(one := system.part([index]), self.dampings(one)) for index, m in enumerate(mixed) if m]
        return used

    def dampings(self, system: System) -> Tensor:
        """D of one block, [1, g, o, i]."""
        (registration,), (form,) = system.group.registrations, system.group.forms
        mean = (self.scale * system.values).mean()
        numbers = [
            amount.factor * mean if isinstance(amount, Relative) else torch.as_tensor(amount).to(system.values)
            for amount in self.amounts_of(registration.parameters)
        ]
        shapes = form.shapes
        return system.group.pack(
            {
                name: number.expand(tuple(shapes[name]))
                for name, number in zip(registration.parameters, numbers, strict=True)
            }
        )

    def root_of(self, system: System, exp: float) -> Tensor | None:
        """R^exp of a block with several dampings, between which its scaled matrix stands; None for other systems.

        Raises ValueError if the exponent is none of -1 and 1, or a derivative by the dampings is asked for.
        """
        if system.root is None:
            return None
        (registration,) = system.group.registrations
        if exp not in (-1, 1):
            raise ValueError(
                f"{registration} has several dampings, and the power {exp:g} of s F + D has no form with one "
                "decomposition: take the powers 1 and -1, or one damping for the block."
            )
        if torch.is_grad_enabled() and system.root.requires_grad:
            raise ValueError(
                f"{registration} has several dampings, and in these only the determinant is differentiable: pass their "
                "values, as in damping.detach(), or one damping for the block."
            )
        return system.root**exp

    def eigenvalues(self) -> ByBlock[Tensor]:
        """The eigenvalues of s F + δ I, [g, o, i] of every block, not sorted.

        Raises ValueError for a block with several dampings.
        """
        if mixed := [
            str(registration) for registration in self.registrations if self.is_mixed(registration.parameters)
        ]:
            raise ValueError(
                f"the eigenvalues of s F + D are not known for blocks with several dampings: {'; '.join(mixed)}. Take "
                "those of F, spectrum.at(damping=0.0).eigenvalues()."
            )
        return ByBlock(
            (registration.parameters, values)
            for system in self.systems
            for registration, values in zip(system.group.registrations, self.shifted(system), strict=True)
        )

    @property
    def squared(self) -> bool:
        """Whether eigenvalues are means of squares, and not those of the factors."""
        return False

    def zeros(self, system: System, index: int) -> Tensor:
        """Which eigenvalues of a block are zero to rounding, and not damped: [g, o, i].

        An eigenvalue of the factors is rounded to ε of the largest. A corrected one is a mean of squares of coordinates
        that are rounded to ε of the gradient, so its rounding is ε² of the largest.
        """
        shifted = self.shifted(system)[index].detach()
        rounding = torch.finfo(shifted.dtype).eps ** (2 if self.squared else 1)
        undamped = shifted <= self.scale * system.values[index]
        return (undamped & (shifted <= rounding * shifted.max())) | ~(1 / shifted).isfinite()

    @cached_property
    def near_singular(self) -> list[System]:
        """The systems with an eigenvalue that may be zero to rounding, or is NaN. Waits for the device."""
        return [system for system in self.used if not self.is_far_from_singular(system)]

    @cached_property
    def singular(self) -> list[str]:
        """The blocks with eigenvalues of zero, to rounding, and no damping. Waits for the device."""
        return [
            ", ".join(registration.parameters)
            for system in self.near_singular
            for index, registration in enumerate(system.group.registrations)
            if not bool((~self.zeros(system, index)).all())
        ]

    @cached_property
    def not_numbers(self) -> list[str]:
        """The blocks with eigenvalues of NaN. Waits for the device."""
        return [
            ", ".join(registration.parameters)
            for system in self.near_singular
            for registration, values in zip(system.group.registrations, self.shifted(system), strict=True)
            if not bool((~values.isnan()).all())
        ]

    def is_far_from_singular(self, system: System) -> bool:
        """Whether no eigenvalue of any block is small enough for `zeros`, which takes more operations."""
        shifted = self.shifted(system).detach()
        low, high = torch.stack(shifted.aminmax()).tolist()
        limits = torch.finfo(shifted.dtype)
        return bool(low > limits.eps * high and low * limits.max > 1 and high <= limits.max)

    def refuse_singular(self, what: str = "inverse") -> None:
        """Raises ValueError if there are such blocks. what: they have none."""
        if unknown := self.not_numbers:
            raise ValueError(
                f"{len(unknown)} of {len(self.keys)} blocks have eigenvalues of NaN, so they have no {what}: "
                f"{'; '.join(unknown)}.\nLook for NaN in the factors that it was made of, and make it anew."
            )
        if self.singular:
            raise ValueError(
                f"{len(self.singular)} of {len(self.keys)} blocks have eigenvalues of zero, so they have no {what}: "
                f"{'; '.join(self.singular)}.\nAdd a damping, as in spectrum.at(damping=kfac_fx.Relative(0.1))."
            )

    def log_determinant(self) -> Tensor:
        """log det(s F + δ I) over all blocks, [].

        Raises ValueError for blocks with eigenvalues of zero, to rounding, and no damping.
        """
        self.refuse_singular("logarithm of a determinant")
        logs = [self.shifted(system).log().sum() for system in self.used]
        return torch.stack(
            [*logs, *(2 * system.root.log().sum() for system in self.used if system.root is not None)]
        ).sum()

    def trace(self, exp: float = 1.0) -> Tensor:
        """tr (s F + δ I)^exp over all blocks, []. Raises ValueError for negative powers of singular blocks."""
        finite("exp", exp)
        if exp < 0:
            self.refuse_singular()
        return torch.stack(
            [
                (self.shifted(system) ** exp if system.root is None else self.diagonal_of(system, exp)).sum()
                for system in self.used
            ]
        ).sum()

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I) v."""
        return self.multiply_matpower(1.0, vector)

    def multiply_inverse(self, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I)⁻¹ v."""
        return self.multiply_matpower(-1.0, vector)

    def multiply_matpower(self, exp: float, vector: Vector) -> dict[str, Tensor]:
        """(s F + δ I)^exp v for any real exp. Raises NotRegisteredError if the vector does not fit, ValueError for
        negative powers of singular blocks."""
        finite("exp", exp)
        given, vector = vector, real_vector(vector)
        lead, parts = self.many(vector)
        if exp < 0:
            self.refuse_singular()

        def product(system: System) -> dict[str, Tensor]:
            group, operators, root = system.group, system.operators, self.root_of(system, exp)
            matrices = vmap(group.pack)(parts)
            turned = group.to_eigenbasis(matrices if root is None else matrices * root, operators)
            turned = group.from_eigenbasis(turned * self.shifted(system) ** exp, operators)
            unpacked: dict[str, Tensor] = vmap(group.unpack)(turned if root is None else turned * root, parts)
            return unpacked

        products = self.of_all(product, (math.prod(lead),))
        return like_vector({name: products[name].reshape(tensor.shape) for name, tensor in vector.items()}, given)

    def many(self, vector: Vector) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """(the additional dimensions, the vector by the names of the registrations with these flattened into one)."""
        vector = real_vector(vector)
        check_kinds(vector, self.shapes)
        lead = leading(vector, self.shapes)
        check_fits(vector, self.shapes, alone=True, lead=lead)
        whole = {name: dense(unsharded(tensor)) for name, tensor in vector.items()}
        many = {name: tensor.reshape(math.prod(lead), *self.shapes[name]) for name, tensor in whole.items()}
        return lead, split(many, self.registrations, 1)

    # --- diagonals and samples --------------------------------------------------------------------------------------

    def diagonal(self, exp: float = 1.0) -> dict[str, Tensor]:
        """The diagonal of (s F + δ I)^exp by parameter; with exp = -1 the variances of single elements.

        Raises ValueError for negative powers of singular blocks.
        """
        finite("exp", exp)
        if exp < 0:
            self.refuse_singular()

        def diagonal(system: System) -> dict[str, Tensor]:
            return self.unpacked(system, self.diagonal_of(system, exp))

        return self.of_all(diagonal)

    def diagonal_of(self, system: System, exp: float) -> Tensor:
        """The diagonal of (s F + δ I)^exp, [L, g, o, i]."""
        squares, root = [operator.square() for operator in system.operators], self.root_of(system, exp)
        diagonal = system.group.from_eigenbasis(self.shifted(system) ** exp, squares)
        return diagonal if root is None else diagonal * root.square()

    @explains_calls()
    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw `count` samples from N(0, (s F + δ I)⁻¹), by parameter: [count, *shape]. They are deviations: weights of
        a Laplace approximation are those of the model plus a sample. Raises ValueError for singular blocks."""
        whole_number(1, "samples")("count", count)
        self.refuse_singular()

        def drawn(system: System) -> dict[str, Tensor]:
            values = system.values
            noise = (
                torch.randn(count, *values.shape, dtype=values.dtype, device=values.device, generator=generator)
                * self.shifted(system).rsqrt()
            )
            turned, root = system.group.from_eigenbasis(noise, system.operators), self.root_of(system, -1)
            turned = turned if root is None else turned * root
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
        parts = {name: tensor for system in self.used for name, tensor in of(system).items()}
        like = {piece.parameter: parts[piece.name] for r in registrations for piece in r.pieces} | parts
        whole = {name: like[name].new_zeros(()).expand((*lead, *shape)) for name, shape in self.shapes.items()}
        return joined(parts, registrations, whole, len(lead))


def amounts_in(damping: Damping) -> list[float | Tensor]:
    """The numbers that a damping consists of."""
    amounts = list(damping.values()) if isinstance(damping, Mapping) else [damping]
    return [amount.factor if isinstance(amount, Relative) else amount for amount in amounts]


def same_number(left: Amount, right: Amount) -> bool:
    """Whether two dampings are plain numbers and equal. Those in tensors are not read."""
    if isinstance(left, Relative) and isinstance(right, Relative):
        left, right = left.factor, right.factor
    plain = not any(isinstance(amount, (Tensor, Relative)) for amount in (left, right))
    return plain and left == right


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of this parameter or piece, or of a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def pattern_of(name: str, damping: Mapping[Any, Any]) -> str | None:
    """The first pattern that matches the name of a parameter."""
    return next((pattern for pattern in damping if isinstance(pattern, str) and matches(name, pattern)), None)
