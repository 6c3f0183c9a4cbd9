"""Recurrent layers and packed sequences by torch's kernels, for the operations of `substitutes` that stand for them.

Graphs that are evaluated have them (`passes.kernels`), and so have the regions of a forward that stay graphs of their
own, as those under torch.no_grad: no pass reads these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..graphs.operations import op_name

STACK_OF_LAYERS = "recurrent"  # the operation that stands for a stack of recurrent layers
TORCH_LAYERS: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}
TORCH_CELLS: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm_cell,
    "gru": torch.gru_cell,
    "rnn_tanh": torch.rnn_tanh_cell,
    "rnn_relu": torch.rnn_relu_cell,
}


def run_layers(
    kind: str,
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    steps: int,
    biases: bool,
    layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> Sequence[Tensor]:
    """`substitutes.recurrent`"""
    first: Any = list(state) if kind == "lstm" else state[0]
    stack = biases, layers, dropout, dropout > 0, bidirectional
    results: Sequence[Tensor]
    if lengths is None:
        results = TORCH_LAYERS[kind](x, first, list(weights), *stack, batch_first)
    else:
        sizes = reached(lengths, steps, lengths.device).sum(1).cpu()
        results = TORCH_LAYERS[kind](x, sizes, first, list(weights), *stack)
    return results


def run_cell(kind: str, x: Tensor, state: Sequence[Tensor], *weights: Tensor | None) -> Sequence[Tensor]:
    """`substitutes.recurrent_cell`"""
    new: Any = TORCH_CELLS[kind](x, list(state) if kind == "lstm" else state[0], *weights)
    return new if kind == "lstm" else [new]


def reached(lengths: Tensor, steps: int, device: torch.device) -> Tensor:
    """[steps, N]: whether the sequence has the step."""
    return torch.arange(steps, device=device).unsqueeze(-1) < lengths.to(device)


def rows_within(x: Tensor, lengths: Tensor) -> Tensor:
    """`substitutes.packed`"""
    return x[reached(lengths, x.shape[0], x.device)]


def padded_again(data: Tensor, lengths: Tensor, steps: int, padding: float) -> Tensor:
    """`substitutes.unpacked`"""
    mask = reached(lengths, steps, data.device)
    place = (mask.flatten().cumsum(0).view_as(mask) - 1).clamp(min=0)
    return torch.where(mask[(..., *(None,) * (data.dim() - 1))], data[place], padding)


COMPUTED: dict[str, Callable[..., Any]] = {
    STACK_OF_LAYERS: run_layers,
    "recurrent_cell": run_cell,
    "packed": rows_within,
    "unpacked": padded_again,
}


def compute(graph: fx.Graph) -> None:
    """Let the operations that stand for recurrent layers and packed sequences compute."""
    for node in graph.nodes:
        if (function := COMPUTED.get(op_name(node))) is not None:
            node.target = function
