"""The checkpoint of a KFAC: all that the next step depends on, as tensors by parameter.

That is the form of every torch optimizer. Tools that save optimizers know `state` and `param_groups` alone, so there is
nothing else:

    state[parameter]  "velocity", or "exp_avg", ...       of the rule that moves the parameter
                      "0.weight,0.bias/A/moment", ...     of the Fisher block, on the first of its parameters
                      "kfac/damping", "kfac/counter", ... of the whole optimizer, on the first of all parameters

All tensors of a parameter are on its device, random states included. A step reads entries with a "/" from the estimator
and from `StepState`, where they live.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.fisher.block import key_text
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.sources import MODES
from kfac_fx.optim.checks import StepSize
from kfac_fx.optim.first_order import new_adam_state
from kfac_fx.optim.groups import OF_GROUPS, Group, rule_state
from kfac_fx.optim.rule import Rule, StepIntervals
from kfac_fx.optim.rules import RULES
from kfac_fx.optim.state import SCALARS, StepState
from kfac_fx.passes.errors import table
from kfac_fx.passes.tracing.random_streams import RandomState

WHOLE = "kfac/"  # begins the names of the tensors that belong to no block
LATE = f"{WHOLE}late"  # whether there is a late state of the random streams, and those states
STEP_SIZE = tuple(scalar.name for scalar in fields(StepSize))  # of the types with checks
NO_LONGER = ("qmodel_learning_rate", "qmodel_momentum")  # in older states of rules that have no such scalars
SINCE = ("multiplier", "peak_lr", "last_update")  # in no older states: a training goes on with the first values

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
        name: (here, kinds.index(here) if here in kinds else zlib.crc32(str(here).encode()), kinds)
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
            of_rule = (new_adam_state if first_order else state.options.rule.new_state)(parameter)
        # An empty entry for a parameter of another owner: torch.distributed.checkpoint misses those without any.
        if of_rule or parameter in states or not kept:
            states[parameter] = of_rule
    first = parameters[0][0]
    for key, block in state.estimator.blocks.items():
        owner = next((by_name[name] for name in block.registration.owners if name in by_name), first)
        of_block = {f"{key_text(key)}/{name}": tensor for name, tensor in block.state().items()}
        states.setdefault(owner, {}).update(on(owner, of_block))
    states.setdefault(first, {}).update(on(first, whole(state)))


def parameters_of(groups: Sequence[Group]) -> list[tuple[nn.Parameter, bool]]:
    """Every parameter, and whether the first-order rule moves it."""
    return [(parameter, group["first_order"]) for group in groups for parameter in group["params"]]


def on(parameter: Tensor, tensors: Tensors) -> Tensors:
    return {name: tensor.to(parameter.device) for name, tensor in tensors.items()}


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
    values |= {"estimator.damping": state.estimator.damping, "generator": state.forwards.generator.get_state()}
    tensors = {f"{WHOLE}{name}": value for name, value in values.items()}
    if rule.damping_rule is not None and not rule.damping_rule.immediately:
        streams = RandomState.now(state.forwards.devices) if late is None else late
        tensors |= {LATE: torch.tensor(late is not None), f"{LATE}/cpu": streams.cpu}
        tensors |= {f"{LATE}/{device}": stream for device, stream in streams.others.items()}
    return tensors


# --- the checkpoint, read ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A state_dict, sorted by what its tensors belong to."""

    rules: Mapping[int, Tensors]  # by the place of the parameter
    blocks: Tensors
    whole: Tensors  # without late states of random streams
    late: RandomState | None

    @staticmethod
    def of(state_dict: Mapping[str, Any], rule: Rule) -> Checkpoint:
        """rule: of the optimizer that loads."""
        no_longer = {f"{WHOLE}{name}" for name in NO_LONGER if name not in rule.scalars}
        # Tools name parameters, and torch numbers them; the order in the groups says which they are.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        places = {key: place for place, key in enumerate(keys)}
        by_place = {places.get(key, key): values for key, values in state_dict["state"].items()}
        rules = {place: rule_state(values) for place, values in by_place.items()}
        others = {k: v for values in by_place.values() for k, v in values.items() if "/" in k}
        streams = {name: others.pop(name).cpu() for name in list(others) if name.startswith(f"{LATE}/")}
        late = others.pop(LATE, None)
        if late is not None and late and f"{LATE}/cpu" not in streams:
            raise ValueError(f"the state has {LATE!r} and no '{LATE}/cpu', the random state that belongs to it")
        return Checkpoint(
            {place: values for place, values in rules.items() if values},
            {name: value for name, value in others.items() if not name.startswith(WHOLE)},
            {name: value for name, value in others.items() if name.startswith(WHOLE) and name not in no_longer},
            RandomState(streams.pop(f"{LATE}/cpu"), {name.removeprefix(f"{LATE}/"): s for name, s in streams.items()})
            if late is not None and late
            else None,
        )


