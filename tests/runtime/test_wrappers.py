"""Models in the wrappers of data parallelism and torch.compile, and models that have no Python any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from tests.whole.training import differences, step

X = torch.randn(6, 4)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3))


def optimized(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, optimized, lambda model: nn.DataParallel(optimized(model))])
def test_a_wrapper_is_looked_through_and_trained_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    wrapper = wrap(model)
    calls: list[Any] = []
    wrapper.register_forward_pre_hook(lambda module, args: calls.append(args))
    net = kfac_fx.compile(wrapper, (X,), loss="categorical")
    assert net.model is model
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert [one.parameters for one in net.registrations] == [("0.weight", "0.bias"), ("3.weight", "3.bias")]
    net.record((X,), {})
    assert calls == []
    assert differences(step(twin, lambda: twin(X)), step(model, lambda: net(X))) == []
    assert len(calls) == 1
    assert not net.eval().training and not wrapper.training and not model.training


def test_a_copy_keeps_the_wrapper() -> None:
    net = copy.deepcopy(kfac_fx.compile(nn.DataParallel(mlp()), (X,), loss="categorical"))
    assert isinstance(net._wrapper, nn.DataParallel) and net._wrapper.module is net.model


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = torch.jit.script(mlp())

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused_by_name() -> None:
    for model, names in ((torch.jit.script(mlp()), "the model itself"), (Partly(), "last")):
        with pytest.raises(kfac_fx.UntraceableError) as failure:
            kfac_fx.compile(model, (X,))
        first, advice = str(failure.value).splitlines()
        assert first == f"a TorchScript module, whose Python is gone, cannot be captured: {names}."
        assert advice.startswith("Hand kfac_fx.compile the module that torch.jit.script or torch.jit.trace was given")
