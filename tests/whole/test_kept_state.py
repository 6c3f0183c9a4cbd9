"""Models that are other functions at other times: attributes that change, state kept between forwards, counters,
parameters that forward writes. A recording must be of the model as it is then."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import kfac_fx
from kfac_fx import UntraceableError
from tests.whole.training import differences, step

X, OTHER = torch.randn(6, 4), torch.randn(9, 4)


class Base(nn.Module):
    """Two layers with something between them that is not the same at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))


class Tempered(Base):
    """A temperature that the training loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def between(self, h: Tensor) -> Tensor:
        return (h / self.tau).tanh()


class Dropping(Base):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def between(self, h: Tensor) -> Any:
        return self.dropout(h).tanh()


class Inside(nn.Module):
    """The temperature of a submodule, where the whole is captured in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Tempered(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.inner(x)
        return self.last(h if h.sum() > -1e9 else h.exp())


class Warming(Base):
    """A count of forwards that a scale depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def between(self, h: Tensor) -> Tensor:
        self.steps += 1
        return h.tanh() * min(1.0, self.steps / 3)


class Later(Warming):
    """Another function after a while; the first forwards are alike."""

    def between(self, h: Tensor) -> Tensor:
        self.steps += 1
        return h.tanh() if self.steps > 2 else h


class Recalling(Base):
    """The state of the last batch, which there is none of at first, and a layer that only reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None
        self.recall = nn.Linear(4, 4)

    def between(self, h: Tensor) -> Tensor:
        before, self.state = self.state, h.detach().tanh().mean(0)
        return h if before is None else h + self.recall(before[None])


class Following(Base):
    """A teacher that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def between(self, h: Tensor) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.first.weight, 0.5)
        return h - self.teacher(h)


class Clamped(Base):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.3, 0.3)
        return h.tanh()


class Streams(Base):
    """Random numbers from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.pythons = torch.Generator(), random.Random(0)

    def between(self, h: Tensor) -> Tensor:
        return h + torch.randn(h.shape, generator=self.torchs) * self.pythons.random()


class Swapped(Base):
    """A layer that runs on other parameters, made of its own, when the inputs are large."""

    def between(self, h: Tensor) -> Any:
        if h.abs().max() < 100:
            return h
        return functional_call(self.first, {"weight": 2.0 * self.first.weight}, (h,))


class Remembering(nn.Module):
    """Keeps what it computed, for the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.seen = y.detach().abs().mean(0)
        return y.tanh()


class Reading(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first = Remembering()  # type: ignore[assignment]

    def between(self, h: Tensor) -> Tensor:
        seen: Any = self.first.seen
        return h * seen if h.sum() > -1e9 else h


class Tapped(Base):
    """Features that a hook keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.first.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["first"] = output.detach()

    def between(self, h: Tensor) -> Tensor:
        h = h.tanh() + self.features["first"]
        return h if h.sum() > -1e9 else h.exp()


def apart(model: nn.Module, net: Any, x: Tensor) -> list[str]:
    """Parameters whose gradient is not the same in a recording and in a copy of the model as it is now."""
    twin = copy.deepcopy(model)
    parameters = {name: parameter for name, parameter in twin.named_parameters() if parameter.requires_grad}
    torch.manual_seed(3)
    random.seed(3)
    output = twin(x)
    loss = kfac_fx.losses.Normal(output, targets=torch.zeros_like(output)).evaluate()
    wanted = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    torch.manual_seed(3)
    random.seed(3)
    found = net.record((x,), {}, mode="empirical", targets=torch.zeros_like(output), params_stats=True).gradients
    pairs = zip(parameters, wanted, strict=True)
    return [name for name, parameter in pairs if not torch.allclose(found[name], parameter, rtol=1e-4, atol=1e-5)]


class Scheduled(Base):
    """A temperature in numpy's hands, of which forward takes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = np.ones(3)

    def between(self, h: Tensor) -> Tensor:
        return (h / float(self.schedule[1])).tanh()


def of_class() -> nn.Module:
    """A temperature of the class, and a class of its own, for tests to change."""
    kind = type("OfClass", (Tempered,), {"tau": 1.0})
    model: nn.Module = kind()
    del model.tau
    return model


def tenth(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / 10


def of_inputs(module: nn.Module, args: Any) -> Any:
    return tuple(argument / 10 for argument in args)


CHANGES: list[tuple[str, Callable[[], nn.Module], Callable[[Any], object]]] = [
    ("a number", Tempered, lambda model: setattr(model, "tau", 0.1)),
    ("a module's", Dropping, lambda model: setattr(model.dropout, "p", 0.9)),
    ("a submodule's", Inside, lambda model: setattr(model.inner, "tau", 0.1)),
    ("an array's", Scheduled, lambda model: model.schedule.fill(0.1)),
    ("a class's", of_class, lambda model: setattr(type(model), "tau", 0.1)),
    ("a class's function", of_class, lambda model: setattr(type(model), "between", lambda self, h: h.exp())),
    ("a hook", Tempered, lambda model: model.first.register_forward_hook(tenth)),
    ("a hook of the whole", Tempered, lambda model: model.register_forward_hook(tenth)),
    ("a hook of inputs", Tempered, lambda model: model.last.register_forward_pre_hook(of_inputs)),
    ("a hook of a submodule", Inside, lambda model: model.inner.register_forward_hook(tenth)),
]


@pytest.mark.parametrize(("build", "change"), [rest for _, *rest in CHANGES], ids=[name for name, *_ in CHANGES])
def test_an_attribute_that_is_changed_from_outside_is_recorded_as_it_is(build: Any, change: Any) -> None:
    model = build()
    net = kfac_fx.compile(model, (X,), loss="normal")
    assert apart(model, net, X) == []
    change(model)
    assert apart(model, net, OTHER) == []


def test_a_forward_that_is_replaced_is_recorded_as_it_is() -> None:
    model = Tempered()
    net = kfac_fx.compile(model, (X,), loss="normal")
    net.record((X,), {})
    model.first.forward = lambda x: F.linear(x, model.first.weight, model.first.bias).exp()  # type: ignore[method-assign]
    rows = torch.cat([model.between(model.first(X)), torch.ones(6, 1)], 1).detach()
    found = net.record((X,), {}).statistics["last.weight", "last.bias"]["A"]
    torch.testing.assert_close(found, (rows.mT @ rows)[None])


def test_a_later_hook_that_changes_gradients_is_refused_as_an_earlier_one() -> None:
    model = Tempered()
    net = kfac_fx.compile(model, (X,), loss="normal")
    model.last.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 10,))
    with pytest.raises(
        UntraceableError,
        match=r"other gradients .* in first\.weight, first\.bias\.\nA capture does not include hooks of modules",
    ):
        net.record((X,), {})


def test_a_hook_that_comes_and_goes_needs_one_capture() -> None:
    model = Tempered()
    net = kfac_fx.compile(model, (X,), loss="normal")
    made = []
    for _ in range(2):
        handle = model.first.register_forward_hook(tenth)
        made.append(net.recorder((X,), {}))
        handle.remove()
        made.append(net.recorder((X,), {}))
    assert made[:2] == made[2:] and made[0] is not made[1]


def test_an_attribute_that_is_changed_back_needs_no_capture() -> None:
    model = Tempered()
    net = kfac_fx.compile(model, (X,), loss="normal")
    first = net.recorder((X,), {})
    model.tau = 0.5
    assert net.recorder((X,), {}) is not first
    model.tau = 1.0
    assert net.recorder((X,), {}) is first


STATEFUL: list[Callable[[], nn.Module]] = [
    Warming, Later, Recalling, Following, Clamped, Streams, Reading, Tapped,
]  # fmt: skip


@pytest.mark.parametrize("build", STATEFUL)
def test_state_that_forward_keeps_is_recorded_as_it_is(build: Callable[[], nn.Module]) -> None:
    model = build()
    twin = copy.deepcopy(model)
    net = kfac_fx.compile(model, (X,), loss="normal")
    assert not net.captures.first.whole
    assert [registration.reason for registration in net.registrations if registration.generic] == []
    for x in (X, OTHER, X):
        assert differences(step(twin, lambda x=x: twin(x)), step(model, lambda x=x: net(x))) == []
        assert apart(model, net, x) == []
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_what_was_not_run_at_first_has_its_use_later() -> None:
    model = Recalling()
    net = kfac_fx.compile(model, (X,), loss="normal")
    rows = {row.parameters: row for row in net.report.rows}
    assert rows["recall.weight", "recall.bias"].uses == 0
    net(X)
    assert net.record((X,), {}).statistics["recall.weight", "recall.bias"]["count"] > 0


def test_compiling_and_recording_write_nothing_into_parameters() -> None:
    for build in (Following, Clamped):
        model = build()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        net = kfac_fx.compile(model, (X,), loss="normal")
        net.record((X,), {})
        assert all(map(torch.equal, model.parameters(), before))


def test_the_report_says_why_state_is_left_to_python() -> None:
    said = {
        Warming: "it updates the Python counter(s) steps in every forward pass. A captured graph would keep the first "
        "value.",
        Recalling: "it keeps state between forward passes, and its outputs depend on it. A captured graph would repeat "
        "the first forward pass.",
        Clamped: "it writes into its parameters last.weight in forward, which a graph would repeat in every recording.",
    }
    for build, reason in said.items():
        (left,) = kfac_fx.compile(build(), (X,), loss="normal").report.to_dict()["python"]
        assert left == {"module": build.__name__, "reason": reason}


def test_a_submodule_that_keeps_something_for_others_stays_python() -> None:
    found = kfac_fx.compile(Reading(), (X,), loss="normal").report.to_dict()
    assert {"module": "first", "reason": "it sets first.seen, which Python may read"} in found["python"]
    assert [submodule["module"] for submodule in found["submodules"]] == ["first.linear", "last"]


def test_a_layer_that_later_runs_on_other_parameters_is_an_error() -> None:
    """Those are made of its own, in Python that nothing records."""
    net = kfac_fx.compile(Swapped(), (X,), loss="normal")
    assert net.record((X,), {}).statistics["first.weight", "first.bias"]["count"] == 6
    with pytest.raises(kfac_fx.ModelChangedError, match=r"reads first\.bias, first\.weight outside of its captured"):
        net.record((1e4 * X,), {})


def test_a_layer_that_runs_on_other_parameters_made_of_its_own_has_a_use_more() -> None:
    model = Swapped()
    net = kfac_fx.compile(model, (1e4 * X,), loss="normal")
    uses = {registration.parameters: len(registration.uses) for registration in net.registrations}
    assert uses["first.weight", "first.bias"] == 2
    assert net.record((1e4 * X,), {}).statistics["first.weight", "first.bias"]["count"] == 12
    assert apart(model, net, 1e4 * OTHER) == []


def test_a_clock_is_refused() -> None:
    ticks = iter(range(1, 1000))

    class Ticking(Base):
        def between(self, h: Tensor) -> Tensor:
            return h * next(ticks)

    with pytest.raises(UntraceableError) as failure:
        kfac_fx.compile(Ticking(), (X,), loss="normal")
    first, advice = str(failure.value).splitlines()
    assert first.startswith(
        "Ticking computes something else in a second forward pass, with the same inputs and random numbers:"
    )
    assert "pass them as inputs" in advice


class Powered(Base):
    """A spectral norm as a wrapper writes it: vectors that are frozen parameters, and a weight that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(4), requires_grad=False)

    def between(self, h: Tensor) -> Tensor:
        v = F.normalize(self.first.weight.detach().t() @ self.u, dim=0)
        self.u.data = F.normalize(self.first.weight.detach() @ v, dim=0)
        self.scaled = self.first.weight / self.u.dot(self.first.weight @ v)
        return F.linear(h, self.scaled)


def test_what_the_outputs_depend_on_is_told_and_not_what_is_made_anew() -> None:
    (left,) = kfac_fx.compile(Powered(), (X,), loss="normal").report.to_dict()["python"]
    assert (
        left["reason"] == "it writes into its parameters u in forward, which a graph would repeat in every recording."
    )
