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
computed from N (`kfac_fx.blocks.rooted`).

S positions at each use are treated as independent, and F is S = c / T times larger; T = 1 is c G ⊗ A. T is the mean
length of sequences of different lengths. The eigenvalues ψ keep their sign: rows that alternate in time make F smaller.
"kron_series_1_abs" uses |ψ_G| and |ψ_A|, as TensorFlow's K-FAC does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.blocks.rooted import Ingredients, RootedGroup
from kfac_fx.factors.factor import Stack
from kfac_fx.factors.stacks import ALL_BLOCKS, Roots
from kfac_fx.linalg.chain import doublings, fejer, kron, resolvent, solve_transposed, symmetrized, triangle
from kfac_fx.linalg.matrices import RESCUES, Root, are_finite, cholesky, damp, eigh, unsqueeze_like
from kfac_fx.passes.approximations import KRON_SERIES_1_ABS, Side
from kfac_fx.passes.ir import Registration

LONGEST = 1023  # the number of steps that every block is prepared for: ten bits of T


def longest(steps: int) -> int:
    """The number of steps that a block is prepared for, if its first batch has `steps`."""
    return max(LONGEST, steps)


class SeriesGroup(RootedGroup):
    """Groups of series blocks. They decompose their own factors, so `Inverter` does not."""

    def __init__(self, registrations: Sequence[Any], forms: Sequence[Any], **options: Any) -> None:
        super().__init__(registrations, forms, **options)
        self.longest = longest(max(registration.steps for registration in registrations))
        self.decomposed = []
        blocks = len(self)
        self.factors["pairs"] = Stack.zeros(blocks, (), self.dtype, self.device)
        for side in self.sides:
            self.factors[lagged(side)] = Stack.zeros(blocks, side.shape(self.shape), self.dtype, self.device)

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
