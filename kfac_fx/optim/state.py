"""KFAC's checkpoint: the state that the next step depends on besides parameters and torch's own entries."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.optim.groups import OF_GROUPS, Group
from kfac_fx.optim.rules import new_adam_state, new_velocity
from kfac_fx.optim.step import SCALARS, StepState
from kfac_fx.passes.errors import table
from kfac_fx.passes.tracing.devices import RandomState


def saved(state: StepState) -> dict[str, Any]:
    """The checkpoint as plain data. Its tensors share memory with the optimizer's."""
    schedule, late = state.schedule, state.late
    return {
        **{name: getattr(state, name) for name in ("damping", *SCALARS)},
        "counter": schedule.counter,
        "burned_in": schedule.burned_in,
        "skipped": state.skipped,
        "estimator": state.estimator.state_dict(),
        "generator": state.forwards.generator.get_state(),
        "late": None if late is None else (late.cpu, dict(late.others)),
    }


def check(state: StepState, groups: Sequence[Group], checkpoint: Mapping[str, Any]) -> None:
    """Raises ValueError for an optimizer's state_dict that does not fit, before anything of it is loaded."""
    if "kfac" not in checkpoint:
        raise ValueError("the state has no 'kfac' entry: it is that of another kind of optimizer")
    if wrong := sorted(saved(state).keys() ^ checkpoint["kfac"].keys()):
        raise ValueError(f"the 'kfac' entry of the state is of another version: {', '.join(wrong)} on one side only")
    state.estimator.check_state(checkpoint["kfac"]["estimator"])
    for n, both in enumerate(zip(groups, checkpoint["param_groups"], strict=False)):
        here, there = (", ".join(key for key in OF_GROUPS if key in group) for group in both)
        if here != there:
            raise ValueError(
                f"parameter group {n} of the state has {there}, and this one's has {here}: it is that of another "
                "momentum_type"
            )
    members = [(parameter, group["first_order"]) for group in groups for parameter in group["params"]]
    rows: list[tuple[str, str]] = []
    for index, values in checkpoint["state"].items():
        if index >= len(members):
            rows.append((f"parameter {index}", f"there are {len(members)}"))
            continue
        parameter, first_order = members[index]
        new = new_adam_state if first_order else new_velocity
        has, needs = shapes(values), shapes(new(torch.empty_like(parameter, device="meta")))
        if has != needs:
            rows.append((state.names[parameter], f"has {has}, and needs {needs}"))
    if rows:
        raise ValueError(f"the state does not fit {len(rows)} of {len(members)} parameters:\n{table(rows)}")


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def restore(
    state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Any], checkpoint: Mapping[str, Any]
) -> None:
    """Copy a checked state_dict into `state` and into the optimizer's `states` by parameter.

    Forwards since the last step are forgotten.
    """
    # torch converts state to the parameters' dtype, and shares what needs no conversion.
    members, kfac = [parameter for group in groups for parameter in group["params"]], checkpoint["kfac"]
    for index, values in checkpoint["state"].items():
        parameter = members[index]
        states[parameter] = {key: value.to(parameter.device, copy=True) for key, value in values.items()}
    for name in ("damping", *SCALARS, "skipped"):
        getattr(state, name).copy_(kfac[name])
    state.schedule.counter, state.schedule.burned_in = kfac["counter"], kfac["burned_in"]
    state.estimator.load_state_dict(kfac["estimator"])
    state.forwards.generator.set_state(kfac["generator"].cpu())
    state.late = None if kfac["late"] is None else RandomState(*kfac["late"])
    state.grouped = None
    state.forwards.forget()
