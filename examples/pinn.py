"""A physics-informed network: Poisson's equation on the unit square, trained with K-FAC and with Adam.

    -Δu = 2 π² sin(πx) sin(πy) inside, u = 0 on the border          u = sin(πx) sin(πy)

The network is trained through its own Laplacian, so every weight has uses in values, in slopes and in second
derivatives. Here they go through the network together, as in the forward Laplacian of Li et al. 2024 and in K-FAC for
physics-informed networks (Dangel, Müller & Zeinhofer 2024); `torch.func.jvp` and
`torch.autograd.grad` in forward do, too.

The two terms of the loss are two losses of the Fisher, each a mean over points of its own. Numbers have double
precision, and every step has all points. K-FAC has no settings. All learning rates decay to 0 along a line.

    python -m examples.pinn

with one thread, next to other work:

    K-FAC        1000 steps  loss 4.4e-07  error of u 3.4e-04    44 s
    Adam 0.001   3000 steps  loss 3.7e-02  error of u 1.4e-01    18 s
    Adam 0.005   3000 steps  loss 6.1e-03  error of u 8.6e-02    15 s
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.losses import Normal

DOUBLE = torch.float64


class Poisson(nn.Module):
    """Δu + f at points inside, and u at points of the border."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (2, width, width, 1)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=DOUBLE) for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, inside: Tensor, border: Tensor) -> tuple[Tensor, Tensor]:  # [N, 2], [M, 2]
        source = 2 * math.pi**2 * torch.sin(math.pi * inside).prod(-1, keepdim=True)
        return self.laplacian(inside) + source, self.u(border)

    def u(self, x: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(torch.tanh(x) if n else x)
        return x

    def laplacian(self, x: Tensor) -> Tensor:
        """[N, 2] -> [N, 1]. With every layer go its value, its slopes [N, 2, width] and its Laplacian."""
        slopes, second = torch.eye(2, dtype=DOUBLE).expand(x.shape[0], 2, 2), torch.zeros_like(x)
        for n, layer in enumerate(self.layers):
            if n:
                x = torch.tanh(x)
                first = 1 - x.square()
                second = first * second - 2 * x * first * slopes.square().sum(1)
                slopes = first.unsqueeze(1) * slopes
            x, slopes, second = layer(x), slopes @ layer.weight.T, second @ layer.weight.T
        return second

    def loss(self, residual: Tensor, border: Tensor) -> Tensor:
        return residual.square().mean() + border.square().mean()

    @torch.no_grad()
    def error(self, side: int = 50) -> float:
        """Relative error of u, in the mean square over a grid."""
        ticks = torch.linspace(0, 1, side, dtype=DOUBLE)
        grid = torch.cartesian_prod(ticks, ticks)
        exact = torch.sin(math.pi * grid).prod(-1, keepdim=True)
        return float((self.u(grid) - exact).norm() / exact.norm())


@dataclass(frozen=True)
class Result:
    """The results of one optimizer."""

    name: str
    steps: int
    loss: float
    error: float
    seconds: float

    def __str__(self) -> str:
        found = f"loss {self.loss:.1e}  error of u {self.error:.1e}"
        return f"{self.name:10} {self.steps:6} steps  {found}  {self.seconds:4.0f} s"


def points(inside: int, border: int) -> tuple[Tensor, Tensor]:
    """Uniform, the border's on its four sides in turn."""
    sides, k = torch.rand(border, 2, dtype=DOUBLE), torch.arange(border)
    sides[k, k % 2] = (k // 2 % 2).to(DOUBLE)
    return torch.rand(inside, 2, dtype=DOUBLE), sides


def kfac(steps: int, width: int, x: tuple[Tensor, Tensor]) -> Result:
    torch.manual_seed(0)
    model = Poisson(width)
    # An element of loss= is |target - mean|², as in Poisson.loss; (weight, Normal(...)) would weight a term.
    net = kfac_fx.compile(model, x, loss=lambda outputs: [Normal(output) for output in outputs], strict=True)
    print(net.report, "\n")
    optimizer = kfac_fx.KFAC(net, seed=0)
    loss, seconds = train(optimizer, lambda: model.loss(*net(*x)), steps)
    return Result("K-FAC", steps, loss, model.error(), seconds)


def adam(steps: int, width: int, x: tuple[Tensor, Tensor], lr: float) -> Result:
    torch.manual_seed(0)
    model = Poisson(width)
    loss, seconds = train(torch.optim.Adam(model.parameters(), lr=lr), lambda: model.loss(*model(*x)), steps)
    return Result(f"Adam {lr:g}", steps, loss, model.error(), seconds)


def train(optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], steps: int) -> tuple[float, float]:
    """Returns the last loss and the seconds."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item(), time.perf_counter() - started


def main(
    steps: int = 1000, width: int = 32, inside: int = 400, border: int = 100, adam_steps: int = 3000
) -> list[Result]:
    torch.manual_seed(0)
    x = points(inside, border)
    results = [kfac(steps, width, x), *(adam(adam_steps, width, x, lr) for lr in (1e-3, 5e-3))]
    print(*results, sep="\n")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 1000), ("width", 32), ("inside", 400), ("border", 100), ("adam-steps", 3000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
