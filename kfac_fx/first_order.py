"""The rule for parameters in no Fisher block: Adam with decoupled weight decay (Kingma & Ba 2015, Loshchilov & Hutter
2019), as pure functions of tensors, in the same step and under the same guard against values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.errors import nearest

Tensors = dict[str, Tensor]
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

    def propose(self, g: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """(Δ by parameter, the new state); `state` holds `name/exp_avg`, `name/exp_avg_sq` and `name/step`."""
        first, second = self.betas
        updates: Tensors = {}
        new: Tensors = {}
        for name, gradient in g.items():
            average, square, step = (state[f"{name}/{key}"] for key in STATE)
            average = first * average + (1 - first) * gradient
            square = second * square + (1 - second) * gradient.square()
            step = step + 1
            updates[name] = average / (1 - first**step) / ((square / (1 - second**step)).sqrt() + self.eps)
            new |= {f"{name}/{key}": value for key, value in zip(STATE, (average, square, step), strict=True)}
        return updates, new


def new_state(parameter: Tensor) -> Tensors:
    """All zero, in float32 at least; the step counts on the device."""
    like = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    values = like, like.clone(), torch.zeros((), dtype=like.dtype, device=parameter.device)
    return dict(zip(STATE, values, strict=True))
