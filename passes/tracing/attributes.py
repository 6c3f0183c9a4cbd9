"""What modules hold beside their parameters, buffers and modules: what forward does to it, and whether it is as before.

A graph keeps the values that an attribute had while it was traced. So what is changed from outside, such as a
temperature or a rate of dropout, is a part of what a capture is specialized to.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..torch_private import FLAT_WEIGHTS, buffers_of, parameters_of

CONTAINERS = (dict, list, set, deque)
PLAIN = (Number, str, bytes, type(None), Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)
ATOMS = frozenset({bool, int, float, str, type(None), FunctionType})  # of PLAIN, the most frequent: told at once
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
NO_OBJECTS = (nn.Module, Tensor, fx.Proxy, random.Random, *SYMBOLS, *PLAIN, *CONTAINERS)
FEW = 64  # elements of a container that are compared; of longer ones, their number
OWN = frozenset(nn.Module().__dict__) - {"training"} | FLAT_WEIGHTS  # torch's own attributes
WEIGHT_NORMS = ("_g", "_orig")  # of torch.nn.utils: the weight of a layer is an attribute that is computed anew


def plain(value: Any, depth: int = 2) -> Any:
    """What can be told of a value without looking into tensors: hashable, and equal as long as nothing changed."""
    if type(value) in ATOMS or isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list, deque)):
        return type(value), len(value), tuple(plain(one, depth) for one in value) if len(value) <= FEW else ()
    if isinstance(value, dict):
        return len(value), tuple((plain(k, 0), plain(one, depth)) for k, one in value.items()) if len(
            value
        ) <= FEW else ()
    if isinstance(value, Tensor):
        return Tensor, id(value)
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray):
        return value.shape, value.tobytes() if value.size <= FEW else id(value)
    inner = fields(value)
    return type(value), id(value), plain(inner, depth - 1) if inner is not None and depth else ()


def fields(value: Any) -> dict[str, Any] | None:
    """The attributes of a user's object, such as a configuration; None for what looks after itself."""
    if type(value) in ATOMS or isinstance(value, NO_OBJECTS) or type(value).__module__.startswith(("torch.", "numpy")):
        return None
    return getattr(value, "__dict__", None)


def settings(model: nn.Module, without: Container[str] = ()) -> dict[str, Any]:
    """All attributes of all modules, and their modes, as far as they can be compared; hashable values.

    without: names of attributes that do not count.
    """
    seen: set[int] = set()
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            full = f"{path}.{name}" if path else name
            if name in OWN or name == "forward" or full in without or id(value) in seen:
                continue
            if isinstance(value, Tensor) and computed_weight(module, name):
                continue
            if fields(value) is not None:
                seen.add(id(value))  # one configuration of all modules
            found[full] = plain(value)
    return found


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of every attribute of every module."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            yield (f"{path}.{name}" if path else name), value


def counts(value: Any, depth: int = 2) -> Any:
    """The numbers in an attribute, which forward may count with."""
    if isinstance(value, Number):
        return value
    inner = content(value) if depth else None
    if inner is None or len(inner) > FEW:
        return None
    found = [counts(one, depth - 1) for one in items(inner)]
    return tuple(one for one in found if one not in (None, ()))


SHARED = object()  # in the place of what is told of an object that another module holds, too

# --- put back ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a module held: its attributes, the content of those that are containers or objects, random streams."""

    prefix: str
    module: nn.Module
    attributes: dict[str, Any]
    contents: dict[str, tuple[Any, Any]]
    streams: dict[str, tuple[Any, Any]]
    plain: dict[str, Any]

    @classmethod
    def of(cls, path: str, module: nn.Module, seen: set[int]) -> Held:
        """seen: objects that other modules hold, too, such as a configuration; they are looked into once."""
        held = cls(f"{path}." if path else "", module, dict(module.__dict__), {}, {}, {})
        for name, value in module.__dict__.items():
            if type(value) in ATOMS:
                held.plain[name] = type(value), value
                continue
            first, inner = id(value) not in seen, content(value)
            if inner is not None and first:
                held.contents[name] = inner, copied(inner)
            if name in OWN:
                continue
            if inner is not None and not isinstance(value, CONTAINERS):
                seen.add(id(value))
            if (state := stream(value)) is not None:
                held.streams[name] = value, state
            held.plain[name] = plain(value) if first else SHARED
        return held

    def changed(self) -> list[str]:
        """Names of attributes that are not what they were; of buffers, those that are another tensor."""
        known = {id(one) for one in items(self.contents["_buffers"][1])}
        found = [key for key, one in buffers_of(self.module).items() if is_tensor(one) and id(one) not in known]
        for name, value in self.module.__dict__.items():
            if name not in OWN and (name not in self.plain or self.is_new(name, value)):
                found.append(name)
        gone = [name for name in self.plain if name not in self.module.__dict__ and name not in OWN]
        return [self.prefix + name for name in (*found, *gone)]

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
                continue  # it may be one that cannot be changed, such as a frozen configuration
            container.clear()
            container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
        for generator, before in self.streams.values():
            if not same_stream(stream(generator), before):
                set_stream(generator, before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """Attributes of all modules, and what is in their containers, as they were; yields a list that is filled at the
    end with the names of those that changed in between."""
    seen: set[int] = set()
    held = [Held.of(path, module, seen) for path, module in model.named_modules()]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for one in held:
            changed += one.changed()
        for one in held:
            one.put_back()


def content(value: Any) -> Any:
    """The container that an attribute is, or that its own attributes are in; None if it is neither."""
    return value if isinstance(value, CONTAINERS) else fields(value)


def copied(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return next(kind for kind in CONTAINERS if isinstance(container, kind))(container)


def same_content(container: Any, before: Any) -> bool:
    """Whether both hold the same objects in the same places."""
    if not container and not before:  # as most of a module's dictionaries of hooks
        return True
    keys = isinstance(container, dict) and list(container) != list(before)
    return not keys and [id(one) for one in items(container)] == [id(one) for one in items(before)]


def items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def holds_symbol(value: Any) -> bool:
    """Whether a trace left something behind."""
    if type(value) in ATOMS:
        return False
    inner = content(value)
    found = (value,) if inner is None else items(inner)
    return any(isinstance(one, (fx.Proxy, *SYMBOLS)) for one in found)


def is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, fx.Proxy))


# --- random streams of a model's own ----------------------------------------------------------------------------------


def stream(value: Any) -> Any:
    """The state of a random generator; None of anything else."""
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


def same_stream(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)


def set_stream(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def computed_weight(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch.nn.utils computes the attribute from parameters at every forward."""
    return any(f"{name}{suffix}" in parameters_of(module) for suffix in WEIGHT_NORMS)
