"""The modules and parameters of a model, looked at again."""

from __future__ import annotations

import pytest
from torch import nn

from kfac_fx import ModelChangedError
from kfac_fx.checks.unchanged import Structure


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
        "3 parameters or modules were replaced, added or removed after kfac_fx.compile: 1.0.weight, 1.0.bias, new.",
        "The factors and the optimizer still hold the old ones. Compile again, or change values in place with "
        "parameter.data.copy_(...) or load_state_dict.",
    ]
