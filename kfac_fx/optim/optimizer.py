"""`KFAC`: the optimizer of Martens & Grosse 2015 as a torch.optim.Optimizer, its checkpoint, and its part in a Join.

**Checkpoint.** All that the next step depends on is tensors by parameter, in the form of every torch optimizer. Tools
that save optimizers know `state` and `param_groups` alone, so there is nothing else:

    state[parameter]  "velocity", or "exp_avg", ...       of the rule that moves the parameter
                      "0.weight,0.bias/A/moment", ...     of the Fisher block, on the first of its parameters
                      "kfac/damping", "kfac/counter", ... of the whole optimizer, on the first of all parameters

All tensors of a parameter are on its device, random states included. A step reads entries with a "/" from the estimator
and from `StepState`, where they live.

**Join.** Inside of `torch.distributed.algorithms.join.Join([wrapped, optimizer])` processes may run out of batches.
Such a process stands in for itself: it goes on to take part in the messages of the others until none has a batch. The
hook of DistributedDataParallel sends zeros instead of its gradients, and drops the average. That of KFAC takes the
steps of a process without cases. It calls the net with an empty batch, receives the averaged gradient from a process
that has one, and takes the step: the blocks and the momentum that it owns, and its copy of the parameters, go on.

A step inside of Join tells all processes which of them have a batch: one message of a few numbers, for which the host
waits. Two more messages carry the gradient and the numbers of the parameter groups while a process stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.block import key_text
from kfac_fx.fisher.placement import BlockOwners
from kfac_fx.linalg.arguments import one_element, positive
from kfac_fx.linalg.matrices import dense_or_zero
from kfac_fx.linalg.processes import Replicas, Shards
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.sources import MODES
from kfac_fx.optim.eigen_moments import new_extras, refuse_without_basis
from kfac_fx.optim.forwards import Closure, ForwardArguments, Forwards, TrainingClosure, refuse_other_losses
from kfac_fx.optim.groups import OF_GROUPS, Group, keep_first_lr, rule_state, split_group
from kfac_fx.optim.options import MOMENTUM_TYPES, KFACOptions, takes
from kfac_fx.optim.rules import new_adam_state
from kfac_fx.optim.schedule import Schedule, StepIntervals
from kfac_fx.optim.step import Losses, check_closure, take_step
from kfac_fx.optim.step_checks import StepSize
from kfac_fx.optim.step_state import SCALARS, PhaseSeconds, StepState
from kfac_fx.passes.errors import ModelChangedError, table
from kfac_fx.passes.torch_private import join_around_forward, pytree
from kfac_fx.passes.tracing.random_streams import RandomState, accelerators
from kfac_fx.recording.model_checks import refuse_inference_mode, refuse_without_blocks, refuse_without_values

WHOLE = "kfac/"  # begins the names of the tensors that belong to no block
LATE = f"{WHOLE}late"  # whether there is a late state of the random streams, and those states
STEP_SIZE = tuple(scalar.name for scalar in fields(StepSize))  # of the types with checks
CHOICES: Mapping[str, Sequence[Any]] = {  # of an optimizer; a state has the places of its own in these
    "momentum_type": MOMENTUM_TYPES,
    "estimation_mode": MODES,
    "adapt_damping": (False, True),
}
LossOfStep = Tensor | float | None

# --- the checkpoint, written ------------------------------------------------------------------------------------------


def choices(options: KFACOptions) -> dict[str, Any]:
    return {
        "momentum_type": options.kind,
        "estimation_mode": options.estimation_mode,
        "adapt_damping": bool(options.adapt_damping),
    }


def publish(state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Tensors]) -> None:
    """Put everything into the optimizer's `states` by parameter. Tensors of blocks share memory with the estimator's.

    Numbers and random states are copies, as of now. Parameters that were never moved get a new state.
    """
    parameters, division = moved(groups), state.division
    by_name = {state.names[parameter]: parameter for parameter, _ in parameters}
    for parameter, first_order in parameters:
        kept = division.keeps(state.names[parameter])
        of_rule = rule_state(states.get(parameter, {})) if kept else {}
        if parameter.requires_grad and kept and not of_rule:
            of_rule = (new_adam_state if first_order else state.options.new_state)(parameter)
        # An empty entry for a parameter of another owner: torch.distributed.checkpoint misses those without any.
        if of_rule or parameter in states or not kept:
            states[parameter] = of_rule
    first = parameters[0][0]
    for key, block in state.estimator.blocks.items():
        owner = next((by_name[name] for name in block.registration.owners if name in by_name), first)
        of_block = {f"{key_text(key)}/{name}": tensor for name, tensor in block.state().items()}
        states.setdefault(owner, {}).update(on(owner, of_block))
    states.setdefault(first, {}).update(on(first, whole(state)))


def moved(groups: Sequence[Group]) -> list[tuple[nn.Parameter, bool]]:
    """Every parameter, and whether the first-order rule moves it."""
    return [(parameter, group["first_order"]) for group in groups for parameter in group["params"]]


def on(parameter: Tensor, tensors: Tensors) -> Tensors:
    return {name: tensor.to(parameter.device) for name, tensor in tensors.items()}


def whole(state: StepState) -> Tensors:
    """The tensors that belong to no block."""
    schedule, late = state.schedule, state.late
    values = {name: getattr(state, name) for name in ("damping", *SCALARS, "skipped")}
    if state.options.checked:
        values |= {name: getattr(state.size, name) for name in STEP_SIZE}
        values |= {"intervals": torch.tensor(schedule.intervals), "overhead": torch.tensor(schedule.overhead)}
        values |= {"checks": torch.tensor([schedule.last_check, schedule.intervals_apart])}
    values |= {"counter": torch.tensor(schedule.counter), "burned_in": torch.tensor(schedule.burned_in)}
    first = [state.first_recorded.get(key, 0) for key in state.estimator.blocks]
    values |= {"first_recorded": torch.tensor(first)}
    values |= {name: torch.tensor(CHOICES[name].index(kind)) for name, kind in choices(state.options).items()}
    values |= {"estimator.damping": state.estimator.damping, "generator": state.forwards.generator.get_state()}
    tensors = {f"{WHOLE}{name}": value for name, value in values.items()}
    options = state.options
    if options.adapt_damping and not options.update_damping_immediately:
        streams = RandomState.now(state.forwards.devices) if late is None else late
        tensors |= {LATE: torch.tensor(late is not None), f"{LATE}/cpu": streams.cpu}
        tensors |= {f"{LATE}/{device}": stream for device, stream in streams.others.items()}
    return tensors


# --- the checkpoint, read ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A state_dict, sorted by what its tensors belong to."""

    rules: Mapping[int, Tensors]  # by the place of the parameter
    blocks: Tensors
    whole: Tensors  # without late states of random streams
    late: RandomState | None

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> Checkpoint:
        # Tools name parameters, and torch numbers them; the order in the groups says which they are.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        places = {key: place for place, key in enumerate(keys)}
        by_place = {places.get(key, key): values for key, values in state_dict["state"].items()}
        rules = {place: rule_state(values) for place, values in by_place.items()}
        others = {k: v for values in by_place.values() for k, v in values.items() if "/" in k}
        streams = {name: others.pop(name).cpu() for name in list(others) if name.startswith(f"{LATE}/")}
        late = others.pop(LATE, None)
        if late is not None and late and f"{LATE}/cpu" not in streams:
            raise ValueError(f"the state has {LATE!r} and no '{LATE}/cpu', the random state that belongs to it")
        return Checkpoint(
            {place: values for place, values in rules.items() if values},
            {name: value for name, value in others.items() if not name.startswith(WHOLE)},
            {name: value for name, value in others.items() if name.startswith(WHOLE)},
            RandomState(streams.pop(f"{LATE}/cpu"), {name.removeprefix(f"{LATE}/"): s for name, s in streams.items()})
            if late is not None and late
            else None,
        )


