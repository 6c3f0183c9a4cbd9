"""What the next step depends on besides parameters and torch's own entries, as plain data and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kfac_fx.optim.stepper import Stepper
from kfac_fx.optim.updater import SCALARS
from kfac_fx.passes.devices import RandomState


def saved(stepper: Stepper, generator: torch.Generator) -> dict[str, Any]:
    """Tensors share memory. generator: of what is sampled."""
    updater = {name: getattr(stepper.updater, name) for name in ("damping", *SCALARS)}
    schedule, late = stepper.schedule, stepper.late
    counters = {"counter": schedule.counter, "burned_in": schedule.burned_in, "skipped": stepper.skipped}
    estimator = {"estimator": stepper.estimator.state_dict(), "generator": generator.get_state()}
    return updater | counters | estimator | {"late": None if late is None else (late.cpu, dict(late.others))}


def restore(stepper: Stepper, generator: torch.Generator, kept: Mapping[str, Any]) -> None:
    """What `saved` returned, copied in. Forwards since the last step, and the state by parameter, are forgotten."""
    for name in ("damping", *SCALARS):
        getattr(stepper.updater, name).copy_(kept[name])
    stepper.schedule.counter, stepper.schedule.burned_in = kept["counter"], kept["burned_in"]
    stepper.skipped.copy_(kept["skipped"])
    stepper.estimator.load_state_dict(kept["estimator"])
    generator.set_state(kept["generator"].cpu())
    stepper.late = None if kept["late"] is None else RandomState(*kept["late"])
    stepper.members = None
    stepper.forwards.forget()
