"""A weight used twice, an output layer tied to an embedding, and parameters linked by hand.

python -m examples.shared_weights
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx


class Recurrent(nn.Module):
    """Reads a sequence of tokens with one cell, and predicts the next with the embedding's own weight."""

    def __init__(self, vocabulary: int = 17, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cell = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor) -> Tensor:
        state = torch.zeros(tokens.shape[0], self.cell.out_features)
        for step in range(tokens.shape[1]):
            state = torch.tanh(self.cell(torch.cat([self.embedding(tokens[:, step]), state], dim=-1)))
        return F.linear(state * self.scale + self.shift, self.embedding.weight)


def main(steps: int = 30) -> float:
    torch.manual_seed(0)
    tokens = torch.randint(17, (64, 5))
    targets = (tokens[:, 0] + tokens[:, -1]) % 17
    net = kfac_fx.compile(
        Recurrent(),
        (tokens,),
        loss="categorical",
        linked={("scale", "shift"): "diagonal"},
        strict=True,  # anything that no layer explains would be an error
    )
    print(net.report)
    optimizer = kfac_fx.KFAC(net)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.4f}  damping {optimizer.damping.item():.2e}")
    return losses[-1]


if __name__ == "__main__":
    main()
