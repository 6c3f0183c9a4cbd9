"""The quadratic model of a batch's loss along a few directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.optim.groups import InnerProduct, inner
from kfac_fx.optim.rule import Products

PARALLEL = 16  # times ε: directions are parallel up to rounding


@dataclass(frozen=True)
class QuadraticModel:
    """The model M of the loss along k directions: for δ = Σ s_i d_i, M(δ) = h(θ) + sᵀ c + ½ sᵀ (f + λ b) s.

    The exact Fisher F enters here and nowhere else (Martens & Grosse 2015, sections 6.4 and 7).
    """

    fisher: Tensor  # f_ij = <d_i, F d_j>, [k, k]
    products: Tensor  # b_ij = <d_i, d_j>, [k, k]
    slopes: Tensor  # c_i = <∇h, d_i>, [k]

    @staticmethod
    def along(directions: Sequence[Tensor], g: Tensor, fisher: Products, inner: InnerProduct = inner) -> QuadraticModel:
        """The model along directions [P].

        Products with a direction of zero are zero: where `fisher` is made of difference quotients, they are rounding.
        """
        slopes = torch.stack([inner(g, direction) for direction in directions])
        products = torch.stack([torch.stack([inner(a, b) for b in directions]) for a in directions])
        moves = products.diagonal() != 0
        return QuadraticModel(torch.where(moves & moves.unsqueeze(1), fisher(directions), 0), products, slopes)

    def best(self, damping: Tensor) -> Tensor:
        """The s that minimizes the damped model of two directions: [2].

        If the second direction is zero, or parallel to the first up to rounding: the minimum along the first. If both
        are zero: zero.
        """
        m, c = self.matrix(damping), self.slopes
        size, determinant = m[0, 0] * m[1, 1], m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]
        independent = determinant > PARALLEL * torch.finfo(m.dtype).eps * size
        divisor = torch.where(independent, determinant, 1)
        both = torch.stack([m[0, 1] * c[1] - m[1, 1] * c[0], m[1, 0] * c[0] - m[0, 0] * c[1]]) / divisor
        return torch.where(independent, both, self.best_with_momentum(damping, torch.zeros_like(c[0])))

    def best_with_momentum(self, damping: Tensor, momentum: Tensor) -> Tensor:
        """The same with the second coefficient fixed."""
        m, c = self.matrix(damping), self.slopes
        curved = m[0, 0] > 0
        step = -(momentum * m[0, 1] + c[0]) / torch.where(curved, m[0, 0], 1)
        return torch.stack([torch.where(curved, step, 0), momentum])

    def change(self, s: Tensor, damping: Tensor | float) -> Tensor:
        """M(Σ s_i d_i) - M(0). With the damping of the loss's own l2 term alone it is the predicted change."""
        return s @ self.slopes + 0.5 * (s @ self.matrix(damping) @ s)

    def matrix(self, damping: Tensor | float) -> Tensor:
        return self.fisher + damping * self.products

    def minimum(self, damping: Tensor | float) -> Tensor:
        """The s that minimizes the damped model of any number of directions: [k].

        The matrix is scaled to a diagonal of ones. A small multiple of the identity that is then added decides between
        directions that are parallel up to rounding, and gives zero along directions that are zero.
        """
        m, c = self.matrix(damping), self.slopes
        root = m.diagonal().clamp(min=0).sqrt()
        inverse = torch.where(root > 0, 1 / root, 0)
        scaled = inverse.unsqueeze(1) * m * inverse
        ridge = PARALLEL * torch.finfo(m.dtype).eps * torch.eye(len(c), dtype=m.dtype, device=m.device)
        unit = torch.diag((root <= 0).to(m.dtype))
        solution, _ = torch.linalg.solve_ex(scaled + ridge + unit, -(inverse * c))
        result: Tensor = inverse * solution
        return result
