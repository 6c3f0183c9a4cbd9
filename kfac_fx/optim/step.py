"""One step of KFAC, whatever its rule, in the order in which it happens.

take_step
    gradients                  -> vectors             (Vectors.of)
    loss, gradients            -> whether to take it  (Rule.admits, Rule.has_gradient)
    batch                      -> check; parameters may go back to the last one (checked_by_batch)
    statistics of the forwards -> factors             (FisherEstimator.fold)
    factors, if due            -> inverses or bases   (renew_inverses, Rule.decompose)
    gradient -> update -> move -> new parameters      (moved, Rule.update, Rule.move; with a check guarded_move)
    where closures measure the change of the loss, new parameters -> new damping  (kfac_fx.optim.step)

**Measured steps**: a step whose change of the loss closures measure, and the damping that is adapted to it.

Section 6.5 of Martens & Grosse 2015. The loss after a step is measured in the step itself, or at the beginning of the
next one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.linalg.matrices import all_true, dense
from kfac_fx.linalg.processes import divided_like, shard
from kfac_fx.optim.batch_loss import OWN_PRECISION, BatchLoss
from kfac_fx.optim.checks import MOST_SHORTENED, Check, begin_here, revert, take
from kfac_fx.optim.forwards import Closure, TrainingClosure, evaluating, without_batch
from kfac_fx.optim.groups import OF_GROUPS, FlatParameters, Group
from kfac_fx.optim.rule import AdaptedDamping, BlockStep, CheckedRule, Outcome, Update
from kfac_fx.optim.schedule import Due, Rates, StepCosts
from kfac_fx.optim.standstill import GRADIENT, LOSS, NO_CASES, UPDATE
from kfac_fx.optim.state import StepState
from kfac_fx.passes.errors import FactorNotReady, warn_user
from kfac_fx.passes.matrix import real_parameters
from kfac_fx.passes.torch_private import class_of
from kfac_fx.passes.tracing.effects import RandomState
from kfac_fx.recording.progress import working


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
    due, members = state.schedule.due(), [parameter for group in groups for parameter in group["params"]]
    state.forwards.close(due.burning_in)
    in_blocks, others = state.vectors.of(groups, states)
    gradients = [parameter.grad for parameter in members if parameter.grad is not None]
    if not is_step(state, due, members, gradients):
        return
    refuse_wrong_start(state, due, groups, gradients, losses)

    step = None if in_blocks is None else state.block_step(in_blocks)
    finite = are_finite(state, step, others, groups)
    anew = step is not None and begin_checks(state, step, groups)
    usable = state.estimator.usable(expected=due.recording or state.options.rule.is_exact)
    scale = first_check(state, gradients, losses.loss)
    loss = None if losses.loss is None else state.replicas.mean(state.vectors.scalar + losses.loss)
    state.standstill.begin(members)
    causes = conditions(state, loss, finite if usable is None else [*finite, usable])
    moving = [flat for flat in (in_blocks, others) if flat is not None]
    ok = causes[GRADIENT]
    if not due.burning_in:
        pushed = has_gradient(state, step, others)
        state.standstill.note_idle(causes[LOSS] & ~pushed)
        if all_true(~pushed) and not (due.adapting or due.adapting_late):
            pass_over(state, due, moving, causes)
            return
        ok = ok & pushed
    accumulate(state, due, scale)
    if due.checking and step is not None:
        ok = checked_by_batch(state, step, ok, scale)

    recorded = average(state, due, groups, ok)
    if due.burning_in:
        state.schedule.burned_in += recorded
        return
    # Without a first factor there is no inverse until the next is due: the one step where the host waits to know.
    if due.first and not (recorded and ok.item()):
        pass_over(state, due, moving, causes if recorded else {NO_CASES: torch.zeros_like(ok)})
        return
    if due.adapting_late:
        measure_late(state, losses)
    renew_inverses(state, due, groups)
    if due.first:
        state.forwards.check_coverage({n: part for flat in moving for n, part in flat.flat.parts(flat.g).items()})

    with state.phases.measure("update"):
        move = partial(moved, state, step, others, ok)
        ok = measured_move(state, move, loss, losses) if due.adapting else move()
    undone = None if step is None else step.undone
    state.skipped += ~ok
    if undone is not None:
        state.undone += undone & ~ok
    look_at(state, moving, {**causes, UPDATE: ok if undone is None else ok | undone})
    if due.checking and step is not None:
        state.schedule.advance(state.checks.size.calm, step.check_next)
    else:
        state.schedule.advance(None, check_next=anew)
    if step is not None:
        note_check(state, step)


# --- before the update ------------------------------------------------------------------------------------------------


def is_step(state: StepState, due: Due, members: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether there is something to step with. Raises FactorNotReady for gradients without any recorded batch.

    members, gradients: the parameters of all groups, and their gradients.
    """
    forwards, estimator = state.forwards, state.estimator
    if not gradients and not due.burning_in:
        if forwards.called and any(parameter.requires_grad for parameter in members):
            state.standstill.note_without_gradient()
        return False
    if forwards.seen.forwards or state.schedule.counter or estimator.recorded:
        return True
    if any(bool(dense(shard(gradient)).any()) for gradient in gradients):
        raise nothing_recorded(state.net)
    return False  # torch.distributed.checkpoint takes such a step, only to have the state of the optimizer made


