"""A layer of your own: a circulant matrix, declared in a few lines and used as any other.

Without the declaration kfac_fx has an exact block for a vector of this size, and a diagonal one for a long vector. The
declared layer has its factors at every length, and its name in the report.

`y[k] = sum_j w[(k - j) mod d] x[j]`: one vector of weights, met by d rotations of the input. Its rows are these
rotations, one a position, so the layer is a linear one with a single output and d weight-sharing positions.

    python -m examples.own_layer
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx


class Circulant(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.mul(torch.fft.rfft(x), torch.fft.rfft(self.weight)), x.shape[-1])


def rotations(x: Tensor, attrs: Any) -> Tensor:
    """[N, d] -> [N, d, d]: position k sees x[(k - j) mod d] at the weight's place j."""
    place = torch.arange(x.shape[-1], device=x.device)
    return x[:, (place[:, None] - place[None, :]) % x.shape[-1]]


@kfac_fx.layer(
    rows=rotations,
    grad_rows=lambda dy, attrs: dy.unsqueeze(-1),
    layouts={"weight": "i -> () i"},
    example=lambda: (Circulant(6), torch.randn(4, 6)),
)
def circulant(x: Tensor, size: Any, *, weight: Tensor) -> Tensor:
    return torch.fft.irfft(torch.mul(torch.fft.rfft(x), torch.fft.rfft(weight)), size)


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(Circulant(16), nn.Tanh(), Circulant(16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(128, 16)
    y = x[:, :4].argmax(-1)
    net = kfac_fx.compile(model, (x,), loss="categorical", layers=[circulant])
    print(net.report)
    optimizer = kfac_fx.KFAC(net)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[-1]:.4f}")
    return losses[-1]


if __name__ == "__main__":
    main()
