"""Values that forward reads change after compile: the capture is replaced, and no statistics are of another function.

Every reader is a function of the hidden activations that reads something from outside of the model and of its inputs'
tensors, and a change of what it reads.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.tables import pairs
from tests.whole import stale_library

NUMBER = 1.0
TABLE = {"scale": 1.0}
TENSOR = torch.tensor(1.0)
ARRAY = np.ones(3)
SETTINGS = SimpleNamespace(block=SimpleNamespace(attention=SimpleNamespace(head=SimpleNamespace(scale=1.0))))
PARTIAL = functools.partial(torch.mul, other=1.0)


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class OfClass:
    scale = 1.0


class Described:
    """A descriptor with a value of its own."""

    value = 1.0

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.value


class Constants:
    scale, described = 1.0, Described()

    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * cls.scale

    def times(self, x: Tensor) -> Tensor:
        return x


SLOTS, OBJECT, METHODS = Slots(), OfClass(), Constants()


def with_default(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def counting(function: Callable[[Tensor], Tensor]) -> Any:
    """As a decorator that keeps its setting on the function."""

    def scaled(x: Tensor) -> Tensor:
        return function(x) * scaled.scale  # type: ignore[attr-defined, no-any-return]

    scaled.scale = 1.0  # type: ignore[attr-defined]
    return scaled


DECORATED = counting(lambda x: x)


def scaling(factor: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """A function with a closure, and one that writes into it."""

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    def write(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, write


SCALED, WRITE = scaling(1.0)


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


class Model(nn.Module):
    """Reads what the test chooses."""

    on_class: list[float] = [1.0] * 3  # noqa: RUF012

    def __init__(self, read: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.read = read
        self.long = [1.0] * 100
        self.numbers = np.ones(100)
        self.entries = dict.fromkeys(range(100), 1.0)
        self.config = SimpleNamespace(model=SimpleNamespace(block=SimpleNamespace(norm=SimpleNamespace(scale=1.0))))
        self.slots, self.scaled = Slots(), functools.partial(torch.mul, other=1.0)

    @property
    def environment(self) -> float:
        return float(os.environ.get("KFAC_FX_TEST_SCALE", "1.0"))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(self, torch.tanh(self.first(x))))  # type: ignore[no-any-return]


Reader = tuple[Callable[[Model, Tensor], Tensor], Callable[[Model, float], Any]]
READERS: dict[str, Reader] = {
    "a global number": (lambda model, x: x * NUMBER, lambda model, value: set_global("NUMBER", value)),
    "a global dictionary": (lambda model, x: x * TABLE["scale"], lambda model, value: TABLE.update(scale=value)),
    "a tensor bound to a global name": (
        lambda model, x: x * TENSOR, lambda model, value: set_global("TENSOR", torch.tensor(value))),
    "a global tensor that is written into": (
        lambda model, x: x * float(TENSOR), lambda model, value: TENSOR.fill_(value)),
    "a global configuration": (
        lambda model, x: x * SETTINGS.block.attention.head.scale,
        lambda model, value: setattr(SETTINGS.block.attention.head, "scale", value)),
    "a global object with slots": (
        lambda model, x: x * SLOTS.scale, lambda model, value: setattr(SLOTS, "scale", value)),
    "a value of a global object's class": (
        lambda model, x: x * OBJECT.scale, lambda model, value: setattr(OfClass, "scale", value)),
    "a value of a class": (lambda model, x: x * OfClass.scale, lambda model, value: setattr(OfClass, "scale", value)),
    "a closure cell": (lambda model, x: SCALED(x), lambda model, value: WRITE(value)),
    "a number of another module": (
        lambda model, x: x * stale_library.SCALE, lambda model, value: setattr(stale_library, "SCALE", value)),
    "a patched function of a library": (
        lambda model, x: stale_library.activation(x),
        lambda model, value: setattr(stale_library, "activation", lambda x: x * value)),
    "a patched function of torch": (
        lambda model, x: F.hardtanh(x), lambda model, value: setattr(F, "hardtanh", lambda x: x * value)),
    "a global array that is written into": (
        lambda model, x: x * float(ARRAY[1]), lambda model, value: ARRAY.__setitem__(1, value)),
    "a global partial function": (
        lambda model, x: PARTIAL(x), lambda model, value: PARTIAL.keywords.update(other=value)),
    "a global that is looked up by its name": (
        lambda model, x: x * globals()["NUMBER"], lambda model, value: set_global("NUMBER", value)),
    "a default of a function": (
        lambda model, x: with_default(x), lambda model, value: setattr(with_default, "__defaults__", (value,))),
    "an attribute of a function": (
        lambda model, x: DECORATED(x), lambda model, value: setattr(DECORATED, "scale", value)),
    "a value that a class reads itself": (
        lambda model, x: Constants.scaled(x), lambda model, value: setattr(Constants, "scale", value)),
    "a method of a global object's class": (
        lambda model, x: METHODS.times(x),
        lambda model, value: setattr(Constants, "times", lambda self, x: x * value)),
    "a value of a descriptor": (
        lambda model, x: x * METHODS.described,
        lambda model, value: setattr(vars(Constants)["described"], "value", value)),
    "the default dtype": (
        lambda model, x: x * (1.0 if torch.get_default_dtype() == torch.float32 else 3.0),
        lambda model, value: torch.set_default_dtype(torch.float32 if value == 1.0 else torch.float64)),
    "a deep configuration": (
        lambda model, x: x * model.config.model.block.norm.scale,
        lambda model, value: setattr(model.config.model.block.norm, "scale", value)),
    "a configuration with slots": (
        lambda model, x: x * model.slots.scale, lambda model, value: setattr(model.slots, "scale", value)),
    "an element of a long list": (
        lambda model, x: x * model.long[80], lambda model, value: model.long.__setitem__(80, value)),
    "an entry of a long dictionary": (
        lambda model, x: x * model.entries[80], lambda model, value: model.entries.update({80: value})),
    "an array that is written into": (
        lambda model, x: x * float(model.numbers[80]), lambda model, value: model.numbers.__setitem__(80, value)),
    "a list on the class": (
        lambda model, x: x * model.on_class[1], lambda model, value: model.on_class.__setitem__(1, value)),
    "a keyword of a partial attribute": (
        lambda model, x: model.scaled(x), lambda model, value: model.scaled.keywords.update(other=value)),
    "a property that reads the environment": (
        lambda model, x: x * model.environment,
        lambda model, value: os.environ.__setitem__("KFAC_FX_TEST_SCALE", str(value))),
}  # fmt: skip

X, Y = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Give the values that the readers read their first state."""
    activation, hardtanh = stale_library.activation, F.hardtanh
    Model.on_class = [1.0] * 3
    yield
    for write in (change for _, change in READERS.values()):
        write(Model(lambda model, x: x), 1.0)
    os.environ.pop("KFAC_FX_TEST_SCALE", None)
    stale_library.activation, F.hardtanh = activation, hardtanh
    TENSOR.fill_(1.0)


