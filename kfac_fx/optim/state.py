"""KFAC's checkpoint: all that the next step depends on, as tensors by parameter, in the form of every torch optimizer.

Tools that save optimizers know `state` and `param_groups` alone, so there is nothing else:

    state[parameter]  "velocity", or "exp_avg", ...       of the rule that moves the parameter
                      "0.weight,0.bias/A/moment", ...     of the Fisher block, on the first of its parameters
                      "kfac/damping", "kfac/counter", ... of the whole optimizer, on the first of all parameters

All tensors of a parameter are on its device, random states included. A step reads entries with a "/" from the estimator
and from `StepState`, where they live.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.fisher.block import key_text
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.sources import MODES
from kfac_fx.optim.groups import OF_GROUPS, Group, rule_state
from kfac_fx.optim.options import MOMENTUM_TYPES, KFACOptions
from kfac_fx.optim.rules import new_adam_state
from kfac_fx.optim.schedule import StepIntervals
from kfac_fx.optim.step_checks import StepSize
from kfac_fx.optim.step_state import SCALARS, StepState
from kfac_fx.passes.errors import table
from kfac_fx.passes.tracing.random_streams import RandomState

WHOLE = "kfac/"  # begins the names of the tensors that belong to no block
LATE = f"{WHOLE}late"  # whether there is a late state of the random streams, and those states
STEP_SIZE = tuple(scalar.name for scalar in fields(StepSize))  # of the types with checks


CHOICES: Mapping[str, Sequence[Any]] = {  # of an optimizer; a state has the places of its own in these
    "momentum_type": MOMENTUM_TYPES,
    "estimation_mode": MODES,
    "adapt_damping": (False, True),
}


def choices(options: KFACOptions) -> dict[str, Any]:
    return {
        "momentum_type": options.kind,
        "estimation_mode": options.estimation_mode,
        "adapt_damping": bool(options.adapt_damping),
    }


# --- writing ----------------------------------------------------------------------------------------------------------


def publish(state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Tensors]) -> None:
    """Put everything into the optimizer's `states` by parameter. Tensors of blocks share memory with the estimator's.

    Numbers and random states are copies, as of now. Parameters that were never moved get a new state.
    """
    parameters, division = moved(groups), state.division
    by_name = {state.names[parameter]: parameter for parameter, _ in parameters}
    for parameter, first_order in parameters:
        kept = division.keeps(state.names[parameter])
        of_rule = rule_state(states.get(parameter, {})) if kept else {}
        if parameter.requires_grad and kept and not of_rule:
            of_rule = (new_adam_state if first_order else state.options.new_state)(parameter)
        # An empty entry for a parameter of another owner: torch.distributed.checkpoint misses those without any.
        if of_rule or parameter in states or not kept:
            states[parameter] = of_rule
    first = parameters[0][0]
    for key, block in state.estimator.blocks.items():
        owner = next((by_name[name] for name in block.registration.owners if name in by_name), first)
        of_block = {f"{key_text(key)}/{name}": tensor for name, tensor in block.state().items()}
        states.setdefault(owner, {}).update(on(owner, of_block))
    states.setdefault(first, {}).update(on(first, whole(state)))


def moved(groups: Sequence[Group]) -> list[tuple[nn.Parameter, bool]]:
    """Every parameter, and whether the first-order rule moves it."""
    return [(parameter, group["first_order"]) for group in groups for parameter in group["params"]]


def on(parameter: Tensor, tensors: Tensors) -> Tensors:
    return {name: tensor.to(parameter.device) for name, tensor in tensors.items()}


def whole(state: StepState) -> Tensors:
    """The tensors that belong to no block."""
    schedule, late = state.schedule, state.late
    values = {name: getattr(state, name) for name in ("damping", *SCALARS, "skipped")}
    if state.options.checked:
        values |= {name: getattr(state.size, name) for name in STEP_SIZE}
        values |= {"intervals": torch.tensor(schedule.intervals), "overhead": torch.tensor(schedule.overhead)}
        values |= {"checks": torch.tensor([schedule.last_check, schedule.intervals_apart])}
    values |= {"counter": torch.tensor(schedule.counter), "burned_in": torch.tensor(schedule.burned_in)}
    first = [state.first_recorded.get(key, 0) for key in state.estimator.blocks]
    values |= {"first_recorded": torch.tensor(first)}
    values |= {name: torch.tensor(CHOICES[name].index(kind)) for name, kind in choices(state.options).items()}
    values |= {"estimator.damping": state.estimator.damping, "generator": state.forwards.generator.get_state()}
    tensors = {f"{WHOLE}{name}": value for name, value in values.items()}
    options = state.options
    if options.adapt_damping and not options.update_damping_immediately:
        streams = RandomState.now(state.forwards.devices) if late is None else late
        tensors |= {LATE: torch.tensor(late is not None), f"{LATE}/cpu": streams.cpu}
        tensors |= {f"{LATE}/{device}": stream for device, stream in streams.others.items()}
    return tensors


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A state_dict, sorted by what its tensors belong to."""

    rules: Mapping[int, Tensors]  # by the place of the parameter
    blocks: Tensors
    whole: Tensors  # without late states of random streams
    late: RandomState | None

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> Checkpoint:
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
            {name: value for name, value in others.items() if name.startswith(WHOLE)},
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
    checkpoint = Checkpoint.of(state_dict)
    if not checkpoint.whole:
        raise ValueError(f"the state has no {WHOLE!r} entries: it is that of another kind of optimizer")
    check_choices(state, checkpoint.whole)
    needed = {name: tensor for name, tensor in whole(state).items() if not name.startswith(LATE)}
    expected = needed.keys()
    if wrong := sorted(expected ^ checkpoint.whole.keys()):
        raise ValueError(f"the state is of another version of KFAC: {', '.join(wrong)} on one side only")
    state.estimator.check_state({"damping": checkpoint.whole[f"{WHOLE}estimator.damping"], **checkpoint.blocks})
    check_shapes(needed, checkpoint.whole)
    for n, both in enumerate(zip(groups, state_dict["param_groups"], strict=False)):
        here, there = (", ".join(key for key in OF_GROUPS if key in group) for group in both)
        if here != there:
            raise ValueError(
                f"parameter group {n} of the state has {there}, and this one's has {here}: it is that of another "
                "momentum_type"
            )
    parameters = moved(groups)
    rows: list[tuple[str, str]] = []
    for place, values in checkpoint.rules.items():
        if place not in range(len(parameters)):
            rows.append((f"parameter {place}", f"there are {len(parameters)}"))
            continue
        parameter, first_order = parameters[place]
        new = new_adam_state if first_order else state.options.new_state
        has, needs = shapes(values), shapes(new(torch.empty_like(parameter, device="meta")))
        if has != needs:
            rows.append((state.names[parameter], f"has {has}, and needs {needs}"))
    if rows:
        raise ValueError(f"the state does not fit {len(rows)} of {len(parameters)} parameters:\n{table(rows)}")
    return checkpoint


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
    for name, here in choices(state.options).items():
        kinds, entry = CHOICES[name], whole.get(f"{WHOLE}{name}")
        if entry is None:
            continue  # the names of all entries are compared next
        place = int(entry) if entry.numel() == 1 else len(kinds)
        if place != kinds.index(here):
            there = repr(kinds[place]) if place in range(len(kinds)) else "another kind"
            rows.append((name, f"{there} in the state, {here!r} here"))
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
    parameters = moved(groups)
    for place, values in checkpoint.rules.items():
        parameter, _ = parameters[place]
        if not state.division.keeps(state.names[parameter]):
            continue
        states[parameter] = {key: value.to(parameter.device, copy=True) for key, value in values.items()}
    values = {name.removeprefix(WHOLE): value for name, value in checkpoint.whole.items()}
    for name in ("damping", *SCALARS, "skipped"):
        getattr(state, name).copy_(values[name])
    for name in STEP_SIZE if state.options.checked else ():
        getattr(state.size, name).copy_(values[name])
    if state.options.checked:
        state.schedule.intervals = state.schedule.with_given(StepIntervals(*values["intervals"].tolist()))
        state.schedule.overhead = float(values["overhead"])
        state.estimator.cov_ema_decay = state.schedule.decay
    state.schedule.counter, state.schedule.burned_in = int(values["counter"]), int(values["burned_in"])
    if state.options.checked:
        step, apart = values["checks"].tolist()
        state.schedule.checked(step, apart, state.size.calm)
    first = zip(state.estimator.blocks, values["first_recorded"].tolist(), strict=True)
    state.first_recorded = {key: step for key, step in first if step}
    state.estimator.load_state_dict({"damping": values["estimator.damping"], **checkpoint.blocks})
    state.forwards.generator.set_state(values["generator"].cpu())
    state.late = checkpoint.late
    state.grouped = None
    state.forwards.forget()
