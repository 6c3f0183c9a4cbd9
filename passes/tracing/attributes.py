"""Attributes of modules that are no parameters, buffers or submodules: what forward changes, and how it is undone.

Attributes that forward itself sets are restored after every trace (`untouched`). Those that are changed from outside,
such as a temperature or a rate of dropout, are part of what a capture is valid for; see `settings`.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..torch_private import buffers_of
from .settings import TORCHS
from .summary import ATOMS, CONTAINERS, FEW, SYMBOLS, fields, plain


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of every attribute of every module."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            yield (f"{path}.{name}" if path else name), value


def counts(value: Any, depth: int = 2) -> Any:
    """The numbers in an attribute, with which forward may count."""
    if isinstance(value, Number):
        return value
    inner = content(value) if depth else None
    if inner is None or len(inner) > FEW:
        return None
    numbers = [counts(element, depth - 1) for element in items(inner)]
    return tuple(number for number in numbers if number not in (None, ()))


# --- restoring --------------------------------------------------------------------------------------------------------

SHARED = object()  # stands for the summary of an object that another module holds, too


@dataclass(frozen=True)
class Held:
    """The attributes of a module at one moment.

    Attributes:
        prefix: the module's path and a dot.
        attributes: by name.
        contents: name -> (container, copy of its content), for attributes that are containers or objects.
        streams: name -> (generator, its state).
        plain: summaries of the attributes that are the user's.
    """

    prefix: str
    module: nn.Module
    attributes: dict[str, Any]
    contents: dict[str, tuple[Any, Any]]
    streams: dict[str, tuple[Any, Any]]
    plain: dict[str, Any]

    @classmethod
    def of(cls, path: str, module: nn.Module, seen: set[int]) -> Held:
        """seen: ids of objects that modules share, such as a configuration; each is summarized once."""
        held = cls(f"{path}." if path else "", module, dict(module.__dict__), {}, {}, {})
        for name, value in module.__dict__.items():
            if type(value) in ATOMS:
                held.plain[name] = type(value), value
                continue
            first, inner = id(value) not in seen, content(value)
            if inner is not None and first:
                held.contents[name] = inner, copied(inner)
            if name in TORCHS:
                continue
            if inner is not None and not isinstance(value, CONTAINERS):
                seen.add(id(value))
            if (state := stream(value)) is not None:
                held.streams[name] = value, state
            held.plain[name] = plain(value) if first else SHARED
        return held

    def changed(self) -> list[str]:
        """Names of attributes that differ from before, and of buffers that are another tensor."""
        before = {id(buffer) for buffer in items(self.contents["_buffers"][1])}
        buffers = buffers_of(self.module).items()
        names = [name for name, buffer in buffers if is_tensor(buffer) and id(buffer) not in before]
        for name, value in self.module.__dict__.items():
            if name not in TORCHS and (name not in self.plain or self.is_new(name, value)):
                names.append(name)
        gone = [name for name in self.plain if name not in self.module.__dict__ and name not in TORCHS]
        return [self.prefix + name for name in (*names, *gone)]

    def is_new(self, name: str, value: Any) -> bool:
        if self.plain[name] is SHARED:
            return value is not self.attributes[name]
        if name in self.streams and not same_stream(stream(value), self.streams[name][1]):
            return True
        return holds_symbol(value) or bool(plain(value) != self.plain[name])

    def put_back(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for container, before in self.contents.values():
            if same_content(container, before):
                continue  # a frozen configuration cannot be changed
            container.clear()
            container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
        for generator, before in self.streams.values():
            if not same_stream(stream(generator), before):
                set_stream(generator, before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """Restore the attributes of all modules, and the content of their containers, at the end.

    Yields a list, which is filled at the end with the names of the attributes that changed.
    """
    seen: set[int] = set()
    held = [Held.of(path, module, seen) for path, module in model.named_modules()]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for before in held:
            changed += before.changed()
        for before in held:
            before.put_back()


def content(value: Any) -> Any:
    """The container that a value is, or the dictionary of its attributes; None if it is neither."""
    return value if isinstance(value, CONTAINERS) else fields(value)


def copied(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return next(kind for kind in CONTAINERS if isinstance(container, kind))(container)


def same_content(container: Any, before: Any) -> bool:
    """Whether both hold the same objects in the same places."""
    if not container and not before:  # most dictionaries of hooks are empty
        return True
    keys = isinstance(container, dict) and list(container) != list(before)
    return not keys and list(map(id, items(container))) == list(map(id, items(before)))


def items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def holds_symbol(value: Any) -> bool:
    """Whether a trace left a proxy or a symbol in the value."""
    if type(value) in ATOMS:
        return False
    inner = content(value)
    return any(isinstance(element, (fx.Proxy, *SYMBOLS)) for element in ((value,) if inner is None else items(inner)))


def is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, fx.Proxy))


# --- random generators of a model -------------------------------------------------------------------------------------


def stream(value: Any) -> Any:
    """The state of a random generator; None for other values."""
    if isinstance(value, (*CONTAINERS, nn.Module, Tensor)):
        return None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return None


def same_stream(state: Any, other: Any) -> bool:
    return torch.equal(state, other) if isinstance(state, Tensor) else repr(state) == repr(other)


def set_stream(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
