"""The forwards of the net between two steps: what they record, and the closures that a step calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.linalg.arguments import number, wrong_value
from kfac_fx.linalg.processes import is_sharded
from kfac_fx.optim.batch_loss import ObservedForward
from kfac_fx.optim.curvature import CheckPrecision
from kfac_fx.optim.loss_scale import Watched, check_coverage, check_scale, watch
from kfac_fx.optim.schedule import Schedule
from kfac_fx.passes import results
from kfac_fx.passes.matrix import HALVES
from kfac_fx.passes.tracing.effects import closure_undone
from kfac_fx.passes.tracing.random_streams import RandomState
from kfac_fx.passes.tracing.signature import autocast
from kfac_fx.passes.users_code import warn_user
from kfac_fx.recording.captures import drop_gathered
from kfac_fx.recording.equivalence import differ, sampled_elements
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Key, Moments, PendingMoments

ForwardArguments = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a forward
Closure = Callable[[], Tensor | float]  # returns a loss
TrainingClosure = Callable[[], Tensor | float | None]  # computes the gradients, too; torch's need not return a loss


@dataclass
class MicroBatches:
    """The forwards since the last step."""

    forwards: int = 0  # how many there were
    calls: list[ForwardArguments] = field(default_factory=list)  # if the step needs them again, which drops them
    pending: list[PendingMoments] = field(default_factory=list)  # statistics that wait for the user's backward
    dropped: list[PendingMoments] = field(default_factory=list)  # those whose gradients were zeroed
    start: RandomState | None = None  # the random streams before the first forward
    watched: list[Watched] = field(default_factory=list)  # the gradients of the outputs, until the first step
    observed: list[ObservedForward] = field(default_factory=list)  # those whose loss is measured by a check

    def take_moments(self, reduction: str, loss_scale: float) -> list[Moments]:
        """The statistics of the forwards whose backward happened, for gradients of the loss summed over cases. They
        wait no longer.

        Args:
            reduction: "mean" if the step's gradient is that of a mean over the cases of all micro-batches.
            loss_scale: the factor of the loss in the backward, as that of a GradScaler.

        Raises:
            RuntimeError: for a forward with two backwards.
        """
        for batch in self.dropped:
            batch.check_backwards()
        done = [batch for batch in self.pending if backward_happened(batch)]
        self.pending = [batch for batch in self.pending if not backward_happened(batch)]
        cases = sum(batch.cases for batch in done)
        return [batch.moments(reduction, cases, loss_scale) for batch in done]

    def gradients_zeroed(self) -> None:
        """The backwards so far are no part of the step's gradient."""
        self.dropped += [batch for batch in self.pending if backward_happened(batch)]
        self.pending = [batch for batch in self.pending if not backward_happened(batch)]
        self.watched = [watched for watched in self.watched if not watched.gradients]
        self.observed = [forward for forward in self.observed if not forward.gradients]

    def copy(self) -> MicroBatches:
        return MicroBatches(
            self.forwards,
            [*self.calls],
            [*self.pending],
            [*self.dropped],
            self.start,
            [*self.watched],
            [*self.observed],
        )

    def forget_after(self, before: MicroBatches) -> None:
        """Forget the forwards since the copy `before`, and keep that gradients of earlier ones were zeroed since."""
        self.forwards, self.start = before.forwards, before.start
        del self.calls[len(before.calls) :]
        self.pending = [batch for batch in self.pending if any(batch is earlier for earlier in before.pending)]
        self.dropped = [batch for batch in self.dropped if any(batch is e for e in (*before.pending, *before.dropped))]
        self.watched = [watched for watched in self.watched if any(watched is earlier for earlier in before.watched)]
        self.observed = [forward for forward in self.observed if any(forward is e for e in before.observed)]


def backward_happened(batch: PendingMoments) -> bool:
    """False for a forward without a backward, as one that measures the accuracy."""
    receivers = [*(probe for probes in batch.probes for probe in probes.values()), *batch.generic.values()]
    return not receivers or any(receiver.grad is not None for receiver in receivers)


