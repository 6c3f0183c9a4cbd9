"""The forwards of the net between two steps: what they record, and the closures that a step calls.

**Micro-batches**: the forwards since the last step, and which of them are a part of it: those whose gradients the step
gets.

A forward may be given up: no backward comes to its outputs, or gradients are zeroed behind it. Then nothing of it is in
the statistics, the quadratic model and the checks of the step. A hook on the outputs notices the backward. `zero_grad`
of the optimizer and of the compiled module tell that gradients are zeroed. That of the model does not, nor does
`parameter.grad = None`, so `LeftGradients` looks at the gradients when the next forward or backward begins.

`torch.autograd.grad` leaves no gradients, so that there are none says nothing behind it. Several of these calls are
parts of one step, as the gradients of tasks that the user combines, until a backward leaves gradients: then they were
for something else, as were those that make a graph, and those at other parameters, as the first one of SAM. Where the
user zeroes gradients after the backward of a task, and gives the parameters other ones at the end, the loss of the step
is not known, and is not compared.

**Join**: processes that run out of batches, inside of `torch.distributed.algorithms.join.Join([wrapped, optimizer])`.

Such a process stands in for itself: it goes on to take part in the messages of the others until none has a batch. The
hook of DistributedDataParallel sends zeros instead of its gradients, and drops the average. That of KFAC takes the
steps of a process without cases. It calls the net with an empty batch, receives the averaged gradient from a process
that has one, and takes the step: the blocks and the momentum that it owns, and its copy of the parameters, go on.

A step inside of Join tells all processes which of them have a batch: one message of a few numbers, for which the host
waits. Two more messages carry the gradient and the numbers of the parameter groups while a process stands in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from kfac_fx.compiled.compiled_module import CompiledModule, own_saved_tensors
from kfac_fx.compiled.loss_scale import LossScaleWarning, Watched, check_scale, watch, watch_unnamed
from kfac_fx.estimator.estimator import FisherEstimator, PendingBatch
from kfac_fx.linalg.arguments import number, wrong_kind, wrong_value
from kfac_fx.linalg.matrices import dense, dense_or_zero
from kfac_fx.linalg.processes import Replicas, is_sharded
from kfac_fx.losses.declared import place_of_tensor
from kfac_fx.optim.batch_loss import CheckPrecision, ObservedForward
from kfac_fx.optim.groups import OF_GROUPS, Group
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.standstill import check_coverage
from kfac_fx.passes import results
from kfac_fx.passes.errors import plural, warn_user
from kfac_fx.passes.matrix import HALVES, complex_numbers, real_numbers
from kfac_fx.passes.torch_private import after_backward, backward_here, grad_runs, version, versions
from kfac_fx.passes.tracing.effects import RandomState, closure_undone
from kfac_fx.passes.tracing.signature import all_on, autocast
from kfac_fx.recording.captures import drop_gathered
from kfac_fx.recording.equivalence import differ, sampled_elements
from kfac_fx.recording.output_losses import OTHER_FACTOR
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Key, Moments, PendingMoments

ForwardArguments = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a forward


class LeftGradients:
    """The gradients that the last backward has left.

    parameters: returns those of the net.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self.parameters = parameters
        self._first: weakref.ref[Tensor] | None = None
        self._version = 0
        self._before: tuple[weakref.ref[Tensor], int] | None = None  # as `_first` and `_version`, see `begin`

    def begin(self) -> None:
        """At the beginning of a backward that `note` is asked about."""
        first, left = self.first, None if self._first is None else self._first()
        self._before = None if first is None or first is not left else (weakref.ref(first), version(first))

    def note(self) -> bool:
        """At the end of a backward. Returns whether it has added to the gradients that were there at `begin`."""
        first, before = self.first, self._before
        self._first, self._version = (None, 0) if first is None else (weakref.ref(first), version(first))
        self._before = None
        return first is not None and before is not None and before[0]() is first and before[1] != self._version

    @property
    def first(self) -> Tensor | None:
        return next((p.grad for p in self.parameters() if p.grad is not None), None)

    @property
    def versions(self) -> list[int]:
        """How often every parameter was written into."""
        return versions(self.parameters())

    @property
    def are_others(self) -> bool:
        """Whether the user has given the parameters other gradients since."""
        return self._first is not None and self.first is not None and self._first() is not self.first

    @torch.no_grad()
    def are_zeroed(self) -> bool:
        """Whether all of them are None or zero. The host reads them if they were written since the backward."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not gradients:  # while FSDP2 has gathered the parameters, their gradients are elsewhere
            left = None if self._first is None else self._first()
            return left is None or not is_sharded(left) or any(map(is_sharded, self.parameters()))
        first = gradients[0]
        as_left = self._first is not None and self._first() is first and version(first) == self._version
        if as_left or any(map(is_sharded, gradients)):  # processes would read different shards
            return False
        return not any(bool(dense(gradient).any()) for gradient in gradients)


def nothing(*_: Any) -> None:
    """There is no listener."""


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method as long as its object is there, which the function does not keep."""
    reference = weakref.WeakMethod(method)

    def call(*args: int) -> None:
        if (bound := reference()) is not None:
            bound(*args)

    return call


