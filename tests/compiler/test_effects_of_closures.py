"""A closure that is called to measure leaves every tensor as it was, its own included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kfac_fx
from kfac_fx.passes.tracing.effects import WritesUndone


def test_what_was_there_before_is_restored() -> None:
    x = torch.arange(12.0).view(3, 4)
    rows, column, total, out = x[:2], x[:, 1], torch.zeros(()), torch.zeros(4)
    count, weight = torch.zeros((), dtype=torch.int64), torch.ones(4, requires_grad=True)
    tensors = (x, total, out, count, weight)
    before = [tensor.detach().clone() for tensor in tensors]
    with WritesUndone(), torch.no_grad():
        rows.mul_(2.0)
        column[1:] = 7.0
        x += 1
        total.add_(x.sum())
        torch.add(x[0], 1, out=out)
        count += 1
        torch._foreach_lerp_([weight], [torch.zeros(4)], 0.5)
        weight.data = weight + 1
    for tensor, values in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)


def test_what_is_made_inside_is_not_copied() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with WritesUndone() as undone:
        y = F.relu_(F.linear(x, weight))
        y.add_(1).view(-1).mul_(2)
    assert not undone.before and bool((y >= 2).all())


def test_an_error_restores_too() -> None:
    x = torch.zeros(2)
    with pytest.raises(KeyError), WritesUndone():
        x.add_(1)
        raise KeyError
    assert not x.any()


@pytest.mark.parametrize("kind", ["tensors", "averaged model"])
def test_a_closure_that_averages_parameters_averages_once_a_step(kind: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    net = kfac_fx.compile(nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), loss="categorical")
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1, adapt_damping=True, damping_adaptation_interval=2)
    averaged: Any = AveragedModel(net.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    means = [parameter.detach().clone() for parameter in net.parameters()]
    expected, calls = [mean.clone() for mean in means], 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        averaged.update_parameters(net.model)
        for mean, parameter in zip(means, net.parameters(), strict=True):
            mean.mul_(0.5).add_(parameter.detach(), alpha=0.5)
        return loss

    for _ in range(4):
        for mean, parameter in zip(expected, net.parameters(), strict=True):
            mean.mul_(0.5).add_(parameter.detach(), alpha=0.5)
        opt.step(closure)
    assert calls > 4  # some calls measured
    if kind == "tensors":
        torch.testing.assert_close(means, expected, rtol=0, atol=0)
    else:
        assert averaged.n_averaged == 4
