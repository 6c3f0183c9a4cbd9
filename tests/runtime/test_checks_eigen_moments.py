"""The steps of "eigen_moments": the bound by the exact Fisher, and steps that are undone at once."""

from __future__ import annotations

import copy
import math
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx import LossScaleWarning
from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.checks import Check
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules.eigen_moments import RATE, next_divisor
from tests.runtime.multiplier import Multiplier
from tests.runtime.slow_kfac import batch, mlp
from tests.runtime.test_checks_adaptive import Curved, fisher, step, theta
from tests.tables import pairs


def made(**options: Any) -> tuple[Any, KFAC]:
    net = compile(mlp(), loss="categorical")
    intervals = {"damping_adaptation_interval": 4, "cov_update_every": 2, "invert_every": 3}
    return net, KFAC(net, seed=0, **intervals, **options)


def next_ratio(last: float, norm: float) -> float:
    """The formula of the module's docstring in numbers. norm: lr ρ."""
    return max(1.0, norm, math.sqrt(last * max(1.0, norm)))


class Lengths:
    """m and r of one optimizer."""

    def __init__(self, bound: float) -> None:
        self.bound, self.multiplier, self.ratio, self.limits = bound, Multiplier(), 1.0, False
        self.rho = 0.0  # at the last check, without trust

    @property
    def rate(self) -> float:
        return self.multiplier.value / self.ratio

    def arrived(self, fall: float, steps: int) -> None:
        if self.multiplier.arrived(fall, steps, self.rho > 10):
            self.ratio = 1.0

    def check(self, squared_norm: float, slope: float, loss: float, lr: float, is_first: bool) -> None:
        """squared_norm, slope: of a step with m = r = 1."""
        m = self.multiplier
        norm = m.value * math.sqrt(squared_norm / (self.bound * max(1.0, loss)))
        best = -slope / (squared_norm * m.value)
        norm *= m.first(norm / lr) if is_first else m.later(norm / lr, best, lr)
        norm /= self.multiplier.trust
        self.ratio = next_ratio(self.ratio, norm)
        self.limits = norm >= 0.75 * self.ratio
        self.rho = norm * self.multiplier.trust / lr


@pairs(("bound", [1e-6, 0.003]), ("options", [{}, {"lr": 0.3}, {"weight_decay": 0.1}]))
def test_the_length_of_steps_follows_their_exact_fisher_norm(options: dict[str, Any], bound: float) -> None:
    """Compared with an optimizer whose bound is too large to be felt, which sees the same gradients at the same
    parameters. Its steps give the direction, and m and r of both are those of the formulas."""
    lr = options.get("lr", 1.0)
    ours, others, ratios, firsts = Lengths(bound), Lengths(1e30), list[float](), list[float]()
    (net, opt), (other, free) = made(norm_constraint=bound, **options), made(norm_constraint=1e30, **options)
    update, last, at_last = torch.zeros_like(theta(net)), 0, copy.deepcopy(net.model)
    proposals, along = list[Tensor](), Check.along  # steps before a check lengthens them

    def noted(check: Check, flat: FlatParameters, move: Tensor) -> Any:
        proposals.append(move)
        return along(check, flat, move)

    for number in range(20):
        at, (x, y) = theta(net), batch(number)
        checks, here = number < 3 or number % 4 == 0, copy.deepcopy(net.model)
        with torch.no_grad():
            for to, parameter in zip(other.parameters(), net.parameters(), strict=True):
                to.copy_(parameter)
        free._step_state.checks.size.near.copy_(opt._step_state.checks.size.near)  # for steps along the same direction
        loss = step(net, opt, number).item()
        with mock.patch.object(Check, "along", noted):
            step(other, free, number)
        gradient = gradient_of(net)
        for lengths in (ours, others):
            lengths.multiplier.grow(gradient, update, lr)
        if number == 0:
            others.multiplier.first(1e-9)
        elif checks:
            with torch.no_grad():
                fall = F.cross_entropy(at_last(x), y).item() - loss
            ours.arrived(fall, number - last)
            others.arrived(fall, number - last)
        if checks:
            fisher_matrix = fisher(net.model, at, x)
        if checks and number:
            proposed = proposals[-1]
            best = -float(gradient @ proposed) / float(proposed @ fisher_matrix @ proposed)
            others.multiplier.later(1e-9, best, lr)
        whole = (theta(other) - at) / others.rate  # with m = r = 1
        if checks:
            ours.check(float(whole @ fisher_matrix @ whole), float(gradient @ whole), loss, lr, number == 0)
            ratios.append(ours.ratio)
        if number == 0:
            firsts.append(ours.multiplier.value)
        move = whole * ours.rate
        torch.testing.assert_close(theta(net) - at, move)
        update = -whole / (lr * RATE)
        for lengths, model in ((ours, net), (others, other)) if checks else ():
            made_move = theta(model) - at
            with torch.no_grad():
                change = F.cross_entropy(model(x), y).item() - loss
            lengths.multiplier.checked(
                change, float(gradient @ made_move + 0.5 * made_move @ fisher_matrix @ made_move), lengths.limits
            )
        if checks:
            last, at_last = number, here
        # m follows the curvature, which the check takes from a difference quotient.
        assert float(opt.scalars["multiplier"]) == pytest.approx(ours.multiplier.value, rel=1e-6)
    assert opt.skipped == free.skipped == 0
    # With weight decay ρ of the first step is above a half, the part of the bound that m goes to, so m stays 1.
    assert max(ratios) > 1 if bound == 1e-6 else (firsts[0] == 1 if "weight_decay" in options else 1 < firsts[0] < 10)


