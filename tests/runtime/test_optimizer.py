"""KFAC against a slow optimizer written from the formulas."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.optim.optimizer import KFAC
from tests.runtime.slow_kfac import SlowKFAC, batch, loss_of, mlp

STEPS = 12


def compiled_mlp(**options: Any) -> CompiledModule:
    return compile(mlp(), loss="categorical", **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "regular": {"lr": 0.3},
    "regular without momentum": {"lr": 0.3, "momentum": 0.0},
    "regular, everything": {
        "lr": 0.3,
        "norm_constraint": 0.02,
        "weight_decay": 0.05,
        "adapt_damping": True,
        "damping_adaptation_interval": 2,
        "precon_damping_mult": 1.7,
        "l2_reg": 0.003,
        "cov_update_every": 2,
        "invert_every": 3,
        "num_burnin_steps": 2,
    },
    "regular, gradient form": {"lr": 0.3, "norm_constraint": 0.02, "norm_constraint_form": "gradient"},
    "adam": {"lr": 0.2, "momentum_type": "adam"},
    "adam, everything": {
        "lr": 0.3,
        "momentum_type": "Adam",
        "norm_constraint": 0.02,
        "weight_decay": 0.05,
        "adapt_damping": True,
        "damping_adaptation_interval": 3,
        "damping_adaptation_decay": 0.8,
        "invert_every": 2,
        "num_burnin_steps": 1,
    },
    "adam, gradient form": {
        "lr": 0.3,
        "momentum_type": "adam",
        "norm_constraint": 0.02,
        "norm_constraint_form": "gradient",
    },
    "qmodel": {"momentum": None, "momentum_type": "qmodel"},
    "qmodel, everything": {
        "momentum": None,
        "momentum_type": "qmodel",
        "weight_decay": 0.05,
        "adapt_damping": True,
        "damping_adaptation_interval": 2,
        "precon_damping_mult": 0.6,
        "qmodel_update_rescale": 0.8,
        "l2_reg": 0.003,
        "invert_every": 3,
        "num_burnin_steps": 1,
    },
    "qmodel, adapted, rescaled": {
        "momentum": None,
        "momentum_type": "qmodel",
        "adapt_damping": True,
        "qmodel_update_rescale": 0.8,
        "invert_every": 2,
    },
    "qmodel_fixedmu": {"momentum": 0.5, "momentum_type": "qmodel_fixedmu"},
    "qmodel_fixedmu, adapted": {
        "momentum": 0.5,
        "momentum_type": "qmodel_fixedmu",
        "adapt_damping": True,
        "damping_adaptation_interval": 1,
        "invert_every": 1,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_follow_the_formulas(options: dict[str, Any]) -> None:
    net = compiled_mlp()
    slow_options = {**options, "momentum_type": options.get("momentum_type", "regular").lower()}
    slow = SlowKFAC(mlp(), damping=0.1, **slow_options)
    opt = KFAC(net, damping=0.1, **{"seed": 0, **options})
    for number in range(STEPS):
        x, y = batch(number)
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        expected = slow.step(x, y, F.cross_entropy)
        torch.testing.assert_close(loss.detach(), expected)
        opt.step(evaluate=loss_of(net, x, y))
        for name, parameter in slow.model.named_parameters():
            torch.testing.assert_close(net.get_parameter(name), parameter, msg=f"step {number}: {name}")
        if slow.adapted:
            torch.testing.assert_close(opt.predicted_change.item(), slow.predicted)
            torch.testing.assert_close(opt.rho.item(), slow.rho)
        torch.testing.assert_close(opt.damping.item(), slow.damping)
    assert (slow.damping != 0.1) == options.get("adapt_damping", False)
    assert opt.counter == slow.step_count
    assert opt.skipped.item() == 0


def noisy_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 4)).double()


@pytest.mark.parametrize("momentum_type", ["regular", "qmodel"])
def test_damping_measured_in_the_next_step_is_the_same_damping(momentum_type: str) -> None:
    """Between two steps the parameters stand still; the inverses of the next see the new damping either way, measured
    under the same noise, also by an optimizer that was saved in between."""
    kind: dict[str, Any] = {"momentum": None} if momentum_type == "qmodel" else {"lr": 0.3}
    kind |= {"adapt_damping": True, "damping_adaptation_interval": 2, "invert_every": 2, "momentum_type": momentum_type}

    def made(immediately: bool) -> tuple[CompiledModule, KFAC]:
        net = compile(noisy_mlp(), loss="categorical")
        return net, KFAC(net, damping=0.1, seed=0, update_damping_immediately=immediately, **kind)

    (net, now), (other, later) = made(True), made(False)
    last, measured = None, [(torch.tensor(0.1), torch.tensor(torch.nan))]
    for number in range(7):
        x, y = batch(number)
        torch.manual_seed(number)
        now.zero_grad()
        F.cross_entropy(net(x), y).backward()
        now.step(evaluate=loss_of(net, x, y))
        if number == 4:  # after a step that is still to be measured
            state, parameters = later.state_dict(), other.state_dict()
            other, later = made(False)
            later.load_state_dict(state)
            other.load_state_dict(parameters)
            last = loss_of(other, *batch(3))
        torch.manual_seed(number)
        later.zero_grad()
        loss = F.cross_entropy(other(x), y)
        loss.backward()
        later.step(loss=loss, previous=last)
        torch.testing.assert_close((later.damping, later.rho), measured[-1], check_dtype=False, equal_nan=True)
        measured.append((now.damping.clone(), now.rho.clone()))
        last = loss_of(other, x, y)
        for parameter, its in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, its)
    assert len({damping.item() for damping, _ in measured}) > 1


def test_a_late_measure_says_which_losses_it_needs() -> None:
    net = compiled_mlp()
    opt = KFAC(
        net, lr=0.3, damping=0.1, adapt_damping=True, damping_adaptation_interval=1, update_damping_immediately=False
    )
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    with pytest.raises(ValueError, match=r"the loss before the update, every 1 steps: call step\(loss=loss\)"):
        opt.step()
    net(x)
    opt.step(loss=1.5)
    net(x)
    with pytest.raises(ValueError, match=r"measures a step in the next one, every 1 steps: .*previous=closure\)"):
        opt.step(loss=1.5)


@pytest.mark.parametrize("momentum_type", ["regular", "adam", "qmodel"])
def test_the_learning_rate_is_read_every_step(momentum_type: str) -> None:
    quadratic = momentum_type == "qmodel"
    options: dict[str, Any] = {"momentum": None} if quadratic else {"lr": 0.3}
    net = compiled_mlp()
    opt = KFAC(net, damping=0.1, momentum_type=momentum_type, seed=0, **options)
    slow = SlowKFAC(mlp(), damping=0.1, momentum_type=momentum_type, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for number in range(4):
        x, y = batch(number)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        slow.step(x, y, F.cross_entropy, scale=0.5**number)
        opt.step()
        scheduler.step()
        torch.testing.assert_close(dict(net.named_parameters()), dict(slow.model.named_parameters()))


BINDING: dict[str, Any] = {"lr": 0.3, "damping": 0.1, "norm_constraint": 1e-4, "seed": 0}


def steps_of(net: CompiledModule, opt: KFAC, numbers: range) -> list[dict[str, torch.Tensor]]:
    """The moves of the parameters in steps on some batches."""
    moves = []
    for number in numbers:
        x, y = batch(number)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        opt.step()
        moves.append({name: parameter.detach() - before[name] for name, parameter in net.named_parameters()})
    return moves


@pytest.mark.parametrize("momentum_type", ["regular", "adam"])
@pytest.mark.parametrize(("form", "ratio"), [("update", 0.5), ("gradient", 1.0)])
def test_half_the_learning_rate_halves_a_step_that_the_norm_constraint_shortens(
    momentum_type: str, form: str, ratio: float
) -> None:
    """The form of TF K-FAC cancels the learning rate."""
    moves = []
    for factor in (1.0, 0.5):
        net = compiled_mlp()
        opt = KFAC(net, momentum_type=momentum_type, norm_constraint_form=form, **BINDING)
        torch.optim.lr_scheduler.LambdaLR(opt, lambda _, factor=factor: factor)  # type: ignore[misc]
        moves += steps_of(net, opt, range(1))
    whole, half = moves
    for name, move in whole.items():
        torch.testing.assert_close(half[name], ratio * move)


@pytest.mark.parametrize(
    ("momentum_type", "form"), [("regular", "update"), ("adam", "update"), ("regular", "gradient")]
)
def test_the_norm_constraint_bounds_steps_with_momentum(momentum_type: str, form: str) -> None:
    """The form "gradient" bounds the part of a step that comes from the last gradient alone."""
    net = compiled_mlp()
    opt = KFAC(net, momentum_type=momentum_type, norm_constraint_form=form, **BINDING)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    ratios = []
    for number in range(8):
        (move,) = steps_of(net, opt, range(number, number + 1))
        squared = sum((move[name] * product).sum().item() for name, product in opt.estimator.multiply(move).items())
        ratios.append(squared / (1e-4 * (0.8**number) ** 2))
        scheduler.step()
    if form == "update":
        assert ratios == pytest.approx([1.0] * len(ratios))
    else:
        assert max(ratios) > 4


@pytest.mark.parametrize("scheduled", [True, False])
def test_the_initial_learning_rate_of_the_norm_constraint_is_in_the_state(scheduled: bool) -> None:
    def optimizer(lr: float) -> tuple[CompiledModule, KFAC]:
        net = compiled_mlp()
        return net, KFAC(net, **{**BINDING, "lr": lr})

    net, opt = optimizer(0.3)
    if scheduled:
        torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 0.5)
    else:
        opt.param_groups[0]["lr"] = 0.15
    steps_of(net, opt, range(3))
    other, resumed = optimizer(0.7)
    other.load_state_dict(net.state_dict())
    with pytest.warns(UserWarning, match="These go on from the state: lr was 0.3 there, and 0.7 is given here"):
        resumed.load_state_dict(opt.state_dict())
    assert resumed.param_groups[0]["first_lr"] == 0.3
    for move, same in zip(steps_of(net, opt, range(3, 6)), steps_of(other, resumed, range(3, 6)), strict=True):
        assert all(torch.equal(move[name], same[name]) for name in move)


def test_a_state_without_an_initial_learning_rate_gets_that_of_its_scheduler() -> None:
    opt = KFAC(compiled_mlp(), **BINDING)
    torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 0.5)
    state = opt.state_dict()
    for group in state["param_groups"]:
        del group["first_lr"]
    resumed = KFAC(compiled_mlp(), **{**BINDING, "lr": 0.7})
    without = (
        "the state was saved without norm_constraint, so parameter groups 0 have no 'first_lr' in it: the 'initial_lr'"
    )
    with (
        pytest.warns(UserWarning, match=without),
        pytest.warns(UserWarning, match="lr was 0.3 there, and 0.7 is given here"),
    ):
        resumed.load_state_dict(state)
    assert resumed.param_groups[0]["first_lr"] == 0.3


def test_an_initial_learning_rate_that_is_a_tensor_stays_as_it_was() -> None:
    lr = torch.tensor(0.3, dtype=torch.float64)
    opt = KFAC(compiled_mlp(), **{**BINDING, "lr": lr})
    lr.mul_(0.5)
    assert opt.param_groups[0]["first_lr"].item() == 0.3


def test_the_qmodel_reports_its_step_and_momentum() -> None:
    net = compiled_mlp()
    opt = KFAC(net, damping=0.1, momentum_type="qmodel", momentum=None)
    assert opt.qmodel_learning_rate.isnan()
    for number in range(2):
        x, y = batch(number)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        assert opt.qmodel_learning_rate > 0
        assert (opt.qmodel_momentum == 0) == (number == 0)
        assert opt.predicted_change < 0


def test_a_scalar_that_there_is_not_is_told_those_that_there_are() -> None:
    scalars = KFAC(compiled_mlp()).scalars
    assert "multiplyer" not in scalars and scalars.get("multiplyer") is None
    with pytest.raises(
        KeyError, match=r"optimizer\.scalars has .*rho, .*, and no 'multiplyer'\. Did you mean 'multiplie"
    ):
        scalars["multiplyer"]


def test_training_is_untouched_but_for_the_step() -> None:
    """Outputs, gradients, buffers and torch's random streams are those of the plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4)).double()
    plain = copy.deepcopy(model)
    net = compile(model, batch(0)[:1], loss="categorical")
    opt = KFAC(net, lr=0.1, damping=0.1, adapt_damping=True, damping_adaptation_interval=1)
    torch.manual_seed(1)
    outputs = []
    for number in range(3):
        x, y = batch(number)
        y_net = net(x)
        outputs.append(y_net.detach())
        opt.zero_grad()
        loss = F.cross_entropy(y_net, y)
        loss.backward()
        opt.step(evaluate=loss_of(net, x, y))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(plain(batch(0)[0]), outputs[0])
    for number in range(1, 3):
        plain(batch(number)[0])
    assert torch.equal(torch.get_rng_state(), after)
    assert net.get_buffer("1.num_batches_tracked").item() == 3


