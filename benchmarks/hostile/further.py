"""Further inputs of every kind, which are spelled otherwise than those of the modules of the kinds.

States that come from elsewhere or are handed over in unusual types; folders whose manifest was edited; names of a model
in the files of a folder; odd batches, options and gradients; loops that end a batch in the middle.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import json
import math
import os
import random
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from benchmarks.hostile import folders, names, processes
from benchmarks.hostile.given_up import first_trained
from benchmarks.hostile.grading import Input, Outcome, Torchs
from benchmarks.hostile.settings import CLASSES, INPUTS, RULES, Of, Setting, Training, drawn
from benchmarks.hostile.states import BEFORE, compared, each_tensor, whole

SEED = 51
State = dict[str, Any]
Odd = Callable[[State], Any]

# --- states -----------------------------------------------------------------------------------------------------------


class Subclass(Tensor):
    """A tensor of a user's class."""


def of_first(change: Callable[[dict[str, Any]], Any]) -> Odd:
    """Changes the entries of the first parameter."""

    def apply(state: State) -> State:
        change(state["state"][next(iter(state["state"]))])
        return state

    return apply


def of_group(change: Callable[[dict[str, Any]], Any]) -> Odd:
    def apply(state: State) -> State:
        change(state["param_groups"][0])
        return state

    return apply


def each_entry(change: Callable[[Tensor], Any]) -> Odd:
    return each_tensor(change)


def only(change: Callable[[Tensor], Any], applies: Callable[[Tensor], bool]) -> Odd:
    return each_tensor(lambda tensor: change(tensor) if applies(tensor) else tensor)


def matrices_times(factor: float) -> Odd:
    return only(lambda t: t * factor, lambda t: t.dim() > 1 and t.is_floating_point())


def of_torch(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[Training], Any]:
    """The state of an optimizer of torch after a step."""

    def state(training: Training) -> Any:
        parameters = [p for p in training.net.parameters() if p.requires_grad]
        optimizer = make(parameters)
        F.cross_entropy(training.called(training.batch(0)[0]), training.batch(0)[1]).backward()
        optimizer.step()
        return optimizer.state_dict()

    return state


# Handed over instead of the state; `True`: the training goes on as it would have.
ODD_STATES: dict[str, tuple[Odd, bool]] = {
    "as NumPy's arrays": (each_entry(lambda t: t if t.dtype is torch.bfloat16 else t.numpy()), False),
    "as lists": (each_entry(lambda t: t.tolist()), False),
    "with numbers instead of scalars": (only(lambda t: t.item(), lambda t: t.dim() == 0), True),
    "with scalars of one element": (only(lambda t: t.reshape(1), lambda t: t.dim() == 0), False),
    "on the meta device": (each_entry(lambda t: t.to("meta")), False),
    "with one tensor on the meta device": (
        of_first(lambda e: e.update({k: e[k].to("meta") for k in list(e)[:1]})),
        False,
    ),
    "of sparse matrices": (only(lambda t: t.to_sparse(), lambda t: t.dim() == 2), False),
    "of a subclass": (each_entry(lambda t: t.as_subclass(Subclass)), True),
    "of conjugated views": (only(lambda t: torch._neg_view(-t), lambda t: t.dim() > 1), True),
    "of expanded tensors": (only(lambda t: t[:1].expand_as(t), lambda t: t.dim() > 1 and len(t) > 1), False),
    "with matrices times 1e30": (matrices_times(1e30), False),
    "with matrices of zero": (matrices_times(0.0), False),
    "with matrices turned upside down": (only(lambda t: t.flip(0), lambda t: t.dim() > 1), False),
    "with transposed matrices": (only(lambda t: t.mT, lambda t: t.dim() > 1 and t.shape[-1] != t.shape[-2]), False),
    "with an entry of a future version": (of_first(lambda e: e.update({"kfac/version": torch.tensor(99)})), False),
    "with a further entry": (of_first(lambda e: e.update({"memory": torch.zeros(3)})), False),
    "with nested entries": (of_first(lambda e: e.update({"kfac/extra": {"a": {"b": torch.ones(1)}}})), False),
    "with a further part": (lambda s: {**s, "extra": {"a": 1}}, True),
    "with a parameter more": (lambda s: {**s, "state": {**s["state"], 99: {"velocity": torch.zeros(2)}}}, False),
    "with the last parameter's state gone": (lambda s: {**s, "state": dict(list(s["state"].items())[:-1])}, False),
    "with the states of two parameters exchanged": (
        lambda s: {**s, "state": dict(zip(s["state"], list(s["state"].values())[::-1], strict=True))},
        False,
    ),
    "with one state for all": (
        lambda s: {**s, "state": dict.fromkeys(s["state"], next(iter(s["state"].values())))},
        False,
    ),
    "with keys in capitals": (
        lambda s: {**s, "state": {k: {n.upper(): v for n, v in e.items()} for k, e in s["state"].items()}},
        False,
    ),
    "with a prefix before keys": (
        lambda s: {**s, "state": {k: {f"module.{n}": v for n, v in e.items()} for k, e in s["state"].items()}},
        False,
    ),
    "without the prefix of keys": (
        lambda s: {
            **s,
            "state": {k: {n.removeprefix("kfac/"): v for n, v in e.items()} for k, e in s["state"].items()},
        },
        False,
    ),
    "with its group twice": (lambda s: {**s, "param_groups": [*s["param_groups"], s["param_groups"][0]]}, False),
    "without groups": (lambda s: {**s, "param_groups": []}, False),
    "with a group of nothing": (lambda s: {**s, "param_groups": [*s["param_groups"], {"params": []}]}, False),
    "with a parameter twice in a group": (of_group(lambda g: g.update(params=[*g["params"], g["params"][0]])), False),
    "with a parameter fewer in a group": (of_group(lambda g: g.update(params=g["params"][:-1])), False),
    "with parameters as a tuple": (of_group(lambda g: g.update(params=tuple(g["params"]))), True),
    "with parameters as a tensor": (of_group(lambda g: g.update(params=torch.tensor(range(len(g["params"]))))), False),
    "with parameters as numbers of floating point": (
        of_group(lambda g: g.update(params=[float(p) for p in g["params"]])),
        True,
    ),
    "with negative parameters": (of_group(lambda g: g.update(params=[-1 - p for p in g["params"]])), False),
    "with parameters of None": (of_group(lambda g: g.update(params=None)), False),
    "with groups as numbers": (lambda s: {**s, "param_groups": [g["params"] for g in s["param_groups"]]}, False),
    "with a group without params": (of_group(lambda g: g.pop("params")), False),
    "with an lr of None": (of_group(lambda g: g.update(lr=None)), False),
    "with an lr of two numbers": (of_group(lambda g: g.update(lr=torch.ones(2))), False),
    "with an lr that needs a gradient": (
        of_group(lambda g: g.update(lr=torch.tensor(float(g["lr"]), requires_grad=True))),
        True,
    ),
    "with a complex lr": (of_group(lambda g: g.update(lr=1j)), False),
    "with a Boolean lr": (of_group(lambda g: g.update(lr=True)), False),
    "with an lr in a text": (of_group(lambda g: g.update(lr="0.1")), False),
    "with an lr of NumPy": (of_group(lambda g: g.update(lr=np.float64(g["lr"]))), True),
    "with an lr that is a fraction": (of_group(lambda g: g.update(lr=Fraction(g["lr"]))), True),
    "with betas in the group": (of_group(lambda g: g.update(betas=(0.9, 0.99))), True),
    "with a huge counter": (of_first(lambda e: e.update({"kfac/counter": torch.tensor(2**62)})), False),
    "with a counter of 2.5": (of_first(lambda e: e.update({"kfac/counter": torch.tensor(2.5)})), False),
    "with a Boolean counter": (of_first(lambda e: e.update({"kfac/counter": torch.tensor(True)})), False),
    "as None": (lambda s: None, False),
    "as a list": (lambda s: [s], False),
    "as pairs": (lambda s: list(s.items()), False),
    "as a text": (lambda s: "checkpoint.pt", False),
    "as bytes": (lambda s: b"state", False),
    "as a path": (lambda s: Path("checkpoint.pt"), False),
    "as a number": (lambda s: 3, False),
    "as nothing": (lambda s: {}, False),
    "with states of None": (lambda s: {**s, "state": None}, False),
    "with states as a list": (lambda s: {**s, "state": list(s["state"].values())}, False),
    "with a state of None": (lambda s: {**s, "state": {**s["state"], next(iter(s["state"])): None}}, False),
    "with a state that is a tensor": (
        lambda s: {**s, "state": {**s["state"], next(iter(s["state"])): torch.ones(2)}},
        False,
    ),
    "with groups of None": (lambda s: {**s, "param_groups": None}, False),
    "with groups as a mapping": (lambda s: {**s, "param_groups": dict(enumerate(s["param_groups"]))}, False),
    "inside of the checkpoint": (lambda s: {"model": {}, "optimizer": s}, False),
    "inside of another state": (lambda s: {"state": s, "param_groups": s["param_groups"]}, False),
    "as a mapping that cannot be written": (lambda s: types.MappingProxyType(s), True),
    "as a mapping with defaults": (lambda s: collections.defaultdict(dict, s), True),
    "as a chain of mappings": (lambda s: collections.ChainMap(s), True),
    "as a UserDict": (lambda s: collections.UserDict(s), True),
    "with states that are UserDicts": (
        lambda s: {**s, "state": {k: collections.UserDict(e) for k, e in s["state"].items()}},
        True,
    ),
    "with keys of NumPy": (lambda s: {**s, "state": {np.int64(k): e for k, e in s["state"].items()}}, True),
}


