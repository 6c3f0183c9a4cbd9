"""The rule for parameters in no Fisher block: Adam with decoupled weight decay (Kingma & Ba 2015, Loshchilov & Hutter
2019), as pure functions of vectors, in the same step and under the same guard against values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Flat, Tensors
from kfac_fx.passes.errors import nearest

STATE = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class FirstOrder:
    """The options of the rule. weight_decay: None takes that of the parameter group."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any] | None) -> FirstOrder:
        """From KFAC's `first_order=dict(...)`; raises ValueError for an unknown option."""
        known = [field.name for field in fields(cls)]
        for name in options or {}:
            if name not in known:
                raise ValueError(f"first_order has no option {name!r}, only {', '.join(known)}.{nearest(name, known)}")
        return cls(**(options or {}))

    def propose(self, g: Tensor, state: Mapping[str, Tensor], flat: Flat) -> tuple[Tensor, Tensors]:
        """(Δ, the new state): vectors [P] but for "step", which counts for every parameter on its own: [parameters]."""
        first, second = self.betas
        average = first * state["exp_avg"] + (1 - first) * g
        square = second * state["exp_avg_sq"] + (1 - second) * g.square()
        step = state["step"] + 1
        left, left_of_square = (1 - beta**step for beta in self.betas)  # what the zeros at the start take away
        by_name = [dict(zip(flat.shapes, values.unbind(), strict=True)) for values in (left, left_of_square)]
        left, left_of_square = (flat.spread(values) for values in by_name)
        update = average / left / ((square / left_of_square).sqrt() + self.eps)
        return update, dict(zip(STATE, (average, square, step), strict=True))


def new_state(parameter: Tensor) -> Tensors:
    """All zero, in float32 at least; the step counts on the device."""
    like = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    values = like, like.clone(), torch.zeros((), dtype=like.dtype, device=parameter.device)
    return dict(zip(STATE, values, strict=True))
