"""The statistics of one batch: `Moments`, or a `PendingMoments` while the user's backward is still to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.vectors import split
from kfac_fx.passes.approximations import PER_CASE, SQUARE, Approximation, Statistic, named
from kfac_fx.passes.ir import Registration

Key = tuple[str, ...]  # the names of the parameters of a registration


def with_twins(registration: Registration, statistics: Iterable[Statistic]) -> list[Statistic]:
    """The statistics of a registration, and those that its transposed uses sum apart."""
    statistics = list(statistics)
    if not any(use.transposed for use in registration.uses):
        return statistics
    return statistics + [statistic.twin for statistic in statistics if statistic.twin is not None]


def without_twins(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums over all uses, once all of them are of one loss."""
    total = {name: value for name, value in sums.items() if not named(name).transposed}
    for name, value in sums.items():
        if (plain := named(name).kind_of) is not None and named(name).transposed:
            total[plain.name] = total[plain.name] + value
    return total


@dataclass
class Moments:
    """Statistics of one batch, summed over its cases.

    Attributes:
        statistics: by the parameters of the registrations; of a generic one {"gradient": the flat gradient of the sum
            of the losses}.
        cases: the number of terms in the mean of the loss; the statistics will be divided by it.
        gradients: of the parameters by name, summed over sources, if they were requested.
        frozen: the parameters that were frozen. Registrations that have no others have no statistics.
        only: the registrations whose statistics are due; None: all.
    """

    statistics: dict[Key, dict[str, Tensor]]
    cases: int | Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    only: frozenset[Key] | None = None


@dataclass
class PendingMoments:
    """The statistics that the user's own backward will leave in the `.grad` of probes.

    Attributes:
        probes: of every registration, by the name of the statistic.
        generic: views of the generic parameters, which hold the gradient of this forward alone.
        cases: the number of cases of this forward.
        frozen, only: see `Moments`.
        backwards: how often a backward reached the probes of a registration.
    """

    probes: list[dict[str, Tensor]]
    registrations: tuple[Registration, ...]
    generic: Mapping[str, Tensor]
    cases: int | Tensor
    frozen: frozenset[str] = frozenset()
    only: frozenset[Key] | None = None
    backwards: Counter[Key] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for registration, probes in zip(self.registrations, self.probes, strict=True):
            for probe in list(probes.values())[:1]:
                if probe.requires_grad:
                    probe.register_hook(partial(count_backward, self.backwards, registration.parameters))

    def check_backwards(self) -> None:
        """Raises RuntimeError after a second backward of this forward, because squares of gradients do not add up."""
        if twice := [", ".join(key) for key, times in self.backwards.items() if times > 1]:
            raise RuntimeError(
                "the empirical Fisher is recorded in one backward of a forward, and there were "
                f"{max(self.backwards.values())} of this one. They reached {'; '.join(twice)}.\nAdd the losses up and "
                'call backward once, or record in a pass of its own: estimation_mode="gradients".'
            )

    def moments(self, reduction: str = "mean", cases: int | Tensor | None = None, loss_scale: float = 1.0) -> Moments:
        """The recorded statistics, for the gradient of the sum over cases. To be called once, as the recorded tensors
        are scaled in place. Raises RuntimeError as `check_backwards`.

        reduction: of the user's loss; the gradient of a mean is N times smaller, so second moments are multiplied by
            N². cases: the N of the user's mean, if it contains more cases than this forward. loss_scale: the factor
            of the loss in the backward, as that of a GradScaler.
        """
        self.check_backwards()
        scale: Any = 1.0 if reduction != "mean" else self.cases if cases is None else cases
        scale = scale if loss_scale == 1.0 else scale / loss_scale
        statistics: dict[Key, dict[str, Tensor]] = {}
        for registration, probes in zip(self.registrations, self.probes, strict=True):
            if registration.generic:
                gradients = {name: self.gradient(name) for name in registration.owners}
                pieces = list(split(gradients, [registration]).values())
                statistics[registration.parameters] = {"gradient": flat(pieces) * scale}
                continue
            sums = {
                name: probe.grad if probe.grad is not None else torch.zeros_like(probe)
                for name, probe in probes.items()
            }
            statistics[registration.parameters] = without_twins(
                {
                    name: value.mul_(scale**power) if (power := named(name).power) else value
                    for name, value in sums.items()
                }
            )
        return Moments(statistics, self.cases, frozen=self.frozen, only=self.only)

    def gradient(self, name: str) -> Tensor:
        view = self.generic[name]
        return torch.zeros_like(view) if view.grad is None else dense(view.grad)


def count_backward(backwards: Counter[Key], key: Key, gradient: Tensor) -> None:
    backwards[key] += 1


def flat(gradients: Sequence[Tensor]) -> Tensor:
    """The gradients as one vector, in float32 at least, as all statistics are."""
    vector = torch.cat([gradient.reshape(-1) for gradient in gradients])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def additive(approximation: Approximation, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moments of one block in a form that adds up over micro-batches and processes: per-case gradients become the
    statistic of the factor F. Gradients of generic parameters stay, because they are squared when the batch is
    complete.
    """
    sums = {named(name).whole.name: moment for name, moment in moments.items() if name != PER_CASE.name}
    if SQUARE.name in sums:
        sums[SQUARE.name] = sums[SQUARE.name].flatten()  # as it is when it comes from per-case gradients
    if PER_CASE.name in moments:
        p, side = moments[PER_CASE.name].flatten(0, -2), approximation.left
        sums[side.statistic.name] = p.square().sum(0) if side.diagonal else p.mT @ p
    return sums