def trained_on_batches_and_on_their_parts(
    more_forwards: bool = False, **options: Any
) -> tuple[CompiledModule, CompiledModule]:
    """more_forwards: a forward without a backward, which is no micro-batch, after those of the parts."""
    whole, parts = compiled_mlp(), compiled_mlp()
    made = [KFAC(net, damping=0.1, **options) for net in (whole, parts)]
    for number in range(3):
        x, y = batch(number)
        for opt in made:
            opt.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
            (F.cross_entropy(parts(x[part]), y[part]) / 3).backward()
        if more_forwards:
            parts(x)
        for opt in made:
            opt.step()
    return whole, parts


@pytest.mark.parametrize("momentum_type", ["regular", "qmodel"])
def test_micro_batches_of_a_step_count_as_one_batch(momentum_type: str) -> None:
    options: dict[str, Any] = {"momentum": None} if momentum_type == "qmodel" else {"lr": 0.3}
    whole, parts = trained_on_batches_and_on_their_parts(momentum_type=momentum_type, seed=3, **options)
    torch.testing.assert_close(dict(parts.named_parameters()), dict(whole.named_parameters()))


def test_empirical_statistics_of_micro_batches_count_as_one_batch() -> None:
    whole, parts = trained_on_batches_and_on_their_parts(more_forwards=True, lr=0.3, estimation_mode="empirical")
    torch.testing.assert_close(dict(parts.named_parameters()), dict(whole.named_parameters()))


