"""The means of "eigen_moments": one vector over all groups of blocks, or single groups, with the same results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher import bases as bases_module
from kfac_fx.fisher.bases import Means, in_new_basis, means_of, update_bases
from kfac_fx.optim.rules import EigenMoments
from kfac_fx.optim.rules.eigen_moments import step_in_bases
from tests.runtime.test_eigen_moments import FALSE, MOMENTUM, TRUE, Several, data, estimator, gradients
from tests.tables import pairs

Gradients = dict[str, Tensor]


def recorded() -> FisherEstimator:
    torch.manual_seed(0)
    fisher = estimator(Several())
    fisher.update_covariances(data()[0])
    update_bases(fisher, carried=in_new_basis)
    return fisher


def gradient_of(fisher: FisherEstimator, number: int = 0) -> Gradients:
    shapes = {name: parameter.shape for name, parameter in fisher.net.named_parameters()}  # type: ignore[attr-defined]
    return {name: gradients(number + 1, *shape)[number] for name, shape in shapes.items()}


def apart(means: Means) -> Means:
    return replace(means, joint=None)


def update(fisher: FisherEstimator, means: Means, number: int, accept: Tensor = TRUE) -> Gradients:
    gradient = gradient_of(fisher, number)
    if not accept:
        gradient = {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}
    return step_in_bases(fisher, means, gradient, dict.fromkeys(gradient, MOMENTUM), 0.95, 0.5, TRUE, accept)


def all_of(fisher: FisherEstimator) -> list[Tensor]:
    stacks = [stack for group in fisher.groups for stack in means_of(group)]
    return [tensor.clone() for stack in stacks for tensor in (stack.moment, stack.total_weight)]


def test_the_means_of_all_groups_lie_one_behind_another() -> None:
    fisher = recorded()
    means = Means.of(fisher)
    assert len(fisher.groups) > 2 and means.joint is not None
    for stack, value in zip(means.joint, (2.0, 3.0), strict=True):
        stack.moment.fill_(value)
    for group in fisher.groups:
        assert [stack.moment.unique().tolist() for stack in means_of(group)] == [[2.0], [3.0]]


def test_a_step_of_one_vector_is_that_of_every_group() -> None:
    fishers = recorded(), recorded()
    of = Means.of(fishers[0]), apart(Means.of(fishers[1]))
    for number, accept in enumerate([TRUE, TRUE, FALSE, TRUE]):
        results = [update(fisher, means, number, accept) for fisher, means in zip(fishers, of, strict=True)]
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert of[0].have_equal_weights() and not of[1].have_equal_weights()
    torch.testing.assert_close(*map(all_of, fishers), rtol=1e-12, atol=1e-12)


def test_a_step_that_is_not_accepted_leaves_the_means() -> None:
    fisher = recorded()
    means = Means.of(fisher)
    update(fisher, means, 0)
    before = all_of(fisher)
    update(fisher, means, 1, FALSE)
    assert all(map(torch.equal, all_of(fisher), before))


def test_blocks_without_a_gradient_have_weights_of_their_own_from_then_on() -> None:
    fishers = recorded(), recorded()
    of = Means.of(fishers[0]), apart(Means.of(fishers[1]))
    still = {"second.weight", "second.bias"}
    for number in range(4):
        results = []
        for fisher, means in zip(fishers, of, strict=True):
            gradient = gradient_of(fisher, number)
            without = still if number == 1 else set()
            gradient |= {name: torch.zeros_like(gradient[name]) for name in without}
            momentum = dict.fromkeys(gradient, MOMENTUM)
            results.append(step_in_bases(fisher, means, gradient, momentum, 0.95, 0.5, TRUE, TRUE, still=without))
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
        assert of[0].have_equal_weights() == (number < 1)
    torch.testing.assert_close(*map(all_of, fishers), rtol=1e-12, atol=1e-12)
    block = fishers[0].blocks["second.weight", "second.bias"]
    assert means_of(block.group)[1].total_weight[block.member].item() == pytest.approx(1 + 0.95 + 0.95**2)


@pytest.mark.parametrize("equal", [True, False])
def test_weights_that_others_write_are_compared_again(equal: bool) -> None:
    """As when a state is loaded."""
    fisher = recorded()
    means = Means.of(fisher)
    update(fisher, means, 0)
    for group in fisher.groups if equal else fisher.groups[:1]:
        for stack in means_of(group):
            stack.total_weight.fill_(7.0)
    assert means.have_equal_weights() == equal
    other = recorded()
    for group, like in zip(other.groups, fisher.groups, strict=True):
        for stack, of in zip(means_of(group), means_of(like), strict=True):
            stack.moment.copy_(of.moment), stack.total_weight.copy_(of.total_weight)
    results = update(fisher, means, 1), update(other, apart(Means.of(other)), 1)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("joint", [True, False])
def test_an_average_that_is_forgotten_begins_anew_and_the_squares_stay(joint: bool) -> None:
    fisher = recorded()
    means = Means.of(fisher) if joint else apart(Means.of(fisher))
    update(fisher, means, 0)
    before = all_of(fisher)
    means.forget_average(FALSE)
    assert all(map(torch.equal, all_of(fisher), before))
    means.forget_average(TRUE)
    for group, (moment, weight) in zip(fisher.groups, zip(before[2::4], before[3::4], strict=True), strict=True):
        average, squares = means_of(group)
        assert not average.moment.any() and not average.total_weight.any()
        assert torch.equal(squares.moment, moment) and torch.equal(squares.total_weight, weight)
    assert means.have_equal_weights() == joint


class TwoPrecisions(nn.Module):
    """The dtype of the second layer is that of the estimator's tests, or another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)).to(self.second.weight.dtype))
        return y.double()