def check_state(state: StepState, groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Checkpoint:
    """Raises ValueError for an optimizer's state_dict that does not fit, before anything of it is loaded."""
    if not is_state(state_dict):
        raise ValueError(
            "this is no state_dict of an optimizer, which has 'state' and 'param_groups': write opt.state_dict()"
        )
    refuse_other_entries(state_dict["state"])
    checkpoint = Checkpoint.of(state_dict, state.options.rule)
    if not checkpoint.whole:
        raise ValueError(f"the state has no {WHOLE!r} entries: it is that of another kind of optimizer")
    check_choices(state, checkpoint.whole)
    refuse_other_paths(state, checkpoint.blocks)
    scalars = state.options.rule.scalars
    added = {f"{WHOLE}{name}": torch.tensor(scalars[name]) for name in SINCE if name in scalars}
    older = {name for name in added if name not in checkpoint.whole}
    if f"{WHOLE}multiplier" in older and f"{WHOLE}norm" in checkpoint.whole:  # its first check is long ago
        added[f"{WHOLE}norm"] = torch.ones_like(checkpoint.whole[f"{WHOLE}norm"])
        checkpoint = replace(checkpoint, whole={**checkpoint.whole, **added})
    else:
        checkpoint = replace(checkpoint, whole={**added, **checkpoint.whole})
    needed = {name: tensor for name, tensor in whole(state).items() if not name.startswith(LATE)}
    if wrong := sorted(needed.keys() ^ checkpoint.whole.keys()):
        raise ValueError(f"the state is of another version of KFAC: {', '.join(wrong)} on one side only")
    state.estimator.check_state({"damping": checkpoint.whole[f"{WHOLE}estimator.damping"], **checkpoint.blocks})
    check_shapes(needed, checkpoint.whole)
    for n, both in enumerate(zip(groups, with_empty_groups(groups, state_dict["param_groups"]), strict=False)):
        here, there = (", ".join(key for key in OF_GROUPS if key in group) for group in both)
        if here != there:
            raise ValueError(
                f"parameter group {n} of the state has {there}, and this one's has {here}: it is that of another "
                "momentum_type"
            )
    parameters = parameters_of(groups)
    rows: list[tuple[str, str]] = []
    for place, values in checkpoint.rules.items():
        if place not in range(len(parameters)):
            rows.append((f"parameter {place}", f"there are {len(parameters)}"))
            continue
        parameter, first_order = parameters[place]
        new = new_adam_state if first_order else state.options.rule.new_state
        for name, first in new(parameter).items() if any(name not in values for name in SINCE) else ():
            if name in SINCE:
                values.setdefault(name, first)
        has, needs = shapes(values), shapes(new(torch.empty_like(parameter, device="meta")))
        if has != needs:
            rows.append((state.vectors.names[parameter], f"has {has}, and needs {needs}"))
    if rows:
        raise ValueError(f"the state does not fit {len(rows)} of {len(parameters)} parameters:\n{table(rows)}")
    return checkpoint


def refuse_other_paths(state: StepState, blocks: Tensors) -> None:
    """Raises ValueError if the state has blocks of parameters that no call has used so far, or lacks those of some that
    calls have used."""
    there = {name.rpartition("/ready")[0] for name in blocks if name.endswith("/ready")}
    here = {key_text(key): key for key in state.estimator.blocks}
    waiting = {
        name for name in state.net.captures.waiting if any(name in text.split(",") for text in there - here.keys())
    }
    if waiting:
        raise ValueError(
            "the state has blocks of parameters that no call of this net has used so far, and which get their blocks "
            f"when one does: {', '.join(sorted(waiting))}.\nCall net.recorder((x,), {{}}) once for every path that the "
            "training of before took, and load the state then."
        )
    if there and (unknown := [text for text in here if text not in there]) and there < here.keys():
        raise ValueError(
            f"the state lacks blocks that calls of this net have used: {'; '.join(unknown)}.\nThe training of before "
            "took fewer paths: load its state into a new optimizer of a net that took no others."
        )


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


def is_state(state_dict: Any) -> bool:
    """Whether this has the form of the state_dict of an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        return False
    states, groups = state_dict["state"], state_dict["param_groups"]
    named = isinstance(states, Mapping) and all(isinstance(values, Mapping) for values in states.values())
    return named and isinstance(groups, Sequence) and all("params" in group for group in groups)


def refuse_other_entries(states: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raises ValueError for entries of the state of parameters that cannot be copied."""
    rows = [
        (str(name), "is on the meta device" if isinstance(value, Tensor) else f"is a {type(value).__name__}")
        for values in states.values()
        for name, value in values.items()
        if not isinstance(value, Tensor) or value.is_meta
    ]
    if rows:
        raise ValueError(f"{len(rows)} entries of the state are no tensors with values:\n{table(rows)}")


def check_shapes(needed: Tensors, given: Tensors) -> None:
    """Raises ValueError for entries of the whole optimizer that cannot be loaded."""
    generator = f"{WHOLE}generator"
    rows = [
        (name, f"has {list(given[name].shape)}, and needs {list(tensor.shape)}")
        for name, tensor in needed.items()
        if given[name].shape != tensor.shape
    ]
    if rows:
        devices = "\nRandom states of one kind of device do not fit another: load on the kind that saved."
        raise ValueError(
            f"the state does not fit {len(rows)} entries of the optimizer:\n{table(rows)}"
            + devices * (generator in dict(rows))
        )


def check_choices(state: StepState, whole: Tensors) -> None:
    """Raises ValueError for the state of an optimizer of another kind, whose tensors mean something else."""
    rows: list[tuple[str, str]] = []
    for name, (here, number, kinds) in choices(state).items():
        entry = whole.get(f"{WHOLE}{name}")
        if entry is None:
            continue  # the names of all entries are compared next
        there = int(entry) if entry.numel() == 1 else -1
        is_open = name == "estimation_mode" and not state.forwards.mode_is_known and there in range(len(kinds))
        if there != number and not is_open:
            saved = repr(kinds[there]) if there in range(len(kinds)) else "another one"
            rows.append((name, f"{saved} in the state, {here!r} here"))
    if rows:
        raise ValueError(
            f"the state is that of a KFAC with other options:\n{table(rows)}\n"
            "Create the optimizer with the options of the state, or train without it."
        )


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def restore(
    state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Any], checkpoint: Checkpoint
) -> None:
    """Copy a checked checkpoint into `state` and into the optimizer's `states` by parameter.

    Forwards since the last step are forgotten.
    """
    parameters = parameters_of(groups)
    for place, values in checkpoint.rules.items():
        parameter, _ = parameters[place]
        if state.vectors.division.keeps(state.vectors.names[parameter]):
            states[parameter] = {key: value.to(parameter.device, copy=True) for key, value in values.items()}
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
        schedule.intervals = schedule.with_given(StepIntervals(*values["intervals"].tolist()))
        schedule.overhead = float(values["overhead"])
        state.estimator.cov_ema_decay = schedule.decay
        step, apart = values["checks"].tolist()
        schedule.checked(step, apart, state.checks.size.calm)
    first = zip(sorted(state.estimator.blocks), values["first_recorded"].tolist(), strict=True)
    state.first_recorded = {key: step for key, step in first if step}
    state.estimator.load_state_dict({"damping": values["estimator.damping"], **checkpoint.blocks})
    state.forwards.generator.set_state(values["generator"].cpu())
    state.late = checkpoint.late
    state.vectors.grouped = None
    state.memory.reset()
    state.forwards.forget()