def empirical() -> tuple[CompiledModule, KFAC]:
    net = compiled_mlp()
    return net, KFAC(net, lr=0.3, damping=0.1, estimation_mode="empirical")


def test_empirical_micro_batches_of_any_sizes_count_as_one_batch() -> None:
    x, y = batch(0)
    (whole, one), (parts, other) = empirical(), empirical()
    F.cross_entropy(whole(x), y).backward()
    for part in (slice(0, 1), slice(1, 1), slice(1, 6)):
        (F.cross_entropy(parts(x[part]), y[part], reduction="sum") / 6).backward()
    for opt in (one, other):
        opt.step()
    torch.testing.assert_close(dict(parts.named_parameters()), dict(whole.named_parameters()))


@pytest.mark.parametrize("by_net", [False, True])
def test_gradients_that_were_zeroed_leave_no_empirical_statistics(by_net: bool) -> None:
    x, y = batch(0)
    (plain, one), (zeroed, other) = empirical(), empirical()
    F.cross_entropy(zeroed(3 * x), y).backward()
    F.cross_entropy(plain(x), y).backward()
    outputs = zeroed(x)
    (zeroed if by_net else other).zero_grad()
    F.cross_entropy(outputs, y).backward()
    for opt in (one, other):
        opt.step()
    torch.testing.assert_close(dict(zeroed.named_parameters()), dict(plain.named_parameters()))


