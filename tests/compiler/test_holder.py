"""A module that holds given objects under their names."""

from __future__ import annotations

import torch
from torch import nn

from kfac_fx.passes.graphs.edit import attribute, holder


def test_the_objects_are_the_same_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    names = ["0.weight", "1.running_mean", "1.bias"]
    held = holder({name: attribute(model, name) for name in names} | {"taps.a": (tap := nn.Identity())})
    assert all(attribute(held, name) is attribute(model, name) for name in names)
    assert attribute(held, "taps.a") is tap
    assert [name for name, _ in held.named_parameters()] == ["0.weight", "1.bias"]
    assert [name for name, _ in held.named_buffers()] == ["1.running_mean"]


def test_a_module_that_is_held_whole_stays_as_it_is() -> None:
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("mask", torch.ones(3), persistent=False)
    held = holder({"norm": norm, "norm.mask": norm.mask, "norm.weight": norm.weight})
    assert attribute(held, "norm") is norm
    assert "mask" not in norm.state_dict()
