"""What a batch leaves behind: sums over its cases, or the promise of them while the backward is still to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.vectors import split
from kfac_fx.passes.ir import Registration
from kfac_fx.statistics.row_sums import whole

Key = tuple[str, ...]
POWER_OF_GRADIENT = {
    "count": 0,
    "A": 0,
    "A_diag": 0,
    "A1": 0,
    "G": 2,
    "G1": 2,
    "pairs": 0,
    "G_diag": 2,
    "square": 2,
    "outer": 2,
    "per_case": 1,
    "gradient": 1,
}  # of the output gradient


def power_of_gradient(statistic: str) -> int:
    return POWER_OF_GRADIENT[whole(statistic)]


@dataclass
class Moments:
    """Statistics of one batch, summed over its cases.

    statistics: by the registrations' parameters; for a generic one {"gradient": flat gradient of the loss's sum}.
    cases: how many terms the loss's mean has; what the statistics are to be divided by.
    gradients: of the parameters by name, summed over sources, if asked for.
    """

    statistics: dict[Key, dict[str, Tensor]]
    cases: int
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Ride:
    """Statistics that the user's own backward will leave in `probes`."""

    probes: list[dict[str, Tensor]]
    registrations: tuple[Registration, ...]
    generic: Mapping[str, Tensor]  # views of the generic parameters, which keep this forward's gradient
    cases: int
    backwards: Counter[Key] = field(default_factory=Counter)  # that reached the probes of a registration

    def __post_init__(self) -> None:
        for one, probes in zip(self.registrations, self.probes, strict=True):
            for probe in list(probes.values())[:1]:
                if probe.requires_grad:
                    probe.register_hook(partial(counted, self.backwards, one.parameters))

    def check_backwards(self) -> None:
        """Raises RuntimeError after a second backward of this forward, for squares of gradients do not add up."""
        if twice := [", ".join(key) for key, times in self.backwards.items() if times > 1]:
            raise RuntimeError(
                "the empirical Fisher is recorded in one backward of a forward, and there were "
                f"{max(self.backwards.values())} of this one. They reached {'; '.join(twice)}.\nAdd the losses up and "
                'call backward once, or record in a pass of its own: estimation_mode="gradients".'
            )

    def moments(self, reduction: str = "mean", cases: int | None = None) -> Moments:
        """What the backward recorded, for the gradient of the sum over cases whatever the user's `reduction` was:
        a gradient that is `cases` times too small gives second moments that are `cases`² times too small.

        cases: of the user's mean, where there are more in it than those of this forward.
        """
        self.check_backwards()
        scale = float(self.cases if cases is None else cases) if reduction == "mean" else 1.0
        statistics: dict[Key, dict[str, Tensor]] = {}
        for one, probes in zip(self.registrations, self.probes, strict=True):
            if one.generic:
                whole = {name: self.gradient(name) for name in one.owners}
                statistics[one.parameters] = {"gradient": flat(list(split(whole, [one]).values())) * scale}
                continue
            sums = {
                name: probe.grad if probe.grad is not None else torch.zeros_like(probe)
                for name, probe in probes.items()
            }
            statistics[one.parameters] = {
                name: value * scale**power if (power := power_of_gradient(name)) else value
                for name, value in sums.items()
            }
        return Moments(statistics, self.cases)

    def gradient(self, name: str) -> Tensor:
        view = self.generic[name]
        return torch.zeros_like(view) if view.grad is None else dense(view.grad)


def counted(backwards: Counter[Key], key: Key, gradient: Tensor) -> None:
    backwards[key] += 1


def flat(gradients: Sequence[Tensor]) -> Tensor:
    """One vector, in float32 at least, as all statistics are."""
    vector = torch.cat([one.reshape(-1) for one in gradients])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))
