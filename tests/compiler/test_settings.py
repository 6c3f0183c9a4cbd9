"""The settings of a capture beside its inputs: attributes, classes, hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kfac_fx.passes.tracing.settings import ForwardSettings, Outside, OutsideName

CHANGES: dict[str, Any] = {
    "a number": lambda model: setattr(model[0], "tau", 0.5),
    "a number of another type": lambda model: setattr(model[0], "tau", 1),
    "a function": lambda model: setattr(model[0], "activation", torch.relu),
    "a tensor": lambda model: setattr(model[0], "grid", torch.ones(2)),
    "in a list": lambda model: model[0].sizes.append(3),
    "in a dictionary": lambda model: model[0].options.update(tau=2.0),
    "in a configuration": lambda model: setattr(model[0].config, "scale", 3.0),
    "a mode": lambda model: model[1].eval(),
    "of a module of torch": lambda model: setattr(model[1], "p", 0.1),
    "a hook": lambda model: model[1].register_forward_hook(lambda *args: None),
    "a forward": lambda model: setattr(model[0], "forward", torch.tanh),
    "a new attribute": lambda model: setattr(model[0], "extra", 1),
}


def toy() -> nn.Sequential:
    first = nn.Linear(2, 2)
    first.tau, first.activation, first.grid, first.sizes = 1.0, torch.tanh, torch.zeros(2), [1, 2]
    first.options, first.config = {"tau": 1.0}, SimpleNamespace(scale=2.0)
    return nn.Sequential(first, nn.Dropout(0.5))


@pytest.mark.parametrize("change", CHANGES)
def test_settings_change_with(change: str) -> None:
    model = toy()
    settings = ForwardSettings(model)
    assert settings.hold() and settings.changed() == []
    CHANGES[change](model)
    assert not settings.hold() and settings.changed()


@pytest.mark.parametrize("change", ["a number", "in a list", "in a dictionary", "in a configuration"])
def test_settings_are_put_back(change: str) -> None:
    model = toy()
    settings = ForwardSettings(model)
    CHANGES[change](model)
    settings.put_back()
    assert settings.hold()


def test_settings_hold_where_equal_values_replace_others() -> None:
    model = toy()
    settings = ForwardSettings(model)
    model[0].tau, model[0].options = float("1.0"), {"tau": float("1.0")}
    assert settings.hold()
    assert settings.walk.same()  # compared by identity again


def test_settings_do_without_what_forward_sets() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].tau = 1.0
    settings = ForwardSettings(model, without={"0.tau"})
    model[0].tau = 2.0
    assert settings.hold()


def test_settings_are_taken_anew_without_what_is_left_out() -> None:
    model = toy()
    settings = ForwardSettings(model)
    model[0].tau = 2.0
    settings.leave_out(settings.changed())
    model[0].tau = 3.0
    assert settings.hold()


def test_settings_do_without_what_is_left_out_of_those_outside() -> None:
    namespace = {"SCALE": 1.0}
    outside = Outside((OutsideName("the global SCALE", namespace, "SCALE"),))
    settings = ForwardSettings(nn.Linear(2, 2), outside)
    settings.leave_out(["the global SCALE"])
    namespace["SCALE"] = 2.0
    assert settings.hold() and settings.changed() == []


def test_a_method_of_the_model_in_an_attribute_has_none_of_what_forward_sets() -> None:
    """As `self.step = self.step_by_subtraction` in a model whose forward sets its state."""

    class Neuron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.rate, self.step = torch.zeros(2), 1.0, self.forward

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = x
            return self.rate * self.state

    model = nn.Sequential(Neuron(), nn.Tanh())
    settings = ForwardSettings(model, Outside(names=frozenset({"state", "step", "rate"})), {"0.state"})
    model[0].state = torch.ones(2)
    assert settings.hold()
    model[0].rate = 2.0
    assert settings.changed() == ["0.rate"]
    model[0].rate, model[0].step = 1.0, model[1].forward
    assert settings.changed() == ["0.step"]


def test_a_weight_that_a_hook_of_torch_computes_is_no_setting() -> None:
    model = torch.nn.utils.spectral_norm(nn.Linear(2, 2))
    settings = ForwardSettings(model)
    model(torch.ones(1, 2))
    assert settings.hold()


def test_a_function_of_a_class_of_torch_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ForwardSettings(nn.Linear(2, 2))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert not settings.hold()


def test_what_runs_around_a_graph_is_no_setting_of_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    settings = ForwardSettings(model, inside=True)
    model.forward = torch.tanh
    model.register_forward_hook(lambda *args: None)
    assert settings.hold()
    model[0].forward = torch.tanh
    assert not settings.hold()


def test_deep_in_an_object_only_what_forward_names_is_a_setting() -> None:
    model = nn.Linear(2, 2)
    model.trainer = SimpleNamespace(loop=SimpleNamespace(epoch=SimpleNamespace(step=1, scale=1.0)))
    settings = ForwardSettings(model, Outside(names=frozenset({"trainer", "scale"})))
    model.trainer.loop.epoch.step = 2
    assert settings.hold()
    model.trainer.loop.epoch.scale = 2.0
    assert settings.changed() == ["trainer"]


@pytest.mark.parametrize("number", [0, 1])
def test_names_outside_that_read_the_same_are_all_settings(number: int) -> None:
    """As a global of two files that have one name, or a variable of two closures that one function made."""
    namespaces = {"SCALE": 1.0}, {"SCALE": 1.0}
    label = "the global SCALE of layers.py"
    points = tuple(OutsideName(label, namespace, "SCALE") for namespace in namespaces)
    settings = ForwardSettings(nn.Linear(2, 2), Outside(points))
    namespaces[number]["SCALE"] = 2.0
    assert not settings.hold() and settings.changed() == [label]
