"""States of odd trainings that are corrupted, carried in unusual ways, or loaded into another training.

A training that goes on from a state is compared with the one that was not interrupted.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.hostile.corrupted import CHOICES, WAYS, corrupted, is_legal, walk
from benchmarks.hostile.grading import Input, Outcome
from benchmarks.hostile.settings import Setting, Training, drawn, many

BEFORE, AFTER = 3, 2  # steps
KIND = "states"
Checkpoint = dict[str, Any]


def whole(setting: Setting) -> tuple[Checkpoint, Tensor]:
    """(the checkpoint of a training, the parameters that it has some steps later)."""
    training = Training(setting).steps(range(BEFORE))
    checkpoint = training.checkpoint()
    return checkpoint, training.steps(range(BEFORE, BEFORE + AFTER)).parameters


def compared(training: Training, expected: Tensor, tolerance: float = 0.0) -> Outcome:
    parameters = training.steps(range(BEFORE, BEFORE + AFTER)).parameters
    distance = float((parameters - expected).abs().max())
    return Outcome(distance <= tolerance, f"parameters differ by {distance:.2g}")


# --- corrupted --------------------------------------------------------------------------------------------------------


def load_corrupted(setting: Setting, way: str, where: float) -> Outcome:
    """The training goes on as it should, or an error leaves everything as it was.

    where: the place of the entry among those that can be corrupted in this way, as a part of their number.
    """
    checkpoint, expected = whole(setting)
    state = checkpoint["optimizer"]
    entries = [(path, value) for path, old in walk(state) if (value := WAYS[way](old)) is not None]
    path, value = entries[int(where * len(entries))]
    training = Training(setting).resume(checkpoint)
    text = f"{path[-1]} of {path[1]}"
    try:
        training.opt.load_state_dict(corrupted(state, {path: value}))
    except ValueError:
        outcome = compared(training, expected)
        if not outcome.right:
            return Outcome(False, f"{text}: the error left a part behind, and {outcome.text}")
        raise
    outcome = compared(training, expected)
    return Outcome(outcome.right or (is_legal(way, path) and path[-1] not in CHOICES), f"{text}: {outcome.text}")


# --- into another training --------------------------------------------------------------------------------------------

# Changes of a setting behind which a training should go on as it would have, or be told.
CHANGES: dict[str, Callable[[Setting], Setting]] = {
    "in place or not": lambda s: replace(s, in_place=not s.in_place),
    "with example inputs or without": lambda s: replace(s, inputs=not s.inputs),
    "with a closure or without": lambda s: replace(s, closure=not s.closure and not s.scaler),
    "without a GradScaler": lambda s: replace(s, scaler=False),
    "with parameters by name": lambda s: replace(s, groups="by name"),
    "with parameters in another order": lambda s: replace(s, groups="another order" if s.groups == "one" else "one"),
    "with two groups, or one": lambda s: replace(s, groups="one" if s.groups == "two groups" else "two groups"),
    "with another weight decay": lambda s: replace(s, weight_decay=0.3),
    "with another invert_every": lambda s: replace(s, every=2),
    "with another burn-in": lambda s: replace(s, burn_in=5),
    "with another rule": lambda s: replace(s, rule="adam" if s.rule == "regular" else "regular"),
    "with another mode": lambda s: replace(s, mode="gradients"),
    "with a parameter frozen, or not": lambda s: replace(s, frozen=not s.frozen),
    "in float32": lambda s: replace(s, dtype="float32"),
    "in bfloat16": lambda s: replace(s, dtype="bfloat16"),
    "of another model": lambda s: replace(s, model="two layers" if s.model == "dropout" else "dropout"),
    "with norm_constraint": lambda s: replace(s, rule="regular, norm_constraint"),
    "checked at every step": lambda s: replace(s, rule="eigen_moments, checked"),
}


def load_elsewhere(setting: Setting, change: str) -> Outcome:
    checkpoint, expected = whole(setting)
    other = CHANGES[change](setting)
    training = Training(other)
    if other.model == setting.model:
        training.net.load_state_dict(checkpoint["model"])
    training.opt.load_state_dict(checkpoint["optimizer"])
    if training.scaler is not None and checkpoint["scaler"] is not None:
        training.scaler.load_state_dict(checkpoint["scaler"])
    tolerance = 0.0 if other.dtype == setting.dtype and other.inputs == setting.inputs else 1e-2
    return compared(training, expected, tolerance)


# --- carried ----------------------------------------------------------------------------------------------------------


def through_file(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **options)


def each_tensor(change: Callable[[Tensor], Any]) -> Callable[[Checkpoint], Checkpoint]:
    def carry(state: Any) -> Any:
        if isinstance(state, Tensor):
            return change(state)
        if isinstance(state, dict):
            return {key: carry(value) for key, value in state.items()}
        return [carry(entry) for entry in state] if isinstance(state, list) else state

    return carry


def strided(tensor: Tensor) -> Tensor:
    """Every second element of a larger tensor."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def as_parameter(tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


