"""A distribution of the user is checked on the first batch: shapes, its two products with B, and B by its samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx import LossError
from kfac_fx.losses import LossFunction


class Poisson(LossFunction):
    """Counts, with the logarithm of their rate."""

    targets_like = "counts, of the shape of the outputs"

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        return F.poisson_nll_loss(self.inputs, targets, log_input=True, reduction="sum")

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(self.inputs.exp(), generator)

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return (self.inputs / 2).exp() * vector

    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        return (self.inputs / 2).exp() * vector


def compiled(kind: type[LossFunction]) -> kfac_fx.CompiledModule:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(30, 4)
    return kfac_fx.compile(model, (x,), loss=kind)


class OtherCases(Poisson):
    def _sample(self, generator: torch.Generator | None) -> Tensor:
        return torch.zeros(7, 3)


class NoTensor(Poisson):
    def _sample(self, generator: torch.Generator | None) -> Any:
        return 1.0


class NotFinite(Poisson):
    def _sample(self, generator: torch.Generator | None) -> Tensor:
        return self.inputs * torch.nan


class WithoutGenerator(Poisson):
    def _sample(self) -> Tensor:  # type: ignore[override]
        return self.inputs


class Averaged(Poisson):
    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        return (targets - self.inputs).abs().mean(1)


class Detached(Poisson):
    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        return super()._negative_log_likelihood(targets).detach()


class Wide(Poisson):
    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return torch.cat([vector, vector], dim=-1)


class SingleVectors(Poisson):
    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return vector.view(self.inputs.shape) if vector.dim() == 2 else vector[0]


class Narrow(Poisson):
    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        return vector[:, :0]


class OtherTranspose(Poisson):
    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return vector @ torch.tensor([[1.0, 2.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            OtherCases,
            r"OtherCases\._sample returned a Tensor \[7, 3\], and targets of .* \[30, 2\], as the outputs\. Draw",
        ),
        (NoTensor, r"NoTensor\._sample returned a float"),
        (NotFinite, r"NotFinite\._sample drew targets that are not finite"),
        (WithoutGenerator, r"WithoutGenerator\._sample does not .*too many .*Write def _sample\(self, generator\)"),
        (
            Averaged,
            r"Averaged\._negative_log_likelihood returned a Tensor \[30\], and the loss is one .* with \.sum\(\)",
        ),
        (Detached, r"Detached\._negative_log_likelihood has no gradient by self\.inputs: compute it"),
        (
            Wide,
            r"Wide\.multiply_fisher_factor returned a Tensor \[30, 4\] for .*\[30, 2\].*fisher_factor_inner_shape, too",
        ),
        (SingleVectors, r"SingleVectors\.multiply_fisher_factor returned a Tensor \[30, 2\] for a vector \[2, 30, 2\]"),
        (Narrow, r"Narrow\.multiply_fisher_factor_transpose returned a Tensor \[30, 0\] for .* is of shape \[30, 2\]"),
        (OtherTranspose, r"OtherTranspose\.multiply_fisher_factor_transpose is not the transpose of OtherTranspose"),
    ],
)
def test_a_method_that_returns_something_else_is_named(kind: type[LossFunction], message: str) -> None:
    with pytest.raises(LossError, match=message):
        compiled(kind)


def test_an_error_of_a_method_has_a_note_with_its_name() -> None:
    class Fails(Poisson):
        def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
            return vector.expand(-1, 2) @ vector

    with pytest.raises(RuntimeError) as caught:
        compiled(Fails)
    (note,) = (note for note in caught.value.__notes__ if "multiply_fisher_factor" in note)
    assert "Fails.multiply_fisher_factor raised this, called with a Tensor [30, 2], for outputs [30, 2]. kfac" in note


def test_a_class_that_lacks_methods_is_refused_with_their_names() -> None:
    class Half(LossFunction):
        def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
            return self.inputs.sum()

    with pytest.raises(
        LossError, match=r"loss=Half is no whole distribution: it lacks _sample, multiply_fisher_factor,"
    ):
        compiled(Half)


def test_a_factor_that_is_not_that_of_the_samples_has_a_warning() -> None:
    class Tripled(Poisson):
        def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
            return 3 * super().multiply_fisher_factor(vector)

        def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
            return 3 * super().multiply_fisher_factor_transpose(vector)

    with pytest.warns(
        UserWarning, match=r"the B of Tripled is not that of its samples: .* are 0\.1\d* times those of B B"
    ):
        compiled(Tripled)


@pytest.mark.parametrize(
    ("mean", "text"),
    [
        (
            lambda loss: loss / 30,
            r"are 0\.001\d* times .* 1 / 30², for 30 cases: Mean\._neg.* \.sum\(\)",
        ),
        (lambda loss: loss / 60, r"are 0\.000\d* times .* 1 / 60², for 60 outputs: Mean\._neg"),
        (lambda loss: loss / 2, r"are 0\.2\d* times .* 1 / 2², for 2 outputs of a case: Mean\._neg"),
        (lambda loss: loss / 7, r"are 0\.02\d* times .* Look at the factors in Mean"),
    ],
)
def test_a_mean_where_a_sum_is_needed_is_told(mean: Callable[[Tensor], Tensor], text: str) -> None:
    """The warning had the factor alone, and asked to look at three methods."""

    class Mean(Poisson):
        def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
            return mean(super()._negative_log_likelihood(targets))

    with pytest.warns(UserWarning, match=text):
        compiled(Mean)


def test_samples_that_are_the_mean_are_told_once() -> None:
    """They have no gradients, so the parameters had no curvature, and a warning said that the model is certain."""

    class Sure(Poisson):
        def _sample(self, generator: torch.Generator | None) -> Tensor:
            return self.inputs.detach().exp()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = compiled(Sure)
        opt = kfac_fx.KFAC(net)
        F.poisson_nll_loss(net(torch.randn(30, 4)), torch.ones(30, 2)).backward()
        opt.step()
    (text,) = [str(of.message) for of in caught]
    assert "the B of Sure is not that of its samples" in text


@pytest.mark.parametrize("seed", range(5))
def test_right_distributions_have_no_warning_and_no_random_number_is_used(seed: int) -> None:
    class Cauchy(Poisson):
        """Heavy tails; the gradients of its loss are bounded."""

        def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
            return torch.log1p((targets - self.inputs).square()).sum()

        def _sample(self, generator: torch.Generator | None) -> Tensor:
            uniform = torch.rand(self.inputs.shape, generator=generator)
            return self.inputs + torch.tan(torch.pi * (uniform - 0.5))

        def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
            return 0.5**0.5 * vector

        multiply_fisher_factor_transpose = multiply_fisher_factor

    class Skewed(Poisson):
        """Exponential times with the logarithm of their mean: the squares of their gradients have heavy tails."""

        def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
            return (self.inputs + targets * (-self.inputs).exp()).sum()

        def _sample(self, generator: torch.Generator | None) -> Tensor:
            return -torch.rand(self.inputs.shape, generator=generator).log() * self.inputs.exp()

        def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
            return 1 * vector

        multiply_fisher_factor_transpose = multiply_fisher_factor

    class Global(Skewed):
        def _sample(self, generator: torch.Generator | None) -> Tensor:
            return super()._sample(None)

    model, x = nn.Linear(4, 1), torch.randn(3 + 100 * (seed % 2), 4)
    for kind in (Poisson, Cauchy, Skewed, Global):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        kfac_fx.compile(model, (x,), loss=kind)  # a warning is an error here
        assert torch.equal(torch.get_rng_state(), before)


def test_a_first_batch_that_is_not_finite_is_no_fault_of_the_distribution() -> None:
    kfac_fx.compile(nn.Linear(4, 1), (torch.full((3, 4), torch.nan),), loss=Poisson)


def resumed(kind: type[LossFunction]) -> bool:
    """Whether a training that resumes in a new process, with another state of torch's stream, has the same losses."""
    x, counts = torch.randn(20, 4), torch.randint(5, (20, 3)).float()

    def started() -> tuple[kfac_fx.CompiledModule, kfac_fx.KFAC]:
        net = kfac_fx.compile(nn.Linear(4, 3), (x,), loss=kind)
        return net, kfac_fx.KFAC(net, cov_update_every=1, invert_every=1)

    def steps(net: kfac_fx.CompiledModule, optimizer: kfac_fx.KFAC) -> list[float]:
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = F.poisson_nll_loss(net(x), counts)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    net, optimizer = started()
    steps(net, optimizer)
    state = {name: value.clone() for name, value in net.state_dict().items()}, copy.deepcopy(optimizer.state_dict())
    expected = steps(net, optimizer)
    torch.manual_seed(5)
    net, optimizer = started()
    net.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return steps(net, optimizer) == expected


def test_a_training_resumes_if_samples_are_drawn_with_the_generator() -> None:
    """As the page on losses of your own says."""

    class OfDistribution(Poisson):
        def _sample(self, generator: torch.Generator | None) -> Tensor:
            seed = torch.randint(2**62, (), generator=generator, device=self.inputs.device).item()
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return torch.distributions.Poisson(self.inputs.exp()).sample()

    class OfTorch(Poisson):
        def _sample(self, generator: torch.Generator | None) -> Tensor:
            return torch.distributions.Poisson(self.inputs.exp()).sample()

    assert resumed(Poisson) and resumed(OfDistribution) and not resumed(OfTorch)
