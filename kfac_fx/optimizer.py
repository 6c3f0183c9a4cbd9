"""`KFAC`: the optimizer of Martens & Grosse 2015 as a torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfac_fx.checks.unchanged import refuse_without_blocks
from kfac_fx.distributed import Replicas
from kfac_fx.estimator import FisherEstimator
from kfac_fx.optim.checkpoint import check, restore, saved
from kfac_fx.optim.closure import Closure, checked
from kfac_fx.optim.forwards import Forwards
from kfac_fx.optim.options import OPTIONS, read_options
from kfac_fx.optim.parameter_groups import checked_net, split_group
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.stepper import Stepper
from kfac_fx.optim.updater import Updater
from kfac_fx.passes.tracing.devices import accelerators


class KFAC(Optimizer):
    """K-FAC on a compiled module; recording happens inside `net(x)`.

    One step, at parameters θ (order and semantics of TF K-FAC):

    1. the statistics of the step's forwards, if due, enter the factors;
    2. the inverses, if due, are computed anew;
    3. the update: momentum and preconditioner P, then θ <- θ - lr (Δ + weight_decay θ), Δ as `momentum_type` says:
       "regular" v <- momentum v + P g, Δ = v; "adam" v <- momentum v + g, Δ = P v;
       "qmodel" Δ = the step along P g and the previous Δ that minimizes the exact quadratic model of the batch (section
       7 of the paper), "qmodel_fixedmu" the same with the second coefficient given;
    4. if due, the damping is adapted by how well the model predicted the change of the loss (section 6.5).

    Where the gradients or the update are not finite, nothing changes, and `skipped` counts it on the device; the host
    never waits for that, except at the very first step, which is taken again. Parameters without a gradient stand
    still, and count as a zero gradient in their Fisher block; a step without any gradient does nothing. Parameters in
    no Fisher block follow AdamW, in a parameter group of their own. The forwards in training mode between two steps are
    the micro-batches of a step; their statistics, and the quadratic model, are averaged by cases. The step's gradient
    should be that of the mean loss over all of them; the first step warns (LossScaleWarning) where it sees a multiple
    of the registered loss.

    Attributes, 0-dim tensors on the device: damping (settable), skipped, rho, predicted_change (of the loss, at the
    last step that needed it), qmodel_learning_rate, qmodel_momentum. counter: steps taken. estimator: the
    FisherEstimator.
    """

    def __init__(
        self,
        net: Any,
        lr: float | Tensor | None = None,
        *,
        damping: float | Tensor,
        momentum: float | None = 0.9,
        momentum_type: str = "regular",
        cov_ema_decay: float = 0.95,
        cov_update_every: int = 1,
        invert_every: int = 10,
        num_burnin_steps: int = 0,
        norm_constraint: float | None = None,
        weight_decay: float = 0.0,
        adapt_damping: bool = False,
        update_damping_immediately: bool = True,
        damping_adaptation_interval: int = 5,
        damping_adaptation_decay: float = 0.95,
        damping_decrease_rho_threshold: float = 0.75,
        damping_increase_rho_threshold: float = 0.25,
        min_damping: float = 1e-8,
        l2_reg: float = 0.0,
        precon_damping_mult: float = 1.0,
        qmodel_update_rescale: float | None = None,
        estimation_mode: str = "gradients",
        fraction: float = 1.0,
        seed: int | None = None,
        reduction: str = "mean",
        first_order: Mapping[str, Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
    ) -> None:
        """
        Args:
            net: what `kfac_fx.compile` returned, captured already.
            lr: learning rate; None exactly for the "qmodel" types.
            damping: λ of F + λ I; scales with the loss. With `adapt_damping`, where it starts.
            momentum: None exactly for "qmodel". Of "regular" and "adam" an option of groups, which schedulers may set.
            cov_ema_decay: of the factors, a step: `cov_update_every` steps at once decay by its power.
            cov_update_every, invert_every: in steps.
            num_burnin_steps: the first steps only average statistics, and are not counted.
            norm_constraint: bounds the squared Fisher norm of an update by scaling it down; 1e-2 with lr=1 is a start.
            weight_decay: decoupled from the gradient.
            adapt_damping: `step` then needs a closure, at least on every `damping_adaptation_interval`-th step.
            update_damping_immediately: False measures the loss after such a step at the beginning of the next, before
                its inverses, where `step` then needs `previous`. The damping of a step is the same either way.
            min_damping, l2_reg: the damping stays above their sum; l2_reg / 2 |θ|² must be in the loss already.
            precon_damping_mult: the preconditioner's damping is this times λ; the quadratic model's is λ (section 6.6).
            qmodel_update_rescale: the learning rate of the "qmodel" types' parameter group, 1 if None.
            estimation_mode: "gradients" samples targets in a pass of its own; "empirical" records in the training
                backward itself, with the true targets (a different matrix, see Kunstner et al. 2019).
            fraction: the part of every batch that "gradients" records.
            seed: of the sampled targets; None: torch's initial seed. Their stream is the optimizer's own.
            reduction: "mean" if the training loss is a mean over the cases of all micro-batches of a step, "sum" if a
                sum, which "empirical" must know. A "sum" leaves the gradient as many times larger as there are cases,
                and lr as much smaller.
            first_order: dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=None) for parameters in no block.
            grad_scaler: the GradScaler in use, for "empirical", which sees scaled gradients.
            params: parameter groups with their own lr, momentum and weight_decay; None: all of the net's in one.
            process_group: of DistributedDataParallel, which averages the gradients; None: the default one, if any.

        Raises ValueError for options that do not exist or do not fit, RegistrationError for a net without Fisher
        blocks, AlreadyAttachedError for a second optimizer on one net.
        """
        arguments = locals()
        self.net = checked_net(net)
        refuse_without_blocks(self.net.registrations, self.net.named_parameters())
        self.options = read_options(**{name: arguments[name] for name in OPTIONS})
        self.names = {parameter: name for name, parameter in self.net.named_parameters()}
        self.registered = frozenset(name for one in self.net.registrations for name in one.owners)
        super().__init__(
            [{"params": list(self.names)}] if params is None else params,
            self.options.of_groups | {"weight_decay": weight_decay},
        )
        example = next(iter(self.names))
        precision = torch.promote_types(example.dtype.to_real(), torch.float32)
        self.scalar = torch.zeros((), dtype=precision, device=example.device)
        self.estimator = FisherEstimator(
            self.net,
            cov_ema_decay=self.options.decay,
            damping=self.scalar + damping,
            estimation_mode=estimation_mode,
            fraction=fraction,
        )
        self.estimator.replicas = replicas = Replicas(process_group)
        self.updater = Updater(self.net, self.options, self.estimator, self.scalar + damping)
        self.generator = torch.Generator(example.device).manual_seed(replicas.own(seed))
        schedule = Schedule(self.options)
        self._forwards = Forwards(self.net, schedule, self.estimator, self.generator, accelerators(self.names))
        self._stepper = Stepper(
            self.net, self.names, self.scalar, self.estimator, self.updater, schedule, self._forwards, grad_scaler
        )
        self.net.attach(self)

    # --- what torch expects -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters in no Fisher block make a group of their own behind the rest of theirs.

        Raises ValueError for parameters that are not the compiled module's.
        """
        for part in split_group(param_group, self.names, self.registered, self.options.first_order, self.defaults):
            super().add_param_group(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forwards.gradients_zeroed()

    @torch.no_grad()
    def step(  # type: ignore[override]  # the base class knows no `loss`
        self,
        closure: Closure | None = None,
        *,
        loss: Tensor | float | None = None,
        previous: Closure | None = None,
    ) -> Tensor | float | None:
        """Take a step. Returns the loss, if it is known.

        Args:
            closure: returns the loss of the step's batch. As for every torch optimizer it may compute the gradients,
                too (zero_grad, forward, backward): it is asked for them first, unless a forward of the net and
                gradients that no step has used are there already. When the damping is adapted it is asked for the loss
                at the new parameters, without a trace in buffers, gradients or random streams, and from the random
                state of the step's first forward. `scaler.step(optimizer, closure)` takes it by position only.
            loss: that of the batch, if the caller has it: a loss that is not finite skips the step, and adapting the
                damping need not compute it again.
            previous: returns the loss of the last step's batch, without `update_damping_immediately`.

        Raises ValueError if the damping is due to be adapted and there is no closure, FactorNotReady if nothing was
        ever recorded.
        """
        by_closure = closure is not None and not self._forwards.has_new(self._gradients())
        if closure is not None and by_closure:
            with torch.enable_grad():
                loss = checked(closure())
        try:
            self._stepper.take(self.param_groups, self.state, closure, loss, previous, by_closure)
        finally:
            self._forwards.step_taken(self._gradients())
        return loss

    def _gradients(self) -> dict[str, Tensor]:
        gradients = ((self.names[p], p.grad) for group in self.param_groups for p in group["params"])
        return {name: grad for name, grad in gradients if grad is not None}

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the batch if statistics are due; the outputs if it took over the forward, else None."""
        return self._forwards.on_forward(args, kwargs)

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Until the first step, watch what the user's backward sends into the outputs."""
        self._forwards.on_outputs(args, kwargs, outputs)

    # --- what is kept -----------------------------------------------------------------------------------------------

    @property
    def damping(self) -> Tensor:
        """λ, 0-dim; assigning a number or a tensor writes into it."""
        return self.updater.damping

    @damping.setter
    def damping(self, value: float | Tensor) -> None:
        self.updater.damping.copy_(torch.as_tensor(value))

    def counters(self) -> dict[str, int]:
        """What happened so far, for the report; waits for the device."""
        failures = [block.failures for block in self.estimator.blocks.values()]
        return {
            "steps": self.counter,
            "skipped steps": int(self.skipped),
            "skipped updates": sum(one.updates for one in failures),
            "inverses kept from before": sum(one.decompositions for one in failures),
        }

    def fallbacks(self) -> list[str]:
        """What was not done as it should be, and why, for the report."""
        return [*self.updater.fallbacks(), *self._forwards.fallbacks()]

    def state_dict(self) -> dict[str, Any]:
        """torch's entries, and under "kfac" everything else that the next step depends on."""
        return super().state_dict() | {"kfac": saved(self._stepper, self.generator)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue bit for bit from `state_dict()`. Raises ValueError, and loads nothing, for one that does not fit."""
        check(self._stepper, self.generator, self.param_groups, state_dict)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "kfac"})
        restore(self._stepper, self.generator, self.param_groups, self.state, state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a KFAC is its net's, not copied or pickled: load opt.state_dict() into one of the other net")

    counter = property(lambda self: self._stepper.schedule.counter)
    burned_in = property(lambda self: self._stepper.schedule.burned_in)
    skipped = property(lambda self: self._stepper.skipped)
    rho = property(lambda self: self.updater.rho)
    predicted_change = property(lambda self: self.updater.predicted_change)
    qmodel_learning_rate = property(lambda self: self.updater.qmodel_learning_rate)
    qmodel_momentum = property(lambda self: self.updater.qmodel_momentum)
