"""The checkpoint of a KFAC: all that the next step depends on, as tensors by parameter.

That is the form of every torch optimizer. Tools that save optimizers know `state` and `param_groups` alone, so there is
nothing else:

    state[parameter]  "velocity", or "exp_avg", ...       of the rule that moves the parameter
                      "kfac/name"                         a checksum of the parameter's name, next to these
                      "0.weight,0.bias/A/moment", ...     of the Fisher block, on the first of its parameters
                      "kfac/damping", "kfac/counter", ... of the whole optimizer, on the first of all parameters

All tensors of a parameter are on its device, random states included. A step reads entries with a "/" from the estimator
and from `StepState`, where they live.

**Faults** of a state_dict that an optimizer is to load, and the things that its user should know of it.

A state is checked as a whole before anything of it is loaded, and one error names all entries that are wrong. The shape
and the dtype of an entry are those that it has in the optimizer that loads. Its values are declared: in `WHOLE_VALUES`
for those of the whole optimizer, in `Rule.values` for those of a rule, in `BlockGroup.declared` for those of a block.
`SINCE` has those that the states of earlier versions do not have.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from kfac_fx.fisher.bases import WHOLE_PATCHES, of_another_kind
from kfac_fx.fisher.block import key_text
from kfac_fx.fisher.placement import UNDIVIDED
from kfac_fx.linalg.arguments import (
    A_COUNT,
    ANY_NUMBER,
    FINITE,
    MOST_COUNTED,
    NOT_NEGATIVE,
    Values,
    coarser,
    fault,
    faults,
    generator_fault,
    listed,
    not_negative,
    refuse,
    values_of,
)
from kfac_fx.linalg.processes import shard
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.distributions import MODES
from kfac_fx.optim.checks import Newcomers, Place, StepSize
from kfac_fx.optim.groups import ADAM_VALUES, FIRST_LR, OF_A_NEW_GROUP, OF_GROUPS, Group, new_adam_state, rule_state
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rule import SCALARS, StepIntervals
from kfac_fx.optim.rules import RULES, exact_steps
from kfac_fx.optim.state import StepState
from kfac_fx.passes.errors import plural, table, warn_user
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.tracing.effects import RandomState

WHOLE = "kfac/"  # begins the names of the tensors that belong to no block
LATE = "late"  # whether there is a late state of the random streams; and before the slash in the names of those states
STEP_SIZE = tuple(scalar.name for scalar in fields(StepSize))  # of the types with checks
NAME = f"{WHOLE}name"  # on every parameter that has a state of its rule
OUTDATED = f"{WHOLE}outdated"  # in a state that a user kept without a copy, while the optimizer went on

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
        if of_rule:
            number = checksum(names[parameter])
            of_rule[NAME] = torch.full((), number, dtype=torch.int64, device=parameter.device)
        # An empty entry for a parameter of another owner: torch.distributed.checkpoint misses those without any.
        if of_rule or parameter in states or not kept:
            states[parameter] = of_rule
    first = parameters[0][0]
    for key, block in state.estimator.blocks.items():
        owner = next((by_name[name] for name in block.registration.owners if name in by_name), first)
        of_block = {f"{key_text(key)}/{name}": tensor for name, tensor in block.state().items()}
        states.setdefault(owner, {}).update(on(owner, of_block))
    states.setdefault(first, {}).update(on(first, {f"{WHOLE}{name}": entry for name, entry in whole(state).items()}))


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


def written_in_place(state: StepState) -> Tensors:
    """The 0-dim tensors of the whole optimizer that steps write into, by the names of their entries."""
    rule = state.options.rule
    tensors = {"damping": state.damping, **{name: state.scalars[name] for name in (*SCALARS, *rule.scalars)}}
    tensors |= {"skipped": state.skipped, "withdrawn": state.undone}  # of the skipped steps, those that checks undid
    return tensors | {name: getattr(state.checks.size, name) for name in STEP_SIZE if rule.checked}


def whole(state: StepState) -> Tensors:
    """The tensors that belong to no block, by their names without `WHOLE`."""
    schedule, keys, cohort_of = state.schedule, sorted(state.estimator.blocks), state.estimator.cohorts
    values = written_in_place(state)
    if state.options.rule.checked:
        values |= {"intervals": torch.tensor(schedule.intervals), "overhead": torch.tensor(schedule.overhead)}
        values |= {"checks": torch.tensor([schedule.last_check, schedule.intervals_apart])}
        values |= {"soon": torch.tensor(schedule.soon)}
        values |= {"moved": state.checks.newcomers.numbers(state.vectors.names.values(), schedule.counter)}
    values |= {"counter": torch.tensor(schedule.counter), "burned_in": torch.tensor(schedule.burned_in)}
    values |= {"first_recorded": torch.tensor([state.first_recorded.get(key, 0) for key in keys])}
    values |= {"cohorts": torch.tensor([cohort_of[key] for key in keys])}  # of the blocks in the order of their keys
    values |= {name: torch.tensor(number) for name, (_, number, _) in choices(state).items()}
    values |= {"options": option_numbers(state.options)}
    values |= {"estimator.damping": state.estimator.damping, "generator": state.forwards.generator.get_state()}
    if rule_is_late(state):
        streams = RandomState.now(state.forwards.devices) if state.late is None else state.late
        values |= {LATE: torch.tensor(state.late is not None), f"{LATE}/cpu": streams.cpu}
        values |= {f"{LATE}/{device}": stream for device, stream in streams.others.items()}
    return values


def streams_in(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The late states of random streams among the entries of the whole optimizer, by device."""
    return {name.removeprefix(f"{LATE}/"): entry for name, entry in entries.items() if name.startswith(f"{LATE}/")}


