"""What the next step depends on besides parameters and torch's own entries, as plain data and back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.optim.first_order import new_state
from kfac_fx.optim.parameter_groups import OF_GROUPS, Group, new_velocity
from kfac_fx.optim.stepper import Stepper
from kfac_fx.optim.updater import SCALARS
from kfac_fx.passes.errors import table
from kfac_fx.passes.tracing.devices import RandomState


def saved(stepper: Stepper, generator: torch.Generator) -> dict[str, Any]:
    """Tensors share memory. generator: of what is sampled."""
    updater = {name: getattr(stepper.updater, name) for name in ("damping", *SCALARS)}
    schedule, late = stepper.schedule, stepper.late
    counters = {"counter": schedule.counter, "burned_in": schedule.burned_in, "skipped": stepper.skipped}
    estimator = {"estimator": stepper.estimator.state_dict(), "generator": generator.get_state()}
    return updater | counters | estimator | {"late": None if late is None else (late.cpu, dict(late.others))}


def check(stepper: Stepper, generator: torch.Generator, groups: Sequence[Group], state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError for a `state_dict` that does not fit, before anything of it is taken over."""
    if "kfac" not in state_dict:
        raise ValueError("the state has no 'kfac' entry: it is that of another kind of optimizer")
    own, kept = saved(stepper, generator), state_dict["kfac"]
    if wrong := sorted(own.keys() ^ kept.keys()):
        raise ValueError(f"the 'kfac' entry of the state is of another version: {', '.join(wrong)} on one side only")
    stepper.estimator.check_state(kept["estimator"])
    for n, both in enumerate(zip(groups, state_dict["param_groups"], strict=False)):
        own_options, kept_options = (", ".join(key for key in OF_GROUPS if key in group) for group in both)
        if own_options != kept_options:
            raise ValueError(
                f"parameter group {n} of the state has {kept_options}, and this one's has {own_options}: it is that of "
                "another momentum_type"
            )
    members = [(parameter, group["first_order"]) for group in groups for parameter in group["params"]]
    rows: list[tuple[str, str]] = []
    for index, values in state_dict["state"].items():
        if index >= len(members):
            rows.append((f"parameter {index}", f"there are {len(members)}"))
            continue
        parameter, first_order = members[index]
        wanted = shapes((new_state if first_order else new_velocity)(torch.empty_like(parameter, device="meta")))
        if (found := shapes(values)) != wanted:
            rows.append((stepper.names[parameter], f"has {found}, and needs {wanted}"))
    if rows:
        raise ValueError(f"the state does not fit {len(rows)} of {len(members)} parameters:\n{table(rows)}")


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def restore(
    stepper: Stepper,
    generator: torch.Generator,
    groups: Sequence[Group],
    states: MutableMapping[Any, Any],
    state_dict: Mapping[str, Any],
) -> None:
    """What `saved` returned, and the optimizer's `states` by parameter, copied in from a `state_dict` that was checked.
    Forwards since the last step are forgotten."""
    # torch converts state to the parameters' dtype, and shares what needs no conversion.
    members, kept = [parameter for group in groups for parameter in group["params"]], state_dict["kfac"]
    for index, values in state_dict["state"].items():
        parameter = members[index]
        states[parameter] = {key: value.to(parameter.device, copy=True) for key, value in values.items()}
    for name in ("damping", *SCALARS):
        getattr(stepper.updater, name).copy_(kept[name])
    stepper.schedule.counter, stepper.schedule.burned_in = kept["counter"], kept["burned_in"]
    stepper.skipped.copy_(kept["skipped"])
    stepper.estimator.load_state_dict(kept["estimator"])
    generator.set_state(kept["generator"].cpu())
    stepper.late = None if kept["late"] is None else RandomState(*kept["late"])
    stepper.members = None
    stepper.forwards.forget()
