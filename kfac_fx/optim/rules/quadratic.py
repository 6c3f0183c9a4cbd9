"""TF K-FAC's rules that find their step size: the exact quadratic model of the batch along two directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import not_negative, positive
from kfac_fx.optim.damping import AdaptedDamping
from kfac_fx.optim.quadratic_model import QuadraticModel
from kfac_fx.optim.rule import BlockStep, Damped, Update


@dataclass(frozen=True, kw_only=True, eq=False)
class QModel(AdaptedDamping, Damped):
    """The best step along d₁ = P g and d₂ = -v, the previous update (Martens & Grosse 2015, section 7).

        v <- -(α d₁ + μ d₂) = μ v - α P g, Δ = v

    α and μ minimize the exact quadratic model of the batch, with λ.

    Args, next to those of `Damped` and `AdaptedDamping`:
        qmodel_update_rescale: the lr of the parameter groups.
    """

    name: ClassVar[str] = "qmodel"
    is_exact: ClassVar[bool] = True
    scalars: ClassVar[Mapping[str, float]] = {"qmodel_learning_rate": math.nan, "qmodel_momentum": math.nan}

    qmodel_update_rescale: Annotated[float, positive] = 1.0

    def check_options(self) -> None:
        super().check_options()
        self.check_adapted_damping()

    def group_lr(self, lr: float | Tensor | None) -> float | Tensor:
        if lr is not None:
            raise ValueError(
                f"{self.written} finds its own step size: leave lr out, or scale the steps with qmodel_update_rescale"
            )
        return self.qmodel_update_rescale

    def direction(self, step: BlockStep) -> Update:
        """If the model is not finite, neither is Δ. Stores -α, μ and the predicted change."""
        v = step.state["velocity"]
        directions = [step.precondition(step.g), -v]
        model = QuadraticModel.along(directions, step.g, step.exact_products, step.flat.inner)
        s = self.best(model, step.damping)
        s = torch.where(model.fisher.isfinite().all(), s, torch.nan)
        step.scalars["qmodel_learning_rate"].copy_(-s[0])
        step.scalars["qmodel_momentum"].copy_(s[1])
        if step.flat.one_scale:
            step.scalars["predicted_change"].copy_(model.change(step.flat.lr * s, self.l2_reg))
        velocity = s[1] * v - s[0] * directions[0]
        return Update(velocity, {"velocity": velocity})

    def best(self, model: QuadraticModel, damping: Tensor) -> Tensor:
        """(α, μ): [2]."""
        return model.best(damping)

    def predicted_change(self, step: BlockStep, move: Tensor) -> Tensor:
        """By the exact Fisher of the batch."""
        if step.flat.one_scale:
            return step.scalars["predicted_change"].clone()
        model = QuadraticModel.along([move], step.g, step.exact_products, step.flat.inner)
        return model.change(torch.ones_like(model.slopes), self.l2_reg)


@dataclass(frozen=True, kw_only=True, eq=False)
class QModelFixedMomentum(QModel):
    """`QModel` with a fixed coefficient of the previous update.

    Args, next to those of `QModel`:
        momentum: μ.
    """

    name: ClassVar[str] = "qmodel_fixedmu"

    momentum: Annotated[float, not_negative] = 0.9

    def best(self, model: QuadraticModel, damping: Tensor) -> Tensor:
        return model.best_with_momentum(damping, torch.full_like(model.slopes[0], self.momentum))
