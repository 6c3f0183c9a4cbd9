"""Which parameters are trained, were trained, and never were."""

from __future__ import annotations

import pytest
from torch import nn

from kfac_fx.recording.model_checks import Trained


def test_parameters_are_registered_once_they_were_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].requires_grad_(False)
    trained = Trained(model)
    assert trained.any_now and not trained.unfrozen and list(trained.registered) == ["0.weight"]
    model[0].requires_grad_(False)
    assert not trained.any_now and list(trained.registered) == ["0.weight"]
    model[1].requires_grad_(True)
    assert trained.any_now and trained.unfrozen and trained.take_unfrozen() == ["1.weight"]
    assert not trained.unfrozen and not trained.dormant and list(trained.registered) == ["0.weight", "1.weight"]


def test_captures_see_what_was_trained_as_trained() -> None:
    model = nn.Linear(2, 2)
    trained = Trained(model)
    model.bias.requires_grad_(False)
    with pytest.raises(ZeroDivisionError), trained.in_captures():
        assert model.bias.requires_grad
        1 / 0  # noqa: B018
    assert model.weight.requires_grad and not model.bias.requires_grad
