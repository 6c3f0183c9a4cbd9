"""Weights of more than 1,024 elements behind a mask or a function of every element have Kronecker blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import kfac_fx
from kfac_fx.passes.parametrizations.parts import MEAN_SQUARES

SIZE = 34  # 1,156 elements

pytestmark = pytest.mark.usefixtures("float64")


class Behind(nn.Module):
    """A linear layer whose weight is a function of a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(SIZE, SIZE) / 6), nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.function(self.weight), self.bias)


MASK = (torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) < 0.4).double()


def estimated(model: nn.Module, x: Tensor, y: Tensor) -> kfac_fx.FisherEstimator:
    estimator = kfac_fx.FisherEstimator(kfac_fx.compile(model, (x,), loss="normal"), estimation_mode="empirical")
    estimator.update_covariances(x, targets=y)
    return estimator


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda w: w * MASK,
    "transposed": lambda w: MASK * w.t(),
    "triangle": lambda w: w.tril(),
    "where": lambda w: torch.where(MASK > 0, w, 0.0),
    "chain": lambda w: F.softplus(w) * MASK,
    "bounds": lambda w: w.clamp(-0.1, 0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_factors_have_the_mean_squares_of_the_derivatives(name: str) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    model, x, y = Behind(function), torch.randn(7, SIZE), torch.randn(7, SIZE)
    estimator = estimated(model, x, y)
    block = estimator.blocks[("weight",)]
    assert block.registration.approximation == "kron"
    assert MEAN_SQUARES in str(block.registration.reason)
    weight = function(model.weight)
    (derivatives,) = torch.autograd.grad(weight.sum(), model.weight)
    squares = (derivatives.t() if function is FUNCTIONS["transposed"] else derivatives).square()
    outputs, inputs = squares.mean(1).sqrt(), (squares.mean(0) / squares.mean()).sqrt()
    z = model(x)
    (d,) = torch.autograd.grad(kfac_fx.losses.Normal(z, targets=y).evaluate(), z)
    a, g = (rows.T @ rows / len(x) for rows in (x * inputs, d * outputs))
    torch.testing.assert_close(block.full_fisher_block(), torch.kron(g, a))


def test_a_mask_of_outputs_and_inputs_is_exact() -> None:
    """The derivatives are of rank one, and a block of one case without shared weights is exact."""
    torch.manual_seed(0)
    rank_one = torch.outer(torch.arange(SIZE) % 3 > 0, torch.arange(SIZE) % 4 > 0).double()
    model, x, y = Behind(lambda w: w * rank_one), torch.randn(1, SIZE), torch.randn(1, SIZE)
    block = estimated(model, x, y).blocks[("weight",)]
    (gradient,) = torch.autograd.grad(kfac_fx.losses.Normal(model(x), targets=y).evaluate(), model.weight)
    torch.testing.assert_close(block.full_fisher_block(), torch.outer(gradient.flatten(), gradient.flatten()))


def test_pruned_layers_are_structured_and_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 32, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 10)).float()
    prune.l1_unstructured(model[0], "weight", amount=0.7)
    prune.ln_structured(model[3], "weight", amount=0.5, n=2, dim=1)
    x, y = torch.randn(32, 4, 4, 4, dtype=torch.float32), torch.randint(10, (32,))
    net = kfac_fx.compile(model, (x,), loss="categorical", strict=True)
    assert [row.block for row in net.report.rows] == ["kronecker"] * 4
    optimizer = kfac_fx.KFAC(net)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("function", [lambda w: F.dropout(w, 0.5), lambda w: w + w.exp() * torch.randn_like(w)])
def test_weights_behind_chance_are_diagonal_with_the_reason(function: Callable[[Tensor], Tensor]) -> None:
    """A block of one batch would be of the elements that this batch has."""
    torch.manual_seed(0)
    (row,) = [row for row in kfac_fx.compile(Behind(function), (torch.randn(7, SIZE),)).report.rows if row.generic]
    assert row.names == "weight"
    assert "no layer has the form of" in str(row.reason)
