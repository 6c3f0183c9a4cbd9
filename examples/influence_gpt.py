"""Which training texts made a language model say this? Influence functions on a small character GPT.

The score of a training text z for a query q is ∇ℓ(q)ᵀ (N F + δ I)⁻¹ ∇ℓ(z) with corrected eigenvalues (Grosse et al.
2023, "Studying large language model generalization with influence functions"). To first order, the loss of the query
grows by this score if z is left out. The check leaves random texts out, trains again from the same start, and
correlates the ranks of the predicted and of the true change of every query.

    python -m examples.influence_gpt

    'two and two is four': two and two is four (101.572); zero and two is two (23.224); one and two is three (21.739)
    'the cat is blue': the cat is blue (73.152); the cat is green (33.480); the cat is red (12.831)
    'four and one is five': four and one is five (39.314); zero and one is one (16.311); one and four is five (15.024)
    rank correlation with the losses after leaving texts out: ['0.22', '0.74', '0.83']
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
COLORS = ["red", "blue", "green", "white", "black"]
THINGS = ["cat", "dog", "bird", "fish", "tree"]
TEXTS = [f"{NUMBERS[a]} and {NUMBERS[b]} is {NUMBERS[a + b]}" for a in range(5) for b in range(5)]
TEXTS += [f"the {noun} is {color}" for noun in THINGS for color in COLORS[:3]]
QUERIES = ["two and two is four", "the cat is blue", "four and one is five"]
LENGTH, PAD = 24, "."
LETTERS = sorted({*PAD, *"".join(TEXTS)})


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y, mask = self.norm(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        result: Tensor = x + self.down(F.gelu(self.up(self.other(x))))
        return result


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(LETTERS), width), nn.Parameter(0.1 * torch.randn(LENGTH - 1, width))
        self.layers, self.norm = nn.Sequential(Layer(width), Layer(width)), nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.layers(self.words(ids) + self.places))
        return x @ self.words.weight.T


def encoded(texts: list[str]) -> tuple[Tensor, Tensor]:
    """(letters, the letters that follow)"""
    ids = torch.tensor([[LETTERS.index(letter) for letter in text.ljust(LENGTH, PAD)] for text in texts])
    return ids[:, :-1], ids[:, 1:]


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of every text, summed over its letters: [N]."""
    return F.cross_entropy(logits.mT, targets, reduction="none").sum(1)


def trained(x: Tensor, y: Tensor, weights: Tensor, steps: int, width: int) -> nn.Module:
    """weights: of the texts, [N]; zero leaves a text out."""
    torch.manual_seed(0)
    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        ((losses(model(x), y) * weights).sum() / weights.sum() / LENGTH).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


class Influence(NamedTuple):
    """scores: [queries, texts]; correlation: Spearman's, of every query."""

    scores: Tensor
    correlation: Tensor


def main(steps: int = 200, width: int = 24, retrained: int = 12) -> Influence:
    x, y = encoded(TEXTS)
    model = trained(x, y, torch.ones(len(x)), steps, width)
    net = kfac_fx.compile(model, (x,), loss="categorical")
    batches = list(zip(x.split(8), y.split(8), strict=True))
    spectrum = kfac_fx.fit_spectrum(net, batches, case="sequence", scale=len(x), damping=kfac_fx.Relative(0.1))
    queries = encoded(QUERIES)
    scores = spectrum.precondition(queries).scores_of_all(batches)
    for query, row in zip(QUERIES, scores, strict=True):
        top = [f"{TEXTS[n]} ({row[n]:.3f})" for n in row.topk(3).indices.tolist()]
        print(f"{query!r}: {'; '.join(top)}")

    generator = torch.Generator().manual_seed(1)
    predicted, changed = [], []
    before = losses(model(queries[0]), queries[1]).detach()
    for _ in range(retrained):
        kept = (torch.rand(len(x), generator=generator) > 0.3).float()
        predicted.append(scores[:, kept == 0].sum(1))
        other = trained(x, y, kept, steps, width)
        changed.append(losses(other(queries[0]), queries[1]).detach() - before)
    pairs = zip(torch.stack(predicted, 1), torch.stack(changed, 1), strict=True)
    correlation = torch.stack([torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1] for a, b in pairs])
    print("rank correlation with the losses after leaving texts out:", [f"{c:.2f}" for c in correlation.tolist()])
    return Influence(scores, correlation)


if __name__ == "__main__":
    main()