# --- the checkpoint, loaded -------------------------------------------------------------------------------------------


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


def restore(state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Any], checkpoint: Entries) -> None:
    """Copy a checkpoint into `state` and into the optimizer's `states` by parameter.

    Forwards since the last step are forgotten.
    """
    parameters, values = parameters_of(groups), checkpoint.whole
    states.update({parameters[int(place)][0]: dict(of_rule) for place, of_rule in checkpoint.rules.items()})
    schedule, keys = state.schedule, sorted(state.estimator.blocks)
    if not state.forwards.mode_is_known:
        state.forwards.decided, state.estimator.estimation_mode = True, MODES[int(values["estimation_mode"])]
    for name, tensor in written_in_place(state).items():
        tensor.copy_(values[name])
    schedule.counter, schedule.burned_in = int(values["counter"]), int(values["burned_in"])
    if state.options.rule.checked:
        state.checks.place = Place()  # the next step begins elsewhere
        state.checks.newcomers = Newcomers.of(values["moved"], state.vectors.names.values(), schedule.counter)
        schedule.intervals = schedule.with_given(StepIntervals(*values["intervals"].tolist()))
        schedule.overhead = float(values["overhead"])
        state.estimator.cov_ema_decay = schedule.decay
        step, apart = values["checks"].tolist()
        schedule.checked(step, apart, state.checks.size.calm, int(values["soon"]))
    first = zip(keys, values["first_recorded"].tolist(), strict=True)
    state.first_recorded = {key: step for key, step in first if step}
    state.estimator.set_cohorts(dict(zip(keys, values["cohorts"].tolist(), strict=True)))
    if checkpoint.bases_as != state.estimator.bases_as:
        state.estimator.keep_bases_as(checkpoint.bases_as)
    state.estimator.load_checked({"damping": values["estimator.damping"], **checkpoint.blocks})
    if "generator" in values:
        state.forwards.generator.set_state(values["generator"].cpu())
    streams = {device: stream.cpu() for device, stream in streams_in(values).items()}
    state.late = RandomState(streams.pop("cpu"), streams) if streams else None
    state.vectors.grouped = None
    state.memory.reset()
    state.standstill.forget(int(values["skipped"]), int(values["withdrawn"]))
    state.forwards.forget()


