"""One step of KFAC, as functions of `StepState`.

take_step
    statistics of the forwards -> factors         (FisherEstimator.fold)
    factors, if due            -> inverses        (update_inverses)
    gradients                  -> new parameters  (update)
    or, where the damping is to be adapted:
    gradients -> proposals -> predicted change -> new parameters -> measured change -> new damping
                                                                     (measured_update, adapt_damping)
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.processes import shard
from kfac_fx.optim.batch_loss import BatchLoss, part_of_batch, share_of_checks
from kfac_fx.optim.eigen_moments import refuse_divided_momentum, update_bases
from kfac_fx.optim.forwards import Closure, TrainingClosure
from kfac_fx.optim.groups import FlatParameters, Group, GroupedParameters, Proposal
from kfac_fx.optim.loss_scale import callers, scale_of_caller
from kfac_fx.optim.schedule import Rates, Schedule, StepCosts
from kfac_fx.optim.step_checks import RATE, Check, against_quotients, more_damping, move_adaptive, move_bounded, revert
from kfac_fx.optim.step_state import (
    StepState,
    eigen_update,
    preconditioner,
    predicted_change,
    propose,
    set_estimator_damping,
    step_bound,
)
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.torch_private import class_of
from kfac_fx.passes.tracing.random_streams import RandomState
from kfac_fx.passes.users_code import warn_user
from kfac_fx.recording.statistics import Key

UNRECORDED = (
    "there are gradients, but no batch was ever recorded, so there is nothing to precondition them with: before "
    "step(), call the compiled module, net(x) and not the model it was made of, in training mode and with gradients "
    "enabled. Where a trainer calls the model itself, write kfac_fx.compile(model, ..., in_place=True)"
)
UNRECORDED_IN_PLACE = (
    "there are gradients, but no batch was ever recorded, so there is nothing to precondition them with: {model} is "
    "compiled in place, and was not called itself in training mode and with gradients enabled. Calls of its parts "
    "record nothing, such as those in the training_step of a LightningModule: compile the module that is called, as in "
    "kfac_fx.compile(self.model, ..., in_place=True)"
)


def nothing_recorded(net: CompiledModule) -> FactorNotReady:
    return FactorNotReady(
        UNRECORDED_IN_PLACE.format(model=class_of(net.model).__name__) if net.in_place else UNRECORDED
    )


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


def take_step(state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Any], losses: Losses) -> None:
    """One step of `KFAC.step`. groups, states: the optimizer's.

    Raises:
        ValueError: the damping rule needs a loss that is not given.
        FactorNotReady: no batch was ever recorded.
        ModelChangedError: the outputs of a recording were not the model's.
    """
    schedule, forwards, estimator = state.schedule, state.forwards, state.estimator
    if state.options.eigen_moments:
        refuse_divided_momentum(groups, state.names, estimator)
    in_blocks, others = vectors = flat_parameters(state, groups, states)
    gradients = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
    if not gradients and not schedule.burning_in:
        return
    if not (forwards.seen.forwards or schedule.counter or estimator.recorded):
        if any(bool(dense(shard(gradient)).any()) for gradient in gradients):
            raise nothing_recorded(state.net)
        return  # torch.distributed.checkpoint takes such a step, only to have the state of the optimizer made
    check_losses(schedule, losses)
    usable = estimator.usable()
    scale = first_check(state, gradients, losses.loss)
    accumulate(state, scale)
    unrecorded = schedule.recording and schedule.counter > 0 and not forwards.seen.forwards
    if unrecorded and not (state.options.quadratic or schedule.checking):  # these need the batch, too: an error
        forwards.note_unrecorded()
    loss = None if losses.loss is None else state.replicas.mean(state.scalar + losses.loss)
    ok = torch.ones_like(state.skipped, dtype=torch.bool) if loss is None else loss.isfinite()
    ok = ok if usable is None else ok & usable
    for flat in vectors:
        ok = ok if flat is None else ok & gradient_is_finite(state, flat)
    check = None
    if schedule.checking and in_blocks is not None:
        with state.phases.measure("update"):
            check = new_check(state, scale)
            if schedule.counter:  # a batch after a step that made the loss rise is in no average
                risen = revert(state.size, in_blocks, check, state.options.eigen_moments, ok)
                more_damping(state.damping, state.options.damping_rule, check, risen)
                if state.options.eigen_moments:
                    state.means.forget_average(risen)
                ok = ok & ~risen
    if schedule.counter == 0 and state.options.checked and not schedule.burning_in:
        choose_intervals(state)
    with state.phases.measure("statistics"):
        recorded = estimator.fold(decay=1.0 if schedule.burning_in else None, accept=ok)
    if schedule.burning_in:
        schedule.burned_in += recorded
        return
    # Without a first factor there is no inverse until the next is due: the one step where the host waits to know.
    if schedule.counter == 0 and not (recorded and ok.item()):
        state.skipped += 1
        return
    if schedule.adapting_late:
        assert losses.previous is not None, "bug in kfac_fx: a loss that is due, and was not asked for"
        adapt_damping(state, measured(state, losses.previous, False, state.late))
        state.late = None
    if schedule.counter > 0:
        state.first_recorded |= dict.fromkeys(estimator.newcomers, schedule.counter)
    if schedule.inverting:
        update_inverses(state)
    elif young := [key for key, n in state.first_recorded.items() if schedule.early(schedule.counter - n)]:
        update_inverses(state, young)
    if schedule.counter == 0:
        parts = [flat.flat.parts(flat.g) for flat in vectors if flat is not None]
        forwards.check_coverage({name: gradient for by_name in parts for name, gradient in by_name.items()})
    with state.phases.measure("update"):
        if schedule.adapting:
            ok = measured_update(state, in_blocks, others, ok, loss, losses)
        else:
            ok = update(state, in_blocks, others, ok, check)
    state.skipped += ~ok
    schedule.advance(None if check is None else state.size.calm)


def gradient_is_finite(state: StepState, flat: FlatParameters) -> Tensor:
    """Whether a gradient is finite, 0-dim."""
    padded = state.padded_step(flat)
    if padded is None:
        return flat.is_finite(flat.g)
    padded.pack(flat)
    return padded.gradient_is_finite()


def accumulate(state: StepState, loss_scale: float) -> None:
    """Take the statistics of the forwards, which nothing else holds from here on."""
    with state.phases.measure("statistics"):
        for moments in state.forwards.seen.take_moments(state.options.reduction, loss_scale):
            state.estimator.accumulate(moments)


def choose_intervals(state: StepState) -> None:
    """Choose the intervals of statistics, inverses and checks, by the costs of the first step; the host waits."""
    estimator, options = state.estimator, state.options
    counts = estimator.pending_rows()
    if not counts:
        return
    each = [torch.as_tensor(count, dtype=state.scalar.dtype, device=state.scalar.device) for count in counts.values()]
    rows = dict(zip(counts, state.replicas.mean(torch.stack(each)).tolist(), strict=True))
    costs = StepCosts.of(
        state.net.program,
        estimator.groups,
        rows,
        options.fraction,
        in_training=options.recording_in_training,
        with_product=options.adaptive or state.by_product is not None,
        check_share=state.share,
        rates=Rates.of((parameter.device.type for parameter in state.names), state.forwards.halves),
        eigenbases=options.eigen_moments,
    )
    state.schedule.choose(costs)
    estimator.cov_ema_decay = state.schedule.decay


def flat_parameters(
    state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Any]
) -> tuple[FlatParameters | None, FlatParameters | None]:
    """(what K-FAC moves, what the first-order rule moves); None if nothing of it has a gradient."""
    grouped, division = state.grouped, state.division
    number = sum(len(group["params"]) for group in groups)
    if grouped is None or len(grouped.parameters) != number or grouped.division is not division:
        new = state.options.new_state
        state.grouped = grouped = GroupedParameters.of(groups, state.names, state.scalar, new, division)
    grouped.refresh(groups, state.names)
    return grouped.flat(False, states), grouped.flat(True, states)


def check_losses(schedule: Schedule, losses: Losses) -> None:
    """Raises ValueError if the damping rule needs a loss that is not given."""
    every = f"every {schedule.options.damping_rule.interval} steps"
    if schedule.adapting and schedule.options.update_damping_immediately and not losses.measurable:
        raise ValueError(
            f"adapt_damping needs the loss after the update, {every}: "
            "call step(evaluate=closure) with a closure that returns the loss of the batch"
        )
    if schedule.adapting and not losses.measurable and losses.loss is None:
        raise ValueError(f"adapt_damping needs the loss before the update, {every}: call step(loss=loss)")
    if schedule.adapting_late and losses.previous is None:
        raise ValueError(
            f"update_damping_immediately=False measures a step in the next one, {every}: call step(loss=loss, "
            "previous=closure) with a closure that returns the loss of the last step's batch"
        )


def check_closure(state: StepState) -> None:
    """Raises ValueError if a closure inside the step would compute gradients that are not divided by a GradScaler."""
    scaler = state.options.grad_scaler
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "a GradScaler divides the gradients before the step, so a closure inside the step would leave its own "
            "undivided: call scaler.scale(loss).backward() first, and then scaler.step(optimizer), or "
            "scaler.step(optimizer, evaluate=closure) with a closure that returns the loss"
        )


def first_check(state: StepState, gradients: Sequence[Tensor], loss: Tensor | float | None) -> float:
    """Check the first gradients of all. Returns the factor of the loss in the backward, a GradScaler's, or 1."""
    forwards, scaler = state.forwards, state.options.grad_scaler
    first = bool(gradients) and not forwards.checked
    # The host waits for the scale, so it is read only if it is needed.
    needed = first or forwards.seen.pending or forwards.seen.observed
    scale = scaler.get_scale() if scaler is not None and needed else 1.0
    if first:
        warn_of_trainer(state.net, state.net.model)
        state.replicas.check_options(state.options.common())
        told = scaler is not None or state.options.recording_in_training  # the latter must know the scale of each step
        forwards.check_loss(loss, scale if told else scale_of_caller())
        if state.shards is None:  # FSDP2 averages the gradients itself
            state.replicas.check_gradients([dense(gradient) for gradient in gradients])
    return scale


