"""Exact steps: where the batch repeats, a check may minimize the quadratic model of the batch along three directions.

    d₁ = (F̂ + λ I)⁻¹ g      in the eigenbases, with F̂ = Q Λ Qᵀ of the blocks
    d₂                      the step that "eigen_moments" would make
    d₃                      the last step
    δ = min(1, lr) Σ sᵢ dᵢ / |dᵢ|          s minimizes <g, δ> + ½ <δ, (F + λ I) δ> with the exact Fisher F of the batch

With d₁ and d₃ alone it is the step of Martens & Grosse 2015, section 7. A batch that repeats has no noise, so the model
of its loss tells how far to go along directions that a mean over steps and a rate do not tell apart. Full batches are
such batches: equations on fixed points, small data sets, the first look at a new network. One exact step costs as much
as `WORTH` or more plain ones, so it is made where the model falls by `WORTH` times as much as in the bounded step. Then
the next step has a check, too; otherwise checks come as they do in any training.

    λ <- ω λ     if ρ > 3/4        Martens & Grosse 2015, section 6.5; ρ is the change of the loss in the step, divided
    λ <- λ / ω   if ρ < 1/4        by the one that the model predicts
    λ <- λ / ω⁴  if the step was undone, unless R limits the step and may still fall
    R <- 2 R     if ρ is 1 up to a quarter and R limits the step
    R <- R / 2   if ρ < 1/2, or the step was undone

The first λ is a part of the curvature along the bounded step. The squared Fisher norm of a step is at most R² times the
bound of "eigen_moments".

**Phases.** The fall in one step does not tell what steps lead to: the mean over steps and m make bounded steps better
than each of them looks. So phases of both kinds take turns, and the falls of the loss in them are compared. A long
phase is followed by a short one of the other kind. The next long one, twice as long, is of exact steps if in these the
logarithm of the loss fell by `COST` times as much in a step. A check that finds that bounded steps made the loss of the
batch rise undoes them, and ends their phase. So does a bounded step that is undone in its own check.

**Bounded steps where the loss is small.** The bound of "eigen_moments" is no part of the loss, so that noise does not
make steps short. Where the batch repeats there is no noise, and steps of this length made a loss of 1e-6 rise to 1e-2
before the next check undid them. So where `SMALL` h is below 1, the bound of a bounded step is that part of the usual
one. Behind a step that made the loss rise, and behind steps that were undone, the next step has a check, too.

**The batch repeats** if two checks in consecutive steps have the same one. Two checks have the same batch if its loss
at the parameters of the earlier one has the value that it had there; or if the outputs have the norm that they had, and
the loss has changed by what the earlier check predicted, because the value is not known of every loss. Outputs that are
the same for all cases tell no batch from another. In consecutive steps no forward is needed for this: if the loss at
the present parameters has the value that the earlier check found behind its step, then the loss has changed since by
what it changed in that step. Where a batch comes back without being the next one, or where the batches of a training
begin to repeat, the step after a check has a check, too, to find that out. After `PROBES` of these have found another
batch, no more are made.

**Other terms.** A penalty of the weights is in the gradient, and no part of the loss that checks know. A gradient that
the user has clipped or changed is not that of the loss either. Then the loss may rightly rise in a step. So the slope
of the gradient along the bounded step is compared with that of the loss. A check where they differ by more than `OTHER`
makes no exact step, and the next check undoes no more than in any training. A difference with which the quadratic model
falls by less than `SAME` of the loss is left alone: near a minimum along the step, rounding is as large.

With an lr below `LEAST_LR` an exact step would go too small a part of the way, so steps are bounded ones. Behind exact
steps, as at the end of a schedule, they are bounded by the loss and watched as they are in phases of such steps.

There are no exact steps on accelerators, where checks take a part of the batch; with several learning rates or with a
weight decay, where a step is no multiple of an update; and with losses without a name, which have no exact Fisher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import A_FLAG, A_NUMBER_OF_STEPS, NOT_NEGATIVE, Values
from kfac_fx.optim.checks import LEAST_RISE, SAME, Check
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.optim.rule import BlockStep, MeasuredMove, Outcome
from kfac_fx.optim.rules.momentum import QuadraticModel
from kfac_fx.recording.proof import NO_LOSS

WORTH, NEARLY = 2.0, 1.0
OMEGA = 0.7  # ω
FIRST_DAMPING, LEAST_DAMPING = 0.1, 1e-10  # of the curvature along the bounded step
FIRST_REACH, LEAST_REACH, MOST_REACH = 4.0, 1 / 32, 64.0  # R
RISING, FALLING = 0.25, 0.75  # ρ, below and above which λ changes
RIGHT, WRONG = 0.25, 0.5  # ρ: as far from 1, or below this, R changes
MOST_DAMPING = 1e30
PROBES = 3
LEAST_LR = 0.03
SMALL = 30.0  # times the loss of a repeating batch, the part of the bound that a bounded step may take
COST = 1.5  # of exact steps, in bounded ones; they cost more, and their rates fall more slowly
FIRST_PHASE, LONGEST_PHASE = 20.0, 640.0  # steps
SHORT_PHASES = ((15.0, 1 / 16), (10.0, 1 / 4))  # of exact and bounded steps: at least, and as a part of the long one
AGREES = 0.25
OTHER = 0.5  # of the slope of the loss, by which that of the gradient differs

EXACT_SCALARS: Mapping[str, float] = {
    "exact_steps": 0.0,  # the number of them
    "exact_damping": 0.0,  # λ; 0 before the first
    "reach": FIRST_REACH,  # R
    "repeats": 0.0,  # 1: the batch does; 0, -1, ...: it does not, with the number of checks that looked in vain
    "outputs": 0.0,  # the norm of the outputs before the step of the last check
    "bounded": 0.0,  # 1: in a phase of bounded steps
    "long": 1.0,  # 1: in a long phase
    "phase": FIRST_PHASE,  # the length of long phases
    "taken": 0.0,  # steps in this phase
    "fallen": 0.0,  # by which the loss fell in it
    "rate": 0.0,  # by which the logarithm of the loss fell in a step of the last long phase
    "undone": 0.0,  # 1: the last step was exact, and undone
    "others": 0.0,  # 1: at the last check the gradient was that of the loss and of other terms
    "followed": 0.0,  # 1: the loss after the step of the last check is known
    "after": 0.0,  # this loss, of the batch of that check
    "change": 0.0,  # of this loss in the step; 0 if the step was undone
    "held": 0.0,  # m before the last step, if that was exact and the next one has a check; else 0
}
EXACT_VALUES: Mapping[str, Values] = {
    "exact_steps": A_NUMBER_OF_STEPS,
    "exact_damping": Values(0, MOST_DAMPING),
    "reach": Values(LEAST_REACH, MOST_REACH),
    "repeats": Values(-PROBES, 1, whole=True),
    "outputs": NOT_NEGATIVE,
    "bounded": A_FLAG,
    "long": A_FLAG,
    "phase": Values(FIRST_PHASE, LONGEST_PHASE, whole=True),
    "taken": A_NUMBER_OF_STEPS,
    "rate": NOT_NEGATIVE,
    "undone": A_FLAG,
    "others": A_FLAG,
    "followed": A_FLAG,
}


@dataclass(frozen=True)
class ExactMove(MeasuredMove):
    """An exact step. limited: whether R limits it, 0-dim."""

    limited: Tensor | None = None


def may_be_exact(step: BlockStep, check: Check) -> bool:
    """Whether checks like this one make exact steps."""
    batch = check.batch
    return bool(
        step.g.device.type == "cpu"
        and step.flat.one_scale
        and (step.flat.largest_lr >= LEAST_LR or step.scalars["exact_steps"] > 0)
        and batch.share == 1.0
        and batch.observed
        and batch.has_names
        and not moves_without_curvature(step)
    )


def moves_without_curvature(step: BlockStep) -> bool:
    """Whether parameters are moved that no registered loss depends on. The quadratic model has their slope alone, so
    nothing in it bounds a step along them."""
    blocks = (block.registration for block in step.estimator.blocks.values())
    return any(not step.flat.gradients.keys().isdisjoint(r.owners) for r in blocks if r.reason == NO_LOSS)


def are_bounded(step: BlockStep) -> bool:
    """Whether the steps of a batch that repeats are bounded ones: in a phase of these, and with an lr so small that an
    exact step is not worth its cost. Then none of them may make the loss rise."""
    return bool((step.scalars["bounded"] > 0) | (step.flat.largest_lr < LEAST_LR))


def longest_bounded(scalars: Mapping[str, Tensor], check: Check, longest: Tensor) -> Tensor:
    """The largest squared Fisher norm of a bounded step, 0-dim. Where the batch repeats, no noise hides that a longer
    step makes a small loss rise many times. longest: that of other batches."""
    return longest * part_of_bound(scalars, check)


def part_of_bound(scalars: Mapping[str, Tensor], check: Check) -> Tensor:
    """The part of the usual bound on the squared Fisher norm of a bounded step that it may have, 0-dim."""
    small = (scalars["repeats"] > 0) & (check.value > 0)
    return torch.where(small, SMALL * check.value, 1.0).clamp(max=1.0)


def lengthen_probes(step: BlockStep, check: Check) -> None:
    """Take longer probes where the loss is small, at most as long as the last step.

    Where steps are short, outputs change by less in a part of one, and their rounding is more of that change.
    """
    if check.quotient_step is not None:
        longer = check.quotient_step * part_of_bound(step.scalars, check).rsqrt()
        check.quotient_step = longer.clamp(max=1 / step.size.divisor).clamp(min=check.quotient_step)


def note_outcome(step: BlockStep, check: Check, outcome: Outcome) -> None:
    """Note the loss of a check's batch after its step, for a check in the next step. Where the batch repeats, a step
    that made the loss rise has a check behind it; if it was bounded and undone, the phase of such steps ends."""
    scalars = step.scalars
    change = torch.where(outcome.kept, outcome.change, 0.0)
    after = check.value + change + torch.where(outcome.kept, outcome.drift, 0.0)
    known = outcome.tried & after.isfinite()
    scalars["followed"].copy_(known)
    scalars["after"].copy_(torch.where(known, after, 0.0))
    scalars["change"].copy_(torch.where(known, change, 0.0))
    if scalars["repeats"] > 0 and check.batch.agreed(check.is_fitted):
        step.on_trial = True  # there is nowhere to go
    if scalars["repeats"] > 0 and not scalars["others"] > 0 and check.batch.agreed(outcome.tried & ~(change < 0)):
        step.check_next = True
        if scalars["bounded"] and check.batch.agreed(~outcome.kept):
            end_phase(scalars, check.value)


def known_rise(step: BlockStep, check: Check) -> Tensor | None:
    """The rise of the loss since the last check, 0-dim, if that was in the last step, and the loss of the batch at the
    present parameters has the value that it had there after the step; else None."""
    scalars, value = step.scalars, check.value
    if check.steps > 1:
        return None
    agrees = (scalars["followed"] > 0) & ((value - scalars["after"]).abs() <= SAME * value.abs()) & (check.norm > 0)
    return scalars["change"].clone() if check.batch.agreed(agrees) else None


def note_batch(step: BlockStep, check: Check, agrees: Tensor, risen: Tensor) -> None:
    """Note at a later check whether the batch repeats, and if it does, what the steps since the last check did.

    agrees: whether the loss has changed by what the last check predicted. risen: whether these steps were undone. Both
        are 0-dim.
    """
    repeats = step.scalars["repeats"]
    step.scalars["followed"].zero_()
    if check.last is None:
        check.same = True
    else:
        norm = check.batch.norm(check.last)
        alike = (norm - step.scalars["outputs"]).abs() <= SAME * norm
        check.same = check.batch.agreed((norm > 0) & (step.size.same | (alike & agrees)))
    if check.steps == 1:
        in_vain = 0.0 if repeats > 0 else (repeats - 1).clamp(min=-PROBES)
        repeats.copy_(torch.as_tensor(1.0 if check.same else in_vain))
    elif not check.same:
        repeats.clamp_(max=0)
    if repeats > 0:
        step.on_trial = bool(step.scalars["bounded"])
        follow_phase(step.scalars, check, bool(risen))


def follow_phase(scalars: Mapping[str, Tensor], check: Check, risen: bool) -> None:
    """Count the steps since the last check, and begin the next phase if this one is over. risen: they were undone."""
    assert check.rise is not None, "bug in kfac_fx: a check that did not look at the last one"
    taken, bounded, long = scalars["taken"], scalars["bounded"], scalars["long"]
    taken.add_(check.steps)
    scalars["fallen"].sub_(0.0 if risen else check.rise.nan_to_num()).nan_to_num_()
    length = float(scalars["phase"])
    least, part = SHORT_PHASES[int(bounded)]
    over = taken >= (length if long else max(least, part * length))
    if over or (risen and bounded):
        end_phase(scalars, check.value - check.rise if risen else check.value)


def end_phase(scalars: Mapping[str, Tensor], value: Tensor) -> None:
    """Begin the next phase. value: the loss at the end of this one, 0-dim."""
    taken, fallen, bounded = scalars["taken"], scalars["fallen"], scalars["bounded"]
    rate = (1 + fallen / value).log() if value.isfinite() and value > 0 else fallen
    rate = torch.where(fallen > 0, rate / taken, 0.0).nan_to_num()
    if scalars["long"]:
        scalars["rate"].copy_(rate)
        bounded.copy_(1 - bounded)
    else:
        exact, of_bounded = (scalars["rate"], rate) if bounded else (rate, scalars["rate"])
        bounded.copy_(exact <= COST * of_bounded)
        scalars["phase"].mul_(2).clamp_(max=LONGEST_PHASE)
    scalars["long"].copy_(1 - scalars["long"])
    taken.zero_()
    fallen.zero_()


def tolerated_in_phase(step: BlockStep, tolerated: Tensor, was: Tensor, same: Tensor) -> Tensor:
    """The rise of the loss since the last check that is left alone: none of the same batch where steps are bounded.

    tolerated: in other trainings. was: the loss at the last check. same: whether it had the same batch. All are 0-dim.
    """
    repeats, others = step.scalars["repeats"] > 0, step.scalars["others"] > 0
    strict = same & repeats & ~others & are_bounded(step)
    return torch.where(strict, LEAST_RISE * was.abs(), tolerated)


def exact_move(step: BlockStep, check: Check, bounded_move: MeasuredMove, longest: Tensor) -> ExactMove | None:
    """The exact step of a check; None if it is not worth its cost, or if the batch does not repeat.

    It also says whether the next step has a check (`BlockStep.check_next`).

    Args:
        bounded_move: the step that the rule would make otherwise.
        longest: the largest squared Fisher norm of that step.
    """
    scalars, flat = step.scalars, step.flat
    scalars["outputs"].copy_(check.norm)
    if step.risen is not None and scalars["repeats"] > 0 and check.batch.agreed(step.risen):
        step.check_next = True  # the steps were undone, so the gradient is that of other parameters
        return None
    step.check_next = check.same and -PROBES < float(scalars["repeats"]) <= 0
    apart = flat.inner(step.g, bounded_move.move) - bounded_move.slope
    tolerance = torch.maximum(OTHER * bounded_move.slope.abs(), negligible(check, bounded_move))
    others = not check.batch.agreed(apart.abs() <= tolerance)
    scalars["others"].fill_(float(others))
    if others:
        return None
    if scalars["repeats"] > 0 and are_bounded(step):
        step.check_next = bool(scalars["taken"] == 0)  # whether the loss rises is seen after one step
        return None
    along_bounded = bounded_move.curvature / flat.inner(bounded_move.move, bounded_move.move)
    if scalars["undone"]:
        scalars["undone"].zero_()
        step.check_next = True
        return None
    if scalars["repeats"] <= 0 or not 0 < float(along_bounded) < torch.inf:
        return None
    damping = scalars["exact_damping"]
    first, least = FIRST_DAMPING * along_bounded, LEAST_DAMPING * along_bounded
    damping.copy_(torch.where(damping > 0, torch.maximum(damping, least), first))
    proposed = bounded_move.move if check.probed is None else check.probed.move
    length = flat.inner(proposed, proposed).sqrt() / flat.largest_lr
    further = [step.solved(step.g, damping), step.state["last_update"]]
    directions = [proposed, *(of_length(flat, direction, length) for direction in further)]
    model = QuadraticModel.along(
        directions, step.g, lambda vectors: check.inner_products(flat, vectors).to(step.g.dtype), flat.inner
    )
    s = model.minimum(damping)
    norm, allowed = s @ model.fisher @ s, scalars["reach"].square() * longest
    s = s * (allowed / norm).sqrt().clamp(max=1.0) * flat.largest_lr.clamp(max=1.0)
    fall, of_bounded = -model.change(s, 0.0), -(bounded_move.slope + 0.5 * bounded_move.curvature)
    step.check_next = check.batch.agreed(fall > NEARLY * of_bounded)
    if not check.batch.agreed(fall > WORTH * of_bounded):
        return None
    step.on_trial = True
    return ExactMove(
        move=torch.stack(directions, dim=1) @ s.to(step.g.dtype),
        finite=s.isfinite().all(),
        slope=s @ model.slopes,
        curvature=s @ model.fisher @ s,
        before=bounded_move.before,
        rise=LEAST_RISE * check.value.nan_to_num().abs(),
        ratio=bounded_move.ratio,
        scalars=bounded_move.scalars,
        norm=bounded_move.norm,
        limited=norm >= allowed,
    )


def of_length(flat: FlatParameters, direction: Tensor, length: Tensor) -> Tensor:
    """A direction with another length; zero stays zero. length: 0-dim."""
    present = flat.inner(direction, direction).sqrt()
    return direction * (length / torch.where(present > 0, present, 1))


def negligible(check: Check, move: MeasuredMove) -> Tensor:
    """The slope along a move with which its quadratic model falls by `SAME` of the loss, 0-dim. Near a minimum
    along the move, the slope of the loss is smaller than its rounding; a term with this slope changes no decision."""
    least = SAME * torch.where(check.value.isfinite(), check.value.abs(), 0.0)
    return (2 * least * move.curvature.clamp(min=0)).sqrt()


def give_back(scalars: Mapping[str, Tensor]) -> None:
    """Give m the value that it had at an exact step, which says nothing of the rate of other steps."""
    multiplier, held = scalars["multiplier"], scalars["held"]
    multiplier.copy_(torch.where(held > 0, held, multiplier))
    held.zero_()


def adapt(step: BlockStep, move: ExactMove, outcome: Outcome, holds: bool) -> None:
    """Adapt λ and R after an exact step, which is the last update from now on.

    holds: whether the next step has a check, before which m does not grow by the cosine with an exact step.
    """
    assert move.limited is not None, "bug in kfac_fx: an exact step without a limit"
    scalars, rho, tried, kept = step.scalars, outcome.rho, outcome.tried, outcome.kept
    factor = torch.where(rho > FALLING, OMEGA, torch.where(rho >= RISING, 1.0, 1 / OMEGA))
    shortened = move.limited & (scalars["reach"] > LEAST_REACH)  # by R alone, so λ may be right
    factor = torch.where(kept, factor, torch.where(tried & ~shortened, OMEGA**-4, 1.0))
    scalars["exact_damping"].mul_(factor).clamp_(max=MOST_DAMPING)
    right, wrong = (rho - 1).abs() <= RIGHT, tried & ~(kept & (rho >= WRONG))
    times = torch.where(wrong, 0.5, torch.where(right & move.limited, 2.0, 1.0))
    scalars["reach"].mul_(times).clamp_(LEAST_REACH, MOST_REACH)
    scalars["exact_steps"].add_(tried)
    scalars["undone"].copy_(tried & ~kept)
    scalars["held"].copy_(scalars["multiplier"] if holds else torch.zeros_like(scalars["held"]))
    step.state["last_update"].copy_(torch.where(kept, -move.move, 0) if holds else torch.zeros_like(move.move))
