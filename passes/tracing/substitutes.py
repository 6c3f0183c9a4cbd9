"""Substitutes for what torch.export cannot trace: certain branches, checkpoints, `.data`, operations without values.

`CertainDraws`: a branch on a draw of torch.rand whose outcome is certain, as with a rate of dropped modules that is 0.

    if torch.rand(1) > self.module_dropout: ...        # 0.0

The draw is in [0, 1) and stays in the graph, so that the random stream advances as in the model. The rate is an
attribute, and a capture is valid for one value of it.

`Bags`: bags of ids [cases, positions] have as many outputs as the ids have rows.

`checkpoints_off`: checkpoints run the function that they wrap. In the backward they would run the original forward
again, although a graph or a recording has replaced it.

`Detached`: `x.data` becomes `x.detach()`. To torch.export the `.data` of a parameter, as adapters read it from other
layers, is a constant without values. Writes through `.data` are seen when the model itself runs (`Writes`).

Operations that stand for others while a model is traced: they know shapes and are never run.

`Writes`: what forward writes into parameters, such as teachers that follow a student, or clamped weights.

`parameters_kept`, `buffers_kept`: a forward that the user did not ask for leaves no trace in them. The user's own graph
may have saved these tensors, so their versions are kept, too: autograd compares them in its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..errors import fatal
from ..torch_private import CHECKPOINT_GENERATORS, buffers_of, debug_unwrap, versions_kept
from .threads import replaced_in_thread

DRAWS = {"rand", "rand_like"}
COMPARISONS = {
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
BAG = signature(F.embedding_bag)
READS = {"__bool__", "item"}
FINE = (torch.float32, torch.float64)  # their draws are 0 at most once in 2^24 times, which counts as never


class CertainDraws(TorchFunctionMode):
    """Inside, a comparison of a draw with a number is a Python bool when it is read, if its outcome is certain."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[int, Tensor] = {}  # by id; held, so that no other tensor gets the id
        self.outcomes: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and args and id(args[0]) in self.outcomes:
            return self.outcomes[id(args[0])][1]
        result = func(*args, **(kwargs or {}))
        if name in DRAWS:
            self.draws[id(result)] = result
        elif name in COMPARISONS and len(args) == 2 and not kwargs and id(args[0]) in self.draws:
            truth = outcome(COMPARISONS[name], args[1], draw=self.draws[id(args[0])])
            if truth is not None:
                self.outcomes[id(result)] = result, truth
        return result


def outcome(comparison: str, number: Any, draw: Tensor) -> bool | None:
    """The outcome of comparing a draw in [0, 1) with a number; None if it depends on the draw."""
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
    """Inside, checkpoints that are not reentrant do nothing. `watch.custom_functions` handles the others."""

    def nothing(below: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        for name in CHECKPOINT_GENERATORS:
            stack.enter_context(replaced_in_thread(checkpoint, name, nothing))
        yield


# --- `.data` ----------------------------------------------------------------------------------------------------------

DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a property, which torch's types do not say


class Detached(TorchFunctionMode):
    """Inside, `x.data` is `x.detach()`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0].detach() if func == DATA else func(*args, **(kwargs or {}))


# --- bags -------------------------------------------------------------------------------------------------------------


class Bags(TorchFunctionMode):
    """Inside, `F.embedding_bag` of ids [cases, positions] has one bag for each case, by the size of the ids.

    torch makes flat ids of them, with the offsets `arange(0, cases · positions, positions)`. The number of these is a
    quotient of symbols, so that no layer behind the bags would know the cases.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.embedding_bag:
            return func(*args, **(kwargs or {}))
        call = BAG.bind(*args, **(kwargs or {})).arguments
        ids, weights = call["input"], call.get("per_sample_weights")
        if ids.dim() == 2 and call.get("offsets") is None and (weights is None or weights.shape == ids.shape):
            call["offsets"] = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
            call["input"] = ids.reshape(-1)
            if weights is not None:
                call["per_sample_weights"] = weights.reshape(-1)
        return func(**call)


# --- operations that only know shapes ---------------------------------------------------------------------------------

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
    """[output, last state, ...] of a stack of recurrent layers, as torch.lstm, torch.gru, ... return them.

    Args:
        x: [steps, N, i], or [N, steps, i] if `batch_first`, or packed [rows, i] if there are `lengths`.
        state, weights: in torch's order.
        dropout: between the layers; 0 outside of training.
    """
    raise AssertionError(NOT_RUN)


@recurrent.register_fake
def _(kind: str, x: Tensor, state: Sequence[Tensor], *options: Any) -> list[Tensor]:
    *_, bidirectional, _batch_first = options
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty(*x.shape[:-1], width), *(torch.empty_like(tensor) for tensor in state)]


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
    """The next state after one step, as torch.lstm_cell, ... return it: x [N, i], state [N, o]."""
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
    """The inverse of `packed`: [rows, ...] -> [steps, N, ...], with `padding` beyond the lengths."""
    raise AssertionError(NOT_RUN)


