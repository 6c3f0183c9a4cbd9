"""Conjugate gradients on (H + δ I) x = v with a spectrum as the preconditioner, for many right-hand sides at once.

H is a curvature matrix that is given by its products with vectors. If s F is near to H, few iterations suffice
(Martens 2010, "Deep learning via Hessian-free optimization", section 4). Every right-hand side has coefficients of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_fx.factors.stacks import Vector
from kfac_fx.passes.errors import warn_user

NamedProduct = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class Solution(NamedTuple):
    """The result of `solve`.

    Attributes:
        vector: x, with the dimensions of v.
        residuals: |v - (H + δ I) x| / |v| of every right-hand side, as the recursion has it: at the start and after
            every iteration, [iterations + 1, ...].
        converged: whether the last residual is within the tolerance, [...].
    """

    vector: dict[str, Tensor]
    residuals: Tensor
    converged: Tensor

    @property
    def iterations(self) -> int:
        return len(self.residuals) - 1


class ConvergenceWarning(UserWarning):
    """A solver stopped before it reached its tolerance."""

    __module__ = "kfac_fx"


def conjugate_gradients(
    vector: Vector,
    multiply: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    precondition: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    lead: tuple[int, ...],
    tolerance: float,
    iterations: int,
) -> Solution:
    """Solve A x = v for A = `multiply`, positive definite. lead: the first dimensions of all tensors, which count
    right-hand sides. Waits for the device in every iteration."""

    def inner(left: Vector, right: Vector) -> Tensor:
        return torch.stack([(left[n] * right[n]).reshape(*lead, -1).sum(-1) for n in left]).sum(0)

    def added(left: Vector, scale: Tensor, right: Vector) -> dict[str, Tensor]:
        return {n: left[n] + scale.view(*lead, *[1] * (left[n].dim() - len(lead))) * right[n] for n in left}

    solution = {name: torch.zeros_like(tensor) for name, tensor in vector.items()}
    residual = dict(vector)
    norm = inner(vector, vector).sqrt()
    residuals = [torch.where(norm > 0, 1.0, 0.0).to(norm)]
    direction = precondition(residual)
    product = inner(residual, direction)
    for _ in range(iterations):
        active = residuals[-1] > tolerance
        if not active.any():
            break
        image = multiply(direction)
        curvature = inner(direction, image)
        if bool((active & ~(curvature > 0)).any()):
            raise ValueError(
                "conjugate gradients met a direction without positive curvature: `product` is not that of a symmetric "
                "matrix without negative eigenvalues, or the damping is zero where it is singular."
            )
        step = torch.where(active, product / curvature, 0)
        solution = added(solution, step, direction)
        residual = added(residual, -step, image)
        residuals.append(torch.where(norm > 0, inner(residual, residual).sqrt() / norm, 0))
        turned = precondition(residual)
        following = inner(residual, turned)
        direction = added(turned, torch.where(active, following / product, 0), direction)
        product = following
    converged = residuals[-1] <= tolerance
    if not bool(converged.all()):
        warn_user(
            ConvergenceWarning(
                f"{int((~converged).sum())} of {converged.numel()} right-hand sides have a residual of up to "
                f"{float(residuals[-1].max()):.0e} after {iterations} iterations, and the tolerance is {tolerance:.0e}."
            )
        )
    return Solution(solution, torch.stack(residuals), converged)
