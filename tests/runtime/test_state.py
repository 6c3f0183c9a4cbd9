"""KFAC's state: checkpoints resume bit for bit, and what is no state of it is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rule import COMMON
from kfac_fx.optim.rules import RULES
from kfac_fx.passes.errors import FactorNotReady
from tests.runtime.slow_kfac import batch, loss_of, mlp
from tests.runtime.toy_optimizers import KINDS, QUADRATIC, assert_same, backward, flat_state, made, train, values


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_checkpoint_resumes_bit_for_bit(options: dict[str, Any]) -> None:
    of_rule = {field.name for field in fields(RULES[options.get("momentum_type", "regular")])}
    adapting = {"damping_adaptation_interval": 2, "adapt_damping": True}
    options = {
        **options,
        **{name: adapting[name] for name in adapting if name in of_rule},
        "invert_every": 3,
        "seed": 5,
    }
    net, opt = made(**options)
    train(net, opt, range(5))
    stored = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, stored)
    train(net, opt, range(5, 10))

    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    other = {} if "damping" in options else {"damping": 7.0}
    resumed, again = made(**{**options, **other, "seed": 6})
    resumed.load_state_dict(loaded["net"])
    given = (
        contextlib.nullcontext()
        if not other
        else pytest.warns(UserWarning, match="damping was 0.1 there, and 7 is given here")
    )
    with given:
        again.load_state_dict(loaded["opt"])
    train(resumed, again, range(5, 10))
    for name, value in values(net).items():
        assert torch.equal(value, values(resumed)[name]), name
    assert_same(without_options(opt), without_options(again))


def without_options(opt: KFAC) -> dict[str, Any]:
    """The state without those of the constructor."""
    return {path: entry for path, entry in flat_state(opt.state_dict()).items() if not path.endswith("kfac/options")}


LATE = {"adapt_damping": True, "update_damping_immediately": False}


@pytest.mark.parametrize("options", [KINDS["eigen_moments"], LATE], ids=["eigen_moments", "regular"])
def test_no_rule_may_have_a_scalar_of_a_name_that_every_state_has(options: dict[str, Any]) -> None:
    """Its entry would be another one: the scalar would not be saved, or the state refused as one that is outdated."""
    net, opt = made(**options)
    kept = opt.state_dict()
    train(net, opt, range(1))
    entries = (name for state in (kept, opt.state_dict()) for values in state["state"].values() for name in values)
    names = {name.split("/")[1] for name in entries if name.startswith("kfac/")}
    assert "outdated" in names and names - opt.options.rule.scalars.keys() <= COMMON


def test_all_state_is_tensors_of_parameters_on_their_device() -> None:
    net, opt = made(adapt_damping=True, update_damping_immediately=False)
    for _ in range(2):  # before the first step, too
        state = opt.state_dict()
        assert state.keys() == {"state", "param_groups"} and list(state["state"]) == [0, 1, 2, 3]
        tensors = [tensor for values in state["state"].values() for tensor in values.values()]
        assert all(isinstance(tensor, Tensor) and tensor.device.type == "cpu" for tensor in tensors)
        assert {"velocity", "0.weight,0.bias/A/moment", "kfac/counter", "kfac/late/cpu"} <= state["state"][0].keys()
        assert {"velocity", "2.weight,2.bias/A/moment"} <= state["state"][2].keys()
        assert state["state"][1].keys() == {"velocity", "kfac/name"}
        backward(net, 0)
        opt.step(loss=1.0)


def test_a_parameter_that_was_frozen_from_the_start_has_no_state_of_a_rule() -> None:
    net, opt = made()
    net.get_parameter("0.bias").requires_grad_(False)
    assert ["velocity" in opt.state_dict()["state"].get(place, {}) for place in range(4)] == [True, False, True, True]


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_resumes_between_a_step_and_the_check_of_its_damping(late: bool) -> None:
    options: dict[str, Any] = {"adapt_damping": True, "damping_adaptation_interval": 2}

    def step(net: CompiledModule, opt: KFAC, number: int) -> None:
        opt.zero_grad()
        loss = backward(net, number)
        opt.step(loss=loss, evaluate=loss_of(net, *batch(number)), previous=loss_of(net, *batch(number - 1)))

    net, opt = made(update_damping_immediately=not late, **options)
    for number in range(4):
        step(net, opt, number)
    resumed, again = made(update_damping_immediately=not late, **options)
    resumed.load_state_dict(net.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert (opt._step_state.late is not None) is late
    for number in range(4, 7):
        step(net, opt, number)
        step(resumed, again, number)
    assert_same(values(net), values(resumed))
    assert_same(flat_state(opt.state_dict()), flat_state(again.state_dict()))


class Two(nn.Module):
    """A layer, and a parameter that is in no Fisher block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.spare = mlp(), nn.Parameter(torch.ones(2).double())

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs


