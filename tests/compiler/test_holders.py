"""Holders notice what is changed in place, and undo it."""

from __future__ import annotations

import warnings
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from kfac_fx.passes.torch_private import version
from kfac_fx.passes.tracing.settings import (
    ArrayNumbers,
    Attributes,
    BufferBytes,
    ContextValue,
    Count,
    Entries,
    FunctionCode,
    ListElements,
    Members,
    ObjectClasses,
)


class Registry(dict[str, float]):
    """As those of transformers, whose `get` has other arguments."""

    def get(self, key: str) -> float:  # type: ignore[override]
        return super().get(key) or 0.0


def test_a_dictionary_may_have_another_get() -> None:
    registry = Registry(a=1.0)
    holder = Entries(registry, ["a", "b"], 1)
    assert holder.values[0] == 1.0 and holder.same()
    registry["a"] = 2.0
    assert not holder.same()
    holder.put_back()
    assert registry == {"a": 1.0}


# --- every holder -----------------------------------------------------------------------------------------------------


class Plain:
    """An object of a user's."""


class Other(Plain):
    """Another class of the same form."""


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("a", "b")


def returning(a: float = 1.0, *, b: float = 2.0) -> float:
    return a + b


VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=0.0)


def slotted() -> Slotted:
    value = Slotted()
    value.a = 1.0
    return value


def classes() -> tuple[Plain, ObjectClasses]:
    value, holder = Plain(), ObjectClasses()
    holder.add(value)
    return value, holder


def of(make: Callable[[], Any], hold: Callable[[Any], Any]) -> tuple[Any, Any]:
    value = make()
    return value, hold(value)


def whole(value: Any) -> Entries:
    return Entries(value, value, len(value))


def forgotten(value: dict[str, float]) -> Entries:
    return Entries(value, ["a"], len(value), without="forward")


def named(value: dict[str, float]) -> Entries:
    return Entries(value, ["a", "missing"], None)