def load_odd(setting: Setting, way: str) -> Outcome:
    """It goes on as it should, or an error leaves everything as it was."""
    checkpoint, expected = whole(setting)
    change, goes_on = ODD_STATES[way]
    training = Training(setting).resume(checkpoint)
    odd = change(copy.deepcopy(checkpoint["optimizer"]))
    try:
        training.opt.load_state_dict(odd)
    except (ValueError, TypeError, KeyError):
        if not (outcome := compared(training, expected)).right:
            return Outcome(False, f"the error left a part behind, and {outcome.text}")
        raise
    outcome = compared(training, expected)
    return Outcome(outcome.right or (not goes_on and way in MAY_DIFFER), outcome.text)


MAY_DIFFER = (
    "with matrices of zero",
    "with a huge counter",
    "of expanded tensors",
)  # states that another training may have


def foreign(setting: Setting, other: Callable[[Training], Any]) -> Outcome:
    """The state of another optimizer or object, which is no state of this training."""
    checkpoint, expected = whole(setting)
    state = other(Training(setting))
    training = Training(setting).resume(checkpoint)
    try:
        training.opt.load_state_dict(state)
    except (ValueError, TypeError, KeyError):
        if not (outcome := compared(training, expected)).right:
            return Outcome(False, f"the error left a part behind, and {outcome.text}")
        raise
    return Outcome(False, "was loaded")


def other_names(training: Training) -> Any:
    """A model of equal shapes in the same order, whose parameters have other names."""
    torch.manual_seed(5)
    layers = {"q": nn.Linear(INPUTS, 5), "r": nn.Linear(5, CLASSES)}
    model = Of(lambda m, x: m.r(torch.tanh(m.q(x))), **layers)
    setting = replace(training.setting, model="two layers", frozen=False)
    return Training(setting, model).steps(range(BEFORE)).opt.state_dict()


FOREIGN: dict[str, Callable[[Training], Any]] = {
    "AdamW": of_torch(torch.optim.AdamW),
    "SGD": of_torch(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "Adagrad": of_torch(torch.optim.Adagrad),
    "the model": lambda training: training.net.state_dict(),
    "a scheduler": lambda training: torch.optim.lr_scheduler.ConstantLR(training.opt).state_dict(),
    "a GradScaler": lambda training: torch.amp.GradScaler("cpu").state_dict(),
    "an estimator": lambda training: kfac_fx.FisherEstimator(
        kfac_fx.compile(training.model, (training.batch(0)[0],), loss="categorical"), damping=0.1
    ).state_dict(),
    "a model with other names": other_names,
}


def same_state_after(do: Callable[[Training, Any], object]) -> Callable[[Setting], Outcome]:
    """The training goes on as one that was not disturbed."""

    def run(setting: Setting) -> Outcome:
        checkpoint, expected = whole(setting)
        training = Training(setting).resume(checkpoint)
        do(training, checkpoint)
        return compared(training, expected)

    return run


def zeroed(state: Any) -> None:
    each_tensor(lambda t: t.zero_())(state)


def with_hook(hook: Callable[[Any, State], Any]) -> Callable[[Training, Any], None]:
    def do(training: Training, checkpoint: Any) -> None:
        handle = training.opt.register_load_state_dict_pre_hook(hook)
        training.opt.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        handle.remove()

    return do


def raise_in_hook(*_: Any) -> None:
    raise LookupError("of a hook")


def failing_hook(training: Training, checkpoint: Any) -> None:
    other = Training(training.setting).steps(range(30, 35)).opt.state_dict()
    for register in ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"):
        handle = getattr(training.opt, register)(raise_in_hook)
        with contextlib.suppress(LookupError):
            training.opt.load_state_dict(copy.deepcopy(other))
        handle.remove()
        training.opt.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))


def in_a_thread(training: Training, checkpoint: Any) -> None:
    thread = threading.Thread(target=training.opt.load_state_dict, args=(copy.deepcopy(checkpoint["optimizer"]),))
    thread.start()
    thread.join()


def two_optimizers(training: Training, checkpoint: Any) -> None:
    """Another training loads the very same tensors, and goes elsewhere."""
    state = copy.deepcopy(checkpoint["optimizer"])
    training.opt.load_state_dict(state)
    other = Training(training.setting)
    other.opt.load_state_dict(state)
    other.steps(range(40, 43))


def loaded_and_zeroed(training: Training, checkpoint: Any) -> None:
    state = copy.deepcopy(checkpoint["optimizer"])
    training.opt.load_state_dict(state)
    zeroed(state)


def load_in_mode(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Training, Any], None]:
    def do(training: Training, checkpoint: Any) -> None:
        with mode():
            training.opt.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))

    return do