def model_of(read: Callable[[Model, Tensor], Tensor]) -> Model:
    torch.manual_seed(0)
    return Model(read).double()


def second_moment(net: Any) -> Tensor:
    """The second moment of the inputs of the last layer, as recorded."""
    moments: Tensor = net.record((X,), {}).statistics["last.weight", "last.bias"]["A"][0]
    return moments


def of_model(net: Any) -> Tensor:
    """The same from the model itself."""
    rows = net.model.read(net.model, torch.tanh(net.model.first(X)))
    rows = torch.cat([rows, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
    return rows.T @ rows  # type: ignore[no-any-return]


@pytest.mark.parametrize("reader", READERS)
def test_a_recording_is_of_the_model_as_it_is_now(reader: str) -> None:
    read, change = READERS[reader]
    net = kfac_fx.compile(model_of(read), (X,), loss="categorical")
    before = second_moment(net)
    torch.testing.assert_close(before, of_model(net))
    change(net.model, 3.0)
    after = second_moment(net)
    torch.testing.assert_close(after, of_model(net))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("reader", ["a global number", "a closure cell", "a deep configuration", "a list on the class"])
def test_a_ride_and_the_quadratic_model_are_of_the_model_as_it_is_now(reader: str) -> None:
    read, change = READERS[reader]
    net = kfac_fx.compile(model_of(read), (X,), loss="categorical")
    change(net.model, 3.0)
    outputs, _ = net.record_in_training((X,), {})
    assert torch.equal(outputs, net.model(X))
    functional, _ = net.functional(dict(net.named_parameters()), (X,), {})
    assert torch.equal(functional, net.model(X))


def test_a_capture_is_kept_while_nothing_changes_that_forward_reads() -> None:
    net = kfac_fx.compile(model_of(READERS["a global number"][0]), (X,), loss="categorical")
    first = net.captures.first
    set_global("LOOP_VARIABLE", 1)
    net.model.config.model.block.norm.unread = 5
    net.record((X,), {})
    assert [recorder for known in net.captures.recorders.values() for recorder in known] == [first]


class Layout(nn.Module):
    def __init__(self, branch: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.branch, self.linear = branch, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return 3 * y if self.branch(x) else y


BRANCHES: dict[str, tuple[Callable[[Tensor], Any], Callable[[], Tensor]]] = {
    "is_contiguous": (lambda x: x.is_contiguous(), lambda: torch.randn(4, 5, 4).transpose(0, 2)),
    "gaps": (lambda x: x.is_contiguous(), lambda: torch.randn(4, 5, 8)[..., ::2]),
    "memory format": (
        lambda x: x.is_contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ),
    "stride": (lambda x: x.stride(0) == 1, lambda: torch.randn(4, 5, 4).transpose(0, 2)),
    "requires_grad": (lambda x: x.requires_grad, lambda: torch.randn(4, 5, 4, requires_grad=True)),
}


@pairs(("branch", list(BRANCHES)), ("first", [False, True]))
def test_branches_on_layout_and_trainability_of_an_input_are_taken(branch: str, first: bool) -> None:
    taken, make = BRANCHES[branch]
    special = make()
    ordinary = torch.randn(special.shape)
    inputs = [special, ordinary] if first else [ordinary, special]
    net = kfac_fx.compile(Layout(taken), (inputs[0],), loss="normal")
    for x in (*inputs, *inputs):
        outputs, _ = net.functional(dict(net.named_parameters()), (x,), {})
        torch.testing.assert_close(outputs, net.model(x))
    assert len([recorder for known in net.captures.recorders.values() for recorder in known]) == 2


def test_as_strided_sees_the_strides_of_its_input() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.as_strided((4, 4), (4, 1)))  # type: ignore[no-any-return]

    net = kfac_fx.compile(Strided(), (torch.randn(4, 4),), loss="normal")
    x = torch.randn(4, 4).t()
    outputs, _ = net.functional(dict(net.named_parameters()), (x,), {})
    torch.testing.assert_close(outputs, net.model(x))


class WithArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, argument: Any) -> Tensor:
        scale = argument[70] if isinstance(argument, (list, np.ndarray)) else argument.block.head.scale.value
        return self.linear(x) * float(scale)  # type: ignore[no-any-return]


def configuration() -> SimpleNamespace:
    scale = SimpleNamespace(value=1.0)
    return SimpleNamespace(block=SimpleNamespace(head=SimpleNamespace(scale=scale)))


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a configuration": (configuration, lambda argument: setattr(argument.block.head.scale, "value", 3.0)),
    "an array": (lambda: np.ones(2000), lambda argument: argument.__setitem__(70, 3.0)),
    "a long list": (lambda: [1.0] * 2000, lambda argument: argument.__setitem__(70, 3.0)),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_that_changes_is_another_call(kind: str) -> None:
    make, change = ARGUMENTS[kind]
    argument, x = make(), torch.randn(5, 4)
    net = kfac_fx.compile(WithArgument(), (x, argument), loss="normal")
    change(argument)
    outputs, _ = net.functional(dict(net.named_parameters()), (x, argument), {})
    assert torch.equal(outputs, net.model(x, argument))


class OfBatches(nn.Module):
    """Ids that no graph of the whole model holds: an array of numpy, texts, or an object with a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        ids = batch.ids if isinstance(batch, SimpleNamespace) else torch.LongTensor(list(map(int, batch)))
        return self.head(self.table(ids).tanh())  # type: ignore[no-any-return]


BATCHES: dict[str, Callable[[list[int]], Any]] = {
    "arrays": np.array,
    "texts": lambda ids: [*map(str, ids)],
    "objects": lambda ids: SimpleNamespace(ids=torch.tensor(ids)),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_divided_model_is_captured_once_for_batches_of_a_kind(kind: str) -> None:
    batches = [BATCHES[kind]([(n * seed) % 5 for n in range(8 - seed % 2)]) for seed in range(4)]
    net = kfac_fx.compile(OfBatches(), (batches[0],), loss="normal")
    first = net.recorder((batches[0],), {})
    assert all(net.recorder((batch,), {}) is first for batch in batches)


def test_a_graph_is_captured_anew_for_other_texts() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, names: list[str]) -> Tensor:  # type: ignore[override]
            return super().forward(x) * len(names[0])

    x, net = torch.randn(5, 4), kfac_fx.compile(Scaled(4, 3), (torch.randn(5, 4), ["a", "b"]), loss="normal")
    outputs, _ = net.functional(dict(net.named_parameters()), (x, ["abc", "b"]), {})
    assert torch.equal(outputs, net.model(x, ["abc", "b"]))


def test_an_equal_argument_is_the_same_call() -> None:
    x = torch.randn(5, 4)
    net = kfac_fx.compile(WithArgument(), (x, configuration()), loss="normal")
    net.record((x, configuration()), {})
    assert len([recorder for known in net.captures.recorders.values() for recorder in known]) == 1


# --- effects of forward ---------------------------------------------------------------------------------------------

COUNT, SEEN = 0, {"forwards": 0}
CACHE: dict[int, Tensor] = {}


def count(x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    SEEN["forwards"] += 1
    return x


def cached(x: Tensor) -> Tensor:
    if x.dim() not in CACHE:
        CACHE[x.dim()] = torch.ones(4, dtype=torch.float64)
    return x * CACHE[x.dim()]


def print_(x: Tensor) -> Tensor:
    print("forward")
    return x


class Tally:
    seen = 0

    @classmethod
    def count(cls, x: Tensor) -> Tensor:
        cls.seen += 1
        return x


def tallied(x: Tensor) -> Tensor:
    tallied.calls += 1  # type: ignore[attr-defined]
    return x


tallied.calls = 0  # type: ignore[attr-defined]


EFFECTS: dict[str, tuple[Callable[[Model, Tensor], Tensor], list[str]]] = {
    "counts in a global": (
        lambda model, x: count(x),
        ["changes the global COUNT of test_stale_captures.py", "changes the global SEEN of test_stale_captures.py"],
    ),
    "counts on a class": (lambda model, x: Tally.count(x), ["changes the global Tally of test_stale_captures.py"]),
    "counts on a function": (lambda model, x: tallied(x), ["changes the global tallied of test_stale_captures.py"]),
    "prints": (lambda model, x: print_(x), ["prints (test_stale_captures.py:"]),
}


@pytest.mark.parametrize("kind", EFFECTS)
def test_effects_of_forward_are_left_to_it_and_come_once_in_a_ride(kind: str, capsys: Any) -> None:
    read, effects = EFFECTS[kind]
    before = COUNT, dict(SEEN)
    net = kfac_fx.compile(model_of(read), (X,), loss="categorical")
    assert before == (COUNT, SEEN)
    net.record((X,), {})
    assert before == (COUNT, SEEN) and len(net.captures.recorders) == 1

    def noted() -> tuple[Any, ...]:
        printed: str = capsys.readouterr().out
        return COUNT, dict(SEEN), Tally.seen, tallied.calls, printed.count("\n")  # type: ignore[attr-defined]

    start = noted()
    net.record_in_training((X,), {})
    ridden = noted()
    net.model(X)
    assert start != ridden and str(change(ridden, noted())) == str(change(start, ridden))
    assert all(effect in " ".join(str(net.report).split()) for effect in effects)


def change(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[Any]:
    """How much every count has grown; the last one starts at zero each time."""
    grown = [
        sum(b.values()) - sum(a.values()) if isinstance(a, dict) else b - a for a, b in zip(before, after, strict=True)
    ]
    return [*grown[:-1], after[-1]]


class OnGrid(nn.Module):
    """The positions of its inputs are kept until their number changes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.grid: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None or len(self.grid) != x.shape[1]:
            self.grid = torch.linspace(0, 1, x.shape[1]).unsqueeze(-1)
        h: Tensor = self.head(torch.tanh(self.lift(torch.cat([x, self.grid.expand(len(x), -1, -1)], -1))))
        return h


def test_a_cache_that_forward_fills_rides_as_one_that_is_full() -> None:
    def trained(full: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, inputs = OnGrid(), [torch.randn(8, 5, 2), torch.randn(8, 7, 2)]
        if full:
            model(inputs[0])
        net = kfac_fx.compile(model, (inputs[0],))
        optimizer = kfac_fx.KFAC(net, cov_update_every=1)
        for x in (inputs[0], inputs[0], inputs[1], inputs[0]):
            optimizer.zero_grad()
            (net(x) - x.sum(-1, keepdim=True)).abs().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


def test_a_hook_of_the_user_is_called_once_in_a_ride_and_one_of_the_backward_refuses_it() -> None:
    model, calls = model_of(lambda model, x: x), []
    model.first.register_forward_hook(lambda module, args, output: calls.append(1))
    net = kfac_fx.compile(model, (X,), loss="categorical")
    calls.clear()
    net.record_in_training((X,), {})
    assert calls == [1]
    model.first.register_full_backward_hook(lambda module, *gradients: None)
    net = kfac_fx.compile(model, (X,), loss="categorical")
    with pytest.raises(kfac_fx.UntraceableError, match="calls the backward hooks of first"):
        net.record_in_training((X,), {})


def test_a_forward_that_writes_into_its_input_is_recorded_and_refuses_a_ride() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2.0))  # type: ignore[no-any-return]

    x = torch.randn(5, 3)
    before = x.clone()
    net = kfac_fx.compile(Writing(), (x,), loss="categorical")
    moments = net.record((x,), {})
    assert torch.equal(x, before)
    rows = torch.cat([2 * x, torch.ones(5, 1)], dim=1)
    torch.testing.assert_close(moments.statistics["linear.weight", "linear.bias"]["A"][0], rows.T @ rows)
    with pytest.raises(kfac_fx.UntraceableError, match="writes into its input x"):
        net.record_in_training((x,), {})