class Backward:
    """Whether a backward has come to the outputs of a forward, and whether one can still come.

    Only the graph of the outputs holds the hook, so the hook ends with the graph.

    begins, ends: called with the number of a backward, before it has computed any gradient of the outputs, and behind
        it.
    """

    def __init__(self, begins: Callable[[int], None] = nothing, ends: Callable[[], None] = nothing) -> None:
        self.begins, self.ends = begins, ends
        self.number: int | None = None  # of the last backward
        self._hook: weakref.ref[Callable[[Tensor | None], None]] | None = None

    def wait_at(self, outputs: Any) -> None:
        """Wait for a gradient of any of the tensors that the model returned."""
        hook = partial(self.note)
        for leaf in results.tree_leaves(outputs):
            # The hook of a parameter or an input that the model returns would stay behind the graph.
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(hook)
                self._hook = weakref.ref(hook)

    def note(self, gradient: Tensor | None) -> None:
        number = backward_here()
        if gradient is not None and number != self.number:
            self.begins(number)
            self.number = number
            after_backward(self.ends)

    @property
    def came(self) -> bool:
        return self.number is not None

    @property
    def is_hidden(self) -> bool:
        """Whether there was no tensor to wait at."""
        return self._hook is None

    @property
    def may_come(self) -> bool:
        return self._hook is not None and self._hook() is not None


@dataclass(eq=False)
class MicroBatch:
    """One forward since the last step, with all that the step needs of it."""

    backward: Backward = field(default_factory=Backward)
    call: ForwardArguments | None = None  # if the step needs it again
    sums: PendingBatch | None = None  # the statistics of a pass of its own, until they are added to others
    pending: PendingMoments | None = None  # statistics that wait for the user's backward
    start: RandomState | None = None  # the random streams before the forward
    recorder: Recorder | None = None  # from before the forward, where its outputs are watched
    recorded: list[Tensor] | None = None  # outputs of the recording, until those of the model's own forward
    watched: Watched | None = None  # the gradients of the outputs, until the first step
    observed: ObservedForward | None = None  # if a check measures the loss

    @property
    def trained(self) -> bool:
        return self.backward.came or (self.pending is not None and self.pending.filled)

    def keep(self, outputs: list[Any]) -> None:
        """Keep the outputs of the recording."""
        self.recorded = sampled_elements(outputs)

    @property
    def is_over(self) -> bool:
        """Whether no backward can come any more."""
        unknown = self.backward.is_hidden and self.pending is not None
        return not (unknown or self.backward.may_come)

    def gradients_zeroed(self) -> bool:
        """Forget the backwards so far. Returns whether another one may come."""
        self.backward.number = None
        if self.pending is not None:
            self.pending.empty()
        if self.watched is not None:
            self.watched.of_numbers.clear()
        for listener in (self.watched, self.observed):
            for of in () if listener is None else (listener, listener.otherwise):
                if of is not None:
                    of.gradients.clear()
        return self.backward.may_come


