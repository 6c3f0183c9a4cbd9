"""The Levenberg-Marquardt rule for the damping strength (Martens & Grosse 2015, section 6.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DampingRule:
    """Every `interval` steps the reduction of the loss is compared with what the quadratic model predicted.

    decay: a step's factor, so that a change is decay^interval. The damping never falls below min_damping + l2_reg: an
    l2 term in the loss is a part of its curvature that the Fisher does not have.
    """

    interval: int = 5
    decay: float = 0.95
    decrease_above: float = 0.75
    increase_below: float = 0.25
    min_damping: float = 1e-8
    l2_reg: float = 0.0

    def due(self, step: int) -> bool:
        """Is the damping adapted at the end of step `step`, counted from 0?"""
        return (step + 1) % self.interval == 0

    def __call__(self, damping: Tensor, before: Tensor, after: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """(the new damping, ρ = actual change / predicted change); the damping stays where ρ is not a number."""
        omega = self.decay**self.interval
        change = after - before
        rho = change / predicted
        # A model that predicted an increase was wrong in the right direction if the loss fell: ρ is negative then.
        decrease = ((change < 0) & (predicted > 0)) | (rho > self.decrease_above)
        increase = ~decrease & (rho < self.increase_below)
        adapted = torch.where(decrease, damping * omega, torch.where(increase, damping / omega, damping))
        return adapted.clamp(min=self.min_damping + self.l2_reg), rho
