"""Operations that stand for others while a model is traced: they know shapes, and are never run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NOT_RUN = "bug in kfac_fx: an operation that only stands for another one was run"


@torch.library.custom_op("kfac_fx::recurrent", mutates_args=())
def recurrent(
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
) -> list[Tensor]:
    """[output, last state, ...] of a stack of recurrent layers, as torch.lstm and its like.

    x: [steps, N, i], or [N, steps, i] if `batch_first`, or packed [rows, i] if there are `lengths`; state, weights: as
    torch has them; dropout: 0 outside of training.
    """
    raise AssertionError(NOT_RUN)


@recurrent.register_fake
def _(kind: str, x: Tensor, state: Sequence[Tensor], *options: Any) -> list[Tensor]:
    *_, bidirectional, _batch_first = options
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty(*x.shape[:-1], width), *(torch.empty_like(one) for one in state)]


@torch.library.custom_op("kfac_fx::recurrent_cell", mutates_args=())
def recurrent_cell(
    kind: str,
    x: Tensor,
    state: Sequence[Tensor],
    weight: Tensor,
    state_weight: Tensor,
    bias: Tensor | None,
    state_bias: Tensor | None,
) -> list[Tensor]:
    """The next state of one step, as torch.lstm_cell and its like: x [N, i], state [N, o]."""
    raise AssertionError(NOT_RUN)


@recurrent_cell.register_fake
def _(kind: str, x: Tensor, state: Sequence[Tensor], weight: Tensor, state_weight: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape[0], state_weight.shape[1]) for _ in state]


@torch.library.custom_op("kfac_fx::packed", mutates_args=())
def packed(x: Tensor, lengths: Tensor) -> Tensor:
    """The positions of x [steps, N, ...] within the lengths [N], step by step: [rows, ...]."""
    raise AssertionError(NOT_RUN)


@packed.register_fake
def _(x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *x.shape[2:])


@torch.library.custom_op("kfac_fx::unpacked", mutates_args=())
def unpacked(data: Tensor, lengths: Tensor, steps: int, padding: float) -> Tensor:
    """`packed` undone: [rows, ...] -> [steps, N, ...], with `padding` beyond the lengths."""
    raise AssertionError(NOT_RUN)


@unpacked.register_fake
def _(data: Tensor, lengths: Tensor, steps: int, padding: float) -> Tensor:
    return data.new_empty(steps, lengths.shape[0], *data.shape[1:])


RUNNING: dict[int, Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]] = {}  # what has the shapes of a call


@torch.library.custom_op("kfac_fx::own_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def own_backward(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """A call of a user's torch.autograd.Function, by its number; see `own_backwards`. It may draw random numbers."""
    raise AssertionError(NOT_RUN)


@own_backward.register_fake
def _(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return RUNNING[number](tensors, sizes)