@dataclass
class MicroBatches:
    """The forwards since the last step.

    A forward is a part of the step if its backward came, and no gradient was zeroed since. Statistics of another one
    are freed when its graph is gone, as that of a forward that measures the accuracy. Micro-batches whose graph is gone
    keep one sum of all their statistics.
    """

    forwards: int = 0  # how many there were, with those that were given up
    batches: list[MicroBatch] = field(default_factory=list)
    sums: PendingBatch | None = None  # of micro-batches whose backward came
    without: PendingBatch | None = None  # of forwards to which no backward can come any more
    zeroings: int = 0  # how often gradients were zeroed
    given_up: bool = False  # a backward had come before
    apart: bool = False  # all backwards were calls of torch.autograd.grad that made no graph
    without_backward: bool = False  # the step takes forwards to which no backward came

    @property
    def calls(self) -> list[ForwardArguments]:
        return [batch.call for batch in self.batches if batch.call is not None]

    @property
    def pending(self) -> list[PendingMoments]:
        return [batch.pending for batch in self.batches if batch.pending is not None]

    @property
    def watched(self) -> list[Watched]:
        each = (batch.watched.as_arrived for batch in self.batches if batch.watched is not None)
        return [watched for watched in each if watched is not None]

    @property
    def observed(self) -> list[ObservedForward]:
        return [batch.observed.as_arrived for batch in self.batches if batch.observed is not None]

    @property
    def start(self) -> RandomState | None:
        """The random streams before the first forward."""
        return self.batches[0].start if self.batches else None

    @property
    def trained(self) -> bool:
        """Whether a backward came."""
        return self.sums is not None or any(batch.trained for batch in self.batches)

    def trained_before(self, number: int) -> bool:
        """Whether a backward came before that of this number."""
        of_others = (batch.trained and batch.backward.number != number for batch in self.batches)
        return self.sums is not None or any(of_others)

    def add_up(self, lenient: bool) -> None:
        """Free what is not needed any more.

        lenient: keep forwards without a backward.
        """
        kept, in_order = [], True
        for batch in self.batches:
            over, trained = batch.is_over, batch.trained
            if over and not trained and not lenient:
                continue
            if over and batch.sums is not None and (in_order or not trained):
                if trained:
                    self.sums = joined(self.sums, batch.sums)
                else:
                    self.without = joined(self.without, batch.sums)
                batch.sums = None
            in_order = in_order and (batch.sums is None or not trained)
            kept.append(batch)
        self.batches = kept

    def close(self, lenient: bool) -> None:
        """Keep the forwards that are a part of the step. lenient: without any backward these are all."""
        trained = [batch for batch in self.batches if batch.trained]
        self.without_backward = lenient and not trained and bool(self.batches)
        if self.without_backward:
            self.sums = joined(self.sums, self.without)
        else:
            self.batches = trained
        for batch in self.batches:
            self.sums, batch.sums = joined(self.sums, batch.sums), None
        self.without = None

    def take_moments(self, reduction: str, loss_scale: float) -> list[Moments]:
        """The statistics that backwards left, for gradients of the loss summed over cases. They wait no longer.

        Args:
            reduction: "mean" if the step's gradient is that of a mean over the cases of all micro-batches.
            loss_scale: the factor of the loss in the backward, as that of a GradScaler.

        Raises:
            RuntimeError: for a forward with two backwards.
        """
        done = [pending for pending in self.pending if pending.filled]
        for batch in self.batches:
            batch.pending = None
        cases = sum(pending.cases for pending in done)
        return [pending.moments(reduction, cases, loss_scale) for pending in done]

    def gradients_zeroed(self, number: int | None = None) -> None:
        """The backwards so far are no part of the step's gradient. number: of one that is just beginning."""
        self.zeroings += 1
        self.given_up |= self.trained
        self.apart, self.sums = False, None
        self.batches = [b for b in self.batches if not b.trained or b.backward.number == number or b.gradients_zeroed()]

    def copy(self) -> MicroBatches:
        sums, without = (None if sums is None else sums.copy() for sums in (self.sums, self.without))
        return replace(self, batches=[replace(batch) for batch in self.batches], sums=sums, without=without)

    def forget_after(self, before: MicroBatches) -> None:
        """Forget the forwards since the copy `before`, and keep that gradients of earlier ones were zeroed since."""
        left = {batch.backward for batch in self.batches}
        self.forwards, self.without, self.apart = before.forwards, before.without, before.apart
        self.batches = [batch for batch in before.batches if batch.backward in left]
        self.sums = before.sums if self.zeroings == before.zeroings else None


def joined(sums: PendingBatch | None, more: PendingBatch | None) -> PendingBatch | None:
    """The sums of both; `sums` is written into."""
    if sums is None or more is None:
        return more if sums is None else sums
    sums.join(more)
    return sums


LossOfStep = Tensor | float | None


