"""Fractional powers of a positive definite F of which only products are known.

Lanczos' process makes an orthonormal basis V of u, F u, F² u, ... with Vᵀ F V = T tridiagonal, and takes

    F^-α u  ≈  V T^-α Vᵀ u,    0 < α < 1

(Druskin & Knizhnerman 1989, "Two polynomial methods of calculating functions of symmetric matrices"). With λ no larger
than the smallest eigenvalue of F, what is left is at most λ^-α times what conjugate gradients would leave of u on the
way to F⁻¹ u (Ilić, Turner & Simpson 2010, "A restarted Lanczos approximation to functions of a symmetric matrix"), and
that is known from T alone: all pivots d of T and all numbers β beside its diagonal make Π β / Π d of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def inverse_power(
    multiply: Callable[[Tensor], Tensor], vector: Tensor, alpha: float, smallest: float, tolerance: float, most: int
) -> tuple[Tensor, float]:
    """(F^-α u, a bound of its relative error), once that is within the tolerance, or after `most` steps.

    multiply: F on vectors [K]; vector: u, in the precision to compute in; smallest: a lower bound of F's eigenvalues.
    Every new vector is made orthogonal to all others, so the basis takes steps · K numbers. Waits for the device.
    """
    norm = float(vector.norm())
    if norm == 0:
        return vector, 0.0
    basis = (vector / norm).repeat(min(most, 32), 1)  # doubled when full; only the first rows mean something
    diagonal: list[float] = []
    beside: list[float] = []
    pivot, left = 1.0, 1.0
    for step in range(min(most, len(vector))):
        product = multiply(basis[step])
        diagonal.append(float(product @ basis[step]))
        pivot = diagonal[-1] - (beside[-1] ** 2 / pivot if beside else 0)
        for _ in range(2):  # once is not enough
            product = product - basis[: step + 1].mT @ (basis[: step + 1] @ product)
        beta = float(product.norm())
        exhausted = step + 1 == len(vector) or beta <= torch.finfo(vector.dtype).eps * max(diagonal)
        left = 0.0 if exhausted else left * beta / pivot
        if left <= tolerance or step + 1 == most:
            values = root_column(diagonal, beside, alpha).to(vector)
            error = left * smallest**-alpha / float(values.norm())
            if error <= tolerance or step + 1 == most:
                return norm * (values @ basis[: step + 1]), error
        beside.append(beta)
        if step + 1 == len(basis):
            basis = torch.cat([basis, basis])
        basis[step + 1] = product / beta
    raise AssertionError("bug in kfac_fx: Lanczos' process went on in an exhausted space")


def root_column(diagonal: list[float], beside: list[float], alpha: float) -> Tensor:
    """T^-α e_1 of a tridiagonal T: [m]."""
    t = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        t = t + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(t)
    column: Tensor = vectors @ (values**-alpha * vectors[0])
    return column
