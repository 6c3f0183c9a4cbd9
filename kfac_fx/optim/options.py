"""The options that every KFAC has, whatever its update rule, and their checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import (
    a_process_group,
    a_seed,
    a_share,
    a_weight,
    choice,
    not_negative,
    whole_number,
    wrong_value,
)
from kfac_fx.losses.declared import no_loss_known
from kfac_fx.losses.distributions import check_mode
from kfac_fx.optim.groups import FirstOrder
from kfac_fx.optim.rule import COMMON, CheckedRule, Rule, check_fields
from kfac_fx.optim.rules import RULES, default_rule, namesake, rule_named
from kfac_fx.recording.model_checks import compiled

PLACEMENTS = ("replicated", "owners", "round_robin")
STEPS = "steps"
GROUPS = (
    "groups of parameters are an argument, KFAC(net, params=...), and all parameters of the net are trained without it"
)


def a_rate(name: str, value: Any) -> None:
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Tensor)):
        raise ValueError(f"{name} is a {type(value).__name__}; {GROUPS}")
    not_negative(name, value)


def several_parameters(name: str, value: Any) -> None:
    if isinstance(value, (Tensor, str, bytes)) or not isinstance(value, Iterable):
        raise wrong_value(name, value, "be parameters, or groups of them, as in [{'params': [...], 'lr': 0.1}]")


def a_grad_scaler(name: str, value: Any) -> None:
    if not callable(getattr(value, "get_scale", None)):
        raise ValueError(f"{name} is {value!r}; it must be a torch.amp.GradScaler")


def a_mode(name: str, value: Any) -> None:
    if value is not None:
        check_mode(value, name)


def in_any_case(known: Sequence[str]) -> Callable[[str, Any], None]:
    """A check of a name that may be written in capitals."""

    def check(name: str, value: Any) -> None:
        choice(name, value.lower() if isinstance(value, str) else value, known)

    return check


def of_first_order(name: str, value: Any) -> None:
    FirstOrder.read(value)


@dataclass(frozen=True, eq=False)
class KFACOptions:
    """The options of `KFAC`, which documents them, with the rule. Raises ValueError for wrong ones."""

    net: Annotated[Any, compiled]
    lr: Annotated[float | Tensor | None, a_rate]
    rule: Rule
    because: str | None  # why the rule is not the usual one
    cov_ema_decay: Annotated[float | None, a_weight]
    cov_update_every: Annotated[int | None, whole_number(1, STEPS)]
    invert_every: Annotated[int | None, whole_number(1, STEPS)]
    num_burnin_steps: Annotated[int, whole_number(0, STEPS)]
    weight_decay: Annotated[float, not_negative]
    estimation_mode: Annotated[str | None, a_mode]
    fraction: Annotated[float, a_share]
    seed: Annotated[int | None, a_seed]
    reduction: Annotated[str, functools.partial(choice, known=("mean", "sum"))]
    first_order: Annotated[Mapping[str, Any] | None, of_first_order]
    grad_scaler: Annotated[torch.amp.GradScaler | None, a_grad_scaler]
    params: Annotated[Iterable[Any] | None, several_parameters]
    process_group: Annotated[Any | None, a_process_group]
    placement: Annotated[str | None, in_any_case(PLACEMENTS)]

    @staticmethod
    def of(
        net: Any,
        lr: Any,
        rule: Rule | None,
        momentum_type: str | None,
        of_rule: Mapping[str, Any],
        **others: Any,
    ) -> KFACOptions:
        """of_rule: the options of the rule that `momentum_type` names, or of the default. None is no value there.

        Raises TypeError for options that the rule does not have.
        """
        compiled("net", net)
        of_rule = {name: value for name, value in of_rule.items() if value is not None}
        because = None
        if rule is not None:
            refuse_with_rule(rule, momentum_type, of_rule)
        elif momentum_type is not None:
            in_any_case(tuple(RULES))("momentum_type", momentum_type)
            rule = rule_named(momentum_type.lower(), of_rule, others)
        else:
            name, because = default_rule(lr, of_rule, net.registrations)
            rule = rule_named(name, of_rule, others, by_default=True)
        return KFACOptions(net, lr, rule, because, **others)

    def __post_init__(self) -> None:
        check_fields(self)
        self.rule.group_lr(self.lr)
        if self.reduction == "sum" and (self.rule.is_exact or self.rule.checked or self.rule.damping_rule is not None):
            raise ValueError(
                "the quadratic model is that of the mean loss: with momentum_type='eigen_moments', 'adaptive' or "
                "'qmodel', or with adapt_damping=True, divide the loss by the number of cases and write "
                "reduction='mean'"
            )
        if self.estimation_mode == "empirical" and self.fraction != 1:
            raise ValueError(
                "estimation_mode='empirical' records in the whole training backward: leave fraction at 1.0"
            )
        self.mode_for(self.net.knows_no_loss)

    @functools.cached_property
    def strategy(self) -> str | None:
        """How blocks are divided among processes (`kfac_fx.fisher.placement`); None if every process keeps all."""
        placement = (self.placement or PLACEMENTS[0]).lower()
        return None if placement == PLACEMENTS[0] else placement

    @functools.cached_property
    def checks(self) -> CheckedRule | None:
        """The rule, if its steps are checked."""
        return self.rule if isinstance(self.rule, CheckedRule) else None

    @property
    def factor_decay(self) -> float:
        """The decay of the factors in one step."""
        return self.rule.factor_decay if self.cov_ema_decay is None else self.cov_ema_decay

    @functools.cached_property
    def given(self) -> dict[str, Any]:
        """The options that all processes of a training must share, and those of the rule, as they were given."""
        different = ("net", "params", "process_group", "grad_scaler", "seed")  # each process has its own random streams
        names = [option.name for option in fields(self) if option.name not in (*different, "rule", "because")]
        values = {name: getattr(self, name) for name in names}
        return values | {option.name: getattr(self.rule, option.name) for option in fields(self.rule)}

    def common(self) -> dict[str, str]:
        """The options that all processes of a training must share, as text. Waits for the device of tensors."""
        values = self.given | {"momentum_type": self.rule.name, "placement": self.strategy or PLACEMENTS[0]}
        return {name: repr(value.tolist() if isinstance(value, Tensor) else value) for name, value in values.items()}

    def mode_for(self, unnamed: bool) -> str:
        """The way in which statistics are estimated.

        unnamed: no loss is known.

        Raises LossError for options that need one.
        """
        mode = self.estimation_mode or ("empirical" if unnamed else "gradients")
        if unnamed and (mode != "empirical" or self.fraction != 1 or self.rule.is_exact):
            raise no_loss_known()
        return mode

    @functools.cached_property
    def told(self) -> dict[str, float | str | None]:
        """The options, as they were given, that a checkpoint has next to the choices that it depends on. Waits for
        the device of tensors."""
        elsewhere = ("estimation_mode", "adapt_damping", "placement")  # the last changes no result
        values = self.given | {"lr": self.of_groups["lr"], "cov_ema_decay": self.factor_decay}
        values |= {"first_order": repr(self.first_order_rule)}
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        return {
            name: value
            for name, value in numbers.items()
            if name not in elsewhere and isinstance(value, (float, int, str, type(None)))
        }

    @property
    def of_groups(self) -> dict[str, Any]:
        """The options of parameter groups, with their first values."""
        return {"lr": self.rule.group_lr(self.lr), **self.rule.of_groups, "weight_decay": self.weight_decay}

    @functools.cached_property
    def of_all_groups(self) -> frozenset[str]:
        """The names of the options that all parameters share: those of every KFAC, and of every known rule."""
        classes: list[Any] = [KFACOptions, *RULES.values(), type(self.rule)]
        names = {option.name for declared in classes for option in fields(declared)} | {"momentum_type"}
        return frozenset(names - {"params", "first_order", "because", *self.of_groups})

    @functools.cached_property
    def first_order_rule(self) -> FirstOrder:
        return FirstOrder.read(self.first_order or {})


def refuse_with_rule(rule: Any, momentum_type: str | None, of_rule: Mapping[str, Any]) -> None:
    """Raises TypeError for a rule that is none, and for options that its own constructor should have."""
    if not isinstance(rule, Rule):
        hint = f": write {rule.__name__}(...)" if isinstance(rule, type) and issubclass(rule, Rule) else ""
        raise TypeError(f"rule is {rule!r}; it must be an object of a subclass of kfac_fx.rules.Rule{hint}")
    kind, wrong = type(rule), []
    if not hasattr(kind, "name"):
        wrong.append(f"{kind.__name__} has no name: write name: ClassVar[str] = ... in the class, for checkpoints")
    elif (other := namesake(kind)) is not None:
        wrong.append(
            f"the name of {kind.__name__}, {kind.name!r}, is that of kfac_fx.rules.{other.__name__}: take another one, "
            "because checkpoints and messages tell rules by their names"
        )
    if not isinstance(rule.scalars, Mapping):
        wrong.append(f"{kind.__name__}.scalars is {rule.scalars!r}: write first values by name, as in {{'total': 0.0}}")
    elif taken := [name for name in rule.scalars if name in COMMON]:
        wrong.append(f"{kind.__name__}.scalars has names that every optimizer has: {', '.join(taken)}; take others")
    if momentum_type is not None:
        wrong.append(f"momentum_type={momentum_type!r} names a rule, and rule=... is one: leave momentum_type out")
    for name in of_rule:
        if name in (option.name for option in fields(rule)):
            wrong.append(f"{name} is an option of the rule: write rule={kind.__name__}({name}=...)")
        else:
            wrong.append(f"{name} is an option neither of KFAC nor of {kind.__name__}: leave it out")
    if wrong:
        raise TypeError("\n".join(wrong))
