"""TF K-FAC's rules: with a given learning rate, or with a step size from the quadratic model of the batch.

**With a given learning rate** there is momentum after the preconditioner ("regular") or before it ("adam").

**With a step size that they find**: the exact quadratic model of the batch along two directions.

**The quadratic model** of a batch's loss along a few directions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import a_decay, choice, positive
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.groups import FlatParameters, InnerProduct, Product, inner
from kfac_fx.optim.rule import AdaptedDamping, BlockStep, Damped, Products, Update


@dataclass(frozen=True, kw_only=True, eq=False)
class Regular(AdaptedDamping, Damped):
    """Momentum after the preconditioner, TF K-FAC's "regular": v <- μ v + κ P g, Δ = v.

    It neither checks nor undoes a step: without `norm_constraint`, too large an lr for the damping makes the loss
    diverge.

    Args, next to those of `Damped` and `AdaptedDamping`:
        momentum: μ; parameter groups may have their own.
        norm_constraint: the bound on the squared Fisher norm of a step, which is scaled down to it: roughly twice the
            Kullback-Leibler divergence between the predictions before and after the step. Start with 1e-2 for lr=1.
        norm_constraint_form: "update" bounds lr Δ, momentum included, by norm_constraint (lr / l₀)², so that steps
            follow a schedule; l₀ is the lr of a parameter group when it was added, its "first_lr". The norm is that of
            the damped factors and costs a product with them. Weight decay is not in it. "gradient" is TF K-FAC's form:
            it bounds lr P g before momentum ("adam": lr P v), so a step can be 1 / (1 - momentum) times as long, and lr
            does nothing while the bound shortens steps.
    """

    name: ClassVar[str] = "regular"

    relative_damping: Annotated[float | None, positive] = None
    momentum: Annotated[float, a_decay] = 0.9
    norm_constraint: Annotated[float | None, positive] = None
    norm_constraint_form: Annotated[str, functools.partial(choice, known=("update", "gradient"))] = "update"

    def check_options(self) -> None:
        super().check_options()
        self.check_adapted_damping()
        if self.norm_constraint is None and self.norm_constraint_form != "update":
            raise ValueError(
                f"norm_constraint_form={self.norm_constraint_form!r} has no effect without norm_constraint: leave it "
                "out"
            )

    @property
    def side_damping(self) -> float | None:
        return self.relative_damping

    @property
    def reported(self) -> tuple[str, ...]:
        return () if self.norm_constraint is None else ("kappa",)

    @property
    def of_groups(self) -> dict[str, float]:
        return {"momentum": self.momentum}

    @property
    def keeps_first_lr(self) -> bool:
        return self.norm_constraint is not None and self.norm_constraint_form == "update"

    # --- the update ---------------------------------------------------------------------------------------------------

    def averaged(self, flat: FlatParameters, precondition: Product) -> tuple[Tensor, Tensor, Tensor | None]:
        """(the new v, Δ, κ). κ is None without a constraint in the form "gradient".

        precondition: returns a new vector, which is written to.
        """
        preconditioned, kappa = self.clipped(flat, flat.g, precondition)
        v = preconditioned.addcmul_(flat.state["velocity"], group_momentum(flat))
        return v, v, kappa

    def clipped(self, flat: FlatParameters, a: Tensor, precondition: Product) -> tuple[Tensor, Tensor | None]:
        """(κ P a, κ) with κ = min(1, √(norm_constraint / <lr a, lr P a>)).

        This bounds the squared Fisher norm of lr P a, without the momentum that "regular" adds to it.
        """
        preconditioned = precondition(a)
        if self.norm_constraint is None or self.norm_constraint_form == "update":
            return preconditioned, None
        kappa = shrinking(self.norm_constraint, flat.inner(a, flat.lr.square() * preconditioned))
        return kappa * preconditioned, kappa

    def bounded(
        self, flat: FlatParameters, precondition: Product, multiply: Product | None
    ) -> tuple[Tensor, Tensors, Tensor | None]:
        """(κ Δ, the new state, κ) with κ = min(1, √(norm_constraint / <l₀ Δ, F l₀ Δ>)) in the form "update".

        A step follows the schedule of lr while the bound shortens it: with l₀ = lr, lr κ would not depend on lr. Where
        l₀ is zero, lr is taken instead. The velocity stays as it is: momentum is that of an optimizer without the
        bound.

        multiply: the product with the damped block-diagonal Fisher F; None in the other form, and without a constraint.
        """
        velocity, update, kappa = self.averaged(flat, precondition)
        if self.norm_constraint is not None and multiply is not None:
            assert flat.first_lr is not None, "bug in kfac_fx: a bound on steps, and groups without a first lr"
            step = torch.where(flat.first_lr > 0, flat.first_lr, flat.lr) * update
            kappa = shrinking(self.norm_constraint, flat.inner(step, multiply(step)))
            update = kappa * update
        return update, {"velocity": velocity}, kappa

    def direction(self, step: BlockStep) -> Update:
        update, state, kappa = self.bounded(step.flat, step.precondition, self.multiply(step))
        return Update(update, state, kappa=kappa)

    def whole_step(self, step: BlockStep) -> tuple[Tensor, Tensor | None]:
        """Compiled as one."""
        precondition = step.product(step.estimator.multiply_inverse_kept)
        of: tuple[Tensor, Tensor | None]
        of = step.compiled(move_at_once)(self, step.flat, precondition, self.multiply(step), step.ok)
        return of

    def multiply(self, step: BlockStep) -> Product | None:
        return step.fisher_product if self.keeps_first_lr else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Adam(Regular):
    """Momentum before the preconditioner, TF K-FAC's "adam"; it has no second moments: v <- μ v + g, Δ = κ P v.

    Args: those of `Regular`.
    """

    name: ClassVar[str] = "adam"

    def averaged(self, flat: FlatParameters, precondition: Product) -> tuple[Tensor, Tensor, Tensor | None]:
        v = torch.addcmul(flat.g, flat.state["velocity"], group_momentum(flat))
        return v, *self.clipped(flat, v, precondition)


def group_momentum(flat: FlatParameters) -> Tensor:
    assert flat.momentum is not None, "bug in kfac_fx: groups without a momentum"
    return flat.momentum


def move_at_once(
    rule: Regular, flat: FlatParameters, precondition: Product, multiply: Product | None, ok: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A whole step. Returns whether it was made, and κ."""
    update, state, kappa = rule.bounded(flat, precondition, multiply)
    move = flat.displacement(update)
    ok = ok & flat.may_be_added(move)
    flat.commit(move, state, ok)
    return ok, kappa