def refuse_wrong_start(
    state: StepState, due: Due, groups: Sequence[Group], gradients: Sequence[Tensor], losses: Losses
) -> None:
    """Raises ValueError for a loss that is missing, and before the first step for processes that differ."""
    if state.schedule.damping_rule is not None:
        check_losses(state.schedule.damping_rule, due, losses)
    if gradients and not state.forwards.checked:
        check_processes(state, groups)


def are_finite(
    state: StepState, step: BlockStep | None, others: FlatParameters | None, groups: Sequence[Group]
) -> list[Tensor]:
    """Whether the gradients are, 0-dim each: of the parameters in blocks, and of the others."""
    finite = [] if step is None else [state.options.rule.admits(step, groups, state.vectors.names)]
    return finite if others is None else [*finite, others.gradient_is_finite()]


def has_gradient(state: StepState, step: BlockStep | None, others: FlatParameters | None) -> Tensor:
    """Whether a gradient is other than zero, 0-dim.

    The gradients of a batch without a target are zero. In the averages of a rule they would count as much as those of a
    batch, and a check of this batch would find nothing. In the first step, there is no other gradient in the averages.
    """
    pushed = [] if step is None else [state.options.rule.has_gradient(step)]
    pushed += [] if others is None else [others.has_gradient()]
    return reduce(or_, pushed, torch.zeros_like(state.skipped, dtype=torch.bool))


def pass_over(state: StepState, due: Due, moving: Sequence[FlatParameters], causes: Mapping[str, Tensor]) -> None:
    """Count a step that is not taken, and comes again with the next batch. causes: as of `StandstillWatch.look`."""
    state.skipped += 1
    look_at(state, moving, causes)
    if due.first:  # gradients of zero have told nothing of the trained loss
        state.forwards.checked = False


def conditions(state: StepState, loss: Tensor | None, further: Sequence[Tensor]) -> dict[str, Tensor]:
    """The conditions of the step by cause, as of `StandstillWatch.look`. further: next to a finite loss, 0-dim."""
    finite = torch.ones_like(state.skipped, dtype=torch.bool) if loss is None else loss.isfinite()
    return {LOSS: finite, GRADIENT: reduce(and_, further, finite)}


def begin_checks(state: StepState, step: BlockStep, groups: Sequence[Group]) -> bool:
    """Prepare the checks for what others have done to the parameters since the last step. Returns whether parameters
    begin to move."""
    checks = state.options.checks
    if checks is None:
        return False
    begin_here(state.checks.place, step.flat)
    if anew := has_newcomers(state, step, groups):
        checks.begin_anew(step)
    return anew


def average(state: StepState, due: Due, groups: Sequence[Group], ok: Tensor) -> bool:
    """Take the statistics into the factors where `ok` is true, 0-dim. Returns whether there were any."""
    if due.first:
        choose_intervals(state)
    with state.phases.measure("statistics"):
        if state.replicas.number > 1 and state.damping.device.type == "cpu":
            steps = {"steps": str(state.schedule.counter)}
            state.estimator.agreed = lambda: steps | of_groups_as_text(state, groups)
        return state.estimator.fold(decay=1.0 if due.burning_in else state.schedule.present_decay, accept=ok)


def has_newcomers(state: StepState, step: BlockStep, groups: Sequence[Group]) -> bool:
    """Whether parameters begin to move. The numbers of groups that are tensors are not read."""
    schedule, newcomers, names = state.schedule, state.checks.newcomers, state.vectors.names
    still = [group for group in groups if not isinstance(group["lr"], Tensor) and group["lr"] == 0]
    of_still = frozenset(names[parameter] for group in still for parameter in group["params"])

    def resting() -> Iterator[str]:
        yield from of_still
        for group in groups:
            yield from (names[parameter] for parameter in group["params"] if not parameter.requires_grad)

    long_ago = schedule.last_check - schedule.intervals.checks
    return newcomers.look(frozenset(step.flat.parameters) - of_still, resting, schedule.counter, long_ago)


