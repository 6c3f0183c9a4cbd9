"""The quadratic model of the loss along a few directions: step size, momentum, predicted change.

For δ = Σ s_i d_i the model is M(δ) = h(θ) + sᵀ c + ½ sᵀ (f + λ b) s, with f_ij = <d_i, F d_j>, b_ij = <d_i, d_j> and
c_i = <∇h, d_i>: small matrices, and the only place where the exact Fisher enters (Martens & Grosse 2015, sections 6.4
and 7; the first direction is the preconditioned gradient, the second the previous update).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuadraticModel:
    """fisher: f [k, k]; products: b [k, k]; slopes: c [k]."""

    fisher: Tensor
    products: Tensor
    slopes: Tensor

    def best(self, damping: Tensor) -> Tensor:
        """The s that minimizes the damped model of two directions: [2].

        Along the first one alone where the second is zero, or parallel to it up to rounding; zero where both are.
        """
        m, c = self.matrix(damping), self.slopes
        size, determinant = m[0, 0] * m[1, 1], m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]
        independent = determinant > 16 * torch.finfo(m.dtype).eps * size
        divisor = torch.where(independent, determinant, 1)
        both = torch.stack([m[0, 1] * c[1] - m[1, 1] * c[0], m[1, 0] * c[0] - m[0, 0] * c[1]]) / divisor
        return torch.where(independent, both, self.best_with_momentum(damping, torch.zeros_like(c[0])))

    def best_with_momentum(self, damping: Tensor, momentum: Tensor) -> Tensor:
        """The same with the second coefficient fixed."""
        m, c = self.matrix(damping), self.slopes
        moved = m[0, 0] > 0
        step = -(momentum * m[0, 1] + c[0]) / torch.where(moved, m[0, 0], 1)
        return torch.stack([torch.where(moved, step, 0), momentum])

    def change(self, s: Tensor, damping: Tensor | float) -> Tensor:
        """M(Σ s_i d_i) - M(0) under this damping; with that of the loss's own l2 term alone, the predicted change."""
        return s @ self.slopes + 0.5 * (s @ self.matrix(damping) @ s)

    def matrix(self, damping: Tensor | float) -> Tensor:
        return self.fisher + damping * self.products


def inner(first: Tensor, second: Tensor) -> Tensor:
    """<a, b>, in float32 at least. Not a BLAS product, which adds up millions of terms one after another."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    return (first.to(dtype) * second.to(dtype)).sum()


def inner_products(vectors: Sequence[Tensor]) -> Tensor:
    """<d_i, d_j>: [k, k]."""
    return torch.stack([torch.stack([inner(a, b) for b in vectors]) for a in vectors])


def slopes(gradient: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """<∇h, d_i>: [k]."""
    return torch.stack([inner(gradient, vector) for vector in vectors])
