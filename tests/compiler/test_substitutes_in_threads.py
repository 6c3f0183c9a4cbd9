"""Functions of torch that are replaced in one thread, and captures in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.passes.tracing.substitutes import replaced_in_thread


class Owner:
    def method(self, x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x


class Heir(Owner):
    pass


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_method_is_replaced_in_the_thread_that_replaces_it() -> None:
    original = vars(Owner)["method"]
    with replaced_in_thread(Owner, "method", lambda below, self, x: below(self, x) + 1):
        with replaced_in_thread(Owner, "method", lambda below, self, x: 10 * below(self, x)):
            assert Owner().method(3) == 40  # the inner one calls the outer one
            assert in_thread(lambda: Owner().method(3)) == 3
        assert Owner().method(3) == 4
    assert Owner().method(3) == 3 and vars(Owner)["method"] is original


def test_a_classmethod_knows_its_class() -> None:
    original = vars(Owner)["of_class"]
    with replaced_in_thread(Owner, "of_class", lambda below, cls, x: (*below(cls, x), cls)):
        assert Heir.of_class(2) == ("Heir", 2, Heir) and in_thread(lambda: Heir.of_class(2)) == ("Heir", 2)
    assert vars(Owner)["of_class"] is original


def test_a_classmethod_in_c_knows_its_class() -> None:
    class Keys(dict[str, int]):
        fromkeys = vars(dict)["fromkeys"]  # torch.autograd.Function.apply is such a method since torch 2.15

    class Heir(Keys):
        pass

    original = vars(Keys)["fromkeys"]
    with replaced_in_thread(Keys, "fromkeys", lambda below, cls, keys, value: (cls, below(cls, keys, 2 * value))):
        kind, keys = Heir.fromkeys("a", 3)
        assert kind is Heir and type(keys) is Heir and keys == {"a": 6}
        assert in_thread(lambda: Heir.fromkeys("a", 3)) == {"a": 3}
    assert vars(Keys)["fromkeys"] is original


def test_replacements_of_two_threads_may_end_in_any_order() -> None:
    original = vars(Owner)["method"]
    inside, ended = threading.Event(), threading.Event()

    def other() -> int:
        with replaced_in_thread(Owner, "method", lambda below, self, x: -below(self, x)):
            inside.set()
            ended.wait(60)
            return Owner().method(3)

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(other()))
    with replaced_in_thread(Owner, "method", lambda below, self, x: below(self, x) + 1):
        thread.start()
        inside.wait(60)
        assert Owner().method(3) == 4
    ended.set()
    thread.join()
    assert results == [-3] and vars(Owner)["method"] is original


def test_a_replacement_ends_with_an_error() -> None:
    original = vars(Owner)["method"]
    with pytest.raises(ZeroDivisionError), replaced_in_thread(Owner, "method", lambda below, self, x: x // 0):
        Owner().method(1)
    assert vars(Owner)["method"] is original and Owner().method(1) == 1


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # as torch documents it
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Model(nn.Module):
    """With a function of its own and a recurrent layer, both of which are replaced in captures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cells, self.last = nn.Linear(4, 5), nn.LSTM(5, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.cells(Square.apply(self.first(x)).unsqueeze(1))
        return self.last(h[:, 0])


def test_threads_compile_and_train_beside_each_other() -> None:
    """Two threads compile models, with inputs and without, and two others run plain models meanwhile."""
    errors: list[BaseException] = []
    done = threading.Event()
    apply = torch.autograd.Function.__dict__["apply"]

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=run)

    def compiling() -> None:
        for _ in range(2):
            kfac_fx.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), loss="normal")
            net = kfac_fx.compile(Model(), (torch.randn(6, 4),), loss="categorical")
            optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
            F.cross_entropy(net(torch.randn(6, 4)), torch.arange(6) % 3).backward()
            optimizer.step()

    def plain() -> None:
        model = Model()
        while not done.is_set():
            model(torch.randn(6, 4)).sum().backward()

    compilers, others = [guarded(compiling) for _ in range(2)], [guarded(plain) for _ in range(2)]
    for thread in (*compilers, *others):
        thread.start()
    for thread in compilers:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    assert errors == [] and torch.autograd.Function.__dict__["apply"] is apply
