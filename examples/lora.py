"""LoRA fine-tuning: low-rank matrices next to frozen weights, with one Fisher block for each of them.

A network that knows the digits upright learns to read them upside down. W + B A has frozen W; A and B are registered
through the sum and the product, and nothing is declared.

    python -m examples.lora

    errors on digits upside down: 56.9% before, 4.3% after 60 steps
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kfac_fx


class LowRank(nn.Module):
    """w -> w + b a, zero at first (Hu et al. 2021)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        chosen = torch.randint(len(x), (256,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()


@torch.no_grad()
def errors(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(1) != y).float().mean().item()


def main(steps: int = 60, rank: int = 4) -> tuple[float, float]:
    """The errors on upside-down digits that training did not see, before and after the fine-tuning."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    turned = x.flip(1)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), x[:1400], y[:1400], 200)
    before = errors(model, turned[1400:], y[1400:])

    model.requires_grad_(False)
    for layer in model:
        if isinstance(layer, nn.Linear):
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
            layer.parametrizations.weight.original.requires_grad_(False)
    net = kfac_fx.compile(model, (turned[:256],), loss="categorical", strict=True)
    print(net.report)
    train(net, kfac_fx.KFAC(net), turned[:1400], y[:1400], steps)
    after = errors(model, turned[1400:], y[1400:])
    print(f"errors on digits upside down: {before:.1%} before, {after:.1%} after {steps} steps")
    return before, after


if __name__ == "__main__":
    main()
