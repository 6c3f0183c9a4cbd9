"""The checkpoint of a KFAC: all that the next step depends on, as tensors by parameter.

That is the form of every torch optimizer. Tools that save optimizers know `state` and `param_groups` alone, so there is
nothing else:

    state[parameter]  "velocity", or "exp_avg", ...       of the rule that moves the parameter
                      "kfac/name"                         a checksum of the parameter's name, next to these
                      "0.weight,0.bias/A/moment", ...     of the Fisher block, on the first of its parameters
                      "kfac/damping", "kfac/counter", ... of the whole optimizer, on the first of all parameters

All tensors of a parameter are on its device, random states included. A step reads entries with a "/" from the estimator
and from `StepState`, where they live.

`kfac_fx.optim.checkpoint_checks` makes a `Checkpoint` of what a user loads.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.fisher.block import key_text
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.sources import MODES
from kfac_fx.optim.checks import Place, StepSize
from kfac_fx.optim.first_order import new_adam_state
from kfac_fx.optim.groups import Group, rule_state
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rule import StepIntervals
from kfac_fx.optim.rules import RULES
from kfac_fx.optim.state import SCALARS, StepState
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.tracing.random_streams import RandomState

WHOLE = "kfac/"  # begins the names of the tensors that belong to no block
LATE = f"{WHOLE}late"  # whether there is a late state of the random streams, and those states
STEP_SIZE = tuple(scalar.name for scalar in fields(StepSize))  # of the types with checks
NAME = f"{WHOLE}name"  # on every parameter that has a state of its rule
OUTDATED = f"{WHOLE}outdated"  # in a state that a user kept without a copy, while the optimizer went on
OPTIONS = f"{WHOLE}options"  # a checksum of the names of the options, and the numbers that stand for them

# --- the checkpoint, written ------------------------------------------------------------------------------------------


def choices(state: StepState) -> dict[str, tuple[Any, int, Sequence[Any]]]:
    """The choices that a state depends on: each with its number, and with what the numbers stand for."""
    rule = state.options.rule
    known: dict[str, tuple[Any, Sequence[Any]]] = {
        "momentum_type": (rule.name, tuple(RULES)),
        "estimation_mode": (state.estimator.estimation_mode, MODES),
        "adapt_damping": (rule.damping_rule is not None, (False, True)),
    }
    # The rule of a user has no place among the names: a number that no other name has.
    return {
        name: (here, kinds.index(here) if here in kinds else checksum(str(here)), kinds)
        for name, (here, kinds) in known.items()
    }


def publish(state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Tensors]) -> None:
    """Put everything into the optimizer's `states` by parameter. Tensors of blocks share memory with the estimator's.

    Numbers and random states are copies, as of now. Parameters that were never moved get a new state.
    """
    parameters, division, names = parameters_of(groups), state.vectors.division, state.vectors.names
    by_name = {names[parameter]: parameter for parameter, _ in parameters}
    for parameter, first_order in parameters:
        kept = division.keeps(names[parameter])
        of_rule = rule_state(states.get(parameter, {})) if kept else {}
        if parameter.requires_grad and kept and not of_rule:
            of_rule = (new_adam_state if first_order else state.options.rule.new_state)(real_numbers(parameter))
        # An empty entry for a parameter of another owner: torch.distributed.checkpoint misses those without any.
        if of_rule or parameter in states or not kept:
            states[parameter] = of_rule
    put_names(state, states)
    first = parameters[0][0]
    for key, block in state.estimator.blocks.items():
        owner = next((by_name[name] for name in block.registration.owners if name in by_name), first)
        of_block = {f"{key_text(key)}/{name}": tensor for name, tensor in block.state().items()}
        states.setdefault(owner, {}).update(on(owner, of_block))
    states.setdefault(first, {}).update(on(first, whole(state)))


def put_names(state: StepState, states: MutableMapping[Any, Tensors]) -> None:
    """The checksums of names, of parameters on one device in one tensor."""
    with_state = [parameter for parameter, of_rule in states.items() if of_rule]
    for device in {parameter.device for parameter in with_state}:
        members = [parameter for parameter in with_state if parameter.device == device]
        numbers = torch.tensor([checksum(state.vectors.names[member]) for member in members])
        for member, number in zip(members, on(members[0], {NAME: numbers})[NAME].unbind(), strict=True):
            states[member][NAME] = number


def checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def parameters_of(groups: Sequence[Group]) -> list[tuple[nn.Parameter, bool]]:
    """Every parameter, and whether the first-order rule moves it."""
    return [(parameter, group["first_order"]) for group in groups for parameter in group["params"]]


def on(parameter: Tensor, tensors: Tensors) -> Tensors:
    return {name: tensor.to(parameter.device) for name, tensor in tensors.items()}


def option_numbers(options: KFACOptions) -> Tensor:
    """The options that a state tells, after a checksum of their names; NaN for None, and checksums of texts. Float32
    holds 24 bits of these."""
    numbers = [float(checksum(",".join(options.told)) >> 8)]
    for value in options.told.values():
        numbers.append(torch.nan if value is None else checksum(value) >> 8 if isinstance(value, str) else value)
    return torch.tensor(numbers, dtype=torch.float32)


def whole(state: StepState) -> Tensors:
    """The tensors that belong to no block."""
    schedule, late, rule = state.schedule, state.late, state.options.rule
    values = {"damping": state.damping, **{name: state.scalars[name] for name in (*SCALARS, *rule.scalars)}}
    values |= {"skipped": state.skipped}
    if rule.checked:
        values |= {name: getattr(state.checks.size, name) for name in STEP_SIZE}
        values |= {"intervals": torch.tensor(schedule.intervals), "overhead": torch.tensor(schedule.overhead)}
        values |= {"checks": torch.tensor([schedule.last_check, schedule.intervals_apart])}
    values |= {"counter": torch.tensor(schedule.counter), "burned_in": torch.tensor(schedule.burned_in)}
    first = [state.first_recorded.get(key, 0) for key in sorted(state.estimator.blocks)]
    values |= {"first_recorded": torch.tensor(first)}
    values |= {name: torch.tensor(number) for name, (_, number, _) in choices(state).items()}
    values |= {OPTIONS.removeprefix(WHOLE): option_numbers(state.options)}
    values |= {"estimator.damping": state.estimator.damping, "generator": state.forwards.generator.get_state()}
    tensors = {f"{WHOLE}{name}": value for name, value in values.items()}
    if rule.damping_rule is not None and not rule.damping_rule.immediately:
        streams = RandomState.now(state.forwards.devices) if late is None else late
        tensors |= {LATE: torch.tensor(late is not None), f"{LATE}/cpu": streams.cpu}
        tensors |= {f"{LATE}/{device}": stream for device, stream in streams.others.items()}
    return tensors


# --- the checkpoint, loaded -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A state_dict without faults, sorted by what its tensors belong to."""

    rules: Mapping[
        int, Tensors
    ]  # by the place of the parameter; copies on its device, of the dtype that they will have
    blocks: Tensors
    whole: Tensors  # without late states of random streams
    late: RandomState | None
    bases_as: str | None  # `BlockDiagonalFisher.bases_as` of the blocks


