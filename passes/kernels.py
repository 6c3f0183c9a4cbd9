"""Recurrent layers as torch computes them, in graphs that are evaluated and neither recorded nor differentiated.

    recurrent("lstm", x, [h, c], weights, ...)  ->  run_layers("lstm", x, [h, c], weights, ...), which calls torch.lstm

`unroll` writes a node for every operation of every step, because a weight has a use in each. An evaluation needs no
uses, and a kernel of torch takes a part of the time. Packed sequences stay packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx

from .graphs.operations import op_name
from .ir import Program

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


def as_kernels(program: Program) -> Program:
    """Let the operations of `tracing.substitutes` that stand for recurrent layers and packed sequences compute."""
    program = program.copied()
    compute(program.graph)
    return program


def compute(graph: fx.Graph) -> None:
    """As `as_kernels`, of a graph that is written into."""
    for node in graph.nodes:
        if (function := COMPUTED.get(op_name(node))) is not None:
            node.target = function


def recurrent_stacks(graph: fx.Graph) -> list[fx.Node]:
    """The stacks of recurrent layers in a captured graph, or in one `as_kernels`."""
    return [node for node in graph.nodes if op_name(node) in (STACK_OF_LAYERS, run_layers.__name__)]


def lengths_of(stack: fx.Node) -> fx.Node | None:
    """The node of the lengths of packed sequences."""
    lengths: fx.Node | None = argument(stack, "lengths")
    return lengths


def draws_noise(stack: fx.Node) -> bool:
    """Whether there is dropout between the layers of a stack."""
    return bool(argument(stack, "dropout"))


def argument(stack: fx.Node, name: str) -> Any:
    return signature(run_layers).bind(*stack.args).arguments[name]


# --- operations of `tracing.substitutes`, computed --------------------------------------------------------------------


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
