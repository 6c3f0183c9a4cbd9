"""The forwards since the last step, and which of them are a part of it: those whose gradients the step gets.

A forward may be given up: no backward comes to its outputs, or gradients are zeroed behind it. Then nothing of it is in
the statistics, the quadratic model and the checks of the step. A hook on the outputs notices the backward. `zero_grad`
of the optimizer and of the compiled module tell that gradients are zeroed. That of the model does not, nor does
`parameter.grad = None`, so `LeftGradients` looks at the gradients when the next forward or backward begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.loss_scale import Watched
from kfac_fx.estimator.estimator import PendingBatch
from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.processes import is_sharded
from kfac_fx.optim.batch_loss import ObservedForward
from kfac_fx.passes import results
from kfac_fx.passes.torch_private import after_backward, backward_here, version
from kfac_fx.passes.tracing.random_streams import RandomState
from kfac_fx.recording.statistics import Moments, PendingMoments

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
    watched: Watched | None = None  # the gradients of the outputs, until the first step
    observed: ObservedForward | None = None  # if a check measures the loss

    @property
    def trained(self) -> bool:
        return self.backward.came or (self.pending is not None and self.pending.filled)

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
        self.sums = None
        self.batches = [b for b in self.batches if not b.trained or b.backward.number == number or b.gradients_zeroed()]

    def copy(self) -> MicroBatches:
        sums, without = (None if sums is None else sums.copy() for sums in (self.sums, self.without))
        return MicroBatches(self.forwards, [replace(b) for b in self.batches], sums, without, self.zeroings)

    def forget_after(self, before: MicroBatches) -> None:
        """Forget the forwards since the copy `before`, and keep that gradients of earlier ones were zeroed since."""
        left = {batch.backward for batch in self.batches}
        self.forwards, self.without = before.forwards, before.without
        self.batches = [batch for batch in before.batches if batch.backward in left]
        self.sums = before.sums if self.zeroings == before.zeroings else None


def joined(sums: PendingBatch | None, more: PendingBatch | None) -> PendingBatch | None:
    """The sums of both; `sums` is written into."""
    if sums is None or more is None:
        return more if sums is None else sums
    sums.join(more)
    return sums
