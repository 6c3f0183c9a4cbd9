"""A deep network without skips and norms, trained with K-FAC without settings and with AdamW.

The network tells which of three spirals a point of the plane belongs to.

    python -m examples.deep_network

    K-FAC  loss 0.006 after 150 steps, 1.099 is chance
    AdamW  loss 0.620 after 150 steps, 1.099 is chance
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx


def spirals(cases: int, turns: float = 1.5) -> tuple[Tensor, Tensor]:
    """Points [N, 2] of the plane, and the number of their spiral."""
    labels = torch.arange(cases) % 3
    radius = torch.rand(cases).sqrt()
    angle = 2 * math.pi * (turns * radius + labels / 3) + 0.1 * torch.randn(cases)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1) * 1.5, labels


def network(width: int, depth: int) -> nn.Sequential:
    """Tanh layers from Glorot's start: [N, 2] -> [N, 3]."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((2, *[width] * (depth - 1)), (*[width] * (depth - 1), 3), strict=True):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(method: str, steps: int, width: int, depth: int) -> float:
    torch.manual_seed(0)
    x, y = spirals(2000)
    model: nn.Module = network(width, depth)
    optimizer: torch.optim.Optimizer
    if method == "K-FAC":
        model = net = kfac_fx.compile(model, (x[:512],), loss="categorical")
        optimizer = kfac_fx.KFAC(net)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        chosen = torch.randint(len(x), (512,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y).item()
    print(f"{method}  loss {loss:.3f} after {steps} steps, {math.log(3):.3f} is chance")
    return loss


def main(steps: int = 150, width: int = 32, depth: int = 24) -> dict[str, float]:
    return {method: train(method, steps, width, depth) for method in ("K-FAC", "AdamW")}


if __name__ == "__main__":
    main()
