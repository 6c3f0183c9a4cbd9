"""When a model is captured, and captured again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kfac_fx import ModelChangedError, UntraceableError
from kfac_fx.compiled.compiled_module import compile
from kfac_fx.recording import captures
from kfac_fx.recording.captures import MAX_KINDS
from tests.runtime.compiled import X, count, mlp, net_of


def test_another_batch_size_needs_no_capture() -> None:
    net = net_of(mlp(), X)
    for cases in (6, 3, 100):
        assert net.record((torch.randn(cases, 4),), {}).cases == cases
    assert count(net) == 1


class Switching(nn.Module):
    """Another graph for long sequences, with the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.inner(x if x.shape[1] < 5 else x.flip(1))
        return scale * (y if mask is None else y * mask).mean(1)


def test_a_guard_that_fails_captures_again() -> None:
    net = net_of(Switching(), torch.randn(6, 4, 4))
    for size, number in ((3, 1), (7, 2), (9, 2), (2, 2)):
        net.record((torch.randn(6, size, 4),), {})
        assert count(net) == number


def test_a_number_that_changes_and_makes_captures_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in the log, and in the report with its newest count. Other kinds of calls are counted apart."""
    said: list[str] = []
    monkeypatch.setattr(captures.LOG, "warning", said.append)
    x, mask = torch.randn(6, 4, 4), torch.ones(6, 4, 3)
    net = net_of(Switching(), x)
    for given, scale in ((None, 1.0), (None, 2.0), (mask, 3.0), (mask, 4.0), (None, 2.0)):
        net.record((x, given, scale), {})
    net.record((torch.randn(6, 7, 4), None, 2.0), {})  # of other sizes
    assert net.report.to_dict()["fallbacks"] == said == []
    net.record((x,), {"scale": 5.0})
    net.record((x, None), {"scale": 6.0})
    net.record((x, None, 7.0), {})
    net.record((x, mask, 8.0), {})
    text = (
        "argument scale of forward has had {} values as a Python number, and every one is a capture of its own, which "
        "takes time: pass a tensor, torch.tensor(scale), if forward only computes with it"
    )
    assert said == [text.format(3)]
    assert net.report.to_dict()["fallbacks"] == [text.format(4)]
    assert len({id(net.recorder((x, None, torch.tensor(scale)), {})) for scale in (0.5, 0.7, 0.9)}) == 1


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, scales: Any) -> Tensor:
        return self.head(x) * float(scales[0])  # type: ignore[no-any-return]


def test_an_array_that_changes_and_makes_captures_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(captures.LOG, "warning", said.append)
    x, arrays = torch.randn(6, 4), [np.full(100, float(n)) for n in range(3)]
    net = compile(Chosen(), (x, arrays[0]), loss="normal")
    for array in arrays:
        net.record((x, array), {})
    text = (
        "argument scales of forward has had 3 values as an array of numpy, and every one is a capture of its own, which"
        " takes time: pass a tensor, torch.tensor(scales), if forward only computes with it"
    )
    assert said == net.report.to_dict()["fallbacks"] == [text]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.temperature, self.scaled = nn.Linear(4, 3), 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) / self.temperature * (2.0 if self.scaled else 1.0)


def test_an_attribute_that_changes_and_makes_captures_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(captures.LOG, "warning", said.append)
    x, model = torch.randn(6, 4), Annealed()
    net = net_of(model, x)
    for temperature, scaled in ((1.0, True), (0.9, False), (0.9, True), (1.0, False)):
        model.temperature, model.scaled = temperature, scaled
        net.record((x,), {})
    assert count(net) == 4 and net.report.to_dict()["fallbacks"] == said == []
    for temperature in (0.8, 0.7):
        model.temperature = temperature
        net.record((x,), {})
    text = (
        "temperature, which forward may read, has had {} values, and every one is a capture of its own, which takes "
        "time: let it be a buffer that is written in place, if forward only computes with it"
    )
    assert said == [text.format(3)]
    assert net.report.to_dict()["fallbacks"] == [text.format(4)]


def test_an_object_that_a_trainer_writes_and_that_makes_captures_is_told_with_a_module_to_compile() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self._trainer = nn.Linear(4, 3), None

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, getattr(self, "he" + "ad")(x))  # so that any attribute may be read

    x, model = torch.randn(6, 4), Trained()
    net = net_of(model, x)
    for _ in range(3):
        model._trainer = object()  # type: ignore[assignment]
        net.record((x,), {})
    (told,) = net.report.to_dict()["fallbacks"]
    assert told.startswith("_trainer, which forward may read, has had 4 values")
    assert "compile a module that has no such attribute and computes the outputs, as kfac_fx.compile(self.model" in told


@pytest.mark.parametrize(
    "option", [{"batch_dim": 1}, {"padding_mask": lambda x: x[..., 0] != 0}], ids=lambda x: next(iter(x))
)
def test_an_option_that_needs_sizes_waits_for_a_batch(option: dict[str, Any]) -> None:
    net = compile(nn.Linear(4, 3), loss="normal", **option)
    with pytest.raises(
        UntraceableError,
        match=rf"the first training forward makes (?s:.*){next(iter(option))} needs the sizes",
    ):
        net.program  # noqa: B018
    net(torch.randn(6, 5, 4))
    assert [registration.layer for registration in net.program.registrations] == ["linear"]


def test_images_of_another_size_are_captured_once_more_and_then_at_every_size() -> None:
    net = compile(nn.Conv2d(3, 2, 3), (torch.randn(2, 3, 5, 5),), loss="normal")
    for (batch, height, width), number in (((4, 5, 5), 1), ((4, 6, 7), 2), ((3, 8, 4), 2), ((2, 5, 5), 2)):
        net.record((torch.randn(batch, 3, height, width),), {})
        assert count(net) == number


@pytest.mark.parametrize(
    ("change", "keywords"),
    [
        (lambda net: net.eval(), {}),
        (lambda net: None, {"scale": 2.0}),
        (lambda net: None, {"mask": torch.ones(3)}),
    ],
)
def test_another_kind_of_call_captures_again(change: Callable[[Any], Any], keywords: dict[str, Any]) -> None:
    net = net_of(Switching(), torch.randn(6, 4, 4))
    change(net)
    args = (torch.randn(6, 4, 4),)
    net.record(args, keywords)
    net.record(args, keywords)
    assert count(net) == 2
    outputs, _ = net.functional({}, args, keywords)
    torch.testing.assert_close(outputs, net.model(*args, **keywords))


def test_autocast_captures_again() -> None:
    net = net_of(mlp(), X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moments = net.record((X,), {})
    assert count(net) == 2
    assert moments.statistics[("0.weight", "0.bias")]["A"].dtype == torch.float32


def test_a_capture_that_autocast_alone_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step under autocast paused, and nothing said why."""
    started: list[str] = []

    def working(what: str) -> AbstractContextManager[None]:
        started.append(what)
        return nullcontext()

    monkeypatch.setattr(captures, "working", working)
    net, text = net_of(mlp(), X), "compile with example inputs inside of the torch.autocast of the training"
    assert text not in " ".join(str(net.report).split())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net.recorder((X,), {})
    name = type(net.model).__name__
    assert started == [f"capturing {name}", f"capturing {name} again, under autocast"]
    assert text in " ".join(str(net.report).split())


