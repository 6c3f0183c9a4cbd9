"""The forwards of the net between two steps: what they record, and the closures that a step calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.loss_scale import check_scale, watch
from kfac_fx.estimator.estimator import FisherEstimator, PendingBatch
from kfac_fx.linalg.arguments import number, wrong_value
from kfac_fx.linalg.processes import is_sharded
from kfac_fx.optim.batch_loss import ObservedForward
from kfac_fx.optim.coverage import check_coverage
from kfac_fx.optim.micro_batches import Backward, LeftGradients, MicroBatch, MicroBatches, weakly
from kfac_fx.optim.precision import CheckPrecision
from kfac_fx.optim.schedule import Schedule
from kfac_fx.passes import results
from kfac_fx.passes.errors import plural
from kfac_fx.passes.matrix import HALVES
from kfac_fx.passes.torch_private import backward_here
from kfac_fx.passes.tracing.effects import closure_undone
from kfac_fx.passes.tracing.random_streams import RandomState
from kfac_fx.passes.tracing.signature import autocast
from kfac_fx.passes.users_code import warn_user
from kfac_fx.recording.captures import drop_gathered
from kfac_fx.recording.equivalence import differ, sampled_elements
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Key

Closure = Callable[[], Tensor | float]  # returns a loss
TrainingClosure = Callable[[], Tensor | float | None]  # computes the gradients, too; torch's need not return a loss


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
    scaled: bool = False  # a GradScaler that was not given called the first step
    unwatched: bool = False  # the comparison was impossible
    needs_graph: bool = False  # a loss takes derivatives, so gradients must be on when it is measured
    trained: bool = False  # a closure was seen to compute gradients
    zeroed: bool = False  # gradients were zeroed since the last closure was called
    unrecorded: int = 0  # the number of steps with statistics due and no forward before them
    came: bool = False  # a step took forwards whose backward came
    elsewhere: int = 0  # the number of steps whose gradients came without such a backward
    before: RandomState | None = None  # before the last forward, until the comparison
    recorded: list[Tensor] | None = None  # outputs of the last recording, until those of the model's own forward
    recorder: Recorder | None = None  # of the last forward, from before it, where its outputs are watched
    batch: MicroBatch | None = None  # of the last forward, until it has returned its outputs
    has_learned_inputs: bool = False  # an input of a forward before the first step requires a gradient
    derived: bool = False  # before the first step the user took derivatives of outputs, to train with them
    differentiable: bool = False  # the present backward makes a graph
    called: bool = False  # the net was called in training mode since the last step, with gradients enabled or not
    stepped: bool = False  # no backward has begun since the last step
    adds: bool = False  # the backwards since the last step have added to the gradients of before
    added: int | None = 0  # steps in a row whose gradients were added to those of the step before; None: not counted

    def __post_init__(self) -> None:
        net = self.net  # not `self`, which a graph would keep
        self.left = LeftGradients(lambda: (parameter for _, parameter in net.named_parameters()))
        self.begins, self.ends = weakly(self.backward_begins), weakly(self.backward_ends)

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
        with ExitStack() as on_error:
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
            if unnamed and not self.net.knows_no_loss:
                warn_user(UserWarning(WITHOUT_LOSS))
            self.decided, self.estimator.estimation_mode = True, options.mode_for(unnamed)
        self.halves = any(dtype in HALVES for _, dtype in autocast())
        if backward_here() < 0:  # a checkpoint runs its forward again inside of a backward
            if seen.trained and self.left.are_zeroed():
                self.gradients_zeroed()
            seen.add_up(self.lenient(schedule.burning_in))
        seen.forwards += 1
        self.batch, batch = None, MicroBatch(Backward(self.begins, self.ends))
        measured = schedule.adapting or schedule.checking
        if measured or not self.checked:
            self.before = batch.start = RandomState.now(self.devices)
        if options.rule.is_exact and not schedule.burning_in:
            batch.call = args, kwargs
        # Now, because the model's own forward may change what a capture depends on; and before the statistics, because
        # another path may bring new blocks.
        if schedule.checking or not self.checked:
            self.recorder = self.net.recorder(args, kwargs)
        only = None if schedule.recording else self.estimator.unrecorded()
        if only:  # on another path they may have no uses
            only &= self.net.recorder(args, kwargs).used
        recording = only is None or bool(only)
        beside = recording and not self.estimator.records_in_training and options.fraction == 1.0
        beside, self.recorded = beside and self.net.repeats_recordings, None
        if (recording or options.rule.is_exact) and self.estimator.outputs.due() and not beside:
            self.estimator.outputs.add(self.net.differs(args, kwargs))
        outputs = self.record(batch, args, kwargs, only, beside) if recording else None
        if recording or batch.call is not None or batch.start is not None:
            seen.batches.append(batch)
            self.batch = batch
        return outputs

    def lenient(self, burning_in: bool) -> bool:
        """Whether forwards without a backward count: in a burn-in, and as long as no backward has come to any.

        A user may compute the gradients elsewhere, and call the net for its statistics.
        """
        return burning_in or not self.came

    def close(self, burning_in: bool) -> None:
        """At the beginning of a step: keep the forwards that are a part of it."""
        self.count_added()
        self.seen.close(self.lenient(burning_in))

    def note_taken(self) -> None:
        """The statistics of these forwards are taken."""
        if self.seen.without_backward:
            self.elsewhere += not self.schedule.burning_in
        elif self.seen.batches:
            self.came = True

    def record(
        self,
        batch: MicroBatch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        only: frozenset[Key] | None,
        beside: bool,
    ) -> Any:
        """Record the batch. Returns the outputs if that ran the forward itself, else None.

        only: the registrations whose statistics are due; None: all. beside: whether to keep the outputs, for a
            comparison with those of the model's own forward.
        """
        options, generator = self.schedule.options, self.stream()
        if self.estimator.records_in_training:
            outputs, batch.pending = self.net.record_in_training(args, kwargs, generator=generator)
            batch.pending.only = only
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
        batch.sums = PendingBatch()
        self.estimator.accumulate(moments if only is None else replace(moments, only=only), into=batch.sums)
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
        batch, self.batch = self.batch, None
        if self.paused or batch is None:
            return
        batch.backward.wait_at(outputs)
        if self.recorder is None:
            return
        if self.schedule.checking:
            precision = CheckPrecision.of_call(self.recorder, args, kwargs)
            batch.observed = ObservedForward.of(self.recorder, args, kwargs, outputs, precision)
        if not self.checked:
            leaves = results.tree_leaves((args, kwargs))
            self.has_learned_inputs |= any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if not self.checked and self.before is not None:
            batch.watched = watch(self.recorder, args, kwargs, outputs, self.before)

    def gradients_zeroed(self) -> None:
        if not self.paused:
            self.zeroed = True
            self.added = None if self.schedule.counter else self.added
            self.seen.gradients_zeroed()

    def backward_begins(self, number: int) -> None:
        """Called before a backward has computed any gradient."""
        self.differentiable = torch.is_grad_enabled()  # create_graph=True
        if self.seen.trained_before(number) and self.left.are_zeroed():
            self.zeroed, self.added = True, None  # this user zeroes gradients
            self.seen.gradients_zeroed(number)
        if self.stepped and self.added is not None:
            if self.left.are_zeroed():
                self.added = None
            else:
                self.left.begin()
        self.stepped = False

    def backward_ends(self) -> None:
        """Called behind a backward."""
        self.adds |= self.left.note()
        by_inputs = self.differentiable and self.has_learned_inputs
        self.derived |= by_inputs and not self.checked and self.left.first is None

    def count_added(self) -> None:
        """At the beginning of a step. Warns at the second of two whose gradients were added to those before."""
        if self.added is not None and self.schedule.counter:
            self.added = self.added + 1 if self.adds else None  # the second step of all shows it
        self.adds = False
        if self.added == 2:
            self.added = None
            warn_user(
                RuntimeWarning(
                    "the gradients of this step were added to those of the steps before it, because no gradient was "
                    "zeroed between them: write optimizer.zero_grad() before every backward() that begins a step. If "
                    "steps are meant to have the gradients of earlier batches, too, nothing is wrong."
                )
            )

    def forget(self) -> None:
        """Ignore the forwards since the last step."""
        self.stepped, self.called = True, False
        self.seen = MicroBatches()
        self.recorder = self.batch = None

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
            derived=self.derived and not self.net.knows_no_loss,
            replicas=self.estimator.replicas,
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
                    "before it whose backward came.\nCall the compiled module, net(x) and not the model it was made "
                    "of, after net.train() and with gradients enabled, and call backward on a loss of its outputs; or "
                    "compile with in_place=True. net.report counts such steps."
                )
            )

    def fallbacks(self) -> list[str]:
        """For the report: the checks and recordings that did not happen, and why."""
        unwatched = (
            "whether the training loss is the registered one was not checked: the first step's forward had no outputs "
            "of the Fisher to watch, or no memory for it"
        )
        stale = f"statistics were due at {self.unrecorded} steps that no forward with a backward came before"
        elsewhere = (
            f"the gradients of {plural(self.elsewhere, 'step')} did not come from a backward through outputs of the "
            "net, so the statistics are those of all forwards before, also of batches that were given up"
        )
        reasons = {unwatched: self.unwatched, stale: self.unrecorded, elsewhere: self.elsewhere}
        return [reason for reason, happened in reasons.items() if happened]

    # --- losses -----------------------------------------------------------------------------------------------------

    def measure(self, closure: TrainingClosure, with_backward: bool, start: RandomState | None) -> Tensor | float:
        """The closure's loss at the present parameters, from the random streams `start`, without a trace.

        with_backward: the closure computes the gradients, too. Gradients are on only if the closure differentiates.
        """
        try:
            return self.ask(closure, with_backward, start)
        except RuntimeError as error:
            if with_backward or self.needs_graph or "does not require grad" not in str(error):
                raise
        self.needs_graph = True  # something was differentiated while gradients were off
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


WITHOUT_LOSS = (
    "compile captured a call that computes its loss, and the first call in training computes none that is known, so "
    "the factors are those of the gradients that training sends back. If the training computes the loss, as a trainer "
    "does with label smoothing, name it and leave its targets out of the example inputs: compile(model, ..., "
    "loss=lambda outputs: kfac_fx.losses.Categorical(outputs['logits'])). Else call net with its targets"
)
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


def without_batch(net: CompiledModule, purpose: str) -> RuntimeError:
    """The error for a step that needs its batch, and has none. purpose: the beginning of a sentence, "... with it"."""
    return RuntimeError(
        f"{purpose} with the batch of the step, and has none: since the last step net(x) was not called in training "
        "mode with gradients enabled, or no backward came to its outputs. Before every step(), call the compiled "
        f"module, net(x) and not the model it was made of, and backward() on a loss of its outputs{evaluating(net)}"
    )


def evaluating(net: CompiledModule) -> str:
    """The end of an error about forwards that were not recorded."""
    return "" if net.training else ". The net is in evaluation mode now: write net.train()"


@contextmanager
def outside_autocast() -> Iterator[Callable[[Callable[..., Any] | None], Callable[..., Any] | None]]:
    """Inside, nothing is rounded by an autocast that a user has entered. Yields a function that returns a user's
    function as it runs outside: under that autocast."""
    ambient = autocast()

    def as_outside(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if function is None or not ambient:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for kind, dtype in ambient:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for kind, _ in ambient:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield as_outside


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


def refuse_no_closure(takes: str, given: object) -> None:
    """Raises TypeError for an argument of a step that is not called. takes: what it is."""
    if given is not None and not callable(given):
        text = f"{takes}, and got a {type(given).__name__}: write step(loss=loss) for a loss, and step() for none"
        raise TypeError(text)


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