def update_inverses(state: StepState, keys: Collection[Key] | None = None) -> None:
    """keys: the registrations whose blocks are due; None: all."""
    set_estimator_damping(state)
    with state.phases.measure("inverses"):
        try:
            if state.options.eigen_moments:
                update_bases(state.estimator, keys)
            else:
                state.estimator.decompose(keys)
        except FactorNotReady as error:
            raise nothing_recorded(state.net) from error


# --- the update -----------------------------------------------------------------------------------------------------


def new_check(state: StepState, loss_scale: float) -> Check:
    """The check of this step.

    Raises RuntimeError if there was no forward to check with.
    """
    seen = state.forwards.seen
    if not seen.observed:
        raise RuntimeError(
            f"momentum_type={state.options.kind!r} checks its step size with the step's batch, and net(x) was not "
            "called in training mode with gradients enabled since the last step"
        )
    # A forward without a backward measures something else, such as the accuracy.
    trained = [forward for forward in seen.observed if forward.gradients] or seen.observed
    batch = BatchLoss(
        state.net,
        trained,
        state.multiply_jacobian,
        loss_scale,
        state.options.estimation_mode.endswith("GGN"),
        state.replicas,
        state.forwards.devices,
        seen.start,
    )
    state.unobserved = state.unobserved or not batch.observed
    parameters = {name: parameter.detach() for parameter, name in state.names.items()}
    if state.options.eigen_moments:
        share = share_of_checks((parameter.device.type for parameter in state.names), state.replicas.number)
        batch, state.by_whole_batch = part_of_batch(batch, share, parameters)
        state.share = batch.share
        state.by_product = against_quotients(batch)
    by_quotient = state.options.eigen_moments and state.by_product is None
    return Check.of(batch, parameters, state.schedule.steps_since_check, by_quotient)


