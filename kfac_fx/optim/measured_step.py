"""A step whose change of the loss closures measure, and the damping that is adapted to it.

Section 6.5 of Martens & Grosse 2015. The loss after a step is measured in the step itself, or at the beginning of the
next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.optim.damping import AdaptedDamping
from kfac_fx.optim.forwards import Closure, TrainingClosure
from kfac_fx.optim.schedule import Due
from kfac_fx.optim.state import StepState
from kfac_fx.passes.tracing.random_streams import RandomState


@dataclass(frozen=True)
class Losses:
    """How a step knows losses."""

    evaluate: Closure | None = None  # returns the loss of the step's batch
    loss: Tensor | float | None = None  # of the batch
    previous: Closure | None = None  # returns the loss of the last step's batch
    closure: TrainingClosure | None = None  # computed the gradients; measures the loss if `evaluate` is None

    @property
    def measurable(self) -> bool:
        return self.evaluate is not None or self.closure is not None


def check_losses(rule: AdaptedDamping, due: Due, losses: Losses) -> None:
    """Raises ValueError if the damping rule needs a loss that is not given."""
    every = f"every {rule.interval} steps"
    if due.adapting and rule.immediately and not losses.measurable:
        raise ValueError(
            f"adapt_damping needs the loss after the update, {every}: "
            "call step(evaluate=closure) with a closure that returns the loss of the batch"
        )
    if due.adapting and not losses.measurable and losses.loss is None:
        raise ValueError(f"adapt_damping needs the loss before the update, {every}: call step(loss=loss)")
    if due.adapting_late and losses.previous is None:
        raise ValueError(
            f"update_damping_immediately=False measures a step in the next one, {every}: call step(loss=loss, "
            "previous=closure) with a closure that returns the loss of the last step's batch"
        )


def measured_move(
    state: StepState, move: Callable[[list[Tensor]], Tensor], loss: Tensor | None, losses: Losses
) -> Tensor:
    """Move the parameters, and compare the change of the loss with the predicted one: now, or in the next step.

    Args:
        move: moves the parameters, adds predicted changes of the loss to a list, and returns whether they moved, 0-dim.
        loss: before the update, if known.

    Returns the result of `move`.
    """
    rule, start, changes = state.options.rule.damping_rule, state.forwards.seen.start, list[Tensor]()
    loss = measured_now(state, losses, start) if loss is None else loss
    ok = move(changes)
    state.scalars["predicted_change"].copy_(sum(changes, torch.zeros_like(state.damping)))
    state.scalars["loss_before"].copy_(torch.where(ok, loss, torch.nan))
    if rule is not None and not rule.immediately:
        state.late = start
    else:
        adapt_damping(state, measured_now(state, losses, start))
    return ok


def measure_late(state: StepState, losses: Losses) -> None:
    """Adapt the damping to the last step."""
    adapt_damping(state, measured(state, losses.previous, False, state.late))
    state.late = None


def measured_now(state: StepState, losses: Losses, start: RandomState | None) -> Tensor:
    """The loss of the step's batch at the present parameters."""
    with_backward = losses.evaluate is None
    return measured(state, losses.closure if with_backward else losses.evaluate, with_backward, start)


def measured(
    state: StepState, closure: TrainingClosure | None, with_backward: bool, start: RandomState | None
) -> Tensor:
    """The loss at the present parameters, averaged over processes; see `Forwards.measure`."""
    assert closure is not None, "bug in kfac_fx: a loss that is due, and was not asked for"
    loss = state.forwards.measure(closure, with_backward, start)
    return state.replicas.mean((state.vectors.scalar + loss).detach())


def adapt_damping(state: StepState, after: Tensor) -> None:
    """Adapt λ to the loss after the last measured update; λ stays if that update was not made."""
    rule, scalars = state.options.rule.damping_rule, state.scalars
    assert rule is not None, "bug in kfac_fx: a damping that is adapted, and no rule for it"
    before = scalars["loss_before"]
    damping, rho = rule.adapted(state.damping, before, after, scalars["predicted_change"])
    state.damping.copy_(torch.where(before.isfinite(), damping, state.damping))
    scalars["rho"].copy_(rho)
