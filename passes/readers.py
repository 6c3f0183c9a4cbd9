"""What reads parameters outside of given modules, in one forward of a model."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import pytree
from .calls import Lent, mapped
from .hooks import hooked_by_user
from .places import OWN_FOLDER


class Readers(TorchFunctionMode):
    """Where parameters are read outside of given modules. places: name -> "model.py:12", the first place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.lent, self.places, self.depth = Lent(model), dict[str, str](), 0

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
        """What a module is handed counts as read outside of it, and so does all that it does on other parameters."""
        inside: list[bool] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.depth == 0 and torch.is_grad_enabled():
                self.note(one for one in pytree.leaves((args, kwargs)) if id(one) in self.names)
            inside.append(not self.lent.others(module))
            self.depth += inside[-1]

        def leave(*rest: Any) -> None:
            self.depth -= inside.pop()

        handles: list[Any] = []
        for module in modules:
            hooked = hooked_by_user(module)  # what the user hooks is Python outside of it, what torch does is inside
            handles.append(module.register_forward_pre_hook(enter, prepend=not hooked, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, prepend=hooked, always_call=True))
        try:
            with self.functions():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Notes what a user's autograd.Function is given, which no TorchFunctionMode sees."""
        applied = torch.autograd.Function.__dict__["apply"]

        def spy(cls: type, *args: Any, **kwargs: Any) -> Any:
            if self.depth == 0 and torch.is_grad_enabled():
                self.note(one for one in pytree.leaves((args, kwargs)) if id(one) in self.names)
            return applied.__get__(None, cls)(*args, **kwargs)

        torch.autograd.Function.apply = classmethod(spy)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = applied  # type: ignore[method-assign]


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
    readers = Readers(model)
    with readers.outside_of(modules), readers:
        model(*mapped(Tensor.clone, args), **mapped(Tensor.clone, dict(kwargs)))
    return readers.places