def update(
    state: StepState, in_blocks: FlatParameters | None, others: FlatParameters | None, ok: Tensor, check: Check | None
) -> Tensor:
    """Move the parameters. Returns whether they moved, 0-dim."""
    if others is not None:
        of_first_order, finite = state.first_order_update(state.options.first_order_rule, others)
        ok = ok & finite
    padded = None if in_blocks is None else state.padded_step(in_blocks)
    if in_blocks is not None and padded is None:
        state.mark_static(in_blocks)
    if in_blocks is not None and state.options.adaptive:
        precondition, decay = preconditioner(state, in_blocks, state.multiply_inverse), state.options.momentum
        assert decay is not None, "bug in kfac_fx: averaged gradients without a weight of the past"
        may_move = ok
        ok, change, rho = move_adaptive(
            state.size, state.damping, state.options.damping_rule, decay, in_blocks, precondition, ok, check
        )
        keep_check(state, check, change, rho, may_move)
    elif in_blocks is not None and padded is not None and check is None:
        assert state.grouped is not None, "bug in kfac_fx: a move before the parameter groups are read"
        size = state.size
        ok = padded.step(in_blocks, ok, lambda: RATE / size.divisor, state.grouped.scalars, lambda: size.nesterov)
    elif in_blocks is not None and state.options.eigen_moments:
        ok = ok if padded is not None else ok & in_blocks.has_finite_squares(in_blocks.g)
        direction, bound = eigen_update(state, in_blocks, ok), state.options.value("norm_constraint")
        ok = may_move = ok if padded is None else padded.accept.clone()
        ok, change, rho = move_bounded(state.size, in_blocks, direction, bound, ok, check)
        keep_check(state, check, change, rho, may_move)
    elif in_blocks is not None and (state.options.quadratic or state.options.grafted):
        proposal = propose(state, in_blocks)
        ok = ok & in_blocks.is_finite(proposal.move)
        in_blocks.commit(proposal, ok)
    elif in_blocks is not None:
        precondition = preconditioner(state, in_blocks, state.estimator.multiply_inverse_kept)
        ok, kappa = state.move_in_blocks(state.rule, in_blocks, precondition, step_bound(state, in_blocks), ok)
        state.keep_kappa(kappa)
    if others is not None:
        others.commit(Proposal(*of_first_order), ok)
    return ok


