"""The damping λ, which follows how well the quadratic model predicts the loss."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import a_flag, a_weight, finite, not_negative, positive, whole_number


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
        names = [option.name for of in (DampingThresholds, AdaptedDamping) for option in fields(of)]
        defaults = {option.name: option.default for option in fields(self)}
        idle = [
            f"{name}={getattr(self, name)!r} has no effect without adapt_damping=True: leave it out"
            for name in dict.fromkeys(names)
            if not self.adapt_damping and getattr(self, name) != defaults[name]
        ]
        if idle:
            raise ValueError("\n".join(idle))