def in_default_dtype(training: Training, checkpoint: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        training.opt.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
    finally:
        torch.set_default_dtype(torch.float32)


def legacy_file(training: Training, checkpoint: Any) -> None:
    file = io.BytesIO()
    torch.save(checkpoint["optimizer"], file, _use_new_zipfile_serialization=False)
    file.seek(0)
    training.opt.load_state_dict(torch.load(file, weights_only=True))


MOMENTS: dict[str, Callable[[Training, Any], object]] = {
    "its tensors are zeroed behind the load": loaded_and_zeroed,
    "two optimizers load the same tensors": two_optimizers,
    "in a thread": in_a_thread,
    "without gradients": load_in_mode(torch.no_grad),
    "in inference mode": load_in_mode(torch.inference_mode),
    "under autocast": load_in_mode(lambda: torch.autocast("cpu", torch.bfloat16)),
    "under the default dtype float64": in_default_dtype,
    "a hook that returns a copy": with_hook(lambda _, state: copy.deepcopy(state)),
    "hooks that raise": failing_hook,
    "a file of the old format": legacy_file,
    "asked for and dropped": lambda training, checkpoint: training.opt.state_dict(),
    "asked for and deep-copied twice": lambda training, checkpoint: copy.deepcopy(
        copy.deepcopy(training.opt.state_dict())
    ),
    "printed": lambda training, checkpoint: (repr(training.opt), str(training.net.report), training.opt.counters()),
}


def without_a_copy(setting: Setting) -> Outcome:
    """A state that is kept without a copy while the training goes on, and is loaded then, is that of before or that of
    now, and no mixture."""
    before, now = Training(setting).steps(range(BEFORE)), Training(setting).steps(range(BEFORE + 1))
    ends = [t.steps(range(10, 12)).parameters for t in (before, now)]
    training = Training(setting).steps(range(BEFORE))
    weights, state = copy.deepcopy(training.net.state_dict()), training.opt.state_dict()
    training.step(BEFORE)
    later = copy.deepcopy(training.net.state_dict())
    results = []
    for of_net in (weights, later):
        again = Training(setting)
        again.net.load_state_dict(of_net)
        again.opt.load_state_dict(copy.deepcopy(state))
        results.append(again.steps(range(10, 12)).parameters)
    equal = [torch.equal(results[0], ends[0]), torch.equal(results[1], ends[1])]
    return Outcome(any(equal), f"as before {equal[0]}, as now {equal[1]}")


def of_states() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    rng = random.Random(SEED)
    plain = {"scaler": False, "groups": "one", "burn_in": 0}
    for way in ODD_STATES:
        setting = drawn(rng, **plain)
        yield f"handed over {way}: {setting}", lambda s=setting, w=way: load_odd(s, w)
    for name, other in FOREIGN.items():
        setting = drawn(rng, **plain, model="two layers", frozen=False, dtype="float64")
        yield f"of {name}: {setting}", lambda s=setting, o=other: foreign(s, o)
    for name, do in MOMENTS.items():
        setting = drawn(rng, **plain)
        yield f"{name}: {setting}", lambda s=setting, d=do: same_state_after(d)(s)
    for rule in RULES:
        setting = drawn(rng, **plain, rule=rule, micro_batches=1)
        yield f"kept without a copy: {setting}", lambda s=setting: without_a_copy(s)


# --- given-up batches -------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by a user's code."""


STOPS: tuple[type[BaseException], ...] = (Stop, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit)


def stopping(error: type[BaseException]) -> Callable[..., Any]:
    def stop(*_: Any) -> None:
        raise error

    return stop


def hooked(
    register: Callable[[Training, Callable[..., Any]], Any], error: type[BaseException] = Stop
) -> Callable[..., Any]:
    """Gives a batch up by an error in a hook, in whatever part of the step it is."""

    def give_up(training: Training) -> None:
        handle = register(training, stopping(error))
        try:
            training.backward(training.loss(77, 4.0))
            training.opt.step()
        except BaseException as raised:
            if not isinstance(raised, (*STOPS, RuntimeError)):
                raise
        handle.remove()
        training.opt.zero_grad()

    return give_up


def in_closure(training: Training) -> None:
    def closure() -> Tensor:
        training.opt.zero_grad()
        training.backward(training.loss(77, 4.0))
        raise Stop

    with contextlib.suppress(Stop):
        training.opt.step(closure)
    training.opt.zero_grad()


def generator_closed(training: Training) -> None:
    def batches() -> Iterator[None]:
        for number in range(3):
            loss = training.loss(80 + number, 4.0)
            yield
            training.backward(loss)

    steps = batches()
    next(steps)
    next(steps)
    steps.close()
    training.opt.zero_grad()


def backward_twice(training: Training) -> None:
    loss = training.loss(77, 4.0)
    loss.backward(retain_graph=True)
    loss.backward()
    training.opt.zero_grad()


def graph_of_gradients(training: Training) -> None:
    loss = training.loss(77, 4.0)
    (gradient,) = torch.autograd.grad(loss, [first_trained(training)], create_graph=True)
    gradient.square().sum().backward()
    training.opt.zero_grad()


def second_forward_alone(training: Training) -> None:
    """The second of two forwards has a backward, and then both are given up."""
    first, second = training.loss(77, 4.0), training.loss(78, 4.0)
    training.backward(second)
    del first
    training.opt.zero_grad()


def some_inputs(training: Training) -> None:
    training.loss(77, 4.0).backward(inputs=[first_trained(training)])
    training.opt.zero_grad()


def other_thread(training: Training) -> None:
    def work() -> None:
        training.backward(training.loss(77, 4.0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    training.opt.zero_grad()


def of_a_copy(training: Training) -> None:
    other = copy.deepcopy(training.net)
    F.cross_entropy(other(training.batch(77)[0]), training.batch(77)[1]).backward()


def functional(training: Training) -> None:
    tensors = {name: p.detach().clone().requires_grad_() for name, p in training.net.named_parameters()}
    x, y = training.batch(77)
    F.cross_entropy(torch.func.functional_call(training.net, tensors, (x,)), y).backward()


def by_examples(training: Training) -> None:
    """Gradients of examples by torch.func, as for clipping in differential privacy."""
    tensors = {name: p.detach() for name, p in training.net.named_parameters()}
    x, y = training.batch(77)

    def loss(at: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(training.net, at, (one[None],)), target[None])

    torch.func.grad(loss)(tensors, x[0], y[0])


def evaluated_before_its_backward(training: Training) -> None:
    loss = training.loss(77, 4.0)
    training.called.eval()
    training.backward(loss)
    training.called.train()
    training.opt.zero_grad()


def of_nan(training: Training) -> None:
    x, y = training.batch(77)
    training.backward(F.cross_entropy(training.called(x * math.nan), y))
    training.opt.zero_grad()


def of_no_cases(training: Training) -> None:
    x, y = training.batch(77)
    training.backward(F.cross_entropy(training.called(x[:0]), y[:0], reduction="sum"))
    training.opt.zero_grad()


def of_one_case(training: Training) -> None:
    x, y = training.batch(77)
    with contextlib.suppress(ValueError):  # batch norm
        training.backward(F.cross_entropy(training.called(x[:1]), y[:1]))
    training.opt.zero_grad()


def detached(training: Training) -> None:
    with contextlib.suppress(RuntimeError):
        training.loss(77, 4.0).detach().backward()
    training.opt.zero_grad()


def modes_left_open(training: Training) -> None:
    for number, mode in enumerate((False, True)):
        torch.set_grad_enabled(mode)
        loss = training.loss(77 + number, 4.0)
    training.backward(loss)
    training.opt.zero_grad()


def anomaly(training: Training) -> None:
    with torch.autograd.set_detect_anomaly(True), contextlib.suppress(RuntimeError):
        x, y = training.batch(77)
        training.backward((F.cross_entropy(training.called(x), y) * 0).sqrt())
    training.opt.zero_grad()


def step_without_gradients(training: Training) -> None:
    """Gradients are zeroed, and the step is taken all the same, which does nothing."""
    training.backward(training.loss(77, 4.0))
    training.opt.zero_grad()
    training.opt.step()


def report_in_between(training: Training) -> None:
    loss = training.loss(77, 4.0)
    str(training.net.report)
    training.backward(loss)
    repr(training.opt)
    training.opt.zero_grad()


def clipped_away(training: Training) -> None:
    training.backward(training.loss(77, 4.0))
    nn.utils.clip_grad_norm_(training.net.parameters(), 0.0)
    training.opt.zero_grad()


def frozen_in_between(training: Training) -> None:
    loss, parameter = training.loss(77, 4.0), first_trained(training)
    parameter.requires_grad_(False)
    training.backward(loss)
    parameter.requires_grad_(True)
    training.opt.zero_grad()


def two_losses(training: Training) -> None:
    """The graph of one batch is kept, and goes backward with that of the next one."""
    first = training.loss(77, 4.0)
    (first + training.loss(78, 4.0)).backward()
    training.opt.zero_grad()


def on_input(training: Training) -> None:
    """An adversarial example: the gradient of the input, and those of the parameters with it."""
    x, y = training.batch(77)
    if x.is_floating_point():
        training.backward(F.cross_entropy(training.called(x.requires_grad_()), y))
    training.opt.zero_grad()


def alarm(training: Training) -> None:
    """A time limit ends a forward."""
    handle = next(m for m in training.model.modules() if not list(m.children())).register_forward_pre_hook(
        stopping(TimeoutError)
    )
    with contextlib.suppress(TimeoutError):
        training.loss(77, 4.0)
    handle.remove()


GIVE_UPS: dict[str, Callable[[Training], object]] = {
    **{
        f"{error.__name__} in a hook of the gradient": hooked(
            lambda t, hook: first_trained(t).register_hook(hook), error
        )
        for error in STOPS
    },
    "an error behind the gradient": hooked(lambda t, hook: first_trained(t).register_post_accumulate_grad_hook(hook)),
    "an error in a hook before forward": hooked(lambda t, hook: t.called.register_forward_pre_hook(hook)),
    "an error in a hook behind forward": hooked(lambda t, hook: t.called.register_forward_hook(hook)),
    "an error in a hook before the step": hooked(lambda t, hook: t.opt.register_step_pre_hook(hook)),
    "an error in a closure": in_closure,
    "a generator that is closed": generator_closed,
    "two backwards of one graph": backward_twice,
    "gradients of gradients": graph_of_gradients,
    "a backward of the second forward alone": second_forward_alone,
    "a backward into one parameter": some_inputs,
    "a forward and a backward in a thread": other_thread,
    "a copy of the net": of_a_copy,
    "a functional call": functional,
    "gradients of examples": by_examples,
    "evaluation before the backward": evaluated_before_its_backward,
    "an input of NaN": of_nan,
    "a batch of no cases": of_no_cases,
    "a batch of one case": of_one_case,
    "a detached loss": detached,
    "gradients switched off and on": modes_left_open,
    "an anomaly": anomaly,
    "a step behind zero_grad": step_without_gradients,
    "a report in between": report_in_between,
    "clipping to nothing": clipped_away,
    "a parameter frozen in between": frozen_in_between,
    "the sum of two losses": two_losses,
    "a gradient of the input": on_input,
    "a time limit": alarm,
}


def give_up(setting: Setting, way: str) -> Outcome:
    plain = Training(setting).steps(range(4))
    training = Training(setting)
    for number in range(4):
        if number != 1:
            stream, buffers = training.opt.generator.get_state(), [b.clone() for b in training.model.buffers()]
            GIVE_UPS[way](training)
            training.opt.generator.set_state(stream)
            for buffer, old in zip(training.model.buffers(), buffers, strict=True):
                buffer.copy_(old)  # statistics of norms
        training.step(number)
    distance = float((training.parameters - plain.parameters).abs().max())
    return Outcome(distance == 0.0, f"parameters differ by {distance:.2g}")


def of_given_up_batches() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    rng, rules = random.Random(SEED + 1), list(RULES)
    for number, way in enumerate(GIVE_UPS):
        setting = drawn(rng, rule=rules[number % len(rules)], micro_batches=1, groups="one", scaler=False, burn_in=0)
        yield f"{way}: {setting}", lambda s=setting, w=way: give_up(s, w)


# --- numbers ----------------------------------------------------------------------------------------------------------

# Options with a value that they cannot have, or an unusual one: whether they are right.
OPTIONS: list[tuple[str, Any, bool]] = [
    *(("lr", value, False) for value in (math.nan, -1.0, math.inf, "0.1", 1j, torch.ones(2), [0.1], None.__class__)),
    *(("lr", value, True) for value in (np.float32(0.5), Fraction(1, 2), torch.tensor(0.5), torch.tensor([0.5]), 1)),
    ("lr", Decimal("0.5"), False),
    ("lr", torch.tensor(0.5, requires_grad=True), True),
    ("weight_decay", math.nan, False),
    ("weight_decay", -0.1, False),
    ("weight_decay", "0", False),
    ("momentum", 1.0, False),
    ("momentum", -0.1, False),
    ("momentum", math.nan, False),
    ("momentum", torch.tensor(0.9), True),
    ("second_moment_decay", 1.5, False),
    ("second_moment_decay", math.nan, False),
    ("eigenvalue_exponent", math.nan, False),
    ("eigenvalue_exponent", -1.0, False),
    ("norm_constraint", 0.0, False),
    ("norm_constraint", math.nan, False),
    ("norm_constraint", -1.0, False),
    ("overhead", 0.0, False),
    ("overhead", math.nan, False),
    ("overhead", "20%", False),
    ("relative_damping", math.nan, False),
    ("relative_damping", -1.0, False),
    ("invert_every", 0, False),
    ("invert_every", 1.5, False),
    ("invert_every", True, False),
    ("invert_every", 2**70, True),
    ("cov_update_every", -1, False),
    ("cov_update_every", math.inf, False),
    ("num_burnin_steps", -1, False),
    ("fraction", 0.0, False),
    ("fraction", 2.0, False),
    ("fraction", math.nan, False),
    ("cov_ema_decay", 1.5, False),
    ("cov_ema_decay", math.nan, False),
    ("seed", -1, True),
    ("seed", 1.5, False),
    ("seed", 2**70, False),
    ("reduction", "none", False),
    ("estimation_mode", 3, False),
    ("placement", "here", False),
    ("damping_adaptation_interval", 0, False),
    ("damping_adaptation_interval", 2.5, False),
    ("params", 5, False),
    ("params", [{"params": []}], False),
    ("grad_scaler", 3, False),
    ("first_order", {"lr": math.nan}, False),
    ("first_order", 0.1, False),
    ("process_group", "world", False),
    ("damping", torch.tensor(0.1, requires_grad=True), True),
    ("damping", math.nan, False),
    ("damping", 0.0, False),
]


def with_option(name: str, value: Any, fits: bool) -> Outcome:
    """An option that does not fit is an error; another one is as the number that it stands for."""
    ends = []
    for given in (value, float(value) if fits and not isinstance(value, int) else value):
        training = Training(Setting(rule="eigen_moments", dtype="float32"), **{"cov_update_every": None, name: given})
        ends.append(training.steps(range(8)).parameters)
    return Outcome(fits and torch.equal(*ends), f"differs by {float((ends[0] - ends[1]).abs().max()):.2g}")


def group_edit(name: str, value: Any) -> Callable[[Training], None]:
    def edit(training: Training) -> None:
        training.opt.param_groups[0][name] = value

    return edit


def gradients(change: Callable[[nn.Parameter], Any]) -> Callable[[Training], None]:
    """Changes the gradients of a batch, and takes the step."""

    def do(training: Training) -> None:
        training.opt.zero_grad()
        training.backward(training.loss(50))
        for parameter in training.net.parameters():
            if parameter.grad is not None:
                parameter.grad = change(parameter)
        training.opt.step()

    return do


def loss_of(change: Callable[[Tensor], Tensor]) -> Callable[[Training], None]:
    def do(training: Training) -> None:
        training.opt.zero_grad()
        change(training.loss(50)).backward()
        training.opt.step()

    return do


def targets_of(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Training], None]:
    """Another loss of the outputs and the targets for a step."""

    def do(training: Training) -> None:
        training.opt.zero_grad()
        x, y = training.batch(50)
        change(training.called(x), y).backward()
        training.opt.step()

    return do


def batch_of(
    change: Callable[[Tensor], Tensor], target: Callable[[Tensor], Tensor] = lambda y: y
) -> Callable[[Training], None]:
    def do(training: Training) -> None:
        training.opt.zero_grad()
        x, y = training.batch(50)
        F.cross_entropy(training.called(change(x)), target(y)).backward()
        training.opt.step()

    return do


def filled(value: float) -> Callable[[Training], None]:
    @torch.no_grad()
    def do(training: Training) -> None:
        first_trained(training).fill_(value)

    return do


# Events that happen once, between the steps of a training whose loss falls before and behind it.
EVENTS: dict[str, Callable[[Training], object]] = {
    "lr of NaN in a group": group_edit("lr", math.nan),
    "lr of infinity in a group": group_edit("lr", math.inf),
    "a negative lr in a group": group_edit("lr", -1.0),
    "lr of None in a group": group_edit("lr", None),
    "lr of two numbers in a group": group_edit("lr", torch.ones(2)),
    "lr of a text in a group": group_edit("lr", "1"),
    "a complex lr in a group": group_edit("lr", 1j),
    "a negative momentum in a group": group_edit("momentum", -0.5),
    "weight decay of NaN in a group": group_edit("weight_decay", math.nan),
    "weight decay of infinity in a group": group_edit("weight_decay", math.inf),
    "an lr that needs a gradient in a group": group_edit("lr", torch.tensor(0.1, requires_grad=True)),
    "an lr of NumPy in a group": group_edit("lr", np.float32(0.1)),
    "the damping in a group": group_edit("damping", 3.0),
    "gradients of 1e38": gradients(lambda p: torch.full_like(p, 1e38)),
    "gradients of 1e-38": gradients(lambda p: torch.full_like(p, 1e-38)),
    "gradients of infinity": gradients(lambda p: torch.full_like(p, math.inf)),
    "gradients of NaN": gradients(lambda p: torch.full_like(p, math.nan)),
    "gradients of zero": gradients(torch.zeros_like),
    "gradients that are copies": gradients(lambda p: p.grad.clone()),
    "gradients that need gradients": gradients(lambda p: p.grad.clone().requires_grad_()),
    "gradients that are the parameters": gradients(lambda p: p.detach()),
    "gradients of other parameters' shape": gradients(lambda p: p.grad.flatten()),
    "gradients of float16": gradients(lambda p: p.grad.half()),
    "sparse gradients": gradients(lambda p: p.grad.to_sparse()),
    "gradients that are expanded": gradients(lambda p: p.grad.mean().expand_as(p)),
    "a loss of infinity": loss_of(lambda loss: loss * math.inf),
    "a loss of minus infinity": loss_of(lambda loss: loss * -math.inf),
    "a loss of NaN": loss_of(lambda loss: loss * math.nan),
    "a loss times zero": loss_of(lambda loss: loss * 0),
    "a loss less 1e30": loss_of(lambda loss: loss - 1e30),
    "minus the loss": loss_of(lambda loss: -loss),
    "the root of zero": loss_of(lambda loss: loss + (loss * 0).sqrt()),
    "no target": targets_of(lambda z, y: F.cross_entropy(z, torch.full_like(y, -100), reduction="sum")),
    "the mean over no target": targets_of(lambda z, y: F.cross_entropy(z, torch.full_like(y, -100))),
    "targets of int32": targets_of(lambda z, y: F.cross_entropy(z, y.int())),
    "targets of probabilities": targets_of(lambda z, y: F.cross_entropy(z, F.one_hot(y, CLASSES).to(z.dtype))),
    "targets of uint8": targets_of(lambda z, y: F.cross_entropy(z, y.to(torch.uint8))),
    "a target that is no class": targets_of(lambda z, y: F.cross_entropy(z, y + CLASSES)),
    "weights of classes of zero": targets_of(
        lambda z, y: F.cross_entropy(z, y, weight=torch.zeros(CLASSES).to(z.dtype))
    ),
    "half of the outputs": targets_of(lambda z, y: F.cross_entropy(z[:4], y[:4])),
    "outputs turned upside down": targets_of(lambda z, y: F.cross_entropy(z.flip(0), y.flip(0))),
    "a batch of no cases, summed": targets_of(lambda z, y: F.cross_entropy(z[:0], y[:0], reduction="sum")),
    "an expanded batch": batch_of(lambda x: x[:1].expand_as(x)),
    "a turned batch": batch_of(lambda x: x.t().contiguous().t()),
    "every second case": batch_of(lambda x: x[::2], lambda y: y[::2]),
    "a batch 50 times as large": batch_of(lambda x: x.repeat(50, 1), lambda y: y.repeat(50)),
    "a batch that is a parameter": batch_of(lambda x: nn.Parameter(x)),
    "a batch of a subclass": batch_of(lambda x: x.as_subclass(Subclass)),
    "a batch of zeros": batch_of(torch.zeros_like),
    "a batch of 1e30": batch_of(lambda x: x * 1e30),
    "a batch of another dtype": batch_of(lambda x: x.half()),
    "a batch of whole numbers": batch_of(lambda x: x.long()),
    "a parameter of NaN": filled(math.nan),
    "a parameter of infinity": filled(math.inf),
}


def with_event(rule: str, name: str) -> Outcome:
    """The loss falls in spite of it, or in a training without the library the same error comes."""
    training = Training(Setting(rule=rule, dtype="float32"))
    training.steps(range(10))
    before = training.value()
    try:
        EVENTS[name](training)
    except (RuntimeError, IndexError, TypeError) as error:
        if (words := error_of_torch(name)) is not None and words == str(error):
            raise Torchs(str(error)) from error
        raise
    if "in a group" in name:
        training.steps([50])
        finite = bool(torch.isfinite(training.parameters).all())
        return Outcome(finite and name in HARMLESS, f"parameters are {'finite' if finite else 'lost'}")
    training.steps(range(10, 40))
    finite, after = bool(torch.isfinite(training.parameters).all()), training.value()
    return Outcome(finite and after < max(3 * before, 0.2) + 1.0, f"{before:.3g} -> {after:.3g}")


HARMLESS = ("an lr of NumPy in a group", "an lr that needs a gradient in a group")


class WithTorch(Training):
    """The same training by SGD."""

    def __init__(self) -> None:
        super().__init__(Setting(dtype="float32"))
        self.called = self.model
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1)  # type: ignore[assignment]


def error_of_torch(event: str) -> str | None:
    try:
        EVENTS[event](training := WithTorch())
        if "in a group" in event:
            training.step(50)
    except Exception as error:
        return str(error)
    return None


def of_numbers() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for name, value, fits in OPTIONS:
        shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
        if isinstance(value, Tensor):
            shown = f"a tensor {list(value.shape)}" + " that needs a gradient" * value.requires_grad
        yield f"{name} is {shown}", lambda n=name, v=value, f=fits: with_option(n, v, f)
    rules = [rule for rule in RULES if rule != "qmodel_fixedmu"]  # its losses go up and down
    for number, event in enumerate(EVENTS):
        rule = rules[number % len(rules)]
        yield f"{event}: {rule}", lambda r=rule, e=event: with_event(r, e)


# --- folders ----------------------------------------------------------------------------------------------------------


class Twins(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.b(torch.tanh(self.a(x)))
        return outputs


def saved_twins(folder: Path, seed: int = 0) -> tuple[kfac_fx.CompiledModule, kfac_fx.ModelSpectrum]:
    torch.manual_seed(seed)
    net = kfac_fx.compile(Twins(), (folders.X,), loss="categorical")
    spectrum = folders.small_spectrum(net)
    kfac_fx.save_spectrum(spectrum, folder)
    return net, spectrum


def in_manifest(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """The manifest is written again in its own form, with a change."""

    def damage(folder: Path) -> None:
        path = next(path for path in folder.iterdir() if path.suffix == ".json")
        changed = change(json.loads(path.read_text()))
        path.write_text(json.dumps(changed))

    return damage


def every(change: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """Changes every value of a manifest that is no container, by its key."""

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: walk(inside, name) for name, inside in value.items()}
        if isinstance(value, list):
            return [walk(inside, key) for inside in value]
        return change(key, value)

    return walk


def exchanged(folder: Path) -> None:
    """The files of two blocks of one shape change their names."""
    first, second = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")[:2]
    first.rename(folder / "third")
    second.rename(first)
    (folder / "third").rename(second)


def of_another(folder: Path) -> None:
    """One file is that of a folder of other weights."""
    saved_twins(folder.parent / "other", 1)
    here, there = (sorted(path.glob("*.safetensors"))[0] for path in (folder, folder.parent / "other"))
    here.write_bytes(there.read_bytes())


def manifest_of_another(folder: Path) -> None:
    saved_twins(folder.parent / "other", 1)
    path = next(path for path in folder.iterdir() if path.suffix == ".json")
    path.write_bytes((folder.parent / "other" / path.name).read_bytes())


FOLDERS: dict[str, Callable[[Path], object]] = {
    "files of two blocks exchanged": exchanged,
    "a file of another folder": of_another,
    "the manifest of another folder": manifest_of_another,
    "a manifest that is a list": in_manifest(lambda m: [m]),
    "a manifest that is a text": in_manifest(lambda m: "manifest"),
    "a manifest that is null": in_manifest(lambda m: None),
    "a manifest of nothing": in_manifest(lambda m: {}),
    "a manifest in itself": in_manifest(lambda m: {"manifest": m}),
    "a manifest with further keys": in_manifest(lambda m: {**m, "note": "mine"}),
    "a manifest whose first key is gone": in_manifest(lambda m: dict(list(m.items())[1:])),
    "a manifest whose last key is gone": in_manifest(lambda m: dict(list(m.items())[:-1])),
    "a manifest with lists of nothing": in_manifest(
        lambda m: {k: [] if isinstance(v, list) else v for k, v in m.items()}
    ),
    "a manifest with lists twice": in_manifest(
        lambda m: {k: v * 2 if isinstance(v, list) else v for k, v in m.items()}
    ),
    "a manifest with lists reversed": in_manifest(
        lambda m: {k: v[::-1] if isinstance(v, list) else v for k, v in m.items()}
    ),
    "a manifest of nulls": in_manifest(every(lambda key, value: None)),
    "a manifest of numbers": in_manifest(every(lambda key, value: 7)),
    "a manifest of texts": in_manifest(every(lambda key, value: str(value))),
    "a manifest of NaN": in_manifest(every(lambda key, value: math.nan if isinstance(value, float) else value)),
    "a manifest of capitals": in_manifest(every(lambda key, value: value.upper() if isinstance(value, str) else value)),
    "a manifest with larger numbers": in_manifest(
        every(lambda key, value: value + 1 if isinstance(value, int) and not isinstance(value, bool) else value)
    ),
    "a manifest with other amounts": in_manifest(
        every(lambda key, value: value * 2 if isinstance(value, float) else value)
    ),
    "a manifest with negated flags": in_manifest(
        every(lambda key, value: not value if isinstance(value, bool) else value)
    ),
    "a manifest with texts of nothing": in_manifest(every(lambda key, value: "" if isinstance(value, str) else value)),
    "a manifest with paths upwards": in_manifest(
        every(lambda key, value: f"../{value}" if isinstance(value, str) and value.endswith(".safetensors") else value)
    ),
    "a manifest with absolute paths": in_manifest(
        every(
            lambda key, value: f"/tmp/{value}" if isinstance(value, str) and value.endswith(".safetensors") else value
        )
    ),
    "a manifest 5,000 lists deep": lambda folder: next(
        path for path in folder.iterdir() if path.suffix == ".json"
    ).write_text("[" * 5000 + "]" * 5000),
    "a manifest with a key twice": lambda folder: (
        (path := next(path for path in folder.iterdir() if path.suffix == ".json"))
        and path.write_text(path.read_text().rstrip()[:-1] + ', "format": 9}')
    ),
    "a manifest in UTF-16": lambda folder: (
        (path := next(path for path in folder.iterdir() if path.suffix == ".json"))
        and path.write_bytes(path.read_text().encode("utf-16"))
    ),
    "a manifest with Latin letters": lambda folder: (
        (path := next(path for path in folder.iterdir() if path.suffix == ".json"))
        and path.write_bytes(path.read_bytes()[:-1] + b"\xe9")
    ),
    "a folder with 2,000 other files": lambda folder: [(folder / f"{number}.txt").touch() for number in range(2000)],
    "an empty folder in it": lambda folder: (folder / "empty").mkdir(),
    "a file that cannot be opened by name": lambda folder: (folder / "\udcff").touch(),
    "queries written into it": lambda folder: kfac_fx.save_queries(
        folders.small_spectrum(folders.small_net()).precondition((folders.X[:1], folders.Y[:1])), folder
    ),
}


def in_folder(damage: str) -> Outcome:
    """The spectrum is read as it was written, or an error says why not."""
    with folders.temporary() as base:
        folder = base / "folder"
        net, spectrum = saved_twins(folder)
        FOLDERS[damage](folder)
        tensors = folders.tensors_of(kfac_fx.load_spectrum(net, folder))
        same = all(map(torch.equal, tensors, folders.tensors_of(spectrum)))
        return Outcome(same, "as written" if same else "other numbers")


class PathLike:
    """An object of a user that stands for a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


class FailingPath:
    def __fspath__(self) -> str:
        raise LookupError("of a user")


WHERE: dict[str, Callable[[Path], Any]] = {
    "an object for a path": lambda base: PathLike(base / "a"),
    "a path that begins with ~": lambda base: base / "~",
    "a text of nothing": lambda base: "",
    "a relative path": lambda base: os.path.relpath(base / "a"),
    "a path with a variable": lambda base: base / "$HOME",
    "two slashes": lambda base: f"{base}//a",
    "a name with a dot": lambda base: base / "a.safetensors",
    "a name with a colon": lambda base: base / "a:b",
    "a trailing space": lambda base: base / "a ",
    "a lone surrogate": lambda base: base / "a\udcff",
    "a text of the writer's format": lambda base: f"file://{base}/a",
    "None": lambda base: None,
    "an open file": lambda base: (base / "a").open("w"),
}


def where(place: str) -> Outcome:
    with folders.temporary() as base, contextlib.chdir(base):
        folder = WHERE[place](base)
        try:
            net, spectrum = saved_twins(folder)
        finally:
            if hasattr(folder, "close"):
                folder.close()
        tensors = folders.tensors_of(kfac_fx.load_spectrum(net, folder))
        same = all(map(torch.equal, tensors, folders.tensors_of(spectrum)))
        return Outcome(same, "as written" if same else "other numbers")


def named_spectrum(parts: Sequence[tuple[str, str]]) -> Outcome:
    """The spectrum of a model with these names, through a folder."""
    torch.manual_seed(0)
    try:
        model = names.Named(parts)
    except (KeyError, TypeError) as error:
        raise Torchs(str(error)) from error
    x, _ = names.data()
    net = kfac_fx.compile(model.eval(), (x,), loss="normal")
    with folders.temporary() as base:
        spectrum = kfac_fx.fit_spectrum(net, [x], mode="exact", folder=base / "fit", damping=0.1)
        kfac_fx.save_spectrum(spectrum, base / "saved")
        for folder in ("fit", "saved"):
            loaded = kfac_fx.load_spectrum(net, base / folder, damping=0.1)
            for block, tensors in loaded.eigenvalues().items():
                if not torch.equal(tensors, spectrum.eigenvalues()[block]):
                    return Outcome(False, f"other eigenvalues of {block!r}")
        part = spectrum.part([name for name, _ in net.named_parameters()])
        return Outcome(bool(torch.equal(part.log_determinant(), spectrum.log_determinant())), "a part is another")


def read_while_written() -> Outcome:
    """Readers of a folder that is written with other numbers get those of before or those of behind, all of them."""
    with folders.temporary() as base:
        folder = base / "folder"
        net, first = saved_twins(folder)
        second = folders.small_spectrum(net, 2.0)
        expected = [folders.tensors_of(spectrum) for spectrum in (first, second)]
        wrong, errors = list[str](), list[BaseException]()

        def read() -> None:
            try:
                for _ in range(15):
                    tensors = folders.tensors_of(kfac_fx.load_spectrum(net, folder))
                    if not any(all(map(torch.equal, tensors, whole)) for whole in expected):
                        wrong.append("a mixture")
            except BaseException as error:
                errors.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for thread in readers:
            thread.start()
        for number in range(15):
            kfac_fx.save_spectrum((second, first)[number % 2], folder)
        for thread in readers:
            thread.join()
        if errors:
            raise errors[0]
        return Outcome(not wrong, "; ".join(wrong[:1]))


def disk_full() -> Outcome:
    """A write that fails in the middle leaves the folder of before."""
    with folders.temporary() as base:
        folder = base / "folder"
        net, first = saved_twins(folder)
        expected = folders.tensors_of(first)
        real = os.replace
        for failing in range(3):
            calls = 0

            def replace_once(*args: Any, most: int = failing, **kwargs: Any) -> None:
                nonlocal calls
                calls += 1
                if calls > most:
                    raise OSError(28, "No space left on device")
                real(*args, **kwargs)

            os.replace = replace_once  # type: ignore[assignment]
            try:
                kfac_fx.save_spectrum(folders.small_spectrum(net, 2.0), folder)
            except OSError:
                pass
            finally:
                os.replace = real
            tensors = folders.tensors_of(kfac_fx.load_spectrum(net, folder))
            whole = [expected, folders.tensors_of(folders.small_spectrum(net, 2.0))]
            if not any(all(map(torch.equal, tensors, numbers)) for numbers in whole):
                return Outcome(False, "a mixture")
        return Outcome(True)


WORDS: dict[str, list[str]] = {
    "methods of a dictionary": ["keys", "items", "values", "get", "pop", "update", "clear", "copy"],
    "attributes of a tensor": ["T", "mT", "shape", "dtype", "device", "grad", "data", "real"],
    "formats": ["{name}", "{0}", "{{}}", "%(a)s", "%%", "\\n", "\\", "${a}"],
    "marks of a page": ["<script>", "</td>", "&amp;", '"', "`", "-->", "*bold*", "|"],
    "invisible letters": ["\u202e", "\ufeff", "\u2028", "\u00ad", "\u200d", "\U000e0041", "\u061c", "\x7f"],
    "a lone surrogate": ["\ud800", "a\udfff", "\udcff", "b"],
    "patterns": ["(", ")+", "^a$", "a|b", "\\d", "[^a]", "?:", "a{2}"],
    "paths": ["..a", "a~", "C:", "con", "nul", "aux", "a\\b", "~"],
    "numbers of other kinds": ["1_000", "１", "inf", "nan", "True", "1j", "0b1", "+1"],
    "entries of a state": [
        "exp_avg",
        "kfac_name",
        "kfac/name",
        "kfac/counter",
        "first_lr",
        "last_update",
        "m",
        "exp_avg_sq",
    ],
    "case variants": ["weight", "Weight", "WEIGHT", "weighT", "bias", "Bias"],
    "equal but for separators": ["a b", "a_b", "a-b", "a/b", "a,b", "a:b", "a|b", "a\tb"],
    "compositions": ["Å", "A\u030a", "\u212b", "ǆ", "dž", "ﬃ", "ffi", "ⅷ"],
    "names of blocks": ["A", "G", "F", "basis", "moment", "values", "vectors", "positions"],
}


def parts_of(words: str, number: int) -> list[tuple[str, str]]:
    chosen = random.Random(f"{words}{number}").sample(WORDS[words], min(len(WORDS[words]), 4))
    return [(name, names.PARTS[(number + place) % len(names.PARTS)]) for place, name in enumerate(chosen)]


def shown(parts: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{part} {name!a}" for name, part in parts)


def of_folders() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for damage in FOLDERS:
        yield f"a spectrum of two equal layers, {damage}", lambda d=damage: in_folder(d)
    for place in WHERE:
        yield f"a spectrum of two equal layers, at {place}", lambda p=place: where(p)
    for words in WORDS:
        parts = parts_of(words, 1)
        yield f"a spectrum with {words}: {shown(parts)}", lambda p=parts: named_spectrum(p)
    yield "a folder that is read while other numbers are written", read_while_written
    yield "a folder that is full while it is written", disk_full


# --- names and shapes -------------------------------------------------------------------------------------------------


class Lists(nn.Module):
    """One module in a list twice, in a dictionary, and in a tuple that torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer, layer])
        self.by_name = nn.ModuleDict({"keys ": layer, "0": nn.Linear(4, 2)})
        self.hidden = (layer,)

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.layers, *self.hidden):
            x = torch.tanh(module(x))
        outputs: Tensor = self.by_name["0"](x)
        return outputs