def with_spare(**options: Any) -> tuple[CompiledModule, KFAC]:
    net, opt = made(Two(), invert_every=3, first_order={"lr": 1e-3}, **options)
    return net, opt


def spare_step(net: CompiledModule, opt: KFAC, number: int) -> None:
    opt.zero_grad()
    (backward(net, number), net.spare.sin().sum().backward())
    opt.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # and a single process is the intent
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_carry_the_state(flat: bool, tmp_path: Path) -> None:
    """Through a file, into an optimizer that has not stepped."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, opt = with_spare()
    for number in range(4):
        spare_step(net, opt, number)
    model_state, optimizer_state = get_state_dict(net, opt, options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
    other, loading = with_spare(seed=7, damping=0.3)
    before = values(other)
    model_state, optimizer_state = get_state_dict(other, loading, options=options)
    assert_same(before, values(other))
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    with pytest.warns(
        UserWarning,
        match=r"go on from the state: damping was 0.1 there, and 0.3 is given here\. To have .* optimizer\.damping",
    ):
        set_state_dict(
            other, loading, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
        )
    for number in range(4, 9):
        spare_step(net, opt, number)
        spare_step(other, loading, number)
    assert_same(values(net), values(other))
    assert_same(without_options(opt), without_options(loading))


@pytest.mark.parametrize("whole", [False, True])
def test_distributed_checkpoints_load_into_an_optimizer_that_has_stepped(whole: bool) -> None:
    net, opt = with_spare()
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    spare_step(net, opt, 0)
    state = copy.deepcopy(get_optimizer_state_dict(net, opt, options=options))
    expected = flat_state(opt.state_dict())
    spare_step(net, opt, 1)
    set_optimizer_state_dict(net, opt, state, options=options)
    assert_same(expected, flat_state(opt.state_dict()))


def test_a_step_with_zero_gradients_before_the_first_batch_changes_nothing() -> None:
    net, opt = made(weight_decay=0.1, num_burnin_steps=1)
    before, state = values(net), flat_state(opt.state_dict())
    opt.step()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    opt.step()
    assert_same(before, values(net))
    assert_same(state, flat_state(opt.state_dict()))
    assert (opt.counter, opt.burned_in, opt.skipped.item()) == (0, 0, 0)
    assert set(opt.state) == set(net.parameters())
    net.get_parameter("0.weight").grad[0, 0] = 1e-9
    with pytest.raises(FactorNotReady, match="no batch was ever recorded"):
        opt.step()


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
    opt, loading = (KFAC(model, lr=0.3, damping=0.1) for model in (net, other))
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


def test_a_state_without_its_first_parameter_says_what_is_missing() -> None:
    net, opt = made()
    train(net, opt, range(2))
    state = opt.state_dict()
    first, second, *_ = state["state"]
    del state["state"][first]
    text = rf"it has no entries of {first} of the parameters, and those of the first one have .* such as 'kfac/counter'"
    with pytest.raises(ValueError, match=text):
        opt.load_state_dict(state)
    del state["state"][second]
    with pytest.raises(
        ValueError, match=rf"the state is not whole: it has no entries of {first} and {second} of the p"
    ):
        opt.load_state_dict(state)


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    net, opt = made()
    with pytest.raises(ValueError, match="the state has no 'kfac/' entries: it is .* begin KFAC without a state"):
        opt.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_state_that_was_kept_without_a_copy_is_refused_behind_a_step(options: dict[str, Any]) -> None:
    """Its tensors are those of now, and its numbers those of then."""
    net, opt = made(**options)
    train(net, opt, range(3))
    first, copied = opt.state_dict(), copy.deepcopy(opt.state_dict())
    opt.state_dict()  # another one before the next step
    opt.load_state_dict(first)
    opt.zero_grad()
    opt.step()  # without gradients, which does nothing
    opt.load_state_dict(opt.state_dict())
    first = opt.state_dict()
    train(net, opt, range(3, 4))
    with pytest.raises(ValueError, match=r"took a step after this state_dict was made.*copy.deepcopy\(optimizer.state"):
        opt.load_state_dict(first)
    opt.load_state_dict(copied)
    opt.load_state_dict(opt.state_dict())


def lose_a_key(state: dict[str, Any]) -> None:
    del state["state"][0]["kfac/skipped"]


def lose_a_factor(state: dict[str, Any]) -> None:
    del state["state"][0]["0.weight,0.bias/A/moment"]


def have_another_shape(state: dict[str, Any]) -> None:
    state["state"][0]["velocity"] = torch.zeros(2, 2)
    state["state"][1]["momentum_buffer"] = state["state"][1].pop("velocity")


def have_more_parameters(state: dict[str, Any]) -> None:
    state["state"][17] = {"velocity": state["state"][0]["velocity"]}


def lose_a_group(state: dict[str, Any]) -> None:
    state["param_groups"].clear()


def be_of_another_momentum_type(state: dict[str, Any]) -> None:
    net, opt = made(**QUADRATIC)
    train(net, opt, range(2))
    state |= opt.state_dict()


def be_of_another_device(state: dict[str, Any]) -> None:
    """No device that is known has a state of 24 bytes."""
    state["state"][0]["kfac/generator"] = torch.zeros(24, dtype=torch.uint8)


def have_two_dampings(state: dict[str, Any]) -> None:
    state["state"][0]["kfac/damping"] = torch.ones(2)


def lose_all(state: dict[str, Any]) -> None:
    state.clear()


START = "the state does not fit this optimizer, and nothing of it is loaded: "
UNFIT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "key": (lose_a_key, START + r"an entry is wrong\n  kfac/skipped  is missing$"),
    "factor": (lose_a_factor, START + r"an entry is wrong\n  0.weight,0.bias/A/moment  is missing$"),
    "shapes": (
        have_another_shape,
        START + "3 entries are wrong\n"
        r"  velocity of 0.bias +is missing\n"
        r"  momentum_buffer of 0.bias +is unknown here\n"
        r"  velocity of 0.weight +has shape \[2, 2\], and needs \[5, 3\]$",
    ),
    "parameters": (have_more_parameters, START + r"an entry is wrong\n  parameter 17  is unknown here, where 4 are$"),
    "momentum type": (
        be_of_another_momentum_type,
        r"the state is that of a KFAC with other options:\n  momentum_type +'qmodel\w*' in the state, '\w+' here",
    ),
    "device": (
        be_of_another_device,
        START + r"an entry is wrong\n  kfac/generator +has shape \[24\], and needs \[\d+\]\nRandom states of one kind",
    ),
    "dampings": (have_two_dampings, START + r"an entry is wrong\n  kfac/damping +has shape \[2\], and needs \[\]$"),
    "everything": (lose_all, r"no state_dict of an optimizer, which has 'state' .*: write opt\.state_dict\(\)"),
    "group": (lose_a_group, r"\n  param_groups +has 0 groups, and needs 1$"),
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


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"momentum_type": "adam"}, "momentum_type  'regular' in the state, 'adam' here"),
        ({"estimation_mode": "empirical"}, "estimation_mode  'gradients' in the state, 'empirical' here"),
        ({"adapt_damping": True}, "adapt_damping  False in the state, True here"),
    ],
)
def test_the_state_of_an_optimizer_of_another_kind_is_refused_with_the_difference(
    options: dict[str, Any], row: str
) -> None:
    """The velocity of "adam" is a sum of gradients, and that of "regular" one of updates."""
    opts = []
    for of_one in ({}, options):
        net = compile(mlp(), loss="categorical")
        opts.append((net, KFAC(net, **{"lr": 0.1, "damping": 0.1, "momentum_type": "regular", **of_one})))
        backward(net, 0)
        opts[-1][1].step(loss=1.0, evaluate=lambda: torch.tensor(1.0))
    before = copy.deepcopy(flat_state(opts[1][1].state_dict()))
    with pytest.raises(ValueError) as failure:
        opts[1][1].load_state_dict(opts[0][1].state_dict())
    assert str(failure.value).splitlines()[:2] == ["the state is that of a KFAC with other options:", f"  {row}"]
    assert_same(before, flat_state(opts[1][1].state_dict()))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_loaded_state_forgets_the_forwards_before(options: dict[str, Any]) -> None:
    """A rollback in one process goes on as the first time, whatever was recorded and not yet taken into a step."""
    after = []
    for recorded in (False, True):
        net, opt = made(**options)
        train(net, opt, range(2))
        state = copy.deepcopy(opt.state_dict())
        if recorded:
            net(3 * batch(7)[0])
        opt.load_state_dict(state)
        train(net, opt, range(2, 5))
        after.append(values(net))
    assert_same(*after)


class TwoViews(nn.Module):
    """The cases of the two views meet in one dimension, which a graph without sizes does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        both, number = F.normalize(self.encoder(torch.cat([first, second])), dim=1), first.shape[0]
        return F.cross_entropy(both[:number] @ both[number:].t(), torch.arange(number))


def test_a_net_that_saw_no_batch_says_how_it_takes_a_state_with_other_blocks() -> None:
    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            net(views, views + 0.1).backward()
            optimizer.step()

    torch.manual_seed(0)
    views, model = torch.randn(5, 4), TwoViews()
    net = compile(model)
    optimizer = KFAC(net)
    train(3)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(3)
    wanted = copy.deepcopy(model.state_dict())

    net = compile(model)
    optimizer = KFAC(net)
    text = r"are wrong(?s:.*)No batch has gone through this net(?s:.*)call net\.recorder\(\(x,\), {}\) once, and load"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(kept[1])
    net.recorder((views, views), {})
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(3)
    assert_same(model.state_dict(), wanted)