def check_state(state: StepState, groups: Sequence[Group], state_dict: Mapping[str, Any]) -> Checkpoint:
    """Raises ValueError for an optimizer's state_dict that does not fit, before anything of it is loaded."""
    if not is_state(state_dict):
        raise ValueError(
            "this is no state_dict of an optimizer, which has 'state' and 'param_groups': write opt.state_dict()"
        )
    refuse_other_entries(state_dict["state"])
    checkpoint = Checkpoint.of(state_dict)
    if not checkpoint.whole:
        raise ValueError(f"the state has no {WHOLE!r} entries: it is that of another kind of optimizer")
    check_choices(state, checkpoint.whole)
    needed = {name: tensor for name, tensor in whole(state).items() if not name.startswith(LATE)}
    expected = needed.keys()
    if wrong := sorted(expected ^ checkpoint.whole.keys()):
        raise ValueError(f"the state is of another version of KFAC: {', '.join(wrong)} on one side only")
    state.estimator.check_state({"damping": checkpoint.whole[f"{WHOLE}estimator.damping"], **checkpoint.blocks})
    check_shapes(needed, checkpoint.whole)
    for n, both in enumerate(zip(groups, state_dict["param_groups"], strict=False)):
        here, there = (", ".join(key for key in OF_GROUPS if key in group) for group in both)
        if here != there:
            raise ValueError(
                f"parameter group {n} of the state has {there}, and this one's has {here}: it is that of another "
                "momentum_type"
            )
    parameters = moved(groups)
    rows: list[tuple[str, str]] = []
    for place, values in checkpoint.rules.items():
        if place not in range(len(parameters)):
            rows.append((f"parameter {place}", f"there are {len(parameters)}"))
            continue
        parameter, first_order = parameters[place]
        new = new_adam_state if first_order else state.options.new_state
        has, needs = shapes(values), shapes(new(torch.empty_like(parameter, device="meta")))
        if has != needs:
            rows.append((state.names[parameter], f"has {has}, and needs {needs}"))
    if rows:
        raise ValueError(f"the state does not fit {len(rows)} of {len(parameters)} parameters:\n{table(rows)}")
    return checkpoint


