"""One forward of a model, watched from outside: how its submodules are called, and what else reads its parameters.

For models that no single graph can hold: their parts are captured one by one, and this is where the parts' inputs come
from. All that forward assigns is put back, and so are the buffers and all random streams.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import pytree
from .border import autocast, python_random
from .places import OWN_FOLDER
from .watch import custom_functions, untouched


@dataclass(frozen=True)
class Call:
    """What a module was called with, detached, and under which autocast.

    transformed: by torch.func, whose tensors do not live longer than the call; then nothing is kept of them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[tuple[str, torch.dtype], ...]
    transformed: bool = False


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """A forward inside leaves no trace but in its inputs. Reentrant checkpoints are run as what they wrap."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.enable_grad(), torch.random.fork_rng(devices=devices), python_random():
        try:
            with untouched(model), custom_functions():
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def calls_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, list[Call]]:
    """One forward: the calls of every submodule (by its id) with gradients on, before its own hooks see them."""
    calls: dict[int, list[Call]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            inside = any(transformed(leaf) for leaf in pytree.leaves((args, kwargs)))
            given, named = ((), {}) if inside else (mapped(Tensor.detach, args), mapped(Tensor.detach, kwargs))
            calls.setdefault(id(module), []).append(Call(given, named, autocast(), inside))

    submodules = [module for module in model.modules() if module is not model]
    handles = [module.register_forward_pre_hook(note, prepend=True, with_kwargs=True) for module in submodules]
    try:
        model(*mapped(Tensor.clone, args), **mapped(Tensor.clone, dict(kwargs)))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def transformed(value: Any) -> bool:
    return isinstance(value, Tensor) and torch.func.debug_unwrap(value) is not value


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`function` of every tensor in `tree`."""
    return pytree.mapped(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


class Readers(TorchFunctionMode):
    """Where parameters are read outside of given modules. places: name -> "model.py:12", the first place."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.places, self.depth = names, dict[str, str](), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.depth == 0 and torch.is_grad_enabled():
            given = (*args, *(kwargs or {}).values())
            nested = (inner for one in given if isinstance(one, (list, tuple)) for inner in one)
            read = [one for one in (*given, *nested) if id(one) in self.names]
            made = args[:1] if func is Tensor.__setitem__ else result  # an assignment to a slice returns nothing
            if read and any(isinstance(one, Tensor) and one.requires_grad for one in pytree.leaves(made)):
                self.note(read)
        return result

    def note(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            self.places.setdefault(self.names[id(parameter)], users_line())

    @contextmanager
    def outside_of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """What a module is handed counts as read outside of it."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.depth == 0 and torch.is_grad_enabled():
                self.note(one for one in pytree.leaves((args, kwargs)) if id(one) in self.names)
            self.depth += 1

        def leave(*rest: Any) -> None:
            self.depth -= 1

        handles: list[Any] = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def users_line() -> str:
    """`"model.py:12"`: the innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("/torch/", OWN_FOLDER)):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "an unknown line"


def read_outside(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], modules: Iterable[nn.Module]
) -> dict[str, str]:
    """One forward: parameters that are read outside of `modules`, and where."""
    readers = Readers({id(parameter): name for name, parameter in model.named_parameters()})
    with readers.outside_of(modules), readers:
        model(*mapped(Tensor.clone, args), **mapped(Tensor.clone, dict(kwargs)))
    return readers.places
