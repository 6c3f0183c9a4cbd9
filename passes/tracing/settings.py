"""Settings: all that a capture is valid for beside its inputs, in the model and outside of it.

A graph keeps the values that attributes, functions and globals had while it was traced. `ForwardSettings.hold` tells
whether they are the same. It compares identities of what is held, which costs microseconds for a module. Only if one of
them differs are the summaries computed and compared.

Settings of the model are the attributes of its modules, their classes and their hooks. Those outside of it are globals,
closure cells and attributes of classes. `Observer` notes every Python function that runs in a trace. The bytecode of a
function names the globals that it loads and the attributes that it reads; the values that they lead to are the
`OutsideName`s of an `Outside`. A forward that finds the values of the trace there takes the same way again, because
every branch and every number of it comes from its inputs, from the model or from such a name.

torch's own functions and those of Python are not followed. A name in them counts for what it is bound to, so that a
function which somebody replaced is noticed.

**Attributes of modules that forward does not read**, as the lists and counters of a training loop, are no settings:
those whose name is in no code that ran in the trace (`ModuleReads`). Names are those of all code together, so an
attribute of one module counts as read where code reads that name of anything. All attributes are settings if code that
ran may read one whose name it does not have, as by `getattr`, or if something ran that Python does not tell of. torch's
own code is no such reader: what it looks up by computed names are parameters, buffers, modules and hooks, which are no
plain attributes; and `nn.Module.__getattr__` gets its name from the code that reads. All attributes of modules of
torch's classes are settings, because torch's code outside of torch.nn is not followed.

A *summary* tells whether a value is still the same, and what to put back if it is not. It is hashable, and equal to a
later one as long as nothing in the value changed. It follows containers, arrays, objects with a `__dict__` or
`__slots__`, bound methods, functools.partial, weak references and context variables; of functions and classes that
forward names also defaults and attributes. Tensors and modules are told by identity: a graph reads the tensors
themselves. Closures are watched by `Observer`.

While a value is summarized, everything in it that may be changed in place is noted as a `Holder`, with a shallow copy
of what it holds. If every holder still holds the same objects, the summary is the same; that takes one comparison of
identities for each.
"""

from __future__ import annotations

import builtins
import copy
import dis
import gc
import inspect
import os
import pickle
import random
import re
import sys
import sysconfig
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, lru_cache, partial
from itertools import chain, repeat
from numbers import Number
from operator import attrgetter, is_, methodcaller
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ..errors import OWN_FOLDER, TORCH, file_line
from ..results import slots
from ..torch_private import (
    BACKWARD_HOOKS,
    CALL,
    FLAT_WEIGHTS,
    FORWARD_HOOKS,
    SHARDING,
    class_of,
    parameters_of,
    version,
)

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
MISSING = object()  # stands for a name that is bound to nothing


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
        read: the attributes of modules that forward may read; None: any. See `ModuleReads`.
        modules: ids of the model's modules, whose attributes are settings of their own.
        reads_any: whether something was met that may read any attribute, in spite of `read`.
        holders: of all that was summarized. empty: dictionaries that hold nothing, which are many and cheaply checked.
    """

    names: Collection[str] = ()
    live: Collection[int] = ()
    identity: bool = True
    read: Collection[str] | None = None
    modules: Collection[int] = ()
    reads_any: bool = False

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
        if kind not in ATOMS and may_read_any(value):
            self.reads_any = True
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
            return kind, elements_in(value), self.of_container(value, named, depth), self.of_fields(value, named, depth)
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
            return kind, Same(value), self.of(in_context(value), named, depth)
        if isinstance(value, BUFFERS):
            self.holders.append(BufferBytes(value))
            return kind, bytes(value)
        if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.ndarray):
            return self.of_array(value, named)
        return self.of_object(value, named, depth)

    def of_container(self, value: Any, named: bool, depth: int) -> Any:
        if elements_in(value) > FEW and not named:
            self.holders.append(Count(value, elements_in))
            return ()
        if isinstance(value, dict):
            self.holders.append(Entries(value, value, elements_in(value)))
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
        if id(value) in self.modules:
            return kind, Same(value)
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


def elements_in(value: Any) -> int:
    """The number of what a container holds. A class that is derived from one of Python's may refuse to tell it."""
    kind: Any = next(kind for kind in (tuple, frozenset, *CONTAINERS) if isinstance(value, kind))
    return int(kind.__len__(value))


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


