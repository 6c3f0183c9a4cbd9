"""Probabilities where a loss takes logits are told when the model is compiled, with the place and what to write."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import FisherEstimator, losses

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
CLASSES, BITS = torch.arange(6) % 4, (torch.arange(24).view(6, 4) % 3 == 0).float()


def body(*last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), *last)


def texts_of(model: nn.Module, loss: Any, *args: Tensor, trained: Callable[[Any], Tensor] | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = kfac_fx.compile(model, args or (X,), loss=loss)
        assert all(str(warning.message) in "\n".join(net.report.fallbacks()) for warning in caught)
        optimizer = kfac_fx.KFAC(net)
        if trained is not None:
            trained(net(*(args or (X,)))).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


OTHER = "F.cross_entropy. Or return F.log_softmax, and train with F.nll_loss"
BY_LOGITS = "MultiBernoulli(torch.logit(outputs, 1e-6))"
TOLD: dict[str, tuple[nn.Module, Any, str, str]] = {
    "a sigmoid": (nn.Sigmoid(), "multi_bernoulli", "MultiBernoulli", BY_LOGITS),
    "its mean": (
        nn.Sigmoid(), "bce_with_logits", "MultiBernoulli",
        "(len(torch.logit(outputs, 1e-6)) / torch.logit(outputs, 1e-6).numel(), "
        "kfac_fx.losses.MultiBernoulli(torch.logit(outputs, 1e-6)))",
    ),
    "a hard one": (nn.Hardsigmoid(), losses.MultiBernoulli, "MultiBernoulli", BY_LOGITS),
    "a softmax of bits": (nn.Softmax(-1), "multi_bernoulli", "MultiBernoulli", BY_LOGITS),
    "a softmax": (nn.Softmax(-1), "categorical", "Categorical", OTHER),
    "a function": (nn.Softmax(-1), lambda o: losses.Categorical(o), "Categorical", OTHER),
    "torch's loss": (nn.Softmax(1), "cross_entropy", "Categorical", OTHER),
}  # fmt: skip


@pytest.mark.parametrize(("last", "loss", "name", "remedy"), TOLD.values(), ids=TOLD)
def test_probabilities_that_are_registered_as_logits_are_told(
    last: nn.Module, loss: Any, name: str, remedy: str
) -> None:
    kind = "softmax" if isinstance(last, nn.Softmax) else type(last).__name__.lower()
    (text,) = texts_of(body(last), loss)
    assert text.startswith(
        f"the registered {name} loss takes logits, and the outputs [6, 4] are made probabilities by {kind} in the "
        f"module '3': return what is before the {kind}, and train with F."
    )
    assert text.endswith(f"{remedy}.")


class Inside(nn.Module):
    """Returns its loss; no single graph holds it if it is `divided`."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], divided: bool = False) -> None:
        super().__init__()
        self.body, self.loss, self.divided = body(), loss, divided

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.body(x)
        if self.divided and float(z.detach().sum()) > 1e9:
            z = -z
        return self.loss(z, y)


def bits_of_first(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(torch.sigmoid(z[:, :1]).clamp(1e-6, 1 - 1e-6).squeeze(-1), y[:, 0])


def test_those_in_forward_are_told_with_their_line() -> None:
    (text,) = texts_of(Inside(lambda z, y: F.cross_entropy(z.softmax(-1), y)), None, X, CLASSES)
    assert re.fullmatch(
        r"F.cross_entropy in forward takes logits, and its inputs \[6, 4\] are made probabilities by softmax "
        r"\(test_probabilities.py:\d+\), so it takes the softmax of a softmax: leave the softmax in front of it out.",
        text,
    )
    (text,) = texts_of(Inside(bits_of_first), None, X, BITS)
    assert text.startswith("F.binary_cross_entropy_with_logits in forward takes logits, and its inputs [6] are made")
    (text,) = texts_of(Inside(lambda z, y: F.cross_entropy(z.softmax(-1), y), divided=True), None, X, CLASSES)
    assert "its inputs [6, 4] are made probabilities by a softmax, so" in text  # Python keeps no graph of its place


RIGHT: dict[str, tuple[nn.Module, Any, Callable[[Tensor], Tensor]]] = {
    "logits": (body(), "categorical", lambda z: F.cross_entropy(z, CLASSES)),
    "a log_softmax": (body(nn.LogSoftmax(-1)), "categorical", lambda z: F.nll_loss(z, CLASSES)),
    "two log_softmax": (body(nn.LogSoftmax(-1)), "categorical", lambda z: F.cross_entropy(z, CLASSES)),
    "bits": (
        body(nn.Sigmoid()), lambda p: (1 / 4, losses.MultiBernoulli(torch.logit(p))),
        lambda p: F.binary_cross_entropy(p, BITS),
    ),
    "a squared error": (body(nn.Sigmoid()), "mse", lambda p: F.mse_loss(p, BITS)),
    "scores that a sigmoid bounds": (
        body(nn.Sigmoid()), lambda p: losses.Categorical(10 * p), lambda p: F.cross_entropy(10 * p, CLASSES)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "loss", "trained"), RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_not_told(model: nn.Module, loss: Any, trained: Callable[[Tensor], Tensor]) -> None:
    assert texts_of(model, loss, trained=trained) == []
    assert texts_of(Inside(lambda z, y: F.cross_entropy(z, y), divided=True), None, X, CLASSES) == []


def test_the_loss_that_the_warning_names_has_the_fisher_of_the_logits() -> None:
    diagonals = []
    for model, loss in (
        (body(nn.Sigmoid()), lambda outputs: losses.MultiBernoulli(torch.logit(outputs, 1e-6))),
        (body(), "multi_bernoulli"),
    ):
        estimator = FisherEstimator(kfac_fx.compile(model.double(), (X.double(),), loss=loss), estimation_mode="exact")
        estimator.update_covariances(X.double())
        diagonals.append(estimator.spectrum(damping=0.0).diagonal())
    torch.testing.assert_close(*diagonals)
