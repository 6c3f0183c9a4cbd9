"""Blocks that are given by a square root, F = N Nᵀ, where products with N and N⁻¹ are cheap.

N need not be triangular; `multiply_cholesky` multiplies with it. Other powers of F have no structure. Whole powers are
products with N Nᵀ or with its inverse. Fractional powers come from the eigenvectors of the dense block, whose columns
are N Nᵀ e_j, if it has at most `DENSE_ROWS` rows. Otherwise they come from Lanczos' process on N Nᵀ
(`kfac_fx.linalg.krylov`), in float64 and to a relative error of `LANCZOS_TOLERANCE`; the host then waits for the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kfac_fx.factors.stacks import ALL_BLOCKS, BlockGroup
from kfac_fx.linalg.chain import doublings, inverse_root, least_eigenvalue, root_of
from kfac_fx.linalg.krylov import inverse_power
from kfac_fx.linalg.matrices import HERE, Place, Root, eigh, rescued_eigh
from kfac_fx.passes.approximations import KRON_SERIES_2
from kfac_fx.passes.errors import ApproximationError

DENSE_ROWS = 1024  # of one group of a block whose fractional powers are stored as matrices
LANCZOS_STEPS, LANCZOS_TOLERANCE = 500, {torch.float32: 1e-6, torch.float64: 1e-10}
FORWARD, BACKWARD, LEAST = "N", "N inverse", "least eigenvalue"  # the ingredients of roots, besides fractional powers
Ingredients = dict[Root, list[Tensor]]


class RootedGroup(BlockGroup):
    """Roots consist of `ingredients`, which several roots may share. A subclass computes the operands of N and N⁻¹
    (`chain.root_of`, `chain.inverse_root`) and stores the ingredients."""

    longest: int  # the number of steps that the sums of powers of Ψ are computed for

    def __init__(self, registrations: Sequence[Any], forms: Sequence[Any], **options: Any) -> None:
        super().__init__(registrations, forms, **options)
        names = dict.fromkeys(name for root in self.roots for name in self.ingredients_of(root))
        self.ingredients = {name: self.zeros(name) for name in names}
        self.roots = {
            root: [tensor for name in self.ingredients_of(root) for tensor in self.ingredients[name]]
            for root in self.roots
        }

    # --- ingredients of roots ---------------------------------------------------------------------------------------

    def ingredients_of(self, root: Root) -> tuple[Root, ...]:
        if isinstance(root, str):
            return (FORWARD if root == "cholesky" else BACKWARD,)
        if root == int(root):
            return (FORWARD,) if root > 0 else (BACKWARD,) if root < 0 else ()
        if self.is_dense:
            return (root,)
        return (FORWARD, BACKWARD, LEAST) if root < -1 else (FORWARD, LEAST)

    def names(self, ingredient: Root) -> list[str]:
        if ingredient in (FORWARD, BACKWARD):
            sides = [str(side) for side in self.sides]
            return [*sides, "weights", *([] if self.symmetric else [f"{side} lagged" for side in sides])]
        return [LEAST if ingredient == LEAST else "power"]

    def zeros(self, ingredient: Root) -> list[Tensor]:
        """The tensors of an ingredient before the first decomposition."""
        groups, outputs, inputs = self.shape
        squares = [(groups, outputs, outputs), (groups, inputs, inputs)]
        if ingredient in (FORWARD, BACKWARD):
            shapes: list[tuple[int, ...]] = [*squares, self.shape, *([] if self.symmetric else squares)]
        else:
            shapes = [() if ingredient == LEAST else (groups, outputs * inputs, outputs * inputs)]
        return [torch.zeros(len(self), *shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def operands(self, root: Root) -> list[str]:
        return [name for ingredient in self.ingredients_of(root) for name in self.names(ingredient)]

    @property
    def separable(self) -> bool:
        return False

    @property
    def symmetric(self) -> bool:
        """Whether the chain is the same forward and backward in time; N then needs no sum of powers."""
        return self.structure is not KRON_SERIES_2

    @property
    def is_dense(self) -> bool:
        return math.prod(self.shape[1:]) <= DENSE_ROWS

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, matrix: Tensor, root: Root, transpose: bool = False, members: slice = ALL_BLOCKS) -> Tensor:
        """As of `BlockGroup`; raises ApproximationError if Lanczos' process does not converge to a fractional power."""
        operators = [operator[members] for operator in self.operators(root)]
        if root == "cholesky":
            return root_of(operators, doublings(operators[3:], self.longest), matrix, transpose)
        if root == "cholesky_inverse":
            return inverse_root(operators, matrix, transpose)
        assert not isinstance(root, str), f"bug in kfac_fx: {root!r} is no root"
        if root == int(root):
            return self.whole_power(matrix, operators, int(root))
        if self.is_dense:
            (power,) = operators
            return (power @ matrix.flatten(2).unsqueeze(-1)).view(matrix.shape)
        by_block = zip(matrix.split(1), *(operator.split(1) for operator in operators), strict=True)
        named = zip(self.registrations[members], by_block, strict=True)
        return torch.cat([self.fractional_power(str(block), root, *tensors) for block, tensors in named])

    def whole_power(self, matrix: Tensor, operators: Sequence[Tensor], exp: int) -> Tensor:
        """(N Nᵀ)^k W with the operands of N, or of N⁻¹ if k < 0."""
        if exp < 0:
            for _ in range(-exp):
                matrix = inverse_root(operators, inverse_root(operators, matrix), transpose=True)
            return matrix
        powers = doublings(operators[3:], self.longest)
        for _ in range(exp):
            matrix = root_of(operators, powers, root_of(operators, powers, matrix, transpose=True))
        return matrix

    def fractional_power(self, name: str, exp: float, matrix: Tensor, *operators: Tensor) -> Tensor:
        """F^p = F^-α F^k of one block, with 0 < α < 1 and a whole k."""
        *wide, least = (operator.double() for operator in operators)
        if not least > 0:  # no decomposition has succeeded yet
            return torch.zeros_like(matrix)
        k, size = math.ceil(exp), len(self.names(FORWARD))
        forward = wide[:size]
        powers = doublings(forward[3:], self.longest, wait=True)
        power = self.whole_power(matrix.double(), forward if k > 0 else wide[size:], k)

        def product(vector: Tensor) -> Tensor:
            half = root_of(forward, powers, vector.view(matrix.shape), transpose=True)
            return root_of(forward, powers, half).flatten()

        tolerance, steps = LANCZOS_TOLERANCE[self.dtype], LANCZOS_STEPS
        result, error = inverse_power(product, power.flatten(), k - exp, float(least), tolerance, steps)
        if error > tolerance:
            raise ApproximationError(
                f"{name}: {steps} steps of Lanczos' process left a relative error of {error:.0e} in the power {exp:g} "
                f"of {self.structure.name}, wanted {tolerance:.0e}.\nUse more damping, whole numbers for `exps`, or "
                "'kron_indep' for these parameters."
            )
        return result.view(matrix.shape).to(matrix.dtype)

    def without_factors(self, members: Sequence[int]) -> Self:
        group = super().without_factors(members)
        group.ingredients = {}
        return group

    # --- eigenvectors: of the undamped dense block ------------------------------------------------------------------

    def eigensystem(self, place: Place = HERE) -> tuple[Tensor, list[Tensor]]:
        """As of `BlockGroup`; raises ApproximationError if the dense block is too wide."""
        groups, outputs, inputs = self.shape
        if not self.is_dense:
            raise ApproximationError(
                f"{self.registrations[0]}: {self.structure.name} has no structured eigenvectors, and {outputs} * "
                f"{inputs} parameters are too many for a dense block.\nUse 'kron_indep' for these parameters."
            )
        whole = torch.stack([self.dense(index) for index in range(len(self))])
        shape = (len(self), groups, outputs * inputs, groups, outputs * inputs)
        blocks = whole.view(shape).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        values, vectors = rescued_eigh(blocks.flatten(0, 1), place)
        return values.clamp(min=0).view(len(self), *self.shape), [vectors.view(blocks.shape)]

    def applied(self, matrix: Tensor, operators: Sequence[Tensor], transpose: bool = False) -> Tensor:
        (vectors,) = operators
        columns = matrix.reshape(-1, *vectors.shape[:-1]).movedim(0, -1)
        product = (vectors.mT if transpose else vectors) @ columns
        return product.movedim(-1, 0).reshape(matrix.shape)

    # --- decompositions ---------------------------------------------------------------------------------------------

    def from_operands(self, forward: Sequence[Tensor], backward: Sequence[Tensor]) -> Ingredients:
        """The ingredients from the operands of N and N⁻¹, in the precision of the factors."""
        tensors: Ingredients = {FORWARD: self.in_groups(forward), BACKWARD: self.in_groups(backward)}
        if LEAST in self.ingredients:
            tensors[LEAST] = [least_eigenvalue(tensors[BACKWARD]).amin(-1)]
        if powers := [name for name in self.ingredients if not isinstance(name, str)]:
            tensors |= self.dense_powers(tensors[FORWARD], powers)
        return {name: [tensor.to(self.dtype) for tensor in tensors[name]] for name in self.ingredients}

    def in_groups(self, operators: Sequence[Tensor]) -> list[Tensor]:
        """[L·g, d, d] -> [L, g, d, d]."""
        return [x if x.dim() == 4 else x.unflatten(0, (len(self), -1)) for x in operators]

    def dense_powers(self, operators: Sequence[Tensor], powers: Sequence[float]) -> Ingredients:
        """Powers by the eigenvectors of every group, in float64: [L, g, K, K]; NaN where they do not exist."""
        wide = [operator.double() for operator in operators]
        groups, outputs, inputs = self.shape
        basis = torch.eye(outputs * inputs, dtype=torch.float64, device=self.device)
        columns = basis.view(-1, 1, 1, outputs, inputs).expand(-1, len(self), groups, -1, -1)
        n = root_of(wide, doublings(wide[3:], self.longest), columns).flatten(3).movedim(0, -1).flatten(0, 1)
        values, vectors = eigh(n @ n.mT)
        matrices = {power: (vectors * (values**power).unsqueeze(-2)) @ vectors.mT for power in powers}
        return {power: [matrix.unflatten(0, (len(self), -1))] for power, matrix in matrices.items()}