class Log:
    """An object in which forward notes something."""

    def __init__(self) -> None:
        self.entries: list[int] = []


WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an entry of a dictionary": (dict, lambda given: given.update(seen=1)),
    "an element of a list": (list, lambda given: given.append(1)),
    "an entry of an object": (Log, lambda given: given.entries.append(1)),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_forward_that_writes_into_an_argument_is_recorded_and_refuses_a_ride(kind: str) -> None:
    make, write = WRITES[kind]

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, given: Any) -> Tensor:
            write(given)
            return self.linear(x)  # type: ignore[no-any-return]

    x, given = torch.randn(5, 3), make()
    net = kfac_fx.compile(Writing(), (x, given), loss="categorical")
    net.record((x, given), {})
    assert not (given.entries if isinstance(given, Log) else given)
    with pytest.raises(kfac_fx.UntraceableError, match="changes its input given"):
        net.record_in_training((x, given), {})


def test_a_cache_that_the_first_forward_fills_is_no_effect() -> None:
    net = kfac_fx.compile(model_of(lambda model, x: cached(x)), (X,), loss="categorical")
    assert not CACHE
    net.model(X)
    outputs, _ = net.record_in_training((X,), {})
    assert torch.equal(outputs, net.model(X)) and len(net.captures.recorders) == 1
    CACHE.clear()


