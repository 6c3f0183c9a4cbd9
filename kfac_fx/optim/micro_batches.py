"""What the optimizer sees of a step's forwards, from the end of one step to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kfac_fx.optim.watched import Watched
from kfac_fx.passes.tracing.devices import RandomState
from kfac_fx.statistics.moments import Moments, Ride, power_of_gradient

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class MicroBatches:
    """forwards: how many there were; calls: their arguments, where the step will need them again (references, dropped
    after the step); rides: statistics that wait for the user's backward; dropped: those whose gradients were zeroed;
    start: the random streams before the first; watched: what the backward sends into the outputs, at the first step."""

    forwards: int = 0
    calls: list[Call] = field(default_factory=list)
    rides: list[Ride] = field(default_factory=list)
    dropped: list[Ride] = field(default_factory=list)
    start: RandomState | None = None
    watched: list[Watched] = field(default_factory=list)

    def moments(self, reduction: str, loss_scale: float) -> list[Moments]:
        """The statistics of the rides whose backward happened, for gradients of the loss summed over cases.

        reduction: "mean" if the step's gradient is that of a mean over the cases of all micro-batches.
        loss_scale: what the loss was multiplied with before the backward, as by a GradScaler.

        Raises RuntimeError for a forward with two backwards.
        """
        for ride in self.dropped:
            ride.check_backwards()
        done = [ride for ride in self.rides if backward_happened(ride)]
        cases = sum(ride.cases for ride in done)
        return [scaled(ride.moments(reduction, cases), 1 / loss_scale) for ride in done]

    def gradients_zeroed(self) -> None:
        """What was sent back so far is no part of the step's gradient."""
        done = [ride for ride in self.rides if backward_happened(ride)]
        self.dropped += done
        self.rides = [ride for ride in self.rides if all(ride is not one for one in done)]
        self.watched = [one for one in self.watched if not one.gradients]


def backward_happened(ride: Ride) -> bool:
    """False for a forward made without a backward, say to watch the accuracy."""
    filled = [*(probe for one in ride.probes for probe in one.values()), *ride.generic.values()]
    return not filled or any(one.grad is not None for one in filled)


def scaled(moments: Moments, scale: float) -> Moments:
    """As if all output gradients had been `scale` times larger."""
    if scale == 1.0:
        return moments
    statistics = {
        key: {name: sums * scale ** power_of_gradient(name) for name, sums in one.items()}
        for key, one in moments.statistics.items()
    }
    return Moments(statistics, moments.cases)
