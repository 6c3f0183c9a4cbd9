"""Changes that must not matter for statistics do not: products with factors and inverses, scores, and variances of
outputs are those of the plain model, in float64 up to rounding.

Neutral are the order of examples, micro-batches, wrappers, the order of modules, checkpoints, Python that divides the
model, and so on. The model and the mode are drawn by a seed.
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfac_fx
from kfac_fx.passes.torch_private import parameters_of, submodules_of
from tests.tables import every
from tests.whole.test_neutral_changes import CLASSES, MODELS, Kind

CASES, DRAWS_OF_SLOW = 6, 20
KINDS = [name for name in MODELS if name not in ("own loss", "two heads", "tokens", "parametrized")]
# Samples of another order are others.
MODES = ("exact", "empirical")
PERMUTED = torch.tensor([3, 0, 5, 1, 4, 2])
Facts = dict[str, Tensor]


@dataclass(frozen=True)
class Drawn:
    """A model in evaluation mode, a mode of estimation, and options of `compile`."""

    kind: Kind
    mode: str
    options: tuple[tuple[str, Any], ...]

    @staticmethod
    def by(seed: int) -> Drawn:
        draw = random.Random(seed)
        options = draw.choice([{}, {}, {"dense_limit": 4}, {"approximations": {"*": "diagonal"}}])
        return Drawn(MODELS[draw.choice(KINDS)], draw.choice(MODES), tuple(options.items()))

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        model = self.kind.make().to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # ones and zeros would hide mistakes
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(CASES, *self.kind.shape, generator=generator, dtype=torch.float64)
        return x, torch.randint(CLASSES, (CASES,), generator=generator)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Divided(Wrapped):
    """Python looks at the outputs."""

    def forward(self, x: Tensor) -> Any:
        outputs = self.inner(x)
        return 2 * outputs if outputs.sum() > 1e9 else outputs


class Checkpointed(Wrapped):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class RunTwice(Wrapped):
    """A teacher without gradients runs in front, with the same weights."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            taught = self.inner(x)
        return self.inner(x) + 0 * taught


def backwards(model: nn.Module) -> nn.Module:
    """The same model, whose modules and parameters are registered in the opposite order."""
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            continue  # the order is what it computes
        for registered in (submodules_of(module), parameters_of(module)):
            for name in [*registered][-2::-1]:
                registered[name] = registered.pop(name)  # type: ignore[assignment]
    return model


def named(name: str) -> str:
    return name.replace("inner.", "")


def facts_of(
    drawn: Drawn,
    model: nn.Module,
    parts: int = 1,
    order: Tensor | None = None,
    saved: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Facts:
    """Everything that is compared. order: of the examples; the facts of single examples are put back."""
    x, y = drawn.batch()
    x = x.to(dtype)
    if order is not None:
        x, y = x[order], y[order]
    net = kfac_fx.compile(model, (x,), loss="categorical", **dict(drawn.options), **options)
    generator = torch.Generator().manual_seed(2)
    vectors = {named(name): value for name, value in drawn.model().named_parameters()}
    draws = {n: torch.randn(v.shape, generator=generator, dtype=torch.float64) for n, v in vectors.items()}
    vector = {name: draws[named(name)].to(value.dtype) for name, value in net.named_parameters()}

    def new_estimator() -> kfac_fx.FisherEstimator:
        return kfac_fx.FisherEstimator(net, estimation_mode=drawn.mode, damping=0.1)

    estimator = new_estimator()
    batches = [*zip(x.chunk(parts), y.chunk(parts), strict=True)]
    for inputs, targets in batches:
        estimator.update_covariances(inputs, targets=targets if drawn.mode == "empirical" else None, fold=False)
    estimator.fold()
    if saved:
        file = io.BytesIO()
        torch.save(estimator.state_dict(), file)
        file.seek(0)
        estimator = new_estimator()
        estimator.load_state_dict(torch.load(file, weights_only=True))
    estimator.update_inverses()
    facts = {f"F v, {named(name)}": value for name, value in estimator.multiply(vector).items()}
    facts |= {f"F⁻¹ v, {named(name)}": value for name, value in estimator.multiply_inverse(vector).items()}
    data = [kfac_fx.Batch(inputs, targets=targets) for inputs, targets in batches]
    spectrum = kfac_fx.fit_spectrum(net, data, case=None, mode=drawn.mode).at(damping=0.1)
    back = torch.arange(CASES) if order is None else order.argsort()
    whole = kfac_fx.Batch(x[back], targets=y[back])
    facts["log det"] = spectrum.log_determinant()
    facts["self-scores"] = spectrum.self_scores(whole)
    facts["variances"] = spectrum.functional_variance(whole)
    facts["scores"] = spectrum.precondition(whole).scores(whole)
    return facts


CHANGES: dict[str, Callable[[Drawn], Facts]] = {
    "the order of examples": lambda drawn: facts_of(drawn, drawn.model(), order=PERMUTED),
    "micro-batches": lambda drawn: facts_of(drawn, drawn.model(), parts=3),
    "single examples": lambda drawn: facts_of(drawn, drawn.model(), parts=CASES),
    "the order of modules": lambda drawn: facts_of(drawn, backwards(drawn.model())),
    "a wrapper": lambda drawn: facts_of(drawn, Wrapped(drawn.model())),
    "in place": lambda drawn: facts_of(drawn, drawn.model(), in_place=True),
    "saved and loaded": lambda drawn: facts_of(drawn, drawn.model(), saved=True),
    "Python around": lambda drawn: facts_of(drawn, Divided(drawn.model())),
    "a checkpoint": lambda drawn: facts_of(drawn, Checkpointed(drawn.model())),
    "Python around a checkpoint": lambda drawn: facts_of(drawn, Divided(Checkpointed(drawn.model()))),
    "a run without gradients": lambda drawn: facts_of(drawn, RunTwice(drawn.model())),
}


@cache
def plain(seed: int) -> Facts:
    drawn = Drawn.by(seed)
    return facts_of(drawn, drawn.model())


def check(change: str, seed: int) -> None:
    drawn, expected = Drawn.by(seed), plain(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of parts that are recomputed
        found = CHANGES[change](drawn)
    assert found.keys() == expected.keys(), drawn
    for name, value in expected.items():
        text = f"{name} of {drawn}"
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-8, msg=lambda m, text=text: f"{text}: {m}")


@pytest.mark.parametrize("change", every(2, CHANGES))
def test_a_neutral_change_changes_no_statistic(change: str) -> None:
    check(change, 3 * list(CHANGES).index(change) % 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + DRAWS_OF_SLOW))
def test_no_neutral_change_changes_a_statistic(seed: int) -> None:
    for change in CHANGES:
        check(change, seed)
