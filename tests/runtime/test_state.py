"""KFAC's state: checkpoints resume bit for bit, and what is no state of it is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kfac_fx.compiler import compile
from kfac_fx.optimizer import KFAC
from tests.runtime.slow_kfac import batch, mlp
from tests.runtime.toy_optimizers import KINDS, QUADRATIC, assert_same, flat_state, made, train, values


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_checkpoint_resumes_bit_for_bit(options: dict[str, Any]) -> None:
    options = {**options, "adapt_damping": True, "damping_adaptation_interval": 2, "invert_every": 3, "seed": 5}
    net, opt = made(**options)
    train(net, opt, range(5))
    stored = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, stored)
    train(net, opt, range(5, 10))

    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    resumed, again = made(**{**options, "damping": 7.0, "seed": 6})
    resumed.load_state_dict(loaded["net"])
    again.load_state_dict(loaded["opt"])
    train(resumed, again, range(5, 10))
    for name, value in values(net).items():
        assert torch.equal(value, values(resumed)[name]), name
    assert_same(flat_state(opt.state_dict()), flat_state(again.state_dict()))


def test_a_checkpoint_resumes_within_a_burn_in() -> None:
    net, opt = made(num_burnin_steps=3)
    train(net, opt, range(2))
    resumed, again = made(num_burnin_steps=3)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    resumed.load_state_dict(net.state_dict())
    train(net, opt, range(2, 6))
    train(resumed, again, range(2, 6))
    assert (again.burned_in, again.counter) == (3, 3)
    assert_same(values(net), values(resumed))


def test_a_loaded_state_shares_nothing_with_its_source_and_keeps_its_precision() -> None:
    net, other = (compile(mlp().bfloat16(), loss="categorical", verify=False) for _ in range(2))
    opt, loading = (KFAC(one, lr=0.3, damping=0.1) for one in (net, other))
    x, y = batch(0)
    F.cross_entropy(net(x.bfloat16()), y).backward()
    opt.step()
    velocity = opt.state[next(net.parameters())]["velocity"]
    assert velocity.dtype is torch.float32
    loading.load_state_dict(opt.state_dict())
    loaded = loading.state[next(other.parameters())]["velocity"]
    assert torch.equal(loaded, velocity)
    loaded.zero_()
    assert velocity.any()


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    net, opt = made()
    with pytest.raises(ValueError, match="the state has no 'kfac' entry: it is that of another kind of optimizer"):
        opt.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())


def lose_a_key(state: dict[str, Any]) -> None:
    del state["kfac"]["skipped"]


def lose_a_factor(state: dict[str, Any]) -> None:
    del state["kfac"]["estimator"]["0.weight,0.bias/A/moment"]


def have_another_shape(state: dict[str, Any]) -> None:
    state["state"][0]["velocity"] = torch.zeros(2, 2)
    state["state"][1]["momentum_buffer"] = state["state"][1].pop("velocity")


def have_more_parameters(state: dict[str, Any]) -> None:
    state["state"][17] = state["state"][0]


def lose_a_group(state: dict[str, Any]) -> None:
    state["param_groups"].clear()


def be_of_another_momentum_type(state: dict[str, Any]) -> None:
    net, opt = made(**QUADRATIC)
    train(net, opt, range(2))
    state |= opt.state_dict()


UNFIT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "key": (lose_a_key, r"the 'kfac' entry of the state is of another version: skipped on one side only"),
    "factor": (lose_a_factor, r"the state is of another estimator: 1 names or shapes differ, the first is '0.weight"),
    "shapes": (
        have_another_shape,
        r"the state does not fit 2 of 4 parameters:\n"
        r"  0.weight +has \{'velocity': \[2, 2\]\}, and needs \{'velocity': \[5, 3\]\}\n"
        r"  0.bias +has \{'momentum_buffer': \[5\]\}, and needs \{'velocity': \[5\]\}",
    ),
    "parameters": (have_more_parameters, r"the state does not fit 1 of 4 parameters:\n  parameter 17  there are 4"),
    "momentum type": (
        be_of_another_momentum_type,
        "parameter group 0 of the state has lr, weight_decay, and this one's has lr, momentum, weight_decay: it is "
        "that of another momentum_type",
    ),
    "group": (lose_a_group, r"different number of parameter groups"),
}


@pytest.mark.parametrize(("change", "text"), UNFIT.values(), ids=UNFIT)
def test_a_state_that_does_not_fit_is_refused_and_nothing_of_it_is_loaded(
    change: Callable[[dict[str, Any]], None], text: str
) -> None:
    net, opt = made()
    train(net, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    change(state)
    other, unharmed = made()
    train(other, unharmed, range(2, 3))
    before = flat_state(unharmed.state_dict())
    with pytest.raises(ValueError, match=text):
        unharmed.load_state_dict(state)
    assert_same(before, flat_state(unharmed.state_dict()))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_an_optimizer_nor_an_estimator_is_copied_without_its_net(copied: Callable[[Any], Any]) -> None:
    net, opt = made()
    with pytest.raises(
        TypeError, match=r"KFAC objects cannot be copied or pickled. Create one for the other net and call load_state"
    ):
        copied(opt)
    with pytest.raises(
        TypeError, match=r"FisherEstimator objects cannot be copied .* call load_state_dict\(est\.state_dict\(\)\)\."
    ):
        copied(opt.estimator)
    train(net, opt, range(1))  # and they are as they were
