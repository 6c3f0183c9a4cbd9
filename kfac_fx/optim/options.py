"""KFAC's options: what may be combined, and what to write instead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kfac_fx.optim.damping import DampingRule
from kfac_fx.optim.first_order import FirstOrder
from kfac_fx.passes.errors import nearest

MOMENTUM_TYPES = ("regular", "adam", "qmodel", "qmodel_fixedmu")
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Options:
    """The options of one optimizer, checked together.

    group_lr: the learning rate that parameter groups start with; `qmodel` types scale their own step by it.
    decay: of the factors at one update of them, so that the decay a step does not depend on how often that is.
    """

    momentum_type: str
    momentum: float
    group_lr: float | Tensor
    norm_constraint: float | None
    decay: float
    cov_update_every: int
    invert_every: int
    num_burnin_steps: int
    adapt_damping: bool
    update_damping_immediately: bool
    damping_rule: DampingRule
    precon_damping_mult: float
    estimation_mode: str
    fraction: float
    reduction: str
    first_order: FirstOrder

    @property
    def quadratic(self) -> bool:
        """Are step size (and momentum) those of the quadratic model?"""
        return self.momentum_type.startswith("qmodel")

    @property
    def of_groups(self) -> dict[str, Any]:
        """What parameter groups start with, besides weight_decay. A quadratic model has one momentum for all."""
        momentum = {} if self.quadratic else {"momentum": self.momentum}
        return {"lr": self.group_lr, **momentum}

    @property
    def riding(self) -> bool:
        """Do the statistics come from the user's own backward?"""
        return self.estimation_mode == "empirical"


def read_options(
    lr: float | Tensor | None,
    damping: float | Tensor,
    momentum: float | None,
    momentum_type: str,
    cov_ema_decay: float,
    cov_update_every: int,
    invert_every: int,
    num_burnin_steps: int,
    norm_constraint: float | None,
    weight_decay: float,
    adapt_damping: bool,
    update_damping_immediately: bool,
    damping_adaptation_interval: int,
    damping_adaptation_decay: float,
    damping_decrease_rho_threshold: float,
    damping_increase_rho_threshold: float,
    min_damping: float,
    l2_reg: float,
    precon_damping_mult: float,
    qmodel_update_rescale: float | None,
    estimation_mode: str,
    fraction: float,
    reduction: str,
    first_order: Mapping[str, Any] | None,
) -> Options:
    """KFAC's arguments of the same names. Raises ValueError for what does not exist, fit, or lie in its range."""
    kind = momentum_type.lower()
    if kind not in MOMENTUM_TYPES:
        known = ", ".join(map(repr, MOMENTUM_TYPES))
        raise ValueError(f"momentum_type {momentum_type!r} is none of {known}.{nearest(kind, MOMENTUM_TYPES)}")
    quadratic = kind.startswith("qmodel")
    if quadratic:
        check_quadratic(kind, lr, momentum, norm_constraint)
    else:
        check_plain(kind, lr, momentum, qmodel_update_rescale)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is neither 'mean' nor 'sum'")
    if reduction == "sum" and (quadratic or adapt_damping):
        raise ValueError(
            "the quadratic model is that of the mean loss: with momentum_type='qmodel' or adapt_damping=True, divide "
            "the loss by the number of cases and write reduction='mean'"
        )
    if estimation_mode == "empirical" and fraction != 1.0:
        raise ValueError("estimation_mode='empirical' rides on the whole training backward: leave fraction at 1.0")
    check_counts(1, cov_update_every=cov_update_every, invert_every=invert_every)
    check_counts(1, damping_adaptation_interval=damping_adaptation_interval)
    check_counts(0, num_burnin_steps=num_burnin_steps)
    check_positive(damping=damping, precon_damping_mult=precon_damping_mult, norm_constraint=norm_constraint)
    check_positive(damping_adaptation_decay=damping_adaptation_decay)
    check_not_negative(weight_decay=weight_decay, min_damping=min_damping, l2_reg=l2_reg, lr=lr, momentum=momentum)
    if not 0 <= cov_ema_decay <= 1:
        raise ValueError(f"cov_ema_decay is {cov_ema_decay!r}; it must be between 0 and 1")
    if damping_increase_rho_threshold > damping_decrease_rho_threshold:
        raise ValueError(
            f"damping_increase_rho_threshold={damping_increase_rho_threshold} is above damping_decrease_rho_threshold="
            f"{damping_decrease_rho_threshold}: between them the damping would have to grow and to shrink"
        )
    rescale = 1.0 if qmodel_update_rescale is None else qmodel_update_rescale
    return Options(
        momentum_type=kind,
        momentum=0.0 if momentum is None else momentum,
        group_lr=rescale if lr is None else lr,
        norm_constraint=norm_constraint,
        decay=cov_ema_decay**cov_update_every,
        cov_update_every=cov_update_every,
        invert_every=invert_every,
        num_burnin_steps=num_burnin_steps,
        adapt_damping=adapt_damping,
        update_damping_immediately=update_damping_immediately,
        damping_rule=DampingRule(
            interval=damping_adaptation_interval,
            decay=damping_adaptation_decay,
            decrease_above=damping_decrease_rho_threshold,
            increase_below=damping_increase_rho_threshold,
            min_damping=min_damping,
            l2_reg=l2_reg,
        ),
        precon_damping_mult=precon_damping_mult,
        estimation_mode=estimation_mode,
        fraction=fraction,
        reduction=reduction,
        first_order=FirstOrder.read(first_order),
    )


OPTIONS = tuple(inspect.signature(read_options).parameters)  # the names of those that are checked here


def check_quadratic(kind: str, lr: Any, momentum: Any, norm_constraint: Any) -> None:
    if lr is not None:
        raise ValueError(
            f"momentum_type={kind!r} finds its own step size: leave lr out, or scale the steps with "
            "qmodel_update_rescale"
        )
    if kind == "qmodel" and momentum is not None:
        raise ValueError(
            "momentum_type='qmodel' finds its own momentum: write momentum=None, or momentum_type='qmodel_fixedmu' to "
            f"keep momentum={momentum}"
        )
    if kind == "qmodel_fixedmu" and momentum is None:
        raise ValueError("momentum_type='qmodel_fixedmu' needs momentum=...; 'qmodel' finds its own")
    if norm_constraint is not None:
        raise ValueError(f"norm_constraint bounds a given lr, and momentum_type={kind!r} has none: leave it out")


def check_plain(kind: str, lr: Any, momentum: Any, rescale: Any) -> None:
    if lr is None:
        raise ValueError(f"momentum_type={kind!r} needs lr=...; 'qmodel' and 'qmodel_fixedmu' find their own step size")
    if rescale is not None:
        raise ValueError(f"qmodel_update_rescale scales the steps of 'qmodel'; with momentum_type={kind!r} change lr")
    if momentum is None:
        raise ValueError(f"momentum_type={kind!r} needs a number for momentum: write momentum=0.0 for none")


def check_counts(least: int, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of steps, at least {least}")


def check_positive(**values: Any) -> None:
    """Numbers only: a tensor is not read, and None is an option that was not given."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor) and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be positive")


def check_not_negative(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor) and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}; it must not be negative")
