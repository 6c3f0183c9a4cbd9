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

import torch
from torch import Tensor

from kfac_fx.optim.groups import FlatParameters, Proposal
from kfac_fx.optim.rules import DampingRule, Product
from kfac_fx.optim.step_checks import RISE, Check, StepSize, take

GROWTH = 1.5
LEAST_STEP = 0.05


def more_damping(damping: Tensor, rule: DampingRule, check: Check, risen: Tensor) -> None:
    """Raise λ where the steps since the last check were undone."""
    damping.mul_(torch.where(risen, rule.decay ** (-2 * check.steps), 1.0))


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
        flat.commit(Proposal(displacement, {"velocity": velocity}), ok)
        size.store(ok, weight=weight)
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
    proposal = Proposal(displacement, {"velocity": velocity})
    kept, change = take(flat, proposal, check, before, linear, RISE * check.value.abs(), ok)
    rho = change / predicted
    falls = torch.where(predicted < 0, rho > rule.decrease_above, change < 0) & (1 / ratio > LEAST_STEP)
    grows = ~falls & ~(rho >= rule.increase_below) & ~((predicted >= 0) & (change < 0))
    factor = rule.decay**check.steps
    adapted = damping * torch.where(falls, factor, torch.where(grows, 1 / factor, 1.0))
    damping.copy_(torch.where(ok, adapted.clamp(min=rule.min_damping), damping))
    ratio = torch.where(kept, ratio, 2 * ratio)
    size.store(ok, ratio=ratio, norm=step.square() * slope, value=check.value, weight=weight)
    return kept, predicted, rho