def test_groups_of_two_precisions_have_steps_of_their_own() -> None:
    updates = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        model = TwoPrecisions().double()
        model.second.to(dtype)
        fisher = FisherEstimator(compile(model, loss="mse"), exps=(), estimation_mode="exact")
        fisher.new_extras, fisher.relative_damping = EigenMoments().new_extras, 0.01
        fisher.update_covariances(data()[0])
        update_bases(fisher, carried=in_new_basis)
        means = Means.of(fisher)
        assert (means.joint is None) == (dtype is torch.float32)
        for number in range(3):
            gradient = {n: g.to(fisher.net.get_parameter(n).dtype) for n, g in gradient_of(fisher, number).items()}  # type: ignore[attr-defined]
            momentum = dict.fromkeys(gradient, MOMENTUM)
            update = step_in_bases(fisher, means, gradient, momentum, 0.95, 0.5, TRUE, TRUE)
        assert {name: tensor.dtype for name, tensor in update.items()} == {n: g.dtype for n, g in gradient.items()}
        updates.append({name: tensor.double() for name, tensor in update.items()})
    torch.testing.assert_close(*updates, rtol=1e-3, atol=1e-3)


@pairs(("exponent", [0.0, 0.5]), ("part", [1, 7, 1 << 16]))
def test_a_step_that_takes_the_numbers_part_by_part_is_the_same(
    monkeypatch: pytest.MonkeyPatch, exponent: float, part: int
) -> None:
    results = []
    for worth in (0, 1 << 20):
        monkeypatch.setattr(bases_module, "WORTH_PARTS", worth)
        monkeypatch.setattr(bases_module, "PART", part)
        fisher = recorded()
        means = Means.of(fisher)
        for number, accept in enumerate((TRUE, FALSE, TRUE)):
            gradient = gradient_of(fisher, number)
            if not accept:
                gradient = {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}
            momentum = dict.fromkeys(gradient, MOMENTUM)
            steps = step_in_bases(fisher, means, gradient, momentum, 0.95, exponent, TRUE, accept)
        assert means.worth_parts == (worth == 0)
        results.append([*steps.values(), *all_of(fisher)])
    for one_by_one, together in zip(*results, strict=True):
        torch.testing.assert_close(one_by_one, together)
    assert any(bool(tensor.any()) for tensor in results[0])
