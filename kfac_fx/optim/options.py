"""KFAC's options: one dataclass gives `KFAC` its signature, the documentation of its arguments and their checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import (
    a_flag,
    a_process_group,
    a_seed,
    a_share,
    a_weight,
    choice,
    finite,
    not_negative,
    positive,
    whole_number,
)
from kfac_fx.losses.sources import check_mode
from kfac_fx.optim.eigen_moments import without_basis
from kfac_fx.optim.rules import NEW_STATES, DampingRule, FirstOrder, new_velocity
from kfac_fx.passes.errors import nearest
from kfac_fx.recording.model_checks import compiled

PLACEMENTS = ("replicated", "owners", "round_robin")
MOMENTUM_TYPES = ("adaptive", "regular", "adam", "qmodel", "qmodel_fixedmu", "eigen_moments", "grafted")
STEPS = "steps"
DEFAULTS = {  # of options that are None, by momentum type; "" for all others that have them
    "momentum": {"eigen_moments": 0.95, "": 0.9},
    "second_moment_decay": {"grafted": 0.999, "": 0.95},
    "eigenvalue_exponent": {"": 0.5},
    "relative_damping": {"": 0.003},
    "cov_ema_decay": {"eigen_moments": 0.98, "": 0.95},
    "overhead": {"adaptive": 0.6, "": 0.2},
    "norm_constraint": {"": 0.03},
    "damping_adaptation_decay": {"adaptive": 0.9, "": 0.95},
}


def a_rate(name: str, value: Any) -> None:
    if isinstance(value, (list, tuple, Mapping)):
        raise ValueError(
            f"{name} is a {type(value).__name__}; groups of parameters are an argument, KFAC(net, params=...)"
        )
    not_negative(name, value)


def a_grad_scaler(name: str, value: Any) -> None:
    if not callable(getattr(value, "get_scale", None)):
        raise ValueError(f"{name} is {value!r}; it must be a torch.amp.GradScaler")


def a_mode(name: str, value: Any) -> None:
    check_mode(value)


def in_any_case(known: Sequence[str]) -> Callable[[str, Any], None]:
    """A check of a name that may be written in capitals."""

    def check(name: str, value: Any) -> None:
        choice(name, value.lower() if isinstance(value, str) else value, known)

    return check


def of_first_order(name: str, value: Any) -> None:
    FirstOrder.read(value)


@dataclass(frozen=True, eq=False)
class KFACOptions:
    """The arguments of `KFAC`, checked one by one and together.

    Args:
        net: the compiled module, as returned by `kfac_fx.compile`.
        lr: the learning rate. With "eigen_moments" and "adaptive" a multiplier of their step size; None means 1. The
            "qmodel" types must have None, and the others need a number. They neither check nor undo a step: without
            `norm_constraint`, too large an lr for the damping makes the loss diverge.
        damping: λ of F + λ I. It scales with the loss. With "adaptive" and `adapt_damping` this is its first value.
            None means 1 with "adaptive" and 0 with "eigen_moments", which has none; the other types need a number.
        momentum: with "adaptive", "eigen_moments" and "grafted" the weight of the past in the averaged gradient. With
            "regular", "adam" and "eigen_moments" parameter groups may have their own, with "eigen_moments" one for all
            parameters of a block. None means 0.95 with "eigen_moments" and 0.9 otherwise; "qmodel" takes none.
        momentum_type: "adaptive", "regular", "adam", "qmodel", "qmodel_fixedmu", "eigen_moments" or "grafted"; see
            KFAC. None means "regular" if both lr and damping are given, as in TF K-FAC; "adaptive" if damping alone
            is given, and for a net with blocks that have no eigenbasis; and "eigen_moments" otherwise.
        second_moment_decay: β₂ of "eigen_moments" (`kfac_fx.optim.eigen_moments`), where 1 weighs all steps alike, and
            of "grafted". None means 0.95, and 0.999 with "grafted".
        eigenvalue_exponent: w of "eigen_moments", from 0, Adam in the eigenbasis, to 1, the direction of K-FAC with
            Adam's length. None means 0.5.
        relative_damping: instead of damping: every side of a block is damped by this part of its mean eigenvalue,
            λ_A = c tr A / dim A. "eigen_moments" has no other damping; None means 0.003 there.
        cov_ema_decay: the decay of the factors in one step; `cov_update_every` steps at once decay by its power. None
            means 0.95, and 0.98 with "eigen_moments".
        cov_update_every: the factors are updated every so many steps. None means 1, and with "adaptive" and
            "eigen_moments", which update them as early as the inverses, what `overhead` allows.
        invert_every: the inverses are updated every so many steps, and also after 1, 2, 5, 10, 20, 50, ... steps while
            that is less: the factors of the first batches alone are no curvature to take many steps with. None means
            10, and what `overhead` allows with "adaptive" and "eigen_moments".
        overhead: what statistics, inverses and checks of "adaptive" and "eigen_moments" may cost in a step, as a part
            of the training step. A cost model of the network chooses their intervals at the first step
            (`kfac_fx.optim.schedule`), and net.report prints them. Intervals that are given replace those of the
            model. None means 0.2, and 0.6 with "adaptive".
        num_burnin_steps: so many first steps only average statistics, and are not counted.
        norm_constraint: the bound on the squared Fisher norm of a step, which is scaled down to it: roughly twice the
            Kullback-Leibler divergence between the predictions before and after the step. Start with 1e-2 for lr=1.
            "eigen_moments" bounds the exact Fisher norm by this times max(1, loss); None means 0.03 there.
        norm_constraint_form: "update" bounds lr Δ, momentum included, by norm_constraint (lr / l₀)², so that steps
            follow a schedule; l₀ is the lr of a parameter group when it was added, its "first_lr". The norm is that of
            the damped factors and costs a product with them. Weight decay is not in it. "gradient" is TF K-FAC's form:
            it bounds lr P g before momentum ("adam": lr P v), so a step can be 1 / (1 - momentum) times as long, and lr
            does nothing while the bound shortens steps.
        weight_decay: decoupled from the gradient. With "eigen_moments" it is multiplied by 0.02, as the whole step is.
        adapt_damping: adapt λ (section 6.5 of the paper). `step` then needs `evaluate` or a closure, at least
            on every `damping_adaptation_interval`-th step.
        update_damping_immediately: False measures the loss after such a step at the beginning of the next one, before
            its inverses; that `step` then needs `previous`. The damping of every step is the same either way.
        damping_adaptation_interval, damping_adaptation_decay: λ changes by decay^interval, every `interval` steps. None
            means an interval of 5 and a decay of 0.95. With "adaptive" and "eigen_moments" it is the interval of their
            checks, which are also made after 1, 2, 5, 10, 20, ... steps while that is less, and None means what
            `overhead` allows; the checks of "eigen_moments" then become up to four times
            as rare while steps are far below their bound. "adaptive" has a decay of 0.9.
        damping_decrease_rho_threshold, damping_increase_rho_threshold: λ shrinks if ρ is above the one, and grows if
            ρ is below the other.
        min_damping, l2_reg: λ stays above their sum. The training loss must contain the term l2_reg / 2 |θ|².
        precon_damping_mult: the preconditioner's damping is this times λ; the quadratic model's is λ (section 6.6).
        qmodel_update_rescale: the learning rate of the parameter groups with the "qmodel" types; None means 1.
        estimation_mode: "gradients" samples targets in a pass of its own. "empirical" records in the training backward
            itself, with the true targets (another matrix, see Kunstner et al. 2019). FisherEstimator has the others.
        fraction: the part of every batch that "gradients" records.
        seed: of the sampled targets, which have a random stream of their own; None takes torch's initial seed.
        reduction: "mean" if the training loss is a mean over the cases of all micro-batches of a step, "sum" if it is
            their sum, which "empirical" must know. The gradient of a "sum" is larger by the number of cases; choose lr
            as much smaller.
        first_order: AdamW's options for parameters in no Fisher block, whose lr a group's own replaces or scales:
            dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=None).
        grad_scaler: the GradScaler in use. "empirical" needs it, because it sees scaled gradients.
        params: parameter groups with their own lr, momentum and weight_decay; None puts all parameters into one group.
        process_group: of DistributedDataParallel, which averages the gradients; None takes the default group, if any.
        placement: where Fisher blocks live in the processes of `process_group`. "replicated": every process keeps the
            factors and inverses of all blocks. "owners": one process keeps those of a block, and sends its products to
            the others; the largest blocks are placed first, each in the process with the least work so far.
            "round_robin": one block after another, in turn, as in TF K-FAC. Both divide the memory of factors and
            inverses and the decompositions by the number of processes, and cost a message of the size of the
            parameters in a step.

    Raises:
        ValueError: for options that do not exist, lie out of range or do not fit together.
    """

    net: Annotated[Any, compiled]
    lr: Annotated[float | Tensor | None, a_rate] = None
    _: KW_ONLY
    damping: Annotated[float | Tensor | None, positive] = None
    momentum: Annotated[float | None, not_negative] = None
    momentum_type: Annotated[str | None, in_any_case(MOMENTUM_TYPES)] = None
    second_moment_decay: Annotated[float | None, a_weight] = None
    eigenvalue_exponent: Annotated[float | None, a_weight] = None
    relative_damping: Annotated[float | None, positive] = None
    cov_ema_decay: Annotated[float | None, a_weight] = None
    cov_update_every: Annotated[int | None, whole_number(1, STEPS)] = None
    invert_every: Annotated[int | None, whole_number(1, STEPS)] = None
    overhead: Annotated[float | None, positive] = None
    num_burnin_steps: Annotated[int, whole_number(0, STEPS)] = 0
    norm_constraint: Annotated[float | None, positive] = None
    norm_constraint_form: Annotated[str, functools.partial(choice, known=("update", "gradient"))] = "update"
    weight_decay: Annotated[float, not_negative] = 0.0
    adapt_damping: Annotated[bool, a_flag] = False
    update_damping_immediately: Annotated[bool, a_flag] = True
    damping_adaptation_interval: Annotated[int | None, whole_number(1, STEPS)] = None
    damping_adaptation_decay: Annotated[float | None, positive, a_weight] = None
    damping_decrease_rho_threshold: Annotated[float, finite] = 0.75
    damping_increase_rho_threshold: Annotated[float, finite] = 0.25
    min_damping: Annotated[float, not_negative] = 1e-8
    l2_reg: Annotated[float, not_negative] = 0.0
    precon_damping_mult: Annotated[float, positive] = 1.0
    qmodel_update_rescale: Annotated[float | None, positive] = None
    estimation_mode: Annotated[str, a_mode] = "gradients"
    fraction: Annotated[float, a_share] = 1.0
    seed: Annotated[int | None, a_seed] = None
    reduction: Annotated[str, functools.partial(choice, known=("mean", "sum"))] = "mean"
    first_order: Annotated[Mapping[str, Any] | None, of_first_order] = None
    grad_scaler: Annotated[torch.amp.GradScaler | None, a_grad_scaler] = None
    params: Iterable[Any] | None = None
    process_group: Annotated[Any, a_process_group] = None
    placement: Annotated[str, in_any_case(PLACEMENTS)] = "replicated"

    def __post_init__(self) -> None:
        annotations = get_type_hints(KFACOptions, include_extras=True)
        for field in fields(self):
            value, annotation = getattr(self, field.name), annotations[field.name]
            may_be_none = field.default is None or type(None) in get_args(get_args(annotation)[0])
            for check in () if value is None and may_be_none else getattr(annotation, "__metadata__", ()):
                check(field.name, value)
        if self.momentum is None and self.kind != "qmodel":
            object.__setattr__(self, "momentum", self.value("momentum"))
        self.check_step_size()
        if self.reduction == "sum" and (self.quadratic or self.checked or self.adapt_damping):
            raise ValueError(
                "the quadratic model is that of the mean loss: with momentum_type='eigen_moments', 'adaptive' or "
                "'qmodel', or with adapt_damping=True, divide the loss by the number of cases and write "
                "reduction='mean'"
            )
        if self.recording_in_training and self.fraction != 1:
            raise ValueError(
                "estimation_mode='empirical' records in the whole training backward: leave fraction at 1.0"
            )
        if self.damping_increase_rho_threshold > self.damping_decrease_rho_threshold:
            raise ValueError(
                f"damping_increase_rho_threshold={self.damping_increase_rho_threshold} is above "
                f"damping_decrease_rho_threshold={self.damping_decrease_rho_threshold}: between them the damping would "
                "have to grow and to shrink"
            )
        self.refuse_without_effect()
        if self.eigen_moments and self.relative_damping is None:
            object.__setattr__(self, "relative_damping", self.value("relative_damping"))

    def refuse_without_effect(self) -> None:
        """Raises ValueError for options that another one would have to be given for."""
        adapting, adapt = self.adapt_damping or self.adaptive, "adapt_damping=True"
        needed = {
            "damping_adaptation_decay": (adapting, adapt),
            "damping_decrease_rho_threshold": (adapting, adapt),
            "damping_increase_rho_threshold": (adapting, adapt),
            "min_damping": (adapting, adapt),
            "l2_reg": (adapting, adapt),
            "damping_adaptation_interval": (adapting or self.checked, adapt),
            "update_damping_immediately": (self.adapt_damping, adapt),
            "relative_damping": (self.eigenvalue_exponent != 0, "an eigenvalue_exponent above 0"),
            "precon_damping_mult": (self.relative_damping is None, "damping instead of relative_damping"),
            "norm_constraint_form": (self.norm_constraint is not None, "norm_constraint"),
        }
        defaults = {field.name: field.default for field in fields(self)}
        idle = [
            f"{name}={getattr(self, name)!r} has no effect without {other}: leave it out"
            for name, (given, other) in needed.items()
            if not given and getattr(self, name) != defaults[name]
        ]
        if idle:
            raise ValueError("\n".join(idle))

    def check_step_size(self) -> None:
        """Raises ValueError if lr, momentum, norm_constraint or qmodel_update_rescale do not fit the momentum type."""
        kind = self.kind
        if self.second_moment_decay is not None and not (self.eigen_moments or self.grafted):
            raise ValueError(
                f"momentum_type={kind!r} has no second moments: leave second_moment_decay out, or write "
                "momentum_type='eigen_moments'"
            )
        if self.eigenvalue_exponent is not None and not self.eigen_moments:
            raise ValueError(f"eigenvalue_exponent is an option of 'eigen_moments', and not of {kind!r}: leave it out")
        if self.relative_damping is not None and kind not in ("regular", "adam", "grafted", "eigen_moments"):
            raise ValueError(
                f"momentum_type={kind!r} has no relative damping: leave relative_damping out, or write 'regular', "
                "'adam', 'grafted' or 'eigen_moments'"
            )
        if self.relative_damping is not None and (self.damping is not None or self.adapt_damping):
            raise ValueError("relative_damping takes the place of damping: leave damping and adapt_damping out")
        if self.checked or self.grafted:
            self.refuse_unfit()
        if self.checked:
            return
        if self.overhead is not None:
            raise ValueError(
                f"momentum_type={kind!r} has the intervals cov_update_every and invert_every; overhead chooses those "
                "of 'adaptive' and 'eigen_moments'"
            )
        if self.damping is None and self.relative_damping is None:
            raise ValueError(f"momentum_type={kind!r} needs damping=...; 'eigen_moments' needs none")
        if self.quadratic and self.lr is not None:
            raise ValueError(
                f"momentum_type={kind!r} finds its own step size: leave lr out, or scale the steps with "
                "qmodel_update_rescale"
            )
        if kind == "qmodel" and self.momentum is not None:
            raise ValueError(
                "momentum_type='qmodel' finds its own momentum: leave momentum out, or write "
                f"momentum_type='qmodel_fixedmu' to keep momentum={self.momentum}"
            )
        if self.quadratic and self.norm_constraint is not None:
            raise ValueError(f"norm_constraint bounds a given lr, and momentum_type={kind!r} has none: leave it out")
        if not self.quadratic and self.lr is None:
            raise ValueError(
                f"momentum_type={kind!r} needs lr=...; 'eigen_moments', 'adaptive', 'qmodel' and 'qmodel_fixedmu' find "
                "their own step size"
            )
        if not self.quadratic and self.qmodel_update_rescale is not None:
            raise ValueError(
                f"qmodel_update_rescale scales the steps of 'qmodel'; with momentum_type={kind!r} change lr"
            )

    def refuse_unfit(self) -> None:
        """Raises ValueError for options that "adaptive", "eigen_moments" and "grafted" do not have."""
        damped = "damps eigenvalues by relative_damping"
        rescaled = "takes lr instead of qmodel_update_rescale"
        regularized = "does not know l2_reg: write weight_decay, which is decoupled"
        averaging = {"averages gradients: momentum is below 1": self.momentum is not None and self.momentum >= 1}
        of_kind = {
            "adaptive": {
                **averaging,
                "adapts the damping itself, without a closure: leave adapt_damping out": self.adapt_damping,
                "bounds its steps itself: leave norm_constraint out": self.norm_constraint is not None,
                rescaled: self.qmodel_update_rescale is not None,
                f"{regularized}, or use 'qmodel'": self.l2_reg != 0,
            },
            "eigen_moments": {
                f"{damped}: leave damping out": self.damping is not None,
                f"{damped}: leave adapt_damping out": self.adapt_damping,
                f"{damped}: leave precon_damping_mult out": self.precon_damping_mult != 1,
                "bounds what is applied: leave norm_constraint_form out": self.norm_constraint_form != "update",
                **averaging,
                rescaled: self.qmodel_update_rescale is not None,
                regularized: self.l2_reg != 0,
            },
            "grafted": {
                "has steps of Adam's length: leave norm_constraint out": self.norm_constraint is not None,
                "has steps that the damping does not make longer: leave adapt_damping out": self.adapt_damping,
                **averaging,
            },
        }[self.kind]
        if wrong := [f"momentum_type={self.kind!r} {words}" for words, applies in of_kind.items() if applies]:
            if self.momentum_type is None:
                given = "if damping and no lr is given" if self.adaptive else "if no damping is given"
                wrong.append(f"{self.kind!r} is the default {given}")
            raise ValueError("\n".join(wrong))

    @functools.cached_property
    def kind(self) -> str:
        """The momentum type, in lower case."""
        if self.momentum_type is not None:
            return self.momentum_type.lower()
        if self.damping is not None:
            return "adaptive" if self.lr is None else "regular"
        return "adaptive" if without_basis(self.net.registrations) else "eigen_moments"

    @functools.cached_property
    def strategy(self) -> str | None:
        """How blocks are divided among processes (`kfac_fx.fisher.placement`); None if every process keeps all."""
        return None if self.placement.lower() == PLACEMENTS[0] else self.placement.lower()

    def bound_on(self, what: str) -> float | None:
        """`norm_constraint` if it bounds the norm of this in the blocks, "update" or "gradient"."""
        return self.norm_constraint if self.norm_constraint_form == what and not self.checked else None

    def value(self, name: str) -> float:
        """An option or, if it is None, its default for the momentum type."""
        given: float | None = getattr(self, name)
        return DEFAULTS[name].get(self.kind, DEFAULTS[name][""]) if given is None else given

    @functools.cached_property
    def adaptive(self) -> bool:
        """Whether step size and damping are found by checks now and then; see `kfac_fx.optim.step_checks`."""
        return self.kind == "adaptive"

    @functools.cached_property
    def checked(self) -> bool:
        """Whether steps are checked now and then with the loss of their batch; see `kfac_fx.optim.step_checks`."""
        return self.adaptive or self.eigen_moments

    @functools.cached_property
    def eigen_moments(self) -> bool:
        """Whether steps are made in the eigenbasis; see `kfac_fx.optim.eigen_moments`."""
        return self.kind == "eigen_moments"

    @functools.cached_property
    def grafted(self) -> bool:
        """Whether steps have the length of Adam's; see `kfac_fx.optim.rules`."""
        return self.kind == "grafted"

    @functools.cached_property
    def quadratic(self) -> bool:
        """Whether the quadratic model finds the step size."""
        return self.kind.startswith("qmodel")

    def common(self) -> dict[str, str]:
        """The options that all processes of a training must share, as text. Waits for the device of tensors."""
        different = ("net", "params", "process_group", "grad_scaler", "seed")  # each process has its own random streams
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in different}
        return {name: repr(value.tolist() if isinstance(value, Tensor) else value) for name, value in values.items()}

    @property
    def recording_in_training(self) -> bool:
        """Whether the statistics come from the user's own backward."""
        return self.estimation_mode == "empirical"

    @property
    def of_groups(self) -> dict[str, Any]:
        """The options of parameter groups, with their first values. A quadratic model has one momentum for all."""
        rescale = 1.0 if self.qmodel_update_rescale is None else self.qmodel_update_rescale
        momentum = {} if self.quadratic or self.adaptive or self.grafted else {"momentum": self.momentum}
        return {"lr": rescale if self.lr is None else self.lr, **momentum, "weight_decay": self.weight_decay}

    @property
    def first_damping(self) -> float | Tensor:
        """λ before the first step."""
        if self.damping is None:
            return 1.0 if self.adaptive else 0.0
        return self.damping.reshape(()) if isinstance(self.damping, Tensor) else self.damping

    @functools.cached_property
    def damping_rule(self) -> DampingRule:
        return DampingRule(
            interval=self.damping_adaptation_interval or 5,
            decay=self.value("damping_adaptation_decay"),
            decrease_above=self.damping_decrease_rho_threshold,
            increase_below=self.damping_increase_rho_threshold,
            min_damping=self.min_damping,
            l2_reg=self.l2_reg,
        )

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a new parameter in a Fisher block, by name."""
        return NEW_STATES.get(self.kind, new_velocity)(parameter)

    @functools.cached_property
    def first_order_rule(self) -> FirstOrder:
        return FirstOrder.read(self.first_order or {})


KFACOptions.__init__.__qualname__ = "KFAC.__init__"  # named in the TypeError about an argument that does not exist


# --- the signature ----------------------------------------------------------------------------------------------------

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
SelfT = TypeVar("SelfT")
OTHER_NAMES = {"betas": " Write momentum=... and second_moment_decay=... instead of betas."}  # of other optimizers


def takes(
    options: Callable[P, OptionsT],
) -> Callable[[Callable[[SelfT, OptionsT], None]], Callable[Concatenate[SelfT, P], None]]:
    """Decorate `__init__(self, options)` to take the fields of the dataclass `options` as its own arguments.

    An explicit signature would repeat every name, type and default, and the body would repeat the names once more;
    `**kwargs` would hide the arguments from `help` and from type checkers. With `takes`, type checkers infer the
    arguments from the dataclass through the ParamSpec; `__signature__` and `__doc__` are the dataclass's, too.
    """

    def decorated(init: Callable[[SelfT, OptionsT], None]) -> Callable[Concatenate[SelfT, P], None]:
        @functools.wraps(init)
        def __init__(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> None:
            unknown = [name for name in kwargs if name not in written.parameters]
            if unknown:
                near = "".join(OTHER_NAMES.get(name) or nearest(name, written.parameters) for name in unknown)
                names = ", ".join(map(repr, unknown))
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {names}.{near}")
            init(self, options(*args, **kwargs))

        written, types, public = inspect.signature(options), get_type_hints(options), cast(Any, __init__)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = [argument.replace(annotation=types[name]) for name, argument in written.parameters.items()]
        public.__signature__ = written.replace(parameters=[itself, *arguments], return_annotation=None)
        public.__doc__ = options.__doc__
        return __init__

    return decorated
