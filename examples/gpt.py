"""A character GPT learns to write Python from the source of Python's standard library.

python -m examples.gpt

step  300  loss 1.326  ρ 1.00
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


def text(files: int = 20) -> Tensor:
    """The first modules of the standard library, as numbers of characters."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))[:files]
    characters = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    number = {character: n for n, character in enumerate(CHARACTERS)}
    return torch.tensor([number[character] for character in characters if character in number])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [N, S, width]
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """[N, S] characters -> [N, S, characters] logits of the next ones. The output layer is the embedding."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, width // 16) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


@torch.no_grad()
def written(model: nn.Module, start: str, length: int, characters: int) -> str:
    tokens = torch.tensor([[CHARACTERS.index(character) for character in start]])
    for _ in range(characters):
        probabilities = model(tokens[:, -length:])[0, -1].softmax(0)
        tokens = torch.cat([tokens, probabilities.multinomial(1)[None]], 1)
    return "".join(CHARACTERS[n] for n in tokens[0])


def main(steps: int = 300, width: int = 48, layers: int = 2, length: int = 48, batch: int = 64) -> list[float]:
    """The losses of every step, in nats a character."""
    torch.manual_seed(0)
    data = text()
    model = GPT(width, layers, length)
    net = kfac_fx.compile(model, (data[: batch * length].view(batch, length),), loss="categorical")
    print(net.report, "\n")
    optimizer = kfac_fx.KFAC(net)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    losses = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - length, (batch, 1))
        windows = data[starts + torch.arange(length + 1)]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, steps // 10) == 0:
            print(f"step {step:4}  loss {losses[-1]:.3f}  ρ {optimizer.rho.item():.2f}")
    print("\n" + written(model.eval(), "def ", length, 200))
    return losses


if __name__ == "__main__":
    main()
