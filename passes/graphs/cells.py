"""The cells of recurrent layers, in the order in which torch computes them: from the products of the input and of the
state, each with its bias, and the state, to the new state. The first of a state is the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Value = Any  # a tensor, or an fx.Proxy: what is done to it becomes nodes
State = list[Value]
Cell = Callable[[Value, Value, State], State]


def lstm(x: Value, h: Value, state: State) -> State:
    """Hochreiter & Schmidhuber 1997, with forget gates."""
    gates = torch.chunk(h + x, 4, -1)
    i, f, g, o = (gates[n] for n in range(4))
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


def gru(x: Value, h: Value, state: State) -> State:
    """Cho et al. 2014; as in torch, the reset gate meets the product of the state and not the state."""
    of_x, of_h = torch.chunk(x, 3, -1), torch.chunk(h, 3, -1)
    r = torch.sigmoid(of_h[0] + of_x[0])
    z = torch.sigmoid(of_h[1] + of_x[1])
    n = torch.tanh(of_x[2] + of_h[2] * r)
    return [(state[0] - n) * z + n]


def rnn_tanh(x: Value, h: Value, state: State) -> State:
    return [torch.tanh(h + x)]


def rnn_relu(x: Value, h: Value, state: State) -> State:
    return [torch.relu(h + x)]


CELLS: dict[str, Cell] = {"lstm": lstm, "gru": gru, "rnn_tanh": rnn_tanh, "rnn_relu": rnn_relu}
