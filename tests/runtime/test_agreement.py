"""Agreement in "eigen_moments": steps that do what checks promise on later batches become longer, others do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.optim.optimizer import KFAC
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
    assert scalar(opt, "agreed") == 1 and gained[0] == 1 and 1 < gained[1] < gained[2] < gained[5] <= 8
    assert gained[2] == gained[3] == gained[4]  # at checks alone
    for number in range(6, 10):
        step(net, opt, data(number, noise=True))
    before = scalar(opt, "multiplier")
    step(net, opt, data(10, noise=True))
    assert scalar(opt, "agreed") == 0 and scalar(opt, "advance") == 1
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
    assert scalar(opt, "agreed") == 1 and gained[5] == 2 * gained[4] and gained[10] == gained[5]


def test_batches_of_noise_lengthen_no_step() -> None:
    net, opt = made()
    for number in range(31):
        step(net, opt, data(number, noise=True))
        assert scalar(opt, "agreed") == 0
        assert scalar(opt, "trust") == scalar(opt, "advance") == 1


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