def is_state(state_dict: Any) -> bool:
    """Whether this has the form of the state_dict of an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        return False
    states, groups = state_dict["state"], state_dict["param_groups"]
    named = isinstance(states, Mapping) and all(isinstance(values, Mapping) for values in states.values())
    return named and isinstance(groups, Sequence) and all("params" in group for group in groups)


def refuse_other_entries(states: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raises ValueError for entries of the state of parameters that cannot be copied."""
    rows = [
        (str(name), "is on the meta device" if isinstance(value, Tensor) else f"is a {type(value).__name__}")
        for values in states.values()
        for name, value in values.items()
        if not isinstance(value, Tensor) or value.is_meta
    ]
    if rows:
        raise ValueError(f"{len(rows)} entries of the state are no tensors with values:\n{table(rows)}")


def check_shapes(needed: Tensors, given: Tensors) -> None:
    """Raises ValueError for entries of the whole optimizer that cannot be loaded."""
    generator = f"{WHOLE}generator"
    rows = [
        (name, f"has {list(given[name].shape)}, and needs {list(tensor.shape)}")
        for name, tensor in needed.items()
        if given[name].shape != tensor.shape
    ]
    if rows:
        devices = "\nRandom states of one kind of device do not fit another: load on the kind that saved."
        raise ValueError(
            f"the state does not fit {len(rows)} entries of the optimizer:\n{table(rows)}"
            + devices * (generator in dict(rows))
        )


