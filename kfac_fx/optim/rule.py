"""An update rule: its options, the state that it keeps, and the update that it makes of a gradient.

A rule is a frozen dataclass. Its fields are its options, and a check of a field is its annotation:

    momentum: Annotated[float, a_weight] = 0.9

`kfac_fx.optim.step` runs any rule. It asks the rule for the update Δ (`direction`), for the move δ (`move`; -lr Δ and
the weight decay, if the rule has nothing to add), and, in a rule with checks, for the length of a move that is checked
(`measured_move`). All else that the step does follows from what the class declares. `kfac_fx.optim.rules` has the rules
of this library.

In the formulas g is the gradient, v the velocity, P the damped inverse of the Fisher. An update Δ moves the parameters
by -lr (Δ + weight_decay θ). No rule reads a value back from the device.

**Damping**: λ follows how well the quadratic model predicts the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

import torch
from torch import Tensor

from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.bases import basis_of, new_bases, solved, turned, update_bases
from kfac_fx.fisher.groups import PART_OF_MEAN, BlockGroup
from kfac_fx.linalg.arguments import Values, a_flag, a_weight, finite, not_negative, positive, whole_number
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.checks import Check, StepSize, tolerated
from kfac_fx.optim.groups import FlatParameters, Preconditioner, Product
from kfac_fx.passes.errors import nearest, table
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.statistics import Key


@dataclass(frozen=True, kw_only=True, eq=False)
class DampingThresholds:
    """The options of a damping that follows ρ, the actual change of the loss over the predicted one.

    Args:
        damping_adaptation_interval: λ is adapted every so many steps. None means 5, and in a rule with checks the
            interval of the checks, which `overhead` chooses.
        damping_adaptation_decay: λ changes by decay^interval.
        damping_decrease_rho_threshold, damping_increase_rho_threshold: λ shrinks if ρ is above the one, and grows if
            ρ is below the other.
        min_damping: λ stays above it.
    """

    damping_adaptation_interval: Annotated[int | None, whole_number(1, "steps")] = None
    damping_adaptation_decay: Annotated[float, positive, a_weight] = 0.95
    damping_decrease_rho_threshold: Annotated[float, finite] = 0.75
    damping_increase_rho_threshold: Annotated[float, finite] = 0.25
    min_damping: Annotated[float, not_negative] = 1e-8

    def check_thresholds(self) -> None:
        """Raises ValueError for thresholds in the wrong order."""
        if self.damping_increase_rho_threshold > self.damping_decrease_rho_threshold:
            raise ValueError(
                f"damping_increase_rho_threshold={self.damping_increase_rho_threshold} is above "
                f"damping_decrease_rho_threshold={self.damping_decrease_rho_threshold}: between them the damping would "
                "have to grow and to shrink"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptedDamping(DampingThresholds):
    """A damping λ that a closure's loss adapts: the Levenberg-Marquardt rule (Martens & Grosse 2015, section 6.5).

    Every `damping_adaptation_interval` steps the change of the loss is compared with the change that the quadratic
    model predicted; ρ is their ratio.

    Args:
        adapt_damping: adapt λ. `step` then needs `evaluate` or a closure, at least on every
            `damping_adaptation_interval`-th step.
        update_damping_immediately: False measures the loss after such a step at the beginning of the next one, before
            its inverses; that `step` then needs `previous`. The damping of every step is the same either way.
        l2_reg: the training loss contains the term l2_reg / 2 |θ|². λ stays above min_damping + l2_reg.
    """

    adapt_damping: Annotated[bool, a_flag] = False
    update_damping_immediately: Annotated[bool, a_flag] = True
    l2_reg: Annotated[float, not_negative] = 0.0

    @property
    def damping_rule(self) -> AdaptedDamping | None:
        """None without `adapt_damping`."""
        return self if self.adapt_damping else None

    @property
    def interval(self) -> int:
        return self.damping_adaptation_interval or 5

    @property
    def immediately(self) -> bool:
        return self.update_damping_immediately

    def due(self, step: int) -> bool:
        """Whether the damping is adapted at the end of step `step`, counted from 0."""
        return (step + 1) % self.interval == 0

    def adapted(self, damping: Tensor, before: Tensor, after: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """(the new damping, ρ = actual change / predicted change). The damping stays where ρ is not a number."""
        omega, change = self.damping_adaptation_decay**self.interval, after - before
        rho = change / predicted
        # A model that predicted an increase was wrong in the right direction if the loss fell: ρ is negative then.
        decrease = ((change < 0) & (predicted > 0)) | (rho > self.damping_decrease_rho_threshold)
        kept = torch.where(rho < self.damping_increase_rho_threshold, damping / omega, damping)
        new = torch.where(decrease, damping * omega, kept)
        return new.clamp(min=self.min_damping + self.l2_reg), rho

    def check_adapted_damping(self) -> None:
        """Raises ValueError for options that need `adapt_damping`, and for thresholds in the wrong order."""
        self.check_thresholds()
        names = [option.name for option in fields(AdaptedDamping)]
        idle = [
            f"{option.name}={getattr(self, option.name)!r} has no effect without adapt_damping=True: leave it out"
            for option in fields(self)
            if not self.adapt_damping and option.name in names and getattr(self, option.name) != option.default
        ]
        if idle:
            raise ValueError("\n".join(idle))


Products = Callable[[Sequence[Tensor]], Tensor]  # <d_i, F d_j> of k vectors [P]: [k, k]


class StepIntervals(NamedTuple):
    """In steps."""

    statistics: int
    inverses: int
    checks: int


ANY = 10**6


@dataclass(frozen=True)
class Update:
    """The update that a rule makes of a gradient. The step subtracts it: θ <- θ - lr (Δ + weight_decay θ). So Δ has the
    sign of the gradient, and `Update(step.g)` is gradient descent.

    Attributes:
        vector: Δ, [P].
        state: the new state of the parameters, vectors [P] by name. It is kept if the step is made.
        scalars: of `StepSize`, kept in the same way.
        ok: whether the gradient was taken, 0-dim; None: as the step says.
        kappa: by which `norm_constraint` shortened the update, 0-dim; None without a constraint.
    """

    vector: Tensor
    state: Tensors = field(default_factory=dict)
    scalars: Tensors = field(default_factory=dict)
    ok: Tensor | None = None
    kappa: Tensor | None = None


@dataclass(frozen=True)
class MeasuredMove:
    """A move whose length a check decided.

    Attributes:
        move: δ, [P].
        finite: whether what decided its length is; 0-dim.
        slope, curvature: <∇h, δ> and <δ, F δ>, 0-dim.
        before: the values of the check's batch at the parameters before the move.
        rise: of the loss of the batch, above which the move is undone; 0-dim.
        ratio: the new r, 0-dim; it doubles if the move is undone.
        scalars: of `StepSize`, kept if the move is tried.
        norm: of the move that the rule proposed, if this decides r; 0-dim.
    """

    move: Tensor
    finite: Tensor
    slope: Tensor
    curvature: Tensor
    before: Any
    rise: Tensor
    ratio: Tensor
    scalars: Tensors = field(default_factory=dict)
    norm: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """How a checked move went; all are 0-dim.

    Attributes:
        tried, kept: whether the move was made, and whether it stayed.
        change, predicted: the change of the loss of the check's batch, and the one that the quadratic model predicted.
        drift: see `BatchLoss.drift`.
    """

    tried: Tensor
    kept: Tensor
    change: Tensor
    predicted: Tensor
    drift: Tensor | float = 0.0

    @property
    def rho(self) -> Tensor:
        """ρ (Martens & Grosse 2015, section 6.5)."""
        return self.change / self.predicted


SCALARS = ("rho", "predicted_change", "loss_before")  # of every rule, next to its own
MEASURED = (*SCALARS, "kappa")  # NaN where nothing measures them
# Every optimizer keeps something by these names, so no rule has other scalars of them.
COMMON = frozenset([
    *MEASURED, *StepSize.__dataclass_fields__, "damping", "skipped", "withdrawn", "counter", "burned_in", "late",
    "options", "outdated", "first_recorded", "generator", "estimator.damping", "name", "momentum_type",
    "estimation_mode", "adapt_damping", "cohorts", "intervals", "overhead", "checks", "moved", "soon",
])  # fmt: skip


class Known(dict[str, Tensor]):
    """Tensors by name, which say where a name that is missing is declared.

    remedy: in words; "{name}" stands for the name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], place: str, remedy: str = "declare it there") -> None:
        super().__init__(tensors)
        self.place, self.remedy = place, remedy

    def __missing__(self, name: str) -> Tensor:
        has = f"has {', '.join(map(repr, self)) or 'nothing'}"
        if name in MEASURED:
            raise ValueError(
                f"direction reads {name!r}, which only checks and adapt_damping measure, and this rule has none of "
                f"them: {self.place} {has}, so declare a number there under another name, and measure it in direction"
            )
        raise ValueError(f"direction reads {name!r}, and {self.place} {has}: {self.remedy.format(name=name)}")