WHOLE_VALUES: Mapping[str, Values] = {
    **dict.fromkeys(("damping", "estimator.damping", "ratio", "overhead"), NOT_NEGATIVE),
    **dict.fromkeys(("skipped", "withdrawn", "counter", "burned_in", "checks"), A_COUNT),
    **dict.fromkeys(("first_recorded", "cohorts", "moved", "soon"), A_COUNT),
    **dict.fromkeys(("rho", "predicted_change", "options"), ANY_NUMBER),
    "loss_before": Values(nan=True),  # of a step that was not taken
    "norm": Values(least=0, infinite=True),  # before the first check
    "value": Values(infinite=True),  # likewise, and where the loss was not finite
    "weight": Values(least=0, most=1.001),  # of an average, up to rounding
    "intervals": Values(least=1, most=MOST_COUNTED),
}
# In no older states: a training goes on with the first values.
SINCE = (
    *("multiplier", "peak_lr", "last_update", "steps", "withdrawn"),
    *("promised", "trust", "advance", "agreement", "agreed", "unit", "soon"),
    *exact_steps.EXACT_SCALARS,
)
STREAM_SIZES = (len(torch.Generator().get_state()), 16)  # bytes of the state of a generator: a CPU's, an accelerator's
NO_LONGER = ("qmodel_learning_rate", "qmodel_momentum")  # in older states of rules that have no such scalars

Rows = list[tuple[str, str]]  # the entries that are wrong, and what is wrong with them


@dataclass
class Entries:
    """The entries of a state_dict, sorted by what they belong to.

    Those of parameters are by the place of the parameter, or by the key, as text, of one that is not there.
    """

    rules: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    names: dict[int | str, Any] = field(default_factory=dict)  # the checksums
    blocks: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)  # by their names without `WHOLE`
    twice: list[str] = field(default_factory=list)
    bases_as: str | None = None  # `BlockDiagonalFisher.bases_as` of the blocks

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> Entries:
        entries = Entries()
        # Tools name parameters, and torch numbers them; the order in the groups says which they are.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        places = {key: place for place, key in enumerate(keys)}
        for key, values in state_dict["state"].items():
            place = places.get(key, str(key))
            entries.rules[place] = {}
            for given, value in values.items():
                name, entry = str(given), value.detach() if isinstance(value, Tensor) else value
                if "/" not in name:
                    entries.rules[place][name] = entry
                elif name == NAME:
                    entries.names[place] = entry
                else:
                    kind = entries.whole if name.startswith(WHOLE) else entries.blocks
                    if (short := name.removeprefix(WHOLE)) in kind:
                        entries.twice.append(name)
                    kind[short] = entry
        return entries


