"""What reads parameters outside of given modules, in one forward of a model."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..words.places import OWN_FOLDER
from .calls import Call, Lent, mapped
from .devices import autocast
from .following import NOT_CAPTURED, Reads, differentiable
from .hooks import hooked_by_user
from .reads import Read
from .watch import Apply, Function, functions_applied


@dataclass
class Found:
    """A read, with what it was called with, detached, and how often. where: "model.py:12"."""

    read: Read
    call: Call
    where: str
    calls: int = 0


class Readers(Reads):
    """Outside of given modules. found: the reads, one of a kind and of a place; places: the parameters that are read in
    another way, "read at model.py:12, ..."."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], cases: int | None) -> None:
        super().__init__(parameters, cases)
        self.lent, self.places, self.found = Lent(model), dict[str, str](), dict[Any, Found]()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        given = tuple(one.detach().clone() if one is read.written else one.detach() for one in read.inputs)
        result = operation()
        if differentiable(read, result):
            kind = read.key, tuple((one.shape, one.dtype) for one in given)
            found = self.found.setdefault(kind, Found(read, Call(given, {}, autocast()), users_line()))
            found.calls += 1
        return result

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        self.note(names, f"read at {users_line()}, {why}")

    def note(self, names: Iterable[str], said: str) -> None:
        for name in names:
            self.places.setdefault(name, said)

    @contextmanager
    def outside_of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """What a module is handed counts as read outside of it, and so does all that it does on other parameters."""
        inside: list[bool] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.paused and torch.is_grad_enabled():
                self.lost(self.names_in((args, kwargs)))
            inside.append(not self.lent.others(module))
            self.paused += inside[-1]

        def leave(*rest: Any) -> None:
            self.paused -= inside.pop()

        handles: list[Any] = []
        for module in modules:
            hooked = hooked_by_user(module)  # what the user hooks is Python outside of it, what torch does is inside
            handles.append(module.register_forward_pre_hook(enter, prepend=not hooked, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, prepend=hooked, always_call=True))
        try:
            with functions_applied(self.applied):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def applied(self, apply: Apply, _: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Notes what a user's autograd.Function is given, which no TorchFunctionMode sees."""
        if not self.paused and torch.is_grad_enabled():
            self.lost(self.names_in((args, kwargs)))
        return apply(*args, **kwargs)


def users_line() -> str:
    """`"model.py:12"`: the innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("/torch/", OWN_FOLDER)):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "an unknown line"


def read_outside(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modules: Iterable[nn.Module],
    parameters: Mapping[str, Tensor],
    cases: int | None,
) -> Readers:
    """One forward: what is read outside of `modules`, and where."""
    readers = Readers(model, parameters, cases)
    with readers.outside_of(modules), readers:
        output = model(*mapped(Tensor.clone, args), **mapped(Tensor.clone, dict(kwargs)))
    readers.note(readers.names_in(output), "returned by the model, as no layer's output")
    return readers
