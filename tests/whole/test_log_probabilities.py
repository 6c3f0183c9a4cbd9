"""Models that return log-probabilities, and are trained with `F.nll_loss`: they train as those that return logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.losses import Categorical


class Classifier(nn.Module):
    """It has rows, or pixels with the classes on axis 1."""

    def __init__(self, pixels: bool, logarithms: bool) -> None:
        super().__init__()
        self.axis, self.logarithms = 1 if pixels else -1, logarithms
        first, last = (nn.Conv2d(2, 4, 1), nn.Conv2d(4, 3, 1)) if pixels else (nn.Linear(5, 4), nn.Linear(4, 3))
        self.layers = nn.Sequential(first, nn.Tanh(), last).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return F.log_softmax(logits, self.axis) if self.logarithms else logits


def trained(
    pixels: bool, logarithms: bool, loss: Any, parts: int, factor: float = 1.0
) -> tuple[list[float], list[str]]:
    """Losses, ρ and predicted changes of some steps; and the warnings."""
    torch.manual_seed(0)
    model = Classifier(pixels, logarithms)
    shape = (2, 3, 3) if pixels else (5,)
    x, y = torch.randn(12, *shape).double(), torch.randint(3, (12, *shape[1:]))
    net = kfac_fx.compile(model, (x,), loss=loss)
    optimizer = kfac_fx.KFAC(net, seed=0)
    numbers = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(7):
            optimizer.zero_grad()
            for part, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                value = (F.nll_loss if logarithms else F.cross_entropy)(net(part), targets) * factor / parts
                value.backward()
                numbers.append(value.item())
            optimizer.step()
            numbers += [float(optimizer.rho), float(optimizer.predicted_change)]
    return numbers, [str(warning.message) for warning in told]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("pixels", "loss"),
    [(False, "categorical"), (False, "cross_entropy"), (False, Categorical), (True, "cross_entropy")],
)
def test_they_train_as_logits_do(pixels: bool, loss: Any, parts: int) -> None:
    """The gradient of `nll_loss` at its inputs is another one, which is equal in front of the log_softmax."""
    (of_logits, _), (numbers, told) = (trained(pixels, logarithms, loss, parts) for logarithms in (False, True))
    assert numbers == pytest.approx(of_logits, rel=1e-6) and told == []


def test_a_factor_of_their_loss_is_told() -> None:
    _, (text,) = trained(False, True, "categorical", 1, factor=2.0)
    assert text.startswith("the trained loss is 2 times the mean of the registered Categorical loss over its 12 cases")


def test_probabilities_are_no_logits() -> None:
    """Another function of the outputs still fits no targets."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 5), torch.randint(3, (12,))
    with pytest.warns(UserWarning, match="the registered Categorical loss takes logits"):
        net = kfac_fx.compile(nn.Sequential(nn.Linear(5, 3), nn.Softmax(-1)), (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net)
    F.nll_loss(net(x).log(), y).backward()
    with pytest.warns(kfac_fx.LossScaleWarning, match="fits no targets of the registered Categorical loss"):
        optimizer.step()
