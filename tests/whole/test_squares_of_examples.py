"""Fits square the gradients of registrations without rows example by example, as those of all others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx import losses

pytestmark = pytest.mark.usefixtures("float64")


class Centers(nn.Module):
    """No layer has the form of cdist, so `centers` is generic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.centers = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(torch.tanh(self.layer(x)), self.centers)


def example_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradients of the centers, [N, numbers]."""
    (parameter,) = (p for name, p in model.named_parameters() if name == "centers")
    each = [F.cross_entropy(model(x[n : n + 1]), y[n : n + 1], reduction="sum") for n in range(len(x))]
    return torch.stack([torch.autograd.grad(loss, parameter)[0].flatten() for loss in each])


def data(cases: int = 12) -> tuple[Centers, Tensor, Tensor]:
    torch.manual_seed(0)
    return Centers(), torch.randn(cases, 3), torch.randint(4, (cases,))


@pytest.mark.parametrize("approximation", ["generic", "diagonal", "full"])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12])
def test_the_empirical_fisher_of_a_generic_parameter_is_the_mean_over_examples(
    approximation: str, sizes: Sequence[int]
) -> None:
    """It was the square of the sum, which vanishes at an optimum and depends on the batches."""
    model, x, y = data()
    net = kfac_fx.compile(model, (x,), loss="categorical", approximations={"centers": approximation})
    batches = list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))
    gradients = example_gradients(model, x, y)
    expected = gradients.mT @ gradients / len(x)
    spectrum = kfac_fx.fit_spectrum(net, batches, mode="empirical")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    for inputs, targets in batches:
        estimator.update_covariances(inputs, targets=targets, fold=False)
    estimator.fold()
    for of_one in (spectrum, estimator.spectrum(damping=0.0)):
        torch.testing.assert_close(of_one.diagonal()["centers"].flatten(), expected.diagonal())
    if approximation == "full":
        units = torch.eye(8).view(8, 4, 2)
        vectors = {name: torch.zeros(8, *p.shape) for name, p in net.named_parameters()} | {"centers": units}
        torch.testing.assert_close(spectrum.multiply(vectors)["centers"].flatten(1), expected)


def test_a_part_of_a_batch_and_frozen_centers_are_as_they_were() -> None:
    model, x, y = data()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical", fraction=0.5)
    estimator.update_covariances(x, targets=y)
    expected = example_gradients(model, x[:6], y[:6]).square().mean(0)
    torch.testing.assert_close(estimator.spectrum(damping=0.0).diagonal()["centers"].flatten(), expected)
    model.centers.requires_grad_(False)
    estimator.update_covariances(x, targets=y)
    model.centers.requires_grad_(True)
    torch.testing.assert_close(estimator.spectrum(damping=0.0).diagonal()["centers"].flatten(), expected)


def test_an_empty_batch_adds_nothing() -> None:
    model, x, y = data()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [(x, y), (x[:0], y[:0])], mode="empirical")
    expected = example_gradients(model, x, y).square().mean(0)
    torch.testing.assert_close(spectrum.diagonal()["centers"].flatten(), expected)


def test_sampled_targets_of_a_fit_are_those_of_the_other_blocks() -> None:
    """One sample a case: the block of the centers is that of the targets that the layer has."""
    model, x, _ = data()
    sampled: list[Tensor] = []

    class Remembering(losses.Categorical):
        def _sample(self, generator: torch.Generator | None) -> Tensor:
            sampled.append(super()._sample(generator))
            return sampled[-1]

    net = kfac_fx.compile(model, (x,), loss=Remembering)
    sampled.clear()
    spectrum = kfac_fx.fit_spectrum(net, [x[:5], x[5:]])
    targets = torch.cat([sampled[0], sampled[2]])
    assert torch.equal(sampled[0], sampled[1]) and torch.equal(sampled[2], sampled[3]) and len(sampled) == 4
    expected = example_gradients(model, x, targets).square().mean(0)
    torch.testing.assert_close(spectrum.diagonal()["centers"].flatten(), expected)


def test_parts_have_the_numbers_of_one_fit() -> None:
    model, x, _ = data()
    net = kfac_fx.compile(model, (x,), loss="categorical")
    batches = [x[:5], x[5:]]
    one = kfac_fx.fit_spectrum(net, batches)
    two = kfac_fx.fit_spectrum(net, batches, parts=[["layer.weight", "layer.bias"], ["centers"]])
    of_two = two.diagonal()
    assert all(torch.equal(value, of_two[name]) for name, value in one.diagonal().items())


def test_a_warning_says_where_the_examples_are_not_known() -> None:
    """The rows of the loss are of pairs of examples."""

    class Pairs(Centers):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out[::2] + out[1::2]

    torch.manual_seed(0)
    model, x, y = Pairs(), torch.randn(12, 3), torch.randint(4, (6,))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    with pytest.warns(UserWarning, match=r"blocks of centers are squares of the gradients of whole batches") as warned:
        spectrum = kfac_fx.fit_spectrum(net, [(x[:4], y[:2]), (x[4:], y[2:])], mode="empirical")
    assert sum("of whole batches" in str(warning.message) for warning in warned) == 1
    parts = [
        F.cross_entropy(model(x[:4]), y[:2], reduction="sum"),
        F.cross_entropy(model(x[4:]), y[2:], reduction="sum"),
    ]
    each = torch.stack([torch.autograd.grad(loss, model.centers)[0].flatten() for loss in parts])
    torch.testing.assert_close(spectrum.diagonal()["centers"].flatten(), each.square().sum(0) / 6)


class Positions(nn.Module):
    """The projection of learned positions does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, 3))
        self.project, self.layer, self.head = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x) + self.project(self.positions)).mean(1))


