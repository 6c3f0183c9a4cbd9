"""What an optimizer does at the forwards of its net, and keeps of them until its step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kfac_fx.estimator import FisherEstimator
from kfac_fx.optim.loss_scale import check
from kfac_fx.optim.micro_batches import MicroBatches
from kfac_fx.optim.parameter_groups import CompiledNet
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.watched import watch
from kfac_fx.passes.tracing.devices import RandomState


class Forwards:
    """seen: the forwards since the last step. paused: no forward counts, while a loss is measured. checked: the user's
    loss was found to be the registered one, or told to be another; unwatched: or there was nothing to see. used: the
    gradients of the last step. generator: of everything that is sampled; devices: that have random streams beside the
    CPU's."""

    def __init__(
        self,
        net: CompiledNet,
        schedule: Schedule,
        estimator: FisherEstimator,
        generator: torch.Generator,
        devices: tuple[torch.device, ...],
    ) -> None:
        self.net, self.schedule, self.estimator, self.generator = net, schedule, estimator, generator
        self.devices = devices
        self.seen = MicroBatches()
        self.paused = self.checked = self.unwatched = False
        self.unrecorded = 0
        self.before: RandomState | None = None
        self.used: dict[str, weakref.ref[Tensor]] = {}

    def fallbacks(self) -> list[str]:
        """What was not looked at, and why."""
        unwatched = (
            "whether the training loss is the registered one was not checked: the first step's forward had no outputs "
            "of the Fisher to watch, or no memory for it"
        )
        stale = f"statistics were due at {self.unrecorded} steps that no forward came before"
        return [unwatched] * self.unwatched + [stale] * bool(self.unrecorded)

    def note_unrecorded(self) -> None:
        """Of a step with statistics due; warns at the first."""
        self.unrecorded += 1
        if self.unrecorded == 1:
            warnings.warn(
                "a step takes factors of earlier batches, though statistics are due: no forward was recorded before it."
                "\nCall the compiled module, net(x) and not the model it was made of, after net.train() and with "
                "gradients enabled. net.report counts such steps.",
                RuntimeWarning,
                stacklevel=5,
            )

    def forget(self) -> None:
        """What happened since the last step."""
        self.seen, self.used = MicroBatches(), {}

    def step_taken(self, gradients: Mapping[str, Tensor]) -> None:
        self.seen = MicroBatches()
        self.used = {name: weakref.ref(gradient) for name, gradient in gradients.items()}

    def gradients_zeroed(self) -> None:
        if not self.paused:
            self.used = {}
            self.seen.gradients_zeroed()

    def has_new(self, gradients: Mapping[str, Tensor]) -> bool:
        """Was there a forward since the last step, and a gradient that it did not use?"""
        used = {name: gradient() for name, gradient in self.used.items()}
        return self.seen.forwards > 0 and any(used.get(name) is not gradient for name, gradient in gradients.items())

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the batch if statistics are due; the outputs if it took over the forward, else None."""
        if self.paused:
            return None
        options, seen, schedule = self.schedule.options, self.seen, self.schedule
        if (seen.rides or seen.watched) and all(one.grad is None for _, one in self.net.named_parameters()):
            seen.gradients_zeroed()  # by the model that the net was made of, or by hand
        if (schedule.adapting and not seen.forwards) or not self.checked:
            self.before = RandomState.now(self.devices)
            seen.start = seen.start or self.before
        seen.forwards += 1
        if options.quadratic and not schedule.burning_in:
            seen.calls.append((args, kwargs))
        if not schedule.recording:
            return None
        if options.riding:
            outputs, ride = self.net.ride(args, kwargs, generator=self.generator)
            seen.rides.append(ride)
            return outputs
        self.estimator.accumulate(
            self.net.record(
                args, kwargs, mode=options.estimation_mode, fraction=options.fraction, generator=self.generator
            )
        )
        return None

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Until the first step, watch what the user's backward sends into the outputs."""
        if self.checked or self.paused or self.before is None:
            return
        watched = watch(self.net.recorder(args, kwargs), args, kwargs, outputs, self.before)
        self.seen.watched += [] if watched is None else [watched]

    def check_scale(self, loss: Tensor | float | None, loss_scale: float) -> None:
        """At the first step with gradients, where the host waits to know. Warns with LossScaleWarning."""
        value = None if loss is None else float(loss)
        self.unwatched = not self.seen.watched
        options = self.schedule.options
        check(
            self.seen.watched,
            reduction=options.reduction,
            loss_scale=loss_scale,
            value=value,
            riding=options.riding,
        )
        self.checked, self.before = True, None
