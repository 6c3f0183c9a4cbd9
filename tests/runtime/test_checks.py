"""The checks of "adaptive" and "eigen_moments": steps that are undone, and the state of their trainings."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.fisher.bases import means_of
from kfac_fx.optim.checks import StalledWarning, Watch, tolerated
from kfac_fx.optim.optimizer import KFAC
from tests.runtime.slow_kfac import batch, mlp
from tests.runtime.test_checks_adaptive import step, theta
from tests.tables import pairs

KINDS = ("adaptive", "eigen_moments")


def made(kind: str, **options: Any) -> tuple[Any, KFAC]:
    net = compile(mlp(), loss="categorical")
    intervals = {"damping_adaptation_interval": 4, "cov_update_every": 10, "invert_every": 20}
    return net, KFAC(net, momentum_type=kind, **{"seed": 0, **intervals, **bounded(kind), **options})


def bounded(kind: str) -> dict[str, bool]:
    """The option of a rule that makes no exact steps."""
    return {"exact_steps": False} if kind == "eigen_moments" else {}


def averages(opt: KFAC) -> list[torch.Tensor]:
    """Copies of the averaged gradients, with their weights if these are theirs alone."""
    if opt.options.rule.name == "adaptive":
        return [state["velocity"].clone() for state in opt.state.values()]
    means = [means_of(group)[0] for group in opt.estimator.groups]
    return [tensor.clone() for mean in means for tensor in (mean.moment, mean.total_weight)]


def test_rises_are_tolerated_up_to_a_half_and_with_noise_up_to_a_half_or_ninefold() -> None:
    values = torch.tensor([0.01, 0.1, 4.0, -0.01])
    torch.testing.assert_close(tolerated(values, torch.tensor(False)), torch.tensor([0.005, 0.05, 2.0, 0.005]))
    torch.testing.assert_close(tolerated(values), torch.tensor([0.09, 0.5, 2.0, 0.09]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_has_risen_since_the_last_check_is_undone(kind: str) -> None:
    net, opt = made(kind)
    for number in range(6):
        step(net, opt, number)
    checkpoint = torch.cat([opt.state[p]["checkpoint"].flatten() for p in net.parameters()])
    damping, size = opt.damping.clone(), opt._step_state.checks.size
    ratio = size.ratio.clone()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(30)
    opt._step_state.checks.place.values = None  # as wrong steps do: a write that is seen is not undone
    for number in (6, 7):
        step(net, opt, number)
    assert not torch.equal(theta(net), checkpoint)
    skipped = opt.skipped.item()
    step(net, opt, 8)  # a check
    torch.testing.assert_close(theta(net), checkpoint, rtol=0, atol=0)
    assert opt.skipped.item() == skipped + 1 and size.weight == 0 and size.ratio >= 2 * ratio
    torch.testing.assert_close(opt.damping, damping * 0.9**-8)  # 0 without damping
    assert not any(average.any() for average in averages(opt))
    step(net, opt, 9)
    assert theta(net).isfinite().all() and not torch.equal(theta(net), checkpoint)


@pairs(("kind", KINDS), ("loss_there, factor, undone", [(0.03, 4, 0), (0.03, 12, 1), (0.3, 4, 1), (3.0, 1.6, 1)]))
def test_a_rise_of_the_loss_of_the_same_batch_is_undone_from_a_half_or_ninefold(
    kind: str, loss_there: float, factor: float, undone: int
) -> None:
    """Without noise a small loss goes up and down on its way."""
    x, y = torch.eye(3, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    net = compile(model, loss="normal")
    opt = KFAC(net, damping_adaptation_interval=4, momentum_type=kind, **bounded(kind))
    opt.param_groups[0]["lr"] = 1e-6
    with torch.no_grad():
        model.weight.copy_(torch.full((2, 3), math.sqrt(loss_there / 2)))
        model.bias.zero_()
    for number in range(9):
        opt.zero_grad()
        (net(x) - y).square().sum(1).mean().backward()
        if number == 7:
            skipped = opt.skipped.item()
            with torch.no_grad():
                model.weight.mul_(math.sqrt(factor))
                model.bias.mul_(math.sqrt(factor))
            opt._step_state.checks.place.values = None  # as wrong steps do
        opt.step()  # the ninth is a check
    assert opt.skipped.item() - skipped == undone == opt.undone.item()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_not_finite_are_undone_at_the_next_check(kind: str) -> None:
    net, opt = made(kind)
    for number in range(6):
        step(net, opt, number)
    with torch.no_grad():
        next(net.parameters())[0, 0] = torch.nan
    for number in range(6, 9):
        step(net, opt, number)
    assert theta(net).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_too_large_for_a_number_is_undone_at_the_next_check(kind: str) -> None:
    """The outputs and the gradient are finite, the change of the loss is not."""
    net = compile(nn.Linear(3, 1), loss="mse")
    opt = KFAC(net, seed=0, damping_adaptation_interval=4, momentum_type=kind, **bounded(kind))
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    for number in range(9):  # checks in steps 4 and 8
        if number == 8:
            checkpoint = opt.state[net.model.weight]["checkpoint"].clone()
            with torch.no_grad():
                net.model.weight.mul_(1e25)
            opt._step_state.checks.place.values = None  # as wrong steps do
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
        opt.step()
    torch.testing.assert_close(net.model.weight.detach(), checkpoint, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_whose_gradient_is_not_finite_leaves_everything_as_it_was(kind: str) -> None:
    net, opt = made(kind)
    for number in range(8):
        step(net, opt, number)
    x, y = batch(8)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    next(net.parameters()).grad[0, 0] = torch.inf
    before = theta(net), averages(opt)
    skipped = opt.skipped.item()
    opt.step()  # the parameters of the last check are those of step 4
    torch.testing.assert_close((theta(net), averages(opt)), before, rtol=0, atol=0)
    assert opt.skipped.item() == skipped + 1


def save(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_bit_for_bit(kind: str) -> None:
    net, opt = made(kind)
    for number in range(7):
        step(net, opt, number)
    state, parameters = opt.state_dict(), {k: v.clone() for k, v in net.state_dict().items()}
    state = torch.load(save(state), weights_only=True)
    expected = [step(net, opt, number).item() for number in range(7, 18)]
    other, resumed = made(kind)
    other.load_state_dict(parameters)
    resumed.load_state_dict(state)
    assert [step(other, resumed, number).item() for number in range(7, 18)] == expected
    assert torch.equal(theta(other), theta(net))


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_without_a_forward_says_what_is_missing(kind: str) -> None:
    net, opt = made(kind)
    x, y = batch(0)
    step(net, opt, 0)
    opt.zero_grad()
    F.cross_entropy(net.model(x), y).backward()
    with pytest.raises(RuntimeError, match="momentum_type='" + kind + "' checks the length of this step with"):
        opt.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_measures_the_accuracy_is_not_checked(kind: str) -> None:
    (net, opt), (other, same) = made(kind), made(kind)
    for number in range(4):
        step(other, same, number)
        step(net, opt, number)
    step(other, same, 4)
    x, y = batch(4)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    net(3 * x)
    opt.step()
    torch.testing.assert_close((opt.rho, theta(net)), (same.rho, theta(other)), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_of_the_outputs_it_trains_and_the_report_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, opt = made(kind)
    step(net, opt, 0)
    assert not any("the checks of the step size" in line for line in opt.fallbacks())
    monkeypatch.setattr("kfac_fx.optim.batch_loss.hooked_leaves", lambda recorder, leaves: ([], False))
    first, *_, last = [step(net, opt, 1).item() for _ in range(20)]
    assert last < first and opt.damping < 1 and opt.rho.isfinite()
    assert "the checks of the step size take the loss as linear" in str(net.report)


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_with_a_batch_that_is_not_finite_leaves_everything_as_it_was(kind: str) -> None:
    """At the parameters of the last check its loss is no number, either."""
    net, opt = made(kind)
    for number in range(8):
        step(net, opt, number)
    x, y = batch(8)
    opt.zero_grad()
    F.cross_entropy(net(x * torch.nan), y).backward()
    before = theta(net), averages(opt)
    opt.step()
    torch.testing.assert_close((theta(net), averages(opt)), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_with_targets_that_are_not_finite_leaves_everything_as_it_was(kind: str) -> None:
    """The outputs are finite, here and at the parameters of the last check, and the change of the loss is no number."""
    net = compile(nn.Linear(3, 1), loss="mse")
    opt = KFAC(net, seed=0, damping_adaptation_interval=4, momentum_type=kind, **bounded(kind))
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    for number in range(9):  # checks in steps 4 and 8
        before = theta(net)
        opt.zero_grad()
        F.mse_loss(net(x), y if number < 8 else y / 0).backward()
        opt.step()
    assert torch.equal(theta(net), before) and opt.skipped == 1


@pytest.mark.parametrize(
    ("divisor", "undone", "happened"),
    [(11.0, False, "steps are shorter than a tenth of their length from step 0 on, up to 20"),
     (1.0, True, "checks undid steps 3 times in a row, up to step 2")],
)  # fmt: skip
def test_short_and_undone_steps_are_told_once_with_what_to_write(divisor: float, undone: bool, happened: str) -> None:
    watch = Watch()
    with pytest.warns(StalledWarning) as told:
        for number in range(60):
            watch.look(torch.tensor(divisor), torch.tensor(undone), number)
    (text,) = (str(warning.message) for warning in told)
    assert text.startswith(happened) and "write a smaller lr" in text and "write norm_constraint=10 for the" in text