class Slots(nn.Module):
    """A property, a parameter that is an attribute of a class, and a parameter that forward makes a view of."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._weight = nn.Parameter(torch.rand(2, 4))

    @property
    def weight(self) -> Tensor:
        return self._weight * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one module in three containers": Lists,
    "a property": Slots,
    "a module in itself": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 2))))),
    "an identity for a head": lambda: nn.Sequential(nn.Linear(4, 2), nn.Identity()),
    "a lazy layer": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
    "a list of parameters": lambda: Of(
        lambda m, x: m.b(x * m.p[0] + m.p[1]), p=nn.ParameterList([torch.rand(4), torch.rand(4)]), b=nn.Linear(4, 2)
    ),
    "a parameter of no elements": lambda: Of(
        lambda m, x: m.b(x) + m.p.sum(), p=nn.Parameter(torch.rand(0, 3)), b=nn.Linear(4, 2)
    ),
    "a parameter of one element": lambda: Of(
        lambda m, x: m.b(x) * m.p, p=nn.Parameter(torch.rand(1, 1)), b=nn.Linear(4, 2)
    ),
    "a weight of one row": lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 2)),
    "an integer buffer": lambda: Of(
        lambda m, x: m.b(x[:, m.order]), order=torch.tensor([3, 1, 0, 2]), b=nn.Linear(4, 2)
    ),
    "a float16 buffer": lambda: Of(lambda m, x: m.b(x * m.s.float()), s=torch.rand(4).half(), b=nn.Linear(4, 2)),
    "a complex buffer": lambda: Of(
        lambda m, x: m.b((x * m.s).real), s=torch.randn(4, dtype=torch.complex64), b=nn.Linear(4, 2)
    ),
    "a buffer that is a view of a parameter": lambda: Of(lambda m, x: m.b(x), b=nn.Linear(4, 2), s=torch.rand(4)),
}


def model_of(name: str, options: Mapping[str, Any]) -> Outcome:
    """It trains as a copy whose parameters are other objects, and the loss falls."""
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    x, y = names.data(4)

    def loss(of: nn.Module) -> float:
        with torch.no_grad():
            return float((of(x) - y).square().sum(-1).mean())

    before = loss(model)
    trained_, expected = names.train(model, x, y, **options), names.train(plain, x, y, **options)
    distance = max((float((of - to).abs().max()) for of, to in zip(trained_, expected, strict=True) if of.numel()))
    return Outcome(distance < 1e-6 and loss(model) < before, f"loss {before:.4g} -> {loss(model):.4g}, {distance:.2g}")


def of_names() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    rng = random.Random(SEED + 2)
    rules = [rule for rule in RULES if not rule.startswith("qmodel")]  # in few steps their loss may rise

    def options() -> dict[str, Any]:
        return {
            "rule": rng.choice(rules),
            "in_place": rng.random() < 0.5,
            "inputs": rng.random() < 0.5,
            "mode": "exact",
        }

    for words in WORDS:
        for number in (0, 3):
            parts, given = parts_of(words, number), options()
            yield (
                f"{words}: {shown(parts)}; {given['rule']}, in_place={given['in_place']}, inputs={given['inputs']}",
                lambda p=parts, o=given: names.run_named(p, o),
            )
    for name in MODELS:
        given = options()
        yield f"{name}; {given['rule']}, in_place={given['in_place']}", lambda n=name, o=given: model_of(n, o)


# --- processes --------------------------------------------------------------------------------------------------------


def hook_raises(training: processes.OfTwo) -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError("a hook of this process fails")

    first_trained(training).register_hook(fail)


def interrupted(training: processes.OfTwo) -> None:
    raise KeyboardInterrupt


def infinite_gradient(training: processes.OfTwo) -> None:
    handle = first_trained(training).register_hook(lambda gradient: (gradient * math.inf, handle.remove())[0])


def frozen_now(training: processes.OfTwo) -> None:
    first_trained(training).requires_grad_(False)


def kept_state(training: processes.OfTwo, number: int) -> None:
    """The second process goes back to the state of two steps before."""
    if training.rank and number == 1:
        training.kept = copy.deepcopy(training.opt.state_dict())  # type: ignore[attr-defined]
    if training.rank and number == 3:
        training.opt.load_state_dict(training.kept)  # type: ignore[attr-defined]


def measured(training: processes.OfTwo) -> None:
    if training.rank:
        kfac_fx.Metrics(training.opt, lambda values, step: None, every=1)


SCENARIOS: dict[str, processes.Scenario] = {
    "a hook that raises in the second": processes.Scenario(before=processes.at(2, hook_raises), alike=False),
    "an interrupt of the second": processes.Scenario(before=processes.at(2, interrupted), alike=False),
    "an end of the second": processes.Scenario(before=processes.at(2, lambda training: os._exit(0)), alike=False),
    "an infinite gradient in the second": processes.Scenario(before=processes.at(2, infinite_gradient), alike=False),
    "half of the lr in the second from a step on": processes.Scenario(
        before=processes.at(2, processes.smaller_lr), alike=False
    ),
    "evaluation mode in the second from a step on": processes.Scenario(
        before=processes.at(2, lambda training: training.net.eval()), alike=False
    ),
    "a parameter frozen in the second from a step on": processes.Scenario(
        before=processes.at(2, frozen_now), alike=False
    ),
    "an older state in the second": processes.Scenario(before=kept_state, alike=False),
    "a step more in the second": processes.Scenario(before=processes.at(2, lambda training: training.opt.step())),
    "metrics of the second": processes.Scenario(begin=measured),
    "a copy of the net in the second": processes.Scenario(before=processes.at(2, lambda t: copy.deepcopy(t.net))),
    "the state of the estimator in the second": processes.Scenario(
        before=processes.at(2, lambda training: training.opt.estimator.state_dict())
    ),
    "a batch of one process's own, given up": processes.Scenario(before=processes.at(2, processes.given_up)),
    "a step without gradients in both": processes.Scenario(
        before=processes.at(2, lambda training: (training.opt.zero_grad(), training.opt.step()), processes.BOTH)
    ),
}


def of_processes() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    rng, rules = random.Random(SEED + 3), list(RULES)
    for number, name in enumerate(SCENARIOS):
        setting = drawn(
            rng,
            model=rng.choice(processes.MODELS),
            rule=rules[number % len(rules)],
            mode="exact",
            dtype="float64",
            scaler=False,
            micro_batches=1,
            closure=False,
            groups="one",
            burn_in=0,
            weight_decay=0.0,
            frozen=False,
        )
        wrapped = number % 2 == 0 and "given up" not in name
        words = "DistributedDataParallel" if wrapped else "averages by hand"
        yield (
            f"{name}: {words}, {setting}",
            lambda s=setting, n=name, w=wrapped: processes.run(s, SCENARIOS[n], w),
        )


# --- exact steps, complex parameters, and several paths ---------------------------------------------------------------


def repeating(rng: random.Random, **given: Any) -> Setting:
    """A training of "eigen_moments" whose every step has one batch, so that it makes exact steps."""
    plain = {"scaler": False, "groups": "one", "burn_in": 0, "weight_decay": 0.0, "micro_batches": 1, "every": None}
    chosen = {"mode": "exact", "dtype": "float64", "repeated": True, **given}
    return drawn(rng, **plain, rule="eigen_moments", **chosen)


def numbers_of_whole(**changes: Any) -> Odd:
    """Numbers of the whole optimizer, or functions of these."""

    def apply(state: State) -> State:
        entries = state["state"][next(iter(state["state"]))]
        for name, change in changes.items():
            old = entries[f"kfac/{name}"]
            entries[f"kfac/{name}"] = torch.full_like(old, change(float(old)) if callable(change) else change)
        return state

    return apply


def of_every(name: str, change: Callable[[Tensor], Tensor]) -> Odd:
    """Changes one entry of every parameter."""

    def apply(state: State) -> State:
        for entries in state["state"].values():
            entries[name] = change(entries[name])
        return state

    return apply


EXACT_STATES: dict[str, Odd] = {
    "half a phase of bounded steps": numbers_of_whole(bounded=0.5),
    "half a long phase": numbers_of_whole(long=0.5),
    "phases of 33.3 steps": numbers_of_whole(phase=33.3),
    "half a step taken in the phase": numbers_of_whole(taken=2.5),
    "more steps in the phase than there were": numbers_of_whole(taken=2.0**40),
    "more exact steps than there were steps": numbers_of_whole(exact_steps=lambda number: number + 1000),
    "a phase of the other kind": numbers_of_whole(bounded=lambda flag: 1 - flag),
    "the longest of phases": numbers_of_whole(phase=640.0),
    "a batch that repeats a bit": numbers_of_whole(repeats=0.5),
    "a batch that was looked for in vain": numbers_of_whole(repeats=-3.0),
    "a held multiplier of 1e30": numbers_of_whole(held=1e30),
    "a held multiplier of 1e-30": numbers_of_whole(held=1e-30),
    "a trust radius of 1e9": numbers_of_whole(reach=1e9),
    "the least trust radius": numbers_of_whole(reach=0.5),
    "a damping of exact steps of 1e35": numbers_of_whole(exact_damping=1e35),
    "a damping of exact steps of 1e30": numbers_of_whole(exact_damping=1e30),
    "last moves of 1e200": of_every("last_update", lambda t: torch.full_like(t, 1e200)),
    "last moves backward": of_every("last_update", lambda t: 1 - t),
    "a last check at parameters of zero": of_every("checkpoint", torch.zeros_like),
    "losses of 1e300 at the last check": numbers_of_whole(value=1e300, fallen=1e300, rate=1e300),
}


def load_exact(setting: Setting, way: str) -> Outcome:
    """An error leaves everything as it was, or the loss of the batch falls all the same."""
    training = Training(setting).steps(range(EXACT_BEFORE))
    checkpoint, before = training.checkpoint(), float(training.loss(1000).detach())
    expected = training.steps(range(EXACT_AFTER)).parameters
    again = Training(setting).resume(checkpoint)
    try:
        again.opt.load_state_dict(EXACT_STATES[way](copy.deepcopy(checkpoint["optimizer"])))
    except ValueError:
        if not torch.equal(again.steps(range(EXACT_AFTER)).parameters, expected):
            return Outcome(False, "the error left a part behind")
        raise
    after = float(again.steps(range(EXACT_AFTER)).loss(1000).detach())
    return Outcome(after < before, f"loss {before:.2g} -> {after:.2g}")


EXACT_BEFORE, EXACT_AFTER = 6, 12


class ComplexLayers(nn.Module):
    """Two complex layers and a complex scale, which may be those of a real model of the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 5), nn.Linear(5, CLASSES)
        self.phase = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.first(x)) * self.phase).abs()
        return outputs


