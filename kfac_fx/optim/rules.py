"""The rules of an update, as functions of vectors over all parameters.

They are momentum, AdamW, grafting, the quadratic model and the damping. `g` is the gradient, `v` the velocity, `P` the
damped inverse of the Fisher. An update Δ moves the parameters by -lr Δ. No function here reads a value back from the
device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kfac_fx.fisher.placement import UNDIVIDED, VectorDivision
from kfac_fx.linalg.arguments import not_negative, number, optional
from kfac_fx.linalg.vectors import Flat, Tensors, connected
from kfac_fx.passes.errors import nearest

Product = Callable[[Tensor], Tensor]  # of a matrix with a vector [P]
Products = Callable[[Sequence[Tensor]], Tensor]  # <d_i, F d_j> of k vectors [P]: [k, k]
InnerProduct = Callable[[Tensor, Tensor], Tensor]  # <a, b> of vectors [P] that may be divided among processes
ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")

# --- products ---------------------------------------------------------------------------------------------------------


def inner(first: Tensor, second: Tensor) -> Tensor:
    """<a, b> of whole vectors, in float32 at least. Not a BLAS product, which adds up millions of terms one after
    another."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    return (first.to(dtype) * second.to(dtype)).sum()


def inner_products(vectors: Sequence[Tensor], inner: InnerProduct = inner) -> Tensor:
    """<d_i, d_j>: [k, k]."""
    return torch.stack([torch.stack([inner(a, b) for b in vectors]) for a in vectors])


def is_finite(vector: Tensor) -> Tensor:
    """A 0-dim bool. A sum shows every NaN and infinity, and costs a thirtieth of a maximum norm on a CPU."""
    return vector.sum().isfinite()


@dataclass(frozen=True)
class Preconditioner:
    """The product of the Fisher, or its inverse, with a vector over the parameters that have a gradient."""

    multiply: Callable[[Tensors], Tensors]  # of the parameters whose blocks this process keeps, by name
    flat: Flat  # where the parameters that have a gradient lie in the vector
    absent: Tensors  # zeros for those that have none
    division: VectorDivision = UNDIVIDED

    def __call__(self, vector: Tensor) -> Tensor:
        parts = self.flat.parts(vector)
        wholes = self.division.to_blocks(parts)
        product = self.multiply({**wholes, **self.absent})
        return self.flat.joined(self.division.from_blocks({name: product[name] for name in wholes}, parts))


