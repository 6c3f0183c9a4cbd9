"""From gradients to updates: the momentum rules of K-FAC, as pure functions of vectors over all parameters.

`g` is the gradient, `v` the velocity, `P` the damped inverse of the Fisher. An update Δ moves the parameters by -lr Δ.
Nothing here reads a value back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Flat, Tensors
from kfac_fx.optim.quadratic import inner


@dataclass(frozen=True)
class Preconditioner:
    """A product with the Fisher or its inverse, on vectors over the parameters that have a gradient.

    multiply: on tensors by name, of all parameters in a Fisher block. absent: zeros for those not in `flat`.
    """

    multiply: Callable[[Tensors], Tensors]
    flat: Flat
    absent: Tensors

    def __call__(self, vector: Tensor) -> Tensor:
        return self.flat.joined(self.multiply({**self.flat.parts(vector), **self.absent}))


@dataclass(frozen=True)
class MomentumRule:
    """kind: "regular", momentum on the preconditioned gradient, or "adam", momentum on the gradient, preconditioned as
    a whole (no second moments; the name is TF K-FAC's). norm_constraint: see `clipped`; None for none."""

    kind: str
    norm_constraint: float | None

    def __call__(
        self, g: Tensor, v: Tensor, momentum: Tensor, precondition: Callable[[Tensor], Tensor], lr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(the new v, Δ): v <- momentum v + κ P g, Δ = v; or v <- momentum v + g, Δ = κ P v.

        momentum, lr: 0-dim, or [P]. precondition: makes a new vector, which is written to.
        """
        if self.kind == "adam":
            v = torch.addcmul(g, v, momentum)
            return v, self.clipped(v, precondition(v), lr)
        v = self.clipped(g, precondition(g), lr).addcmul_(v, momentum)
        return v, v

    def clipped(self, a: Tensor, preconditioned: Tensor, lr: Tensor) -> Tensor:
        """κ P a with κ = min(1, √(norm_constraint / <lr a, lr P a>)).

        Bounds the squared Fisher norm of a step, roughly twice the Kullback-Leibler divergence between the predictions
        before and after it.
        """
        if self.norm_constraint is None:
            return preconditioned
        squared = inner(a, lr.square() * preconditioned)
        kappa = (self.norm_constraint / squared.clamp(min=torch.finfo(squared.dtype).tiny)).sqrt().clamp(max=1.0)
        return kappa * preconditioned