class OfParts(nn.Module):
    """The same with parameters [..., 2] of the same names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, p in model.named_parameters():
            child, _, last = name.rpartition(".")
            if child and not hasattr(self, child):
                self.add_module(child, nn.Module())
            self.get_submodule(child).register_parameter(last, nn.Parameter(torch.view_as_real(p.detach()).clone()))

    def forward(self, x: Tensor) -> Tensor:
        to = torch.view_as_complex
        h = torch.tanh(F.linear(x, to(self.first.weight), to(self.first.bias)))
        return F.linear(h * to(self.phase), to(self.last.weight), to(self.last.bias)).abs()


def complex_model(dtype: torch.dtype = torch.complex128) -> nn.Module:
    torch.manual_seed(0)
    model = ComplexLayers().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.exp(1j * torch.rand(parameter.shape)))
    return model


class OfComplex(Training):
    """A training of a complex model with one batch."""

    def __init__(self, model: nn.Module | None = None, dtype: str = "complex128", **given: Any) -> None:
        setting = Setting(rule="eigen_moments", dtype=dtype, inputs=True, repeated=True, **given)
        super().__init__(setting, complex_model(getattr(torch, dtype)) if model is None else model)

    @property
    def parameters(self) -> Tensor:
        parts = [p.detach() for p in self.net.parameters()]
        return torch.cat([torch.view_as_real(p).flatten() if p.is_complex() else p.flatten() for p in parts]).double()


class RealOfComplex(OfComplex):
    """The same with real parameters of the same names, which keep their dtype."""

    def __init__(self) -> None:
        super().__init__(OfParts(complex_model()), dtype="float64")

    def batch(self, number: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
        x, y = super().batch(number, size)
        return x.to(torch.complex128), y


def in_parts(state: Any) -> Any:
    return each_tensor(lambda t: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t)(state)


def joined(tensor: Tensor) -> Tensor:
    parts = tensor.dim() > 0 and tensor.shape[-1] == 2 and tensor.is_floating_point()
    return torch.view_as_complex(tensor.contiguous()) if parts else tensor


# How the checkpoint of a complex training is changed, and the training that loads it.
COMPLEX_STATES: dict[str, tuple[Callable[[Any], Any], Callable[[], Training]]] = {
    "as it is": (lambda c: c, OfComplex),
    "with weights that are conjugated twice": (
        each_tensor(lambda t: t.conj().resolve_conj().conj() if t.is_complex() else t),
        OfComplex,
    ),
    "with weights in their parts": (lambda c: {**c, "model": in_parts(c["model"])}, OfComplex),
    "with states as complex numbers": (lambda c: {**c, "optimizer": each_tensor(joined)(c["optimizer"])}, OfComplex),
    "with states without imaginary parts": (
        lambda c: {
            **c,
            "optimizer": only(lambda t: t[..., 0], lambda t: t.dim() > 1 and t.shape[-1] == 2)(c["optimizer"]),
        },
        OfComplex,
    ),
    "into the same model with real parts": (lambda c: {**c, "model": in_parts(c["model"])}, RealOfComplex),
    "into complex64": (lambda c: c, lambda: OfComplex(dtype="complex64")),
    "in place": (lambda c: c, lambda: OfComplex(in_place=True)),
}


def load_complex(way: str) -> Outcome:
    change, make = COMPLEX_STATES[way]
    training = OfComplex().steps(range(EXACT_BEFORE))
    checkpoint = training.checkpoint()
    expected = training.steps(range(2)).parameters
    again = make()
    try:
        again.resume(change(copy.deepcopy(checkpoint)))
    except RuntimeError as error:
        if "Error(s) in loading state_dict" in str(error):
            raise Torchs(str(error)) from error
        raise
    if way == "into complex64":  # exact steps make much of rounding
        before, after = float(again.loss(1000).detach()), float(again.steps(range(2)).loss(1000).detach())
        return Outcome(after < before, f"loss {before:.2g} -> {after:.2g}")
    distance = float((again.steps(range(2)).parameters - expected).abs().max())
    return Outcome(distance == 0.0, f"parameters differ by {distance:.2g}")


def first_of_imaginary(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 0.1j
    return model


def conjugated(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.conj()
    return model


def conjugated_twice(model: nn.Module) -> nn.Module:
    """The same numbers, as a view that conjugates."""
    for parameter in model.parameters():
        parameter.data = parameter.data.conj().resolve_conj().conj()
    return model


# Nets that read the spectrum of a complex model: each with whether the numbers are its own.
COMPLEX_NETS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "the same": (lambda model: model, True),
    "another imaginary part": (first_of_imaginary, False),
    "conjugated weights": (conjugated, False),
    "weights that are conjugated twice": (conjugated_twice, True),
    "real parts of the same names": (OfParts, False),
    "complex64": (lambda model: model.to(torch.complex64), False),
}


def load_complex_spectrum(net: str) -> Outcome:
    """A spectrum, queries and a fit of a complex model, read by another net."""
    change, is_same = COMPLEX_NETS[net]
    x = torch.randn(4, INPUTS, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0])
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    first = kfac_fx.compile(complex_model(), (x,), loss="categorical")
    model = change(complex_model())
    other_x = x.to(torch.complex64) if net == "complex64" else x
    other = kfac_fx.compile(model, (other_x,), loss="categorical")
    with folders.temporary() as base:
        spectrum = kfac_fx.fit_spectrum(first, batches, case="row", folder=base / "fit", damping=0.1)
        kfac_fx.save_spectrum(spectrum, base / "saved")
        queries = spectrum.precondition((x[:1], y[:1]))
        kfac_fx.save_queries(queries, base / "queries")
        expected = folders.tensors_of(spectrum)
        for folder in ("saved", "fit"):
            tensors = folders.tensors_of(kfac_fx.load_spectrum(other, base / folder, damping=0.1))
            if not all(map(torch.equal, tensors, expected)):
                return Outcome(False, f"other numbers than were {folder}")
        loaded = kfac_fx.load_queries(other, base / "queries")
        same = torch.equal(loaded.scores_of_all(batches), queries.scores_of_all(batches))
    return Outcome(is_same and same, "as written" if same else "other scores")


class Turns(nn.Module):
    """An attribute says which of two branches runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.active = nn.Linear(INPUTS, 5), nn.Linear(5, CLASSES), "a"
        self.branches = nn.ModuleDict({name: nn.Linear(5, 5) for name in "ab"})

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.branches[self.active](torch.tanh(self.stem(x)))))
        return outputs


