"""Attributes that a training loop changes: a capture is kept if forward does not read them, and only then."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import kfac_fx
from kfac_fx.recording import captures
from tests.tables import pairs

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1, 0])
FETCH = getattr
OF_SCALE = attrgetter("scale")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Logging(nn.Module):
    """Has attributes that only its training loop reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(4, 2)
        self.rewards: list[Any] = []
        self.iteration, self.best = 0, 0.0
        self.history: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))  # type: ignore[no-any-return]

    def finish(self, loss: Tensor) -> None:
        """A method of the training loop, which names attributes and does not run in forward."""
        self.rewards.append(loss.item())
        self.iteration += 1


def replaced(model: Logging, loss: Tensor) -> None:
    """As many attributes as before, with other names."""
    names = [name for name in vars(model) if name.startswith("step_")]
    for name in names:
        delattr(model, name)
    setattr(model, f"step_{len(names)}_{loss.item()}", 1)


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a list of numbers": lambda model, loss: model.rewards.append(1.0),
    "a list of tensors": lambda model, loss: model.rewards.append(loss.detach()),
    "a counter": lambda model, loss: setattr(model, "iteration", model.iteration + 1),
    "a float": lambda model, loss: setattr(model, "best", loss.item()),
    "a dictionary": lambda model, loss: model.history.update(loss=loss.item()),
    "a method of the model": lambda model, loss: model.finish(loss),
    "new attributes": lambda model, loss: setattr(model, f"loss_{loss.item()}", 1),
    "attributes instead of others": replaced,
    "an attribute of a submodule": lambda model, loss: setattr(model.inner, "calls", model.inner.calls + 1),
}


def trained(change: Callable[[Any, Tensor], Any], in_place: bool, examples: tuple[Tensor, ...]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Logging()
    net = kfac_fx.compile(model, *((examples,) if examples else ()), loss="categorical", in_place=in_place)
    optimizer = kfac_fx.KFAC(net)
    call = model if in_place else net
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(X), Y)
        loss.backward()
        optimizer.step()
        change(model, loss)
    return net, [parameter.detach().clone() for parameter in model.parameters()]


def number_of_captures(net: Any) -> int:
    return sum(map(len, net.captures.recorders.values()))


