"""Summaries of values, which tell whether a value is still the same, and what to put back if it is not.

A summary is hashable, and equal to a later one as long as nothing in the value changed. It follows containers, arrays,
objects with a `__dict__` or `__slots__`, bound methods, functools.partial, weak references and context variables; of
functions and classes that forward names also defaults and attributes. Tensors and modules are told by identity: a graph
reads the tensors themselves. Closures are watched by `settings`.

While a value is summarized, everything in it that may be changed in place is noted as a `Holder`, with a shallow copy
of what it holds. If every holder still holds the same objects, the summary is the same; that takes one comparison of
identities for each.
"""

from __future__ import annotations

import gc
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import repeat
from numbers import Number
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor, fx, nn

from ..torch_private import version

CONTAINERS = (dict, list, set, deque)
BUFFERS = (bytearray, memoryview, array)
PLAIN = (Number, str, bytes, type(None), Enum, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)
ATOMS = frozenset({bool, int, float, str, type(None), FunctionType})  # the most frequent of PLAIN, for speed
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CALLS = (ModuleType, MethodType, partial)
NO_OBJECTS = (nn.Module, Tensor, fx.Proxy, random.Random, *CALLS, *SYMBOLS, *PLAIN, *CONTAINERS)
FEW = 64  # longer containers that forward does not name are compared by their length
COMPARED_DEPTH = 2  # objects inside of objects down to this depth are compared whole, deeper ones by what forward names
LIBRARIES = ("torch", "numpy", "kfac_fx", "passes")
OF_PYTHON = ("types", "argparse", "collections", "os", "_thread")  # modules of Python whose objects are configurations


