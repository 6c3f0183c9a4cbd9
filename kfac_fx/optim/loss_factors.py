"""By what factor the gradient that a user's backward sends into the Fisher's outputs is that of a registered loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.losses import Categorical, Normal
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.optim.watched import Watched

PROPORTIONAL = 1e-3  # relative error of a gradient that is a multiple of another, in float32
EXACT = 1e-4  # of a factor that is only told by the loss's value, which may hold other terms


@dataclass(frozen=True)
class Found:
    """factor: of the user's loss, as a multiple of the mean of the registered one. loss: that one; spec: its origin."""

    factor: float
    loss: LossFunction
    coefficient: float
    cases: int
    counted: float  # cases with targets, as a part of all
    spec: object


def factors(watched: Watched, value: float | None) -> list[Found]:
    """What can be told of each registered loss. value: of the user's whole loss, if known."""
    arrived, spec = watched.arrived(), watched.recorder.loss
    leaves, pairs = watched.losses()
    found = []
    taken: set[int] = set()
    for registered, coefficient, loss in pairs:
        gradient = pushed(loss.inputs, leaves, arrived)
        if gradient is None or not bool(gradient.isfinite().all()):
            continue
        if loss.targets is None:
            targets = loss.targets_behind(gradient)
            if targets is None:
                whole = len(pairs) == 1 and watched.part == 1
                factor = factor_of_value(coefficient, loss, gradient, value) if whole else None
                found += [Found(factor, loss, registered, loss.cases, 1.0, spec)] if factor is not None else []
                continue
            loss.with_targets(targets)
        own = torch.autograd.grad(
            coefficient * loss.evaluate() / loss.cases, leaves, allow_unused=True, retain_graph=True
        )
        mine = [n for n, one in enumerate(own) if one is not None]
        factor = None if taken & {*mine} else ratio([arrived[n] for n in mine], [own[n] for n in mine])
        taken |= {*mine}
        if factor is not None:
            cases = round(loss.cases / watched.part)
            found.append(Found(factor / watched.part, loss, registered, cases, counted(loss), spec))
    return found


def pushed(inputs: Tensor, leaves: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor | None:
    """The gradient of `inputs` that arrives at the leaves as `vectors`, if every element of the former is a function of
    one of the latter: Jᵀ g = v has the solution g = J v / diag(J Jᵀ) then. J in reverse mode twice."""
    if not inputs.requires_grad:
        return None
    dummy = torch.zeros_like(inputs, requires_grad=True)
    wanted = [n for n, leaf in enumerate(leaves) if leaf.requires_grad]
    pulled = torch.autograd.grad(
        inputs, [leaves[n] for n in wanted], dummy, create_graph=True, retain_graph=True, materialize_grads=True
    )
    live = [(one, n) for one, n in zip(pulled, wanted, strict=True) if one.requires_grad]

    def derivative(of: Sequence[Tensor]) -> Tensor:
        directions = [of[n].to(one) for one, n in live]
        (found,) = torch.autograd.grad([one for one, _ in live], dummy, directions, retain_graph=True)
        return found

    ones = torch.autograd.grad(
        inputs, leaves, torch.ones_like(inputs), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return derivative(vectors) / derivative(ones)


def ratio(arrived: Sequence[Tensor], own: Sequence[Tensor]) -> float | None:
    """f if the one gradient is f times the other."""
    d = torch.cat([one.flatten().double() for one in arrived])
    r = torch.cat([one.flatten().double() for one in own])
    size = float(r @ r)
    if not size or not bool(d.isfinite().all()) or not float(d.norm()):
        return None
    factor = float(d @ r) / size
    rounding = max(PROPORTIONAL, *(16 * torch.finfo(one.dtype).eps for one in arrived))
    apart = float((d - factor * r).norm())
    return factor if factor > 0 and apart <= rounding * float(d.norm()) else None


def counted(loss: LossFunction) -> float:
    """The part of the cases that has a target."""
    if not isinstance(loss, Categorical) or loss.targets is None or loss.targets.is_floating_point():
        return 1.0
    return max(1, int((loss.targets != -100).sum())) / loss.cases


def factor_of_value(coefficient: float, loss: LossFunction, gradient: Tensor, value: float | None) -> float | None:
    """The factor that a squared error of this value and this gradient has, if it is one that people write.

    |f c (m - t) / (var N)|² = 2 f c / (var N) · f c |m - t|² / (2 var N); other terms of the loss would hide it.
    """
    if not isinstance(loss, Normal) or not value or not 0 < value < math.inf:
        return None
    factor = float(gradient.double().square().sum()) * loss.var * loss.cases / (2 * coefficient * value)
    elements = loss.inputs.numel() / loss.cases
    usual = (1 / elements, loss.cases, 0.5, 2.0, 0.5 / elements, loss.cases / 2, loss.cases / elements)
    return next((float(one) for one in usual if abs(factor - one) <= EXACT * one), None)
