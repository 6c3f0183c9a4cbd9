"""A batch that is given up leaves no trace: the training is the same to the last bit as one that never saw it.

The statistics are exact, so nothing is drawn. Sampled targets of a batch that is given up take numbers of the
optimizer's random stream; the test of them puts these back.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kfac_fx
from tests.tables import pairs

MODES = ("exact", "empirical")
RULES: dict[str, dict[str, Any]] = {
    "eigen_moments": {"cov_update_every": 1},
    "eigen_moments, checked": {"damping_adaptation_interval": 1},
    "adaptive": {"momentum_type": "adaptive", "damping_adaptation_interval": 1},
    "regular": {"momentum_type": "regular", "lr": 0.1, "damping": 0.1},
    "adam": {"momentum_type": "adam", "lr": 0.01, "damping": 0.1},
    "qmodel": {"momentum_type": "qmodel", "damping": 0.1, "momentum": None},
    "qmodel_fixedmu": {"momentum_type": "qmodel_fixedmu", "damping": 0.1},
}
STEPS, GIVEN_UP = 4, (0, 1, 3)  # the steps before which a batch is given up
KEY = ("0.weight", "0.bias")


class Failure(Exception):
    """A hook raises it in a backward."""


def fail(gradient: Tensor) -> None:
    raise Failure


def batch(number: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return size * x, torch.randint(3, (6,), generator=generator)


class Training:
    def __init__(self, rule: str = "regular", mode: str = "exact", **options: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.net = kfac_fx.compile(model, loss="categorical")
        self.opt = kfac_fx.KFAC(self.net, seed=0, estimation_mode=mode, **RULES[rule], **options)
        self.held: list[Tensor] = []

    def loss(self, number: int, size: float = 1.0) -> Tensor:
        x, y = batch(number, size)
        return F.cross_entropy(self.net(x), y)

    def step(self, number: int) -> None:
        self.loss(number).backward()
        self.opt.step()
        self.opt.zero_grad()

    def give_up(self, kind: str, number: int) -> None:
        loss = self.loss(100 + number, 5.0)
        if kind in AFTER_BACKWARD:
            loss.backward()
        KINDS[kind](self, loss)

    @property
    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.net.parameters()])


def by_hand(training: Training) -> None:
    for parameter in training.net.parameters():
        parameter.grad = None


def by_hand_in_place(training: Training) -> None:
    for parameter in training.net.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()


def raises(training: Training, loss: Tensor, at: Tensor) -> None:
    hook = at.register_hook(fail)
    with pytest.raises(Failure):
        loss.backward()
    hook.remove()
    training.opt.zero_grad()


AFTER_BACKWARD: dict[str, Callable[[Training, Tensor], Any]] = {
    "a guard of the norm": lambda training, loss: training.opt.zero_grad(),
    "zeros of the optimizer": lambda training, loss: training.opt.zero_grad(set_to_none=False),
    "the zero_grad of the net": lambda training, loss: training.net.zero_grad(),
    "zeros of the net": lambda training, loss: training.net.zero_grad(set_to_none=False),
    "the zero_grad of the model": lambda training, loss: training.net.model.zero_grad(),
    "zeros of the model": lambda training, loss: training.net.model.zero_grad(set_to_none=False),
    "by hand": lambda training, loss: by_hand(training),
    "by hand in place": lambda training, loss: by_hand_in_place(training),
}
KINDS: dict[str, Callable[[Training, Tensor], Any]] = {
    "a guard of the loss": lambda training, loss: None,
    "a loss that is kept": lambda training, loss: training.held.append(loss),
    "a backward that fails at once": lambda training, loss: raises(training, loss, loss),
    "a backward that fails late": lambda training, loss: raises(training, loss, training.net.model[0].weight),
    **AFTER_BACKWARD,
}


@cache
def plain(rule: str, mode: str = "exact") -> list[Tensor]:
    """The parameters after every step."""
    training, results = Training(rule, mode), []
    for number in range(len(KINDS)):
        training.step(number)
        results.append(training.parameters)
    return results


def first_difference(rule: str, mode: str) -> str | None:
    """The first batch before which another one was given up with a trace."""
    training = Training(rule, mode)
    for number, (kind, expected) in enumerate(zip(KINDS, plain(rule, mode), strict=True)):
        training.give_up(kind, number)
        training.step(number)
        if not torch.equal(training.parameters, expected):
            return kind
    assert training.opt.fallbacks() == Training(rule, mode).opt.fallbacks()
    return None


@pairs(("rule", list(RULES)), ("mode", MODES))
def test_a_batch_that_is_given_up_leaves_no_trace(rule: str, mode: str) -> None:
    assert first_difference(rule, mode) is None


@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_one_before_the_first_step(kind: str) -> None:
    training = Training()
    training.give_up(kind, 0)
    training.step(0)
    assert torch.equal(training.parameters, plain("regular")[0])


def test_sampled_targets_take_numbers_of_the_random_stream_and_leave_no_other_trace() -> None:
    training = Training(mode="gradients")
    for number, (kind, expected) in enumerate(zip(KINDS, plain("regular", "gradients"), strict=True)):
        random = training.opt.generator.get_state()
        training.give_up(kind, number)
        training.opt.generator.set_state(random)
        training.step(number)
        assert torch.equal(training.parameters, expected), kind


# --- orders of a loop -------------------------------------------------------------------------------------------------

ZEROS: dict[str, Callable[[Training], Any]] = {
    "optimizer": lambda training: training.opt.zero_grad(),
    "net": lambda training: training.net.zero_grad(set_to_none=False),
    "model": lambda training: training.net.model.zero_grad(),
    "zeros of the model": lambda training: training.net.model.zero_grad(set_to_none=False),
}


@pairs(("zero", list(ZEROS)), ("rule", ["regular", "qmodel", "eigen_moments, checked"]), ("mode", MODES))
def test_gradients_may_be_zeroed_between_forward_and_backward(rule: str, mode: str, zero: str) -> None:
    """Those of the batch that was given up are still there in the next forward."""
    training = Training(rule, mode)
    for number in range(STEPS):
        if number in GIVEN_UP:
            training.loss(100 + number, 5.0).backward()
        loss = training.loss(number)
        ZEROS[zero](training)
        loss.backward()
        training.opt.step()
    assert torch.equal(training.parameters, plain(rule, mode)[STEPS - 1])


@pairs(("rule", ["regular", "qmodel", "eigen_moments, checked"]), ("mode", MODES))
def test_one_of_several_micro_batches_is_given_up(rule: str, mode: str) -> None:
    results = []
    for gives_up in (False, True):
        training = Training(rule, mode)
        for number in range(STEPS):
            for part in range(3):
                loss = training.loss(10 * number + part) / 3
                if gives_up:
                    training.loss(100 * number + part, 5.0)
                loss.backward()
                nn.utils.clip_grad_norm_(training.net.parameters(), 0.5)  # gradients are written, and are not zero
            training.opt.step()
            training.opt.zero_grad()
        results.append(training.parameters)
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", ["exact", "empirical"])
def test_a_graph_that_is_kept_may_be_differentiated_again(mode: str) -> None:
    training = Training(mode=mode)
    for number in range(STEPS):
        loss = training.loss(number)
        (3 * loss).backward(retain_graph=True)
        training.opt.zero_grad()
        loss.backward()
        training.opt.step()
        training.opt.zero_grad()
    assert torch.equal(training.parameters, plain("regular", mode)[STEPS - 1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rule", ["regular", "eigen_moments, checked"])
def test_a_checkpoint_around_the_net_runs_its_forward_inside_of_the_backward(rule: str, reentrant: bool) -> None:
    training = Training(rule)
    for number in range(STEPS):
        x, y = batch(number)
        outputs = checkpoint(training.net, x.requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(outputs, y).backward()
        training.opt.step()
        training.opt.zero_grad()
    assert torch.equal(training.parameters, plain(rule)[STEPS - 1])


def test_gradients_of_autograd_grad_and_of_a_penalty_are_those_of_their_forward() -> None:
    for penalty in (0.0, 0.1):
        results = []
        for through_step in (False, True):
            training = Training()
            for number in range(STEPS):
                loss, parameters = training.loss(number), list(training.net.parameters())
                gradients = torch.autograd.grad(loss, parameters, create_graph=True)
                total = loss + penalty * sum(gradient.square().sum() for gradient in gradients)
                if through_step:
                    total.backward()
                else:
                    whole = torch.autograd.grad(total, parameters)
                    for parameter, gradient in zip(parameters, whole, strict=True):
                        parameter.grad = gradient
                training.opt.step()
                training.opt.zero_grad()
            results.append(training.parameters)
        assert torch.equal(*results) and torch.equal(results[0], plain("regular")[STEPS - 1]) is (penalty == 0.0)


# --- forwards without a backward that count ---------------------------------------------------------------------------


def test_forwards_count_where_gradients_come_from_elsewhere_and_the_report_says_so() -> None:
    training, expected = Training(), Training()
    for number in range(STEPS):
        x, y = batch(number)
        training.net(x)
        training.opt.zero_grad()
        parameters = dict(training.net.model.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(training.net.model, parameters, (x,)), y)
        gradients = torch.autograd.grad(loss, [*parameters.values()])
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        training.opt.step()
        expected.step(number)
    assert torch.equal(training.parameters, expected.parameters)
    assert training.opt.fallbacks() == [
        f"the gradients of {STEPS} steps did not come from a backward through outputs of the net, so the statistics "
        "are those of all forwards before, also of batches that were given up"
    ]


def test_forwards_of_a_burn_in_need_no_backward() -> None:
    training = Training(num_burnin_steps=2)
    for number in range(2):
        training.loss(number)
        training.loss(10 + number)
        training.opt.step()
    x = torch.cat([torch.cat([batch(n)[0] for n in (0, 10, 1, 11)]), torch.ones(24, 1, dtype=torch.float64)], 1)
    factor = training.opt.estimator.blocks[KEY].factors["A"].value
    assert training.opt.burned_in == 2 and not training.opt.fallbacks()
    torch.testing.assert_close(factor.squeeze(0), x.T @ x / 24)


def test_a_step_whose_batch_was_given_up_warns_that_it_has_no_statistics() -> None:
    training = Training()
    training.step(0)
    training.loss(1).backward()
    gradients = [parameter.grad for parameter in training.net.parameters()]
    training.opt.zero_grad()
    for parameter, gradient in zip(training.net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    with pytest.warns(RuntimeWarning, match=r"no forward was recorded before it whose backward came\.\nCall .* and c"):
        training.opt.step()
    training = Training("qmodel")
    training.step(0)
    training.loss(1)
    by_hand_in_place_or_new(training)
    with pytest.raises(RuntimeError, match="and has none: .* or no backward came to its outputs"):
        training.opt.step()
    training = Training("eigen_moments, checked")
    training.step(0)
    training.loss(1)
    by_hand_in_place_or_new(training)
    with pytest.raises(RuntimeError, match="and has none: .* or no backward came to its outputs"):
        training.opt.step()


def by_hand_in_place_or_new(training: Training) -> None:
    for parameter in training.net.parameters():
        parameter.grad = torch.ones_like(parameter)


# --- memory -----------------------------------------------------------------------------------------------------------


def sums_of(training: Training) -> weakref.ref[Tensor]:
    """The second moment of the last forward."""
    sums = training.opt._forwards.seen.batches[-1].sums
    assert sums is not None
    return weakref.ref(sums.sums[KEY]["A"])


@pairs(("backward", [False, True]), ("rule", ["regular", "qmodel"]))
def test_what_is_given_up_is_freed(rule: str, backward: bool) -> None:
    training = Training(rule)
    training.step(0)
    gc.collect()
    gc.disable()
    try:
        given_up = []
        for number in range(4):
            loss = training.loss(number)
            given_up.append(sums_of(training))
            if backward:
                loss.backward()
                training.opt.zero_grad()
        training.loss(4)
        seen = training.opt._forwards.seen
        assert [sums() is None for sums in given_up] == [True] * 3 + [False] and len(seen.batches) == 2
        del loss
        training.loss(5)
        assert given_up[-1]() is None and len(seen.batches) == 1
    finally:
        gc.enable()


def test_many_micro_batches_keep_one_sum() -> None:
    training = Training()
    training.step(0)
    for number in range(4):
        training.loss(number).backward()
    seen = training.opt._forwards.seen
    training.loss(4)
    assert [batch.sums is None for batch in seen.batches] == [True] * 4 + [False]
    assert seen.sums is not None and int(seen.sums.cases) == 4 * 6


class Scaled(nn.Module):
    """Returns a parameter next to what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.scale


@pytest.mark.filterwarnings("ignore::kfac_fx.LossScaleWarning")  # the registered loss does not depend on the parameter
def test_no_hook_stays_at_a_parameter_that_the_model_returns() -> None:
    model, x = Scaled().double(), batch(0)[0]
    net = kfac_fx.compile(model, loss=lambda outputs: kfac_fx.losses.Normal(outputs[0], 0.5))
    opt = kfac_fx.KFAC(net, damping_adaptation_interval=1)
    for _ in range(3):
        mean, scale = net(x)
        (mean.square().sum() / len(x) + scale.sum()).backward()
        opt.step()
        opt.zero_grad()
    del mean, scale
    gc.collect()
    assert not model.scale._backward_hooks


def test_the_graph_of_a_batch_does_not_keep_the_optimizer() -> None:
    training = Training()
    loss, optimizer = training.loss(0), weakref.ref(training.opt)
    del training.opt
    gc.collect()
    assert optimizer() is None
    loss.backward()
