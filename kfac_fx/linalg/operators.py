"""Functions of operators that are never written as one matrix: powers, solutions, and sums over powers.

Krylov's methods know an operator by its products with vectors. The sums over the lags of a Markov chain know it by its
two sides: Ψ̂ = Ĝ ⊗ Â acts on matrices W [..., o, i], with Ĝ [..., o, o] and Â [..., i, i] the correlations of whitened
sequences of T vectors, with zeros before and behind, with themselves one step later. Their norms are therefore at most
1, and all sums are finite. The last functions take the operands of the square root N of a block F = N Nᵀ
(`kfac_fx.fisher.series`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import eigh
from kfac_fx.passes.users_code import warn_user


def inverse_power(
    multiply: Callable[[Tensor], Tensor], vector: Tensor, alpha: float, smallest: float, tolerance: float, most: int
) -> tuple[Tensor, float]:
    """(F^-α u, a bound of its relative error), as soon as the bound is within the tolerance, or after `most` steps.

    Lanczos' process makes an orthonormal basis V of u, F u, F² u, ... with Vᵀ F V = T tridiagonal, and takes

        F^-α u  ≈  V T^-α Vᵀ u,    0 < α < 1

    (Druskin & Knizhnerman 1989, "Two polynomial methods of calculating functions of symmetric matrices"). Let λ be at
    most the smallest eigenvalue of F. The error is then at most λ^-α times the residual that conjugate gradients for
    F⁻¹ u would have at this step (Ilić, Turner & Simpson 2010, "A restarted Lanczos approximation to functions of a
    symmetric matrix"). This residual is Π β / Π d, with all pivots d of T and all numbers β beside its diagonal.

    `multiply` is F on vectors [K], `vector` is u in the precision to compute in, `smallest` is a lower bound of the
    eigenvalues of F. Every new vector is made orthogonal to all others, so the basis takes steps · K numbers. Waits for
    the device.
    """
    norm = float(vector.norm())
    if norm == 0:
        return vector, 0.0
    basis = (vector / norm).repeat(min(most, 32), 1)  # doubled when full; rows beyond `step` are not used
    diagonal: list[float] = []
    beside: list[float] = []
    pivot, residual = 1.0, 1.0
    for step in range(min(most, len(vector))):
        product = multiply(basis[step])
        diagonal.append(float(product @ basis[step]))
        pivot = diagonal[-1] - (beside[-1] ** 2 / pivot if beside else 0)
        for _ in range(2):  # one pass leaves rounding errors
            product = product - basis[: step + 1].mT @ (basis[: step + 1] @ product)
        beta = float(product.norm())
        exhausted = step + 1 == len(vector) or beta <= torch.finfo(vector.dtype).eps * max(diagonal)
        residual = 0.0 if exhausted else residual * beta / pivot
        if residual <= tolerance or step + 1 == most:
            values = tridiagonal_power(diagonal, beside, alpha).to(vector)
            error = residual * smallest**-alpha / float(values.norm())
            if error <= tolerance or step + 1 == most:
                return norm * (values @ basis[: step + 1]), error
        beside.append(beta)
        if step + 1 == len(basis):
            basis = torch.cat([basis, basis])
        basis[step + 1] = product / beta
    raise AssertionError("bug in kfac_fx: Lanczos' process went on in an exhausted space")


def tridiagonal_power(diagonal: list[float], beside: list[float], alpha: float) -> Tensor:
    """The first column of T^-α, [m], in float64."""
    t = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        t = t + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(t)
    column: Tensor = vectors @ (values**-alpha * vectors[0])
    return column


# --- linear systems ---------------------------------------------------------------------------------------------------


NamedProduct = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class Solution(NamedTuple):
    """The result of `solve`.

    Attributes:
        vector: x, with the dimensions of v.
        residuals: |v - (H + δ I) x| / |v| of every right-hand side, as the recursion has it: at the start and after
            every iteration, [iterations + 1, ...].
        converged: whether the last residual is within the tolerance, [...].
    """

    vector: dict[str, Tensor]
    residuals: Tensor
    converged: Tensor

    @property
    def iterations(self) -> int:
        return len(self.residuals) - 1


class ConvergenceWarning(UserWarning):
    """A solver stopped before it reached its tolerance."""

    __module__ = "kfac_fx"


def conjugate_gradients(
    vector: Mapping[str, Tensor],
    multiply: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    precondition: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    lead: tuple[int, ...],
    tolerance: float,
    iterations: int,
) -> Solution:
    """Solve A x = v for A = `multiply`, positive definite, by conjugate gradients, for many right-hand sides at once.

    Every right-hand side has coefficients of its own. If A = H + δ I for a curvature matrix H, and `precondition` is a
    spectrum with s F near to H, few iterations suffice (Martens 2010, "Deep learning via Hessian-free optimization",
    section 4). Waits for the device in every iteration.

    lead: the first dimensions of all tensors, which count right-hand sides.
    """

    def inner(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(left[n] * right[n]).reshape(*lead, -1).sum(-1) for n in left]).sum(0)

    def added(left: Mapping[str, Tensor], scale: Tensor, right: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: left[n] + scale.view(*lead, *[1] * (left[n].dim() - len(lead))) * right[n] for n in left}

    solution = {name: torch.zeros_like(tensor) for name, tensor in vector.items()}
    residual = dict(vector)
    norm = inner(vector, vector).sqrt()
    residuals = [torch.where(norm > 0, 1.0, 0.0).to(norm)]
    direction = precondition(residual)
    product = inner(residual, direction)
    for _ in range(iterations):
        active = residuals[-1] > tolerance
        if not active.any():
            break
        image = multiply(direction)
        curvature = inner(direction, image)
        if bool((active & ~(curvature > 0)).any()):
            raise ValueError(
                "conjugate gradients met a direction without positive curvature: `product` is not that of a symmetric "
                "matrix without negative eigenvalues, or the damping is zero where it is singular."
            )
        step = torch.where(active, product / curvature, 0)
        solution = added(solution, step, direction)
        residual = added(residual, -step, image)
        residuals.append(torch.where(norm > 0, inner(residual, residual).sqrt() / norm, 0))
        turned = precondition(residual)
        following = inner(residual, turned)
        direction = added(turned, torch.where(active, following / product, 0), direction)
        product = following
    converged = residuals[-1] <= tolerance
    if not bool(converged.all()):
        warn_user(
            ConvergenceWarning(
                f"{int((~converged).sum())} of {converged.numel()} right-hand sides have a residual of up to "
                f"{float(residuals[-1].max()):.0e} after {iterations} iterations, and the tolerance is {tolerance:.0e}."
            )
        )
    return Solution(solution, torch.stack(residuals), converged)


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