def check_choices(state: StepState, whole: Tensors) -> None:
    """Raises ValueError for the state of an optimizer of another kind, whose tensors mean something else."""
    rows: list[tuple[str, str]] = []
    for name, here in choices(state.options).items():
        kinds, entry = CHOICES[name], whole.get(f"{WHOLE}{name}")
        if entry is None:
            continue  # the names of all entries are compared next
        place = int(entry) if entry.numel() == 1 else len(kinds)
        if place != kinds.index(here):
            there = repr(kinds[place]) if place in range(len(kinds)) else "another kind"
            rows.append((name, f"{there} in the state, {here!r} here"))
    if rows:
        raise ValueError(
            f"the state is that of a KFAC with other options:\n{table(rows)}\n"
            "Create the optimizer with the options of the state, or train without it."
        )


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def restore(
    state: StepState, groups: Sequence[Group], states: MutableMapping[Any, Any], checkpoint: Checkpoint
) -> None:
    """Copy a checked checkpoint into `state` and into the optimizer's `states` by parameter.

    Forwards since the last step are forgotten.
    """
    parameters = moved(groups)
    for place, values in checkpoint.rules.items():
        parameter, _ = parameters[place]
        if not state.division.keeps(state.names[parameter]):
            continue
        states[parameter] = {key: value.to(parameter.device, copy=True) for key, value in values.items()}
    values = {name.removeprefix(WHOLE): value for name, value in checkpoint.whole.items()}
    for name in ("damping", *SCALARS, "skipped"):
        getattr(state, name).copy_(values[name])
    for name in STEP_SIZE if state.options.checked else ():
        getattr(state.size, name).copy_(values[name])
    if state.options.checked:
        state.schedule.intervals = state.schedule.with_given(StepIntervals(*values["intervals"].tolist()))
        state.schedule.overhead = float(values["overhead"])
        state.estimator.cov_ema_decay = state.schedule.decay
    state.schedule.counter, state.schedule.burned_in = int(values["counter"]), int(values["burned_in"])
    if state.options.checked:
        step, apart = values["checks"].tolist()
        state.schedule.checked(step, apart, state.size.calm)
    first = zip(state.estimator.blocks, values["first_recorded"].tolist(), strict=True)
    state.first_recorded = {key: step for key, step in first if step}
    state.estimator.load_state_dict({"damping": values["estimator.damping"], **checkpoint.blocks})
    state.forwards.generator.set_state(values["generator"].cpu())
    state.late = checkpoint.late
    state.grouped = None
    state.forwards.forget()


# --- processes without batches ----------------------------------------------------------------------------------------


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
            tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
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
        parameters, numbers = self.parameters(), [(group, key) for group in self.groups for key in OF_GROUPS]
        numbers = [(group, key) for group, key in numbers if key in group]
        values = [float(parameter.grad is not None) for parameter in parameters]
        values += [float(group[key]) for group, key in numbers]
        sent = torch.tensor(values, dtype=torch.float64, device=parameters[0].device)
        gradients = dense_or_zero((parameter.grad for parameter in parameters), parameters)
        *gradients, sent = self.replicas.broadcast([*gradients, sent], source)
        if not self.standing_in:
            return
        values = sent.tolist()
        for parameter, gradient, has in zip(parameters, gradients, values, strict=False):
            parameter.grad = gradient if has else None
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
        "adapt_damping=True, which asks the process for the loss of its batch": bool(options.adapt_damping),
        "a GradScaler, whose scale that process does not learn": scaler is not None and scaler.is_enabled(),
    }
    if wrong := [words for words, applies in why.items() if applies]:
        raise ValueError(
            "inside of Join, a process that has no more batches takes the steps of the others, and cannot with\n"
            + "\n".join(f"  {words}" for words in wrong)
            + "\nLeave Join out: a process that has no more cases calls the net with an empty batch, x[:0]."
        )


def refuse_other_join() -> None:
    raise ValueError(
        "inside of join(), processes without batches take part in the messages of DistributedDataParallel and not in "
        "those of KFAC, which would wait for them. Write Join([wrapped, optimizer]) in its place, with Join of "
        "torch.distributed.algorithms.join; or leave it out, and a process that has no more cases calls the net with "
        "an empty batch, x[:0], and takes all steps with the others."
    )


def refuse_first(notified: object) -> None:
    """Raises ValueError for an optimizer that is the first in `Join`. notified: of `Join.notify_join_context`."""
    if notified is not None:
        raise ValueError(
            "Join runs the messages of its parts in their order, and those of KFAC come behind those of "
            "DistributedDataParallel: write Join([wrapped, optimizer])"
        )