def test_outputs_that_depend_on_a_global_counter_are_refused() -> None:
    with pytest.raises(kfac_fx.UntraceableError, match="outputs differ"):
        kfac_fx.compile(model_of(lambda model, x: count(x) * COUNT), (X,), loss="categorical")


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ x)
        return gradient @ weight, None


@pytest.mark.parametrize("in_backward", [True, False])
def test_an_attribute_of_a_parameter_is_refused_by_name(in_backward: bool) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            self.last.weight.main_grad = torch.zeros(2, 4)  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            if in_backward:
                return OwnGradient.apply(hidden, self.last.weight)  # type: ignore[no-untyped-call]
            return self.last(hidden) + self.last.weight.main_grad.sum()  # type: ignore[operator, union-attr]

    with pytest.raises(kfac_fx.UntraceableError, match=r"reads the attribute 'main_grad' .*\(last.weight has it\)"):
        kfac_fx.compile(Fused(), (torch.randn(5, 3),), loss="categorical")


# --- any place, any change --------------------------------------------------------------------------------------------


class Holder:
    """An object with an attribute of any name."""


class Fields(list[Any]):
    """A list with attributes."""


KEPT: list[Holder] = []  # what weak references refer to


def put_into(kind: str, value: Any) -> tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """(a container of this kind, how to read what it holds, how to write it)."""
    if kind == "object":
        holder = Holder()
        holder.inner = value  # type: ignore[attr-defined]
        return holder, lambda held: held.inner, lambda held, new: setattr(held, "inner", new)
    if kind == "slots":
        slotted = Slots()
        slotted.scale = value
        return slotted, lambda held: held.scale, lambda held, new: setattr(held, "scale", new)
    if kind == "class":
        local = type("Local", (), {"inner": value})
        return local, lambda held: held.inner, lambda held, new: setattr(held, "inner", new)
    if kind == "default":

        def returning(inner: Any = value) -> Any:
            return inner

        return returning, lambda held: held(), lambda held, new: setattr(held, "__defaults__", (new,))
    if kind == "cell":

        def closed() -> Any:
            return value

        return closed, lambda held: held(), lambda held, new: setattr(held.__closure__[0], "cell_contents", new)
    if kind in ("function", "thread", "fields"):
        with_fields: Any = {"function": lambda: None, "thread": threading.local(), "fields": Fields()}[kind]
        with_fields.inner = value
        return with_fields, lambda held: held.inner, lambda held, new: setattr(held, "inner", new)
    if kind == "variable":
        variable: ContextVar[Any] = ContextVar("variable")
        variable.set(value)
        return variable, lambda held: held.get(), lambda held, new: held.set(new)
    if kind == "view":
        view = MappingProxyType({"key": value})
        return view, lambda held: held["key"], lambda held, new: gc.get_referents(held)[0].update(key=new)
    if kind == "weak":
        kept = Holder()
        kept.inner = value  # type: ignore[attr-defined]
        KEPT.append(kept)
        return weakref.ref(kept), lambda held: held().inner, lambda held, new: setattr(held(), "inner", new)
    if kind == "list":
        return [0.0] * 70 + [value], lambda held: held[70], lambda held, new: held.__setitem__(70, new)
    if kind == "dict":
        return {"key": value}, lambda held: held["key"], lambda held, new: held.update(key=new)
    if kind == "array":
        array = np.array([None, value], object)
        return array, lambda held: held[1], lambda held, new: held.__setitem__(1, new)
    partial = functools.partial(max, key=value)
    return partial, lambda held: held.keywords["key"], lambda held, new: held.keywords.update(key=new)