@pytest.mark.parametrize("sizes", [[12], [5, 7]])
def test_the_factor_of_a_use_that_is_free_of_the_batch_has_no_products_of_two_examples(sizes: Sequence[int]) -> None:
    """It was that of the sum of all gradient rows, so it depended on the batches."""
    torch.manual_seed(0)
    model, x, y = Positions(), torch.randn(12, 4, 3), torch.randint(3, (12,))
    net = kfac_fx.compile(model, (x,), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="empirical")
    for inputs, targets in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
        estimator.update_covariances(inputs, targets=targets, fold=False)
    estimator.fold()
    d = []
    for n in range(len(x)):
        projected = model.project(model.positions).detach().requires_grad_()
        outputs = model.head(torch.tanh(model.layer(x[n : n + 1]) + projected).mean(1))
        (gradient,) = torch.autograd.grad(F.cross_entropy(outputs, y[n : n + 1]), projected)
        d.append(gradient[0])
    rows = torch.cat(d)
    rows_of_positions = torch.cat([model.positions[0], torch.ones(4, 1)], 1).detach()
    factors = estimator.blocks["project.weight", "project.bias"].factors
    torch.testing.assert_close(factors["G"].value[0], rows.mT @ rows / len(rows))
    torch.testing.assert_close(factors["A"].value[0], rows_of_positions.mT @ rows_of_positions / 4)


def test_parts_of_generic_parameters_alone_find_the_order_of_the_rows() -> None:
    """Their rows tell nothing, so those of other layers do. It ended in an IndexError."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 5))
    x, y = torch.randn(3, 2, 3), torch.randint(5, (3, 2))
    net = kfac_fx.compile(model, (x,), loss="categorical", approximations={"1": "generic"})
    spectrum = kfac_fx.fit_spectrum(net, [x], mode="exact", damping=0.1)
    found = spectrum.part(["1.weight", "1.bias"]).self_scores((x, y), by="block")
    whole = spectrum.self_scores((x, y), by="block")
    assert [*found] == [("1.weight",), ("1.bias",)]
    assert all(torch.equal(scores, whole[key]) for key, scores in found.items())
