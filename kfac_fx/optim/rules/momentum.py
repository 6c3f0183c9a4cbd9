"""TF K-FAC's rules with a given learning rate: momentum after the preconditioner ("regular") or before it ("adam")."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import choice, not_negative, positive
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.damping import AdaptedDamping
from kfac_fx.optim.groups import FlatParameters, Product
from kfac_fx.optim.rule import BlockStep, Damped, Update


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
    momentum: Annotated[float, not_negative] = 0.9
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