def of_library(kind: type | FunctionType) -> bool:
    """Whether a class or a function is Python's, torch's or numpy's, and not the user's."""
    root = (kind.__module__ or "").partition(".")[0]
    return root in LIBRARIES or root in sys.stdlib_module_names


def is_data(name: str, value: Any) -> bool:
    """Whether an entry of a class is a value, and neither a function nor a descriptor."""
    dunder = name.startswith("__") and name.endswith("__")
    return not dunder and not hasattr(type(value), "__get__") and not isinstance(value, (type, CellType))


# --- holders ----------------------------------------------------------------------------------------------------------


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


class Names:
    """Which attributes a module has."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes, self.names = attributes, frozenset(attributes)

    def same(self) -> bool:
        return self.attributes.keys() == self.names

    def put_back(self) -> None:
        pass


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
        self.variable, self.value = variable, in_context(variable)

    def same(self) -> bool:
        return in_context(self.variable) is self.value

    def put_back(self) -> None:
        if self.value is not MISSING:
            self.variable.set(self.value)


def in_context(variable: ContextVar[Any]) -> Any:
    """Its value in the present context, which may be its default, or `MISSING`."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


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


# --- values outside of the model --------------------------------------------------------------------------------------

STDLIB = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
NN = f"{TORCH}nn{os.sep}"
TOOLS_OF_TORCH = ("sympy", "mpmath", "numpy", "networkx", "optree", "typing_extensions")
GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "IMPORT_FROM")
LAYOUT = frozenset({"is_contiguous", "stride", "as_strided", "dim_order", "storage_offset", "data_ptr"})
CALLED = (FunctionType, MethodType, partial, nn.Module)  # kinds of functions that an operation of torch may be given
TRAINED = frozenset({"requires_grad", "is_leaf", "grad_fn"})


@dataclass(frozen=True)
class OutsideName:
    """A name outside of the model.

    Attributes:
        label: for texts, as "the global SCALE of layers.py".
        holder: the dictionary or the cell that holds the value.
        name: in the dictionary; "cell_contents" of a cell.
        shallow: whether only the object that the name is bound to counts.
    """

    label: str
    holder: Any
    name: str
    shallow: bool = False

    @property
    def value(self) -> Any:
        if isinstance(self.holder, CellType):
            return getattr_or_missing(self.holder, self.name)
        return self.holder.get(self.name, MISSING)

    def summary(self, walk: Walk) -> Any:
        """The summary of its value. Notes the holder in the walk."""
        if isinstance(self.holder, CellType):
            walk.holders.append(Attributes(self.holder, (self.name,)))
        else:
            walk.holders.append(Entries(self.holder, (self.name,), None))
        return Same(self.value) if self.shallow or self.value is MISSING else walk.of(self.value, named=True)


@dataclass(frozen=True)
class Outside:
    """The values that a traced forward reads from outside.

    Attributes:
        points: where it reads.
        names: all attributes and strings that its functions name; of the model's attributes, it reads no others.
        loaded: those of them that a function does not only assign.
        effects: what its functions do beside computing, as in "prints (layers.py:12)".
        read: the attributes of modules that it may read; None: any. See `ModuleReads`.
    """

    points: tuple[OutsideName, ...] = ()
    names: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()
    effects: tuple[str, ...] = ()
    read: frozenset[str] | None = None

    @property
    def reads_layout(self) -> bool:
        """Whether forward may ask how a tensor lies in memory."""
        return not LAYOUT.isdisjoint(self.names)

    @property
    def reads_trained(self) -> bool:
        """Whether forward may ask whether a tensor needs a gradient."""
        return not TRAINED.isdisjoint(self.loaded)


