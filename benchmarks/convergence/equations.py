"""Two equations and the networks that are trained to solve them, in double precision.

Values, slopes and second derivatives go through the network together, as in examples/pinn.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn

DOUBLE = torch.float64
Points = tuple[Tensor, Tensor]


class Equation(nn.Module, ABC):
    """A tanh network u of two variables; forward: [N, 2] points inside and [M, 2] on the border -> both residuals.

    The loss is the sum of the mean squares of the two.
    """

    curved: tuple[float, float]  # the weights of the two second derivatives in the operator

    def __init__(self, width: int = 32, hidden: int = 3) -> None:
        super().__init__()
        widths = (2, *hidden * (width,), 1)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=DOUBLE) for a, b in zip(widths, widths[1:], strict=False))

    @staticmethod
    @abstractmethod
    def points(inside: int, border: int, generator: torch.Generator) -> Points:
        """Uniform points."""

    @staticmethod
    @abstractmethod
    def solution(points: Tensor) -> Tensor:
        """u at points, [N, 2] -> [N, 1]."""

    @staticmethod
    @abstractmethod
    def grid(side: int) -> Tensor:
        """[side², 2] points of a regular grid, at which the error of u is measured."""

    @abstractmethod
    def forward(self, inside: Tensor, border: Tensor) -> tuple[Tensor, Tensor]: ...

    def u(self, x: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(torch.tanh(x) if n else x)
        return x

    def jet(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [N, 1], its slopes [N, 2, 1] and the sum of its second derivatives with the weights `curved`, [N, 1]."""
        weights = torch.tensor(self.curved, dtype=DOUBLE).unsqueeze(-1)
        slopes, second = torch.eye(2, dtype=DOUBLE).expand(x.shape[0], 2, 2), torch.zeros_like(x)
        for n, layer in enumerate(self.layers):
            if n:
                x = torch.tanh(x)
                first = 1 - x.square()
                second = first * second - 2 * x * first * (weights * slopes.square()).sum(1)
                slopes = first.unsqueeze(1) * slopes
            x, slopes, second = layer(x), slopes @ layer.weight.T, second @ layer.weight.T
        return x, slopes, second

    @torch.no_grad()
    def error(self, side: int = 50) -> float:
        """Relative error of u, in the mean square over the grid."""
        points = self.grid(side)
        exact = self.solution(points)
        return float((self.u(points) - exact).norm() / exact.norm())


def unit_square_border(border: int, generator: torch.Generator) -> Tensor:
    """Points on the four sides in turn."""
    sides, k = torch.rand(border, 2, dtype=DOUBLE, generator=generator), torch.arange(border)
    sides[k, k % 2] = (k // 2 % 2).to(DOUBLE)
    return sides


class Poisson(Equation):
    """-Δu = 2 π² sin(πx) sin(πy) in the unit square, u = 0 on its border; u = sin(πx) sin(πy)."""

    curved = (1.0, 1.0)

    @staticmethod
    def points(inside: int, border: int, generator: torch.Generator) -> Points:
        return torch.rand(inside, 2, dtype=DOUBLE, generator=generator), unit_square_border(border, generator)

    @staticmethod
    def solution(points: Tensor) -> Tensor:
        return torch.sin(math.pi * points).prod(-1, keepdim=True)

    @staticmethod
    def grid(side: int) -> Tensor:
        ticks = torch.linspace(0, 1, side, dtype=DOUBLE)
        return torch.cartesian_prod(ticks, ticks)

    def forward(self, inside: Tensor, border: Tensor) -> tuple[Tensor, Tensor]:
        _, _, laplacian = self.jet(inside)
        return laplacian + 2 * math.pi**2 * torch.sin(math.pi * inside).prod(-1, keepdim=True), self.u(border)


class Burgers(Equation):
    """u_t + u u_x = ν u_xx for points (t, x) in [0, 1] x [-1, 1]; u = -sin(πx) at t = 0, u = 0 at x = ±1; ν = 0.04/π.

    The solution is that of Cole and Hopf, a quotient of two integrals over the real line (Basdevant et al. 1986).
    """

    curved = (0.0, 1.0)
    viscosity = 0.04 / math.pi

    @staticmethod
    def points(inside: int, border: int, generator: torch.Generator) -> Points:
        stretch, shift = torch.tensor([1.0, 2.0], dtype=DOUBLE), torch.tensor([0.0, -1.0], dtype=DOUBLE)
        x, edge = (torch.rand(n, 2, dtype=DOUBLE, generator=generator) for n in (inside, border))
        k = torch.arange(border)
        edge[k % 2 == 0, 0] = 0.0  # half of the points at t = 0, a quarter on each side
        edge[k % 4 == 1, 1], edge[k % 4 == 3, 1] = 0.0, 1.0
        return x * stretch + shift, edge * stretch + shift

    @classmethod
    def solution(cls, points: Tensor) -> Tensor:  # type: ignore[override]
        nodes, weights = (torch.from_numpy(array) for array in np.polynomial.hermite.hermgauss(100))
        t, x = points[:, :1], points[:, 1:]
        y = x - (4 * cls.viscosity * t).sqrt() * nodes  # [N, nodes]
        density = weights * torch.exp(-torch.cos(math.pi * y) / (2 * math.pi * cls.viscosity))
        return -(density * torch.sin(math.pi * y)).sum(1, keepdim=True) / density.sum(1, keepdim=True)

    @staticmethod
    def grid(side: int) -> Tensor:
        return torch.cartesian_prod(*(torch.linspace(first, 1, side, dtype=DOUBLE) for first in (0, -1)))

    def forward(self, inside: Tensor, border: Tensor) -> tuple[Tensor, Tensor]:
        u, slopes, second = self.jet(inside)
        residual = slopes[:, 0] + u * slopes[:, 1] - self.viscosity * second
        start = -torch.sin(math.pi * border[:, 1:]) * (border[:, :1] == 0)
        return residual, self.u(border) - start