@pytest.mark.parametrize("change", CHANGES)
def test_an_attribute_that_forward_does_not_read_leads_to_no_capture(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(captures.LOG, "warning", said.append)
    net, parameters = trained(CHANGES[change], True, (X,))
    outside: list[float] = []
    _, others = trained(lambda model, loss: outside.append(loss.item()), True, (X,))
    assert number_of_captures(net) == 1 and said == []
    assert all(map(torch.equal, parameters, others))


@pytest.mark.parametrize("examples", [(), (X,)], ids=["without inputs", "with inputs"])
def test_it_is_so_in_every_form_of_compile(examples: tuple[Tensor, ...]) -> None:
    net, _ = trained(CHANGES["a method of the model"], False, examples)
    assert number_of_captures(net) == 1


class Reading(nn.Module):
    """Scales its activations with an attribute, which it reads as the test chooses."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.read, self.scale, self.name = read, 1.0, "sca"
        self.helper, self.getter, self.bound = Helper(), attrgetter("scale"), self.__getattribute__
        self.partial = functools.partial(getattr, self)

    @property
    def scaled(self) -> float:
        return self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.read(self))  # type: ignore[no-any-return]


class WithProperty(Reading):
    got = property(attrgetter("scale"))


class WithStatic(Reading):
    fetch = staticmethod(getattr)


KINDS = {"a property that is a getter": WithProperty, "a static method that is getattr": WithStatic}


class Helper:
    def of(self, module: Any) -> Any:
        return module.scale


class Index:
    """Reads an attribute inside of an operation of torch."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __index__(self) -> int:
        return int(self.module.scale)


def helping(module: Any) -> Any:
    return module.scale


def with_default(module: Any, fetch: Any = getattr) -> Any:
    return fetch(module, "sca" + module.name[:0] + "le")


def nested(module: Any) -> Any:
    def inside() -> Any:
        return module.scale

    return inside()


def matched(module: Any) -> Any:
    match module:
        case Reading(scale=value):
            return value
    return 0.0


class Scaling(TorchDispatchMode):
    """Runs inside of operations of torch, where functions are not observed."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * self.module.scale


def in_a_mode(module: Any) -> Any:
    with Scaling(module):
        return torch.ones(())


def in_a_thread(module: Any) -> Any:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(helping(module)))
    thread.start()
    thread.join()
    return values[0]


@functools.lru_cache
def cached(module: Any) -> Any:
    return module.scale


def changed_and_cleared(model: Any) -> None:
    model.scale = 3.0
    cached.cache_clear()


def scaled(model: Any) -> None:
    model.scale = 3.0


def removed_and_new(model: Any) -> None:
    del model.name
    model.gain = 3.0


READERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None]]] = {
    "an attribute": (lambda own: own.scale, scaled),
    "getattr with a computed name": (lambda own: getattr(own, own.name + "le"), scaled),
    "a global that is getattr": (lambda own: FETCH(own, own.name + "le"), scaled),
    "a default that is getattr": (with_default, scaled),
    "vars": (lambda own: vars(own)[own.name + "le"], scaled),
    "the dictionary": (lambda own: own.__dict__[own.name + "le"], scaled),
    "a getter of the model": (lambda own: own.getter(own), scaled),
    "a property that is a getter": (lambda own: own.got, scaled),
    "a static method that is getattr": (lambda own: own.fetch(own, own.name + "le"), scaled),
    "a bound method of Python's": (lambda own: own.bound(own.name + "le"), scaled),
    "a partial function": (lambda own: own.partial(own.name + "le"), scaled),
    "a mode of torch": (lambda own: in_a_mode(own), scaled),
    "a global getter": (lambda own: OF_SCALE(own), scaled),
    "a copy": (lambda own: copy.copy(SimpleNamespace(own=own)).own.scale, scaled),
    "a helper function": (helping, scaled),
    "a property": (lambda own: own.scaled, scaled),
    "a method of another class": (lambda own: own.helper.of(own), scaled),
    "a default argument": (lambda own: (lambda x=own.scale: x)(), scaled),
    "a comprehension": (lambda own: sum([module.scale for module in (own,)]), scaled),
    "a nested function": (nested, scaled),
    "a lambda": (lambda own: (lambda: own.scale)(), scaled),
    "a generator": (lambda own: next(module.scale for module in (own,)), scaled),
    "a pattern": (matched, scaled),
    "a string that is run": (lambda own: eval("own.scale"), scaled),
    "a thread": (in_a_thread, scaled),
    "a function that is cached": (cached, changed_and_cleared),
    "an operation of torch": (lambda own: torch.ones(Index(own), 1).sum(), scaled),  # type: ignore[call-overload]
    "a shape of an operation of torch": (
        lambda own: torch.ones((Index(own), 1)).sum(), scaled),
    "a new attribute": (
        lambda own: own.gain if hasattr(own, "gain") else 1.0, lambda own: setattr(own, "gain", 3.0)),
    "a new attribute instead of another": (
        lambda own: own.gain_or_one(), removed_and_new),
}  # fmt: skip


def gain_or_one(own: Any) -> Any:
    try:
        return own.gain
    except AttributeError:
        return 1.0


@pytest.fixture(autouse=True)
def method(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Reading, "gain_or_one", gain_or_one, raising=False)
    cached.cache_clear()
    yield
    cached.cache_clear()


def moment(net: Any) -> Tensor:
    moments: Tensor = net.record((X,), {}).statistics["last.weight", "last.bias"]["A"][0]
    return moments


def moment_of_model(model: Any) -> Tensor:
    rows = torch.tanh(model.first(X)) * model.read(model)
    rows = torch.cat([rows, torch.ones(len(X), 1)], dim=1)
    return rows.T @ rows  # type: ignore[no-any-return]


@pairs(("examples", {"without inputs": (), "with inputs": (X,)}), ("reader", list(READERS)))
def test_an_attribute_that_forward_reads_is_seen(reader: str, examples: tuple[Tensor, ...]) -> None:
    read, change = READERS[reader]
    torch.manual_seed(0)
    model = KINDS.get(reader, Reading)(read)
    net = kfac_fx.compile(model, *((examples,) if examples else ()), loss="categorical")
    before = moment(net)
    torch.testing.assert_close(before, moment_of_model(model))
    change(model)
    after = moment(net)
    torch.testing.assert_close(after, moment_of_model(model))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("examples", [(), (X,)], ids=["without inputs", "with inputs"])
@pytest.mark.parametrize("of_layer", [False, True])
def test_an_attribute_that_a_hook_reads_is_seen(of_layer: bool, examples: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    model = Reading(lambda own: 1.0)
    owner: nn.Module = model.last if of_layer else model
    owner.register_forward_pre_hook(lambda module, args: (args[0] * model.scale,))
    net = kfac_fx.compile(model, *((examples,) if examples else ()), loss="categorical")
    before = moment(net)
    model.scale = 3.0
    assert not torch.allclose(before, moment(net))
    outputs, _ = net.functional(dict(net.named_parameters()), (X,), {})
    torch.testing.assert_close(outputs, model(X))


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 1.0, 0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


@pytest.mark.parametrize("examples", [(), (X,)], ids=["without inputs", "with inputs"])
def test_an_attribute_that_a_parametrization_reads_is_seen(examples: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    model = Logging()
    parametrize.register_parametrization(model.last, "weight", times := Times())
    net = kfac_fx.compile(model, *((examples,) if examples else ()), loss="categorical")
    for scale, number in ((1.0, 1), (3.0, 2)):
        times.scale = scale
        times.calls += 1
        model.iteration += 1
        outputs, _ = net.functional(dict(net.named_parameters()), (X,), {})
        torch.testing.assert_close(outputs, model(X))
        assert number_of_captures(net) == number


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.module.scale, None


OWN_BACKWARD = OwnBackward.apply


class WithBackward(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(OWN_BACKWARD(self.inner(x) if x.shape[-1] == 4 else x, self))


def test_an_attribute_that_a_backward_reads_is_seen() -> None:
    torch.manual_seed(0)
    model = WithBackward()
    net = kfac_fx.compile(model, (X,), loss="categorical")
    model.scale = 3.0
    net.record((X,), {})
    assert number_of_captures(net) == 2


class OfDerivatives(nn.Module):
    """Takes derivatives in forward, as networks for differential equations do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.iter = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope * self.scale


def test_forwards_that_take_derivatives_are_kept_too() -> None:
    torch.manual_seed(0)
    model = OfDerivatives()
    net = kfac_fx.compile(model, (X,), loss="normal")
    for scale, number in ((1.0, 1), (3.0, 2)):
        model.scale = scale
        model.iter += 1
        outputs, _ = net.functional(dict(net.named_parameters()), (X,), {})
        torch.testing.assert_close(outputs, model(X))
        assert number_of_captures(net) == number


def test_an_attribute_that_another_module_reads_under_its_name_counts_as_read() -> None:
    torch.manual_seed(0)
    model = Reading(lambda own: own.scale)
    model.add_module("inner", Inner())
    net = kfac_fx.compile(model, (X,), loss="categorical")
    model.inner.scale = 2.0
    net.record((X,), {})
    assert number_of_captures(net) == 2


class Branching(Logging):
    """Reads an attribute on one of two paths only."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.scale = False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h * self.gain() if self.late else h

    def gain(self) -> float:
        return self.scale


class Divided(Branching):
    """Has no graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(x)
        return h * 2.0 if h.sum().item() > 1e6 else h

    def __init__(self) -> None:
        super().__init__()
        self.part = Branching()
        del self.inner, self.last


def test_submodules_that_are_captured_are_kept_too() -> None:
    torch.manual_seed(0)
    model = Divided()
    net = kfac_fx.compile(model, (X,), loss="categorical")
    submodule = net.program.submodules[0]
    for _ in range(3):
        model.finish(torch.ones(()))
        model.part.finish(torch.ones(()))
        model.part.scale += 1.0
        net.record((X,), {})
    assert net.program.submodules == (submodule,) and number_of_captures(net) == 1
    model.part.late = True
    outputs, _ = net.functional(dict(net.named_parameters()), (X,), {})
    torch.testing.assert_close(outputs, model(X))


def test_every_capture_has_its_own_reads() -> None:
    torch.manual_seed(0)
    model = Branching()
    net = kfac_fx.compile(model, (X,), loss="categorical")
    model.scale = 2.0
    net.record((X,), {})
    assert number_of_captures(net) == 1
    for late, scale, number in ((True, 2.0, 2), (True, 3.0, 3), (False, 4.0, 3), (True, 3.0, 3)):
        model.late, model.scale = late, scale
        outputs, _ = net.functional(dict(net.named_parameters()), (X,), {})
        torch.testing.assert_close(outputs, model(X))
        assert number_of_captures(net) == number
