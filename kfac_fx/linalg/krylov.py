"""Fractional powers of a positive definite F that is given by its products with vectors.

Lanczos' process makes an orthonormal basis V of u, F u, F² u, ... with Vᵀ F V = T tridiagonal, and takes

    F^-α u  ≈  V T^-α Vᵀ u,    0 < α < 1

(Druskin & Knizhnerman 1989, "Two polynomial methods of calculating functions of symmetric matrices"). Let λ be at most
the smallest eigenvalue of F. The error is then at most λ^-α times the residual that conjugate gradients for F⁻¹ u would
have at this step (Ilić, Turner & Simpson 2010, "A restarted Lanczos approximation to functions of a symmetric matrix").
This residual is Π β / Π d, with all pivots d of T and all numbers β beside its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def inverse_power(
    multiply: Callable[[Tensor], Tensor], vector: Tensor, alpha: float, smallest: float, tolerance: float, most: int
) -> tuple[Tensor, float]:
    """(F^-α u, a bound of its relative error), as soon as the bound is within the tolerance, or after `most` steps.

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