@unpacked.register_fake
def _(data: Tensor, lengths: Tensor, steps: int, padding: float) -> Tensor:
    return data.new_empty(steps, lengths.shape[0], *data.shape[1:])


SHAPES: dict[int, Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]] = {}  # of the calls of `own_backward`


@torch.library.custom_op("kfac_fx::own_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def own_backward(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """A call of a user's torch.autograd.Function, by its number; see `functions`. It may draw random numbers."""
    raise AssertionError(NOT_RUN)


@own_backward.register_fake
def _(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return SHAPES[number](tensors, sizes)


# --- writes into parameters and buffers -------------------------------------------------------------------------------

ASSIGNMENTS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "set_data"}
NO_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}  # they leave the values as they are


class Writes(TorchFunctionMode):
    """Keeps the values of parameters before they are written into.

    Attributes:
        before: name -> (parameter, its values before the first write).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.owners = {address(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        self.before: dict[str, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            owner = self.owners.get(address(tensor))
            if owner is not None and address(owner[1]) and owner[0] not in self.before:
                self.before[owner[0]] = owner[1], owner[1].detach().clone()
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a function of torch writes into. Its name tells, as does an argument `out`."""
    name = getattr(func, "__name__", "").split(".")[0]
    in_place = name in ASSIGNMENTS or (name.endswith("_") and not name.endswith("__") and name not in NO_WRITES)
    targets = [*(args[:1] if in_place else ()), kwargs.get("out")]
    flat = [value for target in targets for value in (target if isinstance(target, (list, tuple)) else (target,))]
    return [value for value in flat if isinstance(value, Tensor)]


def address(tensor: Tensor) -> int:
    """The address of the tensor's values; 0 if it has none, as the tensors of a trace."""
    inner = debug_unwrap(tensor)
    if inner.layout != torch.strided or inner.device.type == "meta":
        return 0
    try:
        return inner.untyped_storage().data_ptr()
    except RuntimeError as error:
        if fatal(error):
            raise
        return 0  # a stand-in of a trace


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Restore the parameters at the end. Yields those that are written into, as `Writes.before`.

    It costs memory for parameters that are written into only.
    """
    writes = Writes(model)
    with versions_kept(versioned(model.parameters())):
        try:
            with writes:
                yield writes.before
        finally:
            for parameter, before in writes.before.values():
                parameter.data.copy_(before)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and their values at the end."""
    by_module = [(buffers, dict(buffers)) for buffers in map(buffers_of, model.modules())]
    with values_kept(model.buffers()):
        try:
            yield
        finally:
            for buffers, before in by_module:
                buffers.update(before)


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values and the versions of tensors at the end."""
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    with versions_kept(versioned(tensor for tensor, _ in copies)):
        try:
            yield
        finally:
            for tensor, before in copies:
                tensor.data.copy_(before)


def versioned(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Without tensors that were made in inference mode: autograd saves none of them."""
    return tuple(tensor for tensor in tensors if not tensor.is_inference())
