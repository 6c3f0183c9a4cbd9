"""Summaries differ when something in a value differs, and their holders notice it."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kfac_fx.passes.tracing.settings import Walk, plain, slots


class Slotted:
    __slots__ = ("__private", "later", "scale")

    def __init__(self) -> None:
        self.scale, self.__private = 1.0, [1.0]


class WithData:
    table = [1.0]  # noqa: RUF012

    def scaled(self) -> None: ...


class WithMethod:
    def a(self) -> None: ...


class Other(WithMethod): ...


class Fields(dict[str, float]):
    """A dictionary with attributes."""


SCALE = ContextVar("SCALE", default=1.0)
TABLE, LOCAL, REFERRED = {"a": 1.0}, threading.local(), WithData()


def function() -> Any:
    def scaled(x: float, scale: float = 1.0, *, shift: float = 0.0) -> float:
        return x * scale + shift

    return scaled


def counting() -> Any:
    value = function()
    value.calls = 0
    return value


def with_fields() -> Fields:
    value = Fields(a=1.0)
    value.scale = 1.0  # type: ignore[attr-defined]
    return value


def nested() -> SimpleNamespace:
    return SimpleNamespace(a=SimpleNamespace(a=SimpleNamespace(a=SimpleNamespace(a=1.0))))


def cyclic() -> list[Any]:
    value: list[Any] = [1.0]
    value.append(value)
    return value


class Unsized(tuple[Any, ...]):
    """As the irreducible representations of e3nn are."""

    def __len__(self) -> int:
        raise NotImplementedError


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an element of a long list": (lambda: [0.0] * 1000, lambda value: value.__setitem__(500, 1.0)),
    "an entry of a long dictionary": (lambda: dict.fromkeys(range(1000), 0.0), lambda value: value.update({500: 1.0})),
    "the order of a dictionary": (lambda: {"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "an element in a tuple": (lambda: ([1.0],), lambda value: value[0].append(2.0)),
    "an element in a tuple without a length": (lambda: Unsized(([1.0],)), lambda value: value[0].append(2.0)),
    "a deque": (lambda: deque([1.0]), lambda value: value.rotate() or value.append(2.0)),
    "a set": (lambda: {1.0}, lambda value: value.add(2.0)),
    "a long array": (lambda: np.zeros(1000), lambda value: value.__setitem__(500, 1.0)),
    "an array of objects": (lambda: np.array([[1.0], None], object), lambda value: value[0].append(1.0)),
    "an element of an array of objects": (
        lambda: np.array([[1.0], None], object), lambda value: value.__setitem__(1, 2.0)),
    "a keyword of a partial function": (
        lambda: partial(max, key=1),
        lambda value: value.keywords.update(key=2),
    ),
    "an attribute four levels deep": (nested, lambda value: setattr(value.a.a.a, "a", 2.0)),
    "a slot": (Slotted, lambda value: setattr(value, "scale", 2.0)),
    "a slot that was empty": (Slotted, lambda value: setattr(value, "later", 2.0)),
    "a private slot": (Slotted, lambda value: value._Slotted__private.append(2.0)),
    "an object that a method is bound to": (lambda: WithData().scaled, lambda value: setattr(value.__self__, "x", 1)),
    "a tensor that is written into": (lambda: [torch.zeros(2)], lambda value: value[0].fill_(1.0)),
    "a byte": (lambda: bytearray(b"ab"), lambda value: value.__setitem__(0, 5)),
    "a number of an array of Python's": (lambda: array("d", [1.0]), lambda value: value.__setitem__(0, 2.0)),
    "a byte of a view": (lambda: memoryview(bytearray(b"ab")), lambda value: value.__setitem__(0, 5)),
    "an object behind a weak reference": (
        lambda: weakref.ref(REFERRED), lambda value: setattr(REFERRED, "x", getattr(REFERRED, "x", 0) + 1)),
    "an entry behind a read-only view": (
        lambda: MappingProxyType(TABLE), lambda value: TABLE.update(a=TABLE["a"] + 1)),
    "a context variable": (lambda: SCALE, lambda value: value.set(value.get() + 1)),
    "an attribute of a thread": (lambda: LOCAL, lambda value: setattr(value, "a", getattr(value, "a", 0) + 1)),
    "an attribute of a dictionary": (with_fields, lambda value: setattr(value, "scale", 2.0)),
    "a default of a function": (function, lambda value: setattr(value, "__defaults__", (2.0,))),
    "a default of a keyword": (function, lambda value: value.__kwdefaults__.update(shift=2.0)),
    "the code of a function": (function, lambda value: setattr(value, "__code__", (lambda x: x).__code__)),
    "an attribute of a function": (counting, lambda value: setattr(value, "calls", 1)),
    "a first attribute of a function": (function, lambda value: setattr(value, "calls", 1)),
    "a value of a class": (
        lambda: type("Local", (), {"a": 1.0}), lambda value: setattr(value, "a", 2.0)),
    "a method of an object's class": (
        lambda: type("Local", (WithMethod,), {"a": WithMethod.a})(),
        lambda value: setattr(type(value), "a", lambda self: None)),
    "the class of an object": (WithMethod, lambda value: setattr(value, "__class__", Other)),
    "beside itself": (cyclic, lambda value: value.insert(0, 2.0)),
}  # fmt: skip


NOT_PUT_BACK = ("the order of a dictionary", "a tensor that is written into", "a first attribute of a function")


@pytest.mark.parametrize("change", CHANGES)
def test_a_summary_and_its_holders_change_with(change: str) -> None:
    make, write = CHANGES[change]
    value, walk = make(), Walk({"a"})
    before = walk.of(value, named=True)
    assert Walk({"a"}).of(value, named=True) == before and walk.same()
    write(value)
    assert Walk({"a"}).of(value, named=True) != before and not walk.same()


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in NOT_PUT_BACK])
def test_holders_put_back(change: str) -> None:
    make, write = CHANGES[change]
    value, walk = make(), Walk({"a"})
    before = walk.of(value, named=True)
    write(value)
    for holder in walk.holders:
        holder.put_back()
    assert Walk({"a"}).of(value, named=True) == before


def test_the_values_of_an_object_that_are_its_class_s_are_in_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    value, walk = WithData(), Walk()
    before = walk.of(value)
    monkeypatch.setattr(WithData, "table", [2.0])
    assert Walk().of(value) != before and not walk.same()


def test_a_list_that_forward_does_not_name_is_compared_by_its_length() -> None:
    assert plain([0] * 100) == plain([1] * 100) != plain([0] * 101)


def test_equal_objects_are_the_same_only_where_identity_does_not_count() -> None:
    one, other = SimpleNamespace(scale=1.0), SimpleNamespace(scale=1.0)
    assert plain(one) != plain(other)
    assert Walk(identity=False).of(one) == Walk(identity=False).of(other)


def test_a_tensor_that_a_graph_reads_may_be_written_into() -> None:
    value = torch.zeros(2)
    before = Walk(live={id(value)}).of(value, named=True)
    value.fill_(1.0)
    assert Walk(live={id(value)}).of(value, named=True) == before


def test_slots_have_the_names_of_the_attributes() -> None:
    assert slots(Slotted()) == ["_Slotted__private", "later", "scale"]
