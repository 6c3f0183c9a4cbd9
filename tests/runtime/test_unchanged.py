"""The modules and parameters of a model, looked at again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kfac_fx import ModelChangedError
from kfac_fx.recording.model_checks import Structure


def test_what_stays_is_no_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    structure = Structure(model, lambda: None)
    model.double().eval().requires_grad_(False)
    model[1].reset_running_stats()
    structure.check()


def test_every_name_that_changed_is_in_the_text() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    structure = Structure(model, lambda: None)
    model[1][0] = nn.Linear(2, 2, bias=False)
    model.add_module("new", nn.Tanh())
    with pytest.raises(ModelChangedError) as failure:
        structure.check()
    assert str(failure.value).splitlines() == [
        "3 parameters or modules were replaced, added or removed after kfac_fx.compile: "
        "'1.0.weight', '1.0.bias', 'new'.",
        "The factors and the optimizer still hold the old ones. Compile again, or change values in place with "
        "parameter.data.copy_(...) or load_state_dict.",
    ]


def test_only_parameters_that_were_swapped_for_shards_are_emptied() -> None:
    model = nn.Linear(2, 2)
    structure, before, bias = Structure(model, lambda: None), model.weight, model.bias.detach().clone()
    before.grad = torch.ones(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2))
    structure.follow_shards()
    assert before.isnan().all() and before.grad is None and before.shape == (2, 2)
    assert model.weight.eq(1).all() and torch.equal(model.bias, bias)
    structure.check()