# what is held, and its holder; a change in place; whether the value is as it was before
Row = tuple[Callable[[], tuple[Any, Any]], Callable[[Any], Any], Callable[[Any], bool]]
TWO = {"a": 1.0, "b": 2.0}
CHANGES: dict[str, Row] = {
    "an entry is another": (
        lambda: of(lambda: dict(TWO), whole), lambda v: v.update(a=3.0), lambda v: v == TWO,
    ),
    "entries are in another order": (
        lambda: of(lambda: dict(TWO), whole), lambda v: v.update(a=v.pop("a")), lambda v: list(v) == ["a", "b"],
    ),
    "an entry is new": (lambda: of(lambda: dict(TWO), whole), lambda v: v.update(c=3.0), lambda v: v == TWO),
    "an entry is gone": (lambda: of(lambda: dict(TWO), whole), lambda v: v.pop("a"), lambda v: v == TWO),
    "the order of an ordered dictionary": (
        lambda: of(lambda: OrderedDict(TWO), whole), lambda v: v.move_to_end("a"), lambda v: list(v) == ["a", "b"],
    ),
    "a named entry is another": (
        lambda: of(lambda: dict(TWO), named), lambda v: v.update(a=3.0), lambda v: v == TWO,
    ),
    "a named entry is new": (
        lambda: of(lambda: dict(TWO), named), lambda v: v.update(missing=3.0), lambda v: v == TWO,
    ),
    "an entry of a class": (
        lambda: of(lambda: type("Local", (), {"a": 1.0}), lambda v: Entries(vars(v), ["a", "b"], None, owner=v)),
        lambda v: (setattr(v, "a", 3.0), setattr(v, "b", 3.0)), lambda v: v.a == 1.0 and not hasattr(v, "b"),
    ),
    "an element of a list": (
        lambda: of(lambda: [1.0, 2.0], ListElements), lambda v: v.__setitem__(0, 3.0), lambda v: v == [1.0, 2.0],
    ),
    "the order of a list": (lambda: of(lambda: [1.0, 2.0], ListElements), lambda v: v.reverse(), lambda v: v[0] == 1.0),
    "the length of a deque": (
        lambda: of(lambda: deque([1.0]), ListElements), lambda v: v.append(2.0), lambda v: list(v) == [1.0],
    ),
    "a member is new": (lambda: of(lambda: {1.0}, Members), lambda v: v.add(2.0), lambda v: v == {1.0}),
    "a member is gone": (lambda: of(lambda: {1.0, 2.0}, Members), lambda v: v.remove(1.0), lambda v: v == {1.0, 2.0}),
    "a slot": (
        lambda: of(slotted, lambda v: Attributes(v, "ab")), lambda v: setattr(v, "a", 3.0), lambda v: v.a == 1.0,
    ),
    "an empty slot": (
        lambda: of(slotted, lambda v: Attributes(v, "ab")), lambda v: setattr(v, "b", 3.0),
        lambda v: not hasattr(v, "b"),
    ),
    "a number of an array": (
        lambda: of(lambda: np.zeros(2), ArrayNumbers), lambda v: v.__setitem__(0, 1.0), lambda v: not v.any(),
    ),
    "a byte": (
        lambda: of(lambda: bytearray(b"ab"), BufferBytes), lambda v: v.__setitem__(0, 0), lambda v: v == b"ab",
    ),
    "an element of an array of Python's": (
        lambda: of(lambda: array("d", [1.0]), BufferBytes), lambda v: v.__setitem__(0, 2.0), lambda v: v[0] == 1.0,
    ),
    "a context variable": (
        lambda: (VARIABLE.set(1.0), of(lambda: VARIABLE, ContextValue))[1],
        lambda v: v.set(2.0), lambda v: v.get() == 1.0,
    ),
    "the code of a function": (
        lambda: of(lambda: FunctionType(returning.__code__, globals()), FunctionCode),
        lambda v: setattr(v, "__code__", (lambda a, *, b: a).__code__), lambda v: v.__code__ is returning.__code__,
    ),
    "a default": (
        lambda: of(lambda: returning, FunctionCode), lambda v: setattr(v, "__defaults__", (3.0,)), lambda v: v() == 3.0,
    ),
    "a default of an argument by name": (
        lambda: of(lambda: returning, FunctionCode), lambda v: setattr(v, "__kwdefaults__", {"b": 5.0}),
        lambda v: v() == 3.0,
    ),
    "the class of an object": (classes, lambda v: setattr(v, "__class__", Other), lambda v: type(v) is Plain),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_holder_sees_a_change_in_place_and_undoes_it(change: str) -> None:
    make, apply, as_before = CHANGES[change]
    value, holder = make()
    assert holder.same() and as_before(value)
    apply(value)
    assert not holder.same()
    holder.put_back()
    assert holder.same() and as_before(value)


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: of(lambda: [1.0], lambda v: Count(v, len)), lambda v: v.append(2.0)),
        (lambda: of(lambda: torch.zeros(2), lambda v: Count(v, version)), lambda v: v.add_(1.0)),
        (lambda: of(lambda: np.zeros(4, np.int32), ArrayNumbers), lambda v: setattr(v, "dtype", np.float32)),
        (lambda: of(lambda: np.zeros((4, 1)), ArrayNumbers), lambda v: setattr(v, "shape", (2, 2))),
    ],
    ids=["length", "version", "dtype", "shape"],
)
def test_what_cannot_be_undone_is_seen(make: Callable[[], tuple[Any, Any]], change: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of writes to the dtype and the shape of an array
        value, holder = make()
        assert holder.same()
        change(value)
    assert not holder.same()


def test_a_key_that_does_not_count_may_come_and_go() -> None:
    """A tool replaces `forward` of a module while it is captured."""
    for start in ({}, {"forward": 9.0}):
        value = TWO | start
        holder = forgotten(value)
        assert holder.same()
        value["forward"] = 3.0
        assert holder.same()
        del value["forward"]
        assert holder.same()
        value["new"] = 3.0
        assert not holder.same()
        value["forward"] = 3.0
        assert not holder.same()


def test_another_key_for_the_same_value_is_a_change() -> None:
    value = object()
    mapping = {"a": value}
    holder = Entries(mapping, mapping, 1)
    mapping["b"] = mapping.pop("a")
    assert not holder.same()
    holder.put_back()
    assert mapping == {"a": value} and holder.same()


def test_an_attribute_that_was_not_there_goes_again() -> None:
    value = slotted()
    holder = Attributes(value, ("a", "b"))
    value.b = 2.0
    holder.put_back()
    assert holder.same() and not hasattr(value, "b")


def test_a_buffer_that_cannot_be_written_into_is_left_alone() -> None:
    bytes_ = bytearray(b"abc")
    holder = BufferBytes(memoryview(bytes_).toreadonly())
    bytes_[0] = 0
    assert not holder.same()
    holder.put_back()
    assert bytes_[0] == 0
