"""Vectors that are sent back from the outputs. Their second moments are the Fisher of the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kfac_fx.losses import Categorical, MultiBernoulli, Normal, NormalMeanVariance, Poisson
from kfac_fx.losses.distributions import (
    DISTRIBUTIONS,
    MODES,
    CaseSource,
    LossFunction,
    check_mode,
    exact_sources,
    number_of_sources,
    one_source,
    source_of_losses,
)
from kfac_fx.passes.errors import LossError, TargetsMissing
from tests.runtime.test_distributions import random

pytestmark = pytest.mark.usefixtures("float64")


def leaves_and_losses() -> tuple[list[Tensor], list[tuple[float, LossFunction]]]:
    """Two losses with coefficients, and an output that no loss reads."""
    y, z = random(5, 3).requires_grad_(), random(5, 2, seed=1).requires_grad_()
    return [y, z, random(5, 1).requires_grad_()], [(2.0, Categorical(y)), (0.5, Normal(z))]


def fishers(losses: list[tuple[float, LossFunction]]) -> list[Tensor]:
    """The Fisher of every case of a loss, [N, o, o]."""
    basis = [torch.eye(loss.inputs.shape[-1]).unsqueeze(1) for _, loss in losses]
    return [
        c * torch.stack([loss.multiply_fisher(column.expand(5, -1)) for column in eye], dim=-1)
        for (c, loss), eye in zip(losses, basis, strict=True)
    ]


@pytest.mark.parametrize("mode", ["exact", "exact_GGN"])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_exact_sources_make_the_fisher_of_every_case(mode: str, chunk: int) -> None:
    leaves, losses = leaves_and_losses()
    total = [torch.zeros(5, 3, 3), torch.zeros(5, 2, 2)]
    count = 0
    for number, cotangents in exact_sources(mode, losses, leaves, chunk):
        assert number <= chunk and cotangents[2] is None
        count += number
        for place, cotangent in enumerate(cotangents[:2]):
            if cotangent is not None:
                total[place] += torch.einsum("kno,knp->nop", cotangent, cotangent)
    assert count == number_of_sources(losses, mode) == 5
    torch.testing.assert_close(total, fishers(losses))


def test_sources_by_case_send_back_one_case_at_a_time() -> None:
    leaves, losses = leaves_and_losses()
    assert number_of_sources(losses, "exact", by_case=True) == 5 * 3 + 5 * 2
    for _, cotangents in exact_sources("exact", losses, leaves, 1, by_case=True):
        (cotangent,) = (cotangent for cotangent in cotangents if cotangent is not None)
        assert (cotangent[0] != 0).any(-1).sum() == 1


@pytest.mark.parametrize("mode", ["gradients", "curvature_prop"])
def test_one_source_is_the_fisher_in_expectation(mode: str) -> None:
    leaves, losses = leaves_and_losses()
    generator, draws = torch.Generator().manual_seed(0), 4000
    total = [torch.zeros(5, 3, 3), torch.zeros(5, 2, 2)]
    for _ in range(draws):
        cotangents = one_source(mode, losses, leaves, generator)
        for place, cotangent in enumerate(cotangents[:2]):
            assert cotangent is not None
            total[place] += torch.einsum("no,np->nop", cotangent, cotangent) / draws
    for mean, fisher in zip(total, fishers(losses), strict=True):
        assert (mean - fisher).norm() < 0.1 * fisher.norm()  # five standard errors, about sqrt(2 / draws) each


def test_the_empirical_source_is_the_gradient_of_the_true_loss() -> None:
    y = random(5, 3).requires_grad_()
    targets = random(5, 3, seed=1)
    (cotangent,) = one_source("empirical", [(3.0, Normal(y, targets=targets))], [y], None)
    torch.testing.assert_close(cotangent, (6 * (y - targets)).detach())


def test_the_empirical_fisher_names_the_losses_without_targets() -> None:
    y = random(5, 4)
    losses = [(1.0, Categorical(y, targets=torch.zeros(5))), (1.0, Normal(y))]
    text = r"1 of 2 losses have none:\n  Normal of \[5, 4\]  wants values.*\n.*\(x, targets=y\), .* or .*'gradients'"
    with pytest.raises(TargetsMissing, match=text):
        one_source("empirical", losses, [y], None)


def test_a_mode_that_does_not_exist_shows_the_one_that_was_meant() -> None:
    with pytest.raises(ValueError, match=r"mode 'exct' is none of 'gradients', .* Did you mean 'exact'"):
        check_mode("exct")


def test_a_loss_without_gauss_newton_factor_has_no_ggn_mode() -> None:
    y, v = random(5, 2).requires_grad_(), random(5, 2, seed=1).exp().requires_grad_()
    losses: list[tuple[float, LossFunction]] = [(1.0, NormalMeanVariance(y, v)), (1.0, MultiBernoulli(y))]
    with pytest.raises(LossError, match="no generalized Gauss-Newton factor"):
        one_source("curvature_prop_GGN", losses, [y, v], None)
    assert all(cotangent is not None for cotangent in one_source("curvature_prop", losses, [y, v], None))


@pytest.mark.parametrize(("mode", "power"), [*((mode, 0.5) for mode in MODES[:1] + MODES[2:4]), ("empirical", 1.0)])
def test_the_weight_of_a_loss_enters_gradients_of_samples_by_its_root(mode: str, power: float) -> None:
    loss = Categorical(torch.randn(4, 3, requires_grad=True), torch.arange(4) % 3)
    plain, weighted = (
        source_of_losses(mode, [(weight, loss)], torch.Generator().manual_seed(0))[0] for weight in (1.0, 9.0)
    )
    torch.testing.assert_close(weighted, 9**power * plain)


@pytest.mark.parametrize("mode", ["gradients", "curvature_prop"])
def test_a_coefficient_that_only_the_device_knows_is_not_read(mode: str) -> None:
    """As of two losses in forward that ignore some targets: on the meta device a read is an error."""
    loss = Normal(torch.zeros(5, 3, device="meta", requires_grad=True))
    coefficient: Any = torch.ones((), device="meta")
    assert source_of_losses(mode, [(coefficient, loss)], None)[0].is_meta


# --- equal losses -----------------------------------------------------------------------------------------------------


def made(kind: str, outputs: Tensor, targets: Tensor) -> LossFunction:
    """A loss of the outputs [5, 4]."""
    if kind == "normal_mean_variance":
        return NormalMeanVariance(outputs[:, :2], outputs[:, 2:].exp(), targets=targets[:, :2])
    if kind == "categorical":
        return Categorical(outputs, targets=targets.argmax(-1))
    if kind == "multi_bernoulli":
        return MultiBernoulli(outputs, targets=(targets > 0).double())
    if kind == "poisson":
        return Poisson(outputs, targets=targets.exp().round())
    assert kind == "normal", f"{kind} is new: say how it is made"
    return Normal(outputs, targets=targets)


ALIKE: dict[str, Callable[[Tensor], list[Tensor]]] = {  # the outputs that three equal losses read
    "one tensor": lambda z: [z, z, z],
    "a tensor and what is computed from it": lambda z: [z, z.clone(), z.clone()],
    "a chain": lambda z: [z, (copy := z.clone()), copy.clone()],
}


@pytest.mark.parametrize("alike", ALIKE)
@pytest.mark.parametrize("kind", [*DISTRIBUTIONS, "normal_mean_variance"])
def test_equal_losses_are_one_loss_with_the_sum_of_their_coefficients(kind: str, alike: str) -> None:
    """For the sums over cases, and for single cases, whose source holds the gradients of all losses."""
    z, targets = random(5, 4).requires_grad_(), random(5, 4, seed=1)
    outputs = z + 0  # what the model computes, and leaves alone
    several: list[tuple[float, LossFunction]] = [(1.0, made(kind, read, targets)) for read in ALIKE[alike](outputs)]
    (expected,) = one_source("empirical", [(3.0, made(kind, outputs, targets))], [z], None)
    (cotangent,) = one_source("empirical", several, [z], None)
    vectors = source_of_losses("empirical", several, None)
    source = CaseSource([loss.inputs for _, loss in several], vectors, [z], lambda: [torch.arange(5).unsqueeze(-1)] * 3)
    assert expected is not None
    torch.testing.assert_close(cotangent, expected)
    torch.testing.assert_close(source.cotangents()[0], expected)
    one_case = source.cotangents(example=2)[0]
    assert one_case is not None
    torch.testing.assert_close(one_case[2], expected[2])
    assert not one_case[:2].any()