def refuse_micro_batches(forwards: int) -> None:
    """Raises ValueError for a step inside of Join that has other than one forward."""
    if forwards != 1:
        raise ValueError(
            f"inside of Join, a step has one forward, which processes without batches take part in, and this one has "
            f"{forwards}: call optimizer.step() behind every forward and backward, or leave Join out"
        )


# --- KFAC -------------------------------------------------------------------------------------------------------------


class KFAC(Optimizer, Joinable):
    """K-FAC on a compiled module; statistics are recorded inside `net(x)`.

    One step, at parameters θ, in the order and with the semantics of TF K-FAC:

    1. The statistics of the forwards since the last step enter the factors, if they are due.
    2. The inverses are computed anew, if they are due.
    3. Momentum and the preconditioner P give an update Δ, and θ <- θ - lr (Δ + weight_decay θ). The momentum type says
       what Δ is:
       "eigen_moments", the default: Δ lies between Adam's step and K-FAC's in the eigenbasis of the Fisher blocks, as
       long as Adam's, times 0.02 (see `kfac_fx.optim.eigen_moments`). Every few steps the exact Fisher of the batch
       scales it, and steps that made the batch's loss rise are undone (see `kfac_fx.optim.step_checks`). It needs no
       number and no closure;
       "adaptive": Δ = α P m, with m the averaged gradient. Every few steps the exact Fisher of the batch gives α, and
       the change of the batch's loss adapts the damping. A step, or the steps since the last check, that made this loss
       rise by more than half of it are undone. It needs no number and no closure (see `kfac_fx.optim.step_checks`);
       "regular": v <- momentum v + P g, Δ = v;
       "adam": v <- momentum v + g, Δ = P v;
       "qmodel": Δ is the step along P g and the previous Δ that minimizes the exact quadratic model of the batch
       (section 7 of the paper);
       "qmodel_fixedmu": the same, with the coefficient of the previous Δ fixed;
       "grafted": Δ is P m with the averaged gradient m, and in every block as long as Adam's step (see
       `kfac_fx.optim.rules`).
    4. If due, the damping is adapted by how well the model predicted the change of the loss (section 6.5).

    If the gradients, the loss or the update are not finite, nothing changes, and `skipped` counts the step on the
    device. The host does not wait for that, except at the very first step, which is taken again.

    Parameters without a gradient stand still, and count as a zero gradient in their Fisher block. A step without any
    gradient does nothing. Parameters in no Fisher block follow AdamW, in a parameter group of their own.

    The forwards in training mode between two steps are the micro-batches of a step. Their statistics, and the quadratic
    model, are averaged by cases. The gradient should be that of the mean loss over all of them; the first step warns
    (LossScaleWarning) if it is that of a multiple of the registered loss.

    Attributes:
        estimator: the FisherEstimator.
        generator: the random stream of the sampled targets, from which several processes derive streams of their own.
        options: the arguments.

    Raises:
        RegistrationError: for a net without Fisher blocks, and with "eigen_moments" for blocks without an eigenbasis.
        AlreadyAttachedError: for a second optimizer on one net.
    """

    @takes(KFACOptions)
    def __init__(self, options: KFACOptions) -> None:
        Joinable.__init__(self)
        self.net: CompiledModule = options.net
        refuse_inference_mode("a KFAC is created")
        refuse_without_values(self.net.model)
        refuse_without_blocks(self.net.registrations, self.net.named_parameters())
        self.options = options
        self.names = names = {parameter: name for name, parameter in self.net.named_parameters()}
        self._read_registrations()
        super().__init__([{"params": list(names)}] if options.params is None else options.params, options.of_groups)
        example = next(iter(names))
        precision = torch.promote_types(example.dtype.to_real(), torch.float32)
        scalar = torch.zeros((), dtype=precision, device=example.device)
        schedule = Schedule(options)
        self.estimator = FisherEstimator(
            self.net,
            cov_ema_decay=schedule.decay,
            damping=scalar + options.first_damping,
            estimation_mode=options.estimation_mode,
            fraction=options.fraction,
            exps=() if options.eigen_moments else (-1,),
        )
        self.estimator.relative_damping = options.relative_damping
        self.estimator.new_extras = new_extras if options.eigen_moments else None
        shards = Shards.of(self.net.named_parameters())
        self.estimator.replicas = replicas = Replicas(options.process_group or (shards and shards.group))
        if options.strategy is not None:
            state = options.new_state(torch.empty_like(example, device="meta"))
            vectors = sum(tensor.shape == example.shape for tensor in state.values()) if shards is None else 0
            self.estimator.owners = BlockOwners(replicas, options.strategy, vectors, shards)
        seed = torch.initial_seed() if options.seed is None else options.seed
        self.generator = torch.Generator(example.device).manual_seed(seed)
        self._forwards = Forwards(self.net, schedule, self.estimator, self.generator, accelerators(names))
        self._step_state = StepState(
            net=self.net,
            names=names,
            registered=self.registered,
            options=options,
            schedule=schedule,
            estimator=self.estimator,
            forwards=self._forwards,
            replicas=replicas,
            shards=shards,
            scalar=scalar,
            damping=scalar + options.first_damping,
        )
        self._stand_in: StandIn | None = None  # inside of Join
        self._joined: object = None  # that of DistributedDataParallel, which keeps it behind the end
        self._published: object = None  # the groups of blocks whose tensors are in `state`
        self.net.attach(self)

    # --- what torch expects -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters in no Fisher block make another one behind it.

        Raises ValueError for parameters that are not the compiled module's.
        """
        first_order = self.options.first_order_rule
        for part in split_group(param_group, self.names, self._unregistered, first_order, self.defaults):
            super().add_param_group(part)
            if self.options.bound_on("update") is not None:
                keep_first_lr(self.param_groups[-1])

    def _read_registrations(self) -> None:
        self._registrations = self.net.registrations
        self.registered = frozenset(name for registration in self._registrations for name in registration.owners)
        self._unregistered = self.net.program.parameters.keys() - self.registered
        if self.options.eigen_moments:
            refuse_without_basis(self._registrations)

    def _follow_registrations(self) -> None:
        """After parameters were unfrozen: those in no Fisher block move to a group for the first-order rule."""
        if self.net.registrations is self._registrations:
            return
        self._read_registrations()
        self._step_state.registered, self._step_state.grouped = self.registered, None
        for group in [group for group in self.param_groups if not group["first_order"]]:
            by_rule: tuple[list[Tensor], list[Tensor]] = [], []
            for parameter in group["params"]:
                by_rule[self.names[parameter] in self._unregistered].append(parameter)
            if by_rule[True]:
                group["params"] = by_rule[False]
                shared = {name: group[name] for name in self.defaults if name != "lr"}
                self.add_param_group({**shared, "params": by_rule[True]})

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forwards.gradients_zeroed()

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
        if closure is not None and not callable(closure):
            raise TypeError(
                f"step takes a closure by position, and got a {type(closure).__name__}: write step(loss=loss) for a "
                "loss, and step() for none"
            )
        refuse_inference_mode("a step is taken")
        for name, function in (("evaluate", evaluate), ("previous", previous)):
            if function is not None and not callable(function):
                raise TypeError(
                    f"step({name}=...) takes a closure that returns a loss, and got a {type(function).__name__}: write "
                    "step(loss=loss) for a loss"
                )
        refuse_other_losses(loss)
        if closure is not None:
            check_closure(self._step_state)
            measures = self._step_state.schedule.adapting and evaluate is None
            measured = self._forwards.train(closure, measures)
            refuse_other_losses(measured)
            loss = loss if measured is None else measured
        self._follow_registrations()
        if self._stand_in is not None:
            refuse_first(Join.notify_join_context(self))
            refuse_micro_batches(self._forwards.seen.forwards)
            loss = self._stand_in.share(loss)
        try:
            take_step(self._step_state, self.param_groups, self.state, Losses(evaluate, loss, previous, closure))
        finally:
            self._forwards.forget()
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
        if self._step_state.shards is None and self.net.captures.structure.sharded:
            raise ModelChangedError(
                "the model was sharded after the optimizer was made, which holds the whole parameters of before.\n"
                "Write net = kfac_fx.compile(model, (x,)), fully_shard(...), and then optimizer = kfac_fx.KFAC(net)."
            )
        join = join_around_forward()
        if self._stand_in is not None:
            self._stand_in.on_forward(args, kwargs)
            self._joined = join or self._joined
        elif join is not None and join is not self._joined:
            refuse_other_join()
        with self.phases.measure("record"):
            return self._forwards.on_forward(args, kwargs)

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Called by the net: until the first step, watch the gradients that the backward sends into the outputs."""
        self._forwards.on_outputs(args, kwargs, outputs)

    # --- processes without batches ------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> StandIn:
        """For `torch.distributed.algorithms.join.Join([wrapped, optimizer])`; see `kfac_fx.optim.optimizer`.

        Raises ValueError for options with which a process without batches cannot take the steps of the others.
        """
        state = self._step_state
        refuse_in_join(self.options, state.shards is not None)
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
        """λ, 0-dim; assigning a number or a tensor writes into it. Raises ValueError for a number that is not positive.

        A tensor is not read, because the host would wait for it.
        """
        return self._step_state.damping

    @damping.setter
    def damping(self, value: float | Tensor) -> None:
        one_element("damping", value) if isinstance(value, Tensor) else positive("damping", value)
        self._step_state.damping.copy_(torch.as_tensor(value).reshape(()))

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
        """The number of steps that changed nothing, because something was not finite; 0-dim, on the device."""
        return self._step_state.skipped

    @property
    def rho(self) -> Tensor:
        """ρ, the actual change of the loss over the predicted change, 0-dim (section 6.5 of the paper).

        The value is that of the last step whose change of the loss was measured; NaN before the first.
        """
        return self._step_state.rho

    @property
    def predicted_change(self) -> Tensor:
        """The change of the loss that the quadratic model predicted, in units of the loss; 0-dim, usually negative.

        The value is that of the last step that computed it: steps on which the damping is adapted and, with one
        parameter group and no weight decay, all steps of the "qmodel" types; NaN before the first. It includes
        clipping, weight decay and groups. "qmodel" types use the exact Fisher of the batch, the others the
        block-diagonal Fisher.
        """
        return self._step_state.predicted_change

    @property
    def qmodel_learning_rate(self) -> Tensor:
        """-α, the coefficient of P g in the last step of a "qmodel" type (section 7); 0-dim, NaN before."""
        return self._step_state.qmodel_learning_rate

    @property
    def qmodel_momentum(self) -> Tensor:
        """μ, the coefficient of the previous update in the last step of a "qmodel" type; 0-dim, NaN before."""
        return self._step_state.qmodel_momentum

    @property
    def kappa(self) -> Tensor:
        """κ, by which `norm_constraint` shortened the last step: 0-dim, 1 for a step within the bound.

        NaN before the first step, and without `norm_constraint`.
        """
        return self._step_state.kappa

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
        return self._step_state.fallbacks(self._registrations)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, as tensors by parameter in "state", and in "param_groups".

        The tensors of a Fisher block are those of its first parameter, and those of no block are the first parameter's.
        A file of it can be read with `weights_only=True`.
        """
        publish(self._step_state, self.param_groups, self.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue bit for bit from `state_dict()`.

        Raises:
            ValueError: the state does not fit; nothing of it is loaded then.
        """
        checkpoint = check_state(self._step_state, self.param_groups, state_dict)
        # torch would convert the state to the dtypes of the parameters, and share what needs no conversion.
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if self.options.bound_on("update") is not None:
            for group in self.param_groups:
                keep_first_lr(group)
        restore(self._step_state, self.param_groups, self.state, checkpoint)
        publish(self._step_state, self.param_groups, self.state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "KFAC objects cannot be copied or pickled. Create one for the other net and call "
            "load_state_dict(opt.state_dict())"
        )
