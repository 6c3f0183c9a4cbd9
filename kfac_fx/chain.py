"""Sums over the lags of a Markov chain: pure functions of two-sided operators Ψ̂ = Ĝ ⊗ Â on matrices W [..., o, i].

Ĝ [..., o, o] and Â [..., i, i] are correlations of sequences of T vectors with themselves one step later (whitened, and
with zeros before and behind), so their norms are at most 1, and all sums are finite (`kfac_fx.series`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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


def fejer(x: Tensor, steps: Tensor) -> Tensor:
    """Σ_|d|<T (T - |d|) x^|d| for -1 < x < 1, the inverse of γ in the paper. steps: T, whole numbers."""
    return (steps * (1 - x) * (1 + x) - 2 * x * (1 - x**steps)) / (1 - x) ** 2


def triangle(hats: Sequence[Tensor], matrix: Tensor, steps: Tensor, longest: int) -> Tensor:
    """Σ_d<T (T - d) Ψ̂^d W, in log T rounds: with S_n = Σ_d<n Ψ̂^d and Q_n = Σ_d<n (n - d) Ψ̂^d,

    S_2n = S_n + Ψ̂^n S_n    Q_2n = Q_n + n S_n + Ψ̂^n Q_n      S_n+1 = 1 + Ψ̂ S_n    Q_n+1 = Q_n + S_n+1

    so that n becomes T bit by bit. steps: T <= longest, broadcast with `matrix`; the device alone need know it.
    """
    s = q = torch.zeros_like(matrix)
    n = torch.zeros_like(steps)
    power = [torch.eye(hat.shape[-1], dtype=hat.dtype, device=hat.device).expand_as(hat) for hat in hats]
    for bit in reversed(range(longest.bit_length())):
        s, q = s + kron(power, s), q + n * s + kron(power, q)
        power, n = [one @ one for one in power], 2 * n
        odd = (steps / 2**bit).floor() % 2 == 1
        s = torch.where(odd, matrix + kron(hats, s), s)
        q = torch.where(odd, q + s, q)
        power = [torch.where(odd, one @ hat, one) for one, hat in zip(power, hats, strict=True)]
        n = n + odd
    return q


def resolvent(hats: Sequence[Tensor], matrix: Tensor, longest: int) -> Tensor:
    """(I - Ψ̂)⁻¹ W = Σ_d Ψ̂^d W, in rounds that each double the number of terms."""
    power = list(hats)
    for _ in range(rounds(longest, torch.finfo(matrix.dtype).eps)):
        matrix = matrix + kron(power, matrix)
        power = [one @ one for one in power]
    return matrix


def rounds(longest: int, eps: float) -> int:
    """Until what is left of Σ_d Ψ̂^d is rounding, for sequences of at most `longest` steps.

    zᴴ Ĉ z is the correlation of a sequence zᴴ x_t of T numbers with itself one step later, at most r = cos(π / (T+1)).
    So is then the numerical radius of Ĉ^n at most r^n, its norm at most 2 r^n, and that of Ψ̂^n at most 4 r^2n.
    """
    r = math.cos(math.pi / (longest + 1))
    return math.ceil(math.log2(max(1.0, math.log(4 / eps) / (-2 * math.log(r))))) if longest > 1 else 0