class Same:
    """Equal to a `Same` of the same object only. It keeps the object alive, so that no other object gets its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass
class Walk:
    """Summarizes values, each object once.

    Attributes:
        names: the attributes that forward names anywhere. Deep in a value only these are compared.
        live: ids of tensors whose values a graph reads. A write to another tensor that is named is a change.
        identity: whether an object is another one where an equal one replaces it.
        holders: of all that was summarized. empty: dictionaries that hold nothing, which are many and cheaply checked.
    """

    names: Collection[str] = ()
    live: Collection[int] = ()
    identity: bool = True

    def __post_init__(self) -> None:
        self.classes = ObjectClasses()
        self.holders: list[Holder] = [self.classes]
        self.empty: list[Any] = []
        self.seen: dict[tuple[int, bool, int], Any] = {}

    def same(self) -> bool:
        """Whether no holder has changed, so that the summaries are the same."""
        return not any(self.empty) and all(holder.same() for holder in self.holders)

    def put_back(self) -> None:
        """Let everything hold what it held."""
        for holder in self.holders:
            if not holder.same():
                holder.put_back()

    def of(self, value: Any, named: bool = False, depth: int = COMPARED_DEPTH) -> Any:
        """named: whether forward names the attribute or the variable that the value is in."""
        kind = type(value)
        if kind in ATOMS or isinstance(value, PLAIN):
            follow = named and isinstance(value, (FunctionType, type)) and (id(value), named, 0) not in self.seen
            return (kind, value, *self.of_code(value)) if follow else (kind, value)
        if isinstance(value, Tensor):
            if not named or id(value) in self.live or isinstance(value, nn.Parameter):
                return Tensor, Same(value)
            self.holders.append(Count(value, version))
            return Tensor, Same(value), version(value)
        key = id(value), named, max(depth, 0)
        if key in self.seen:
            return kind, Same(value) if self.identity else self.seen[key]
        self.seen[key] = len(self.seen)
        if isinstance(value, (tuple, frozenset, *CONTAINERS)):
            return kind, len(value), self.of_container(value, named, depth), self.of_fields(value, named, depth)
        if isinstance(value, MethodType):
            return kind, value.__func__, self.of(value.__self__, named, depth)
        if isinstance(value, partial):
            self.holders.append(Attributes(value, ("func", "args", "keywords")))
            return kind, *(self.of(part, named, depth) for part in (value.func, value.args, value.keywords))
        if isinstance(value, ReferenceType):
            return kind, self.of(value(), named, depth)
        if isinstance(value, MappingProxyType):
            return kind, *(self.of(mapping, named, depth) for mapping in gc.get_referents(value))
        if isinstance(value, ContextVar):
            self.holders.append(ContextValue(value))
            return kind, Same(value), self.of(value.get(MISSING), named, depth)
        if isinstance(value, BUFFERS):
            self.holders.append(BufferBytes(value))
            return kind, bytes(value)
        if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray):
            return self.of_array(value, named)
        return self.of_object(value, named, depth)

    def of_container(self, value: Any, named: bool, depth: int) -> Any:
        if len(value) > FEW and not named:
            self.holders.append(Count(value, len))
            return ()
        if isinstance(value, dict):
            self.holders.append(Entries(value, value, len(value)))
            return tuple((self.of(key, named, 0), self.of(entry, named, depth)) for key, entry in value.items())
        if isinstance(value, set):
            self.holders.append(Members(value))
        elif isinstance(value, (list, deque)):
            self.holders.append(ListElements(value))
        summaries = (self.of(element, named, depth) for element in value)
        return frozenset(summaries) if isinstance(value, (set, frozenset)) else tuple(summaries)

    def of_fields(self, value: Any, named: bool, depth: int) -> Any:
        """The attributes of a container or a function."""
        attributes = getattr(value, "__dict__", value)
        if attributes is value or not attributes:
            self.empty += [attributes] if attributes is not value else []
            return ()
        self.holders.append(Entries(attributes, attributes, len(attributes)))
        return tuple((name, self.of(entry, named, depth)) for name, entry in attributes.items())

    def of_code(self, value: FunctionType | type) -> tuple[Any, ...]:
        """The code, defaults and attributes of a user's function that forward names, or the values of a class."""
        self.seen[id(value), True, 0] = len(self.seen)
        if isinstance(value, type):
            return tuple(self.of_class(base, True, 0) for base in value.__mro__ if not of_library(base))
        if of_library(value):
            return ()
        self.holders.append(FunctionCode(value))
        parts = value.__defaults__, value.__kwdefaults__
        return value.__code__, *(self.of(part, True) for part in parts), self.of_fields(value, True, COMPARED_DEPTH)

    def of_array(self, value: Any, named: bool) -> Any:
        if value.size > FEW and not named:
            return type(value), Same(value)
        self.holders.append(ArrayNumbers(value))
        if value.dtype.hasobject:
            return type(value), value.shape, tuple(self.of(element, named) for element in value.flat)
        return type(value), value.shape, value.dtype.str, value.tobytes()

    def of_object(self, value: Any, named: bool, depth: int) -> Any:
        kind = type(value)
        module = isinstance(value, nn.Module) and named
        attributes = value.__dict__ if module else fields(value)
        slots_of = tuple(slots(value)) if has_fields(value) else ()
        whole = depth > 0 and not module
        if (attributes is None and not slots_of) or not (whole or named):
            return kind, Same(value)
        parts: list[Any] = []
        if attributes is not None:
            keys = [name for name in attributes if whole or self.is_named(name)]
            self.holders.append(Entries(attributes, keys, len(attributes)))
            parts += [(name, self.of(attributes[name], named, depth - 1)) for name in keys]
        self.classes.add(value)
        if slots_of:
            self.holders.append(Attributes(value, slots_of))
            parts += [(name, self.of(getattr_or_missing(value, name), named, depth - 1)) for name in slots_of]
        for base in kind.__mro__:
            if not of_library(base):
                parts.append(self.of_class(base, named, depth))
        return kind, Same(value) if self.identity else None, tuple(parts)

    def of_class(self, base: type, named: bool, depth: int) -> Any:
        """The values that a class holds for its instances, and the functions that forward names."""
        held = vars(base)
        keys = [name for name in held if self.is_named(name) or (depth > 0 and is_data(name, held[name]))]
        if keys and (place := (id(base), named, -1 if depth > 0 else -2)) not in self.seen:
            self.seen[place] = len(self.seen)
            self.holders.append(Entries(held, keys, None, owner=base))
        return tuple((name, self.of(held[name], named, depth - 1)) for name in keys)

    def is_named(self, name: str) -> bool:
        return name in self.names


