"""The rule "adaptive": K-FAC along an averaged gradient, whose step size and damping are checked now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import a_decay, a_weight, positive
from kfac_fx.optim.checks import RISE, Check
from kfac_fx.optim.rule import (
    ANY,
    BlockStep,
    CheckedRule,
    Damped,
    DampingThresholds,
    MeasuredMove,
    Outcome,
    StepIntervals,
    Update,
)

NORM_GROWTH = 1.5
LEAST_STEP = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Adaptive(DampingThresholds, Damped, CheckedRule):
    """A step along the preconditioned average of the gradients, as long as the exact Fisher of a batch says.

        m = the mean of the gradients with weights β^age        d = P m, P the damped inverse
        θ <- θ - lr α d                                         α = min(1, 1 / r)
        r <- max(ρ, √(r ρ)) with ρ = <d, (F + λ I) d> / <m, d>  1 / ρ is the best step along d (Martens & Grosse 2015,
                                                                section 6.4); r follows at once where it grows
        λ <- λ ω^steps or λ / ω^steps                           by the change of h over the predicted change (section
                                                                6.5); λ falls only while α > `LEAST_STEP`: from there on
                                                                less damping is only a shorter step. λ grows where steps
                                                                are undone

    A rise by `RISE` of h is tolerated in a step. Between two checks the Fisher norm of a step, as the blocks estimate
    it, is at most `NORM_GROWTH` times that of the last check, so that a wrong step size cannot run away. At a check the
    squared exact Fisher norm is at most max(1, h).

    The blocks leave out the correlation of layers, so no fixed learning rate is right for all networks; one product
    with the Jacobian along the direction is. The direction is that of an averaged gradient, because the exact minimum
    along the gradient of one batch fits this batch. The step is measured on its own batch. A measure over the steps
    since the last check, on a fresh batch, only undoes steps: a damping that follows it never falls on a plateau.

    Args, next to those of `Damped` and `DampingThresholds`:
        damping: λ before the first step.
        momentum: β, the weight of the past in the averaged gradient.
        overhead: what statistics, inverses and checks may cost in a step, as a part of the training step.
        damping_adaptation_interval: the interval of the checks; None means what `overhead` allows.
    """

    name: ClassVar[str] = "adaptive"
    longest: ClassVar[StepIntervals] = StepIntervals(statistics=10, inverses=ANY, checks=5)
    by_quotients: ClassVar[bool] = False
    is_noisy: ClassVar[bool] = False
    rarer_checks: ClassVar[bool] = False

    damping: Annotated[float | Tensor, positive] = 1.0
    damping_adaptation_decay: Annotated[float, positive, a_weight] = 0.9
    momentum: Annotated[float, a_decay] = 0.9
    overhead: Annotated[float, positive] = 0.6

    def check_options(self) -> None:
        super().check_options()
        self.check_thresholds()

    def direction(self, step: BlockStep) -> Update:
        decay, size = self.momentum, step.size
        velocity = decay * step.state["velocity"] + (1 - decay) * step.g
        weight = decay * size.weight + (1 - decay)
        return Update(step.precondition(velocity / weight), {"velocity": velocity}, {"weight": weight})

    def slope(self, step: BlockStep, update: Update) -> Tensor:
        """<m, d>, 0-dim."""
        average, tiny = update.state["velocity"] / update.scalars["weight"], torch.finfo(step.g.dtype).tiny
        return step.flat.inner(average, update.vector).clamp(min=tiny)

    def move(self, step: BlockStep, update: Update) -> Tensor:
        size, slope = step.size, self.slope(step, update)
        length = (1 / size.ratio).clamp(max=1.0)
        length = length * (NORM_GROWTH * (size.norm / (length.square() * slope)).sqrt()).clamp(max=1.0)
        return step.flat.displacement(length * update.vector)

    def measured_move(self, step: BlockStep, update: Update, check: Check) -> MeasuredMove:
        flat, direction, slope = step.flat, update.vector, self.slope(step, update)
        fisher, of_outputs, before = check.batch.along(check.parameters, flat.everywhere(direction))
        now = (fisher + step.damping * flat.inner(direction, direction)) / slope
        ratio = torch.maximum(now, (step.size.ratio * now).sqrt())
        length = (1 / ratio).clamp(max=1.0)
        longest = check.value.clamp(min=1.0)
        length = length * (longest / (length.square() * fisher)).sqrt().clamp(max=1.0)
        move = flat.displacement(length * direction)
        if flat.one_scale:
            curvature, linear = (flat.lr * length).square() * fisher, -flat.lr * length * of_outputs
        else:  # weight decay, or groups with learning rates of their own: the move is no multiple of the direction
            curvature, linear, _ = check.batch.along(check.parameters, flat.everywhere(move))
        scalars = {"norm": length.square() * slope}
        rise = RISE * check.value.abs()
        return MeasuredMove(move, fisher.isfinite(), linear, curvature, before, rise, ratio, scalars)

    def checked_move(self, step: BlockStep, check: Check, measured: MeasuredMove, outcome: Outcome) -> None:
        """Adapt λ."""
        rho, predicted = outcome.rho, outcome.predicted
        falls = torch.where(predicted < 0, rho > self.damping_decrease_rho_threshold, outcome.change < 0)
        falls = falls & (1 / measured.ratio > LEAST_STEP)
        grows = ~falls & ~(rho >= self.damping_increase_rho_threshold) & ~((predicted >= 0) & (outcome.change < 0))
        factor = self.damping_adaptation_decay**check.steps
        adapted = step.damping * torch.where(falls, factor, torch.where(grows, 1 / factor, 1.0))
        step.damping.copy_(torch.where(outcome.tried, adapted.clamp(min=self.min_damping), step.damping))

    def divisor(self, step: BlockStep) -> Tensor:
        """The part of r that is unusual: α is below `LEAST_STEP` in no good training."""
        return LEAST_STEP * step.size.ratio

    def reverted(self, step: BlockStep, check: Check, risen: Tensor) -> None:
        """Forget the averaged gradient, and raise λ."""
        step.state["velocity"].masked_fill_(risen, 0)
        step.size.weight.masked_fill_(risen, 0)
        step.damping.mul_(torch.where(risen, self.damping_adaptation_decay ** (-2 * check.steps), 1.0))
