"""The momentum type "adaptive": K-FAC along an averaged gradient, with a step size that is checked now and then.

    m = the mean of the gradients with weights β^age        d = P m, P the damped inverse
    θ <- θ - lr α d                                         α = min(1, 1 / r)

A *check*, at the first three steps and then every `damping_adaptation_interval` steps, computes on the step's batch,
with its exact Fisher F (one product with the Jacobian) and its loss h (`BatchLoss`):

    r <- max(ρ, √(r ρ)) with ρ = <d, (F + λ I) d> / <m, d>    1 / ρ is the best step along d (Martens & Grosse 2015,
                                                            section 6.4); r follows at once where it grows
    λ <- λ ω^steps or λ / ω^steps                           by the change of h over the predicted change (section 6.5);
                                                            λ falls only while α > `LEAST_STEP`: from there on less
                                                            damping is only a shorter step
    θ <- θ at the last check                                if h has risen by more than `RISE` of itself since then, on
                                                            the present batch: m is forgotten, r and λ grow. If it is
                                                            the same batch again: by more than `RISE` max(1, h), or
                                                            `RISE_AGAIN` h if that is less
    θ <- θ before the step                                  if h has risen by more than `RISE` of itself in the step

Between two checks the Fisher norm of a step, as the blocks estimate it, is at most `GROWTH` times that of the last
check, so that a wrong step size cannot run away. At a check the squared exact Fisher norm is at most max(1, h).

All decisions are made on the device. All state is in `StepState` and in the optimizer's state by parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.sharded import in_place_of
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.batch_loss import BatchLoss, Values
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.optim.rules import DampingRule, Product

RISE = 0.5
RISE_AGAIN = 9.0  # without noise between batches, momentum makes the loss rise threefold and fall again
SAME = 1e-5  # of itself, by which h of the same batch may differ, for rounding
GROWTH = 1.5
LEAST_STEP = 0.05
COARSE = 1e-6  # of a rounding in which what the forward returned may differ from what the graph computes


@dataclass
class StepSize:
    """The state of "adaptive" between steps, 0-dim tensors that are written in place."""

    ratio: Tensor  # r; 0 before the first check
    norm: Tensor  # α² <m, d> at the last check; infinity before
    value: Tensor  # h before the step of the last check, infinity before
    weight: Tensor  # the sum of the weights of the averaged gradients

    @staticmethod
    def first(scalar: Tensor) -> StepSize:
        """scalar: a zero."""
        infinity = torch.full_like(scalar, torch.inf)
        return StepSize(scalar.clone(), infinity, infinity.clone(), scalar.clone())


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


def revert(size: StepSize, damping: Tensor, flat: FlatParameters, check: Check, omega: float, finite: Tensor) -> Tensor:
    """Go back to the last check if the loss has risen since. Returns whether that happened, 0-dim.

    finite: whether the gradient is.
    """
    last = {n: part.to(flat.copies[n].dtype) for n, part in flat.everywhere(flat.state["checkpoint"]).items()}
    there = check.values_at(last)
    rise = -check.batch.change(check.before, there)
    was = check.value - rise
    # Where the batch or the user's loss is not finite, going back is no remedy.
    lost = ~check.batch.finite(check.before) | (finite & ~rise.isfinite())
    again = (was - size.value).abs() <= SAME * was.abs()
    of_same = torch.minimum(RISE * was.abs().clamp(min=1.0), RISE_AGAIN * was.abs())
    risen = (rise > torch.where(again, of_same, RISE * was.abs())) | (lost & check.batch.finite(there))
    go_back(flat, last, risen)
    flat.state["velocity"].masked_fill_(risen, 0)
    size.weight.masked_fill_(risen, 0)
    size.ratio.mul_(torch.where(risen, 2.0, 1.0))
    damping.mul_(torch.where(risen, omega ** (-2 * check.steps), 1.0))
    return risen


def move(
    size: StepSize,
    damping: Tensor,
    rule: DampingRule,
    decay: float,
    flat: FlatParameters,
    precondition: Product,
    ok: Tensor,
    check: Check | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A step. decay: β. Returns (whether it was made, the predicted change, actual over predicted change): NaN without
    a check."""
    velocity = decay * flat.state["velocity"] + (1 - decay) * flat.g
    weight = decay * size.weight + (1 - decay)
    average = velocity / weight
    direction = precondition(average)
    slope = flat.inner(average, direction).clamp(min=torch.finfo(weight.dtype).tiny)
    nothing = torch.full_like(slope, torch.nan)
    if check is None:
        step = (1 / size.ratio).clamp(max=1.0)
        step = step * (GROWTH * (size.norm / (step.square() * slope)).sqrt()).clamp(max=1.0)
        displacement = flat.displacement(step * direction)
        ok = ok & flat.is_finite(displacement)
        commit(flat, displacement, ok)
        store(size, flat, ok, velocity, {"weight": weight})
        return ok, nothing, nothing
    fisher, of_outputs, before = check.batch.along(check.parameters, flat.everywhere(direction))
    now = (fisher + damping * flat.inner(direction, direction)) / slope
    ratio = torch.maximum(now, (size.ratio * now).sqrt())
    step = (1 / ratio).clamp(max=1.0)
    longest = check.value.clamp(min=1.0)
    step = step * (longest / (step.square() * fisher)).sqrt().clamp(max=1.0)
    displacement = flat.displacement(step * direction)
    ok = ok & flat.is_finite(displacement) & fisher.isfinite()
    if flat.one_scale:
        curvature, linear = (flat.lr * step).square() * fisher, -flat.lr * step * of_outputs
    else:  # weight decay, or groups with learning rates of their own: the move is no multiple of the direction
        curvature, linear, _ = check.batch.along(check.parameters, flat.everywhere(displacement))
    linear = linear if check.batch.observed else flat.inner(flat.g, displacement)
    predicted = linear + 0.5 * curvature
    flat.state["checkpoint"].copy_(torch.where(ok, flat.flat.joined(flat.parameters), flat.state["checkpoint"]))
    here = {name: copy.clone() for name, copy in flat.copies.items()}
    commit(flat, displacement, ok)
    change = check.batch.change(before, check.values_at(flat.copies))
    change = change if check.batch.observed else change + linear
    kept = ok & ~(change > RISE * check.value.abs()) & change.isfinite()
    go_back(flat, here, ok & ~kept)
    rho = change / predicted
    falls = torch.where(predicted < 0, rho > rule.decrease_above, change < 0) & (1 / ratio > LEAST_STEP)
    grows = ~falls & ~(rho >= rule.increase_below) & ~((predicted >= 0) & (change < 0))
    factor = rule.decay**check.steps
    adapted = damping * torch.where(falls, factor, torch.where(grows, 1 / factor, 1.0))
    damping.copy_(torch.where(ok, adapted.clamp(min=rule.min_damping), damping))
    new = {
        "ratio": torch.where(kept, ratio, 2 * ratio),
        "norm": step.square() * slope,
        "value": check.value,
        "weight": weight,
    }
    store(size, flat, ok, velocity, new)
    return kept, predicted, rho


def commit(flat: FlatParameters, displacement: Tensor, ok: Tensor) -> None:
    flat.add(torch.where(ok, displacement, 0))


def go_back(flat: FlatParameters, there: Tensors, where: Tensor) -> None:
    """Return to other parameters, by name, where `where` is true."""
    for name, copy in flat.copies.items():
        copy.copy_(torch.where(where, there[name], copy))


def store(size: StepSize, flat: FlatParameters, ok: Tensor, velocity: Tensor, scalars: Tensors) -> None:
    torch.where(ok, velocity, flat.state["velocity"], out=flat.state["velocity"])
    for name, value in scalars.items():
        old = getattr(size, name)
        old.copy_(torch.where(ok, value, old))