# --- momentum -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MomentumRule:
    """Momentum after the preconditioner ("regular") or before it ("adam", TF K-FAC's name; without second moments)."""

    kind: str
    norm_constraint: float | None  # of the form "gradient"; see `clipped`

    def __call__(
        self, g: Tensor, v: Tensor, momentum: Tensor, precondition: Product, lr: Tensor, inner: InnerProduct = inner
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(the new v, Δ, κ): v <- μ v + κ P g, Δ = v; or v <- μ v + g, Δ = κ P v. κ is None without a constraint.

        Args:
            momentum, lr: 0-dim, or [P].
            precondition: returns a new vector, which is written to.
        """
        if self.kind == "adam":
            v = torch.addcmul(g, v, momentum)
            return v, *self.clipped(v, precondition(v), lr, inner)
        clipped, kappa = self.clipped(g, precondition(g), lr, inner)
        v = clipped.addcmul_(v, momentum)
        return v, v, kappa

    def clipped(
        self, a: Tensor, preconditioned: Tensor, lr: Tensor, inner: InnerProduct = inner
    ) -> tuple[Tensor, Tensor | None]:
        """(κ P a, κ) with κ = min(1, √(norm_constraint / <lr a, lr P a>)).

        This bounds the squared Fisher norm of lr P a, without the momentum that "regular" adds to it.
        """
        if self.norm_constraint is None:
            return preconditioned, None
        kappa = shrinking(self.norm_constraint, inner(a, lr.square() * preconditioned))
        return kappa * preconditioned, kappa


@dataclass(frozen=True)
class StepBound:
    """The bound norm_constraint (lr / l₀)² on the squared Fisher norm of a step, with l₀ the initial learning rate.

    A step follows the schedule of lr while the bound shortens it. With l₀ = lr, lr κ would not depend on lr.
    """

    norm_constraint: float
    multiply: Product  # with the damped block-diagonal Fisher F
    inner: InnerProduct = inner

    def __call__(self, update: Tensor, lr: Tensor, first_lr: Tensor) -> tuple[Tensor, Tensor]:
        """(κ Δ, κ) with κ = min(1, √(norm_constraint / <l₀ Δ, F l₀ Δ>)).

        Args:
            lr, first_lr: the present learning rate and l₀, 0-dim or [P]. Where l₀ is zero, lr takes its place.
        """
        step = torch.where(first_lr > 0, first_lr, lr) * update
        kappa = shrinking(self.norm_constraint, self.inner(step, self.multiply(step)))
        return kappa * update, kappa


def shrinking(bound: float, squared: Tensor) -> Tensor:
    """The largest factor κ <= 1 of a vector for which κ² times its squared norm is at most `bound`: 0-dim."""
    return (bound / squared.clamp(min=torch.finfo(squared.dtype).tiny)).sqrt().clamp(max=1.0)


def new_velocity(parameter: Tensor) -> Tensors:
    """Zero, in float32 at least."""
    return {"velocity": torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))}


def new_checkpoint(parameter: Tensor) -> Tensors:
    """The parameter at the last check, in float32 at least."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return {"checkpoint": parameter.detach().to(dtype, copy=True)}


def new_checked_state(parameter: Tensor) -> Tensors:
    """The averaged gradient, zero, and the parameter at the last check."""
    return {**new_velocity(parameter), **new_checkpoint(parameter)}


# --- parameters in no Fisher block ----------------------------------------------------------------------------------


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


NEW_STATES = {  # of a parameter in a Fisher block, by momentum type; the others have `new_velocity`
    "adaptive": new_checked_state,
    "eigen_moments": new_checkpoint,
    "grafted": new_adam_state,
}


# --- grafting ---------------------------------------------------------------------------------------------------------


def joined_blocks(names: Iterable[str], blocks: Iterable[Sequence[str]]) -> list[int]:
    """A number for every name; names that a block has in common, or several blocks that overlap, have the same."""
    known = list(names)
    sets = connected([*((name,) for name in known), *({*block}.intersection(known) for block in blocks)])
    number = {place: places[0] for places in sets for place in places}  # the first places are those of names
    return [number[n] for n in range(len(known))]


def grafted(
    direction: Tensor, length: Tensor, flat: Flat, blocks: Iterable[Sequence[str]], division: VectorDivision = UNDIVIDED
) -> Tensor:
    """The direction, scaled block by block to the norm of `length`; zero where the direction is.

        Δ_b = d_b |a_b| / |d_b|        for every Fisher block b, with the norms over its parameters that have a gradient

    "grafted" takes d = P m̂ and Adam's a = m̂ / (√v̂ + ε). Sources: Agarwal et al. 2020, "Disentangling adaptive gradient
    methods from learning rates", which names it grafting; Anil et al. 2020, "Scalable second order optimization for
    deep learning", which grafts Shampoo layer by layer. Blocks that have a parameter in common count as one.

    Args:
        direction, length: [P].
        flat: where the parameters lie in the vectors.
        blocks: the names of the parameters of every Fisher block.
        division: of the vectors among processes.
    """
    numbers = joined_blocks(flat.shapes, blocks)
    of_names = [[part.square().sum() for part in flat.parts(vector).values()] for vector in (length, direction)]
    of_blocks: dict[int, list[Tensor]] = defaultdict(list)
    for n, squares in zip(
        numbers, division.total(torch.stack(list(map(torch.stack, of_names)))).unbind(1), strict=True
    ):
        of_blocks[n].append(squares)
    scales: dict[int, Tensor] = {}
    for n, squares_of_names in of_blocks.items():
        of_length, of_direction = torch.stack(squares_of_names).sum(0)
        scales[n] = (of_length / of_direction.clamp(min=torch.finfo(direction.dtype).tiny)).sqrt()
    return flat.spread({name: scales[n] for name, n in zip(flat.shapes, numbers, strict=True)}) * direction


# --- the quadratic model --------------------------------------------------------------------------------------------


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
        """The model along directions [P]."""
        slopes = torch.stack([inner(g, direction) for direction in directions])
        return QuadraticModel(fisher(directions), inner_products(directions, inner), slopes)

    def best(self, damping: Tensor) -> Tensor:
        """The s that minimizes the damped model of two directions: [2].

        If the second direction is zero, or parallel to the first up to rounding: the minimum along the first. If both
        are zero: zero.
        """
        m, c = self.matrix(damping), self.slopes
        size, determinant = m[0, 0] * m[1, 1], m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]
        independent = determinant > 16 * torch.finfo(m.dtype).eps * size
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


def change_by_blocks(g: Tensor, move: Tensor, multiply: Product, excess: Tensor, inner: InnerProduct = inner) -> Tensor:
    """<g, δ> + ½ <δ, (F̂ + λ I) δ> - ½ excess |δ|², with F̂ the block-diagonal Fisher.

    Args:
        multiply: the product with F̂ + λ I.
        excess: the part of λ that is no curvature of the loss.
    """
    return inner(g, move) + 0.5 * (inner(move, multiply(move)) - excess * inner(move, move))


# --- the damping ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DampingRule:
    """The Levenberg-Marquardt rule for the damping λ (Martens & Grosse 2015, section 6.5).

    Every `interval` steps the change of the loss is compared with the change that the quadratic model predicted; ρ is
    their ratio.
    """

    interval: int = 5
    decay: float = 0.95  # λ changes by decay^interval
    decrease_above: float = 0.75  # of ρ
    increase_below: float = 0.25  # of ρ
    min_damping: float = 1e-8  # λ never falls below min_damping + l2_reg
    l2_reg: float = 0.0  # the curvature of an l2 term in the loss, which the Fisher does not have

    def due(self, step: int) -> bool:
        """Whether the damping is adapted at the end of step `step`, counted from 0."""
        return (step + 1) % self.interval == 0

    def __call__(self, damping: Tensor, before: Tensor, after: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """(the new damping, ρ = actual change / predicted change). The damping stays where ρ is not a number."""
        omega = self.decay**self.interval
        change = after - before
        rho = change / predicted
        # A model that predicted an increase was wrong in the right direction if the loss fell: ρ is negative then.
        decrease = ((change < 0) & (predicted > 0)) | (rho > self.decrease_above)
        kept = torch.where(rho < self.increase_below, damping / omega, damping)
        adapted = torch.where(decrease, damping * omega, kept)
        return adapted.clamp(min=self.min_damping + self.l2_reg), rho
