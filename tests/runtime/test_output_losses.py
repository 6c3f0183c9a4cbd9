"""Recording models whose forward computes the loss, and models without any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx import LossError
from kfac_fx.losses import Normal
from kfac_fx.losses.declared import likelihood
from kfac_fx.losses.distributions import DISTRIBUTIONS
from kfac_fx.passes.torch_losses import BY_NAME
from kfac_fx.recording.output_losses import OutputLosses
from tests.runtime.collections_of_toys import towers
from tests.runtime.recorded_by_hand import Words, by_hand, mlp, recorder, same
from tests.tables import pairs


class LossInside(nn.Module):
    def __init__(self, kind: str, reduction: str = "mean") -> None:
        super().__init__()
        self.body, self.kind, self.reduction = mlp(), kind, reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(x)
        if self.kind == "sequence":
            return F.cross_entropy(out.transpose(1, 2), y, reduction=self.reduction)
        losses = {"class": F.cross_entropy, "square": F.mse_loss, "binary": F.binary_cross_entropy_with_logits}
        return losses[self.kind](out, y, reduction=self.reduction)


def targets_for(kind: str, x: Tensor) -> Tensor:
    if kind in ("class", "sequence"):
        return torch.randint(3, x.shape[:-1])
    return torch.rand(*x.shape[:-1], 3)


CASES_INSIDE = {"class": (6, 6), "sequence": (6 * 5, 6 * 5), "square": (6, 6 * 3), "binary": (6, 6 * 3)}


@pairs(("reduction", ["mean", "sum"]), ("kind", list(CASES_INSIDE)))
def test_a_loss_in_forward_has_its_own_targets_and_scale(kind: str, reduction: str) -> None:
    """The Fisher is that of `cases` times the mean: its mean over cases is that of the loss as it is written."""
    x = torch.randn(6, 5, 4) if kind == "sequence" else torch.randn(6, 4)
    y = targets_for(kind, x)
    model = LossInside(kind, reduction)
    cases, terms = CASES_INSIDE[kind]
    moments = recorder(model, x, y).record((x, y), mode="empirical")
    scale = cases if reduction == "mean" else 1
    expected = by_hand(model, (x, y), lambda loss: loss * scale)
    assert moments.cases == cases
    same(moments, expected)


def test_coefficients_of_losses_found_in_forward() -> None:
    out, normal, categorical = torch.randn(6, 3), BY_NAME["mse_loss"], BY_NAME["cross_entropy"]
    assert likelihood(normal, "mean", out)[0] == 1 / 3
    assert likelihood(normal, "sum", out)[0] == likelihood(categorical, "mean", out)[0] == 1
    assert likelihood(categorical, "mean", torch.randn(6, 3, 5))[1].cases == 30


def test_targets_that_forward_computes_from_inputs() -> None:
    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = Words()

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.words(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten() % 3)

    model, ids = Next(), torch.randint(7, (6, 5))
    moments = recorder(model, ids).record((ids,), mode="empirical")
    assert moments.cases == 24
    expected = by_hand(model, (ids,), lambda loss: 24 * loss)
    same(moments, expected)


def test_targets_that_forward_computes_from_parameters_must_be_given() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.student(x), self.teacher(x).detach())

    x = torch.randn(6, 4)
    given = recorder(Distilled(), x)
    with pytest.raises(LossError, match="the targets of the loss at teacher_weight are computed from parameters; pass"):
        given.record((x,), mode="empirical")
    given.record((x,))
    assert given.record((x,), mode="empirical", targets=torch.randn(6, 3)).cases == 6


def test_without_a_loss_there_is_no_fisher() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(LossError) as failure:
        recorder(mlp(), x).record((x,))
    reason, remedy = str(failure.value).splitlines()
    assert reason == "no loss is known: the Fisher is that of an output distribution."
    assert remedy.startswith('Name it with compile(..., loss="categorical"), "normal", "multi_bernoulli"')
    assert " or a function of the model's outputs, or let forward compute cross_entropy, mse_loss" in remedy
    assert all(f'"{name}"' in remedy for name in DISTRIBUTIONS) and all(name in remedy for name in BY_NAME)


def unattached(**emitted: Any) -> OutputLosses:
    return OutputLosses(cast(Any, SimpleNamespace(loss_sites=(), **emitted)), None)


def test_every_loss_is_a_mean_over_its_own_cases() -> None:
    """So that the sum over the cases of the first one is that many times the mean loss."""
    losses = [(1.0, Normal(torch.zeros(6, 2))), (0.5, Normal(torch.zeros(2, 2))), (3.0, Normal(torch.zeros(6, 1)))]
    assert [coefficient for coefficient, _ in unattached().summed(losses)[1]] == [1.0, 1.5, 3.0]


def test_probabilities_of_classes_are_no_targets_that_are_ignored() -> None:
    losses = unattached(target_values=lambda site, values: site)
    site = cast(Any, SimpleNamespace(ignored=-100, targets=None, class_weights=None))
    assert losses.not_ignored(site, None, torch.rand(4, 3)) is None
    kept = losses.not_ignored(site, None, torch.tensor([1, -100, 0]))
    assert kept is not None and kept.tolist() == [True, False, True]


def test_of_two_losses_on_the_same_towers_every_tower_counts_once() -> None:
    lc = towers()
    for name in ("first", "second"):
        for tower, output in enumerate(("add", "add_1")):
            lc.register_categorical_predictive_distribution(output, name=name, reuse=tower > 0)
    losses = lc.registered_losses
    assert losses.tower_cases((torch.randn(6, 4), torch.randn(2, 4)) * 2) == [6, 2]
