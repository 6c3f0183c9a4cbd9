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

import torch
from torch import Tensor

from kfac_fx.losses import Categorical, Normal
from kfac_fx.losses.registered import LossSpec
from kfac_fx.optim.loss_factors import PROPORTIONAL, Found, factors, pushed
from kfac_fx.optim.watched import Watched

TOLERANCE = 1e-2  # of a factor; a weight on purpose is further away from 1
SCALER, LARGE = 2**4, 2**13  # a loss scale is a power of two: from here on it may be one, and it is


class LossScaleWarning(UserWarning):
    """The loss that is trained is a multiple of the registered one, has its classes on another axis, or reaches other
    parameters."""

    __module__ = "kfac_fx"


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


def check(watched: Sequence[Watched], *, reduction: str, loss_scale: float, value: float | None, riding: bool) -> None:
    """Warn of a loss that is a multiple of the registered one, or has its classes on another axis.

    Args:
        watched: the forwards of a step. reduction: "mean" or "sum", as the user declared the loss.
        loss_scale: what the loss was multiplied with before the backward, if the optimizer was told of it.
        value: of the whole loss, if known. riding: statistics are of the gradients as they are in that backward.
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
    autocast = any(one.autocast for one in used)
    lines = []
    for of_loss in zip(*each, strict=True):
        cases = sum(one.cases for one in of_loss)
        factor = factor_of_step(of_loss, cases, reduction, loss_scale)
        if factor is None or is_right(factor, of_loss):
            continue
        divided = not riding and is_loss_scale(factor, autocast)
        if not divided or near(factor, cases):
            lines.append(said(factor, of_loss[0], cases, len(of_loss), reduction))
    if lines:
        warnings.warn(LossScaleWarning("\n".join([*dict.fromkeys(lines), WHY])), stacklevel=8)


def factor_of_step(of_loss: Sequence[Found], cases: int, reduction: str, loss_scale: float) -> float | None:
    """Of one loss in all forwards of a step, as a multiple of its mean, or sum, over all cases; None if they differ."""
    scales = [one.factor / loss_scale * cases / one.cases for one in of_loss]
    if reduction == "sum":
        scales = [scale / cases for scale in scales]
    factor = sum(scales) / len(scales)
    return factor if all(near(scale, factor) for scale in scales) else None


def is_right(factor: float, of_loss: Sequence[Found]) -> bool:
    """Cases without a target count, or do not."""
    return near(factor, 1.0) or (len(of_loss) == 1 and near(factor, 1.0 / of_loss[0].counted))


def near(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * other


def is_loss_scale(factor: float, autocast: bool) -> bool:
    """Whether it may be that of a GradScaler, which divides the gradients before the step."""
    return is_power_of_two(factor) and (autocast or factor >= LARGE)


def is_power_of_two(factor: float) -> bool:
    power = round(math.log2(factor))
    return power > 0 and abs(factor / 2**power - 1) < PROPORTIONAL


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
    usual = next((text for one, text in known if near(factor, one)), None)
    scaler = "if a GradScaler multiplies it, write KFAC(..., grad_scaler=scaler); else "
    other = (scaler if is_power_of_two(factor) and factor >= SCALER else "") + f"take the factor out, or {registered}"
    return f"{told}; {usual or other}."
