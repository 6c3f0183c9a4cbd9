"""Agreement in "eigen_moments": steps that do what checks promise on later batches become longer, others do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.optim.checks import Check
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules import EigenMoments
from tests.runtime.test_checks_adaptive import fisher, theta

CHECKS = (0, 1, 2, 5, 10, 20, 30)


def made(bound: float = 0.03) -> tuple[CompiledModule, KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    net = compile(model, loss="categorical")
    return net, KFAC(net, seed=0, norm_constraint=bound, damping_adaptation_interval=10, exact_steps=False)


def data(number: int, noise: bool, cases: int = 6) -> tuple[Tensor, Tensor]:
    """noise: targets that do not depend on the inputs; otherwise many cases of one rule."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(cases, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (cases,), generator=generator) if noise else x[:, :3].argmax(1)


def step(net: CompiledModule, opt: KFAC, batch: tuple[Tensor, Tensor]) -> Tensor:
    opt.zero_grad()
    loss = F.cross_entropy(net(batch[0]), batch[1])
    loss.backward()
    opt.step()
    return loss.detach()


def scalar(opt: KFAC, name: str) -> float:
    return float(opt.scalars[name])


def test_agreement_is_the_fall_of_a_later_batch_next_to_the_promised_one() -> None:
    net, opt = made()
    last, promised = 0, 0.0
    before: dict[str, Any] = {}
    for number in range(31):
        batch, here = data(number, noise=False, cases=64), {n: p.clone() for n, p in net.model.state_dict().items()}
        loss = step(net, opt, batch)
        if number not in CHECKS:
            continue
        if number:
            outputs = torch.func.functional_call(net.model, before, (batch[0],))
            fall = float(F.cross_entropy(outputs, batch[1]) - loss)
            expected = max(-1.0, min(1.0, fall / ((number - last) * promised)))
            assert scalar(opt, "agreement") == pytest.approx(expected, rel=1e-6)
        last, before, promised = number, here, -float(opt.predicted_change)
        assert scalar(opt, "promised") == pytest.approx(promised) and promised > 0


def test_the_multiplier_grows_faster_where_batches_agree_and_gives_it_back_where_they_do_not() -> None:
    net, opt = made(bound=0.3)
    gained = []
    for _ in range(6):
        step(net, opt, data(0, noise=False, cases=64))
        gained.append(scalar(opt, "advance"))
    assert scalar(opt, "agreed") >= 0.75 and gained[0] == 1 and 1 < gained[1] < gained[2] < gained[5] <= 8
    assert gained[2] == gained[3] == gained[4]  # at checks alone
    for number in range(6, 10):
        step(net, opt, data(number, noise=True))
    before = scalar(opt, "multiplier")
    step(net, opt, data(10, noise=True))
    assert scalar(opt, "agreed") < 0.75 and scalar(opt, "advance") == 1
    assert scalar(opt, "multiplier") < math.e * before / gained[5]


def test_the_multiplier_advances_in_the_first_five_steps_alone() -> None:
    """The check after ten steps is the last one for ten steps."""
    net, opt = made(bound=30.0)
    opt.param_groups[0]["lr"] = 0.01  # along which the loss is linear
    gained = []
    for number in range(11):
        if number in (5, 10):
            opt.scalars["multiplier"].fill_(1.0)  # far below the bound
        step(net, opt, data(0, noise=False, cases=64))
        gained.append(scalar(opt, "advance"))
    assert scalar(opt, "agreed") >= 0.75 and gained[5] == 2 * gained[4] and gained[10] == gained[5]


def test_batches_of_noise_lengthen_no_step() -> None:
    net, opt = made()
    for number in range(31):
        step(net, opt, data(number, noise=True))
        assert scalar(opt, "agreed") < 0.75
        assert scalar(opt, "trust") == scalar(opt, "advance") == 1