@dataclass(eq=False)
class Forwards:
    """Listens to the forwards of one net, and calls the closures of a step."""

    net: CompiledModule
    schedule: Schedule
    estimator: FisherEstimator
    generator: torch.Generator  # of all that is sampled
    devices: tuple[torch.device, ...]  # those with random streams beside the CPU's
    seen: MicroBatches = field(default_factory=MicroBatches)  # the forwards since the last step
    paused: bool = False  # a loss is being measured, so forwards are ignored
    decided: bool = False  # how statistics are estimated
    halves: bool = False  # the last forward computed in half precision
    checked: bool = False  # the training loss has been compared with the registered loss
    unwatched: bool = False  # the comparison was impossible
    needs_graph: bool = False  # a loss takes derivatives, so gradients must be on when it is measured
    trained: bool = False  # a closure was seen to compute gradients
    zeroed: bool = False  # gradients were zeroed since the last closure was called
    unrecorded: int = 0  # the number of steps with statistics due and no forward before them
    before: RandomState | None = None  # before the last forward, until the comparison
    recorded: list[Tensor] | None = None  # outputs of the last recording, until those of the model's own forward
    recorder: Recorder | None = None  # of the last forward, from before it, where its outputs are watched

    @property
    def mode_is_known(self) -> bool:
        """Whether the estimation mode was given, or a capture, a forward or a state has decided it."""
        named = bool(self.net.captures.all) and not self.net.knows_no_loss
        return self.decided or self.schedule.options.estimation_mode is not None or named

    # --- what the net and the user report ---------------------------------------------------------------------------

    @contextmanager
    def forgetting_on_error(self) -> Iterator[None]:
        """If an exception leaves the block, what forwards in it recorded is forgotten, and the random stream of the
        targets is as it was."""
        before, random = self.seen.copy(), self.generator.get_state()
        with ExitStack() as on_error, self.estimator.forgetting_on_error():
            on_error.callback(self.generator.set_state, random)
            on_error.callback(self.seen.forget_after, before)
            yield
            on_error.pop_all()

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the batch if statistics are due. Returns the outputs if it ran the forward itself, else None."""
        if self.paused:
            return None
        options, seen, schedule = self.schedule.options, self.seen, self.schedule
        if not self.decided and options.estimation_mode is None:
            unnamed = not self.net.recorder(args, kwargs).knows_loss
            self.decided, self.estimator.estimation_mode = True, options.mode_for(unnamed)
        self.halves = any(dtype in HALVES for _, dtype in autocast())
        if (seen.pending or seen.watched or seen.observed) and all(
            parameter.grad is None for _, parameter in self.net.named_parameters()
        ):
            self.gradients_zeroed()  # by hand, or by the model that the net was compiled from
        measured = schedule.adapting or schedule.checking
        if (measured and not seen.forwards) or not self.checked:
            self.before = RandomState.now(self.devices)
            seen.start = seen.start or self.before
        seen.forwards += 1
        if options.rule.is_exact and not schedule.burning_in:
            seen.calls.append((args, kwargs))
        only = None if schedule.recording else self.estimator.unrecorded()
        if only:  # on another path they may have no uses
            only &= self.net.recorder(args, kwargs).used
        recording = only is None or bool(only)
        beside = recording and not self.estimator.records_in_training and options.fraction == 1.0
        beside, self.recorded = beside and self.net.repeats_recordings, None
        if (recording or options.rule.is_exact) and self.estimator.outputs.due() and not beside:
            self.estimator.outputs.add(self.net.differs(args, kwargs))
        outputs = self.record(args, kwargs, only, beside) if recording else None
        # Now, because the model's own forward may change what a capture depends on.
        if schedule.checking or not self.checked:
            self.recorder = self.net.recorder(args, kwargs)
        return outputs

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], only: frozenset[Key] | None, beside: bool) -> Any:
        """Record the batch. Returns the outputs if that ran the forward itself, else None.

        only: the registrations whose statistics are due; None: all. beside: whether to keep the outputs, for a
            comparison with those of the model's own forward.
        """
        options, generator = self.schedule.options, self.stream()
        if self.estimator.records_in_training:
            outputs, batch = self.net.record_in_training(args, kwargs, generator=generator)
            batch.only = only
            self.seen.pending.append(batch)
            return outputs
        mode, fraction = self.estimator.estimation_mode, options.fraction
        with self.estimator.early_sums(mode) as early:
            moments = self.net.record(
                args,
                kwargs,
                mode=mode,
                targets=None,
                fraction=fraction,
                generator=generator,
                on_outputs=self.keep if beside else None,
                on_sum=early,
            )
        self.estimator.accumulate(moments if only is None else replace(moments, only=only))
        return None

    def stream(self) -> torch.Generator:
        """The random stream of a recording."""
        replicas, schedule = self.estimator.replicas, self.schedule
        if replicas is None:
            return self.generator
        return replicas.stream(self.generator, schedule.burned_in, schedule.counter, self.seen.forwards)

    def keep(self, outputs: list[Any]) -> None:
        self.recorded = sampled_elements(outputs)

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Compare the outputs with those that were recorded. In the first step, and where a check is due, watch the
        gradients that the user's backward sends into them."""
        if self.recorded is not None and not self.paused:
            rounding = self.net.rounding(args, kwargs)
            self.estimator.outputs.add(differ(self.recorded, sampled_elements(results.tree_leaves(outputs)), rounding))
            self.recorded = None
        if self.paused or self.recorder is None:
            return
        if self.schedule.checking:
            precision = CheckPrecision.of_call(self.recorder, args, kwargs)
            self.seen.observed.append(ObservedForward.of(self.recorder, args, kwargs, outputs, precision))
        if self.checked or self.before is None:
            return
        watched = watch(self.recorder, args, kwargs, outputs, self.before)
        self.seen.watched += [] if watched is None else [watched]

    def gradients_zeroed(self) -> None:
        if not self.paused:
            self.zeroed = True
            self.seen.gradients_zeroed()

    def forget(self) -> None:
        """Ignore the forwards since the last step."""
        self.seen = MicroBatches()
        self.recorder = None

    # --- the closure that trains ------------------------------------------------------------------------------------

    def train(self, closure: TrainingClosure, measures: bool = False) -> Tensor | float | None:
        """Call a closure that computes the gradients. Its forwards are micro-batches of the step, beside earlier ones.

        If it raises, all that it recorded is forgotten, and the random stream of the targets is as it was.

        measures: the closure also measures the loss of the whole step.

        Raises:
            ValueError: the first closure of all has computed a loss and no gradients; or the closure measures the loss,
                and has computed only a part of the gradients.
        """
        earlier = self.seen.forwards > 0 and any(p.grad is not None for _, p in self.net.named_parameters())
        self.zeroed = False
        with torch.enable_grad(), self.forgetting_on_error():
            if self.trained:
                loss = closure()
            else:
                with backwards_into(parameter for _, parameter in self.net.named_parameters()) as backwards:
                    loss = closure()
                # FSDP2 writes the gradients of shards itself, which calls no hooks.
                trained = bool(backwards) or any(
                    is_sharded(p) and p.grad is not None for _, p in self.net.named_parameters()
                )
                if isinstance(loss, Tensor) and loss.requires_grad and not trained:
                    raise ValueError(NO_BACKWARD)
                self.trained = trained
            if measures and earlier and not self.zeroed:
                raise ValueError(PART_ONLY)
        return loss

    # --- warnings and fallbacks -------------------------------------------------------------------------------------

    def check_loss(self, loss: Tensor | float | None, loss_scale: float) -> None:
        """Compare the training loss with the registered one, at the first step with gradients; the host waits.

        Warns with LossScaleWarning.
        """
        self.unwatched = not self.seen.watched and not self.net.knows_no_loss
        options = self.schedule.options
        value = None if loss is None else float(loss)
        check_scale(
            self.seen.watched,
            reduction=options.reduction,
            loss_scale=loss_scale,
            value=value,
            in_training=self.estimator.records_in_training,
            recorded=float(sum(batch.cases for batch in self.seen.pending)),
        )
        self.checked, self.before = True, None

    def check_coverage(self, gradients: Mapping[str, Tensor]) -> None:
        """Warn of parameters that have a gradient and no curvature; the host waits. gradients: by parameter."""
        if self.schedule.options.fraction == 1.0:  # in a part of a batch, experts may have no rows
            check_coverage(self.estimator, gradients, whole=not self.net.program.submodules)

    def note_unrecorded(self) -> None:
        """Count a step with statistics due and no forward before it; warns at the first."""
        self.unrecorded += 1
        if self.unrecorded == 1:
            warn_user(
                RuntimeWarning(
                    "a step takes factors of earlier batches, though statistics are due: no forward was recorded "
                    "before it.\nCall the compiled module, net(x) and not the model it was made of, after net.train() "
                    "and with gradients enabled; or compile with in_place=True. net.report counts such steps."
                )
            )

    def fallbacks(self) -> list[str]:
        """For the report: the checks and recordings that did not happen, and why."""
        unwatched = (
            "whether the training loss is the registered one was not checked: the first step's forward had no outputs "
            "of the Fisher to watch, or no memory for it"
        )
        stale = f"statistics were due at {self.unrecorded} steps that no forward came before"
        return [unwatched] * self.unwatched + [stale] * bool(self.unrecorded)

    # --- losses -----------------------------------------------------------------------------------------------------

    def measure(self, closure: TrainingClosure, with_backward: bool, start: RandomState | None) -> Tensor | float:
        """The closure's loss at the present parameters, from the random streams `start`, without a trace.

        with_backward: the closure computes the gradients, too. Gradients are on only if the closure differentiates.
        """
        try:
            return self.ask(closure, with_backward, start)
        except RuntimeError as error:
            if with_backward or self.needs_graph or not lacks_graph(error):
                raise
        self.needs_graph = True
        return self.ask(closure, with_backward, start)

    def ask(self, closure: TrainingClosure, with_backward: bool, start: RandomState | None) -> Tensor | float:
        parameters = [parameter for _, parameter in self.net.named_parameters()]
        self.paused = True
        try:
            with closure_undone(self.net.buffers(), parameters, self.devices, start):
                try:
                    with torch.set_grad_enabled(with_backward or self.needs_graph):
                        loss = checked(closure())
                finally:
                    if any(map(is_sharded, parameters)):
                        drop_gathered(self.net.model)
                if not with_backward and any(parameter.grad is not None for parameter in parameters):
                    raise RuntimeError(
                        "a closure that is given by keyword calls backward, but it is asked for a loss alone. Either "
                        "call backward before step(evaluate=closure) and not in the closure, or write step(closure) "
                        "and do everything in it: zero_grad(), forward, backward, return the loss"
                    )
        finally:
            self.paused = False
        return loss


