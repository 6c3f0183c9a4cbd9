"""The factors of a weight that is tied to its transpose, in every mode: the transposed use has its gradient rows in A
and its rows in G, where modes that scale or repeat gradients must not take them for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx

CASES, CLASSES = 8, 4
KEY = ("encoder.weight",)
Y = torch.arange(CASES) % CLASSES


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = nn.Linear(CLASSES, 3, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        code = torch.tanh(self.middle(torch.tanh(self.encoder(x))))
        return F.linear(code, self.encoder.weight.t())


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(CASES, CLASSES, dtype=torch.float64)


def compiled(x: Tensor) -> Any:
    torch.manual_seed(1)
    return kfac_fx.compile(Tied().double(), (x,), loss="categorical")


def expected(model: Tied, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(A, G) from gradients of single cases. weights: [cases, classes], of the labels."""
    hidden = model.encoder(x)
    code = torch.tanh(model.middle(torch.tanh(hidden)))
    outputs = code @ model.encoder.weight
    a, g = x.mT @ x, code.mT @ code
    for label in range(CLASSES):
        loss = F.cross_entropy(outputs, torch.full((CASES,), label), reduction="sum")
        at_hidden, at_outputs = torch.autograd.grad(loss, [hidden, outputs], retain_graph=True)
        weight = weights[:, label : label + 1]
        a, g = a + (at_outputs * weight).mT @ at_outputs, g + (at_hidden * weight).mT @ at_hidden
    return (a / (2 * CASES)).detach(), (g / (2 * CASES)).detach()


def factors(est: kfac_fx.FisherEstimator) -> tuple[Tensor, Tensor]:
    of_block = est.blocks[KEY].factors
    return of_block["A"].value[0], of_block["G"].value[0]


@pytest.mark.parametrize("memory", [None, 1])
def test_the_exact_fisher_sums_gradient_rows_over_its_sources(x: Tensor, memory: int | None) -> None:
    net = compiled(x)
    est = kfac_fx.FisherEstimator(net, estimation_mode="exact", memory=memory)  # 1: one source at a time
    est.update_covariances(x)
    torch.testing.assert_close(factors(est), expected(net.model, x, net(x).softmax(1).detach()))


def test_the_empirical_fisher_of_an_estimator_has_the_gradients_of_the_targets(x: Tensor) -> None:
    net = compiled(x)
    est = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    est.update_covariances(x, targets=Y)
    torch.testing.assert_close(factors(est), expected(net.model, x, F.one_hot(Y, CLASSES).double()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_training_backward_scales_gradient_rows_alone(x: Tensor, reduction: str) -> None:
    net = compiled(x)
    opt = kfac_fx.KFAC(net, lr=0.0, damping=1.0, estimation_mode="empirical", reduction=reduction)
    F.cross_entropy(net(x), Y, reduction=reduction).backward()
    opt.step()
    torch.testing.assert_close(factors(opt.estimator), expected(net.model, x, F.one_hot(Y, CLASSES).double()))


class TiedConvolutions(nn.Module):
    """The rows of both layers are patches, of other images: no single pair of factors has both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 3) / 3)

    def forward(self, x: Tensor) -> Any:
        return F.conv_transpose1d(torch.tanh(F.conv1d(x, self.weight, stride=2)), self.weight, stride=2)


def test_a_small_weight_with_two_layouts_has_the_exact_block_of_its_elements() -> None:
    torch.manual_seed(0)
    model, x, y = TiedConvolutions().double(), torch.randn(4, 2, 7).double(), torch.randn(4, 2, 7).double()
    estimator = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x,), loss="normal"), estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    (block,) = estimator.blocks.values()
    losses = [kfac_fx.losses.Normal(model(x[n : n + 1]), targets=y[n : n + 1]).evaluate() for n in range(4)]
    gradients = torch.stack([torch.autograd.grad(loss, model.weight)[0].flatten() for loss in losses])
    torch.testing.assert_close(block.full_fisher_block(), gradients.T @ gradients / 4)