class OfTurns(Training):
    """Steps take the branches of `turns` in turn; all of them have one batch."""

    def __init__(self, turns: str = "ab", **options: Any) -> None:
        self.turns = turns
        super().__init__(Setting(rule="eigen_moments", inputs=True, repeated=True), Turns(), **options)

    def step(self, number: int) -> None:
        self.model.active = self.turns[number % len(self.turns)]
        super().step(number)

    def seen(self, paths: str) -> OfTurns:
        """A call for every path."""
        for path in paths:
            self.model.active = path
            self.net.recorder((self.batch(0)[0],), {})
        return self


# The turns of a training, those of the one that goes on, and the paths that it sees before it loads the state.
TURNS: dict[str, tuple[str, str, str]] = {
    "of two paths, seen": ("ab", "ab", "ab"),
    "of two paths, of which one was seen": ("ab", "ab", "a"),
    "of two paths, seen the other way round": ("ab", "ab", "ba"),
    "of one path, where two were seen": ("a", "a", "ab"),
    "of one path, which is then another one": ("a", "b", "a"),
    "of two paths that take turns by threes": ("aaabbb", "aaabbb", "ab"),
}


def load_turns(way: str) -> Outcome:
    """The training of a model of several paths goes on as it would have."""
    turns, later, seen = TURNS[way]
    training = OfTurns(turns).steps(range(EXACT_BEFORE))
    checkpoint = training.checkpoint()
    training.turns = later
    numbers = range(EXACT_BEFORE, EXACT_BEFORE + EXACT_AFTER)
    expected = training.steps(numbers).parameters
    again = OfTurns(later).seen(seen).resume(checkpoint)
    distance = float((again.steps(numbers).parameters - expected).abs().max())
    return Outcome(distance < 1e-6, f"parameters differ by {distance:.2g}")  # stacks of blocks round otherwise


