"""`KFAC`: the optimizer of Martens & Grosse 2015 as a torch.optim.Optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.report import fold
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.bases import BASIS_VALUES
from kfac_fx.fisher.placement import BlockOwners
from kfac_fx.linalg.arguments import explains_calls, one_element, positive
from kfac_fx.linalg.matrices import at_least_float32
from kfac_fx.linalg.processes import WHOLE_OUTPUTS, Replicas, Shards, is_sharded, shard
from kfac_fx.optim.checkpoint import OUTDATED, check_state, is_left, parameters_of, publish, restore, with_empty_groups
from kfac_fx.optim.forwards import (
    OTHER_JOIN,
    Closure,
    Forwards,
    StandIn,
    TrainingClosure,
    outside_autocast,
    refuse_in_join,
    refuse_no_closure,
    refuse_other_losses,
    refuse_step_in_join,
)
from kfac_fx.optim.groups import Vectors, keep_first_lr, members_of, refuse_options_of_all, rule_state, split_group
from kfac_fx.optim.options import GROUPS, KFACOptions
from kfac_fx.optim.rule import Rule
from kfac_fx.optim.schedule import Schedule, is_early
from kfac_fx.optim.state import PhaseSeconds, StepState
from kfac_fx.optim.step import Losses, check_closure, take_step
from kfac_fx.passes import results
from kfac_fx.passes.errors import ModelChangedError, warn_user
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.torch_private import join_around_forward
from kfac_fx.passes.tracing.effects import accelerators
from kfac_fx.recording.model_checks import refuse_inference_mode, refuse_without_blocks, refuse_without_values

LATE_LOOKS = 100  # steps from look to look at gradients that were zero at first, after 1, 2, 5, 10, 20 and 50
STEPS_TO_HABIT = 20  # steps whose lr is looked at
HABIT = 0.02  # of the default lr: below it is a rate of Adam's or SGD's, by habit
OUTSIDE = (
    "{}: has gradients, and no forward uses it, so it is in no Fisher block. It follows AdamW, which moves a number by "
    "about {:g} in a step, whatever the gradient is: write KFAC(..., first_order=dict(lr=...)) for other steps, or use "
    "it in forward"
)


class KFAC(Optimizer, Joinable):
    """K-FAC on a compiled module; statistics are recorded inside `net(x)`.

    One step, at parameters θ, in the order and with the semantics of TF K-FAC:

    1. The statistics of the forwards since the last step enter the factors, if they are due.
    2. The inverses are computed anew, if they are due.
    3. The update rule makes an update Δ of the gradient, and θ <- θ - lr (Δ + weight_decay θ). Rules with checks choose
       the length of Δ, and undo steps that made the loss of their batch rise.
    4. If due, the damping is adapted by how well the model predicted the change of the loss (section 6.5).

    If the gradients, the loss or the update are not finite, nothing changes, and `skipped` counts the step on the
    device. The same holds if all gradients are zero, as those of a batch without a target are. The host does not wait
    for that, except at the very first step, which is taken again.

    Parameters without a gradient stand still, and count as a zero gradient in their Fisher block. A step without any
    gradient does nothing. Parameters in no Fisher block follow AdamW, in a parameter group of their own.

    The forwards in training mode between two steps are the micro-batches of a step, if their backwards came and no
    gradient was zeroed since. Their statistics, and the quadratic model, are averaged by cases. The gradient should be
    that of the mean loss over all of them; the first step warns (LossScaleWarning) if it is that of a multiple of the
    registered loss.

    Attributes:
        estimator: the FisherEstimator.
        generator: the random stream of the sampled targets, from which several processes derive streams of their own.
        options: the arguments.

    Raises:
        LossError: no loss of the model is known, and an option needs one.
        RegistrationError: for a net without Fisher blocks, and with "eigen_moments" for blocks without an eigenbasis.
        AlreadyAttachedError: for a second optimizer on one net.
    """

    @explains_calls(meant={"lr": f"If it is parameters, {GROUPS}."})
    def __init__(
        self,
        net: CompiledModule,
        lr: float | Tensor | None = None,
        *,
        rule: Rule | None = None,
        momentum_type: str | None = None,
        cov_ema_decay: float | None = None,
        cov_update_every: int | None = None,
        invert_every: int | None = None,
        num_burnin_steps: int = 0,
        weight_decay: float = 0.0,
        estimation_mode: str | None = None,
        fraction: float = 1.0,
        seed: int | None = None,
        reduction: str = "mean",
        first_order: Mapping[str, Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any | None = None,
        placement: str | None = None,
        **of_rule: Any,
    ) -> None:
        """
        Args:
            net: the compiled module, as returned by `kfac_fx.compile`.
            lr: the learning rate. In rules with checks, such as the default, it multiplies a step size that they find
                themselves, and None means 1. The "qmodel" rules must have None, and the others need a number.
            rule: the update rule, an object of a class of `kfac_fx.rules`, or of your own.
            momentum_type: the rule by its name, with the options in `of_rule`: "eigen_moments", "adaptive", "regular",
                "adam", "qmodel" or "qmodel_fixedmu". None means "regular" if both lr and damping are given,
                as in TF K-FAC; "adaptive" if damping alone is given, and for a net with blocks that have no eigenbasis;
                and "eigen_moments" otherwise.
            cov_ema_decay: the decay of the factors in one step; `cov_update_every` steps at once decay by its power.
                None means 0.95, and 0.98 with "eigen_moments".
            cov_update_every: the factors are updated every so many steps. None means 1, and in rules with checks, which
                update them as early as the inverses, what their `overhead` allows.
            invert_every: the inverses, or bases, are updated every so many steps, and also after 1, 2, 5, 10, 20, 50,
                ... steps while that is less: the factors of the first batches alone are no curvature to take many steps
                with. None means 10, and in rules with checks what their `overhead` allows.
            num_burnin_steps: so many first steps only average statistics, and are not counted.
            weight_decay: decoupled from the gradient, and multiplied by lr. With "eigen_moments" it is multiplied by
                0.02 m / r, too, as the whole step is.
            estimation_mode: "gradients" samples targets in a pass of its own. "empirical" records in the training
                backward itself, with the true targets (another matrix, see Kunstner et al. 2019). FisherEstimator has
                the others. None means "gradients", and "empirical" for a net whose loss is not known.
            fraction: the part of every batch that "gradients" records.
            seed: of the sampled targets, which have a random stream of their own; None takes torch's initial seed.
            reduction: "mean" if the training loss is a mean over the cases of all micro-batches of a step, "sum" if it
                is their sum, which "empirical" must know. The gradient of a "sum" is larger by the number of cases;
                choose lr as much smaller.
            first_order: AdamW's options for parameters in no Fisher block, whose lr a group's own replaces or scales:
                dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=None).
            grad_scaler: the GradScaler in use. "empirical" needs it, because it sees scaled gradients.
            params: parameter groups with their own lr, weight_decay, and momentum in rules that have it; None puts all
                parameters into one group.
            process_group: of DistributedDataParallel, which averages the gradients; None takes the default group, if
                any.
            placement: where Fisher blocks live in the processes of `process_group`. "replicated": every process keeps
                the factors and inverses of all blocks. "owners": one process keeps those of a block, and sends its
                products to the others; the largest blocks are placed first, each in the process with the least work so
                far. "round_robin": one block after another, in turn, as in TF K-FAC. Both divide the memory of factors
                and inverses and the decompositions by the number of processes, and cost a message of the size of the
                parameters in a step. None is "owners" for a model that FSDP2 shards, whose factors take several times
                the memory of the parameters, and "replicated" otherwise.
            of_rule: the options of the rule that `momentum_type` names, or of the default; the classes of
                `kfac_fx.rules` document them. None is no value.

        Raises:
            TypeError: for options that do not exist, or that the rule does not have.
            ValueError: for options out of range, or that do not fit together.
        """
        options = KFACOptions.of(
            net,
            lr,
            rule,
            momentum_type,
            of_rule,
            cov_ema_decay=cov_ema_decay,
            cov_update_every=cov_update_every,
            invert_every=invert_every,
            num_burnin_steps=num_burnin_steps,
            weight_decay=weight_decay,
            estimation_mode=estimation_mode,
            fraction=fraction,
            seed=seed,
            reduction=reduction,
            first_order=first_order,
            grad_scaler=grad_scaler,
            params=params,
            process_group=process_group,
            placement=placement,
        )
        self._largest_lr = 0.0  # of all steps
        self._told_small_lr = isinstance(lr, (int, float)) and 0 < lr < HABIT * (options.rule.default_lr or 0)
        if self._told_small_lr:
            warn_user(
                UserWarning(
                    f"lr={lr} is of the size of Adam's, and here it multiplies steps whose length the rule finds: the "
                    "parameters will hardly move, unless a scheduler sets another lr. Leave lr out, or write one "
                    "between 0.3 and 1."
                )
            )
        Joinable.__init__(self)
        self.net: CompiledModule = net
        refuse_inference_mode("a KFAC is created")
        refuse_without_values(net.model)
        refuse_without_blocks(net.registrations, net.named_parameters())
        shards = Shards.of(net.named_parameters(), net.model.modules())
        if shards is None:  # the first forward looks at the others
            net.captures.structure.check()
        if placement is None and shards is not None and not shards.tensor_parallel:
            options = replace(options, placement="owners")
        if shards is not None and options.strategy is not None:
            shards.refuse_owners(process_group)
        self.options, rule = options, options.rule
        self.names = names = {parameter: name for name, parameter in net.named_parameters()}
        self._read_registrations()
        self._split_off: set[int] = set()  # the groups that were split off the group in front, of parameters in blocks
        self._with_default_lr: set[int] = set()  # the groups without an lr of their own
        self._given: dict[Tensor, int] = {}  # the order of the parameters in the user's groups
        self._maybe_outside: set[str] = set()  # trained, and in no block, but a forward may have used them
        self._still_outside: set[str] = set()  # in no block, and with gradients of zero so far
        self._told_outside = False
        self._loose: set[Tensor] = set()  # parameters in groups of this rule that have no block
        super().__init__([{"params": list(names)}] if params is None else list(params), options.of_groups)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("params has groups without parameters alone: leave params out to train all of the net")
        trained = next((parameter for parameter in names if parameter.requires_grad), next(iter(names)))
        example = real_numbers(trained.detach())
        precision = at_least_float32(example.dtype)
        scalar = torch.zeros((), dtype=precision, device=example.device)
        schedule = Schedule(options)
        self.estimator = FisherEstimator(
            net,
            cov_ema_decay=schedule.decay,
            damping=scalar + rule.first_damping,
            estimation_mode=options.mode_for(net.knows_no_loss),
            fraction=fraction,
            exps=rule.exps,
        )
        self.estimator.relative_damping = rule.side_damping
        self.estimator.new_extras = rule.new_extras
        self.estimator.of_extras = {**BASIS_VALUES, **rule.values}
        self.estimator.replicas = replicas = Replicas(process_group or (shards and shards.everyone))
        if options.strategy is not None:
            state = rule.new_state(torch.empty_like(example, device="meta"))
            vectors = sum(tensor.shape == example.shape for tensor in state.values()) if shards is None else 0
            among = replicas if shards is None else Replicas(shards.group)
            self.estimator.owners = BlockOwners(among, options.strategy, vectors, shards)
        seed = torch.initial_seed() if seed is None else seed
        self.generator = torch.Generator(example.device).manual_seed(seed)
        self._forwards = Forwards(net, schedule, self.estimator, self.generator, accelerators(names))
        self._step_state = StepState(
            net=net,
            options=options,
            schedule=schedule,
            estimator=self.estimator,
            forwards=self._forwards,
            replicas=replicas,
            vectors=Vectors(names, self.registered, scalar, rule.state_maker(), self.estimator, replicas, shards),
            damping=scalar + rule.first_damping,
        )
        self._stand_in: StandIn | None = None  # inside of Join
        self._joined: object = None  # that of DistributedDataParallel, which keeps it behind the end
        self._published: object = None  # the groups of blocks whose tensors are in `state`
        self._handed_out: list[dict[str, Tensor]] = []  # entries of the whole optimizer, in states since the last step
        net.attach(self)

    # --- what torch expects -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters in no Fisher block make another one behind it.

        Raises ValueError for parameters that are not the compiled module's.
        """
        first_order = self.options.first_order_rule
        of_all = self.options.of_all_groups
        members = members_of(param_group)
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        if twice := [self.names[member] for member in members if member in held and member in self.names]:
            raise ValueError(
                f"some parameters appear in more than one parameter group: {', '.join(twice)}. To train frozen "
                "ones of a group, parameter.requires_grad_(True) is enough. For an lr of their own, leave them out of "
                "the other groups, with KFAC(net, params=[...])"
            )
        param_group = {**param_group, "params": members}
        parts = split_group(param_group, self.names, self._unregistered, first_order, self.defaults, of_all)
        for part in parts:
            super().add_param_group(part)
            if self.options.rule.keeps_first_lr:
                keep_first_lr(self.param_groups[-1])
        last = len(self.param_groups) - 1
        if len(parts) == 2:
            self._split_off.add(last)
        elif "lr" not in param_group:
            self._with_default_lr.add(last)
        for parameter in members:
            self._given.setdefault(parameter, len(self._given))

    def _read_registrations(self) -> None:
        self._registrations = self.net.registrations
        self.registered = frozenset(name for registration in self._registrations for name in registration.owners)
        self._unregistered = self.net.program.parameters.keys() - self.registered
        self.options.rule.refuse_registrations(self._registrations)

    def _follow_registrations(self) -> None:
        """After parameters were unfrozen, or used for the first time: those in Fisher blocks move out of the groups of
        the first-order rule, and those with a gradient and no block into one."""
        if self.net.registrations is not self._registrations:
            self._read_registrations()
            self._step_state.vectors.registered, self._step_state.vectors.grouped = self.registered, None
            for place, group in enumerate(self.param_groups):
                if group["first_order"]:
                    self._into_blocks(place, group)
            in_blocks = (p for group in self.param_groups if not group["first_order"] for p in group["params"])
            self._loose = {parameter for parameter in in_blocks if self.names[parameter] in self._unregistered}
        if strays := {parameter for parameter in self._loose if parameter.grad is not None}:
            self._loose -= strays
            for group in [group for group in self.param_groups if not strays.isdisjoint(group["params"])]:
                of_group = [parameter for parameter in group["params"] if parameter in strays]
                group["params"] = [parameter for parameter in group["params"] if parameter not in strays]
                shared = {name: group[name] for name in self.defaults if name != "lr"}
                self.add_param_group({**shared, "params": of_group})
                self._step_state.vectors.grouped = None
        looked = self.net.captures.looks > 0  # for a path through the parameters that wait, in every forward
        found = self.net.captures.look_for_gradients()
        again = self._still_outside and (is_early(self.counter, LATE_LOOKS) or self.counter % LATE_LOOKS == 0)
        if (found or again or self._maybe_outside) and not self._told_outside:
            self._tell_outside(found, looked)

    def _tell_outside(self, found: Sequence[str], looked: bool) -> None:
        """Warn, once, of parameters that are trained and that no forward uses: their steps are those of AdamW, with an
        lr that the user has not chosen. The host reads whether their first gradients are zero, as those of 0 * p are,
        and now and then whether they still are.

        found: those with a first gradient. looked: whether all forwards so far are known.
        """
        of_kfac = self._split_off | self._with_default_lr if self.options.first_order is None else set()
        members = [p for place, group in enumerate(self.param_groups) if place in of_kfac for p in group["params"]]
        moved = {
            name
            for name, grad in ((self.names[parameter], parameter.grad) for parameter in members)
            if name in {*found, *self._still_outside} and grad is not None and bool(shard(grad).abs().sum())
        }
        if not moved <= {*found}:  # long after the looks for a path
            self.net.captures.look_again()
            looked = False
        self._still_outside = {*found, *self._still_outside} - moved
        self._maybe_outside = self._unregistered & (self._maybe_outside | moved)
        if self._maybe_outside and looked:
            self._told_outside, names = True, fold(sorted(self._maybe_outside))
            warn_user(UserWarning(OUTSIDE.format(names, self.options.first_order_rule.lr) + "."))

    def _into_blocks(self, place: int, group: dict[str, Any]) -> None:
        """Move the parameters of a group of the first-order rule that have blocks now to the group that they came from.

        A group of which no parameter had a block becomes one of this rule. No group is added or removed, because
        schedulers count them, and parameters keep the order in which they were given, as states count them.
        """
        found = [parameter for parameter in group["params"] if self.names[parameter] in self.registered]
        if not found:
            return
        if place in self._split_off:
            target = self.param_groups[place - 1]
            group["params"] = [parameter for parameter in group["params"] if parameter not in set(found)]
            target["params"] = sorted([*target["params"], *found], key=self._given.__getitem__)
        else:
            group["first_order"] = False
            if place in self._with_default_lr:
                group["lr"] = group["lr"] * (self.defaults["lr"] / self.options.first_order_rule.lr)
        for parameter in found:  # what the first-order rule keeps of it
            for name in rule_state(self.state.get(parameter, {})):
                del self.state[parameter][name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forwards.gradients_zeroed()

    def _tell_small_lr(self) -> None:
        """Warn, once, if the first `STEPS_TO_HABIT` steps had an lr of the size of Adam's: a trainer, or a scheduler of
        its own, writes the lr of its options into the groups."""
        if self._told_small_lr or self.counter > STEPS_TO_HABIT:
            return
        largest = [group["lr"] for group in self.param_groups if isinstance(group["lr"], (int, float))]
        self._largest_lr = max(self._largest_lr, *largest, 0.0)
        if self.counter == STEPS_TO_HABIT and 0 < self._largest_lr < HABIT * (self.options.rule.default_lr or 0):
            self._told_small_lr = True
            warn_user(
                UserWarning(
                    f"the largest lr of {STEPS_TO_HABIT} steps is {self._largest_lr:.3g}, of the size of Adam's, and "
                    "here it multiplies steps whose length the rule finds: the parameters hardly move. A scheduler "
                    "writes it into the parameter groups, or a trainer that has a learning rate of its own: write one "
                    "between 0.3 and 1 there, and leave a warm-up out."
                )
            )

    @torch.no_grad()
    def step(  # type: ignore[override]  # the base class knows no `loss`
        self,
        closure: TrainingClosure | None = None,
        *,
        evaluate: Closure | None = None,
        loss: Tensor | float | None = None,
        previous: Closure | None = None,
    ) -> Tensor | float | None:
        """Take a step. Returns the loss, if it is known.

        Args:
            closure: computes the gradients and returns the loss (zero_grad, forward, backward), as for every torch
                optimizer. It is called once, before everything else. Forwards before it are earlier micro-batches of
                the step. If it raises, what it recorded is forgotten, so that the step can be tried again.
            evaluate: returns the loss of the step's batch at the present parameters, without backward. It is called
                when the damping is adapted, after the update, and before it if the loss is not known. These calls leave
                no trace in tensors, gradients or random streams, and begin with the random state of the step's first
                forward. Without it, `closure` is called for this loss, if it has computed all gradients of the step.
            loss: the loss of the batch, if the caller has it. A loss that is not finite skips the step, and adapting
                the damping need not compute it again.
            previous: returns the loss of the last step's batch; needed without `update_damping_immediately`.

        Raises:
            ValueError: the damping is due to be adapted, and the loss cannot be measured; or the closure computes no
                gradients.
            FactorNotReady: no batch was ever recorded.
        """
        refuse_no_closure("step", "a closure by position", closure)
        refuse_no_closure("step(evaluate=...)", "a closure that returns a loss", evaluate)
        refuse_no_closure("step(previous=...)", "a closure that returns a loss", previous)
        refuse_inference_mode("a step is taken")
        refuse_other_losses(loss)
        for group in self.param_groups:
            refuse_options_of_all(group, self.defaults, self.options.of_all_groups)
        if closure is not None:
            check_closure(self._step_state)
            measures = self._step_state.schedule.adapting and evaluate is None
            measured = self._forwards.train(closure, measures)
            refuse_other_losses(measured)
            loss = loss if measured is None else measured
        self._follow_registrations()
        if self._stand_in is not None:
            refuse_step_in_join(Join.notify_join_context(self), self._forwards.seen.forwards)
            loss = self._stand_in.share(loss)
        counted = self.counter, self.burned_in
        try:
            with outside_autocast() as as_outside:
                losses = Losses(as_outside(evaluate), loss, as_outside(previous), as_outside(closure))
                take_step(self._step_state, self.param_groups, self.state, losses)
        finally:
            self._forwards.forget()
            if (self.counter, self.burned_in) != counted:
                for entries in self._handed_out:
                    entries[OUTDATED] = torch.ones((), dtype=torch.bool)
                self._handed_out.clear()
        self._tell_small_lr()
        if self._published is not self.estimator.groups:
            publish(self._step_state, self.param_groups, self.state)
            self._published = self.estimator.groups
        return loss

    def forgetting_on_error(self) -> AbstractContextManager[None]:
        """Entered by the net around a forward: one that raises leaves no statistics."""
        return self._forwards.forgetting_on_error()

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called by the net: record the batch if statistics are due. Returns the outputs if it ran the forward.

        Raises ModelChangedError if the model was sharded after this optimizer was made.
        """
        if self._step_state.vectors.shards is None and self.net.captures.structure.sharded:
            raise ModelChangedError(
                "the model was sharded after the optimizer was made, which holds the whole parameters of before.\n"
                "Write net = kfac_fx.compile(model, (x,)), fully_shard(...), and then optimizer = kfac_fx.KFAC(net)."
            )
        join = join_around_forward()
        if self._stand_in is not None:
            self._stand_in.on_forward(args, kwargs)
            self._joined = join or self._joined
        elif join is not None and join is not self._joined:
            raise ValueError(OTHER_JOIN)
        with self.phases.measure("record"):
            return self._forwards.on_forward(args, kwargs)

    def on_call(self) -> None:
        """Called by the net in training mode: a step without a gradient is then a mistake."""
        self._forwards.called = True

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Called by the net: until the first step, watch the gradients that the backward sends into the outputs.

        Raises ValueError for outputs that are divided among processes.
        """
        if any(map(is_sharded, results.tree_leaves(outputs))):
            raise ValueError(f"the model returns DTensors. {WHOLE_OUTPUTS} Loss parallelism is not supported.")
        self._forwards.on_outputs(args, kwargs, outputs)

    # --- processes without batches ------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> StandIn:
        """For `torch.distributed.algorithms.join.Join([wrapped, optimizer])`; see `kfac_fx.optim.forwards`.

        Raises ValueError for options with which a process without batches cannot take the steps of the others.
        """
        state = self._step_state
        refuse_in_join(self.options, state.vectors.shards is not None)
        self._stand_in = StandIn(self.net, state.replicas, self.param_groups, self.step, self._leave_join)
        return self._stand_in

    def _leave_join(self) -> None:
        self._stand_in = None

    @property
    def join_device(self) -> torch.device:
        """For `Join`."""
        return self.damping.device

    @property
    def join_process_group(self) -> Any:
        """For `Join`."""
        return self.options.process_group or dist.group.WORLD

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def damping(self) -> Tensor:
        """λ, 0-dim; assigning a number or a tensor writes into it. It is 0 in rules without it, such as the default.

        A tensor is not read, because the host would wait for it.

        Raises ValueError for a number that is not positive, and for rules without λ.
        """
        return self._step_state.damping

    @damping.setter
    def damping(self, value: float | Tensor) -> None:
        one_element("damping", value) if isinstance(value, Tensor) else positive("damping", value)
        rule = self.options.rule
        if rule.side_damping is not None and not rule.first_damping:
            raise ValueError(
                f"{rule.written} has no damping to change: sides of blocks are damped by "
                f"{self.estimator.relative_damping:g} of their mean eigenvalue, the option relative_damping. "
                "For shorter steps write a smaller lr in optimizer.param_groups; for a damping of your own, "
                "make the optimizer with KFAC(net, damping=...)"
            )
        self._step_state.damping.copy_(torch.as_tensor(value).reshape(()))

    @property
    def standing(self) -> dict[str, float]:
        """Where the training stands: the damping, if the rule has one, ρ and the predicted change, once a step was
        measured, and the scalars of the rule. Waits for the device."""
        rule = self.options.rule
        values = {"damping": float(self.damping)} if rule.side_damping is None else {}
        scalars = {name: float(self.scalars[name]) for name in ("rho", "predicted_change", *rule.reported)}
        return values | {name: value for name, value in scalars.items() if not math.isnan(value)}

    def __repr__(self) -> str:
        """The parameter groups, and where the training stands. Waits for the device."""
        counts = {"steps": self.counter, "skipped": int(self.skipped), "of these undone": int(self.undone)}
        stands = ", ".join(f"{name} {number:.4g}" for name, number in (counts | self.standing).items())
        return f"{super().__repr__()}\n{self.options.rule.name}: {stands}"

    @property
    def counter(self) -> int:
        """The number of steps taken, without those of the burn-in; the first step counts once it was possible."""
        return self._step_state.schedule.counter

    @property
    def burned_in(self) -> int:
        """The number of steps that only averaged statistics, at most `num_burnin_steps`."""
        return self._step_state.schedule.burned_in

    @property
    def skipped(self) -> Tensor:
        """The number of steps that changed nothing: a check undid them, something was not finite, or all gradients were
        zero.

        0-dim, on the device.
        """
        return self._step_state.skipped

    @property
    def undone(self) -> Tensor:
        """The number of `skipped` steps that a check undid, because the loss of their batch had risen. A few are usual:
        behind an exact step that is undone, the next one has more damping.

        0-dim, on the device.
        """
        return self._step_state.undone

    @property
    def scalars(self) -> Mapping[str, Tensor]:
        """0-dim tensors of the last step that computed them, by name, NaN before; and those that the rule declares.

        "loss_before" is the loss before the last step whose change a closure measured, so it is NaN with the default,
        whose checks need no loss. "kappa" is NaN without a `norm_constraint`.
        """
        return self._step_state.scalars

    @property
    def rho(self) -> Tensor:
        """ρ, the actual change of the loss over the predicted change, 0-dim (section 6.5 of the paper).

        The value is that of the last step whose change of the loss was measured; NaN before the first.
        """
        return self.scalars["rho"]

    @property
    def predicted_change(self) -> Tensor:
        """The change of the loss that the quadratic model predicted, in units of the loss; 0-dim, usually negative.

        It is positive where the averaged gradient of earlier batches points up the loss of this one, as it does near a
        minimum. A negative `rho` at such a step is no sign of trouble.

        The value is that of the last step that computed it: steps on which the damping is adapted, steps with a check
        and, with one parameter group and no weight decay, all steps of the "qmodel" rules; NaN before the first. It
        includes clipping, weight decay and groups. "qmodel" rules and checks use the exact Fisher of the batch, the
        others the block-diagonal Fisher.
        """
        return self.scalars["predicted_change"]

    @property
    def qmodel_learning_rate(self) -> Tensor:
        """-α, the coefficient of P g in the last step of a "qmodel" rule (section 7); 0-dim, NaN before."""
        return self.scalars.get("qmodel_learning_rate", torch.full_like(self.damping, torch.nan))

    @property
    def qmodel_momentum(self) -> Tensor:
        """μ, the coefficient of the previous update in the last step of a "qmodel" rule; 0-dim, NaN before."""
        return self.scalars.get("qmodel_momentum", torch.full_like(self.damping, torch.nan))

    @property
    def kappa(self) -> Tensor:
        """κ, by which `norm_constraint` shortened the last step: 0-dim, 1 for a step within the bound.

        NaN before the first step, and in rules that do not shorten steps by it.
        """
        return self.scalars["kappa"]

    @property
    def phases(self) -> PhaseSeconds:
        """The seconds by phase, measured while a `Metrics` is attached."""
        return self._step_state.phases

    def counters(self) -> dict[str, int]:
        """For the report: the steps so far, and those that failed. Waits for the device.

        With owners, the failures are those of the blocks that this process keeps.
        """
        return self._step_state.counters()

    def intervals(self) -> list[str]:
        """For the report: the intervals that a cost model chooses, and the part of a batch that checks take."""
        return self._step_state.intervals()

    def fallbacks(self) -> list[str]:
        """For the report: each part that was not done as it should be, and why."""
        of_steps = self._step_state.fallbacks(self._registrations)
        outside = fold(sorted(self.net.captures.reached & self._unregistered))
        reason = OUTSIDE.format(outside, self.options.first_order_rule.lr)
        members = {self.names[parameter] for group in self.param_groups for parameter in group["params"]}
        left_out = fold(sorted(self.registered - members))
        unmoved = f"{left_out}: in no parameter group of KFAC, which leaves such parameters as they are"
        return [*of_steps, *[reason] * bool(outside), *[unmoved] * bool(left_out)]

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, as tensors by parameter in "state", and in "param_groups".

        The tensors of a Fisher block are those of its first parameter, and those of no block are the first parameter's.
        A file of it can be read with `weights_only=True`. As in every torch optimizer, tensors are those of the
        optimizer: keep a copy, or a file. `load_state_dict` refuses a state that the optimizer has left behind.
        """
        publish(self._step_state, self.param_groups, self.state)
        self._handed_out.append(self.state[parameters_of(self.param_groups)[0][0]])
        state = super().state_dict()
        return {**state, "param_groups": [group for group in state["param_groups"] if not is_left(group)]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue bit for bit from `state_dict()`.

        A warning says what differs: the options that were given when the state was saved, parameters that have no state
        in it, and entries that the states of earlier versions do not have.

        Raises:
            ValueError: entries are missing or unknown, or have shapes, dtypes or values that they cannot have. It names
                all of them, and nothing of the state is loaded.
        """
        self._follow_registrations()  # paths that were only captured
        self.estimator.follow_registrations()
        checkpoint = check_state(self._step_state, self.param_groups, state_dict)
        groups = with_empty_groups(self.param_groups, state_dict["param_groups"])
        before = self.state, self.param_groups
        try:
            # torch would convert the state to the dtypes of the parameters, and share what needs no conversion.
            super().load_state_dict({"state": {}, "param_groups": groups})
        except BaseException:  # of a user's hook
            self.state, self.param_groups = before
            raise
        if self.options.rule.keeps_first_lr:
            for group in self.param_groups:
                keep_first_lr(group)
        restore(self._step_state, self.param_groups, self.state, checkpoint)
        self._told_small_lr |= self.counter > 0  # the lr of earlier steps is not known
        self._told_outside |= self.counter > 0
        publish(self._step_state, self.param_groups, self.state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "KFAC objects cannot be copied or pickled. Create one for the other net and call "
            "load_state_dict(opt.state_dict())"
        )
