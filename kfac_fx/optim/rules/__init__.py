"""The update rules of the library, by name, and which of them a KFAC has.

A rule of a user is a class like these: a subclass of `Rule`, given as `KFAC(net, rule=MyRule(...))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from kfac_fx.fisher.bases import without_basis
from kfac_fx.linalg.arguments import Values, choice, not_negative, positive
from kfac_fx.linalg.arguments import a_weight as between_0_and_1
from kfac_fx.optim.rule import (
    BY_DEFAULT,
    OTHER_NAMES,
    AdaptedDamping,
    BlockStep,
    CheckedRule,
    Damped,
    DampingThresholds,
    MeasuredMove,
    Memory,
    Outcome,
    Rule,
    Update,
    zeros_for,
)
from kfac_fx.optim.rules.adaptive import Adaptive
from kfac_fx.optim.rules.eigen_moments import EigenMoments
from kfac_fx.optim.rules.momentum import Adam, QModel, QModelFixedMomentum, Regular
from kfac_fx.passes.errors import nearest
from kfac_fx.passes.ir import Registration

__all__ = [
    "Adam",
    "AdaptedDamping",
    "Adaptive",
    "BlockStep",
    "CheckedRule",
    "Damped",
    "DampingThresholds",
    "EigenMoments",
    "MeasuredMove",
    "Memory",
    "Outcome",
    "QModel",
    "QModelFixedMomentum",
    "Regular",
    "Rule",
    "Update",
    "Values",
    "between_0_and_1",
    "not_negative",
    "positive",
    "zeros_for",
]

# In the order of the numbers that checkpoints have for them.
EVERY_RULE = (Adaptive, Regular, Adam, QModel, QModelFixedMomentum, EigenMoments)
RULES: Mapping[str, type[Rule]] = {rule.name: rule for rule in EVERY_RULE}


DAMPED = (
    "a damping with an lr means 'regular', a damping alone 'adaptive', and neither of both 'eigen_moments'; "
    "momentum_type='...' names another rule"
)


def rule_named(name: str, options: Mapping[str, Any], known: Mapping[str, Any], *, by_default: bool = False) -> Rule:
    """A rule of the library with these options; None is no value.

    known: the options of every KFAC, for a hint. by_default: see `Rule.by_default`.

    Raises:
        TypeError: for options that the rule does not have; names all of them.
        ValueError: for a name of no rule, and for wrong values.
    """
    choice("momentum_type", name, RULES)
    rule = RULES[name]
    names = [option.name for option in fields(rule)]
    everywhere = [*names, *known, *(option.name for kind in EVERY_RULE for option in fields(kind))]
    rows = []
    for option in options:
        if option not in names:
            others = [repr(other) for other, kind in RULES.items() if option in (of.name for of in fields(kind))]
            near = OTHER_NAMES.get(option) or nearest(option, everywhere)
            rows.append(f"  {option}" + (f", which is one of {', '.join(others)}." if others else f".{near}"))
    if rows:
        damped = by_default and "damping" in options
        chosen = BY_DEFAULT if by_default and not damped else f"momentum_type={name!r}"
        raise TypeError(
            f"KFAC with {chosen} does not have these options:\n"
            + "\n".join(rows)
            + f"\nThis rule is that of the arguments: {DAMPED}." * damped
            + f"\nThe options of this rule are {', '.join(names)}; "
            "all rules have those of KFAC's signature, such as lr and weight_decay."
        )
    made = rule(**options)
    object.__setattr__(made, "by_default", by_default)  # no field, because fields are options
    return made


def namesake(kind: type[Rule]) -> type[Rule] | None:
    """The rule of the library whose name a class took; None for a name of its own, and for subclasses of that rule."""
    other = RULES.get(kind.name)
    return None if other is None or issubclass(kind, other) else other


def default_rule(
    lr: float | Tensor | None, options: Mapping[str, Any], registrations: tuple[Registration, ...]
) -> tuple[str, str | None]:
    """(the name of the rule if none is named, why it is not "eigen_moments"; None if this is as it should be)."""
    if "damping" in options:
        return ("adaptive" if lr is None else "regular"), None
    without = without_basis(registrations)
    if not without:
        return "eigen_moments", None
    return "adaptive", f"momentum_type is 'adaptive', because blocks have no eigenbasis: {first_three(without)}"


def first_three(registrations: Sequence[Registration]) -> str:
    others = len(registrations) - 3
    return ", ".join(map(str, registrations[:3])) + (f" and {others} more" if others > 0 else "")
