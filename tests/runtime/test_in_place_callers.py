"""The objects whose methods called: a Trainer with the compiled module is told to compile in place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kfac_fx.optim.step import callers, scale_of_caller, warn_of_trainer


class Calls:
    """Anything with a method that calls."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def step(self, function: Callable[[], Any]) -> Any:
        return function()


class Pretrained(nn.Linear):
    def save_pretrained(self) -> None: ...


def trainer_class() -> type[Calls]:
    """A subclass of a class of the name of Hugging Face's Trainer."""
    trainer = type("Trainer", (Calls,), {"__module__": "transformers.trainer"})
    return type("OwnTrainer", (trainer,), {})


def test_the_nearest_caller_comes_first() -> None:
    near, far = Calls(), Calls()
    found = far.step(lambda: near.step(lambda: list(callers())))
    assert found[:2] == [near, far]


def test_the_scale_is_that_of_the_scaler_that_called() -> None:
    class Scaler(torch.amp.GradScaler):
        def step(self, function: Any) -> Any:
            return function()

        def get_scale(self) -> float:
            return 512.0

    assert scale_of_caller() == 1.0
    assert Calls().step(lambda: Scaler("cpu", enabled=False).step(scale_of_caller)) == 512.0


def test_a_trainer_with_the_compiled_module_is_told_what_to_write() -> None:
    model = Pretrained(2, 2)
    net = nn.Sequential(model)
    text = (
        "Trainer has the compiled module instead of Pretrained. Checkpoints of it have no configuration, and "
        "safetensors refuses to save tied weights. Give Trainer the model itself, compiled in place: "
        "net = kfac_fx.compile(model, ..., in_place=True), and Trainer(model, ...)."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        trainer_class()(net).step(lambda: warn_of_trainer(net, model))


@pytest.mark.parametrize("case", ["the model", "no trainer", "not pretrained"])
def test_nothing_else_is_told(case: str) -> None:
    model = nn.Linear(2, 2) if case == "not pretrained" else Pretrained(2, 2)
    net = nn.Sequential(model)
    caller = Calls(net) if case == "no trainer" else trainer_class()(model if case == "the model" else net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caller.step(lambda: warn_of_trainer(net, model))
