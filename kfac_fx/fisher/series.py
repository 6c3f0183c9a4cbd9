"""Series blocks: the uses of a weight at T times, with rows and gradient rows modeled as a Markov chain in time
(Martens, Ba & Johnson 2018, "Kronecker-factored curvature approximations for recurrent neural networks").

The gradient of a case is w = Σ_t w_t with w_t = d_t r_tᵀ. Let V_d be the second moment of w_t+d and w_t. Assume

    V_0 = G_λ ⊗ A_λ,    V_1 = G1 ⊗ A1,    Ψ = V_1 V_0⁻¹,    V_d = Ψ^d V_0,    V_-d = V_dᵀ.

Then F = Σ_{s, t} V_s-t = Σ_|d|<T (T - |d|) V_d. One more assumption makes it easy to invert:

    kron_series_1    V_1 is symmetric           F =   Σ_|d|<T (T - |d|) V_d
    kron_series_2    T is large                 F = T Σ_d V_d,  over all d

Let V_0 = L Lᵀ and Ψ̂ = L⁻¹ V_1 L⁻ᵀ, that is, L = L_G ⊗ L_A and Ψ̂ = Ĝ ⊗ Â. With

    kron_series_1    Ĝ = U_G ψ_G U_Gᵀ, likewise A;    M = L U,    w = Σ_|d|<T (T - |d|) (ψ_G ψ_A)^|d|
    kron_series_2    Ĝ Ĝᵀ = E_G μ_G E_Gᵀ, likewise A; M = L E,    w = T (1 - μ_G μ_A)

the block is F = N Nᵀ with N = M √w (kron_series_1) or N = (I - Ψ)⁻¹ M √w (kron_series_2, for which
V_0 - Ψ V_0 Ψᵀ = M (1 - μ_G μ_A) Mᵀ). `multiply_cholesky` multiplies with N, which is not triangular. Other powers are
computed from N (`RootedGroup`).

S positions at each use are treated as independent, and F is S = c / T times larger; T = 1 is c G ⊗ A. T is the mean
length of sequences of different lengths. The eigenvalues ψ keep their sign: rows that alternate in time make F smaller.
"kron_series_1_abs" uses |ψ_G| and |ψ_A|, as TensorFlow's K-FAC does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kfac_fx.fisher.groups import ALL_BLOCKS, BlockGroup, Roots, Stack
from kfac_fx.linalg.matrices import (
    HERE,
    RESCUES,
    Place,
    Root,
    are_finite,
    cholesky,
    damp,
    eigh,
    rescued_eigh,
    unsqueeze_like,
)
from kfac_fx.linalg.vectors import inverse_power
from kfac_fx.passes.approximations import KRON_SERIES_1_ABS, KRON_SERIES_2, SERIES, Side, blocks_of, longest
from kfac_fx.passes.errors import ApproximationError
from kfac_fx.passes.ir import Registration

DENSE_ROWS = 1024  # of one group of a block whose fractional powers are stored as matrices
LANCZOS_STEPS, LANCZOS_TOLERANCE = 500, {torch.float32: 1e-6, torch.float64: 1e-10}
FORWARD, BACKWARD, LEAST = "N", "N inverse", "least eigenvalue"  # the ingredients of roots, besides fractional powers
Ingredients = dict[Root, list[Tensor]]


class RootedGroup(BlockGroup):
    """Blocks that are given by a square root, F = N Nᵀ, where products with N and N⁻¹ are cheap.

    Other powers of F have no structure. Whole powers are products with N Nᵀ or with its inverse. Fractional powers come
    from the eigenvectors of the dense block, whose columns are N Nᵀ e_j, if it has at most `DENSE_ROWS` rows. Otherwise
    they come from Lanczos' process on N Nᵀ (`kfac_fx.linalg.vectors`), in float64 and to a relative error of
    `LANCZOS_TOLERANCE`; the host then waits for the device.

    Roots consist of `ingredients`, which several roots may share. A subclass computes the operands of N and N⁻¹
    (`root_of`, `inverse_root`) and stores the ingredients.
    """

    symmetric_roots = False
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


# --- series -----------------------------------------------------------------------------------------------------------


@blocks_of(SERIES)
class SeriesGroup(RootedGroup):
    """Groups of series blocks. They decompose their own factors, so `Inverter` does not."""

    def __init__(self, registrations: Sequence[Any], forms: Sequence[Any], **options: Any) -> None:
        super().__init__(registrations, forms, **options)
        self.longest = longest(max(registration.steps for registration in registrations))
        self.decomposed = []
        blocks = len(self)
        self.factors["pairs"] = Stack.zeros(blocks, (), self.dtype, self.device)
        for side in self.sides:
            shape = self.factors[side.factor].moment.shape[1:]
            self.factors[lagged(side)] = Stack.zeros(blocks, shape, self.dtype, self.device)

    @classmethod
    def alike_in(cls, registration: Registration) -> Hashable:
        return registration.approximation

    def batch_values(self, sums: Mapping[str, Tensor], cases: int | Tensor) -> dict[str, Tensor]:
        rows = sums["count"].clamp(min=1)
        moments = {lagged(side): sums[lagged(side)] / unsqueeze_like(rows, sums[lagged(side)]) for side in self.sides}
        return {**super().batch_values(sums, cases), **moments, "pairs": sums["pairs"] / cases}

    def steps(self) -> Tensor:
        """T of every block, [L]."""
        positions = self.positions()
        return (positions / (positions - self.factors["pairs"].value)).round()

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply(self, matrix: Tensor, root: Root, transpose: bool = False, members: slice = ALL_BLOCKS) -> Tensor:
        if root != 1:
            return super().multiply(matrix, root, transpose, members)
        operators = [operator[members] for operator in self.operators(root)]
        return self.product(matrix, operators[:2], operators[2:], members)

    def operators(self, root: Root) -> list[Tensor]:
        """For the power 1: L_G, L_A, Ĝ and Â with the present factors; for others the operators that `store` stored."""
        if root != 1:
            return super().operators(root)
        self.check_updated()
        dampings = self.split_damping()
        whitened = [self.whitened(side, dampings[side]) for side in self.sides]
        likes = [self.factors[side.factor].moment for side in self.sides]
        operators = [lower for lower, _, _ in whitened] + [hat for _, hat, _ in whitened]
        return [operator.view(like.shape) for operator, like in zip(operators, likes * 2, strict=True)]

    def product(self, matrix: Tensor, lower: Sequence[Tensor], hats: Sequence[Tensor], members: slice) -> Tensor:
        """F W = c/T L [Σ_d (T - |d|) Ψ̂^|d|] Lᵀ W, or c L [Σ_d Ψ̂^d] Lᵀ W with Ψ̂^-d = (Ψ̂^d)ᵀ."""
        c, steps = (unsqueeze_like(numbers[members], matrix) for numbers in (self.positions(), self.steps()))
        inner = kron(lower, matrix, transpose=True)
        if self.symmetric:
            inner = 2 * triangle(hats, inner, steps, self.longest) / steps - inner
        else:
            powers = doublings(hats, self.longest)
            inner = resolvent(powers, inner) + resolvent(powers, inner, transpose=True) - inner
        return c * kron(lower, inner)

    def dense(self, index: int) -> Tensor:
        """The undamped block; Ψ is zero in the null space of V_0."""
        self.check_updated()
        whitened = [self.whitened_without_damping(side, index) for side in self.sides]
        size = math.prod(self.shape)
        basis = torch.eye(size, dtype=self.dtype, device=self.device).view(size, *self.shape)
        roots, hats = [root for root, _ in whitened], [hat for _, hat in whitened]
        return self.product(basis, roots, hats, slice(index, index + 1)).view(size, size)

    def whitened_without_damping(self, side: Side, index: int) -> tuple[Tensor, Tensor]:
        """(R = C^½, R⁺ C1 R⁺) of one block."""
        c, c1 = (self.factors[name].value[index] for name in (side.factor, lagged(side)))
        values, vectors = eigh(c)
        regular = values > values[..., -1:] * values.shape[-1] * torch.finfo(values.dtype).eps
        roots = torch.where(regular, values, 0).sqrt()
        inverse = (vectors * torch.where(regular, 1 / roots, 0).unsqueeze(-2)) @ vectors.mT
        return (vectors * roots.unsqueeze(-2)) @ vectors.mT, self.assumed(inverse @ c1 @ inverse)

    def assumed(self, hat: Tensor) -> Tensor:
        """A whitened C1 [m, d, d], as the approximation assumes it."""
        if self.structure is KRON_SERIES_1_ABS:
            values, vectors = eigh(symmetrized(hat))
            return (vectors * values.abs().unsqueeze(-2)) @ vectors.mT
        return symmetrized(hat) if self.symmetric else hat

    # --- roots ------------------------------------------------------------------------------------------------------

    def whitened(self, side: Side, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(L with L Lᵀ = C + λ I, Ĉ = L⁻¹ C1 L⁻ᵀ, which matrices are valid), in the precision of λ [L, groups]."""
        c, c1 = (self.factors[name].value.to(damping.dtype).flatten(0, 1) for name in (side.factor, lagged(side)))
        lower, valid = cholesky(damp(c, damping.flatten(), diagonal=False))
        half = torch.linalg.solve_triangular(lower, c1, upper=False)
        hat = torch.linalg.solve_triangular(lower, half.mT, upper=False).mT
        return lower, self.assumed(hat), valid

    def store(self, decomposed: Mapping[Side, Roots], dampings: Mapping[Side, Tensor]) -> None:
        """Decompose the factors. A failed block is decomposed again with more damping and then in float64. If it still
        fails, it keeps its last valid roots and is counted. `eigh` waits for the device in any case."""
        ingredients, left = self.decomposition(dampings)
        for dtype, more in RESCUES:
            if not left.any():
                break
            again, failed = self.decomposition(
                {side: damping.to(dtype or self.dtype) * more for side, damping in dampings.items()}
            )
            use = left & ~failed
            ingredients = {
                name: [
                    torch.where(unsqueeze_like(use, new), new, old)
                    for new, old in zip(again[name], ingredients[name], strict=True)
                ]
                for name in ingredients
            }
            left = left & failed
        for name, last in self.ingredients.items():
            for old, new in zip(last, ingredients[name], strict=True):
                torch.where(unsqueeze_like(left, new), old, new, out=old)
        self.failed += left
        self.inverted = True

    def decomposition(self, dampings: Mapping[Side, Tensor]) -> tuple[Ingredients, Tensor]:
        """(the ingredients in the precision of the factors, which blocks failed [L])."""
        whitened = [self.whitened(side, dampings[side]) for side in self.sides]
        lowers, hats = [lower for lower, _, _ in whitened], [hat for _, hat, _ in whitened]
        (left, e_left), (right, e_right) = (eigh(hat if self.symmetric else hat @ hat.mT) for hat in hats)
        products = (left.unsqueeze(-1) * right.unsqueeze(-2)).view(len(self), *self.shape)
        c, steps = (unsqueeze_like(count.to(products.dtype), products) for count in (self.positions(), self.steps()))
        w = c * (fejer(products, steps, self.longest) / steps if self.symmetric else 1 - products)
        valid = [side_valid.view(len(self), -1).all(1) for _, _, side_valid in whitened] + [(w > 0).flatten(1).all(1)]
        bases = (e_left, e_right)
        inverse = [solve_transposed(lower, basis) for lower, basis in zip(lowers, bases, strict=True)]
        forward = [lower @ basis for lower, basis in zip(lowers, bases, strict=True)]
        turned, lagging = [], []
        if not self.symmetric:
            turned = [basis.mT @ hat @ basis for hat, basis in zip(hats, bases, strict=True)]
            lagging = [solve_transposed(lower, hat.mT @ e) for lower, hat, e in zip(lowers, hats, bases, strict=True)]
        ingredients = self.from_operands([*forward, w.sqrt(), *turned], [*inverse, w.rsqrt(), *lagging])
        valid += [are_finite(tensor) for tensors in ingredients.values() for tensor in tensors]
        return ingredients, ~torch.stack(valid).all(0)