def check_state(state: StepState, groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Entries:
    """Raises ValueError for an optimizer's state_dict that does not fit, with all entries that are wrong.

    Where processes have different parts of a state, all of them refuse it if one does.
    """
    alone = state.vectors.division is UNDIVIDED
    try:
        checkpoint = checked_here(state, groups, state_dict)
    except ValueError:
        if not alone:
            state.replicas.total([torch.ones_like(state.skipped)])
        raise
    if not alone and int(state.replicas.total([torch.zeros_like(state.skipped)])[0]):
        raise ValueError("the state does not fit in another process, so nothing of it is loaded here")
    return checkpoint


def checked_here(state: StepState, groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Entries:
    """`check_state`, for this process alone."""
    if not is_state(state_dict):
        raise ValueError(
            "this is no state_dict of an optimizer, which has 'state' and 'param_groups': write opt.state_dict()"
        )
    entries, saved_groups = Entries.of(state_dict), with_empty_groups(groups, state_dict["param_groups"])
    if not entries.whole:
        if entries.names or entries.blocks:
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            absent = [repr(key) for key in keys if key not in state_dict["state"]] or [repr(key) for key in keys[:1]]
            raise ValueError(
                f"the state is not whole: it has no entries of {listed(absent)} of the parameters, and those of the "
                f"first one have what is of the whole optimizer, such as '{WHOLE}counter'. Load all that "
                "optimizer.state_dict() returned"
            )
        raise ValueError(
            f"the state has no {WHOLE!r} entries: it is that of another kind of optimizer, such as AdamW. Load the "
            "weights of the model alone, and begin KFAC without a state: it has factors after its first batch"
        )
    if OUTDATED.removeprefix(WHOLE) in entries.whole:
        raise ValueError(
            "the optimizer took a step after this state_dict was made, which shares most of its tensors, so some of "
            "its entries are of then and some of now: keep copy.deepcopy(optimizer.state_dict()), or save it to a file "
            "before the next step"
        )
    refuse_other_choices(state, entries.whole)
    refuse_other_blocks(state, entries.blocks)
    added = follow_versions(state, groups, entries)
    given, declared = of_rules(state, groups, entries)
    of_whole, declared_whole = of_optimizer(state, entries)
    given, declared = {**given, **of_whole}, {**declared, **declared_whole}
    entries.bases_as, bases = of_another_kind(state.estimator, entries.blocks)
    of_blocks, hint = state.estimator.state_faults({"damping": state.estimator.damping, **entries.blocks}, bases)
    rows = [*group_faults(groups, saved_groups), *((name, "is there twice") for name in entries.twice)]
    rows += faults(given, declared)
    rows += further_faults(state, groups, entries, {name for name, _ in rows})
    if f"{WHOLE}generator" in dict(rows):
        hint += "\nRandom states of one kind of device do not fit another: load on the kind that saved."
    refuse([*rows, *of_blocks], hint.strip(), owner="optimizer")
    like = {**state.estimator.state_dict(), **{name: tensor for name, (tensor, _) in declared.items()}}
    coarse = [name for name, entry in {**entries.blocks, **given}.items() if coarser(entry, like[name])]
    for text in told(state, groups, saved_groups, entries, added, coarse):
        warn_user(UserWarning(f"{text}."))
    entries.rules = staged(state, groups, entries)
    return entries


# --- the form ---------------------------------------------------------------------------------------------------------


def is_state(state_dict: Any) -> bool:
    """Whether this has the form of the state_dict of an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        return False
    states, groups = state_dict["state"], state_dict["param_groups"]
    named = isinstance(states, Mapping) and all(isinstance(values, Mapping) for values in states.values())
    return named and isinstance(groups, (list, tuple)) and all(is_group(group) for group in groups)


def is_group(group: Any) -> bool:
    members = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(members, (list, tuple)) and all(isinstance(member, (int, str)) for member in members)


def refuse_other_choices(state: StepState, whole: Mapping[str, Any]) -> None:
    """Raises ValueError for the state of an optimizer of another kind, whose tensors mean something else."""
    rows: Rows = []
    for name, (here, number, kinds) in choices(state).items():
        entry = whole.get(name)
        if fault(entry, torch.tensor(number)) is not None:
            continue  # told with all other faults
        there = int(cast(Tensor, entry))
        is_open = name == "estimation_mode" and not state.forwards.mode_is_known and there in range(len(kinds))
        if there != number and not is_open:
            saved = repr(kinds[there]) if there in range(len(kinds)) else "another one"
            rows.append((name, f"{saved} in the state, {here!r} here"))
    if rows:
        raise ValueError(
            f"the state is that of a KFAC with other options:\n{table(rows)}\n"
            "Create the optimizer with the options of the state, or train without it."
        )


def refuse_other_blocks(state: StepState, blocks: Mapping[str, Any]) -> None:
    """Raises ValueError if the state has blocks of parameters that no call has used so far, or none since they were
    unfrozen, or lacks those of some that calls have used; and if parameters were frozen before they had a block there
    or here."""
    there = {name.rpartition("/ready")[0] for name in blocks if name.endswith("/ready")}
    here, captures, names = list(map(key_text, state.estimator.blocks)), state.net.captures, state.vectors.names
    only_there = {name for text in there.difference(here) for name in text.split(",")}
    if waiting := only_there.intersection(captures.waiting):
        raise ValueError(
            "the state has blocks of parameters that no call of this net has used so far, and which get their blocks "
            f"when one does: {', '.join(sorted(waiting))}.\nCall net.recorder((x,), {{}}) once for every path that the "
            "training of before took, and load the state then."
        )
    unfrozen = [name for name, parameter in captures.trained.dormant.items() if parameter.requires_grad]
    if late := only_there.intersection(unfrozen):
        raise ValueError(
            "the state has blocks of parameters that were frozen when this net was compiled, and which get their "
            f"blocks at the next call: {', '.join(sorted(late))}.\nCompile the model while they have "
            "requires_grad=True; or call net.recorder((x,), {}) once, and load the state then."
        )
    absent = [text for text in here if not any(name.startswith(f"{text}/") for name in blocks)]
    if absent and there and there < set(here) and len(captures.all) > 1:
        raise ValueError(
            f"the state lacks blocks that calls of this net have used: {'; '.join(absent)}.\nThe training of before "
            "took fewer paths: load its state into a new optimizer of a net that took no others."
        )
    in_state = {name for text in there for name in text.split(",")}
    if not in_state or not in_state.issubset(names.values()):
        return  # the state of another model, or one with blocks of pieces
    like = state.estimator.state_dict()
    if any(
        name in like and isinstance(entry, Tensor) and entry.shape != like[name].shape
        for name, entry in blocks.items()
        if name.endswith("/moment")
    ):
        return  # that of another model, whose parameters have the same names
    if later := [name for parameter, name in names.items() if name in only_there and not parameter.requires_grad]:
        raise ValueError(
            f"the state has blocks of parameters that are frozen here: {', '.join(later)}. They were trained before it "
            "was saved.\nCreate the optimizer while they have requires_grad=True, load the state, and freeze them then."
        )
    if earlier := [name for text in sorted(absent) for name in text.split(",") if name not in in_state]:
        raise ValueError(
            f"the state has no block of parameters that are trained here: {', '.join(earlier)}. They were frozen, or "
            "took no part, when it was saved.\nIf they were frozen, create the optimizer while they have "
            "requires_grad=False, load the state, and unfreeze them then."
        )


def follow_versions(state: StepState, groups: Sequence[Group], entries: Entries) -> list[str]:
    """Add the first values of entries that the states of earlier versions do not have, and leave out those that they
    alone have. Returns the names of those that are added."""
    rule, entry_of = state.options.rule, entries.whole
    for name in NO_LONGER:
        if name not in rule.scalars:
            entry_of.pop(name, None)
    counter = entry_of.get("counter")
    if "steps" in rule.scalars and "steps" not in entry_of and isinstance(counter, Tensor):
        entry_of["steps"] = counter.to(torch.float64)
    names = [name for name in SINCE if name in rule.scalars and name not in entry_of]
    entry_of.update({name: torch.tensor(rule.scalars[name], dtype=torch.float64) for name in names})
    if "multiplier" in names and isinstance(norm := entry_of.get("norm"), Tensor):
        entry_of["norm"] = torch.ones_like(norm)  # its first check is long ago
    for place, (parameter, first_order) in enumerate(parameters_of(groups)):
        values = entries.rules.get(place)
        if values and any(name not in values for name in SINCE):
            new = new_state(state, parameter, first_order)
            missing = [name for name in SINCE if name in new and name not in values]
            values.update({name: new[name] for name in missing})
            names += [name for name in missing if name not in names]
    if rule.checked and "moved" not in entry_of and isinstance(counter, Tensor) and counter.numel() == 1:
        with_state = {place for place, values in entries.rules.items() if values}
        moved = {state.vectors.names[p] for n, (p, _) in enumerate(parameters_of(groups)) if n in with_state}
        names_here = state.vectors.names.values()
        entry_of["moved"] = torch.tensor([(int(counter) * (name in moved), 0) for name in names_here]).view(-1, 2)
    if "cohorts" not in entry_of and isinstance(first := entry_of.get("first_recorded"), Tensor):
        entry_of["cohorts"] = (first > 0).to(first.dtype)
    for name in ("withdrawn", *["soon"] * rule.checked):
        entry_of.setdefault(name, torch.zeros((), dtype=torch.int64))
    late = entry_of.get(LATE)
    if not rule_is_late(state) or (isinstance(late, Tensor) and late.numel() == 1 and not late.is_meta and not late):
        for device in streams_in(entry_of):  # they belong to a step whose loss is still to be measured
            del entry_of[f"{LATE}/{device}"]
    if not rule_is_late(state):
        entry_of.pop(LATE, None)
    return names


def is_of_another_kind(stream: Any, here: Tensor) -> bool:
    """Whether the random stream of the sampled targets is that of another kind of device."""
    if not isinstance(stream, Tensor) or stream.dtype is not torch.uint8 or stream.dim() != 1:
        return False
    return len(stream) != len(here) and len(stream) in STREAM_SIZES


def rule_is_late(state: StepState) -> bool:
    """Whether the next step measures the loss after a step."""
    rule = state.options.rule.damping_rule
    return rule is not None and not rule.immediately


def new_state(state: StepState, parameter: Tensor, first_order: bool) -> Tensors:
    """The first state of a parameter of zeros."""
    zeros = torch.zeros_like(real_numbers(parameter.detach()))
    return new_adam_state(zeros) if first_order else state.options.rule.new_state(zeros)


# --- what is wrong ----------------------------------------------------------------------------------------------------

Given = dict[str, Any]
Declared = dict[str, tuple[Tensor, Values]]


def of_rules(state: StepState, groups: Sequence[Group], entries: Entries) -> tuple[Given, Declared]:
    """The entries of the rules, by names for the user, and their declarations."""
    given: Given = {}
    declared: Declared = {}
    values = state.options.rule.values
    for place, (parameter, first_order) in enumerate(parameters_of(groups)):
        of_parameter, name = entries.rules.get(place, {}), state.vectors.names[parameter]
        if of_parameter or place in entries.names:
            given |= {f"{key} of {name}": entry for key, entry in of_parameter.items()}
            for key, first in new_state(state, parameter, first_order).items():
                allowed = values_of(key, ADAM_VALUES if first_order else values, usual_values(first))
                declared[f"{key} of {name}"] = first.to(kept_dtype(state, first, of_parameter.get(key))), allowed
        if place in entries.names:
            given[f"{NAME} of {name}"] = entries.names[place]
            declared[f"{NAME} of {name}"] = torch.tensor(0), FINITE
    return given, declared


def of_optimizer(state: StepState, entries: Entries) -> tuple[Given, Declared]:
    """The entries of the whole optimizer, and their declarations. The random stream of the sampled targets is left out
    if it is that of another kind of device."""
    rule, needed, given = state.options.rule, whole(state), entries.whole
    sizes = {device: STREAM_SIZES[device != "cpu"] for device in streams_in(given)}
    needed = {name: tensor for name, tensor in needed.items() if not name.startswith(f"{LATE}/")}
    needed |= {f"{LATE}/{device}": torch.zeros(size, dtype=torch.uint8) for device, size in sizes.items()}
    if is_of_another_kind(given.get("generator"), needed["generator"]):
        del given["generator"], needed["generator"]
    if "options" not in given or is_of_other_options(given["options"], needed["options"]):
        given.pop("options", None)
        del needed["options"]
    if LATE in needed and LATE not in given and saved_options(state, entries).get("update_damping_immediately") != 0:
        del needed[LATE]  # the options are others, or not known
    usual = {name: usual_values(torch.tensor(first)) for name, first in rule.scalars.items()}
    values = {**WHOLE_VALUES, **{name: values_of(name, rule.values, usual[name]) for name in usual}}
    return (
        {f"{WHOLE}{name}": entry for name, entry in given.items()},
        {f"{WHOLE}{name}": (tensor, values.get(name, FINITE)) for name, tensor in needed.items()},
    )


def kept_dtype(state: StepState, first: Tensor, entry: object) -> torch.dtype:
    """The dtype of an entry of a rule: vectors of parameters of several precisions have the widest of them."""
    if not (isinstance(entry, Tensor) and entry.is_floating_point() and first.is_floating_point()):
        return first.dtype
    widest = functools.reduce(
        torch.promote_types, (p.dtype.to_real() for p in state.vectors.names if p.element_size() > 1), first.dtype
    )
    wider = torch.promote_types(first.dtype, entry.dtype)
    return wider if torch.promote_types(wider, widest) is widest else first.dtype


def usual_values(first: Tensor) -> Values:
    """The values of an entry for which a rule declares none: finite numbers, if its first values are."""
    return FINITE if bool(shard(first).isfinite().all()) else ANY_NUMBER


def group_faults(groups: Sequence[Group], saved: Sequence[Mapping[str, Any]]) -> Rows:
    """Faults of the parameter groups."""
    if len(groups) != len(saved):
        return [("param_groups", f"has {plural(len(saved), 'group')}, and needs {len(groups)}")]
    rows: Rows = []
    keys = [key for group in saved for key in group["params"]]
    if len(set(keys)) < len(keys):
        rows.append(("param_groups", "has a parameter twice"))
    for n, (here, there) in enumerate(zip(groups, saved, strict=True)):
        start, mine = f"param_groups[{n}]", [*(key for key in OF_GROUPS if key in here), "first_order"]
        if len(there["params"]) != len(here["params"]):
            has = plural(len(there["params"]), "parameter")
            rows.append((f"{start}['params']", f"has {has}, and needs {len(here['params'])}"))
        rows += [(f"{start}[{key!r}]", "is missing") for key in mine if key not in there]
        rows += [(f"{start}[{key!r}]", "is unknown here") for key in OF_GROUPS if key in there and key not in here]
        for key in (*OF_GROUPS, FIRST_LR, "initial_lr"):
            try:
                OF_A_NEW_GROUP.get(key, not_negative)("", there.get(key, 0))
            except ValueError as error:
                rows.append((f"{start}[{key!r}]", str(error).strip()))
        of_rule = there.get("first_order", here["first_order"])
        if of_rule is not here["first_order"]:
            words = f"is {of_rule!r}, and must be {here['first_order']}: whether no Fisher block has the parameters"
            rows.append((f"{start}['first_order']", words))
    return rows


def further_faults(state: StepState, groups: Sequence[Group], entries: Entries, wrong: set[str]) -> Rows:
    """Faults of entries that have the right form. wrong: the names of those that have not."""
    names = [state.vectors.names[parameter] for parameter, _ in parameters_of(groups)]
    by_checksum = {checksum(name): name for name in names}
    given = {name: entry for name, entry in entries.whole.items() if f"{WHOLE}{name}" not in wrong}
    unknown = [place for place in entries.rules if place not in range(len(names)) and "param_groups" not in wrong]
    rows = [(f"parameter {place}", f"is unknown here, where {len(names)} are") for place in unknown]
    for place, name in enumerate(names):
        saved = entries.names.get(place)
        if saved is not None and f"{NAME} of {name}" not in wrong and int(saved) != checksum(name):
            other = by_checksum.get(int(saved), "a parameter that is not here")
            rows.append((f"{NAME} of {name}", f"is that of {other}: the parameters are in another order"))
    devices = {f"{LATE}/{device}": device for device in streams_in(given)}
    devices["generator"] = str(state.forwards.generator.device)
    of_whole: Rows = []
    for name, device in devices.items():
        if name in given and (fault_of_stream := generator_fault(given[name], device)):
            of_whole.append((name, fault_of_stream))
    if given.get(LATE) and f"{LATE}/cpu" not in entries.whole:
        of_whole.append((f"{LATE}/cpu", "is missing"))
    for name in ("damping", "estimator.damping"):
        if name in given and float(state.options.rule.first_damping) and not given[name]:
            of_whole.append((name, "is 0, and must be positive"))
    if (counter := given.get("counter")) is not None:
        for name in ("checks", "first_recorded", "moved"):
            steps = given.get(name, counter.new_zeros(0))
            steps = steps[:1] if name == "checks" else steps
            if bool((steps > counter).any()):
                of_whole.append((name, f"is of a step after the last, {int(counter)}"))
        for name, allowed in {**WHOLE_VALUES, **state.options.rule.values}.items():
            if allowed.steps and name in given and given[name] > counter:
                of_whole.append((name, f"counts {int(given[name])} steps, and there were {int(counter)}"))
    if (cohorts := given.get("cohorts")) is not None and bool((cohorts > len(cohorts) + 1).any()):
        of_whole.append(("cohorts", f"has the number {int(cohorts.max())}, and there are {len(cohorts)} blocks"))
    return [*rows, *((f"{WHOLE}{name}", words) for name, words in of_whole)]


# --- the options of the state -----------------------------------------------------------------------------------------


def is_of_other_options(saved: Any, here: Tensor) -> bool:
    """Whether these are the options of another version, which cannot be compared."""
    if not (isinstance(saved, Tensor) and saved.is_floating_point() and saved.dim() == 1 and not saved.is_meta):
        return False
    return saved.shape != here.shape or float(saved[0]) != float(here[0])


def saved_options(state: StepState, entries: Entries) -> dict[str, float]:
    """The numbers of the options that the state was saved with; empty if they are not known."""
    saved, here = entries.whole.get("options"), option_numbers(state.options)
    if fault(saved, here, ANY_NUMBER) is not None or is_of_other_options(saved, here):
        return {}
    return dict(zip(state.options.told, cast(Tensor, saved)[1:].tolist(), strict=True))


def words_of_options(options: KFACOptions, saved: Mapping[str, float]) -> str:
    """Which options were others when the state was saved: those of parameter groups and the damping, which go on from
    the state, and those that are as given here; empty if there are none."""
    here = option_numbers(options)[1:].tolist()
    of_state: dict[str, str] = {}
    given = []
    for (name, value), number in zip(options.told.items(), here, strict=True):
        there = saved.get(name, number)
        if there == number or (math.isnan(there) and math.isnan(number)):
            continue
        if isinstance(value, str):
            given.append(f"{name} is {value} here")
            continue
        was = None if math.isnan(there) else bool(there) if isinstance(value, bool) else f"{there:g}"
        now = value if math.isnan(number) or isinstance(value, bool) else f"{number:g}"
        if name in (*options.of_groups, "damping") and None not in (was, now):
            of_state[name] = f"{name} was {was} there, and {now} is given here"
        else:
            given.append(f"{name} was {was} and is {now} here")
    places = [
        f"optimizer.{name}" if name == "damping" else f"optimizer.param_groups[...][{name!r}]" for name in of_state
    ]
    texts = ["the state was saved by a KFAC with other options"]
    if of_state:
        texts.append(f"These go on from the state: {', '.join(of_state.values())}")
        texts.append(f"To have those of here, write {listed(places)} after loading")
    if given:
        texts.append(f"These are as given here: {', '.join(given)}")
    return ". ".join(texts) if of_state or given else ""


# --- what is loaded, and what the user should know of it --------------------------------------------------------------


def staged(state: StepState, groups: Sequence[Group], entries: Entries) -> dict[int | str, Tensors]:
    """The states of the rules that this process keeps, as they will be."""
    rules: dict[int | str, Tensors] = {}
    for place, (parameter, first_order) in enumerate(parameters_of(groups)):
        values = entries.rules.get(place)
        if values and state.vectors.division.keeps(state.vectors.names[parameter]):
            new = new_state(state, parameter, first_order)
            rules[place] = {
                key: value.to(parameter.device, kept_dtype(state, new[key], value), copy=True)
                for key, value in values.items()
            }
    return rules


BASES_OF_KINDS = {  # how they are kept, and what that does
    "cpu": ("wide layers in blocks, as a CPU does", "turns gradients less closely"),
    "accelerator": ("wide layers whole, as a GPU does, and as earlier versions did", "costs more on a CPU"),
    WHOLE_PATCHES: ("convolutions in wider blocks, as earlier versions did", "costs more on a CPU"),
}


def told(
    state: StepState,
    groups: Sequence[Group],
    saved: Sequence[Mapping[str, Any]],
    entries: Entries,
    added: Sequence[str],
    coarse: Sequence[str],
) -> list[str]:
    """Each thing that a user may not expect of a state that is loaded.

    added: names of `follow_versions`. coarse: the entries with a lower precision than they are kept in.
    """
    texts = []
    if changed := words_of_options(state.options, saved_options(state, entries)):
        texts.append(changed)
    if added:
        texts.append(f"the state is of an earlier version, and these begin anew: {', '.join(added)}")
    without = [n for n, group in enumerate(groups) if FIRST_LR in group and FIRST_LR not in saved[n]]
    if without:
        texts.append(
            f"the state was saved without norm_constraint, so parameter groups {', '.join(map(str, without))} have no "
            f"{FIRST_LR!r} in it: the 'initial_lr' of a scheduler, or the lr, takes its place"
        )
    names, division = state.vectors.names, state.vectors.division
    new = [
        names[parameter]
        for place, (parameter, first_order) in enumerate(parameters_of(groups))
        if parameter.requires_grad and not entries.rules.get(place) and division.keeps(names[parameter])
        if new_state(state, parameter, first_order)  # a rule may keep nothing
    ]
    if new:
        texts.append(
            f"the state has nothing of {plural(len(new), 'parameter')}, which begin anew: {', '.join(new)}. That is as "
            "it should be if they were frozen when it was saved"
        )
    if coarse:
        were = "1 entry of the state was" if len(coarse) == 1 else f"{len(coarse)} entries of the state were"
        texts.append(f"{were} saved in a lower precision, such as {coarse[0]}")
    if "generator" not in entries.whole:
        texts.append(
            "the state is of another kind of device, whose random numbers this one does not have: the stream of the "
            "sampled targets begins anew"
        )
    if entries.bases_as is not None:
        kept, costs = BASES_OF_KINDS[entries.bases_as]
        texts.append(
            f"the state has the bases of {kept}. The training goes on with these, which {costs}. To change "
            "to bases of this device, load the state of the model alone"
        )
    return texts