@dataclass
class Observer:
    """Collects the functions that run while it observes, and puts back afterwards what they changed outside.

    Attributes:
        codes: the codes that ran with their globals, and whether they are followed. Copies of a function in two files
            have equal codes, so all are told apart by their ids.
        closures: the followed codes that have free variables, by ids.
        frames: those of closures that have not run to their end, by ids.
        functions: the closures that ran.
        reads_any: whether code ran, or may have run, that reads attributes whose names are not in the observed codes.
    """

    codes: dict[tuple[int, int], tuple[CodeType, dict[str, Any], bool]] = field(default_factory=dict)
    closures: set[tuple[int, int]] = field(default_factory=set)
    frames: dict[int, FrameType] = field(default_factory=dict)
    functions: dict[ref[FunctionType], None] = field(default_factory=dict)
    effects: dict[str, None] = field(default_factory=dict)
    reads_any: bool = False

    @contextmanager
    def observing(self) -> Iterator[None]:
        tracer, self.before = sys.gettrace(), Walk()
        collects = gc.isenabled()
        gc.disable()  # functions that the garbage collector calls are no part of forward
        sys.settrace(self.on_call)
        try:
            out, errors = Printing(sys.stdout, self), Printing(sys.stderr, self, by_library=False)
            with redirect_stdout(out), redirect_stderr(errors), Unobserved(self):
                yield
        finally:
            if sys.gettrace() == self.on_call:  # a debugger may have been started
                sys.settrace(tracer)
            else:
                self.reads_any = True
            if collects:
                gc.enable()
            self.before.put_back()

    def on_call(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by Python before a function runs; returns None, so that its lines are not traced."""
        code, key = frame.f_code, (id(frame.f_code), id(frame.f_globals))
        if key not in self.codes:
            self.meet(key, code, frame.f_globals)
        if not (self.reads_any or self.codes[key][2] or reads_no_modules(code.co_filename)):
            self.reads_any = frame.f_back is not None and self.follows(frame.f_back)
        self.note_functions()
        if key in self.closures:
            self.frames[id(frame)] = frame

    def meet(self, key: tuple[int, int], code: CodeType, namespace: dict[str, Any]) -> None:
        """Note a function that runs for the first time."""
        is_followed = followed(code.co_filename, namespace.get("__name__", ""))
        self.codes[key] = code, namespace, is_followed
        if not is_followed or in_torch(code.co_filename):
            return
        for point in BytecodeNames.of(code).points(code, namespace):
            point.summary(self.before)
        if any(name != "__class__" for name in code.co_freevars):
            self.closures.add(key)

    def note_functions(self) -> None:
        """Note the functions of the frames that have ended: before that, a frame does not tell the garbage collector
        which function it is of. A function that lives for one call, as a comprehension's, is gone when it is read."""
        for key, frame in list(self.frames.items()):
            if (function := function_in(frame, frame.f_code)) is not None:
                self.functions[ref(function)] = None
                del self.frames[key]

    def follows(self, frame: FrameType) -> bool:
        return self.codes.get((id(frame.f_code), id(frame.f_globals)), (None, None, False))[2]

    def on_print(self, frame: FrameType | None, by_library: bool) -> None:
        """frame: of the function that prints. by_library: whether it counts if that is of a library."""
        while by_library and frame is not None and not self.follows(frame):
            frame = frame.f_back
        if not by_library and (frame is None or not self.follows(frame)):
            return
        where = "" if frame is None else f" ({file_line(frame.f_code.co_filename, frame.f_lineno)})"
        self.effects[f"prints{where}"] = None

    def outside(self) -> Outside:
        """The values that the observed functions read."""
        points: dict[tuple[int, str], OutsideName] = {}
        names, loaded = set[str](), set[str]()
        for code, namespace, is_followed in self.codes.values():
            if not is_followed:
                continue
            reads = BytecodeNames.of(code)
            if not in_torch(code.co_filename):
                names |= reads.attributes | reads.strings
                loaded |= reads.attributes - reads.assigned | reads.strings
            for point in reads.points(code, namespace):
                points.setdefault((id(point.holder), point.name), point)
        for point in self.cells():
            points.setdefault((id(point.holder), point.name), point)
        read = None if self.reads_any else self.read_of_modules()
        return Outside(tuple(points.values()), frozenset(names), frozenset(loaded), tuple(self.effects), read)

    def read_of_modules(self) -> frozenset[str] | None:
        """The attributes of modules that the observed functions may read; None: any."""
        read = set[str]()
        for code, _, is_followed in self.codes.values():
            if is_followed:
                reads = ModuleReads.of(code)
                if reads.any and not in_torch(code.co_filename):
                    return None
                read |= reads.names
        return frozenset(read)

    def cells(self) -> Iterator[OutsideName]:
        """The closure cells of the functions that ran and are still there."""
        self.note_functions()
        if self.frames:  # of generators that wait, which a search of all objects of the process finds
            gc.unfreeze()  # it does not see frozen objects; without their cells a capture would go stale unseen
            for holder in gc.get_referrers(*self.frames.values()):
                functions = (function_in(holder, frame.f_code) for frame in self.frames.values())
                self.functions |= {ref(function): None for function in functions if function is not None}
        self.frames.clear()  # a capture keeps its observer, and their variables may be activations
        for function in [function for known in self.functions if (function := known()) is not None]:
            code = function.__code__
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                if name != "__class__":
                    where = file_line(code.co_filename, code.co_firstlineno)
                    yield OutsideName(f"{name} in the closure of {code.co_name} ({where})", cell, "cell_contents")


def function_in(holder: Any, code: CodeType) -> FunctionType | None:
    """The first function of this code that an object refers to."""
    kinds = (held for held in gc.get_referents(holder) if isinstance(held, FunctionType))
    return next((function for function in kinds if function.__code__ is code), None)


class Unobserved(TorchFunctionMode):
    """Functions inside of an operation of torch are not observed, unless the operation was given them to call.

    A traced operation runs thousands of functions of torch, and Python runs all of them slower while it observes calls.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if any(isinstance(value, CALLED) for value in given):
            return func(*args, **kwargs)
        inside = (element for value in given if isinstance(value, (tuple, list)) for element in value)
        if not all(map(of_library, types)) or any(map(has_fields, chain(given, inside))):  # it may call their methods
            self.observer.reads_any = True
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return func(*args, **kwargs)
        finally:
            sys.settrace(tracer)


class Printing:
    """Standard output, whose lines an observer is told of; or that of errors, without the warnings of libraries."""

    def __init__(self, stream: Any, observer: Observer, by_library: bool = True) -> None:
        self._stream, self._observer, self._thread = stream, observer, threading.get_ident()
        self._by_library = by_library

    def write(self, text: str) -> Any:
        if threading.get_ident() == self._thread:
            frame = inspect.currentframe()
            self._observer.on_print(None if frame is None else frame.f_back, self._by_library)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True)
class BytecodeNames:
    """The names in a function's bytecode. assigned: the attributes that it only assigns."""

    globals: frozenset[str]
    attributes: frozenset[str]
    assigned: frozenset[str]
    imported: frozenset[str]
    strings: frozenset[str]

    @staticmethod
    @cache
    def of(code: CodeType) -> BytecodeNames:
        by_kind: dict[str, set[str]] = {"globals": set(), "attributes": set(), "assigned": set(), "imported": set()}
        loaded: set[str] = set()
        for instruction in dis.get_instructions(code):
            if instruction.opname in GLOBALS:
                by_kind["globals"].add(instruction.argval)
            elif instruction.opname in ATTRIBUTES:
                by_kind["attributes"].add(instruction.argval)
                (by_kind["assigned"] if instruction.opname == "STORE_ATTR" else loaded).add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                by_kind["imported"].add(instruction.argval)
        by_kind["assigned"] -= loaded
        strings = {constant for constant in code.co_consts if isinstance(constant, str)}
        return BytecodeNames(**{kind: frozenset(names) for kind, names in by_kind.items()}, strings=frozenset(strings))

    def points(self, code: CodeType, namespace: dict[str, Any]) -> Iterator[OutsideName]:
        """The globals and what is read from modules and classes among them."""
        file, shallow = Path(code.co_filename).name, in_torch(code.co_filename)
        seen: set[int] = set()
        looked_up = self.strings & namespace.keys() if "globals" in self.globals else frozenset()
        for name in sorted(self.globals | looked_up):
            value = namespace.get(name, MISSING)
            if (value is not MISSING or not hasattr(builtins, name)) and (not shallow or callable(value)):
                yield OutsideName(f"the global {name} of {file}", namespace, name, shallow)
            yield from self.within(name, value, seen)
        for name in sorted(self.imported):
            yield from self.within(name, sys.modules.get(name), seen)

    def within(self, label: str, value: Any, seen: set[int]) -> Iterator[OutsideName]:
        """The values read from a module or a class: the entries that have a name of an attribute in the bytecode."""
        if id(value) in seen or not isinstance(value, (ModuleType, type)):
            return
        seen.add(id(value))
        holders: list[Mapping[str, Any]]
        if isinstance(value, ModuleType):
            file = getattr(value, "__file__", None) or ""
            holders, shallow = [vars(value)], in_torch(file) or not followed(file, value.__name__)
        else:
            # This library replaces entries of torch's classes while a model runs, such as Function.apply.
            shallow = of_library(value)
            holders = [vars(base) for base in value.__mro__ if shallow or not of_library(base)]
        for holder in holders:
            for name in sorted(self.attributes & holder.keys()):
                entry = holder[name]
                if not isinstance(entry, ModuleType) and (not shallow or callable(entry)):
                    yield OutsideName(f"{label}.{name}", holder, name, shallow)
                yield from self.within(f"{label}.{name}", entry, seen)


# By these, code reads or writes attributes whose names it need not have; `apply` runs functions in the backward.
READ_ANY = frozenset(
    {
        *("getattr", "hasattr", "setattr", "delattr", "vars", "dir", "eval", "exec", "compile", "attrgetter"),
        *("methodcaller", "dump", "dumps", "apply", "start_new_thread", "_start_new_thread"),
        *("__dict__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__dir__"),
        *("__getstate__", "__reduce__", "__reduce_ex__"),
    }
)
READERS = (getattr, hasattr, setattr, delattr, vars, dir, eval, exec, compile, pickle.dump, pickle.dumps)
READER_CLASSES = (attrgetter, methodcaller)
COMPILED = ("cython_function_or_method", "fused_cython_function", "nb_func", "nb_method")  # kinds of functions
# Modules of Python whose functions read no attributes of the modules of torch that they are given.
CACHED = type(lru_cache(abs))
# Files of torch: code that it makes runs there, or functions of the user's are taken to be run inside of operations.
RUN_UNSEEN = tuple(
    f"{TORCH}{name.replace('/', os.sep)}" for name in ("_dynamo/", "utils/_python_dispatch.py", "autograd/graph.py")
)
NO_READERS = ("contextlib", "warnings", "enum", "collections", "random", "abc", "types", "typing", "weakref", "logging")


@dataclass(frozen=True)
class ModuleReads:
    """The attributes of modules that a function may read, also by functions inside of it that it only defines.

    names: all names in its code but those of globals alone, and the words of all strings. any: whether it may read
    others.
    """

    names: frozenset[str]
    any: bool

    @staticmethod
    @cache
    def of(code: CodeType) -> ModuleReads:
        names, waiting, any_name = set[str](), list(code.co_consts), not READ_ANY.isdisjoint(code.co_names)
        for instruction in dis.get_instructions(code):
            if instruction.opcode in dis.hasname and instruction.opname not in GLOBALS:
                names.add(instruction.argval)
            any_name = any_name or instruction.opname == "MATCH_CLASS"
        while waiting:
            constant = waiting.pop()
            if isinstance(constant, str):
                names.update(re.findall(r"\w+", constant))
            elif isinstance(constant, (tuple, frozenset)):
                waiting.extend(constant)
            elif isinstance(constant, CodeType):
                inside = ModuleReads.of(constant)
                names |= inside.names
                any_name = any_name or inside.any
        return ModuleReads(frozenset(names), any_name)


def may_read_any(value: Any) -> bool:
    """Whether a value that forward has may read attributes of modules without a name in the code that runs: a getter,
    compiled code, a function that answers from a cache, which a user may clear, or one with a backward of its own."""
    kind = type(value)
    if kind is MethodType:
        return value.__name__ in READ_ANY and isinstance(value.__self__, type) and not of_library(value.__self__)
    if kind in (property, staticmethod, classmethod):
        return may_read_any(value.fget if kind is property else value.__func__)
    if kind in (MethodWrapperType, WrapperDescriptorType):
        return value.__name__ in READ_ANY
    if kind is BuiltinFunctionType:
        return value in READERS or bool(value.__module__ and not of_library(value))
    if kind is type:
        return value in READER_CLASSES
    return kind in (*READER_CLASSES, CACHED) or kind.__name__ in COMPILED


@cache
def reads_no_modules(file: str) -> bool:
    """Whether a function of a file that is not followed reads no plain attribute of a module that code gives it."""
    if file.startswith(RUN_UNSEEN):
        return False
    if not file.startswith(STDLIB) or file.startswith(str(Path(STDLIB, "site-packages"))):
        return True
    return Path(file).relative_to(STDLIB).parts[0].removesuffix(".py") in NO_READERS


@cache
def followed(file: str, module: str) -> bool:
    """Whether the functions of a file can be part of a forward."""
    if file.startswith(NN) or module == "os":  # whose functions read the environment
        return True
    root = module.partition(".")[0]
    if not file or file.startswith("<frozen") or root in TOOLS_OF_TORCH:
        return False
    if file.startswith("<"):  # code that was made from a string, as the methods of dataclasses
        return root not in LIBRARIES and root not in sys.stdlib_module_names
    of_python = file.startswith(STDLIB) and not file.startswith(str(Path(STDLIB, "site-packages")))
    return not of_python and not in_torch(file) and not file.startswith(OWN_FOLDER)


@cache
def in_torch(file: str) -> bool:
    return file.startswith(TORCH)


# --- settings of a capture --------------------------------------------------------------------------------------------

HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
TORCHS = frozenset(nn.Module().__dict__) - {"training"} | FLAT_WEIGHTS | {CALL}  # attributes that torch itself sets
WEIGHT_NORMS = ("_g", "_orig")  # suffixes of parameters from which hooks of torch.nn.utils compute a weight
NOTHING_OUTSIDE = Outside()
NO_PLAIN = (object, nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)  # classes that read no plain attributes


class ForwardSettings:
    """The values of everything that a capture of `model` is valid for.

    Attributes:
        values: the summaries, by name.
        without: the names of what forward itself changes, whose values count for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        outside: Outside = NOTHING_OUTSIDE,
        without: Iterable[str] = (),
        live: Iterable[Tensor] = (),
        inside: bool = False,
        everything: bool = False,
    ) -> None:
        """
        Args:
            outside: what forward reads from outside.
            live: the tensors that the graph reads.
            inside: leave out the `forward` of the instance and the hooks of `model` itself, which run around its graph.
            everything: also the attributes that forward does not read.
        """
        self.everything = everything
        self.model, self.outside, self.inside = model, outside, inside
        self.without, self.live = frozenset(without), frozenset(map(id, live))
        self.take()

    def take(self) -> None:
        self.values, self.walk = self.taken()

    def hold(self) -> bool:
        """Whether everything still has the values that it had."""
        if self.walk.same():
            return True
        values, walk = self.taken()
        if values != self.values:
            return False
        self.walk = walk
        return True

    def changed(self) -> list[str]:
        """The names of all that has another value now."""
        now, _ = self.taken()
        return [name for name in dict.fromkeys((*self.values, *now)) if now.get(name) != self.values.get(name)]

    @property
    def whole(self) -> bool:
        """Whether the attributes that forward does not read are among them."""
        return self.walk.read is None

    def put_back(self) -> None:
        """Let everything hold what it held."""
        self.walk.put_back()

    def anew(self) -> ForwardSettings:
        """The same, with the values of now."""
        new = copy.copy(self)
        new.take()
        return new

    def leave_out(self, names: Iterable[str]) -> None:
        """Take the values anew, without these names."""
        self.without |= frozenset(names)
        self.take()

    def taken(self) -> tuple[dict[str, Any], Walk]:
        values, walk = self.summaries(None if self.everything else self.outside.read)
        return self.summaries(None) if walk.reads_any and walk.read is not None else (values, walk)

    def summaries(self, read: Collection[str] | None) -> tuple[dict[str, Any], Walk]:
        walk = Walk(self.outside.names, self.live, read=read, modules={id(module) for module in self.model.modules()})
        values = of_modules(self.model, self.without, self.inside, walk) | of_classes(self.model, self.without, walk)
        for point in self.outside.points:
            if point.label not in self.without:
                values[point.label] = *values.get(point.label, ()), point.summary(walk)  # files may have one name
        return values, walk


def of_modules(model: nn.Module, without: Collection[str], inside: bool, walk: Walk) -> dict[str, Any]:
    """The attributes of all modules, their modes included, their classes, their own `forward` and the user's hooks."""
    values: dict[str, Any] = {}
    changing: set[int] = set()  # objects that forward changes, under every name, as a configuration that modules share
    for path, module in model.named_modules():
        prefix, held, around = f"{path}." if path else "", module.__dict__, inside and not path
        values[f"the class of {path or 'the model'}"] = class_of(module)
        walk.classes.add(module)
        changing |= {id(held[name]) for name in held if f"{prefix}{name}" in without and has_content(held[name])}
        names = [
            name for name in held
            if id(held[name]) not in changing and is_setting(module, prefix, name, without)
        ]  # fmt: skip
        if walk.read is not None and of_user(type(module)):
            names = [name for name in names if name in walk.read or name == "training"]
            walk.holders.append(Names(held))  # one that forward reads may take the place of one that it does not
        for name in names:
            values[f"{prefix}{name}"] = walk.of(held[name], named=walk.is_named(name))
        if not around:
            names.append("forward")
            values[f"{prefix}forward"] = held.get("forward")
        walk.holders.append(Entries(held, names, len(held), without="forward" if around else None))
        for name in () if around else HOOKS:
            if not held[name]:
                walk.empty.append(held[name])
                continue
            walk.holders.append(Entries(held[name], held[name], len(held[name])))
            if hooks := tuple(hook for hook in held[name].values() if not is_torchs(hook)):
                values[f"{prefix}{name}"] = walk.of(hooks, named=True)
    return values


def is_setting(module: nn.Module, prefix: str, name: str, without: Collection[str]) -> bool:
    if name in TORCHS or name == "forward" or name.startswith(SHARDING) or f"{prefix}{name}" in without:
        return False
    return not (isinstance(module.__dict__[name], Tensor) and computed_weight(module, name))


def of_user(kind: type) -> bool:
    """Whether all code of a module's class is the user's, but that of nn.Module and of torch's containers."""
    return all(base in NO_PLAIN or not of_library(base) or base.__module__ in NO_READERS for base in kind.__mro__)


def of_classes(model: nn.Module, without: Collection[str], walk: Walk) -> dict[str, Any]:
    """The functions and values of the modules' classes; of torch's classes, their `forward`.

    Not of the subclasses that fully_shard makes: the `__init_subclass__` of a user's class may give them a `forward`.
    """
    values: dict[str, Any] = {}
    kinds = dict.fromkeys(class_of(module) for module in model.modules())
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base is not object):
        held = vars(base)
        of_torch = base.__module__.startswith("torch.")
        if of_torch:
            names = [name for name in ("forward", "__call__") if name in held]
        else:
            names = [name for name in held if not name.startswith("__") or type(held[name]) in ATOMS]
            names = [name for name in names if f"{path_of(base)}.{name}" not in without]
        for name in names:
            values[f"{path_of(base)}.{name}"] = walk.of(held[name], walk.is_named(name))
        walk.holders.append(Entries(held, names, None if of_torch else len(held), owner=base))
    return values


def has_content(value: Any) -> bool:
    return isinstance(value, CONTAINERS) or has_fields(value)


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_torchs(called: Any) -> bool:
    return bool((getattr(called, "__module__", None) or type(called).__module__).startswith("torch."))


def computed_weight(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch.nn.utils computes the attribute from parameters in every forward."""
    return any(f"{name}{suffix}" in parameters_of(module) for suffix in WEIGHT_NORMS)