@dataclass(eq=False)
class StandIn(JoinHook):
    """The hook of one optimizer in one `Join`.

    Args:
        groups: the parameter groups of the optimizer.
        step: takes a step of the optimizer.
        close: called when all processes have joined.
    """

    net: CompiledModule
    replicas: Replicas
    groups: Sequence[Group]
    step: Callable[[], Any]
    close: Callable[[], None]
    call: ForwardArguments | None = None  # with an empty batch
    standing_in: bool = False

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a forward, without its cases."""
        if self.call is None:
            self.call = self.net.recorder(args, kwargs).without_cases(args, kwargs)

    def main_hook(self) -> None:
        """A step of a process without cases. Raises ValueError if this process never had a batch."""
        if self.call is None:
            raise ValueError(
                f"process {self.replicas.rank} of {self.replicas.number} had no batch inside of Join, so KFAC does not "
                "know the inputs of the net and cannot take the steps of the others: give every process one batch, "
                "which may be empty, x[:0]"
            )
        args, kwargs = self.call
        with torch.enable_grad():
            outputs = self.net(*args, **kwargs)
            tensors = [leaf for leaf in results.tree_leaves(outputs) if isinstance(leaf, Tensor)]
            torch.stack([tensor.sum() for tensor in tensors if tensor.requires_grad]).sum().backward()
        self.standing_in = True
        try:
            self.step()
        finally:
            self.standing_in = False

    def post_hook(self, is_last_joiner: bool) -> None:
        self.close()

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.groups for parameter in group["params"]]

    def share(self, loss: LossOfStep) -> LossOfStep:
        """Before a step: a process that stands in gets gradients, and the numbers of the groups. Returns its loss.

        loss: of the batch of this process, if known. It is zero without cases, if the others know theirs.
        """
        mine = torch.zeros(self.replicas.number + 1, dtype=torch.float64, device=self.parameters()[0].device)
        if not self.standing_in:
            mine[self.replicas.rank] = 1
            mine[-1] = float(loss is not None)
        (both,) = self.replicas.total([mine])
        *with_batches, with_loss = both.tolist()
        if all(with_batches):
            return loss
        source = with_batches.index(1)
        self.receive(source)
        return 0.0 if self.standing_in and with_loss else loss

    def receive(self, source: int) -> None:
        """Take the gradients and the numbers of the groups of a process; those that have batches have the same."""
        parameters = self.parameters()
        numbers = [(group, key) for group in self.groups for key in OF_GROUPS if key in group]
        values = [float(parameter.grad is not None) for parameter in parameters]
        values += [float(group[key]) for group, key in numbers]
        sent = torch.tensor(values, dtype=torch.float64, device=parameters[0].device)
        gradients = dense_or_zero((parameter.grad for parameter in parameters), parameters)
        *gradients, sent = self.replicas.broadcast([*map(real_numbers, gradients), sent], source)
        if not self.standing_in:
            return
        values = sent.tolist()
        for parameter, gradient, has in zip(parameters, gradients, values, strict=False):
            parameter.grad = complex_numbers(gradient, parameter) if has else None
        for (group, key), value in zip(numbers, values[len(parameters) :], strict=True):
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def refuse_in_join(options: KFACOptions, sharded: bool) -> None:
    """Raises ValueError for an optimizer whose steps a process without batches cannot take."""
    scaler = options.grad_scaler
    why = {
        "sharded parameters, which every process gathers in its own forwards": sharded,
        "adapt_damping=True, which asks the process for the loss of its batch": options.rule.damping_rule is not None,
        "a GradScaler, whose scale that process does not learn": scaler is not None and scaler.is_enabled(),
    }
    if wrong := [words for words, applies in why.items() if applies]:
        raise ValueError(
            "inside of Join, a process that has no more batches takes the steps of the others, and cannot with\n"
            + "\n".join(f"  {words}" for words in wrong)
            + "\nLeave Join out: a process that has no more cases calls the net with an empty batch, x[:0]."
        )


OTHER_JOIN = (
    "inside of join(), processes without batches take part in the messages of DistributedDataParallel and not in those "
    "of KFAC, which would wait for them. Write Join([wrapped, optimizer]) in its place, with Join of "
    "torch.distributed.algorithms.join; or leave it out, and a process that has no more cases calls the net with an "
    "empty batch, x[:0], and takes all steps with the others."
)


def refuse_step_in_join(notified: object, forwards: int) -> None:
    """Raises ValueError for a step of an optimizer that is the first in `Join`, and for one that has other than one
    forward. notified: of `Join.notify_join_context`."""
    if notified is not None:
        raise ValueError(
            "Join runs the messages of its parts in their order, and those of KFAC come behind those of "
            "DistributedDataParallel: write Join([wrapped, optimizer])"
        )
    if forwards != 1:
        raise ValueError(
            f"inside of Join, a step has one forward, which processes without batches take part in, and this one has "
            f"{forwards}: call optimizer.step() behind every forward and backward, or leave Join out"
        )


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
    uncompared: str | None = None  # why that comparison was impossible
    has_inverted_mask: bool = False  # the padding mask seems to be nonzero at padding
    needs_graph: bool = False  # a loss takes derivatives, so gradients must be on when it is measured
    trained: bool = False  # a closure was seen to compute gradients
    zeroed: bool = False  # gradients were zeroed since the last closure was called
    unrecorded: int = 0  # the number of steps with statistics due and no forward before them
    came: bool = False  # a step took forwards whose backward came
    elsewhere: int = 0  # the number of steps whose gradients came without such a backward
    batch: MicroBatch | None = None  # of the last forward, until it has returned its outputs
    thread: int = 0  # of the last forward, and of its backward
    has_learned_inputs: bool = False  # an input of a forward before the first step requires a gradient
    derived: bool = False  # before the first step the user took derivatives of outputs, to train with them
    versions: Sequence[int] = ()  # those of the parameters at the last call of torch.autograd.grad
    differentiable: bool = False  # the present backward makes a graph
    unnamed: bool = False  # the present forward shows that the loss of the captures is not that of the training
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
        self.thread = threading.get_ident()
        if not self.decided and options.estimation_mode is None:
            unnamed = not self.net.recorder(args, kwargs).knows_loss
            self.unnamed = unnamed and not self.net.knows_no_loss
            self.decided, self.estimator.estimation_mode = True, options.mode_for(unnamed)
        self.halves = any(dtype in HALVES for _, dtype in autocast())
        if backward_here() < 0:  # a checkpoint runs its forward again inside of a backward
            if seen.trained and not (seen.apart and self.versions == self.left.versions) and self.left.are_zeroed():
                self.gradients_zeroed()
            seen.add_up(self.lenient(schedule.burning_in))
        seen.forwards += 1
        self.batch, batch = None, MicroBatch(Backward(self.begins, self.ends))
        measured = schedule.adapting or schedule.checking
        if measured or not self.checked:
            batch.start = RandomState.now(self.devices)
        if options.rule.is_exact and not schedule.burning_in:
            batch.call = args, kwargs
        # Now, because the model's own forward may change what a capture depends on; and before the statistics, because
        # another path may bring new blocks.
        if schedule.checking or not self.checked:
            batch.recorder = self.net.recorder(args, kwargs)
        only = None if schedule.recording else self.estimator.unrecorded()
        if only:  # on another path they may have no uses
            only &= self.net.recorder(args, kwargs).used
        recording = only is None or bool(only)
        beside = recording and not self.estimator.records_in_training and options.fraction == 1.0
        beside = beside and self.net.repeats_recordings
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
                on_outputs=batch.keep if beside else None,
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

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Compare the outputs with those that were recorded. In the first step, and where a check is due, watch the
        gradients that the user's backward sends into them."""
        if self.unnamed:
            self.unnamed = False
            warn_user(UserWarning(WITHOUT_LOSS.format(place_of_tensor(outputs))))
        batch, self.batch = self.batch, None
        if self.paused or batch is None:
            return
        if batch.recorded is not None:
            rounding = self.net.rounding(args, kwargs)
            self.estimator.outputs.add(differ(batch.recorded, sampled_elements(results.tree_leaves(outputs)), rounding))
            batch.recorded = None
        batch.backward.wait_at(outputs)
        if (recorder := batch.recorder) is None:
            return
        if self.schedule.checking:
            precision = CheckPrecision.of_call(recorder, args, kwargs)
            batch.observed = ObservedForward.of(recorder, args, kwargs, outputs, precision, batch.start)
        if not self.checked and batch.start is not None:
            leaves = results.tree_leaves((args, kwargs))
            self.has_learned_inputs |= any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
            with own_saved_tensors():
                if recorder.knows_loss or self.schedule.options.estimation_mode is not None:
                    batch.watched = watch(recorder, args, kwargs, outputs, batch.start)
                else:
                    batch.watched = watch_unnamed(recorder, outputs)

    def gradients_zeroed(self) -> None:
        if not self.paused:
            self.zeroed = True
            self.added = None if self.schedule.counter else self.added
            self.seen.gradients_zeroed()

    def backward_begins(self, number: int) -> None:
        """Called before a backward has computed any gradient."""
        self.differentiable = torch.is_grad_enabled()  # create_graph=True
        seen, apart = self.seen, not self.differentiable and grad_runs(self.thread)
        is_later = seen.trained_before(number)
        if is_later and not (apart and seen.apart) and self.left.are_zeroed():
            self.zeroed, self.added = True, None  # this user zeroes gradients
            seen.gradients_zeroed(number)
        seen.apart = apart and (seen.apart or not is_later)
        self.versions = self.left.versions if apart else ()
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
        self.batch = None

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
        self.checked, self.uncompared, watched = True, None, self.seen.watched
        if self.seen.given_up and self.left.are_others:
            self.uncompared = (
                "the gradients of the first step were given to the parameters behind several backwards, between which "
                "gradients were zeroed"
            )
            return
        if not (watched or self.net.knows_no_loss):
            self.uncompared = "the first step's forward had no outputs of the Fisher to watch, or no memory for it"
        if unfollowed := self.net.unfollowed(lost=True):
            warn_user(LossScaleWarning("\n".join(f"{text}. {AS_UNNAMED}" for text in unfollowed)))
        value = None if loss is None else float(loss)
        self.has_inverted_mask = check_scale(
            watched,
            reduction=self.schedule.options.reduction,
            loss_scale=loss_scale,
            value=value,
            in_training=self.estimator.records_in_training,
            recorded=float(sum(batch.cases for batch in self.seen.pending)),
            derived=self.derived,
            replicas=self.estimator.replicas,
        )

    def check_coverage(self, gradients: Mapping[str, Tensor]) -> None:
        """Warn of parameters that have a gradient and no curvature; the host waits. gradients: by parameter."""
        # In a part of a batch, experts may have no rows. `check_loss` has warned of an inverted mask.
        if self.schedule.options.fraction == 1.0 and not self.has_inverted_mask:
            whole, named = not self.net.program.submodules, not self.net.knows_no_loss
            told = any(OTHER_FACTOR in misfit for of in self.net.captures.all for misfit in of.misfits)
            check_coverage(self.estimator, gradients, whole, named, has_other_factor=told)

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
        reasons = []
        if self.uncompared is not None:
            reasons.append(f"whether the training loss is the registered one was not checked: {self.uncompared}")
        if self.unrecorded:
            reasons.append(
                f"statistics were due at {self.unrecorded} steps that no forward with a backward came before"
            )
        if self.elsewhere:
            reasons.append(
                f"the gradients of {plural(self.elsewhere, 'step')} did not come from a backward through outputs of "
                "the net, so the statistics are those of all forwards before, also of batches that were given up"
            )
        return reasons

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