class Memory:
    """The things that a rule remembers next to its state, as long as the optimizer lives; they are in no checkpoint."""

    def static(self) -> list[Tensor]:
        """Tensors that stay where they are, for CUDA graphs."""
        return []

    def described(self) -> list[str]:
        """For the report: how the rule computes."""
        return []

    def reset(self) -> None:
        """Called when a state was loaded."""

    def reasons(self) -> list[str]:
        """For the report: each part that is not done as it should be, and why."""
        return []


# The attributes of a `BlockStep` that the pages explain.
OF_RULES = (
    *("g", "state", "scalars", "damping", "precondition", "power", "fisher_product", "to_bases", "from_bases"),
    *("solved", "exact_products"),
)
GRADIENT = ("grad", "grads", "gradient", "gradients")  # other names of `BlockStep.g`


@dataclass
class BlockStep:
    """One step of all parameters in Fisher blocks together: all that a rule computes with. `direction` is called once
    a step, and not once a block: `g` and the vectors of `state` are of all blocks.

    Attributes:
        flat: the parameters that have a gradient, as vectors [P].
        ok: whether the gradient is taken, 0-dim; known in `direction`.
        check: of this step; None without one.
        risen: whether it undid the steps before this one, 0-dim; None: it did not look.
        undone: whether it undid this step or those before it, 0-dim; None without a check.
        check_next: whether the rule wants a check in the next step, too.
        on_trial: whether it is no sign of a stalled training if the check undoes this step or those before it.
        estimator: has the blocks.
        present_damping: λ, 0-dim, written in place.
        size: the step size from check to check.
        of_groups: the numbers of the parameter groups by option and parameter, 0-dim.
        precon_damping_mult: of the rule.
        scalars: "predicted_change", and those that the rule declares; 0-dim, written in place.
        memory: of `Rule.memory`.
        find_absent: makes `absent`.
        compiled: a function of this package under the backend of the net.
        products_in_batch: `exact_products`, of a list of vectors [P].
    """

    flat: FlatParameters
    estimator: FisherEstimator
    present_damping: Tensor
    precon_damping_mult: float
    size: StepSize
    of_groups: Mapping[str, Tensors]
    scalars: Mapping[str, Tensor]
    memory: Any
    find_absent: Callable[[], Tensors]
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]]
    products_in_batch: Products
    check: Check | None = None
    risen: Tensor | None = None
    undone: Tensor | None = None
    check_next: bool = False
    on_trial: bool = False
    own: Rule | None = field(init=False, default=None)  # the rule, if its class is the user's
    ok: Tensor = field(init=False)

    if not TYPE_CHECKING:  # a type checker knows the names

        def __getattr__(self, name: str) -> Any:
            names = dir(type(self)) + [of.name for of in fields(self)]
            if name in names or name.startswith("_"):
                return object.__getattribute__(self, name)  # the error of its getter
            meant = " Write step.g." if name in GRADIENT else nearest(name, names)
            known = ", ".join(OF_RULES)
            raise AttributeError(f"a step has no attribute {name!r}.{meant} Rules compute with {known}.")

    @property
    def g(self) -> Tensor:
        """The gradient of all parameters in blocks, one below the other: [P]."""
        return self.flat.g

    @property
    def state(self) -> Tensors:
        """The vectors of the rule's state, [P], by name."""
        return self.flat.state if self.own is None else Known(self.flat.state, *self.own.state_place)

    @property
    def damping(self) -> Tensor:
        """λ, 0-dim, written in place."""
        if self.own is not None and self.own.is_undamped:
            raise self.own.without_damping("reads step.damping")
        return self.present_damping

    def exact_products(self, vectors: Sequence[Tensor]) -> Tensor:
        """<d_i, F d_j> of vectors [P] in the exact Fisher of the step's batch, [k, k]."""
        kind = type(vectors).__name__
        remedy = "it takes a list of k vectors [P] and gives their products [k, k]: write step.exact_products([step.g])"
        if not isinstance(vectors, list | tuple):
            raise TypeError(f"step.exact_products got a {kind}, and {remedy}")
        wrong = [(f"number {n}", found) for n, of in enumerate(vectors) if (found := unlike(of, self.g.shape))]
        if wrong or not vectors:
            raise ValueError(
                f"step.exact_products got a {kind} of other things than vectors {list(self.g.shape)}, and {remedy}\n"
                f"{table(wrong or [('nothing', 'is in it')])}"
            )
        return self.products_in_batch(vectors)

    @cached_property
    def absent(self) -> Tensors:
        """Zeros for the parameters in blocks that have no gradient, by name."""
        return self.find_absent()

    def product(self, multiply: Callable[[Tensors], Tensors]) -> Preconditioner:
        """`multiply`, of the vectors of all blocks by parameter, as a product with vectors [P]."""
        return Preconditioner(multiply, self.flat.flat, self.absent, self.flat.division)

    def precondition(self, vector: Tensor) -> Tensor:
        """P v, with the damping of the last inverses: a new vector [P]."""
        self.refuse_undamped()
        return self.product(self.compiled(self.estimator.multiply_inverse_kept))(vector)

    def power(self, exp: float, vector: Tensor) -> Tensor:
        """(F̂ + λ)^exp v, with the damping of the last inverses. exp: one of the rule's `exps`."""
        self.refuse_undamped()
        return self.product(lambda by_name: self.estimator.multiply_power_kept(exp, by_name))(vector)

    def refuse_undamped(self) -> None:
        """Raises ValueError for a rule of the user that multiplies with inverses and has no damping of its own."""
        if self.own is not None and self.own.is_undamped and self.own.side_damping is None:
            raise self.own.without_damping("multiplies with powers of F + λ I")

    @property
    def fisher_product(self) -> Product:
        """The product with the damped block-diagonal Fisher, F̂ + λ I, with the present damping."""
        self.estimator.damping.copy_(self.present_damping * self.precon_damping_mult)
        return self.product(self.estimator.multiply_kept)

    def to_bases(self, vector: Tensor, outputs: bool = True) -> Tensor:
        """Qᵀ v, with the eigenvectors of the blocks' factors: [P]. outputs: whether the output side is turned, too.

        A parameter of a block has the place of its numbers in the basis. Blocks without a basis yet give zero.
        """
        return self.turned(vector, True, outputs)

    def from_bases(self, vector: Tensor, outputs: bool = True) -> Tensor:
        """Q v: [P]."""
        return self.turned(vector, False, outputs)

    def turned(self, vector: Tensor, transpose: bool, outputs: bool) -> Tensor:
        return self.in_groups(lambda group, matrix: turned(group, matrix, basis_of(group, outputs), transpose), vector)

    def solved(self, vector: Tensor, damping: Tensor) -> Tensor:
        """(F̂ + λ I)⁻¹ v in the eigenbases, for any λ, 0-dim: [P]. Blocks without a basis yet give zero."""
        return self.in_groups(lambda group, matrix: solved(group, matrix, damping), vector)

    def in_groups(self, of: Callable[[BlockGroup, Tensor], Tensor], vector: Tensor) -> Tensor:
        """`of` every group with factors and the matrices [L, g, o, i] of its blocks in a vector: [P]."""

        def of_all(groups: Sequence[BlockGroup], matrices: Iterable[Tensor]) -> Iterable[Tensor]:
            return [of(group, matrix).to(group.dtype) for group, matrix in zip(groups, matrices, strict=True)]

        with_factors = [group for group in self.estimator.kept if group.updated]
        if any(f"basis/{side}" not in group.extras for group in with_factors for side in group.decomposed):
            raise ValueError(
                "the rule turns vectors into eigenbases, and none are kept for it: write has_bases: ClassVar[bool] = "
                "True in its class, and if the class has new_extras, add those of super().new_extras(groups)"
            )
        return self.product(lambda by_name: self.estimator.of_groups(with_factors, of_all, by_name, kept=True))(vector)


