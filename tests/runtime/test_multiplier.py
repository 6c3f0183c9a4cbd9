"""The multiplier of "eigen_moments": the cosine of the gradient and the last update, the first check, and its state."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules.eigen_moments import RATE, most_momentum
from tests.runtime.multiplier import Multiplier
from tests.runtime.slow_kfac import batch, mlp
from tests.runtime.test_checks_adaptive import Curved, fisher, step, theta
from tests.tables import pairs

EARLY = (0, 1, 2, 5, 10)  # the steps of checks, up to the interval
OF_STATE = ("kfac/multiplier", "kfac/peak_lr", "last_update", "kfac/steps")


def made(**options: Any) -> tuple[Any, KFAC]:
    net = compile(mlp(), loss="categorical")
    defaults = {
        "damping_adaptation_interval": 100,
        "cov_update_every": 2,
        "invert_every": 3,
        "seed": 0,
        "exact_steps": False,
    }
    return net, KFAC(net, **{**defaults, **options})


def multiplier(opt: KFAC) -> float:
    return opt.scalars["multiplier"].item()


def last_update(net: Any, opt: KFAC) -> Tensor:
    return torch.cat([opt.state[parameter]["last_update"].flatten() for parameter in net.parameters()])


def gradient(net: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


SCHEDULES: dict[str, Any] = {
    "constant": lambda number: 1.0,
    "falling": lambda number: 0.7**number,
    "warmup": lambda number: min(1.0, 0.2 * (number + 1)),
    "warmup from zero": lambda number: min(1.0, 0.2 * number),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_it_grows_by_the_cosine_of_the_gradient_and_the_last_step(schedule: Any, weight_decay: float) -> None:
    """A step is the whole way, that of weight decay included."""
    net, opt = made(lr=torch.tensor(1.0, dtype=torch.float64), weight_decay=weight_decay)
    update, expected = torch.zeros_like(theta(net)), Multiplier()
    for number in range(20):
        opt.param_groups[0]["lr"].fill_(schedule(number))
        at, before = theta(net), multiplier(opt)
        step(net, opt, number)
        if number not in EARLY:
            expected.value, expected.peak = before, max(map(schedule, range(number)), default=0.0)
            expected.steps = number
            expected.grow(gradient(net), update, schedule(number))
            assert multiplier(opt) == pytest.approx(expected.value, rel=1e-9) and multiplier(opt) != before
        update = at - theta(net)
        assert number == 0 or update.any()
    assert opt.skipped == 0
    rate = RATE * multiplier(opt) / opt._step_state.checks.size.divisor
    rate = rate if weight_decay else rate * schedule(19)  # where the way is no multiple of the update, it has lr
    torch.testing.assert_close(last_update(net, opt) * rate, update)


def test_a_schedule_changes_exponents_alone() -> None:
    """Two optimizers see the same gradients and the same directions; the lr of the second falls to a tenth."""
    (net, opt), (other, falling) = made(norm_constraint=1e30), made(norm_constraint=1e30)
    for number in range(10):
        with torch.no_grad():
            for to, parameter in zip(other.parameters(), net.parameters(), strict=True):
                to.copy_(parameter)
        lr = 1 - 0.1 * number
        falling.param_groups[0]["lr"] = lr
        before = multiplier(opt), multiplier(falling)
        step(net, opt, number)
        step(other, falling, number)
        if number not in EARLY:
            exponents = [math.log(multiplier(of) / old) for of, old in zip((opt, falling), before, strict=True)]
            assert exponents[1] == pytest.approx(lr * exponents[0], rel=1e-6) and exponents[0] != 0
    assert lr == pytest.approx(0.1)


@pairs(("bound, least, most", [(1e30, 10.0, 10.0), (0.003, 1.2, 9.0), (1e-6, 1.0, 1.0)]), ("lr", [1.0, 0.25]))
def test_the_first_check_goes_half_as_far_as_the_bound_allows(
    bound: float, least: float, most: float, lr: float
) -> None:
    """At the whole lr, whatever the schedule begins with."""
    net, opt = made(norm_constraint=bound, lr=lr)
    at, (x, _) = theta(net), batch(0)
    loss = step(net, opt, 0).item()
    move = RATE * last_update(net, opt)
    rho = math.sqrt(float(move @ fisher(net.model, at, x) @ move) / (bound * max(1.0, loss)))
    factor = min(10.0, max(1.0, 0.5 / rho))
    assert multiplier(opt) == pytest.approx(factor) and least <= factor <= most
    ratio = max(1.0, lr * rho * factor)
    torch.testing.assert_close(at - theta(net), lr * factor / ratio * move)
    assert opt._step_state.checks.size.ratio.item() == pytest.approx(ratio)


def test_the_first_check_of_a_warmup_from_zero_is_the_first_one_with_a_step() -> None:
    net, opt = made(norm_constraint=1e30, lr=0.0)
    step(net, opt, 0)
    assert multiplier(opt) == 1
    opt.param_groups[0]["lr"] = 0.1
    step(net, opt, 1)
    step(net, opt, 2)
    assert 10 / math.e <= multiplier(opt) <= 10 * math.e**2 and multiplier(opt) not in (1, 10)


def test_the_bounds_are_a_tenth_and_thirty() -> None:
    for start, least, most in ((29.9, 30.0, 30.0), (0.11, 0.1, 0.1)):
        net, opt = made()
        for number in range(3):
            step(net, opt, number)
        opt.scalars["multiplier"].fill_(start)
        x, y = batch(3)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        sign = 1 if start > 1 else -1
        for parameter in net.parameters():
            parameter.grad = sign * opt.state[parameter]["last_update"].clone()
        opt.step()
        assert least <= multiplier(opt) <= most


@pairs(("sign", {"grows": 1, "shrinks": -1}), ("steps", [50, 99, 399]))
def test_it_grows_more_slowly_after_a_hundred_steps_and_shrinks_as_fast(steps: int, sign: int) -> None:
    net, opt = made()
    for number in range(4):
        step(net, opt, number)
    opt.scalars["steps"].fill_(steps)
    opt.scalars["multiplier"].fill_(2.0)
    x, y = batch(4)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    for parameter in net.parameters():
        parameter.grad = sign * opt.state[parameter]["last_update"].clone()
    opt.step()
    weight = 100 / (steps + 1) if sign > 0 and steps > 99 else 1.0
    assert multiplier(opt) == pytest.approx(2 * math.exp(sign * weight)) and opt.scalars["steps"] == steps + 1


@pairs(("before", [3.0, 1.0, 0.5]), ("lr", {"at its peak": 1.0, "falling": 0.9}))
def test_it_does_not_fall_below_one_while_a_schedule_shortens_steps(lr: float, before: float) -> None:
    net, opt = made(lr=1.0)
    for number in range(4):
        step(net, opt, number)
    opt.scalars["multiplier"].fill_(before)
    opt.param_groups[0]["lr"] = lr
    x, y = batch(4)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    for parameter in net.parameters():
        parameter.grad = -opt.state[parameter]["last_update"].clone()
    opt.step()
    shrunk = before * math.exp(-lr)
    assert multiplier(opt) == pytest.approx(shrunk if lr == 1 else max(shrunk, min(before, 1.0)))


def test_the_mean_of_gradients_looks_back_over_a_tenth_of_the_steps() -> None:
    """At most by the momentum that is given. The weight of the past in the mean tells."""
    numbers = [1 / (1 - most_momentum(torch.tensor(float(steps))).item()) for steps in (1, 100, 150, 1000)]
    assert numbers == pytest.approx([10, 10, 15, 100])
    for steps, beta in ((5, 0.9), (150, 1 - 1 / 15.1), (1000, 0.95)):
        net, opt = made(momentum=0.95)
        for number in range(4):
            step(net, opt, number)
        opt.scalars["steps"].fill_(steps)
        before = [stack.total_weight.clone() for stack in opt._step_state.memory.means.averages]  # type: ignore[attr-defined]
        step(net, opt, 4)
        for old, stack in zip(before, opt._step_state.memory.means.averages, strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(stack.total_weight, beta * old + 1)


class Cliff(Curved):
    """The outputs explode behind the tangent."""

    def curve(self, y: Tensor) -> Tensor:
        return y + 1e9 * F.relu(y - 0.005) ** 3


def test_a_step_that_is_undone_at_once_is_forgotten_and_shortens_those_that_follow() -> None:
    net = compile(Cliff(), loss="normal")
    opt = KFAC(net, exact_steps=False)
    x = torch.eye(2, dtype=torch.float64)
    values = []
    for _ in range(2):
        opt.zero_grad()
        (net(x) - 10.0).square().sum(1).mean().backward()
        opt.step()
        values.append(multiplier(opt))
        assert not last_update(net, opt).any()
    assert opt.skipped == 2
    assert 0.3 < values[0] <= 3 and values[1] == pytest.approx(max(0.1, 0.3 * values[0]))


def test_steps_that_a_later_check_undoes_are_forgotten() -> None:
    net, opt = made(damping_adaptation_interval=4)
    for number in range(7):
        step(net, opt, number)
    assert last_update(net, opt).any()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(30)
    opt._step_state.checks.place.values = None  # as wrong steps do
    before = multiplier(opt)
    step(net, opt, 7)
    assert multiplier(opt) != before
    before = multiplier(opt)
    step(net, opt, 8)  # a check
    assert opt.skipped == 1 and not last_update(net, opt).any()
    step(net, opt, 9)
    assert last_update(net, opt).any() and multiplier(opt) == before


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")  # of the step that changes nothing
@pairs(("number", {"a check": 8, "no check": 9}), ("value", [math.nan, math.inf, 1e200]))
def test_a_gradient_that_is_not_finite_leaves_it_as_it_was(number: int, value: float) -> None:
    net, opt = made(damping_adaptation_interval=4)
    for earlier in range(number):
        step(net, opt, earlier)
    before = multiplier(opt), last_update(net, opt)
    x, y = batch(number)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    next(iter(net.parameters())).grad[0, 0] = value
    opt.step()
    assert opt.skipped == 1 and multiplier(opt) == before[0] and torch.equal(last_update(net, opt), before[1])
    step(net, opt, number + 1)
    assert multiplier(opt) != before[0] and not torch.equal(last_update(net, opt), before[1])


def test_weight_decay_does_not_make_it_drift() -> None:
    """At rest the update takes back what weight decay takes, so gradients have the direction of the last update."""
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    net = compile(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)), (x,), loss="categorical")
    opt = KFAC(net, weight_decay=3.0)
    for _ in range(120):
        rows = torch.randperm(60)[:20]
        opt.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        opt.step()
    assert multiplier(opt) < 4


def test_micro_batches_and_the_scale_of_a_loss_leave_it_alone() -> None:
    """The mean of the gradients of two halves is that of the batch, and the cosine knows no length."""
    runs = [made(), made()]
    for number in range(8):
        x, y = batch(number)
        for parts, (net, opt) in zip((1, 2), runs, strict=True):
            opt.zero_grad()
            for some, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(net(some), targets) / parts).backward()
            opt.step()
    assert multiplier(runs[0][1]) == pytest.approx(multiplier(runs[1][1]), rel=1e-6)


# --- state ------------------------------------------------------------------------------------------------------------


def test_its_state_is_in_the_checkpoint_and_a_training_goes_on_bit_for_bit() -> None:
    net, opt = made(lr=0.5)
    for number in range(7):
        step(net, opt, number)
    stored = copy.deepcopy((net.state_dict(), opt.state_dict()))
    first = stored[1]["state"][0]
    assert first["kfac/multiplier"] == multiplier(opt) != 1 and first["kfac/peak_lr"] == 0.5
    assert first["last_update"].any()
    other, resumed = made(lr=0.1)
    other.load_state_dict(stored[0])
    with pytest.warns(UserWarning, match="These go on from the state: lr was 0.5 there, and 0.1 is given here"):
        resumed.load_state_dict(stored[1])
    for number in range(7, 12):
        step(net, opt, number)
        step(other, resumed, number)
        assert multiplier(opt) == multiplier(resumed)
    assert torch.equal(theta(net), theta(other))


def test_a_state_of_before_it_loads_and_goes_on_with_the_first_values() -> None:
    net, opt = made(damping_adaptation_interval=4)
    for number in range(6):
        step(net, opt, number)
    stored = copy.deepcopy((net.state_dict(), opt.state_dict()))
    for values in stored[1]["state"].values():
        for name in OF_STATE:
            values.pop(name, None)
    other, resumed = made(damping_adaptation_interval=4)
    other.load_state_dict(stored[0])
    with pytest.warns(
        UserWarning, match="of an earlier version, and these begin anew: multiplier, peak_lr, last_update"
    ):
        resumed.load_state_dict(stored[1])
    assert multiplier(resumed) == 1 and not last_update(other, resumed).any()
    assert resumed.scalars["peak_lr"] == 0 and resumed.scalars["steps"] == opt.counter == 6
    for parameter, same in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(resumed.state[same]["checkpoint"], opt.state[parameter]["checkpoint"])
    losses = [step(other, resumed, number).item() for number in range(6, 30)]
    assert resumed.skipped == 0 and multiplier(resumed) != 1 and min(losses[-6:]) < losses[0]


@pytest.mark.parametrize("name", OF_STATE[:3])
def test_any_one_of_its_entries_may_be_missing(name: str) -> None:
    net, opt = made()
    for number in range(4):
        step(net, opt, number)
    state = copy.deepcopy(opt.state_dict())
    for values in state["state"].values():
        values.pop(name, None)
    other, resumed = made()
    with pytest.warns(UserWarning, match=f"these begin anew: {name.removeprefix('kfac/')}.$"):
        resumed.load_state_dict(state)
    assert multiplier(resumed) == (1 if name == "kfac/multiplier" else multiplier(opt))
    expected = torch.zeros_like(theta(net)) if name == "last_update" else last_update(net, opt)
    assert torch.equal(last_update(other, resumed), expected)


def test_other_entries_may_not_be_missing() -> None:
    net, opt = made()
    step(net, opt, 0)
    state = copy.deepcopy(opt.state_dict())
    for values in state["state"].values():
        del values["checkpoint"]
    with pytest.raises(ValueError, match="checkpoint"):
        made()[1].load_state_dict(state)


def test_parameters_without_a_gradient_keep_their_last_update() -> None:
    """The cosine is that of the parameters that have one."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).double()

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers[0](x) + self.layers[1](x)
            return y

    net = compile(Either(), loss="mse")
    opt = KFAC(net, seed=0, exact_steps=False)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    for number in range(5):
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        if number == 4:
            layers: Any = net.model.layers
            kept = [opt.state[parameter]["last_update"].clone() for parameter in layers[1].parameters()]
            pairs = [(p.grad.clone(), opt.state[p]["last_update"].clone()) for p in layers[0].parameters()]
            g, last = (torch.cat([pair[n].flatten() for pair in pairs]) for n in (0, 1))
            expected = multiplier(opt) * math.exp(float(F.cosine_similarity(g, last, dim=0)))
            for parameter in layers[1].parameters():
                parameter.grad = None
        opt.step()
    assert multiplier(opt) == pytest.approx(min(30.0, expected))
    for parameter, old in zip(layers[1].parameters(), kept, strict=True):
        assert torch.equal(opt.state[parameter]["last_update"], old)