UNRECORDED = (
    "there are gradients, but no batch was ever recorded, so there is nothing to precondition them with: before "
    "step(), call the compiled module, net(x) and not the model it was made of, in training mode and with gradients "
    "enabled. Make KFAC(net) before that call: forwards before it record nothing. Other methods of the model record "
    "nothing, as in net.loss(x): let forward compute their results. Where a trainer calls the model itself, write "
    "kfac_fx.compile(model, ..., in_place=True)"
)
UNRECORDED_IN_PLACE = (
    "there are gradients, but no batch was ever recorded, so there is nothing to precondition them with: {model} is "
    "compiled in place, and was not called itself in training mode and with gradients enabled. Make KFAC(net) before "
    "that call: forwards before it record nothing. Calls of its parts record nothing, such as those in the "
    "training_step of a LightningModule: compile the module that is called, as in "
    "kfac_fx.compile(self.model, ..., in_place=True). Neither do those of torch.compile(model), which traces past the "
    "recording: write kfac_fx.compile(torch.compile(model), ..., in_place=True) and call net(x)"
)


def nothing_recorded(net: CompiledModule) -> FactorNotReady:
    text = UNRECORDED_IN_PLACE.format(model=class_of(net.model).__name__) if net.in_place else UNRECORDED
    return FactorNotReady(text + evaluating(net))


def check_processes(state: StepState, groups: Sequence[Group]) -> None:
    """Before the first message of all, because messages of different sizes end the processes without an error.

    Raises ValueError if the processes have different options, of the optimizer or of its groups, or blocks.
    """
    if state.replicas.number > 1:
        blocks = {
            f"the block of {', '.join(r.parameters)}": f"{r.approximation} of {r.matrix and list(r.matrix.shape)}"
            for r in state.net.registrations
        }
        state.replicas.check_options(state.options.common() | of_groups_as_text(state, groups) | blocks)


def of_groups_as_text(state: StepState, groups: Sequence[Group]) -> dict[str, str]:
    """The options of the group of every parameter. Waits for the device of tensors."""
    return {
        f"the group of {state.vectors.names[parameter]}": ", ".join(
            f"{key}={float(group[key]):g}" for key in OF_GROUPS if group.get(key) is not None
        )
        for group in groups
        for parameter in group["params"]
    }


def first_check(state: StepState, gradients: Sequence[Tensor], loss: Tensor | float | None) -> float:
    """Check the first gradients of all. Returns the factor of the loss in the backward, a GradScaler's, or 1."""
    forwards, scaler = state.forwards, state.options.grad_scaler
    first = bool(gradients) and not forwards.checked
    scale = 1.0
    # The host waits for the scale, so it is read only if it is needed.
    if first or (forwards.seen.batches and (forwards.seen.pending or forwards.seen.observed)):
        if scaler is not None:
            scale = scaler.get_scale()
        elif not state.estimator.records_in_training and (first or forwards.scaled):
            scale = scale_of_caller()  # statistics of the training backward need a scaler that is given
            forwards.scaled = scale != 1.0
    if first:
        warn_of_trainer(state.net, state.net.model)
        forwards.check_loss(loss, scale)
        shards = state.vectors.shards
        if shards is None:
            state.replicas.check_gradients([dense(gradient) for gradient in gradients])
            state.replicas.check_parameters([parameter.detach() for parameter in state.vectors.names])
        elif shards.tensor_parallel:  # FSDP2 averages the gradients itself
            named = {name: (parameter, parameter.grad) for parameter, name in state.vectors.names.items()}
            shards.check_gradients(
                {n: divided_like(p, gradient) for n, (p, gradient) in named.items() if gradient is not None}
            )
    return scale


def accumulate(state: StepState, due: Due, loss_scale: float) -> None:
    """Take the statistics of the forwards, which nothing else holds from here on."""
    seen = state.forwards.seen
    if seen.batches or seen.sums is not None:
        with state.phases.measure("statistics"):
            if seen.sums is not None:
                state.estimator.take(seen.sums)
                seen.sums = None
            for moments in seen.take_moments(state.options.reduction, loss_scale):
                state.estimator.accumulate(moments)
        state.forwards.note_taken()
    unrecorded = due.recording and state.schedule.counter > 0 and not seen.batches
    if unrecorded and not (state.options.rule.is_exact or due.checking):  # these need the batch, too: an error
        state.forwards.note_unrecorded()
        state.estimator.take_no_cases()


