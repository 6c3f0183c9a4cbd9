"""Branches on a random number whose outcome is certain, as on a rate of dropped modules that is 0.

    if torch.rand(1) > self.module_dropout: ...        # 0.0

No graph branches on values, but something is known of this one: a draw of torch.rand is in [0, 1). It stays in the
graph, so that the random stream goes on as the model's does; the rate is an attribute, and a capture holds for one.

Checkpoints that save memory run as what they wrap, where a graph or a recording takes the place of what they would
run again in the backward.

`x.data` while a model is traced: what `x.detach()` is, which torch.export knows.

On a parameter (`linear(x, self.weight.data)`, as adapters read the weights that they were put beside) it would give
torch.export a tensor that it takes for a constant without numbers. What forward writes through it is seen in the model
itself; see `writes`.

Operations that stand for others while a model is traced: they know shapes, and are never run.

What forward writes into parameters: teachers that follow a student, clamped or renormalized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..errors import fatal
from ..torch_private import CHECKPOINT_GENERATORS, debug_unwrap

DRAWS = {"rand", "rand_like"}
NAMES = {
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
READS = {"__bool__", "item"}
FINE = (torch.float32, torch.float64)  # a draw of these is 0 once in 2^24 times, or more seldom: taken for never


class CertainDraws(TorchFunctionMode):
    """Inside, comparisons of draws with what none can be are Python's truth values where they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[int, Tensor] = {}  # by id, and held, so that no other tensor gets it
        self.known: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and args and id(args[0]) in self.known:
            return self.known[id(args[0])][1]
        result = func(*args, **(kwargs or {}))
        if name in DRAWS:
            self.draws[id(result)] = result
        elif name in NAMES and len(args) == 2 and not kwargs and id(args[0]) in self.draws:
            truth = outcome(NAMES[name], args[1], draw=self.draws[id(args[0])])
            if truth is not None:
                self.known[id(result)] = result, truth
        return result


def outcome(comparison: str, number: Any, draw: Tensor) -> bool | None:
    """Of a draw in [0, 1) with a number; None where it depends on the draw."""
    if not isinstance(number, (int, float)):
        return None
    if number >= 1:
        return comparison in ("lt", "le")
    if number < 0 or (number == 0 and (comparison in ("lt", "ge") or draw.dtype in FINE)):
        return comparison in ("gt", "ge")
    return None


# --- checkpoints ------------------------------------------------------------------------------------------------------


@contextmanager
def checkpoints_off() -> Iterator[None]:
    """Those that are not reentrant; `watch.custom_functions` sees the others."""
    originals = {name: getattr(checkpoint, name) for name in CHECKPOINT_GENERATORS}

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    for name in originals:
        setattr(checkpoint, name, nothing)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(checkpoint, name, original)


# --- detached ---------------------------------------------------------------------------------------------------------


DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a property, which torch's types do not say


class Detached(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0].detach() if func == DATA else func(*args, **(kwargs or {}))


# --- stand ins --------------------------------------------------------------------------------------------------------


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


# --- writes -----------------------------------------------------------------------------------------------------------


ASSIGNMENTS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "set_data"}

NO_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}  # for all the underscore


class Writes(TorchFunctionMode):
    """Keeps what is in a parameter before anything is written into it. before: by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.owners = {memory(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        self.before: dict[str, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            owner = self.owners.get(memory(tensor))
            if owner is not None and memory(owner[1]) and owner[0] not in self.before:
                self.before[owner[0]] = owner[1], owner[1].detach().clone()
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a function of torch writes into, by its name."""
    name = getattr(func, "__name__", "").split(".")[0]
    in_place = name in ASSIGNMENTS or (name.endswith("_") and not name.endswith("__") and name not in NO_WRITES)
    targets = [*(args[:1] if in_place else ()), kwargs.get("out")]
    flat = [one for target in targets for one in (target if isinstance(target, (list, tuple)) else (target,))]
    return [one for one in flat if isinstance(one, Tensor)]


def memory(tensor: Tensor) -> int:
    """Where its values are; 0 for what has none, as the stand-ins of a trace."""
    own = debug_unwrap(tensor)
    if own.layout != torch.strided or own.device.type == "meta":
        return 0
    try:
        return own.untyped_storage().data_ptr()
    except RuntimeError as error:
        if fatal(error):
            raise
        return 0  # a stand-in of a trace


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """The parameters as they were at the end; yields those that were written into, as they are found.

    Costs memory only for what is written into.
    """
    writes = Writes(model)
    try:
        with writes:
            yield writes.before
    finally:
        with torch.no_grad():
            for parameter, before in writes.before.values():
                parameter.data.copy_(before)
