"""Whether the loss that is trained is the loss whose curvature is estimated: seen at the first step, from its gradient.

K-FAC divides the gradient of one loss by the curvature of another, so a factor between the two, such as a sum over the
batch in the place of a mean, is a factor of every step. The gradient that the user's backward sends into the Fisher's
outputs tells it, without being told the loss: for targets that fit it, it must be that of the registered loss. What
else is in the user's loss, such as a penalty on parameters, does not go through those outputs. Where no targets fit,
nothing is said.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.losses import Categorical, Normal
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.losses.loss_spec import LossSpec
from kfac_fx.optim.watched import Watched

TOLERANCE = 1e-2  # of a factor; a weight on purpose is further away from 1
PROPORTIONAL = 1e-3  # relative error of a gradient that is a multiple of another, in float32
EXACT = 1e-4  # of a factor that is only told by the loss's value, which may hold other terms
LARGE = 2**13  # loss scales against underflow are powers of two from here on


class LossScaleWarning(UserWarning):
    """The loss that is trained is a multiple of the registered one, has its classes on another axis, or reaches other
    parameters."""

    __module__ = "kfac_fx"


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


def misplaced_classes(watched: Watched) -> list[str]:
    """What to write where the classes of the trained loss are on another axis than those of a Categorical: over its
    classes the gradient of a cross entropy sums to zero, whatever the targets and their weights."""
    leaves, pairs = watched.losses()
    lines = []
    for _, _, loss in pairs:
        gradient = pushed(loss.inputs, leaves, watched.arrived()) if isinstance(loss, Categorical) else None
        axis = None if gradient is None else axis_of_classes(gradient)
        if axis is not None:
            name, shape = type(loss).__name__, list(loss.inputs.shape)
            lines.append(
                f"the trained loss has its classes on axis {axis} of {shape}, and the registered {name} on the last: "
                f"write loss=lambda outputs: kfac_fx.losses.{name}(outputs.movedim({axis}, -1))."
            )
    return lines


def axis_of_classes(gradient: Tensor) -> int | None:
    """The axis between the first and the last that a gradient sums to zero over, if it does not over the last."""
    if gradient.ndim < 3:
        return None
    size = float(gradient.abs().sum())
    if not size or not math.isfinite(size):
        return None
    rest = {axis: float(gradient.sum(axis).abs().sum()) / size for axis in range(1, gradient.ndim)}
    *between, last = rest
    return next((axis for axis in between if rest[axis] <= PROPORTIONAL < TOLERANCE < rest[last]), None)


# --- what is said ---------------------------------------------------------------------------------------------------


def check(watched: Sequence[Watched], *, reduction: str, loss_scale: float, value: float | None) -> None:
    """Warn of a loss that is a multiple of the registered one, or has its classes on another axis.

    Args:
        watched: the forwards of a step. reduction: "mean" or "sum", as the user declared the loss.
        loss_scale: what the loss was multiplied with before the backward. value: of the whole loss, if known.
    """
    used = [one for one in watched if one.gradients]
    with torch.enable_grad():
        misplaced = [line for one in used[:1] for line in misplaced_classes(one)]
        each = [factors(one, value if len(used) == 1 else None) for one in used]
    if misplaced:
        warnings.warn(LossScaleWarning("\n".join([*dict.fromkeys(misplaced), WHY])), stacklevel=8)
        return
    if not each or any(len(found) != len(each[0]) for found in each):
        return
    lines = []
    for of_loss in zip(*each, strict=True):
        cases = sum(one.cases for one in of_loss)
        scales = [one.factor / loss_scale * cases / one.cases for one in of_loss]
        if reduction == "sum":
            scales = [scale / cases for scale in scales]
        factor = sum(scales) / len(scales)
        if any(abs(scale - factor) > TOLERANCE * factor for scale in scales):
            continue
        first = of_loss[0]
        right = (1.0, 1.0 / first.counted) if len(of_loss) == 1 else (1.0,)
        if is_loss_scale(factor, any(one.autocast for one in used)) and abs(factor - cases) > TOLERANCE * cases:
            continue
        if all(abs(factor - one) > TOLERANCE * one for one in right):
            lines.append(said(factor, first, cases, len(of_loss), reduction))
    if lines:
        warnings.warn(LossScaleWarning("\n".join([*dict.fromkeys(lines), WHY])), stacklevel=8)


def is_loss_scale(factor: float, autocast: bool) -> bool:
    """Whether it may be that of a GradScaler, which divides the gradients before the step."""
    power = round(math.log2(factor))
    return power > 0 and abs(factor / 2**power - 1) < PROPORTIONAL and (autocast or factor >= LARGE)


WHY = (
    "Curvature and gradient must be those of one loss: damping and step size depend on it. This was seen at the first "
    "step, from the gradient of the model's outputs."
)


def wrong_reduction(reduction: str, cases: int) -> list[tuple[float, str]]:
    """Factors that come of a division by the number of cases too many or too few, and what to write."""
    if reduction == "mean":
        return [
            (cases, "it is their sum: divide it by the number of cases, or write KFAC(..., reduction='sum')"),
            (1 / cases, "it is divided by the number of cases twice: a mean is already"),
        ]
    return [
        (cases, "it is multiplied by the number of cases: a sum over them needs no factor"),
        (1 / cases, "it is their mean: write KFAC(..., reduction='mean')"),
    ]


def said(factor: float, found: Found, cases: int, forwards: int, reduction: str) -> str:
    """What the factor is, and what to write instead."""
    loss, elements = found.loss, found.loss.inputs.numel() / found.loss.cases
    name, weight = type(loss).__name__, found.coefficient * factor
    told = (
        f"the trained loss is {factor:.4g} times the {reduction} of the registered {name} loss over its {cases} cases"
    )
    more = f", var={loss.var:g}" if isinstance(loss, Normal) else ""
    registered = (
        f"register it as loss=lambda outputs: ({weight:.4g}, kfac_fx.losses.{name}(outputs{more}))"
        if isinstance(found.spec, LossSpec)
        else f"register it on a LayerCollection with coeff={weight:.4g}"
    )
    known = [
        *wrong_reduction(reduction, cases),
        (forwards, f"the step has {forwards} forwards: divide the loss of each by {forwards}"),
        (1 / elements, f"it is a mean over the {elements:.0f} elements of a case, too: sum over them, or {registered}"),
    ]
    usual = next((text for one, text in known if abs(factor - one) <= TOLERANCE * one), None)
    return f"{told}; {usual or f'take the factor out, or {registered}'}."
