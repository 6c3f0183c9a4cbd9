"""A step of KFAC: statistics into factors, inverses, the update, the damping."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.estimator import FisherEstimator
from kfac_fx.optim.closure import UNEXPECTED_BACKWARD, Closure, evaluate, lacks_graph, without_a_trace
from kfac_fx.optim.forwards import Forwards
from kfac_fx.optim.parameter_groups import CompiledNet, Group, Members
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.uncovered import check_coverage
from kfac_fx.optim.update import Work, is_finite
from kfac_fx.optim.updater import Updater
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.tracing.devices import RandomState

Works = tuple[Work | None, Work | None]  # what K-FAC moves, and what the first-order rule moves


class Stepper:
    """Takes the steps of one optimizer.

    names, registered: of the parameters, and of those in Fisher blocks. scalar: a zero of the dtype and on the device
    of all scalars. skipped: steps that were not made, counted on the device. late: the random state before the forward
    of a step whose loss is still to be measured. members: of the parameter groups; None to look at these anew. graph:
    the closure takes derivatives, so it is asked for the loss with gradients on.
    """

    def __init__(
        self,
        net: CompiledNet,
        names: dict[nn.Parameter, str],
        scalar: Tensor,
        estimator: FisherEstimator,
        updater: Updater,
        schedule: Schedule,
        forwards: Forwards,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.net, self.names, self.scalar, self.estimator, self.updater = net, names, scalar, estimator, updater
        self.schedule, self.forwards, self.grad_scaler, self.options = schedule, forwards, grad_scaler, updater.options
        self.registered = frozenset(name for one in net.registrations for name in one.owners)
        self.skipped = torch.zeros((), dtype=torch.int64, device=scalar.device)
        self.late: RandomState | None = None
        self.members: Members | None = None
        self.graph = False

    def take(
        self,
        groups: Sequence[Group],
        states: MutableMapping[Any, Any],
        closure: Closure | None,
        loss: Tensor | float | None,
        previous: Closure | None,
        by_closure: bool,
    ) -> None:
        """One step of `KFAC.step`. groups, states: the optimizer's. by_closure: the gradients are the closure's."""
        schedule, seen = self.schedule, self.forwards.seen
        work, first_order = works = self.works(groups, states)
        if works == (None, None) and not schedule.burning_in:
            return
        schedule.check_losses(closure, loss, previous)
        for moments in seen.moments(self.options.reduction, self.loss_scale(loss, works)):
            self.estimator.accumulate(moments)
        stale = schedule.recording and schedule.counter > 0 and not seen.forwards
        if stale and not self.options.quadratic:  # whose model needs the batch, too: an error
            self.forwards.note_unrecorded()
        loss = None if loss is None else self.updater.replicas.mean(self.scalar + loss)
        ok = self.finite(works, loss)
        recorded = self.estimator.fold(decay=1.0 if schedule.burning_in else None, accept=ok)
        if schedule.burning_in:
            schedule.burned_in += recorded
            return
        # Without a first factor there is no inverse until the next is due: the one step where the host waits to know.
        if schedule.counter == 0 and not (recorded and ok.item()):
            self.skipped += 1
            return
        if schedule.adapting_late:
            assert previous is not None, "bug in kfac_fx: a loss that is due, and was not asked for"
            self.updater.adapt(self.ask(previous, by_closure, self.late))
            self.late = None
        if schedule.inverting:
            self.update_inverses()
        if schedule.counter == 0 and self.options.fraction == 1.0:  # of a part, experts may have no rows
            parts = [one.flat.parts(one.g) for one in works if one is not None]
            check_coverage(self.estimator, {n: g for own in parts for n, g in own.items()})
        if schedule.adapting:
            ok = self.measured_update(work, first_order, closure, loss, by_closure, ok)
        else:
            ok = self.updater.update(work, self.absent(work), first_order, seen.calls, ok)
        self.skipped += ~ok
        schedule.counter += 1

    def finite(self, works: Works, loss: Tensor | None) -> Tensor:
        """Whether the gradients are, and the loss: a 0-dim bool, which the host does not wait for."""
        ok = torch.ones_like(self.skipped, dtype=torch.bool)
        for one in works:
            ok = ok if one is None else ok & is_finite(one.g)
        return ok if loss is None else ok & loss.isfinite()

    def measured_update(
        self,
        work: Work | None,
        first_order: Work | None,
        closure: Closure | None,
        loss: Tensor | None,
        by_closure: bool,
        ok: Tensor,
    ) -> Tensor:
        """The update of a step whose loss is measured before it and, now or in the next step, after it."""
        start, now = self.forwards.seen.start, self.options.update_damping_immediately
        if loss is None:
            assert closure is not None, "bug in kfac_fx: a loss that is due, and was not asked for"
            loss = self.ask(closure, by_closure, start)
        ask = partial(self.ask, closure, by_closure, start) if now and closure is not None else None
        self.late = None if now else start
        calls = self.forwards.seen.calls
        return self.updater.measured_update(work, self.absent(work), first_order, calls, ok, loss, ask)

    def works(self, groups: Sequence[Group], states: MutableMapping[Any, Any]) -> Works:
        if self.members is None or len(self.members.parameters) != sum(len(group["params"]) for group in groups):
            self.members = Members.of(groups, self.names, self.scalar)
        self.members.refresh(groups, self.names)
        return self.members.works(states)

    def loss_scale(self, loss: Tensor | float | None, works: Works) -> float:
        """The GradScaler's, where it is needed: the host waits for it. The first gradients show that of the loss."""
        first = works != (None, None) and not self.forwards.checked
        scale = 1.0
        if self.grad_scaler is not None and (first or self.forwards.seen.rides):
            scale = self.grad_scaler.get_scale()
        if first:
            self.forwards.check_scale(loss, scale)
            self.updater.replicas.check_gradients([one.g for one in works if one is not None])
        return scale

    def absent(self, work: Work | None) -> dict[str, Tensor]:
        """Zeros for the parameters of Fisher blocks that have no gradient."""
        present = {} if work is None else work.parameters
        return {
            name: torch.zeros_like(parameter, dtype=self.scalar.dtype)
            for parameter, name in self.names.items()
            if name in self.registered and name not in present
        }

    def update_inverses(self) -> None:
        try:
            self.updater.update_inverses()
        except FactorNotReady as error:
            raise FactorNotReady(
                "no batch was ever recorded, so there is nothing to precondition with: before step(), call the "
                "compiled module, net(x) and not the model it was made of, in training mode with gradients enabled"
            ) from error

    def ask(self, closure: Closure, with_backward: bool, start: RandomState | None) -> Tensor:
        """The loss at the present parameters. Gradients are on only where the closure differentiates."""
        try:
            loss = self.asked(closure, with_backward, start)
        except RuntimeError as error:
            if with_backward or self.graph or not lacks_graph(error):
                raise
            self.graph = True
            loss = self.asked(closure, with_backward, start)
        return self.updater.replicas.mean(loss.detach())

    def asked(self, closure: Closure, with_backward: bool, start: RandomState | None) -> Tensor:
        self.forwards.paused = True
        try:
            with without_a_trace(self.net.buffers(), self.names, self.forwards.devices, start):
                loss = self.scalar + evaluate(closure, with_backward=with_backward, graph=self.graph)
                if not with_backward and any(parameter.grad is not None for parameter in self.names):
                    raise RuntimeError(UNEXPECTED_BACKWARD)
        finally:
            self.forwards.paused = False
        return loss
