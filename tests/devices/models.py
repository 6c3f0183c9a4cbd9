"""Small models that together use everything a recording can do: each with its batch, its loss and compile's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

CASES = 6


@dataclass(frozen=True)
class Small:
    """make: the model; inputs: a batch for it; loss, options: of `kfac_fx.compile`."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    loss: Any = "categorical"
    options: dict[str, Any] = field(default_factory=dict)


class Image(nn.Module):
    """Convolutions of all kinds, norms with running means, dropout, a parameter of no layer that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.PReLU(4), nn.Conv2d(4, 4, 3, groups=4, bias=False)
        )
        self.up, self.norm = nn.ConvTranspose2d(4, 3, 2), nn.GroupNorm(1, 3)
        self.head, self.heat = nn.Linear(3, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(self.body(x))).mean((2, 3))
        return self.head(F.dropout(h, 0.1, self.training)) / torch.exp(self.heat)


class Text(nn.Module):
    """A table tied to the output, positions, attention with a mask of padding, learned tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(7, 4), nn.Parameter(torch.zeros(5, 4))
        self.layer, self.token = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Parameter(torch.zeros(4))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.position[: ids.shape[1]]
        h = torch.cat([self.token.expand(len(ids), 1, -1), h], 1)
        kept = torch.cat([torch.ones_like(ids[:, :1]), ids], 1) == 0
        return F.linear(self.layer(h, src_key_padding_mask=kept)[:, 1:], self.table.weight)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.inner(self.table(ids))))
        return y


class Steps(nn.Module):
    """One recurrent layer over packed sequences, and two cells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gru, self.lstm = nn.LSTM(3, 4, batch_first=True), nn.GRUCell(4, 4), nn.LSTMCell(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.inner(packed)
        h, _ = self.lstm(self.gru(h[-1]))
        y: Tensor = self.head(h)
        return y


class Recurrent(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(3, 4, 2, batch_first=True, dropout=0.3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x)[0][:, -1])
        return y


class Mixture(nn.Module):
    """Experts, each with rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        expert, order = self.router(x).argmax(-1).sort()
        offsets = torch.cumsum(F.one_hot(expert, 3).sum(0), 0, dtype=torch.int32)
        product = torch.ops.kfac_fx.grouped_mm(x[order], self.weight.mT, offsets)
        y: Tensor = product.tanh() * self.router(x)[order].amax(-1, keepdim=True)
        return y


class Repeated(nn.Module):
    """One layer at three steps, and a pair of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pair = nn.Linear(4, 4), nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(3):
            h = torch.tanh(self.inner(h))
        y: Tensor = self.pair(h, x)
        return y


class Branches(nn.Module):
    """A branch on values, which no graph holds: its submodules are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.last(h.tanh() if h.sum() > -1e9 else h)
        return y


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5, dtype=dtype), nn.Tanh(), nn.Linear(5, 3, dtype=dtype))


def rows(*sizes: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(CASES, *sizes),)


def ids() -> tuple[Any, ...]:
    return (torch.ones(CASES, 5, dtype=torch.int64),)


SMALL: dict[str, Small] = {
    "image": Small(Image, rows(2, 5, 5)),
    "image, all kinds of blocks": Small(
        Image,
        rows(2, 5, 5),
        options={"approximations": {"body.0": "kron_sua", "body.3": "diagonal", "up": "full", "head": "kron_indep"}},
    ),
    "image, of a sample": Small(Image, rows(2, 5, 5), options={"sub_sample_inputs": 0.5, "sub_sample_patches": 1.0}),
    "text": Small(Text, ids),
    "padding": Small(Masked, ids, options={"padding_mask": lambda ids: ids != 0}),
    "packed steps": Small(
        Steps, lambda: (torch.randn(CASES, 5, 3), torch.ones(CASES, dtype=torch.int64, device="cpu")), "normal"
    ),
    "experts": Small(Mixture, rows(8), "normal"),
    "wide sides": Small(Mixture, rows(8), "normal", {"dense_limit": 5}),
    "series": Small(Repeated, rows(4), options={"approximations": {"inner": "kron_series_2"}}),
    "divided": Small(Branches, rows(4)),
    "double": Small(lambda: mlp(torch.float64), lambda: (torch.randn(CASES, 4, dtype=torch.float64),)),
}
