"""Whose forward hooks are whose."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import weight_norm

from kfac_fx.passes.errors import UntraceableError
from kfac_fx.passes.tracing.calls import (
    backward_hooks,
    hooked_by_user,
    refuse_users_hooks,
    without_backward_hooks,
    without_sharding_hooks,
    without_users_hooks,
)


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return 2 * output


def linear(*hooks: Any) -> nn.Linear:
    layer = nn.Linear(2, 2)
    for hook in hooks:
        layer.register_forward_hook(hook)
    return layer


def test_hooks_of_sharding_come_back_to_their_place_among_the_users() -> None:
    def gathering(*_: Any) -> None: ...

    gathering.__module__ = "torch.distributed.fsdp._fully_shard"
    layer = linear(doubled, gathering, partial(doubled))
    before = list(layer._forward_hooks.items())
    with without_sharding_hooks(nn.Sequential(layer)):
        assert list(layer._forward_hooks.items()) == [before[0], before[2]]
    assert list(layer._forward_hooks.items()) == before


@pytest.mark.parametrize("hook", [doubled, partial(doubled), lambda *_: None])
def test_hooks_of_a_user(hook: Any) -> None:
    assert hooked_by_user(linear(hook))


@pytest.mark.parametrize("layer", [linear(), spectral_norm(linear()), weight_norm(linear())])
def test_hooks_of_torch_are_no_users(layer: nn.Module) -> None:
    assert not hooked_by_user(layer)


def test_a_module_without_its_users_hooks() -> None:
    layer, x = linear(doubled), torch.ones(1, 2)
    with without_users_hooks(layer):
        plain = layer(x)
    assert torch.equal(layer(x), 2 * plain)


def test_hooks_of_torch_stay() -> None:
    layer = spectral_norm(linear())
    before = layer.weight_u.clone()
    with without_users_hooks(layer):
        layer(torch.ones(1, 2))
    assert not torch.equal(layer.weight_u, before)


def test_hooks_inside_are_refused_with_their_modules() -> None:
    model = nn.Sequential(linear(doubled), nn.Tanh(), linear(doubled))
    with pytest.raises(
        UntraceableError, match=r"^it contains forward hooks of the user, on 0, 2, which a graph would not call$"
    ):
        refuse_users_hooks(model)


def test_hooks_of_both_kinds_on_one_module_are_refused() -> None:
    with pytest.raises(
        UntraceableError, match="hooks of torch and of the user, whose order a captured graph would change"
    ):
        refuse_users_hooks(spectral_norm(linear(doubled)))


def test_backward_hooks_are_named_by_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert backward_hooks(model) == []
    model[1].register_full_backward_hook(lambda module, before, after: None)
    assert backward_hooks(model) == ["calls the backward hooks of 1"]


def test_a_model_without_its_backward_hooks() -> None:
    called: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].register_full_backward_pre_hook(lambda module, after: called.append("before"))
    model[1].register_full_backward_hook(lambda module, before, after: called.append("behind"))
    x = torch.ones(1, 2, requires_grad=True)
    with without_backward_hooks(model):
        model(x).sum().backward()
    assert not called
    model(x).sum().backward()
    assert called == ["behind", "before"]