def keep_check(state: StepState, check: Check | None, change: Tensor, rho: Tensor, may_move: Tensor) -> None:
    """Keep the predicted change and ρ of a step with a check."""
    if check is not None:
        state.predicted_change.copy_(change)
        state.rho.copy_(torch.where(may_move, rho, state.rho))


def measured_update(
    state: StepState,
    in_blocks: FlatParameters | None,
    others: FlatParameters | None,
    ok: Tensor,
    loss: Tensor | None,
    losses: Losses,
) -> Tensor:
    """Move the parameters, and compare the change of the loss with the predicted one: now, or in the next step.

    loss: before the update, if known.
    """
    start, change = state.forwards.seen.start, torch.zeros_like(state.damping)
    loss = measured_now(state, losses, start) if loss is None else loss
    proposals: list[tuple[FlatParameters, Proposal]] = []
    if in_blocks is not None:
        proposal = propose(state, in_blocks)
        state.keep_kappa(proposal.kappa)
        change = predicted_change(state, in_blocks, proposal.move)
        proposals.append((in_blocks, proposal))
    if others is not None:
        of_first_order, finite = state.first_order_update(state.options.first_order_rule, others)
        ok, proposal = ok & finite, Proposal(*of_first_order)
        change = change + others.inner(others.g, proposal.move)  # no Fisher block: only the slope is known
        proposals.append((others, proposal))
    for flat, proposal in proposals:
        ok = ok & flat.is_finite(proposal.move)
    for flat, proposal in proposals:
        flat.commit(proposal, ok)
    state.predicted_change.copy_(change)
    state.loss_before.copy_(torch.where(ok, loss, torch.nan))
    if not state.options.update_damping_immediately:
        state.late = start
    else:
        adapt_damping(state, measured_now(state, losses, start))
    return ok


def measured_now(state: StepState, losses: Losses, start: RandomState | None) -> Tensor:
    """The loss of the step's batch at the present parameters."""
    if losses.evaluate is not None:
        return measured(state, losses.evaluate, False, start)
    assert losses.closure is not None, "bug in kfac_fx: a loss that is due, and was not asked for"
    return measured(state, losses.closure, True, start)


def measured(state: StepState, closure: TrainingClosure, with_backward: bool, start: RandomState | None) -> Tensor:
    """The loss at the present parameters, averaged over processes; see `Forwards.measure`."""
    return state.replicas.mean((state.scalar + state.forwards.measure(closure, with_backward, start)).detach())


def adapt_damping(state: StepState, after: Tensor) -> None:
    """Adapt λ to the loss after the last measured update; λ stays if that update was not made."""
    damping, rho = state.options.damping_rule(state.damping, state.loss_before, after, state.predicted_change)
    state.damping.copy_(torch.where(state.loss_before.isfinite(), damping, state.damping))
    state.rho.copy_(rho)


def warn_of_trainer(net: nn.Module, model: nn.Module) -> None:
    """Warn if a Trainer of Hugging Face that called has the compiled module `net` instead of its `model`.

    Trainer calls `save_pretrained` of a PreTrainedModel only. Anything else is saved as a state, which safetensors
    refuses if weights are tied, after all the steps to the first checkpoint.
    """
    if not hasattr(model, "save_pretrained"):
        return
    for caller in callers():
        is_trainer = any(
            f"{kind.__module__}.{kind.__name__}" == "transformers.trainer.Trainer" for kind in type(caller).__mro__
        )
        if is_trainer and getattr(caller, "model", None) is net:
            name = class_of(model).__name__
            warn_user(
                UserWarning(
                    f"Trainer has the compiled module instead of {name}. Checkpoints of it have no configuration, "
                    "and safetensors refuses to save tied weights. Give Trainer the model itself, compiled in place: "
                    "net = kfac_fx.compile(model, ..., in_place=True), and Trainer(model, ...)."
                )
            )
            return
