"""Weights of the terms of a loss that change during a training."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.losses import Categorical, Normal

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
CLASSES, VALUES = X[:, :3].argmax(1), X[:, 3:5].sin()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.classes = nn.Linear(16, 3)
        self.values = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.classes(hidden), self.values(hidden)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first", [0.0, 0.5])
@pytest.mark.parametrize("example_inputs", [None, (X,)])
@pytest.mark.parametrize("options", [{}, {"lr": 0.05, "damping": 0.1}, {"estimation_mode": "empirical"}])
def test_a_term_may_leave_the_list_while_its_weight_is_zero(
    options: dict[str, Any], example_inputs: Any, first: float
) -> None:
    torch.manual_seed(0)
    weight = first
    net = kfac_fx.compile(
        Heads(),
        example_inputs,
        loss=lambda outputs: [Categorical(outputs[0])] + [(weight, Normal(outputs[1]))] * (weight > 0),
    )
    opt = kfac_fx.KFAC(net, **options)
    head = net.get_parameter("values.weight")

    def trained(steps: int) -> tuple[float, float, bool]:
        """The two terms behind the steps, and whether the second head moved."""
        before = head.detach().clone()
        for _ in range(steps):
            opt.zero_grad()
            classes, values = net(X)
            of_classes, of_values = F.cross_entropy(classes, CLASSES), (values - VALUES).square().sum(1).mean()
            (of_classes + weight * of_values if weight else of_classes).backward()
            opt.step()
        return of_classes.item(), of_values.item(), not torch.equal(head, before)

    begin = trained(10)
    weight = 0.5 - first
    middle = trained(10)
    weight = first
    end = trained(10)
    assert (begin[2], middle[2], end[2]) == (first > 0, first == 0, first > 0)
    assert end[0] < begin[0] < 1.1, "the term that stays falls through all three parts"
    assert min(begin[1], middle[1]) < 0.6 * max(begin[1], middle[1]), "and the other one while it is in the list"


class Poisson(nn.Module):
    """u'' = -π² sin(πx) between 0 and 1, where u is 0 at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return curvature + math.pi**2 * torch.sin(math.pi * x), self.u(ends)


def trained_with_weight(every: int, steps: int = 200) -> tuple[float, int]:
    """The loss behind the steps, and how many of them were exact. The weight of the ends grows every so many steps."""
    torch.manual_seed(1)
    model, weight = Poisson().double(), 1.0
    points = torch.rand(100, 1).double(), torch.tensor([[0.0], [1.0]]).double()
    net = kfac_fx.compile(model, points, loss=lambda found: [Normal(found[0]), (weight, Normal(found[1]))])
    opt = kfac_fx.KFAC(net)
    for step in range(steps):
        weight = 1 + 9 * (step // every * every) / steps
        opt.zero_grad()
        inside, ends = net(*points)
        loss = inside.square().mean() + weight * ends.square().mean()
        loss.backward()
        opt.step()
    exact = re.search(r"(\d+) steps minimized the exact quadratic model", str(net.report))
    return loss.item(), int(exact[1]) if exact else 0


@pytest.mark.slow
def test_a_weight_that_changes_at_every_step_has_few_exact_steps_and_a_higher_loss() -> None:
    """The batch has another loss at every step, and the page on equations says so."""
    (loss, exact), (rarely_changed, often_exact) = trained_with_weight(1), trained_with_weight(50)
    assert exact < often_exact / 2 and loss > 3 * rarely_changed