def gradient_of(net: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def first_checks(net: Any, opt: KFAC, x: Tensor) -> list[tuple[Check, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """The first three checks: <δ, F δ> and the slope of their moves, with the product with the Jacobian beside."""
    found, along = [], Check.along

    def compared(check: Check, flat: FlatParameters, move: Tensor) -> Any:
        result = along(check, flat, move)
        found.append((check, result[:2], check.batch.along(check.parameters, flat.everywhere(move))[:2]))
        return result

    with mock.patch.object(Check, "along", compared):
        for _ in range(3):
            opt.zero_grad()
            net(x).square().sum(1).mean().backward()
            opt.step()
    return found


@pairs(("dtype, rounding", [(torch.float32, 2**-23), (torch.float64, 2**-52)]), ("lr", [1.0, 1e-5, 0.0]))
@pytest.mark.filterwarnings("ignore:lr=1e-05 is of the size of Adam's")
def test_a_check_knows_the_exact_fisher_along_a_step_without_a_derivative(
    dtype: torch.dtype, rounding: float, lr: float
) -> None:
    """Up to twice the step of the difference quotient, the cube root of the rounding errors."""
    net = compile(mlp().to(dtype), loss="normal")
    checks = first_checks(net, KFAC(net, lr=lr, seed=0), batch(0)[0].to(dtype))
    assert len(checks) == 3
    for check, quotient, exact in checks:
        assert check.quotient_step == rounding ** (1 / 3) and (exact[0] > 0) == (lr > 0)
        torch.testing.assert_close(quotient, exact, rtol=2 * rounding ** (1 / 3), atol=0)


class Quantized(torch.nn.Module):
    """A straight-through estimator: rounded values with the gradient of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + (y.round() - y).detach()


class Divided(torch.nn.Module):
    """Python reads a number between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        z: Tensor = self.last(y if float(y.detach().sum()) > 1e9 else 2 * y)
        return z


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class OfFunction(torch.nn.Linear):
    """A user's autograd.Function, whose forward no gradient tells."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(super().forward(x))
        return y


BY_PRODUCT = {
    "function": (
        lambda: OfFunction(3, 2),
        r"doubled \(\S+:\d+\) is an autograd.Function, which may jump .*plain_backward",
    ),
    "coarse": (lambda: torch.nn.Linear(3, 2).bfloat16(), "parameters and products are rounded by up to 8e-03 of them"),
    "jumps": (Quantized, r"round\S* \(test_checks_eigen_moments.py:\d+\) has no gradient, so it may jump where"),
    "divided": (Divided, "no single graph holds the model, and what Python does between its graphs may jump"),
}


@pytest.mark.parametrize(("model", "reason"), BY_PRODUCT.values(), ids=BY_PRODUCT)
def test_where_a_quotient_is_no_measure_a_check_takes_the_product_with_the_jacobian(model: Any, reason: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    x = x.bfloat16() if "rounded" in reason else x
    net = compile(model(), (x,), loss="normal")
    opt = KFAC(net, seed=0)
    for check, ours, exact in first_checks(net, opt, x):
        assert check.quotient_step is None
        torch.testing.assert_close(ours, exact, rtol=0, atol=0)
    report = " ".join(str(net.report).split())
    words = "the checks of the step size take a product with the Jacobian, which costs four forwards instead of one: "
    assert re.search(words + reason, report), report


@pytest.mark.parametrize(("bound", "calm"), [(1e-6, False), (1e30, True)])
def test_a_check_is_calm_where_the_step_is_far_below_its_bound(bound: float, calm: bool) -> None:
    net, opt = made(norm_constraint=bound)
    for number in range(3):
        step(net, opt, number)
        assert bool(opt._step_state.checks.size.calm) is calm


@pytest.mark.parametrize("share", [0.39, 0.41])
def test_a_calm_step_has_at_most_two_fifths_of_the_norm_that_is_its_bound(share: float) -> None:
    """The first check: the step is ten times Adam's, whose norm the second optimizer's bound is a multiple of."""
    (net, opt), (x, y) = made(norm_constraint=1e30), batch(0)
    at = theta(net)
    step(net, opt, 0)
    move = theta(net) - at
    norm = float(move @ fisher(net.model, at, x) @ move)
    loss = F.cross_entropy(made()[0](x), y).item()
    other, bounded = made(norm_constraint=norm / (share**2 * max(1.0, loss)))
    step(other, bounded, 0)
    torch.testing.assert_close(theta(other) - at, move)
    assert bool(bounded._step_state.checks.size.calm) is (share < 0.4)


@pytest.mark.parametrize(("last", "norm"), [(1.0, 0.2), (1.0, 3.0), (5.0, 20.0), (5.0, 3.0), (5.0, 0.2), (1.0, 0.0)])
def test_steps_are_shortened_at_once_and_get_longer_half_of_the_way(last: float, norm: float) -> None:
    """On a logarithmic scale; r is at least 1."""
    expected = torch.tensor(next_ratio(last, norm))
    torch.testing.assert_close(next_divisor(torch.tensor(last), torch.tensor(norm)), expected)
    assert expected >= 1


def test_the_predicted_change_and_rho_are_those_of_the_shortened_step() -> None:
    net, opt = made(norm_constraint=1e-6)
    for number in range(2):
        step(net, opt, number)
    at, (x, y) = theta(net), batch(2)
    before = step(net, opt, 2)
    move = theta(net) - at
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
    predicted = gradient @ move + 0.5 * move @ fisher(net.model, at, x) @ move
    torch.testing.assert_close(opt.predicted_change, predicted)
    with torch.no_grad():
        torch.testing.assert_close(opt.rho, (F.cross_entropy(net(x), y) - before) / predicted)


def test_the_first_step_has_ten_times_the_rate_of_adam_where_its_bound_allows() -> None:
    """In the eigenbasis the elements of the first step are that rate or its negative, or 0 where the gradient is."""
    net, opt = made(norm_constraint=1e30)
    at = theta(net)
    step(net, opt, 0)
    move = theta(net) - at
    longest = 10 * RATE * math.sqrt(len(move))
    assert 0.5 * longest < move.norm() <= longest * (1 + 1e-6)


def test_the_first_steps_are_short_where_the_loss_is_of_derivatives_that_are_taken_outside() -> None:
    """Long steps of a network of sines make the loss of its Laplacian many times as large; see the outputs' slope."""

    class Sines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(2, 24), nn.Linear(24, 24), nn.Linear(24, 1)
            for layer in (self.second, self.last):
                nn.init.uniform_(layer.weight, -0.02, 0.02)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(torch.sin(30 * self.second(torch.sin(30 * self.first(x)))))
            return y

    def laplacian(net: nn.Module) -> Tensor:
        x = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        seconds = [torch.autograd.grad(slope[:, n].sum(), x, create_graph=True)[0][:, n] for n in (0, 1)]
        return (sum(seconds) - 10 * points[:, 0]).square().mean()

    torch.manual_seed(0)
    points = 2 * torch.rand(64, 2) - 1
    net = compile(Sines())
    opt, losses = KFAC(net), []
    with pytest.warns(
        LossScaleWarning, match="past the outputs of forward, .* zero: last.weight.\\n.* Compute the deriv"
    ):
        for _ in range(10):
            opt.zero_grad()
            loss = laplacian(net)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert max(losses[1:]) < losses[0] and losses[-1] < 0.5 * losses[0]


class Cliff(Curved):
    """The outputs explode behind the tangent."""

    def curve(self, y: Tensor) -> Tensor:
        return y + 1e9 * F.relu(y - 0.005) ** 3


def test_a_step_that_makes_the_loss_rise_is_undone_at_once() -> None:
    net = compile(Cliff(), loss="normal")
    opt = KFAC(net)
    x = torch.eye(2, dtype=torch.float64)
    (net(x) - 10.0).square().sum(1).mean().backward()
    opt.step()
    assert not net.model.linear.weight.any()  # type: ignore[union-attr, operator]
    assert opt.skipped == 1 and opt.rho < 0
    assert opt._step_state.checks.size.ratio == 2 and not opt._step_state.checks.size.calm


def test_steps_before_a_check_that_could_be_made_are_as_long_as_proposed() -> None:
    """As where the first batches overflowed."""
    net, opt = made()
    for number in range(6):
        step(net, opt, number)
    opt._step_state.checks.size.ratio.zero_()
    at = theta(net)
    step(net, opt, 6)
    assert theta(net).isfinite().all() and not torch.equal(theta(net), at) and opt.skipped == 0


def test_a_loss_that_is_too_large_for_a_number_does_not_loosen_the_bound() -> None:
    """The gradient is finite. Without a value of the loss the bound is that of a loss of 1."""
    net = compile(torch.nn.Linear(3, 1), loss="mse")
    opt = KFAC(net, norm_constraint=1e-12)
    y = 3e19 * torch.tensor([[1.0], [-0.999]]).repeat(4, 1)
    loss = F.mse_loss(net(torch.ones(8, 3)), y)
    loss.backward()
    with pytest.warns(LossScaleWarning, match="far away from its targets"):
        opt.step()
    assert loss.isinf() and net.model.weight.grad.isfinite().all()  # type: ignore[union-attr, operator]
    assert opt._step_state.checks.size.ratio > 1e3


def written(net: Any, by: str) -> dict[str, Tensor]:
    """Write into weights between two steps. Returns what they are then, by name."""
    wanted = {name: -20 * tensor for name, tensor in net.state_dict().items()}
    head = net.model[2].weight
    with torch.no_grad():
        match by:
            case "load_state_dict":
                net.load_state_dict(wanted)
            case "copy_":
                for name, parameter in net.model.named_parameters():
                    parameter.copy_(wanted[name])
            case "data":
                for name, parameter in net.model.named_parameters():
                    parameter.data.copy_(wanted[name])
            case "a state that is the parameters":
                state = net.state_dict()
                net.load_state_dict({**state, "2.weight": -20 * state["2.weight"]})
            case "one parameter":
                nn.init.normal_(head, std=20)
    return {name: parameter.detach().clone() for name, parameter in net.model.named_parameters()}


@pairs(
    ("options", [{}, {"momentum_type": "adaptive"}]),
    ("by", ["load_state_dict", "copy_", "data", "a state that is the parameters", "one parameter"]),
)
def test_weights_that_are_written_during_a_training_stay(options: dict[str, Any], by: str) -> None:
    """The loss is higher there than at the last check. Trainings that write into weights and take it back, as SAM and
    averaged weights do, are checked as before."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(1024, 10)
    y = (x @ torch.randn(10, 3)).argmax(1)
    net = compile(model, loss="categorical")
    opt = KFAC(net, seed=0, damping_adaptation_interval=4, exact_steps=False) if not options else KFAC(net, **options)
    there: dict[str, Tensor] = {}
    for number in range(30):
        if number == 22:  # between two checks
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            there = written(net, by)
        with torch.no_grad():  # an average is swapped in and out
            for parameter in model.parameters():
                parameter.mul_(3).div_(3)
        part = torch.arange(64) + 64 * (number % 16)
        opt.zero_grad()
        F.cross_entropy(net(x[part]), y[part]).backward()
        opt.step()
        if there:
            parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
            to_there, to_last = (sum(float((parameters[n] - of[n]).norm()) for n in of) for of in (there, before))
            assert to_there < to_last, number
    assert opt.skipped == 0


def test_writes_that_are_taken_back_are_none() -> None:
    net, opt = made()
    place = opt._step_state.checks.place
    for number in range(3):
        step(net, opt, number)
    parameters = {name: parameter.detach() for name, parameter in net.model.named_parameters()}
    place.note(parameters)
    assert place.left(parameters) is None
    for parameter in parameters.values():
        parameter.add_(1.0).sub_(1.0)
    assert place.left(parameters) is not None and not place.left(parameters)
    next(iter(parameters.values()))[0, 0] += 1.0
    assert place.left(parameters)
