"""The steps of "adaptive" and "eigen_moments": their length is checked now and then, and bad ones are undone.

A *check*, every `damping_adaptation_interval` steps and before that after 0, 1, 2, 5, 10, 20, 50, ... steps, computes
on the step's batch, with its exact Fisher F and its loss h (`kfac_fx.optim.batch_loss`):

    r, by which steps are divided until the next check
    θ <- θ at the last check    if h has risen by more than is tolerated since then, on the present batch: the averaged
                                gradient m is forgotten, and r grows
    θ <- θ before the step      if h has risen by more than is tolerated in the step

All decisions are made on the device. All state is in `StepState` and in the optimizer's state by parameter.

**"adaptive"**, K-FAC along an averaged gradient:

    m = the mean of the gradients with weights β^age        d = P m, P the damped inverse
    θ <- θ - lr α d                                         α = min(1, 1 / r)
    r <- max(ρ, √(r ρ)) with ρ = <d, (F + λ I) d> / <m, d>  1 / ρ is the best step along d (Martens & Grosse 2015,
                                                            section 6.4); r follows at once where it grows
    λ <- λ ω^steps or λ / ω^steps                           by the change of h over the predicted change (section 6.5);
                                                            λ falls only while α > `LEAST_STEP`: from there on less
                                                            damping is only a shorter step. λ grows where steps are
                                                            undone

A rise by `RISE` of h is tolerated; since the last check, if it was on the same batch, by `RISE` max(1, h), or by
`RISE_AGAIN` h if that is less. Between two checks the Fisher norm of a step, as the blocks estimate it, is at most
`GROWTH` times that of the last check, so that a wrong step size cannot run away. At a check the squared exact Fisher
norm is at most max(1, h).

**"eigen_moments"**, steps as long as Adam's (`kfac_fx.optim.eigen_moments`), scaled by the exact Fisher:

    θ <- θ - lr a d / r         d: the step in the eigenbasis; a = `RATE`
    r <- max(t, √(r t), 0.95 min(1, r))
    t = max(lr ρ, min(1, max(√ρ, 1/3)))
                                ρ = a √(<d, F d> / (c max(1, h))), with c the `norm_constraint`. The squared Fisher norm
                                of the step is twice the Kullback-Leibler divergence between the predictions before and
                                after it. It is at most c max(1, h), as r >= lr ρ. A step that is far below this bound
                                gets longer, half of the way to it on a logarithmic scale, and at most three times; this
                                does not depend on lr, so that it leaves a schedule alone

<d, F d> comes from the outputs at the parameters and a small part of the step away, which takes one forward. The
product with the Jacobian costs four. It takes the place of this quotient in "adaptive", which divides by <d, F d>, and
where a quotient is no measure of the batch (`against_quotients`). All forwards of a check compute in the precision of
the parameters (`kfac_fx.optim.curvature`). On an accelerator they take a part of the batch
(`kfac_fx.optim.batch_loss`).

The mean gradient n in d has Nesterov's momentum, with more weight on the newest gradient, where neither of two signs
speaks against it. n is the plain mean m̂

    if the last two checks had the same batch     gradients without noise gain from a longer mean
    if lr ρ >= 3/4 r at the last check            the curvature and not the noise limits the steps, as in a deep network
                                                  without skips: the bound allows longer ones along a steadier d

A rise by `RISE` max(1, h) is tolerated, or by `RISE_AGAIN` h if that is less. A check is *calm* if it undid nothing and
lr ρ <= 0.4 r, so that the squared norm is below a sixth of its bound. The check after a calm one may come later
(`kfac_fx.optim.schedule`).

Adam's rate alone suits many networks, but not deep ones without skips and norms: there the steps of all layers add up,
the loss is far from its quadratic model, and the bound is what makes training possible. The step along d that minimizes
the quadratic model is no substitute: it is several times too short, because directions of large curvature, along which
such steps may oscillate, decide it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import copy_if_
from kfac_fx.linalg.processes import in_place_of
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.batch_loss import BatchLoss, Values
from kfac_fx.optim.curvature import COARSE
from kfac_fx.optim.groups import FlatParameters, Proposal
from kfac_fx.optim.rules import DampingRule, Product
from kfac_fx.passes.graphs.labels import gradient_stop
from kfac_fx.passes.users_code import where

RISE = 0.5
RISE_AGAIN = 9.0  # without noise between batches, momentum makes the loss rise threefold and fall again
SAME = 1e-5  # of itself, by which h of the same batch may differ, for rounding
LEAST_ROUNDING = torch.finfo(torch.float64).eps


@dataclass
class StepSize:
    """The step size between checks, 0-dim tensors that are written in place."""

    ratio: Tensor  # r, by which steps are shortened; 0 before the first check
    norm: Tensor  # of "adaptive", α² <m, d> at the last check; infinity before
    value: Tensor  # h before the step of the last check, infinity before
    weight: Tensor  # of "adaptive", the sum of the weights of the averaged gradients
    calm: Tensor  # of "eigen_moments", whether the last check found the step far below its bound; a bool
    same: Tensor  # whether the batch of the last check was that of the check before it; a bool
    near: Tensor  # of "eigen_moments", whether the step of the last check was near its bound; a bool

    @staticmethod
    def first(scalar: Tensor) -> StepSize:
        """scalar: a zero."""
        infinity, no = torch.full_like(scalar, torch.inf), scalar.bool()
        return StepSize(scalar.clone(), infinity, infinity.clone(), scalar.clone(), no, no.clone(), no.clone())

    @property
    def divisor(self) -> Tensor:
        """r, and 1 before the first check."""
        return torch.where(self.ratio > 0, self.ratio, 1.0)

    @property
    def nesterov(self) -> Tensor:
        """Whether the mean gradient of "eigen_moments" has Nesterov's momentum."""
        return ~(self.same | self.near)

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
    quotient_step: float | None = (
        None  # of a difference quotient; None where a product with the Jacobian takes its place
    )

    @staticmethod
    def of(batch: BatchLoss, parameters: Tensors, steps: int, by_quotient: bool = False) -> Check:
        """by_quotient: whether a difference quotient takes the place of a product with the Jacobian."""
        rounding = batch.rounding
        repeated = rounding <= COARSE and batch.as_returned and batch.net.repeats_recordings
        before = batch.returned(parameters) if repeated else batch.at(parameters)
        step = max(rounding, LEAST_ROUNDING) ** (1 / 3) if by_quotient else None
        return Check(batch, parameters, before, batch.value(before), steps, step)

    def values_at(self, there: Tensors) -> list[Values]:
        """The values at other parameters, or other shards of them, by name."""
        places = {name: in_place_of(self.parameters[name], tensor) for name, tensor in there.items()}
        return self.batch.at({**self.parameters, **places})


