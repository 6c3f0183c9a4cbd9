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
OTHER_NAMES = {  # of other optimizers
    "betas": " Write momentum=... and second_moment_decay=... instead of betas.",
    "learning_rate": " Write lr=...; it is a factor, 1 by default, and not of the size of Adam's.",
    "eps": " Leave it out; rules that need it take a damping instead.",
    **dict.fromkeys(("amsgrad", "foreach", "fused", "capturable", "differentiable"), " Leave it out."),
    "nesterov": " Leave it out.",
    **dict.fromkeys(
        ("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),
        " Leave it out: step(closure) takes one step, and checks find its length.",
    ),
    "maximize": " Leave it out, and train minus the loss.",
    # Those of other K-FACs.
    "kl_clip": " Write norm_constraint=...; it bounds the squared Fisher norm of a step.",
    **dict.fromkeys(("factor_update_steps", "factor_update_freq", "TCov"), " Write cov_update_every=...."),
    **dict.fromkeys(("inv_update_steps", "inv_update_freq", "kfac_update_freq", "TInv"), " Write invert_every=...."),
    **dict.fromkeys(
        ("update_freq", "precondition_frequency"), " Write cov_update_every=... or invert_every=..., or leave them out."
    ),
    "factor_decay": " Write cov_ema_decay=....",
    "decoupled": " Leave it out: weight_decay is decoupled.",
}


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
        raise TypeError(
            f"KFAC with {BY_DEFAULT if by_default else f'momentum_type={name!r}'} does not have these options:\n"
            + "\n".join(rows)
            + f"\nThe options of this rule are {', '.join(names)}; "
            "all rules have those of KFAC's signature, such as lr and weight_decay."
        )
    made = rule(**options)
    object.__setattr__(made, "by_default", by_default)  # no field, because fields are options
    return made


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
