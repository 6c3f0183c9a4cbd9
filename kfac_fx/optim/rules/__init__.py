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
LEAVE_OUT = " Leave it out."
SCHEDULED = " Leave it out: a scheduler of torch.optim.lr_scheduler sets lr."
OF_COMPILE = " Leave it out: approximations= and layers= of kfac_fx.compile choose the blocks."
MICRO_BATCHES = " Leave it out: the forwards between two steps are the micro-batches of a step."
# Options of other optimizers, and what to write instead. Each has a counterpart of another name, or is near to the name
# of another option, which the error would suggest.
OTHER_NAMES: Mapping[str, str] = {
    # the optimizers of torch
    "betas": " Write momentum=... and second_moment_decay=... instead of betas.",
    "learning_rate": " Write lr=...; it is a factor, 1 by default, and not of the size of Adam's.",
    "eps": " Leave it out; rules that need it take a damping instead.",
    **dict.fromkeys(("amsgrad", "foreach", "fused", "capturable", "differentiable"), LEAVE_OUT),
    "nesterov": LEAVE_OUT,
    **dict.fromkeys(
        ("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),
        " Leave it out: step(closure) takes one step, and checks find its length.",
    ),
    "maximize": " Leave it out, and train minus the loss.",
    # K-FACs
    "kl_clip": " Write norm_constraint=...; it bounds the squared Fisher norm of a step.",
    **dict.fromkeys(("factor_update_steps", "factor_update_freq", "TCov"), " Write cov_update_every=...."),
    **dict.fromkeys(("inv_update_steps", "inv_update_freq", "kfac_update_freq", "TInv"), " Write invert_every=...."),
    **dict.fromkeys(
        ("update_freq", "precondition_frequency"), " Write cov_update_every=... or invert_every=..., or leave them out."
    ),
    "factor_decay": " Write cov_ema_decay=....",
    "decoupled": " Leave it out: weight_decay is decoupled.",
    # kfac-jax
    "initial_damping": " Write damping=....",
    "max_damping": " Leave it out: the damping has no upper bound.",
    "damping_lower_threshold": " Write damping_increase_rho_threshold=....",
    "damping_upper_threshold": " Write damping_decrease_rho_threshold=....",
    "reject_damping_increase_factor": LEAVE_OUT,
    "damping_schedule": " Leave it out, and set optimizer.damping between steps.",
    "momentum_schedule": " Leave it out, and set group['momentum'] of optimizer.param_groups between steps.",
    "learning_rate_schedule": SCHEDULED,
    "use_adaptive_damping": " Write adapt_damping=True, which the 'regular', 'adam' and 'qmodel' rules have.",
    **dict.fromkeys(
        ("use_adaptive_learning_rate", "use_adaptive_momentum"),
        " Write momentum_type='qmodel', which finds both the length of a step and its momentum.",
    ),
    "norm_constraint_mode": LEAVE_OUT,
    "inverse_update_period": " Write invert_every=....",
    **dict.fromkeys(("use_exact_inverses", "num_estimator_samples"), LEAVE_OUT),
    **dict.fromkeys(("distributed_precon_apply", "distributed_inverses"), " Write placement='owners'."),
    **dict.fromkeys(
        ("value_and_grad_func", "value_func_has_aux", "value_func_has_state", "value_func_has_rng"),
        " Leave it out: KFAC gets the net, and you call loss.backward().",
    ),
    **dict.fromkeys(
        ("register_only_generic", "patterns_to_skip", "auto_register_kwargs", "layer_tag_to_block_ctor"), OF_COMPILE
    ),
    # the K-FACs in PyTorch, asdl, and EKFAC
    **dict.fromkeys(
        ("curvature_ema", "stat_decay", "ema_decay", "cov_decay", "shampoo_beta"), " Write cov_ema_decay=...."
    ),
    "curvature_upd_interval": " Write cov_update_every=....",
    "preconditioner_upd_interval": " Write invert_every=....",
    "constraint_norm": " Write norm_constraint=....",
    "batch_averaged": " Write reduction='mean' or reduction='sum'.",
    "accumulation_steps": MICRO_BATCHES,
    "accumulate_data": MICRO_BATCHES,
    **dict.fromkeys(("assignment_strategy", "comm_method", "grad_worker_fraction"), " Write placement='owners'."),
    **dict.fromkeys(
        ("skip_layers", "ignore_modules", "precondition_modules"),
        " Leave it out: kfac_fx.compile(..., approximations={name: 'generic'}) gives a parameter a diagonal block.",
    ),
    **dict.fromkeys(("norm_shrink", "steps", "num_total_steps", "warmup_steps", "params_group"), LEAVE_OUT),
    # Shampoo, SOAP, and the optimizers of torch
    **dict.fromkeys(("max_preconditioner_dim", "max_precond_dim"), OF_COMPILE),
    "start_preconditioning_step": " Write num_burnin_steps=..., during which the parameters stand still.",
    "epsilon": " Leave it out; rules that need it take a damping instead.",
    **dict.fromkeys(("beta1", "momentum_beta"), " Write momentum=...."),
    "beta2": " Write second_moment_decay=....",
    **dict.fromkeys(
        ("use_decoupled_weight_decay", "decoupled_weight_decay", "weight_decay_type"),
        " Leave it out: weight_decay is decoupled.",
    ),
    "dampening": " Leave it out: momentum has none. If you mean the damping of the Fisher, write damping=....",
    **dict.fromkeys(("lr_decay", "warmup"), SCHEDULED),
    **dict.fromkeys(
        ("use_nesterov", "grafting", "inv_root_override", "beta2_decay", "momentum_decay", "ns_steps", "grad_clip"),
        LEAVE_OUT,
    ),
}


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