def tolerated(value: Tensor, same: Tensor | None = None) -> Tensor:
    """The rise of a loss of this value that is left alone.

    same: 0-dim, whether noise between batches is no part of the rise; None counts as true.
    """
    of_same = torch.minimum(RISE * value.abs().clamp(min=1.0), RISE_AGAIN * value.abs())
    return of_same if same is None else torch.where(same, of_same, RISE * value.abs())


def has_risen(size: StepSize, last: Tensors, check: Check, noisy: bool, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the loss has risen from its value at `last`, the parameters of the last check by name, and whether the
    batch is the same as there; 0-dim.

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
    same = (was - size.value).abs() <= SAME * was.abs()
    return (rise > tolerated(was, None if noisy else same)) | (lost & check.batch.finite(there)), same


def revert(size: StepSize, flat: FlatParameters, check: Check, noisy: bool, finite: Tensor) -> Tensor:
    """Go back to the last check if the loss has risen since. Returns whether that happened, 0-dim.

    noisy, finite: as of `has_risen`.
    """
    last = {n: part.to(flat.copies[n].dtype) for n, part in flat.everywhere(flat.state["checkpoint"]).items()}
    risen, same = has_risen(size, last, check, noisy, finite)
    size.same.copy_(same)
    go_back(flat, last, risen)
    if "velocity" in flat.state:
        flat.state["velocity"].masked_fill_(risen, 0)
    size.weight.masked_fill_(risen, 0)
    size.ratio.mul_(torch.where(risen, 2.0, 1.0))
    return risen


def go_back(flat: FlatParameters, there: Tensors, where: Tensor) -> None:
    """Return to other parameters, by name, where `where` is true."""
    for name, copy in flat.copies.items():
        copy_if_(where, copy, there[name])


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


# --- "adaptive" -------------------------------------------------------------------------------------------------------

GROWTH = 1.5
LEAST_STEP = 0.05


def more_damping(damping: Tensor, rule: DampingRule, check: Check, risen: Tensor) -> None:
    """Raise λ where the steps since the last check were undone."""
    damping.mul_(torch.where(risen, rule.decay ** (-2 * check.steps), 1.0))


def move_adaptive(
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


# --- "eigen_moments" --------------------------------------------------------------------------------------------------

RATE = 0.02
STRETCH = 3.0  # the largest multiple of Adam's step
CALM, NEAR = 0.4, 0.75  # of the bound, for the norm of a step
FALL = 0.95  # of r below 1, from one check to the next: a loss falls lower if its first steps are short


def along_move(check: Check, flat: FlatParameters, move: Tensor) -> tuple[Tensor, Tensor, list[Values]]:
    """(<δ, F δ> of a move, the change of the loss by its slope, the values before it).

    Outputs change by a small part of themselves in a step, so a difference quotient with the cube root of the rounding
    errors loses less to these than to the curvature. The probe is as long at every lr.
    """
    if check.quotient_step is None:
        return check.batch.along(check.parameters, flat.everywhere(move))
    step = check.quotient_step / flat.largest_lr.clamp(min=torch.finfo(move.dtype).tiny)
    probe = {name: flat.copies[name] + part for name, part in flat.everywhere(move * step).items()}
    return (*check.batch.between(check.before, check.values_at(probe), step), check.before)


def against_quotients(batch: BatchLoss) -> str | None:
    """Why a difference quotient is no measure of this batch; None if it is one.

    In a coarse precision a small part of a step is lost in the rounding of the parameters. Autocast around the user's
    forward and TF32 do not count, because the forwards of a check run without them. Where the outputs jump, as behind
    the choice of an expert or in quantized networks, a few jumps in a small part of a step look like a steep slope.
    """
    if batch.rounding > COARSE:
        return f"parameters and products are rounded by up to {batch.rounding:.0e} of themselves"
    if any(not forward.recorder.whole for forward in batch.forwards):
        return "no single graph holds the model, and what Python does between its graphs may jump"
    stops = (gradient_stop(forward.recorder.program) for forward in batch.forwards)
    stop = next((node for node in stops if node is not None), None)
    return None if stop is None else f"{where(stop)} has no gradient, so it may jump where parameters change"


def move_bounded(
    size: StepSize, flat: FlatParameters, update: Tensor, bound: float, ok: Tensor, check: Check | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the step along an update at `RATE`, divided by r.

    Args:
        update: Δ, [P].
        bound: c.

    Returns (whether it was made, the predicted change, actual over predicted change): NaN without a check.
    """
    last = size.divisor
    if check is None:
        move = flat.displacement(update, RATE / last)
        ok = ok & flat.is_finite(move)
        flat.commit(Proposal(move, {}), ok)
        nothing = torch.full_like(size.ratio, torch.nan)
        return ok, nothing, nothing
    proposed = flat.displacement(update, RATE)
    fisher, slope, before = along_move(check, flat, proposed)
    longest = bound * torch.where(check.value.isfinite(), check.value, 1.0).clamp(min=1.0)
    norm = (fisher / longest).sqrt()
    ratio = next_divisor(last, norm, flat.largest_lr)
    move = proposed / ratio
    ok = ok & flat.is_finite(move) & fisher.isfinite()
    linear = slope / ratio if check.batch.observed else flat.inner(flat.g, move)
    predicted = linear + 0.5 * fisher / ratio.square()
    kept, change = take(flat, Proposal(move, {}), check, before, linear, tolerated(check.value), ok)
    size.store(ok, ratio=torch.where(kept, ratio, 2 * ratio), value=check.value)
    size.calm.copy_(kept & (norm <= CALM * ratio))
    size.near.copy_(~(norm < NEAR * ratio))
    return kept, predicted, change / predicted


def next_divisor(last: Tensor, norm: Tensor, lr: Tensor) -> Tensor:
    """r; all are 0-dim. last: r at the last check. norm: lr ρ."""
    rho = norm / lr.clamp(min=torch.finfo(norm.dtype).tiny)
    target = torch.maximum(norm, rho.sqrt().clamp(min=1 / STRETCH, max=1.0))
    return torch.stack([target, (last * target).sqrt(), FALL * last.clamp(max=1.0)]).amax(0)