def named(optimizer: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The state of an optimizer with other keys of parameters."""
    groups = [{**group, "params": [change(key) for key in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {change(key): value for key, value in optimizer["state"].items()}, "param_groups": groups}


def of_optimizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Checkpoint], Checkpoint]:
    return lambda checkpoint: {**checkpoint, "optimizer": change(checkpoint["optimizer"])}


# Carriers from a checkpoint to the same one.
CARRIED: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "a file": lambda c: through_file(c, weights_only=True),
    "a file that is mapped": lambda c: through_file(c, weights_only=False),
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "tensors that are views": each_tensor(strided),
    "tensors that need gradients": each_tensor(lambda t: t.clone().requires_grad_(t.is_floating_point())),
    "parameters": each_tensor(as_parameter),
    "tensors of another storage each": each_tensor(Tensor.clone),
    "tensors that were turned": each_tensor(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t),
    "tensors of inference mode": lambda c: torch.inference_mode()(each_tensor(Tensor.clone))(c),
    "arrays": each_tensor(lambda t: t if t.dtype is torch.bfloat16 else torch.from_numpy(t.numpy().copy())),
    "shared memory": each_tensor(lambda t: t.clone().share_memory_()),
    "an ordered dictionary": of_optimizer(lambda s: OrderedDict(s)),
    "groups in a tuple": of_optimizer(lambda s: {**s, "param_groups": tuple(s["param_groups"])}),
    "keys of text": of_optimizer(lambda s: named(s, str)),
    "keys of letters": of_optimizer(lambda s: named(s, lambda key: f"layer.{key}")),
    "further options of a group": of_optimizer(
        lambda s: {**s, "param_groups": [{**group, "note": "mine"} for group in s["param_groups"]]}
    ),
    "entries in another order": of_optimizer(lambda s: {**s, "state": dict(reversed(s["state"].items()))}),
    "float64": each_tensor(lambda t: t.double() if t.is_floating_point() else t),
}


def carry(setting: Setting, way: str) -> Outcome:
    checkpoint, expected = whole(setting)
    return compared(Training(setting).resume(CARRIED[way](checkpoint)), expected)


# --- at unusual moments -----------------------------------------------------------------------------------------------


def loaded_twice(training: Training, checkpoint: Checkpoint) -> None:
    training.resume(checkpoint).resume(checkpoint)


def after_other_steps(training: Training, checkpoint: Checkpoint) -> None:
    training.steps(range(50, 54)).resume(checkpoint)


def behind_a_forward(training: Training, checkpoint: Checkpoint) -> None:
    training.loss(50, 4.0)
    training.resume(checkpoint)


def behind_a_backward(training: Training, checkpoint: Checkpoint) -> None:
    training.backward(training.loss(50, 4.0))
    training.resume(checkpoint)
    training.opt.zero_grad()


def behind_a_nan(training: Training, checkpoint: Checkpoint) -> None:
    training.steps(range(2))
    for parameter in training.net.parameters():
        parameter.data.fill_(torch.nan)
    training.resume(checkpoint)


def behind_an_error(training: Training, checkpoint: Checkpoint) -> None:
    """A state that is refused, and then the right one."""
    broken = copy.deepcopy(checkpoint["optimizer"])
    broken["state"][0]["kfac/counter"] = torch.tensor(-1)
    try:
        training.opt.load_state_dict(broken)
    except ValueError:
        training.resume(checkpoint)


def in_evaluation(training: Training, checkpoint: Checkpoint) -> None:
    training.called.eval()
    training.resume(checkpoint)
    training.called.train()


def its_own(training: Training, checkpoint: Checkpoint) -> None:
    training.resume(checkpoint)
    training.opt.load_state_dict(training.opt.state_dict())


def optimizer_first(training: Training, checkpoint: Checkpoint) -> None:
    training.opt.load_state_dict(checkpoint["optimizer"])
    training.resume(checkpoint)


def by_torch_distributed(training: Training, checkpoint: Checkpoint) -> None:
    training.resume(checkpoint)
    model, optimizer = get_state_dict(training.model, training.opt)
    set_state_dict(training.model, training.opt, model_state_dict=model, optim_state_dict=optimizer)


def with_a_scheduler(training: Training, checkpoint: Checkpoint) -> None:
    torch.optim.lr_scheduler.LambdaLR(training.opt, lambda step: 1.0)
    training.resume(checkpoint)


def into_the_model(training: Training, checkpoint: Checkpoint) -> None:
    """The state of the net into the model."""
    training.model.load_state_dict(checkpoint["model"])
    training.opt.load_state_dict(checkpoint["optimizer"])
    if training.scaler is not None:
        training.scaler.load_state_dict(checkpoint["scaler"])


def assigned(training: Training, checkpoint: Checkpoint) -> None:
    """With assign=True the parameters are other objects, which no optimizer knows."""
    training.net.load_state_dict(copy.deepcopy(checkpoint["model"]), assign=True)
    training.opt.load_state_dict(checkpoint["optimizer"])


MOMENTS: dict[str, Callable[[Training, Checkpoint], None]] = {
    "twice": loaded_twice,
    "after other steps": after_other_steps,
    "behind a forward": behind_a_forward,
    "behind a backward": behind_a_backward,
    "behind parameters of NaN": behind_a_nan,
    "behind a state that is refused": behind_an_error,
    "in evaluation mode": in_evaluation,
    "into itself": its_own,
    "before that of the model": optimizer_first,
    "by torch.distributed": by_torch_distributed,
    "with a scheduler": with_a_scheduler,
    "of the net into the model": into_the_model,
    "with assign": assigned,
}


def load_at(setting: Setting, moment: str) -> Outcome:
    checkpoint, expected = whole(setting)
    training = Training(setting)
    MOMENTS[moment](training, checkpoint)
    return compared(training, expected)


def before_any_step(setting: Setting) -> Outcome:
    """A state of the very beginning."""
    expected = Training(setting).steps(range(BEFORE)).parameters
    begun = Training(setting)
    training = Training(setting).steps(range(20, 22)).resume(begun.checkpoint())
    distance = float((training.steps(range(BEFORE)).parameters - expected).abs().max())
    return Outcome(distance == 0.0, f"parameters differ by {distance:.2g}")


# --- the inputs -------------------------------------------------------------------------------------------------------


def inputs() -> Iterator[Input]:
    rng = random.Random(41)
    for setting in many(42, 10):
        for way in WAYS:
            for where in (rng.random(), rng.random()):
                yield Input(
                    KIND, f"an entry at {where:.3f}, {way}: {setting}",
                    lambda s=setting, w=way, p=where: load_corrupted(s, w, p),
                )  # fmt: skip
    for table, does, words in (
        (CHANGES, load_elsewhere, "loaded"),
        (CARRIED, carry, "carried by"),
        (MOMENTS, load_at, "loaded"),
    ):
        of_kind: Mapping[str, Any] = table
        for name in [*of_kind, *of_kind]:
            setting = drawn(rng)
            yield Input(KIND, f"{words} {name}: {setting}", lambda d=does, s=setting, n=name: d(s, n))
    for setting in many(43, 8):
        yield Input(KIND, f"of the very beginning: {setting}", lambda s=setting: before_any_step(s))
