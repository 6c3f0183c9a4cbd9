"""Models of padded sequences, and a batch of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import kfac_fx

LENGTHS = (3, 5, 2)
MASK = torch.tensor([[position < length for position in range(5)] for length in LENGTHS])


class Translator(nn.Module):
    """Embeddings of words and of positions, attention over what is real, rows in a view and rows in heads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(6, 4)
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.norm, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.heads, self.out = nn.Linear(2, 2), nn.Linear(4, 5)

    def features(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        scores = (self.query(x) @ self.key(x).mT).masked_fill(attention_mask[:, None] == 0, -torch.inf)
        x = x + scores.softmax(-1) @ self.value(x)
        flat = self.norm(x).view(-1, 4)
        x = x + self.narrow(torch.tanh(self.wide(flat))).view(x.shape)
        heads = self.heads(x.view(x.shape[0], x.shape[1], 2, 2).transpose(1, 2))
        return heads.transpose(1, 2).flatten(2)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.out(self.features(ids, attention_mask))


class Judge(Translator):
    """One prediction a sequence: the mean over what is real."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask.unsqueeze(-1)
        return self.out((self.features(ids, attention_mask) * real).sum(1) / real.sum(1))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) if attention_mask is None else self.words(ids) * attention_mask.unsqueeze(-1)
        out: Tensor = self.out(torch.tanh(x).view(-1, 4)).view(*ids.shape, 5)
        return out


def batch(cases: int = 3) -> tuple[Tensor, dict[str, Any]]:
    """Ids whose padding would show, and their mask."""
    return torch.randint(1, 9, (cases, 5)), {"attention_mask": MASK[:cases].long()}


def masked(model: nn.Module, ids: Tensor, kwargs: dict[str, Any], **options: Any) -> kfac_fx.CompiledModule:
    return kfac_fx.compile(model, (ids,), kwargs, loss="categorical", padding_mask="attention_mask", **options)


@cache
def nets(kind: type[Translator]) -> tuple[kfac_fx.CompiledModule, kfac_fx.CompiledModule]:
    """One with a mask, and one without for the same model."""
    model, (ids, kwargs) = kind(), batch()
    kinds = {"query": "full", "value": "diagonal"} if kind is Judge else {}
    given = {"loss": "categorical", "approximations": kinds}
    return (
        kfac_fx.compile(model, (ids,), kwargs, padding_mask="attention_mask", **given),
        kfac_fx.compile(model, (ids,), kwargs, **given),
    )
