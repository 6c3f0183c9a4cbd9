"""The rule of parameters in no Fisher block: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import not_negative, number, optional
from kfac_fx.linalg.entries import A_COUNT, NOT_NEGATIVE
from kfac_fx.linalg.vectors import Flat, Tensors
from kfac_fx.passes.errors import nearest

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
ADAM_VALUES = {"exp_avg_sq": NOT_NEGATIVE, "step": A_COUNT}


@dataclass(frozen=True)
class FirstOrder:
    """Adam with decoupled weight decay (Kingma & Ba 2015, Loshchilov & Hutter 2019)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | None = None  # None takes that of the parameter group

    @classmethod
    def read(cls, options: Any) -> FirstOrder:
        """From KFAC's `first_order=dict(...)`. Raises ValueError for options that are unknown or out of range."""
        if not isinstance(options, Mapping):
            raise ValueError(f"first_order is {options!r}; it must be a dict of options, as in dict(lr=1e-3)")
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise ValueError(f"first_order has no option {name!r}, only {', '.join(names)}.{nearest(name, names)}")
        rule = cls(**options)
        not_negative("first_order['lr']", rule.lr)
        not_negative("first_order['eps']", rule.eps)
        optional(not_negative, "first_order['weight_decay']", rule.weight_decay)
        betas = rule.betas if isinstance(rule.betas, (tuple, list)) else ()
        if len(betas) != 2 or not all(0 <= number("first_order['betas']", beta) < 1 for beta in betas):
            raise ValueError(f"first_order['betas'] is {rule.betas!r}; it must be two numbers, from 0 and below 1")
        return rule

    def __call__(self, g: Tensor, state: Mapping[str, Tensor], flat: Flat) -> tuple[Tensor, Tensors]:
        """(Δ, the new state). All are vectors [P] but "step", [parameters]: every parameter counts its own steps."""
        first, second = self.betas
        average = first * state["exp_avg"] + (1 - first) * g
        square = second * state["exp_avg_sq"] + (1 - second) * g.square()
        step = state["step"] + 1
        # The averages start at zero; dividing by 1 - beta^step takes that zero out of them.
        debias, debias_square = (
            flat.spread(dict(zip(flat.shapes, (1 - beta**step).unbind(), strict=True))) for beta in self.betas
        )
        update = average / debias / ((square / debias_square).sqrt() + self.eps)
        return update, dict(zip(ADAM_STATE, (average, square, step), strict=True))


def new_adam_state(parameter: Tensor) -> Tensors:
    """Zeros, in float32 at least; the step counts on the device."""
    like = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    values = like, like.clone(), torch.zeros((), dtype=like.dtype, device=parameter.device)
    return dict(zip(ADAM_STATE, values, strict=True))
