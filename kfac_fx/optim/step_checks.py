"""Checks of the steps of "adaptive" and "eigen_moments" with the loss h of a batch (`kfac_fx.optim.batch_loss`).

A check returns to the parameters of the last check if h, on the present batch, has since then risen by more than is
tolerated. The averaged gradient is forgotten, and the steps become shorter.

All decisions are made on the device. All state is in `StepState` and in the optimizer's state by parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.sharded import in_place_of
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.batch_loss import BatchLoss, Values
from kfac_fx.optim.groups import FlatParameters, Proposal

RISE = 0.5
RISE_AGAIN = 9.0  # without noise between batches, momentum makes the loss rise threefold and fall again
SAME = 1e-5  # of itself, by which h of the same batch may differ, for rounding
COARSE = 1e-6  # of a rounding in which what the forward returned may differ from what the graph computes


@dataclass
class StepSize:
    """The step size between checks, 0-dim tensors that are written in place."""

    ratio: Tensor  # r, by which steps are shortened; 0 before the first check
    norm: Tensor  # of "adaptive", α² <m, d> at the last check; infinity before
    value: Tensor  # h before the step of the last check, infinity before
    weight: Tensor  # of "adaptive", the sum of the weights of the averaged gradients
    calm: Tensor  # of "eigen_moments", whether the last check found the step far below its bound; a bool

    @staticmethod
    def first(scalar: Tensor) -> StepSize:
        """scalar: a zero."""
        infinity = torch.full_like(scalar, torch.inf)
        return StepSize(scalar.clone(), infinity, infinity.clone(), scalar.clone(), scalar.bool())

    def store(self, ok: Tensor, **scalars: Tensor) -> None:
        """Overwrite these scalars where `ok` is true."""
        for name, value in scalars.items():
            old = getattr(self, name)
            old.copy_(torch.where(ok, value, old))


@dataclass
class Check:
    """A check of one step: the loss of its batch, and its values at the parameters before the step."""

    batch: BatchLoss
    parameters: Tensors  # of the whole model
    before: list[Values]  # up to rounding
    value: Tensor  # of the loss there
    steps: int  # since the last check

    @staticmethod
    def of(batch: BatchLoss, parameters: Tensors, steps: int) -> Check:
        coarse = any(forward.rounding > COARSE for forward in batch.forwards)
        repeated = not coarse and batch.net.repeats_recordings
        before = batch.returned(parameters) if repeated else batch.at(parameters)
        return Check(batch, parameters, before, batch.value(before), steps)

    def values_at(self, there: Tensors) -> list[Values]:
        """The values at other parameters, or other shards of them, by name."""
        places = {name: in_place_of(self.parameters[name], tensor) for name, tensor in there.items()}
        return self.batch.at({**self.parameters, **places})


def tolerated(value: Tensor, again: Tensor | None = None) -> Tensor:
    """The rise of a loss of this value that is left alone.

    again: 0-dim, whether noise between batches is no part of the rise; None counts as true.
    """
    of_same = torch.minimum(RISE * value.abs().clamp(min=1.0), RISE_AGAIN * value.abs())
    return of_same if again is None else torch.where(again, of_same, RISE * value.abs())


def has_risen(size: StepSize, last: Tensors, check: Check, noisy: bool, finite: Tensor) -> Tensor:
    """Whether the loss has risen from its value at `last`, the parameters of the last check by name; 0-dim.

    Args:
        noisy: whether the step's length is that of a norm, so that the loss of another batch may rise as much as that
            of the same one.
        finite: whether the gradient is.
    """
    there = check.values_at(last)
    rise = -check.batch.change(check.before, there)
    was = check.value - rise
    # Where the batch or the user's loss is not finite, going back is no remedy.
    lost = ~check.batch.finite(check.before) | (finite & ~rise.isfinite())
    again = None if noisy else (was - size.value).abs() <= SAME * was.abs()
    return (rise > tolerated(was, again)) | (lost & check.batch.finite(there))


def revert(size: StepSize, flat: FlatParameters, check: Check, noisy: bool, finite: Tensor) -> Tensor:
    """Go back to the last check if the loss has risen since. Returns whether that happened, 0-dim.

    noisy, finite: as of `has_risen`.
    """
    last = {n: part.to(flat.copies[n].dtype) for n, part in flat.everywhere(flat.state["checkpoint"]).items()}
    risen = has_risen(size, last, check, noisy, finite)
    go_back(flat, last, risen)
    for name in ("velocity", "step"):
        if name in flat.state:
            flat.state[name].masked_fill_(risen, 0)
    size.weight.masked_fill_(risen, 0)
    size.ratio.mul_(torch.where(risen, 2.0, 1.0))
    return risen


def go_back(flat: FlatParameters, there: Tensors, where: Tensor) -> None:
    """Return to other parameters, by name, where `where` is true."""
    for name, copy in flat.copies.items():
        copy.copy_(torch.where(where, there[name], copy))


def take(
    flat: FlatParameters, move: Proposal, check: Check, before: list[Values], linear: Tensor, rise: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """Commit a move where `ok` is true, and go back where the loss rises by more than `rise`.

    before: at the parameters before the step. linear: the change by the slope, for a batch that does not know it.
    Returns (whether the move was kept, the change of the loss), 0-dim.
    """
    flat.state["checkpoint"].copy_(torch.where(ok, flat.flat.joined(flat.parameters), flat.state["checkpoint"]))
    here = {name: copy.clone() for name, copy in flat.copies.items()}
    flat.commit(move, ok)
    change = check.batch.change(before, check.values_at(flat.copies))
    change = change if check.batch.observed else change + linear
    kept = ok & ~(change > rise) & change.isfinite()
    go_back(flat, here, ok & ~kept)
    return kept, change