def test_a_second_backward_of_a_forward_has_no_empirical_fisher() -> None:
    net, opt = empirical()
    x, y = batch(0)
    losses = F.cross_entropy(net(x), y, reduction="none") / 6
    losses[:3].sum().backward(retain_graph=True)
    losses[3:].sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"one backward of a forward, and there were 2 of this one\. They reached .*2\.weight, 2\.bias.*\nAdd the "
        r'losses up and call backward once, .*: estimation_mode="gradients"\.',
    ):
        opt.step()


def test_a_second_backward_has_the_empirical_fisher_if_the_first_one_was_given_up() -> None:
    x, y = batch(0)
    (plain, one), (zeroed, other) = empirical(), empirical()
    for net, opt, parts in ((plain, one, [slice(3, 6)]), (zeroed, other, [slice(3), slice(3, 6)])):
        losses = F.cross_entropy(net(x), y, reduction="none") / 6
        for part in parts:
            opt.zero_grad()
            losses[part].sum().backward(retain_graph=True)
        opt.step()
    torch.testing.assert_close(dict(zeroed.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empirical_statistics_are_those_of_the_true_targets(reduction: str) -> None:
    net = compiled_mlp()
    opt = KFAC(net, lr=0.0, damping=0.1, estimation_mode="empirical", reduction=reduction)
    x, y = batch(0)
    F.cross_entropy(net(x), y, reduction=reduction).backward()
    opt.step()
    moments = net.record((x,), {}, mode="empirical", targets=y)
    expected = moments.statistics[("2.weight", "2.bias")]["G"] / 6
    torch.testing.assert_close(opt.estimator.blocks[("2.weight", "2.bias")].factors["G"].value, expected)


class Zeta(nn.Module):
    """Hurwitz's zeta function has no derivative in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.special.zeta(2.0, 1 + torch.exp(self.first(x))))
        return y


def test_a_slower_quadratic_model_is_told_in_the_report() -> None:
    torch.manual_seed(0)
    net = compile(Zeta().double(), batch(0)[:1], loss="categorical")
    opt = KFAC(net, damping=0.1, momentum_type="qmodel", momentum=None)
    assert net.report.to_dict()["fallbacks"] == []
    x, y = batch(0)
    F.cross_entropy(net(x), y).backward()
    opt.step()
    assert (
        net.report.to_dict()["fallbacks"]
        == opt.fallbacks()
        == [
            "the exact quadratic model runs in reverse mode twice, a multiple of the time and memory of forward mode: "
            "Trying to use forward AD with special_zeta that does not support it because it has not been "
            "implemented yet."
        ]
    )
    assert "fallback  the exact quadratic model runs in reverse mode twice" in str(net.report)


def test_a_loss_that_nobody_could_look_at_is_told_in_the_report() -> None:
    net = compiled_mlp()
    opt = KFAC(net, lr=0.3, damping=0.1)
    opt.estimator.accumulate(net.record(batch(0)[:1], {}))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    opt.step()
    assert opt.fallbacks() == [
        "whether the training loss is the registered one was not checked: the first step's forward had no outputs of "
        "the Fisher to watch, or no memory for it"
    ]


def test_the_numbers_of_an_optimizer_are_float32_at_least() -> None:
    net = compile(nn.Linear(3, 2).to(torch.bfloat16), loss="normal")
    assert KFAC(net).damping.dtype is torch.float32


def test_a_join_of_processes_computes_where_the_damping_is() -> None:
    assert KFAC(compiled_mlp()).join_device == torch.device("cpu")