NO_BACKWARD = (
    "the closure of step(closure) returned a loss and called no backward. A closure by position computes the "
    "gradients: zero_grad(), forward, backward, return the loss. If the gradients are there before the step, call "
    "step(), or step(evaluate=closure) where the loss at the new parameters is needed"
)
PART_ONLY = (
    "adapt_damping measures the loss of the whole step, and the closure computes that of its last micro-batch: there "
    "were forwards and gradients before it. Write step(closure, evaluate=...) with a closure that returns the mean "
    "loss over all micro-batches"
)


@contextmanager
def backwards_into(parameters: Iterable[Tensor]) -> Iterator[list[bool]]:
    """A list that is empty as long as no backward has reached the parameters."""
    backwards: list[bool] = []
    with ExitStack() as hooks:
        for parameter in parameters:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(lambda _: backwards.append(True))
                hooks.callback(handle.remove)
        yield backwards


def checked(loss: Tensor | float | None) -> Tensor | float:
    if loss is None:
        raise ValueError("the closure returned None: it must return the loss of the batch")
    refuse_other_losses(loss)
    return loss


def refuse_other_losses(loss: Any) -> None:
    """Raises ValueError for losses of single cases instead of one loss, and for anything but a number."""
    if loss is not None and not isinstance(loss, Tensor):
        number("the loss of a step", loss)
    if isinstance(loss, Tensor) and (loss.is_meta or loss.is_complex()):
        raise wrong_value("the loss of a step", loss, "be a number")
    if isinstance(loss, Tensor) and loss.dim():
        raise ValueError(
            f"the loss has the shape {list(loss.shape)}, and a step takes one number: write loss.mean(), or "
            "reduction='mean' in the loss function"
        )


def lacks_graph(error: RuntimeError) -> bool:
    """Whether torch raised this because something was differentiated while gradients were off."""
    return "does not require grad" in str(error)