KINDS = (
    "object", "slots", "class", "list", "dict", "array", "fields", "view", "weak",
    "partial", "default", "cell", "function", "thread", "variable",
)  # fmt: skip
ANYTHING: Any = None


@settings(max_examples=10, deadline=None)
@given(
    path=st.lists(st.sampled_from(KINDS), min_size=0, max_size=5),
    place=st.sampled_from(["global", "attribute", "closure", "class", "argument"]),
    depth=st.integers(0, 5),
    old=st.sampled_from([0.5, 1.0, 2]),
    new=st.sampled_from([0.25, 3.0, 5]),
)
@example(path=["object", "cell", "cell"], place="global", depth=2, old=0.5, new=0.25)  # two closures of one code
@example(path=["array"], place="global", depth=1, old=0.5, new=0.25)
def test_no_run_ends_with_statistics_of_another_function(
    path: list[str], place: str, depth: int, old: float, new: float
) -> None:
    """A number lies at the end of a path of containers; one container on the path, or the number, is replaced."""
    reads = []
    value: Any = old
    for kind in reversed(path):
        value, read, write = put_into(kind, value)
        reads.insert(0, (kind, read, write))
    depth = min(depth, len(path))

    def scale_in(held: Any) -> float:
        for _, read, _ in reads:
            held = read(held)
        return float(held)

    class Reading(nn.Module):
        held: Any = value if place == "class" else None

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            if place == "attribute":
                self.held = value

        def forward(self, x: Tensor, argument: Any = None) -> Tensor:
            where = {"global": ANYTHING, "closure": value, "argument": argument}.get(
                place, type(self).held if place == "class" else self.held
            )
            return self.last(torch.tanh(self.first(x)) * scale_in(where))  # type: ignore[no-any-return]

    set_global("ANYTHING", value if place == "global" else None)
    model, x = Reading(), torch.randn(5, 3)
    net = kfac_fx.compile(model, (x, value) if place == "argument" else (x,), loss="categorical")
    for _ in range(2):
        args = (x, value) if place == "argument" else (x,)
        outputs, _ = net.functional(dict(net.named_parameters()), args, {})
        assert torch.equal(outputs, model(*args))
        trained, _ = net.record_in_training(args, {})
        assert torch.equal(trained, model(*args))
        replacement: Any = new
        for kind, _, _ in reversed(reads[depth:]):
            replacement, _, _ = put_into(kind, replacement)
        if depth == 0:
            value = replacement
            set_global("ANYTHING", value)
            if place == "attribute":
                model.held = value
            elif place == "class":
                Reading.held = value
        else:
            holder = value
            for _, read, _ in reads[: depth - 1]:
                holder = read(holder)
            reads[depth - 1][2](holder, replacement)