@OWN_PRECISION.entered()
def checked_by_batch(state: StepState, step: BlockStep, ok: Tensor, loss_scale: float) -> Tensor:
    """Make the check of this step, and go back to the last one if the loss has risen since. Returns whether the step is
    taken: a batch after a step that made the loss rise is in no average."""
    rule = state.options.checks
    assert rule is not None, "bug in kfac_fx: a check of a rule without checks"
    with state.phases.measure("update"):
        step.check = new_check(state, rule, loss_scale)
        if state.schedule.counter:
            tolerance, known = partial(rule.tolerated_rise, step), rule.known_rise(step, step.check)
            step.risen = risen = revert(step.size, step.flat, step.check, tolerance, ok, known)
            rule.reverted(step, step.check, risen)
            ok = ok & ~risen
    return ok


def new_check(state: StepState, rule: CheckedRule, loss_scale: float) -> Check:
    """Raises RuntimeError if there was no forward to check with."""
    seen = state.forwards.seen
    if not seen.observed:
        raise without_batch(state.net, f"{rule.written} checks the length of this step")
    # The loss does not depend on the outputs of a forward without gradients.
    trained = [forward for forward in seen.observed if forward.gradients] or seen.observed
    batch = BatchLoss(
        state.net,
        trained,
        state.multiply_jacobian,
        loss_scale,
        state.estimator.estimation_mode.endswith("GGN"),
        state.replicas,
        state.forwards.devices,
        seen.start,
        alone=len(seen.batches) == 1,
    )
    parameters = real_parameters((name, parameter.detach()) for parameter, name in state.vectors.names.items())
    return state.checks.new(batch, parameters, state.schedule.steps_since_check, rule.by_quotients)


def choose_intervals(state: StepState) -> None:
    """In the first step of a rule with checks, choose its intervals by what that step costs; the host waits."""
    estimator, options = state.estimator, state.options
    checks, rule = state.checks, options.checks
    if rule is None:
        return
    counts = estimator.pending_rows()
    if not counts:
        return
    each = [torch.as_tensor(count, dtype=state.damping.dtype, device=state.damping.device) for count in counts.values()]
    rows = dict(zip(counts, state.replicas.mean(torch.stack(each)).tolist(), strict=True))
    costs = StepCosts.of(
        state.net.program,
        estimator.groups,
        rows,
        options.fraction,
        in_training=estimator.records_in_training,
        with_product=not rule.by_quotients or checks.by_product is not None,
        check_share=checks.share,
        rates=Rates.of((parameter.device.type for parameter in state.vectors.names), state.forwards.halves),
        eigenbases=rule.has_bases,
    )
    state.schedule.choose(costs)
    estimator.cov_ema_decay = state.schedule.decay


def renew_inverses(state: StepState, due: Due, groups: Sequence[Group]) -> None:
    """Compute the inverses or bases that are due: all, or those of blocks that are young."""
    schedule, estimator = state.schedule, state.estimator
    if schedule.counter > 0:
        state.first_recorded |= dict.fromkeys(estimator.newcomers, schedule.counter)
    young = [key for key, n in state.first_recorded.items() if schedule.early(schedule.counter - n)]
    if not (due.inverting or young):
        return
    rule = state.options.rule
    estimator.damping.copy_(state.damping * rule.precon_damping_mult)
    estimator.damp_sides(rule.side_damping_with(max(float(group["weight_decay"]) for group in groups)))
    what = "eigenvectors" if rule.has_bases else "inverses"
    with state.phases.measure("inverses"), working(f"KFAC.step: new {what} of the Fisher blocks"):
        try:
            rule.decompose(estimator, None if due.inverting else young)
        except FactorNotReady as error:
            raise nothing_recorded(state.net) from error


# --- the update -----------------------------------------------------------------------------------------------------


def moved(
    state: StepState,
    step: BlockStep | None,
    others: FlatParameters | None,
    ok: Tensor,
    changes: list[Tensor] | None = None,
) -> Tensor:
    """Move the parameters. Returns whether they moved, 0-dim.

    changes: gets the changes of the loss that are predicted for the parts of the move; None if nobody measures it.
    """
    if others is not None:
        (move, new), finite = state.first_order_update(state.options.first_order_rule, others)
        ok = ok & finite
    if step is not None:
        step.ok = ok
        if state.net.backend == "cudagraphs":
            state.mark_static(step)
        ok = moved_in_blocks(state, step, changes)
    if others is not None:
        if changes is not None:
            changes.append(others.inner(others.g, move))  # no Fisher block: only the slope is known
        others.commit(move, new, ok)
    return ok