class OfBoth:
    """The batches of a fit, each on a path of its own."""

    def __init__(self, training: OfTurns) -> None:
        self.training = training

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for path in "ab":
            self.training.model.active = path
            yield self.training.batch(0)


def spectrum_of_turns(seen: str, later: str) -> Outcome:
    """The spectrum of a model that has seen some paths, read by one that has seen others."""
    first, other = OfTurns().seen(seen), OfTurns().seen(later)
    with folders.temporary() as base:
        spectrum = kfac_fx.fit_spectrum(first.net, OfBoth(first), case="row", folder=base / "fit", damping=0.1)
        kfac_fx.save_spectrum(spectrum, base / "saved")
        for folder in ("fit", "saved"):
            loaded = kfac_fx.load_spectrum(other.net, base / folder, damping=0.1)
            if not all(map(torch.equal, folders.tensors_of(loaded), folders.tensors_of(spectrum))):
                return Outcome(False, f"other numbers than were {folder}")
        return Outcome(True, "as written")


def one_batch(training: processes.OfTwo) -> None:
    """Every step has the cases of the first, so that checks make exact steps."""
    data = training.data
    training.data = lambda step: data(0)  # type: ignore[method-assign]


def one_batch_in_second(training: processes.OfTwo) -> None:
    if training.rank:
        one_batch(training)


