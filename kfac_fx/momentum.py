"""From gradients to updates: the momentum rules of K-FAC, as pure functions of tensors.

`g` is the gradient, `v` the velocity, `P` the damped inverse of the Fisher, all by parameter name. An update Δ moves
the parameters by -lr Δ. Nothing here reads a value back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.quadratic import inner

Tensors = dict[str, Tensor]
Scalars = Mapping[str, Tensor]


@dataclass(frozen=True)
class Preconditioner:
    """A product with the Fisher or its inverse, on the parameters that have a gradient.

    absent: zeros for the others that the estimator knows.
    """

    multiply: Callable[[Tensors], Tensors]
    absent: Tensors

    def __call__(self, vector: Tensors) -> Tensors:
        product = self.multiply({**vector, **self.absent})
        return {name: product[name] for name in vector}


@dataclass(frozen=True)
class MomentumRule:
    """kind: "regular", momentum on the preconditioned gradient, or "adam", momentum on the gradient, preconditioned as
    a whole (no second moments; the name is TF K-FAC's). norm_constraint: see `clipped`; None for none."""

    kind: str
    momentum: float
    norm_constraint: float | None

    def __call__(self, g: Tensors, v: Tensors, precondition: Preconditioner, lr: Scalars) -> tuple[Tensors, Tensors]:
        """(the new v, Δ): v <- momentum v + κ P g, Δ = v; or v <- momentum v + g, Δ = κ P v."""
        if self.kind == "adam":
            v = {name: self.momentum * old + g[name] for name, old in v.items()}
            return v, self.clipped(v, precondition(v), lr)
        u = self.clipped(g, precondition(g), lr)
        v = {name: self.momentum * old + u[name] for name, old in v.items()}
        return v, v

    def clipped(self, a: Tensors, preconditioned: Tensors, lr: Scalars) -> Tensors:
        """κ P a with κ = min(1, √(norm_constraint / <lr a, lr P a>)).

        Bounds the squared Fisher norm of a step, roughly twice the Kullback-Leibler divergence between the predictions
        before and after it.
        """
        if self.norm_constraint is None:
            return preconditioned
        squared = inner(a, {name: one * lr[name].square() for name, one in preconditioned.items()})
        kappa = (self.norm_constraint / squared.clamp(min=torch.finfo(squared.dtype).tiny)).sqrt().clamp(max=1.0)
        return {name: kappa * one for name, one in preconditioned.items()}