def lagged(side: Side) -> str:
    """The name of the factor of consecutive rows: "A1" or "G1"."""
    return f"{side.factor}1"


# --- the algebra of series --------------------------------------------------------------------------------------------
#
# Ψ̂ = Ĝ ⊗ Â acts on matrices W [..., o, i], with Ĝ [..., o, o] and Â [..., i, i] the correlations of whitened sequences
# of T vectors, with zeros before and behind, with themselves one step later. Their norms are therefore at most 1, and
# all sums over the lags are finite. The last functions take the operands of the square root N of a block F = N Nᵀ.


def symmetrized(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def solve_transposed(lower: Tensor, right: Tensor) -> Tensor:
    """L⁻ᵀ X."""
    solution: Tensor = torch.linalg.solve_triangular(lower.mT, right, upper=True)
    return solution


def kron(sides: Sequence[Tensor], matrix: Tensor, transpose: bool = False) -> Tensor:
    """(X_G ⊗ X_A) W = X_G W X_Aᵀ, or with both transposed."""
    left, right = sides
    return left.mT @ matrix @ right if transpose else left @ matrix @ right.mT


def fejer(x: Tensor, steps: Tensor, longest: int) -> Tensor:
    """Σ_|d|<T (T - |d|) x^|d| for |x| <= 1, the inverse of γ in Martens, Ba & Johnson 2018.

    All terms of the sum are positive for x > 0, and all terms of its closed form for x < 0. So neither nearly equal
    numbers are subtracted, nor is a number divided by one near zero. steps: T <= longest, whole numbers.
    """
    ones, positive, negative = torch.ones_like(x), x.clamp(min=0), x.clamp(max=0)
    summed = 2 * sum_of_lags([positive], [ones], ones, torch.mul, scalar_times, steps, longest) - steps
    logarithm = steps * torch.log1p(-(1 + negative))  # of |x|^T
    rest = torch.where(steps % 2 == 1, 1 + logarithm.exp(), -logarithm.expm1())  # 1 - x^T
    closed = (steps * (1 - negative) * (1 + negative) - 2 * negative * rest) / (1 - negative) ** 2
    return torch.where(x < 0, closed, summed)


def triangle(hats: Sequence[Tensor], matrix: Tensor, steps: Tensor, longest: int) -> Tensor:
    """Σ_d<T (T - d) Ψ̂^d W. steps: T <= longest, broadcast with `matrix`; the host does not read it."""
    ones = [torch.eye(hat.shape[-1], dtype=hat.dtype, device=hat.device).expand_as(hat) for hat in hats]
    return sum_of_lags(hats, ones, matrix, torch.matmul, kron, steps, longest)


def scalar_times(factors: Sequence[Tensor], matrix: Tensor) -> Tensor:
    (factor,) = factors
    return factor * matrix


def sum_of_lags(
    x: Sequence[Tensor],
    ones: Sequence[Tensor],
    matrix: Tensor,
    times: Callable[[Tensor, Tensor], Tensor],
    apply: Callable[[Sequence[Tensor], Tensor], Tensor],
    steps: Tensor,
    longest: int,
) -> Tensor:
    """Q_T W in log T rounds: with S_n = Σ_d<n x^d and Q_n = Σ_d<n (n - d) x^d,

    S_2n = S_n + x^n S_n    Q_2n = Q_n + n S_n + x^n Q_n      S_n+1 = 1 + x S_n    Q_n+1 = Q_n + S_n+1

    so that n becomes T bit by bit. ones: x^0; times: x^m x^n; apply: x^n W.
    """
    s = q = torch.zeros_like(matrix)
    n, power = torch.zeros_like(steps), list(ones)
    for bit in reversed(range(longest.bit_length())):
        s, q = s + apply(power, s), q + n * s + apply(power, q)
        power, n = [times(side, side) for side in power], 2 * n
        odd = (steps / 2**bit).floor() % 2 == 1
        s = torch.where(odd, matrix + apply(x, s), s)
        q = torch.where(odd, q + s, q)
        power = [torch.where(odd, times(side, base), side) for side, base in zip(power, x, strict=True)]
        n = n + odd
    return q


def resolvent(powers: Sequence[Sequence[Tensor]], matrix: Tensor, transpose: bool = False) -> Tensor:
    """(I - Ψ̂)⁻¹ W = Σ_d Ψ̂^d W, or the same with Ψ̂ᵀ. Every one of the `powers` doubles the number of terms."""
    for power in powers:
        matrix = matrix + kron(power, matrix, transpose)
    return matrix


def doublings(hats: Sequence[Tensor], longest: int, wait: bool = False) -> list[Sequence[Tensor]]:
    """[Ψ̂, Ψ̂², Ψ̂⁴, ...] for `resolvent`; with `wait` only those that matter, for which the host waits for the device."""
    powers: list[Sequence[Tensor]] = []
    eps = torch.finfo(hats[0].dtype).eps if hats else 1.0
    power = list(hats)
    while hats and len(powers) < rounds(longest, eps):
        if wait and math.prod(float(torch.linalg.matrix_norm(side).max()) for side in power) < eps / 2:
            break
        powers.append(power)
        power = [side @ side for side in power]
    return powers


def rounds(longest: int, eps: float) -> int:
    """The doublings until the rest of Σ_d Ψ̂^d is below rounding, for sequences of at most `longest` steps.

    zᴴ Ĉ z is the correlation of a sequence zᴴ x_t of T numbers with itself one step later, at most r = cos(π / (T+1)).
    So the numerical radius of Ĉ^n is at most r^n, its norm at most 2 r^n, and the norm of Ψ̂^n at most 4 r^2n.
    """
    r = math.cos(math.pi / (longest + 1))
    return math.ceil(math.log2(max(1.0, math.log(4 / eps) / (-2 * math.log(r))))) if longest > 1 else 0


def root_of(
    operands: Sequence[Tensor], powers: Sequence[Sequence[Tensor]], matrix: Tensor, transpose: bool = False
) -> Tensor:
    """N W or Nᵀ W from M and √w, and for kron_series_2 the powers of Ψ̃ = Eᵀ Ψ̂ E, since (I - Ψ)⁻¹ M = M (I - Ψ̃)⁻¹."""
    basis, weights = operands[:2], operands[2]
    if transpose:
        return weights * resolvent(powers, kron(basis, matrix, transpose=True), transpose=True)
    return kron(basis, resolvent(powers, weights * matrix))


def inverse_root(operands: Sequence[Tensor], matrix: Tensor, transpose: bool = False) -> Tensor:
    """N⁻¹ W or N⁻ᵀ W from M⁻ᵀ and 1/√w, and for kron_series_2 (M⁻¹ Ψ)ᵀ."""
    basis, weights, lagging = operands[:2], operands[2], operands[3:]
    if transpose:
        inner = weights * matrix
        return kron(basis, inner) - kron(lagging, inner) if lagging else kron(basis, inner)
    inner = kron(basis, matrix, transpose=True)
    return weights * (inner - kron(lagging, matrix, transpose=True) if lagging else inner)


def least_eigenvalue(operands: Sequence[Tensor]) -> Tensor:
    """A lower bound of the eigenvalues of N Nᵀ in every group, from the operands of `inverse_root` [L, g, ...]: [L, g].

    |N⁻¹| is at most max 1/√w (|M⁻¹| + |M⁻¹ Ψ|), and the norm of a Kronecker product is the product of the norms.
    """
    basis, weights, lagging = operands[:2], operands[2], operands[3:]
    pairs = [sides for sides in (basis, lagging) if sides]
    norms = [[spectral_norm(side) for side in sides] for sides in pairs]
    largest = sum((left * right for left, right in norms), torch.zeros_like(norms[0][0]))
    return (largest * weights.flatten(2).amax(-1)) ** -2


def spectral_norm(side: Tensor) -> Tensor:
    """[L, g, d, d] -> [L, g]; NaN for matrices that are not finite."""
    values, _ = eigh((side.mT @ side).flatten(0, 1))
    return values[:, -1].sqrt().view(side.shape[:2])
