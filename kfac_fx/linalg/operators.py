"""Krylov's methods: powers of operators and solutions of linear systems, from products with vectors alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

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
        return {n: left[n] + scale.view((*lead, *[1] * (left[n].dim() - len(lead)))) * right[n] for n in left}

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