def small_lr_in_second(training: processes.OfTwo) -> None:
    one_batch(training)
    if training.rank:
        for group in training.opt.param_groups:
            group["lr"] = 0.01


def other_phase(training: processes.OfTwo) -> None:
    state = copy.deepcopy(training.opt.state_dict())
    training.opt.load_state_dict(numbers_of_whole(bounded=1.0, repeats=1.0)(state))


EXACT_SCENARIOS: dict[str, processes.Scenario] = {
    "one batch": processes.Scenario(begin=one_batch),
    "one batch of uneven parts": processes.Scenario(begin=one_batch, ends={0: 9, 1: 9, 2: 9, 3: 9}),
    "one batch, whose parts change": processes.Scenario(begin=one_batch, ends={1: 9, 2: 2, 3: 11}),
    "no exact steps in the second": processes.Scenario(
        begin=one_batch, options=processes.only_second(exact_steps=False), alike=False
    ),
    "one batch in the second alone": processes.Scenario(begin=one_batch_in_second, alike=False),
    "an lr without exact steps in the second": processes.Scenario(begin=small_lr_in_second, alike=False),
    "a phase of bounded steps in the second": processes.Scenario(
        begin=one_batch, before=processes.at(3, other_phase), alike=False
    ),
    "an infinite gradient in an exact step of the second": processes.Scenario(
        begin=one_batch, before=processes.at(3, infinite_gradient), alike=False
    ),
}


def of_exact_states() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    rng = random.Random(SEED + 4)
    for way in EXACT_STATES:
        setting = repeating(rng, closure=False, frozen=False)
        yield f"one batch, with {way}: {setting}", lambda s=setting, w=way: load_exact(s, w)
    for way in COMPLEX_STATES:
        yield f"of a complex model, {way}", lambda w=way: load_complex(w)
    for way in TURNS:
        yield f"of a model {way}", lambda w=way: load_turns(w)


def of_odd_spectra() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for net in COMPLEX_NETS:
        yield f"a spectrum of a complex model, by a net: {net}", lambda n=net: load_complex_spectrum(n)
    for seen, later in (("ab", "ab"), ("ab", "a"), ("a", "ab"), ("ab", "ba")):
        yield (
            f"a spectrum of a net that has seen the paths {seen}, by one that has seen {later}",
            lambda s=seen, n=later: spectrum_of_turns(s, n),
        )


def of_exact_processes() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    rng = random.Random(SEED + 5)
    for number, name in enumerate(EXACT_SCENARIOS):
        model = processes.MODELS[number % len(processes.MODELS)]
        setting = repeating(rng, model=model, closure=False, frozen=False)
        wrapped = number % 2 == 0
        words = "DistributedDataParallel" if wrapped else "averages by hand"
        yield (
            f"{name}: {words}, {setting}",
            lambda s=setting, n=name, w=wrapped: processes.run(s, EXACT_SCENARIOS[n], w),
        )


# --- all --------------------------------------------------------------------------------------------------------------

KINDS: dict[str, Sequence[Callable[[], Iterator[tuple[str, Callable[[], Outcome]]]]]] = {
    "given-up batches": (of_given_up_batches,),
    "states": (of_states, of_exact_states),
    "folders": (of_folders, of_odd_spectra),
    "names and shapes": (of_names,),
    "numbers": (of_numbers,),
    "processes": (of_processes, of_exact_processes),
}


def inputs(kind: str) -> Iterator[Input]:
    """Those of a kind."""
    for part in KINDS[kind]:
        for name, run in part():
            yield Input(kind, name, run)