WRITTEN_IN_PLACE = ("checkpoint", "last_update")  # of the state, by the library's own steps
BY_DEFAULT = "the default rule"  # in messages, for a rule that the user did not name


def refuse_other_options(rule: type[Rule], options: Iterable[str]) -> None:
    """Raises TypeError for names that are no arguments of the constructor of a rule."""
    arguments = list(inspect.signature(rule.__init__).parameters.values())[1:]
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return
    names, name = [argument.name for argument in arguments], rule.__name__
    if unknown := [option for option in options if option not in names]:
        raise TypeError(
            f"{name} does not have these options:\n"
            + "\n".join(f"  {option}.{OTHER_NAMES.get(option) or nearest(option, names)}" for option in unknown)
            + f"\nThe options of {name} are {', '.join(names) or 'none'}; those of all rules, such as lr and "
            f"weight_decay, are options of KFAC: KFAC(net, lr=..., rule={name}(...))."
        )


def refuse_undecorated(rule: type[Rule]) -> None:
    """Raises TypeError for a rule with fields that no constructor sets, because its class is no dataclass."""
    for kind in rule.__mro__:
        if "__dataclass_fields__" in vars(kind) or "__init__" in vars(kind):
            continue
        annotations = inspect.get_annotations(kind).items()
        if names := [name for name, annotation in annotations if "ClassVar" not in str(annotation)]:
            raise TypeError(
                f"{kind.__name__} declares {', '.join(names)} and is no dataclass, so {rule.__name__}(...) takes no "
                f"such options: write @dataclass(frozen=True, kw_only=True, eq=False) above class {kind.__name__}, or "
                "ClassVar[...] for what is no option."
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """An update rule; the fields of a subclass are its options.

    A subclass names itself, and says what it needs:

        name            in messages, and in a checkpoint, which only an optimizer with a rule of this name can load
        exps            the powers of the damped Fisher blocks that it multiplies with
        has_bases       whether it turns vectors into the eigenbases of the factors, which are kept up to date then
        is_exact        whether it multiplies with the exact Fisher of the step's batch
        checked         whether steps are checked now and then with the loss of their batch (`kfac_fx.optim.checks`)
        scalars         its 0-dim tensors (`BlockStep.scalars`) by name, each with its first value; the checkpoint has
                        them
        values          what entries of `scalars`, `new_state` and `new_extras` may be in a checkpoint, by name, if that
                        is not every finite number: `{"v": Values(least=0)}`
        default_lr      the lr of the parameter groups if none is given; None: it must be given
        factor_decay    the default of KFAC's `cov_ema_decay`
        intervals       of statistics, inverses and checks, until others are chosen

    Raises ValueError for options out of range, or that do not fit together.
    """

    name: ClassVar[str]
    exps: ClassVar[tuple[float, ...]] = (-1,)
    has_bases: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False
    checked: ClassVar[bool] = False
    scalars: ClassVar[Mapping[str, float]] = MappingProxyType({})
    values: ClassVar[Mapping[str, Values]] = MappingProxyType({})
    default_lr: ClassVar[float | None] = None
    factor_decay: ClassVar[float] = 0.95
    intervals: ClassVar[StepIntervals] = StepIntervals(statistics=1, inverses=10, checks=5)
    by_default = False  # whether the user named no rule
    precon_damping_mult = 1.0  # the damping of inverses and of the block-diagonal Fisher is this times λ

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        """Raises TypeError for options that the rule does not have, with all of them, and for a class that declares
        options and is no dataclass."""
        refuse_undecorated(cls)
        refuse_other_options(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_options()

    def check_options(self) -> None:
        """Raises ValueError for options that do not fit together."""

    @property
    def side_damping(self) -> float | None:
        """The part of their mean eigenvalue that damps sides of blocks, an option `relative_damping`; None: λ does."""
        given: float | None = getattr(self, "relative_damping", None)
        return PART_OF_MEAN if given is None and self.has_bases else given

    def side_damping_with(self, weight_decay: float) -> float | None:
        """`side_damping`, where the largest weight decay of all groups is this."""
        return self.side_damping

    @property
    def first_damping(self) -> float | Tensor:
        """λ before the first step."""
        return 0.0

    @property
    def is_undamped(self) -> bool:
        """Whether the class has no λ, so that it is 0."""
        return type(self).first_damping is Rule.first_damping

    def without_damping(self, does: str) -> ValueError:
        """The error for a rule that has no λ. does: what its direction does with λ."""
        name = type(self).__name__
        return ValueError(
            f"direction of {name} {does}, and {name} has no λ, so that it is 0: write class "
            f"{name}(kfac_fx.rules.Damped) and rule={name}(damping=0.1), or define the property first_damping."
        )

    @property
    def damping_rule(self) -> AdaptedDamping | None:
        """How the change of the loss that closures measure adapts λ; None if it does not."""
        return None

    @property
    def reported(self) -> tuple[str, ...]:
        """The names of scalars that `Metrics` shows."""
        return tuple(self.scalars)

    def described(self, scalars: Mapping[str, Tensor]) -> list[str]:
        """For the report: where the rule's scalars stand. Waits for the device."""
        return []

    @property
    def written(self) -> str:
        """How a user wrote the rule, for messages."""
        if self.by_default:
            return BY_DEFAULT
        kind = type(self)
        return (
            f"momentum_type={self.name!r}" if kind.__module__.startswith("kfac_fx.") else f"rule={kind.__name__}(...)"
        )

    # --- parameter groups ---------------------------------------------------------------------------------------------

    def group_lr(self, lr: float | Tensor | None) -> float | Tensor:
        """The lr of the parameter groups. Raises ValueError if it does not fit the rule."""
        given = self.default_lr if lr is None else lr
        if given is None:
            raise ValueError(f"{self.written} needs lr=...; the default, 'eigen_moments', finds its own step size")
        return given

    @property
    def of_groups(self) -> dict[str, Any]:
        """The options that parameter groups may have of their own, and their values for groups that do not: no others
        than "momentum"."""
        return {}

    @property
    def keeps_first_lr(self) -> bool:
        """Whether the rule compares the lr of a group with that of the time when the group was added."""
        return False

    # --- state --------------------------------------------------------------------------------------------------------

    def new_state(self, parameter: Tensor) -> Tensors:
        """The state of a new parameter in a Fisher block, by name: a velocity of zeros, in float32 at least."""
        return {"velocity": zeros_for(parameter)}

    def new_extras(self, groups: Sequence[BlockGroup]) -> list[Tensors]:
        """The tensors that a rule keeps with new groups of blocks, by name."""
        return [new_bases(group) if self.has_bases else {} for group in groups]

    def memory(self, scalar: Tensor, estimator: FisherEstimator) -> Memory:
        """scalar: a zero with the dtype and the device of all scalars."""
        return Memory()

    # --- what the step asks -------------------------------------------------------------------------------------------

    def refuse_registrations(self, registrations: Iterable[Registration]) -> None:
        """Raises ApproximationError for blocks that the rule cannot step."""

    def decompose(self, estimator: FisherEstimator, keys: Collection[Key] | None) -> None:
        """Compute inverses, or bases, from the present factors. keys: of the blocks; None: all."""
        if self.has_bases:
            update_bases(estimator, keys)
        else:
            estimator.decompose(keys)

    def admits(self, step: BlockStep, groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str]) -> Tensor:
        """Whether the gradient is finite, 0-dim. Raises ValueError for parameter groups that do not fit the blocks.

        groups: the optimizer's. names: of the parameters.
        """
        return step.flat.gradient_is_finite()

    def has_gradient(self, step: BlockStep) -> Tensor:
        """Whether a gradient of a parameter in a block is other than zero, 0-dim."""
        return step.flat.has_gradient()

    @cached_property
    def is_whole(self) -> bool:
        """Whether `whole_step` takes the steps of this class: no subclass of the class that has it makes other ones."""
        stages = {"whole_step", "direction", "move", "measured_move"}
        last = next(kind for kind in type(self).__mro__ if not stages.isdisjoint(vars(kind)))
        return "whole_step" in vars(last)

    def whole_step(self, step: BlockStep) -> tuple[Tensor, Tensor | None] | None:
        """A step without a check as one program: (whether it was made, κ); None to take it in stages."""
        return None

    def direction(self, step: BlockStep) -> Update:
        """Δ, which the step subtracts, and the new state."""
        raise NotImplementedError(f"{type(self).__name__} has no direction: write direction(self, step) -> Update")

    @cached_property
    def state_place(self) -> tuple[str, str]:
        """In words, where a user's class declares its state, and the remedy for a name that is missing there."""
        kind = type(self)
        if not kind.new_state.__module__.startswith("kfac_fx."):
            return f"{kind.__name__}.new_state", "declare it there"
        library = [of for of in kind.__mro__ if of.__module__.startswith("kfac_fx.") and issubclass(of, Rule)]
        more = "" if {Rule, Damped}.issuperset(library) else "**super().new_state(parameter), "
        return (
            f"{kind.__name__} has no new_state, so that its state",
            "write def new_state(self, parameter): "
            f"return {{{{{more}{{name!r}}: kfac_fx.rules.zeros_for(parameter)}}}} in the class",
        )

    def state_maker(self) -> Callable[[Tensor], Tensors]:
        """`new_state`, whose results are checked: ValueError for what is no tensor of the parameter's shape and no
        number, and for other names than those of the first parameter."""
        name, names = type(self).__name__, list[str]()

        def made(parameter: Tensor) -> Tensors:
            state: Any = self.new_state(parameter)
            if not isinstance(state, Mapping):
                raise ValueError(
                    f"new_state of {name} returns a {type(state).__name__}: return tensors by name, {{}} for none"
                )
            wrong = [
                (repr(key), unlike(value, parameter.shape))
                for key, value in state.items()
                if unlike(value, parameter.shape) and unlike(value, torch.Size())
            ]
            if wrong:
                raise ValueError(
                    f"new_state of {name} returns what is no tensor of the shape of the parameter, "
                    f"{list(parameter.shape)}, or []:\n{table(wrong)}\nWrite kfac_fx.rules.zeros_for(parameter)."
                )
            names[:] = names or list(state)
            if sorted(state) != sorted(names):
                raise ValueError(
                    f"new_state of {name} has {', '.join(map(repr, state)) or 'nothing'} for a parameter, and "
                    f"{', '.join(map(repr, names)) or 'nothing'} for another: return the same names for all"
                )
            return {str(key): value for key, value in state.items()}

        return made

    def update(self, step: BlockStep) -> Update:
        """The update of `direction`. That of a user's class is checked.

        Raises TypeError if it is none, and ValueError for names that nothing keeps, for those of an own `new_state`
        that are left out, and for other shapes than those of `step.g` and `step.state`.
        """
        if type(self).__module__.startswith("kfac_fx."):
            return self.direction(step)
        name, measures = type(self).__name__, self.checked or self.is_exact or self.damping_rule is not None
        of_rule = {key: of for key, of in step.scalars.items() if measures or key not in MEASURED}
        step.own, step.scalars = self, Known(of_rule, f"{name}.scalars")
        g, state = step.g, step.state
        update = self.direction(step)
        if not isinstance(update, Update):
            raise TypeError(
                f"direction of {name} returns a {type(update).__name__}: write return Update(vector, state), with the "
                "update [P] and the new state by name"
            )
        if unknown := [key for key in update.state if key not in state]:
            raise ValueError(
                f"direction of {name} returns a state with {', '.join(map(repr, unknown))}, and {name}.new_state has "
                f"{', '.join(map(repr, state)) or 'none'}: name the same vectors in both"
            )
        if unknown := [key for key in update.scalars if key not in StepSize.__dataclass_fields__]:
            raise ValueError(
                f"direction of {name} returns scalars with {', '.join(map(repr, unknown))}: those of an Update are of "
                f"the step size, {', '.join(map(repr, StepSize.__dataclass_fields__))}. Write numbers of the rule into "
                f"step.scalars[...].copy_(...), declared in {name}.scalars"
            )
        numbers = {**update.scalars, "ok": update.ok, "kappa": update.kappa}
        pairs = [("the update", update.vector, g.shape)]
        pairs += [(f"state {key!r}", value, state[key].shape) for key, value in update.state.items()]
        pairs += [(repr(key), value, torch.Size()) for key, value in numbers.items() if value is not None]
        wrong = [
            (place, f"{kind}, expected {list(shape)}")
            for place, value, shape in pairs
            if (kind := unlike(value, shape))
        ]
        if wrong:
            raise ValueError(
                f"direction of {name} returns other shapes than those of step.g, step.state and numbers:\n"
                f"{table(wrong)}"
            )
        names = () if type(self).new_state.__module__.startswith("kfac_fx.") else state
        if left_out := [key for key in names if key not in update.state and key not in WRITTEN_IN_PLACE]:
            stays = f"{left_out[0]!r}: step.state[{left_out[0]!r}]"
            raise ValueError(
                f"direction of {name} returns a state without {', '.join(map(repr, left_out))}, which {name}.new_state "
                f"has, so it would never change: name the same vectors in both, and write {stays} for one that stays"
            )
        return update

    def move(self, step: BlockStep, update: Update) -> Tensor:
        """δ, [P], without a check."""
        return step.flat.displacement(update.vector)

    def predicted_change(self, step: BlockStep, move: Tensor) -> Tensor:
        """The change of the loss that the quadratic model predicts for a move, with weight decay, clipping and groups:
        <g, δ> + ½ <δ, (F̂ + λ I) δ> - ½ excess |δ|².

        The damping counts only as far as it is curvature of the loss: the l2 term.
        """
        inner, multiply = step.flat.inner, step.fisher_product
        excess = step.estimator.damping - (0.0 if self.damping_rule is None else self.damping_rule.l2_reg)
        return inner(step.g, move) + 0.5 * (inner(move, multiply(move)) - excess * inner(move, move))


class CheckedRule(Rule):
    """A rule whose steps are checked now and then with the loss of their batch.

    It says, next to what `Rule` says:

        longest         no interval that the cost model chooses is longer
        by_quotients    whether a check takes difference quotients on a part of the batch, where these are a measure of
                        it, instead of a product with the Jacobian
        is_noisy        whether the loss of another batch may rise as much as that of the same one
        rarer_checks    whether checks become rarer where they find nothing to do
    """

    checked: ClassVar[bool] = True
    default_lr: ClassVar[float | None] = 1.0
    intervals: ClassVar[StepIntervals] = StepIntervals(statistics=10, inverses=20, checks=5)
    longest: ClassVar[StepIntervals] = StepIntervals(statistics=30, inverses=ANY, checks=10)
    by_quotients: ClassVar[bool] = True
    is_noisy: ClassVar[bool] = True
    rarer_checks: ClassVar[bool] = True
    overhead = 0.2  # the cost of statistics, inverses and checks in a step, at most, as a part of the training step

    @property
    def damping_adaptation_interval(self) -> int | None:
        """The interval of the checks; None: what `overhead` allows."""
        return None

    def new_state(self, parameter: Tensor) -> Tensors:
        """A velocity, and the parameter at the last check."""
        return {**super().new_state(parameter), **checkpoint_of(parameter)}

    def measured_move(self, step: BlockStep, update: Update, check: Check) -> MeasuredMove:
        """The move whose length a check decides."""
        raise NotImplementedError(
            f"{type(self).__name__} is checked and has no length of a checked move: write "
            "measured_move(self, step, update, check) -> MeasuredMove"
        )

    def checked_move(self, step: BlockStep, check: Check, measured: MeasuredMove, outcome: Outcome) -> None:
        """Called after a checked move."""

    def tolerated_rise(self, step: BlockStep, was: Tensor, same: Tensor) -> Tensor:
        """The rise of the loss since the last check that is left alone, 0-dim. was: the loss there. same: whether the
        batch is the same as there, by the value of its loss; 0-dim."""
        return tolerated(was, None if self.is_noisy else same)

    def known_rise(self, step: BlockStep, check: Check) -> Tensor | None:
        """The rise of the loss since the last check, 0-dim, if the rule knows it without a forward; else None."""
        return None

    def divisor(self, step: BlockStep) -> Tensor:
        """By how much steps are shorter than the rule would have them without checks, 0-dim."""
        return step.size.ratio

    def begin_anew(self, step: BlockStep) -> None:
        """Called before a step in which parameters begin to move that no check has measured. The next step has a check,
        unless an interval of checks is given."""

    def reverted(self, step: BlockStep, check: Check, risen: Tensor) -> None:
        """Called when a check may have undone the steps since the last one; risen: whether it has, 0-dim."""


def unlike(value: object, shape: torch.Size) -> str:
    """The kind or the shape of a value that is no tensor of this shape; "" for one that is."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}"
    return "" if value.shape == shape else f"is {list(value.shape)}"


def zeros_for(parameter: Tensor) -> Tensor:
    """In float32 at least."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def checkpoint_of(parameter: Tensor) -> Tensors:
    """The parameter at the last check, in float32 at least."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return {"checkpoint": parameter.detach().to(dtype, copy=True)}


def check_fields(options: Any) -> None:
    """Run the checks in the annotations of a dataclass. Those of None are run if None is no value of the field.

    Numbers of other types, such as fractions, become floats where the field is one: torch knows no others.
    """
    annotations = get_type_hints(type(options), include_extras=True)
    for option in fields(options):
        value, annotation = getattr(options, option.name), annotations[option.name]
        of_value = get_args(annotation)[:1] or (None,)
        may_be_none = option.default is None or type(None) in get_args(of_value[0])
        for check in () if value is None and may_be_none else getattr(annotation, "__metadata__", ()):
            check(option.name, value)
        if isinstance(value, Real) and not isinstance(value, float) and float in (of_value[0], *get_args(of_value[0])):
            object.__setattr__(options, option.name, float(value))


@dataclass(frozen=True, kw_only=True, eq=False)
class Damped(Rule):
    """The damping of a rule that multiplies with inverses.

    Args:
        damping: λ of F + λ I. It scales with the loss.
        relative_damping: of the rules that have it, instead of damping: every side of a block is damped by this part
            of its mean eigenvalue, λ_A = c tr A / dim A.
        precon_damping_mult: the preconditioner's damping is this times λ; the quadratic model's is λ (Martens & Grosse
            2015, section 6.6).
    """

    damping: Annotated[float | Tensor | None, positive] = None
    precon_damping_mult: Annotated[float, positive] = 1.0

    @property
    def side_damping(self) -> float | None:
        """None for a `damping` of a rule with bases that has no option `relative_damping`."""
        by_damping = self.damping is not None and not hasattr(self, "relative_damping")
        return None if by_damping else super().side_damping

    @property
    def first_damping(self) -> float | Tensor:
        if self.damping is None:
            return 0.0
        return self.damping.reshape(()) if isinstance(self.damping, Tensor) else self.damping

    def check_options(self) -> None:
        super().check_options()
        if self.damping is None and self.side_damping is None:
            raise ValueError(f"{self.written} needs damping=...; 'eigen_moments', the default, needs none")
        if self.side_damping is None:
            return
        if self.damping is not None or self.damping_rule is not None:
            raise ValueError("relative_damping is the damping: leave damping and adapt_damping out")
        if self.precon_damping_mult != 1.0:
            raise ValueError(
                f"precon_damping_mult={self.precon_damping_mult} has no effect without damping instead of "
                "relative_damping: leave it out"
            )


# --- options of other optimizers --------------------------------------------------------------------------------------

# The remedies for options of other optimizers: torch's, other K-FACs, EKFAC, Shampoo and SOAP. Each option has a
# counterpart of another name, or is near to the name of another option, which the error would suggest.
INSTEAD: Mapping[str, str] = {
    "Leave it out.": "amsgrad foreach fused capturable differentiable nesterov use_nesterov grad_clip "
    "reject_damping_increase_factor norm_constraint_mode use_exact_inverses num_estimator_samples norm_shrink steps "
    "num_total_steps warmup_steps params_group grafting inv_root_override beta2_decay momentum_decay ns_steps",
    "Leave it out, and train minus the loss.": "maximize",
    "Leave it out, and set optimizer.damping between steps.": "damping_schedule",
    "Leave it out, and set group['momentum'] of optimizer.param_groups between steps.": "momentum_schedule",
    "Leave it out: KFAC gets the net, and you call loss.backward().": "value_and_grad_func value_func_has_aux "
    "value_func_has_state value_func_has_rng",
    "Leave it out: a scheduler of torch.optim.lr_scheduler sets lr.": "learning_rate_schedule lr_decay warmup",
    "Leave it out: approximations= and layers= of kfac_fx.compile choose the blocks.": "register_only_generic "
    "patterns_to_skip auto_register_kwargs layer_tag_to_block_ctor max_preconditioner_dim max_precond_dim",
    "Leave it out: kfac_fx.compile(..., approximations={name: 'generic'}) gives a parameter a diagonal block.": (
        "skip_layers ignore_modules precondition_modules"
    ),
    "Leave it out: momentum has none. If you mean the damping of the Fisher, write damping=....": "dampening",
    "Leave it out: step(closure) takes one step, and checks find its length.": "max_iter max_eval tolerance_grad "
    "tolerance_change history_size line_search_fn",
    "Leave it out: the damping has no upper bound.": "max_damping",
    "Leave it out: the forwards between two steps are the micro-batches of a step.": "accumulation_steps "
    "accumulate_data",
    "Leave it out: weight_decay is decoupled.": "decoupled use_decoupled_weight_decay decoupled_weight_decay "
    "weight_decay_type",
    "Leave it out; rules that need it take a damping instead.": "eps epsilon",
    "Write adapt_damping=True, which the 'regular', 'adam' and 'qmodel' rules have.": "use_adaptive_damping",
    "Write cov_ema_decay=....": "factor_decay curvature_ema stat_decay ema_decay cov_decay shampoo_beta",
    "Write cov_update_every=....": "factor_update_steps factor_update_freq TCov curvature_upd_interval",
    "Write cov_update_every=... or invert_every=..., or leave them out.": "update_freq precondition_frequency",
    "Write damping=....": "initial_damping",
    "Write damping_decrease_rho_threshold=....": "damping_upper_threshold",
    "Write damping_increase_rho_threshold=....": "damping_lower_threshold",
    "Write invert_every=....": "inv_update_steps inv_update_freq kfac_update_freq TInv inverse_update_period "
    "preconditioner_upd_interval",
    "Write lr=...; it is a factor, 1 by default, and not of the size of Adam's.": "learning_rate",
    "Write momentum=....": "beta1 momentum_beta",
    "Write momentum=... and second_moment_decay=... instead of betas.": "betas",
    "Write momentum_type='qmodel', which finds both the length of a step and its momentum.": (
        "use_adaptive_learning_rate use_adaptive_momentum"
    ),
    "Write norm_constraint=....": "constraint_norm",
    "Write norm_constraint=...; it bounds the squared Fisher norm of a step.": "kl_clip",
    "Write num_burnin_steps=..., during which the parameters stand still.": "start_preconditioning_step",
    "Write placement='owners'.": "distributed_precon_apply distributed_inverses assignment_strategy comm_method "
    "grad_worker_fraction",
    "Write reduction='mean' or reduction='sum'.": "batch_averaged",
    "Write second_moment_decay=....": "beta2",
}
OTHER_NAMES = {name: f" {instead}" for instead, names in INSTEAD.items() for name in names.split()}
