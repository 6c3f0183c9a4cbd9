"""One row for every argument of another kind: the call, the kind of the error, and what it says to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import ApproximationError, LossError, RegistrationError, UntraceableError, losses
from kfac_fx.passes.errors import LinkError

X = torch.randn(4, 3)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.name = nn.ModuleDict({name: nn.Linear(3, 3)}), name

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner[self.name](x)
        return y


class OfLoss(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x), y)


def compiled(model: nn.Module = MODEL, **options: Any) -> Any:
    return kfac_fx.compile(model, (X,), **({"loss": "categorical"} | options))


def recorded(loss: Any, **options: Any) -> Any:
    return compiled(loss=loss).record((X,), {}, **options)


ROWS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "approximations, a name": (
        lambda: compiled(approximations="diagonal"), ApproximationError,
        r"approximations takes \{name .*, as in approximations=\{\"\*\": \"diagonal\"\}, and got 'diagonal'",
    ),
    "approximations of a module": (
        lambda: compiled(approximations={MODEL[0]: "diagonal"}), ApproximationError, "write '0' for a Linear",
    ),
    "approximations of a parameter": (
        lambda: compiled(approximations={MODEL[0].weight: "diagonal"}), ApproximationError,
        r"write '0.weight' for a tensor of shape \[4, 3\]",
    ),
    "linked parameters": (
        lambda: compiled(linked=[(MODEL[0].weight, MODEL[0].bias)]), LinkError,
        r"linked takes groups of names: write '0.weight' for .*; write '0.bias' for a tensor of shape \[4\]",
    ),
    "linked, of another model": (lambda: compiled(linked=[(X, "0.bias")]), LinkError, r"shape \[4, 3\] is none"),
    "variables": (
        lambda: kfac_fx.FisherEstimator(compiled(), variables=list(MODEL.parameters())), RegistrationError,
        "variables takes names of parameters: write '0.weight'",
    ),
    "an estimator of a plain model": (
        lambda: kfac_fx.FisherEstimator(MODEL),  # type: ignore[arg-type]
        TypeError, "takes a compiled module, and got a Sequential: write net = ",
    ),
    **{
        f"dense_limit={limit!r}": (lambda limit=limit: compiled(dense_limit=limit), RegistrationError, "at least 1")
        for limit in (-1, 0, math.nan, "a", 2.5, True)
    },
    "a mask that is a tensor": (
        lambda: compiled(padding_mask=torch.ones(4, 3)), TypeError,
        "padding_mask is a Tensor; it must be the name of an argument of forward, or a function of what forward takes",
    ),
    "a spectrum without its net": (
        lambda: kfac_fx.load_spectrum("folder"),  # type: ignore[call-arg, arg-type]
        TypeError, r"load_spectrum needs folder: write load_spectrum\(net, folder=\.\.\.\)",
    ),
    "a batch in place of example inputs": (
        lambda: kfac_fx.compile(MODEL, {"x": X}),  # type: ignore[arg-type]
        TypeError, r"write example_kwargs=\{'x': x\} for arguments by name, and \(batch,\) for one argument that is a",
    ),
    "a class of two outputs": (
        lambda: compiled(loss=losses.NormalMeanVariance), LossError, r"NormalMeanVariance\(outputs\[0\], outputs\[1\]",
    ),
    "a coefficient of two numbers": (
        lambda: recorded(lambda o: (torch.ones(2), losses.Normal(o))), LossError, "a coefficient is one number for all",
    ),
    "an infinite coefficient": (
        lambda: recorded(lambda o: (math.inf, losses.Normal(o))), LossError, "inf; it must be positive and finite",
    ),
    "a loss by name of a model that returns its loss": (
        lambda: kfac_fx.compile(OfLoss(), (X, torch.arange(4) % 3), loss="normal").record(
            (X, torch.arange(4) % 3), {}
        ),
        LossError, r"returns one number, as a loss is: let .* as in loss=lambda outputs: .*Normal\(outputs\[1\]\)",
    ),
    "no losses": (lambda: recorded(lambda o: []), LossError, "returned no loss; return at least one"),
    "an infinite variance": (lambda: losses.Normal(X, var=math.inf), LossError, "it must be a positive float"),
    **{
        f"a module named {name!r}": (lambda name=name: compiled(Named(name)), UntraceableError, "Rename the modules")
        for name in ('a"b', "a'b", "a\\b", "a\nb", 'x", None) or print("executed") or getattr(self, "x')
    },
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_the_error_says_what_to_write(row: str) -> None:
    call, kind, words = ROWS[row]
    with pytest.raises(kind, match=words):
        call()


def test_targets_of_numpy_are_told_to_be_tensors() -> None:
    loss = losses.Categorical(X, targets=np.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(LossError, match=r"targets are a ndarray; write torch.as_tensor\(targets\)"):
        loss.evaluate()


def test_escapes_in_names_are_shown() -> None:
    report = compiled(Named("a\x1b[31m")).report
    assert "\x1b" not in report.to_json()
    for text in (str(report), report.to_html(), report.to_dot()):
        assert "\x1b" not in text and "\\x1b[31m" in text