def plain(value: Any) -> Any:
    """The summary of a value of which it is not known what forward names."""
    return Walk().of(value)


def fields(value: Any) -> dict[str, Any] | None:
    """The attributes of a user's object, such as a configuration; None for values of other kinds."""
    return getattr(value, "__dict__", None) if has_fields(value) else None


def has_fields(value: Any) -> bool:
    """Whether a value is an object of the user's."""
    if type(value) in ATOMS or isinstance(value, NO_OBJECTS):
        return False
    return not of_library(type(value)) or type(value).__module__.partition(".")[0] in OF_PYTHON


def slots(value: Any) -> list[str]:
    """The names in `__slots__` of the value's class and its bases, under which they are attributes."""
    names = []
    for kind in type(value).__mro__:
        declared = kind.__dict__.get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{kind.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def of_library(kind: type | FunctionType) -> bool:
    """Whether a class or a function is Python's, torch's or numpy's, and not the user's."""
    root = (kind.__module__ or "").partition(".")[0]
    return root in LIBRARIES or root in sys.stdlib_module_names


def is_data(name: str, value: Any) -> bool:
    """Whether an entry of a class is a value, and neither a function nor a descriptor."""
    dunder = name.startswith("__") and name.endswith("__")
    return not dunder and not hasattr(type(value), "__get__") and not isinstance(value, (type, CellType))


# --- holders ----------------------------------------------------------------------------------------------------------


MISSING = object()  # stands for a name that is bound to nothing


class Holder(Protocol):
    """Something that can be changed in place."""

    def same(self) -> bool:
        """Whether it still holds the same objects."""

    def put_back(self) -> None:
        """Let it hold what it held."""


def value_at(mapping: Any, key: Any, default: Any) -> Any:
    """The value of a key. A subclass of dict may have another `get`, as registries have."""
    return dict.get(mapping, key, default) if isinstance(mapping, dict) else mapping.get(key, default)


class Entries:
    """Some entries of a dictionary.

    size: the number of all its entries, if another one would be a change. without: a key that does not count.
    owner: the class that the dictionary belongs to.
    """

    def __init__(
        self,
        mapping: Any,
        keys: Collection[Any],
        size: int | None,
        *,
        without: str | None = None,
        owner: type | None = None,
    ) -> None:
        self.mapping, self.keys, self.without, self.owner = mapping, tuple(keys), without, owner
        self.size = None if size is None else size - (without in mapping)
        plain = type(mapping) in (dict, MappingProxyType)
        self.get = mapping.get if plain else partial(value_at, mapping)
        self.values = self.now()
        self.whole = owner is None and size == len(self.keys)

    def now(self) -> list[Any]:
        return list(map(self.get, self.keys, repeat(MISSING)))

    def same(self) -> bool:
        mapping = self.mapping
        if self.whole:
            return tuple(mapping) == self.keys and all(map(is_, mapping.values(), self.values))
        if self.size is not None and len(mapping) != self.size + (self.without in mapping):
            return False
        return all(map(is_, self.now(), self.values))

    def put_back(self) -> None:
        if self.whole:  # its class may refuse changes, as frozen configurations do
            kind = OrderedDict if isinstance(self.mapping, OrderedDict) else dict
            kind.clear(self.mapping)
            kind.update(self.mapping, zip(self.keys, self.values, strict=True))
            return
        for key, value, before in zip(self.keys, self.now(), self.values, strict=True):
            if value is not before:
                self.write(key, before)

    def write(self, key: Any, value: Any) -> None:
        if self.owner is not None:
            delattr(self.owner, key) if value is MISSING else setattr(self.owner, key, value)
        elif isinstance(self.mapping, dict):
            dict.pop(self.mapping, key, None) if value is MISSING else dict.__setitem__(self.mapping, key, value)


class ListElements:
    """The elements of a list or deque."""

    def __init__(self, elements: list[Any] | deque[Any]) -> None:
        self.elements, self.copy = elements, list(elements)

    def same(self) -> bool:
        return len(self.elements) == len(self.copy) and all(map(is_, self.elements, self.copy))

    def put_back(self) -> None:
        self.elements.clear()
        self.elements.extend(self.copy)


class Members:
    """The members of a set."""

    def __init__(self, members: set[Any]) -> None:
        self.members, self.copy = members, set(members)

    def same(self) -> bool:
        return self.members == self.copy

    def put_back(self) -> None:
        self.members.clear()
        self.members.update(self.copy)


class Count:
    """A number that tells of changes which cannot be undone: the length of a container whose elements are not
    compared, or how often a tensor was written into."""

    def __init__(self, value: Any, of: Callable[[Any], int]) -> None:
        self.value, self.of, self.number = value, of, of(value)

    def same(self) -> bool:
        return self.of(self.value) == self.number

    def put_back(self) -> None:
        pass


class Attributes:
    """Attributes of an object that are not in a dictionary: slots, and the content of a cell."""

    def __init__(self, value: Any, names: Collection[str]) -> None:
        self.value, self.names = value, tuple(names)
        self.values = self.now()

    def now(self) -> list[Any]:
        return [getattr_or_missing(self.value, name) for name in self.names]

    def same(self) -> bool:
        return all(map(is_, self.now(), self.values))

    def put_back(self) -> None:
        for name, now, before in zip(self.names, self.now(), self.values, strict=True):
            if now is not before:
                delattr(self.value, name) if before is MISSING else setattr(self.value, name, before)


class ArrayNumbers:
    """The numbers of an array of numpy, or the objects in it."""

    def __init__(self, array: Any) -> None:
        self.array, self.copy = array, array.copy()

    def same(self) -> bool:
        now, before = self.array, self.copy
        alike = now.shape == before.shape and now.dtype == before.dtype
        return alike and bool(now.tobytes() == before.tobytes())

    def put_back(self) -> None:
        if self.array.shape == self.copy.shape:
            self.array[...] = self.copy


class BufferBytes:
    """The bytes of a bytearray, an array of Python's or a memoryview."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.copy = buffer, bytes(buffer)

    def same(self) -> bool:
        return bytes(self.buffer) == self.copy

    def put_back(self) -> None:
        now = memoryview(self.buffer)
        if now.nbytes == len(self.copy) and not now.readonly:
            now.cast("B")[:] = self.copy


class ContextValue:
    """The value of a context variable."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable, self.value = variable, variable.get(MISSING)

    def same(self) -> bool:
        return self.variable.get(MISSING) is self.value

    def put_back(self) -> None:
        if self.value is not MISSING:
            self.variable.set(self.value)


class FunctionCode:
    """The code of a function and its defaults."""

    def __init__(self, function: FunctionType) -> None:
        self.function, self.code = function, function.__code__
        self.defaults, self.keywords = function.__defaults__, function.__kwdefaults__

    def same(self) -> bool:
        now = self.function
        return now.__code__ is self.code and now.__defaults__ is self.defaults and now.__kwdefaults__ is self.keywords

    def put_back(self) -> None:
        now = self.function
        now.__code__, now.__defaults__, now.__kwdefaults__ = self.code, self.defaults, self.keywords


class ObjectClasses:
    """The classes of objects."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.classes: list[type] = []

    def add(self, value: Any) -> None:
        self.objects.append(value)
        self.classes.append(type(value))

    def same(self) -> bool:
        return list(map(type, self.objects)) == self.classes

    def put_back(self) -> None:
        for value, kind in zip(self.objects, self.classes, strict=True):
            if type(value) is not kind:
                value.__class__ = kind


def getattr_or_missing(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, ValueError):  # a slot, or a cell, that is empty
        return MISSING
