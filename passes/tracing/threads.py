"""The changes that a capture makes to a whole process, kept to one thread.

Tracers of torch and of this library replace functions of torch for as long as they run. `replaced_in_thread` does that
in the present thread only: others call the original. With `CAPTURING` one thread captures at a time, because torch's
own tracers are not made for more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ClassMethodDescriptorType
from typing import Any

from torch import fx, nn

CLASS_METHODS = (classmethod, ClassMethodDescriptorType)  # of Python and of C
CAPTURING = threading.RLock()  # held by the thread that captures a model


@dataclass
class Replaced:
    """A function that some threads have replaced.

    Attributes:
        original: as the owner held it, a classmethod for instance.
        users: the number of replacements in all threads.
        here: the replacements of the present thread, the innermost last.
    """

    original: Any
    users: int = 0
    here: threading.local = field(default_factory=threading.local)

    def call(self, below: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the innermost replacement of this thread, or what is below all of them."""
        for function in getattr(self.here, "functions", []):
            below = following(function, below)
        return below(*args, **kwargs)


class ThreadTracer(fx.Tracer):
    """Traces the thread that made it. While torch.fx traces, the modules of all threads call the tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    @property
    def traces_this_thread(self) -> bool:
        return threading.get_ident() == self.thread

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return super().call_module(m, forward, args, kwargs) if self.traces_this_thread else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return super().getattr(attr, attr_val, parameter_proxy_cache) if self.traces_this_thread else attr_val


_LOCK = threading.Lock()
_REPLACED: dict[tuple[int, str], Replaced] = {}  # by the owner's id and the function's name


@contextmanager
def replaced_in_thread(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, and in this thread, `owner.name(...)` calls `function(below, ...)`.

    below: what is called without the replacement; of a classmethod, with the class bound. The class is then the next
        argument of `function`.
    """
    with _LOCK:
        entry = _REPLACED.get((id(owner), name))
        if entry is None:
            entry = _REPLACED[id(owner), name] = Replaced(vars(owner)[name])
            setattr(owner, name, dispatcher(entry))
        entry.users += 1
    functions = entry.here.__dict__.setdefault("functions", [])
    functions.append(function)
    try:
        yield
    finally:
        functions.remove(function)
        with _LOCK:
            entry.users -= 1
            if not entry.users:
                setattr(owner, name, entry.original)
                del _REPLACED[id(owner), name]


def dispatcher(entry: Replaced) -> Any:
    """A function, or a classmethod as the original, that calls what this thread has put in its place."""
    if not isinstance(entry.original, CLASS_METHODS):
        return lambda *args, **kwargs: entry.call(entry.original, args, kwargs)

    def of_class(cls: type, *args: Any, **kwargs: Any) -> Any:
        bound = entry.original.__get__(None, cls)
        return entry.call(lambda cls, *args, **kwargs: bound(*args, **kwargs), (cls, *args), kwargs)

    return classmethod(of_class)


def following(function: Callable[..., Any], below: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(below, *args, **kwargs)