def with_empty_groups(groups: Sequence[Group], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The groups of a state, with those of `groups` that parameters have left: states do not have these."""
    full = [group for group in saved if not is_left(group)]
    for place, group in enumerate(groups):
        if is_left(group):
            full.insert(place, {**group, "params": []})
    return full


def is_left(group: Mapping[str, Any]) -> bool:
    """Whether all parameters of a group of the first-order rule have blocks now."""
    return not group["params"] and group.get("first_order", True)


def restore(
    state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Any], checkpoint: Checkpoint
) -> None:
    """Copy a checkpoint into `state` and into the optimizer's `states` by parameter.

    Forwards since the last step are forgotten.
    """
    parameters = parameters_of(groups)
    states.update({parameters[place][0]: dict(values) for place, values in checkpoint.rules.items()})
    values = {name.removeprefix(WHOLE): value for name, value in checkpoint.whole.items()}
    rule, schedule = state.options.rule, state.schedule
    if not state.forwards.mode_is_known:
        state.forwards.decided, state.estimator.estimation_mode = True, MODES[int(values["estimation_mode"])]
    state.damping.copy_(values["damping"])
    state.skipped.copy_(values["skipped"])
    for name in (*SCALARS, *rule.scalars):
        state.scalars[name].copy_(values[name])
    schedule.counter, schedule.burned_in = int(values["counter"]), int(values["burned_in"])
    if rule.checked:
        for name in STEP_SIZE:
            getattr(state.checks.size, name).copy_(values[name])
        state.checks.place = Place()  # the next step begins elsewhere
        schedule.intervals = schedule.with_given(StepIntervals(*values["intervals"].tolist()))
        schedule.overhead = float(values["overhead"])
        state.estimator.cov_ema_decay = schedule.decay
        step, apart = values["checks"].tolist()
        schedule.checked(step, apart, state.checks.size.calm)
    first = zip(sorted(state.estimator.blocks), values["first_recorded"].tolist(), strict=True)
    state.first_recorded = {key: step for key, step in first if step}
    if checkpoint.bases_as != state.estimator.bases_as:
        state.estimator.keep_bases_as(checkpoint.bases_as)
    state.estimator.load_checked({"damping": values["estimator.damping"], **checkpoint.blocks})
    if "generator" in values:
        state.forwards.generator.set_state(values["generator"].cpu())
    state.late = checkpoint.late
    state.vectors.grouped = None
    state.memory.reset()
    state.undone.zero_()
    state.standstill.forget(int(values["skipped"]))
    state.forwards.forget()
