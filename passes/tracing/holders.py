"""Holders of values that may be changed in place, which tell at little cost whether they may have changed.

A holder keeps a shallow copy of what it holds. If it still holds the same objects, nothing changed there; that takes
one comparison of identities for each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import partial
from itertools import repeat
from operator import is_
from types import FunctionType, MappingProxyType
from typing import Any, Protocol

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
