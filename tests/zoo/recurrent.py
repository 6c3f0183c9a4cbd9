"""Recurrent modules of torch.nn, and loops over their cells."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kfac_fx import losses

from .case import Case, Expected, linear
from .dense import batch


class Last(nn.Module):
    """The last output of a recurrent module and a linear layer on it."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner
        width = (inner.proj_size or inner.hidden_size) * (2 if inner.bidirectional else 1)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)[0]
        out: Tensor = self.head(y[:, -1] if self.inner.batch_first else y[-1])
        return out


class Everything(nn.Module):
    """Every output and the last states of a stack in both directions, from a first state that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(3, 4, num_layers=2, bidirectional=True, dropout=0.4)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:  # [T, N, 3], [4, N, 4]
        y, last = self.inner(x, first)
        return self.head(y).transpose(0, 1), last


class LearnedStart(nn.Module):
    """The first state is a parameter, one for all cases."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNN(3, 4, nonlinearity="relu", bias=False, batch_first=True)
        self.start = nn.Parameter(0.1 * torch.ones(1, 1, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(x, self.start.expand(-1, x.shape[0], -1))
        out: Tensor = self.head(y).sum(1)
        return out


class Cells(nn.Module):
    """A loop over three cells, one upon the other; the first states are left to them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(3, 4), nn.GRUCell(4, 5, bias=False), nn.RNNCell(5, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 3]
        lstm, gru, rnn = None, None, None
        for step in range(x.shape[1]):
            lstm = self.lstm(x[:, step], lstm)
            gru = self.gru(lstm[0], gru)
            rnn = self.rnn(gru, rnn)
        y: Tensor = self.head(rnn)
        return y


class Decoder(nn.Module):
    """An encoder whose last state is the decoder's first; both read the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.encoder, self.decoder = nn.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 7)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.table(source))
        y: Tensor = self.head(self.decoder(self.table(target), state)[0])
        return y


def layer(prefix: str, uses: int, bias: bool = True, suffix: str = "_l0") -> tuple[Expected, Expected]:
    """Both registrations of a recurrent layer."""
    names = [[f"{prefix}.{kind}_{side}{suffix}" for kind in ("weight", "bias")[: 1 + bias]] for side in ("ih", "hh")]
    return ("linear", tuple(names[0]), uses), ("linear", tuple(names[1]), uses)


CASES = (
    Case(
        "lstm",
        lambda: Last(nn.LSTM(3, 4, batch_first=True)),
        lambda: batch(5, 4, 3),
        (*layer("inner", 4), linear("head")),
        rounded=True,
    ),
    Case(
        "gru_both_ways",
        Everything,
        lambda: (torch.randn(3, 5, 3), torch.randn(4, 5, 4)),
        (
            *(part for end in ("_l0", "_l0_reverse", "_l1", "_l1_reverse") for part in layer("inner", 3, suffix=end)),
            linear("head"),
        ),
        lambda outputs: losses.Normal(outputs[0]),
        rounded=True,
    ),
    Case(
        "rnn_learned_start",
        LearnedStart,
        lambda: batch(5, 4, 3),
        (("scale_and_shift", ("start",), 1), *layer("inner", 4, bias=False), linear("head")),
        rounded=True,
    ),
    Case(
        "cells",
        Cells,
        lambda: batch(5, 3, 3),
        (
            *layer("lstm", 3, suffix=""),
            *layer("gru", 3, bias=False, suffix=""),
            *layer("rnn", 3, suffix=""),
            linear("head"),
        ),
        rounded=True,
    ),
    Case(
        "encoder_decoder",
        Decoder,
        lambda: (torch.randint(7, (5, 4)), torch.randint(7, (5, 3))),
        (("embedding", ("table.weight",), 2), *layer("encoder", 4), *layer("decoder", 3), linear("head")),
        "categorical",
        rounded=True,
    ),
)
