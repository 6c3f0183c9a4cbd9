"""Blocks that are known by a square root, F = N Nᵀ, with an N of which products and inverse products are cheap.

N need not be triangular; it is what `multiply_cholesky` multiplies with. No other power of such an F has a structure of
its own. Whole ones are products of N Nᵀ or of its inverse; the others come from eigenvectors of the dense block, whose
columns are N Nᵀ e_j, where that has no more than `DENSE` rows, and else from Lanczos' process on N Nᵀ
(`kfac_fx.linalg.krylov`), to a relative error of `TOLERANCE`, in float64 and waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.factors.stacks import ALL, BlockGroup
from kfac_fx.linalg.chain import doublings, inverse_root, least_eigenvalue, root_of
from kfac_fx.linalg.krylov import inverse_power
from kfac_fx.linalg.matrices import Root, eigh, rescued_eigh
from kfac_fx.passes.approximations import KRON_SERIES_2
from kfac_fx.passes.errors import ApproximationError

DENSE = 1024  # rows of a block of one group whose fractional powers are kept as matrices
STEPS, TOLERANCE = 500, {torch.float32: 1e-6, torch.float64: 1e-10}  # of Lanczos' process
FORWARD, BACKWARD, LEAST = "N", "N inverse", "least eigenvalue"  # what roots are made of
Kept = dict[Root, list[Tensor]]


class RootedGroup(BlockGroup):
    """A subclass finds the operands of N and N⁻¹ (`chain.root_of`, `chain.inverse_root`) and puts `kept` into it."""

    longest: int  # how many steps the sums of powers of Ψ are for

    def __init__(self, registrations: Sequence[Any], forms: Sequence[Any], **options: Any) -> None:
        super().__init__(registrations, forms, **options)
        needed = dict.fromkeys(name for root in self.roots for name in self.made_of(root))
        self.kept = {name: self.zeros(name) for name in needed}
        self.roots = {root: [one for name in self.made_of(root) for one in self.kept[name]] for root in self.roots}

    # --- what is kept -----------------------------------------------------------------------------------------------

    def made_of(self, root: Root) -> tuple[Root, ...]:
        """What is kept for a root; roots share it."""
        if isinstance(root, str):
            return (FORWARD if root == "cholesky" else BACKWARD,)
        if root == int(root):
            return (FORWARD,) if root > 0 else (BACKWARD,) if root < 0 else ()
        if self.is_dense:
            return (root,)
        return (FORWARD, BACKWARD, LEAST) if root < -1 else (FORWARD, LEAST)

    def names(self, kept: Root) -> list[str]:
        if kept in (FORWARD, BACKWARD):
            sides = [str(side) for side in self.sides]
            return [*sides, "weights", *([] if self.symmetric else [f"{side} lagged" for side in sides])]
        return [LEAST if kept == LEAST else "power"]

    def zeros(self, kept: Root) -> list[Tensor]:
        """Until the first decomposition."""
        groups, outputs, inputs = self.shape
        squares = [(groups, outputs, outputs), (groups, inputs, inputs)]
        if kept in (FORWARD, BACKWARD):
            shapes: list[tuple[int, ...]] = [*squares, self.shape, *([] if self.symmetric else squares)]
        else:
            shapes = [() if kept == LEAST else (groups, outputs * inputs, outputs * inputs)]
        return [torch.zeros(len(self), *shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def operands(self, root: Root) -> list[str]:
        return [name for kept in self.made_of(root) for name in self.names(kept)]

    @property
    def symmetric(self) -> bool:
        """Whether the chain is the same forward and backward in time, so that N needs no sum of powers."""
        return self.structure is not KRON_SERIES_2

    @property
    def is_dense(self) -> bool:
        return math.prod(self.shape[1:]) <= DENSE

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, matrix: Tensor, root: Root, transpose: bool = False, members: slice = ALL) -> Tensor:
        """Raises ApproximationError for a fractional power that Lanczos' process does not come to."""
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
        each = zip(matrix.split(1), *(operator.split(1) for operator in operators), strict=True)
        named = zip(each, self.registrations[members], strict=True)
        return torch.cat([self.fractional_power(str(one), root, *tensors) for tensors, one in named])

    def whole_power(self, matrix: Tensor, operators: Sequence[Tensor], exp: int) -> Tensor:
        """(N Nᵀ)^k W with the operands of N, or those of N⁻¹ if k < 0."""
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
        if not least > 0:  # no decomposition has come out right yet
            return torch.zeros_like(matrix)
        k, one = math.ceil(exp), len(self.names(FORWARD))
        forward = wide[:one]
        powers = doublings(forward[3:], self.longest, wait=True)
        power = self.whole_power(matrix.double(), forward if k > 0 else wide[one:], k)

        def product(vector: Tensor) -> Tensor:
            return root_of(
                forward, powers, root_of(forward, powers, vector.view(matrix.shape), transpose=True)
            ).flatten()

        tolerance = TOLERANCE[self.dtype]
        found, error = inverse_power(product, power.flatten(), k - exp, float(least), tolerance, STEPS)
        if error > tolerance:
            raise ApproximationError(
                f"{name}: {STEPS} steps of Lanczos' process left a relative error of {error:.0e} in the power {exp:g} "
                f"of {self.structure.name}, wanted {tolerance:.0e}.\nUse more damping, whole numbers for `exps`, or "
                "'kron_indep' for these parameters."
            )
        return found.view(matrix.shape).to(matrix.dtype)

    # --- eigenvectors: of the undamped dense block ------------------------------------------------------------------

    def eigensystem(self) -> tuple[Tensor, list[Tensor]]:
        """Raises ApproximationError where the dense block is too wide."""
        groups, outputs, inputs = self.shape
        if not self.is_dense:
            raise ApproximationError(
                f"{self.registrations[0]}: {self.structure.name} has no eigenvectors of a structure, and {outputs} * "
                f"{inputs} parameters are too many for a dense block.\nUse 'kron_indep' for these parameters."
            )
        whole = torch.stack([self.dense(index) for index in range(len(self))])
        shape = (len(self), groups, outputs * inputs, groups, outputs * inputs)
        blocks = whole.view(shape).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        values, vectors = rescued_eigh(blocks.flatten(0, 1))
        return values.clamp(min=0).view(len(self), *self.shape), [vectors.view(blocks.shape)]

    def applied(self, matrix: Tensor, operators: Sequence[Tensor], transpose: bool = False) -> Tensor:
        (vectors,) = operators
        columns = matrix.reshape(-1, *vectors.shape[:-1]).movedim(0, -1)
        product = (vectors.mT if transpose else vectors) @ columns
        return product.movedim(-1, 0).reshape(matrix.shape)

    # --- decompositions ---------------------------------------------------------------------------------------------

    def made(self, forward: Sequence[Tensor], backward: Sequence[Tensor]) -> Kept:
        """What is kept, of the operands of N and N⁻¹, in the precision of the factors."""
        found: Kept = {FORWARD: self.in_groups(forward), BACKWARD: self.in_groups(backward)}
        if LEAST in self.kept:
            found[LEAST] = [least_eigenvalue(found[BACKWARD]).amin(-1)]
        if powers := [name for name in self.kept if not isinstance(name, str)]:
            found |= self.dense_powers(found[FORWARD], powers)
        return {name: [one.to(self.dtype) for one in found[name]] for name in self.kept}

    def in_groups(self, operators: Sequence[Tensor]) -> list[Tensor]:
        """[L·g, d, d] -> [L, g, d, d]."""
        return [one if one.dim() == 4 else one.unflatten(0, (len(self), -1)) for one in operators]

    def dense_powers(self, operators: Sequence[Tensor], powers: Sequence[float]) -> Kept:
        """By eigenvectors of every group, in float64: [L, g, K, K]; NaN where it has no power."""
        wide = [one.double() for one in operators]
        groups, outputs, inputs = self.shape
        basis = torch.eye(outputs * inputs, dtype=torch.float64, device=self.device)
        columns = basis.view(-1, 1, 1, outputs, inputs).expand(-1, len(self), groups, -1, -1)
        n = root_of(wide, doublings(wide[3:], self.longest), columns).flatten(3).movedim(0, -1).flatten(0, 1)
        values, vectors = eigh(n @ n.mT)
        found = {power: (vectors * (values**power).unsqueeze(-2)) @ vectors.mT for power in powers}
        return {power: [one.unflatten(0, (len(self), -1))] for power, one in found.items()}
