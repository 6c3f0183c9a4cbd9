"""One capture of a model, and the errors of models that cannot be captured."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx import RegistrationError, UntraceableError
from kfac_fx.recording import captures as capturing_module
from kfac_fx.recording.captures import Capturing
from kfac_fx.recording.emitted_submodules import EmittedSubmodules
from tests.runtime.compiled import X, mlp, net_of


def capturing_of(model: nn.Module) -> Capturing:
    net = net_of(model)
    return Capturing(model, net.captures.arguments)


def test_a_capture_is_made_anew_at_every_call_and_proved() -> None:
    capturing = capturing_of(mlp())
    first, second = (capturing.exported((X,), {}, every_size=False, first=True) for _ in range(2))
    assert first is not second and [*map(str, first.registrations)] == [*map(str, second.registrations)]
    assert first.proven and second.proven


class Branching(nn.Module):
    """Two layers with a branch on values between them, so no single graph holds the model."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x if x.sum() > 0 else x.exp())


def test_a_model_without_a_single_graph_is_captured_as_its_submodules() -> None:
    recorder = capturing_of(Branching()).exported((X,), {}, every_size=False, first=True)
    assert isinstance(recorder.emitted, EmittedSubmodules)
    assert {name for registration in recorder.registrations for name in registration.parameters} == {
        "before.weight",
        "before.bias",
        "after.weight",
        "after.bias",
    }


def test_registrations_by_hand_are_not_divided() -> None:
    capturing = capturing_of(Branching())
    by_hand = Capturing(capturing.model, dataclasses.replace(capturing.arguments, passes=lambda program: program))
    assert by_hand.by_hand and not capturing.by_hand
    with pytest.raises(UntraceableError):
        by_hand.exported((X,), {}, every_size=False, first=True)


@pytest.mark.parametrize("error", [UntraceableError, RegistrationError])
def test_what_cannot_be_divided_around_autocast_is_captured_whole(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def divided(*_: Any) -> NoReturn:
        raise error("not here")

    capturing = capturing_of(Branching())
    monkeypatch.setattr(capturing_module, "in_autocast", lambda program: ["linear"])
    monkeypatch.setattr(Capturing, "divided", divided)
    assert capturing.around_autocast(net_of(mlp(), X).program, (X,), {}) is None


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))


def test_a_parameter_that_is_expanded_to_the_batch_is_registered() -> None:
    net = net_of(Token(), torch.randn(3, 2, 4))
    assert {name for registration in net.registrations for name in registration.parameters} == {
        "token",
        "head.weight",
        "head.bias",
    }


class Bare(nn.Module):
    """No submodule to capture, and a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if x.sum() > 0 else x @ self.weight.exp()


def test_what_cannot_be_captured_at_all_is_an_error_at_compile_or_at_the_first_step() -> None:
    model, x = nn.Sequential(nn.Tanh(), Bare()), -torch.ones(6, 2)
    with pytest.raises(UntraceableError, match=r"torch gave up in 1 \(test_capturing.py:\d+\)"):
        net_of(model, x)
    net = net_of(model)
    for _ in range(2):
        with pytest.raises(UntraceableError, match=r"torch gave up in 1 \(test_capturing.py:\d+\)"):
            net(x)
    assert torch.equal(net.eval()(x), model(x))


def test_a_model_that_does_not_run_is_told_so() -> None:
    with pytest.raises(UntraceableError) as failure:
        net_of(nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 5))
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("Sequential does not run on these inputs: RuntimeError: ")
    assert "mat1 and mat2 shapes" in lines[0]
    assert lines[1] == "The error is of 0, which got [6, 5]." and lines[2].startswith("0 has in_features=4, and its ")
    assert len(lines) == 3, "and no advice to see that it runs"


@pytest.mark.parametrize(
    ("of_parts", "of_whole", "divided"), [(0, 0, True), (2, 1, False), (1, 1, False), (1, 2, True)]
)
def test_a_model_is_divided_around_autocast_only_if_fewer_parameters_are_generic(
    of_parts: int, of_whole: int, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing, parts = capturing_of(mlp()), net_of(mlp(), X).recorder
    monkeypatch.setattr(Capturing, "around_autocast", lambda *_: parts)
    monkeypatch.setattr(capturing_module, "generic_parameters", lambda of: of_parts if of is parts else of_whole)
    assert (capturing.exported((X,), {}, every_size=False, first=True) is parts) is divided


class Reader(nn.Module):
    """Reads some steps of a series from a state, and returns the state that they lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state), state


def test_a_capture_neither_uses_up_nor_follows_the_graph_of_an_earlier_forward() -> None:
    def backward(module: nn.Module) -> list[Tensor | None]:
        model.zero_grad()
        state, loss = torch.zeros(4, 5), torch.zeros(())
        for x in series:
            outputs, state = module(x, state)
            loss = loss + F.cross_entropy(outputs, torch.tensor([0, 1, 1, 0]))
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    model, series = Reader(), [torch.randn(4, length, 3) for length in (2, 3)]
    wanted = backward(model)
    net = kfac_fx.compile(
        model,
        (torch.randn(4, 1, 3), torch.zeros(4, 5)),
        loss=lambda outputs: kfac_fx.losses.Categorical(outputs[0]),
    )
    optimizer = kfac_fx.KFAC(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(backward(net), wanted)
    assert optimizer.skipped == 0