def test_the_multiplier_goes_a_quarter_of_the_way_that_is_best_for_other_batches(monkeypatch: Any) -> None:
    """At the checks of the first twenty steps alone, to twice its value at most, where two checks in a row say so. The
    bound is too wide to be felt."""
    best, factors, along, advance = list[float](), list[float](), Check.along, EigenMoments.advance

    def noted(check: Check, flat: FlatParameters, move: Tensor) -> Any:
        result = along(check, flat, move)
        best.append(-float(result[1] / result[0]))
        return result

    def seen(rule: EigenMoments, *args: Any) -> Tensor:
        factors.append(float(result := advance(rule, *args)))
        return result

    monkeypatch.setattr(Check, "along", noted)
    monkeypatch.setattr(EigenMoments, "advance", seen)
    net, opt = made(bound=1e9)
    least, ways = list[float](), list[float]()
    for number in range(31):
        opt.param_groups[0]["lr"] = 1.0 if number < 2 else 0.5
        if number in CHECKS:
            opt.scalars["multiplier"].fill_(4.0 if number <= 20 else 1.0)  # so that steps are too short
        step(net, opt, data(number, noise=False, cases=64))
        if number in CHECKS:
            least.append(scalar(opt, "agreed"))
            ways.append(0.25 * scalar(opt, "agreement") * best[-1] * opt.param_groups[0]["lr"])
    expected = [max(1.0, min(2.0, way)) if of >= 0.4 else 1.0 for of, way in zip(least, ways, strict=True)]
    late = CHECKS.index(10), CHECKS.index(20)
    assert [factors[n] for n in late] == pytest.approx([expected[n] for n in late], rel=1e-6)
    assert any(1 < factors[n] < 2 for n in late)
    assert ways[CHECKS.index(30)] > 1 and factors[CHECKS.index(30)] == 1


@pytest.mark.parametrize(("last", "grows"), [(0.1, False), (1.0, True)])
def test_one_check_alone_does_not_lengthen_steps(last: float, grows: bool) -> None:
    """In a deep network without skips the curvature may be another one at the next check. last: A before it."""
    net, opt = made(bound=1e9)
    for _ in range(10):
        step(net, opt, data(0, noise=False, cases=64))
    opt.scalars["agreement"].fill_(last)
    opt.scalars["multiplier"].fill_(0.5)
    step(net, opt, data(0, noise=False, cases=64))
    assert scalar(opt, "agreement") > 0.4 and scalar(opt, "agreed") <= last
    assert (scalar(opt, "multiplier") > 0.75) == grows


def test_trust_widens_the_bound_where_the_quadratic_model_is_right_and_batches_agree() -> None:
    """The squared Fisher norm of a step is at most T² times the bound, and T grows from 1 to 4."""
    bound, trusts, norms = 1e-6, list[float](), list[float]()
    net, opt = made(bound)
    batch = data(0, noise=False, cases=64)
    for number in range(31):
        at, trust = theta(net), scalar(opt, "trust")
        matrix = fisher(net.model, at, batch[0]) if number in CHECKS else None
        loss = float(step(net, opt, batch))
        if matrix is not None:
            move = theta(net) - at
            norms.append(math.sqrt(float(move @ matrix @ move) / (bound * max(1.0, loss))))
            trusts.append(trust)
    assert opt.skipped == 0 and trusts[:4] == [1, 1, 2, 4] and max(trusts) == 4
    assert all(norm <= trust * 1.001 for norm, trust in zip(norms, trusts, strict=True))
    assert all(norm >= 0.7 * trust for norm, trust in zip(norms[1:], trusts[1:], strict=True))


def noisy(seed: int) -> tuple[CompiledModule, KFAC]:
    """With a bound that is narrow for all steps, and more inputs than a batch of `noise` has cases."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(60, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    net = compile(model, loss="categorical")
    return net, KFAC(net, seed=0, norm_constraint=1e-9, damping_adaptation_interval=10, exact_steps=False)


def noise(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 60, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=generator)


def test_a_bound_gives_way_in_the_first_twenty_steps_where_steps_do_nothing_to_other_batches() -> None:
    net, opt = noisy(0)
    widest = 1.0
    for number in range(31):
        before, ratio = scalar(opt, "trust"), opt._step_state.checks.size.ratio.clone()
        step(net, opt, noise(number))
        after, agreement = scalar(opt, "trust"), scalar(opt, "agreement")
        if number not in CHECKS[1:6]:
            assert after <= before
        elif -0.1 <= agreement <= 0.5:
            assert after == min(8 * before, 64)
            assert before == 64 or opt._step_state.checks.size.ratio < ratio / 4
        widest = max(widest, after)
    assert widest == 64 and opt.undone == 0


def test_a_bound_does_not_give_way_for_a_batch_that_repeats() -> None:
    net, opt = noisy(0)
    for _ in range(11):
        step(net, opt, noise(0))
        assert scalar(opt, "trust") <= 4


def test_a_bound_that_gave_way_comes_back_where_steps_harm_other_batches() -> None:
    """Targets that are shuffled make the loss of another batch rise."""
    net, opt = noisy(0)
    for number in range(11):
        step(net, opt, noise(number))
    opt.scalars["trust"].fill_(64.0)
    for number in range(11, 21):
        x, y = noise(0)
        step(net, opt, (x, y if number < 20 else (y + 1) % 3))
    assert scalar(opt, "agreement") < -0.1 and scalar(opt, "trust") == 32