def test_the_oldest_kind_of_call_is_forgotten() -> None:
    net = net_of(Switching(), torch.randn(6, 4, 4))
    for n in range(MAX_KINDS + 1):
        net.record((torch.randn(6, 4, 4),), {"scale": 1.5 + n})
    assert len(net.captures.recorders) == MAX_KINDS


def test_what_was_traced_symbolically_serves_where_it_holds() -> None:
    net = net_of(Optional())
    assert count(net) == 0 and len(net.registrations) == 1
    net.record((X,), {})
    assert net.captures.first is not None and net.program.cases is None
    net.record((X, torch.ones(3)), {})
    assert [recorder.program.cases is None for known in net.captures.recorders.values() for recorder in known] == [
        True,
        False,
    ]


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.inner(x)
        return y if mask is None else y * mask


def test_what_symbolic_tracing_gets_wrong_is_captured_with_inputs() -> None:
    net = net_of(Optional())
    net.record((X, torch.ones(3)), {})
    assert net.program.cases is not None and count(net) == 1


class Steps(nn.Module):
    """A loop over the positions, which torch.fx cannot unroll."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(row) for row in x.unbind(1)]).mean(0)


def test_the_first_training_forward_captures_what_torch_fx_cannot_see() -> None:
    net = net_of(Steps())
    with pytest.raises(UntraceableError) as failure:
        _ = net.registrations
    lines = str(failure.value).splitlines()
    assert lines[0] == (
        "Steps has no graph yet: torch.fx alone cannot trace all of it, so the first training forward makes the graph. "
        "KFAC(net), FisherEstimator(net) and net.report read it: call net once before them, or write "
        "kfac_fx.compile(model, (x,), ...) for the arguments of one batch."
    )
    assert lines[1].startswith("Steps could not be captured as a graph; torch gave up in Steps (test_capture_cache.py:")
    assert lines[-1].startswith("  ") and len(lines) == 4  # a line of the model and torch's error, and no other advice
    x = torch.randn(6, 2, 4)
    with torch.no_grad():
        net(x)
    assert count(net) == 0
    assert torch.equal(net(x), net.model(x))
    assert [len(registration.uses) for registration in net.registrations] == [2]


def test_a_copy_of_what_torch_fx_cannot_see_says_that_it_has_no_capture() -> None:
    x = torch.randn(6, 2, 4)
    net = copy.deepcopy(compile(Steps(), (x,), loss="normal"))
    with pytest.raises(UntraceableError) as failure:
        _ = net.report
    assert str(failure.value) == (
        "this copy of Steps has no capture, because captures are not copied: call it once in training mode, as in "
        "copy(x) for a batch x, before its report is read or an optimizer is made of it"
    )
    net(x)
    assert len(net.registrations) == 1


def test_of_too_many_captures_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MAX_CAPTURES", 1)
    net = compile(nn.Conv2d(3, 2, 3), (torch.randn(2, 3, 5, 5),), loss="normal")
    small, large = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 6, 7)
    first = net.recorder((small,), {})
    second = net.recorder((large,), {})
    assert second is not first and net.recorder((large,), {}) is second and count(net) == 1


def test_a_model_that_was_changed_is_refused_where_its_capture_is_asked_for() -> None:
    """Without a forward, which would refuse it, too."""
    model = mlp()
    net = net_of(model, X)
    net.recorder((X,), {})
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))
    for ask in (net.recorder, net.record):
        with pytest.raises(ModelChangedError, match=r"1 parameter or module was replaced, .*: '0\.weight'\."):
            ask((X,), {})