AS_UNNAMED = (
    "As it is, the factors are those of the gradients that training sends back, which often end far higher than those "
    "of a known loss; nothing is wrong if the loss falls as far as it should."
)
WITHOUT_LOSS = (
    "compile captured a call that computes its loss, and the first call in training computes none that is known, so "
    "the factors are those of the gradients that training sends back. If the training computes the loss, as a trainer "
    "does with label smoothing, name it and leave its targets out of the example inputs: compile(model, ..., "
    "loss=lambda outputs: kfac_fx.losses.Categorical({})). Else call net with its targets"
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
    mode = [] if net.training else ["The net is in evaluation mode now: write net.train()"]
    return "".join(f". {sentence}" for sentence in (*net.unrecorded, *mode))


@contextmanager
def outside_autocast() -> Iterator[Callable[[Callable[..., Any] | None], Callable[..., Any] | None]]:
    """Inside, nothing is rounded by an autocast that a user has entered. Yields a function that returns a user's
    function as it runs outside: under that autocast."""
    ambient = autocast()

    def as_outside(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if function is None or not ambient:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with all_on(ambient):
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


def refuse_no_closure(call: str, takes: str, given: object) -> None:
    """Raises TypeError for an argument of a step that is not called. takes: what it is."""
    if given is not None and not callable(given):
        raise wrong_kind(call, takes, given, "step(loss=loss) for a loss, and step() for none")


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