def moved_in_blocks(state: StepState, step: BlockStep, changes: list[Tensor] | None) -> Tensor:
    """direction, step size, guard, move. changes: as of `moved`."""
    rule = state.options.rule
    if step.check is None and changes is None and rule.is_whole and (whole := rule.whole_step(step)) is not None:
        ok, kappa = whole
        if kappa is not None:
            state.scalars["kappa"].copy_(kappa)
        return ok
    update = rule.update(step)
    if step.own is not None and state.standstill.before is not None:
        state.standstill.slope = step.flat.inner(step.g, update.vector)
    ok = step.ok if update.ok is None else update.ok
    if update.kappa is not None:
        state.scalars["kappa"].copy_(update.kappa)
    if step.check is not None and changes is None:
        return guarded_move(state, step, update, step.check, ok)
    move = rule.move(step, update)
    if changes is not None:
        changes.append(rule.predicted_change(step, move))
    ok = ok & step.flat.may_be_added(move)
    step.flat.commit(move, update.state, ok)
    if update.scalars:
        step.size.store(ok, **update.scalars)
    return ok


@OWN_PRECISION.entered()
def guarded_move(state: StepState, step: BlockStep, update: Update, check: Check, ok: Tensor) -> Tensor:
    """Make the move whose length the check decides, and undo it if the loss of the batch rises by too much. Returns
    whether the move stayed, 0-dim."""
    rule, flat, size = state.options.checks, step.flat, step.size
    assert rule is not None, "bug in kfac_fx: a check of a rule without checks"
    measured = rule.measured_move(step, update, check)
    tried = ok & flat.may_be_added(measured.move) & measured.finite
    slope = measured.slope if check.batch.observed else flat.inner(flat.g, measured.move)
    predicted = slope + 0.5 * measured.curvature
    kept, change, drift = take(flat, measured.move, update.state, check, measured.before, slope, measured.rise, tried)
    ratio = torch.where(kept, measured.ratio, 2 * measured.ratio).clamp(max=MOST_SHORTENED)
    value = torch.where(check.value.isfinite(), check.value, torch.inf)
    size.store(tried, ratio=ratio, value=value, **update.scalars, **measured.scalars)
    outcome = Outcome(tried, kept, change, predicted, drift)
    rule.checked_move(step, check, measured, outcome)
    step.undone = tried & ~kept if step.risen is None else (tried & ~kept) | step.risen
    state.scalars["predicted_change"].copy_(predicted)
    state.scalars["rho"].copy_(torch.where(ok, outcome.rho, state.scalars["rho"]))
    return kept


# --- after the update -------------------------------------------------------------------------------------------------


def look_at(state: StepState, moving: Sequence[FlatParameters], causes: Mapping[str, Tensor]) -> None:
    """Look at what the step has changed, if that is due. causes: as of `StandstillWatch.look`."""
    if state.standstill.before is not None:
        device = state.skipped.device
        pushed = [gradient.any().to(device) for flat in moving for gradient in flat.gradients.values()]
        rates = torch.stack([flat.largest_lr for flat in moving])
        state.standstill.look(state.skipped, state.undone, torch.stack(pushed).any(), rates.any(), causes)


def note_check(state: StepState, step: BlockStep) -> None:
    """Note where the step has left the parameters, and what its check found."""
    rule, checks = state.options.checks, state.checks
    if rule is None:
        return
    checks.place.note(step.flat.copies)
    if step.undone is not None:
        told = torch.zeros_like(step.undone) if step.on_trial else step.undone
        checks.watch.look(rule.divisor(step), told, state.schedule.last_check)


# --- measured steps ---------------------------------------------------------------------------------------------------


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


# --- callers ----------------------------------------------------------------------------------------------------------


def check_closure(state: StepState) -> None:
    """Raises ValueError if a closure inside the step would compute gradients that are not divided by a GradScaler."""
    scaler = state.options.grad_scaler
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "a GradScaler divides the gradients before the step, so a closure inside the step would leave its own "
            "undivided: call scaler.scale(loss).backward() first, and then scaler.step(optimizer), or "
            "scaler.step(optimizer, evaluate=closure) with a closure that returns the loss"
        )


def callers() -> Iterator[Any]:
    """The `self` of every frame above, from the nearest on."""
    frame = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_code.co_varnames and "self" in frame.f_locals:  # else the copy of its locals keeps them
            yield frame.f_locals["self"]
        frame = frame.f_back


def scale_of_caller() -> float:
    """The loss scale of the GradScaler whose `step` called, which has divided the gradients by it; 1 without one."""
    return next((float(caller.get_scale()) for caller in callers() if isinstance(caller, torch.amp.GradScaler)), 1.0)


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