def shrinking(bound: float, squared: Tensor) -> Tensor:
    """The largest factor κ <= 1 of a vector for which κ² times its squared norm is at most `bound`: 0-dim."""
    return (bound / squared.clamp(min=torch.finfo(squared.dtype).tiny)).sqrt().clamp(max=1.0)


PARALLEL = 16  # times ε: directions are parallel up to rounding


@dataclass(frozen=True)
class QuadraticModel:
    """The model M of the loss along k directions: for δ = Σ s_i d_i, M(δ) = h(θ) + sᵀ c + ½ sᵀ (f + λ b) s.

    The exact Fisher F enters here and nowhere else (Martens & Grosse 2015, sections 6.4 and 7).
    """

    fisher: Tensor  # f_ij = <d_i, F d_j>, [k, k]
    products: Tensor  # b_ij = <d_i, d_j>, [k, k]
    slopes: Tensor  # c_i = <∇h, d_i>, [k]

    @staticmethod
    def along(directions: Sequence[Tensor], g: Tensor, fisher: Products, inner: InnerProduct = inner) -> QuadraticModel:
        """The model along directions [P].

        Products with a direction of zero are zero: where `fisher` is made of difference quotients, they are rounding.
        """
        slopes = torch.stack([inner(g, direction) for direction in directions])
        products = torch.stack([torch.stack([inner(a, b) for b in directions]) for a in directions])
        moves = products.diagonal() != 0
        return QuadraticModel(torch.where(moves & moves.unsqueeze(1), fisher(directions), 0), products, slopes)

    def best(self, damping: Tensor) -> Tensor:
        """The s that minimizes the damped model of two directions: [2].

        If the second direction is zero, or parallel to the first up to rounding: the minimum along the first. If both
        are zero: zero.
        """
        m, c = self.matrix(damping), self.slopes
        size, determinant = m[0, 0] * m[1, 1], m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]
        independent = determinant > PARALLEL * torch.finfo(m.dtype).eps * size
        divisor = torch.where(independent, determinant, 1)
        both = torch.stack([m[0, 1] * c[1] - m[1, 1] * c[0], m[1, 0] * c[0] - m[0, 0] * c[1]]) / divisor
        return torch.where(independent, both, self.best_with_momentum(damping, torch.zeros_like(c[0])))

    def best_with_momentum(self, damping: Tensor, momentum: Tensor) -> Tensor:
        """The same with the second coefficient fixed."""
        m, c = self.matrix(damping), self.slopes
        curved = m[0, 0] > 0
        step = -(momentum * m[0, 1] + c[0]) / torch.where(curved, m[0, 0], 1)
        return torch.stack([torch.where(curved, step, 0), momentum])

    def change(self, s: Tensor, damping: Tensor | float) -> Tensor:
        """M(Σ s_i d_i) - M(0). With the damping of the loss's own l2 term alone it is the predicted change."""
        return s @ self.slopes + 0.5 * (s @ self.matrix(damping) @ s)

    def matrix(self, damping: Tensor | float) -> Tensor:
        return self.fisher + damping * self.products

    def minimum(self, damping: Tensor | float) -> Tensor:
        """The s that minimizes the damped model of any number of directions: [k].

        The matrix is scaled to a diagonal of ones. A small multiple of the identity that is then added decides between
        directions that are parallel up to rounding, and gives zero along directions that are zero.
        """
        m, c = self.matrix(damping), self.slopes
        root = m.diagonal().clamp(min=0).sqrt()
        inverse = torch.where(root > 0, 1 / root, 0)
        scaled = inverse.unsqueeze(1) * m * inverse
        ridge = PARALLEL * torch.finfo(m.dtype).eps * torch.eye(len(c), dtype=m.dtype, device=m.device)
        unit = torch.diag((root <= 0).to(m.dtype))
        solution, _ = torch.linalg.solve_ex(scaled + ridge + unit, -(inverse * c))
        result: Tensor = inverse * solution
        return result


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

    momentum: Annotated[float, a_decay] = 0.9

    def best(self, model: QuadraticModel, damping: Tensor) -> Tensor:
        return model.best_with_momentum(damping, torch.full_like(model.slopes[0], self.momentum))
