"""A forward that torch.compile made one function of, and that returns its loss next to its outputs: the gradient of the
loss does not pass the outputs. Checks and warnings are those of the same model in eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.tables import every, pairs


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 3)).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (6,), generator=generator)


def in_place(model: Any) -> tuple[Any, Any]:
    model.compile(backend="aot_eager")
    return kfac_fx.compile(model, batch(0), in_place=True), model


def wrapped(model: Any) -> tuple[Any, Any]:
    compiled: Any = torch.compile(model, backend="aot_eager")
    return (kfac_fx.compile(compiled, batch(0)),) * 2


Compiled = Callable[[nn.Module], tuple[Any, Any]]  # returns the net, and what is called
KINDS: dict[str, Compiled] = {
    "eager": lambda model: (kfac_fx.compile(model, batch(0)),) * 2,
    "a backend": lambda model: (kfac_fx.compile(model, batch(0), backend="aot_eager"),) * 2,
    "torch.compile of the model": lambda model: (
        (kfac_fx.compile(torch.compile(model, backend="aot_eager"), batch(0)),) * 2
    ),
    "compiled in place": in_place,
}


@cache
def trained(
    kind: str, parts: int, factor: float, returned: bool, penalty: float = 0.0
) -> tuple[Tensor, list[str], list[str]]:
    """(the parameters after some steps, the warnings, the fallbacks).

    returned: whether the loss is that of forward. penalty: the weight of a term of the outputs.
    """
    model = Classifier()
    net, call = KINDS[kind](model)
    optimizer = kfac_fx.KFAC(net, seed=0, damping_adaptation_interval=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(6):
            optimizer.zero_grad()
            for x, labels in zip(*(tensor.chunk(parts) for tensor in batch(number)), strict=True):
                outputs = call(x, labels)
                loss = outputs["loss"] if returned else F.cross_entropy(outputs["logits"], labels)
                total = factor * loss + penalty * outputs["logits"].square().mean() if penalty else factor * loss
                (total / parts).backward()
            optimizer.step()
    texts = [str(warning.message) for warning in told]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), texts, optimizer.fallbacks()


COMPILED = [kind for kind in KINDS if kind != "eager"]


@pairs(("kind", COMPILED), ("parts, returned", [(1, True), (2, True), (2, False)]))
def test_a_compiled_forward_trains_as_in_eager_mode(kind: str, parts: int, returned: bool) -> None:
    parameters, texts, fallbacks = trained(kind, parts, 1.0, returned)
    torch.testing.assert_close(parameters, trained("eager", parts, 1.0, returned)[0])
    assert texts == [] and fallbacks == []


@pytest.mark.parametrize("kind", every(3, COMPILED, first=1))
def test_a_term_of_the_outputs_next_to_the_loss_of_a_compiled_forward_trains_as_in_eager_mode(kind: str) -> None:
    """Gradients arrive at the loss and at the outputs, and each is a part of the whole."""
    parameters, texts, fallbacks = trained(kind, 2, 1.0, True, penalty=0.3)
    expected, of_eager, _ = trained("eager", 2, 1.0, True, penalty=0.3)
    torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
    assert texts == of_eager and fallbacks == []


@pytest.mark.parametrize("kind", every(3, KINDS))
def test_a_factor_of_the_loss_of_a_compiled_forward_is_told(kind: str) -> None:
    _, texts, _ = trained(kind, 2, 3.0, True)
    assert [text.split(";")[0] for text in texts] == [
        "the trained loss is 3 times the mean of the registered Categorical loss over its 6 cases"
    ]
