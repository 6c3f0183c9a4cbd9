"""Parameters that the trained loss depends on, and none of the registered losses: seen at the first step.

Their Fisher is zero, so that a step would be their gradient divided by the damping alone. It happens where forward
computes losses of which only some are distributions that the library knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from kfac_fx.estimator import FisherEstimator
from kfac_fx.optim.loss_scale import LossScaleWarning

LISTED = 8


def check_coverage(estimator: FisherEstimator, gradients: Mapping[str, Tensor]) -> None:
    """Warn of parameters of Fisher blocks that have a gradient and no curvature. What is in no block follows the
    first-order rule, and is not meant.

    gradients: by the name of a parameter.
    """
    known = curved(estimator)
    names = [name for name in gradients if name in known]
    if not names:
        return
    right = torch.stack([known[name] | ~gradients[name].any() for name in names])
    found = [name for name, one in zip(names, right.tolist(), strict=True) if not one]
    if not found:
        return
    said = ", ".join(found[:LISTED]) + (f" and {len(found) - LISTED:,} more" if len(found) > LISTED else "")
    warnings.warn(
        LossScaleWarning(
            f"the trained loss depends on parameters that no registered loss depends on: {said}.\n"
            "Without curvature their steps are gradients divided by the damping. Register all losses, as in "
            "loss=lambda outputs: [...], or train these parameters with another optimizer. This was seen at the first "
            "step, from gradients and factors."
        ),
        stacklevel=6,
    )


def curved(estimator: FisherEstimator) -> dict[str, Tensor]:
    """By parameter, whether any of its blocks has curvature."""
    found: dict[str, Tensor] = {}
    for block in estimator.blocks.values():
        curvature = block.factors["G" if "G" in block.factors else "F"].moment.any()
        for name in block.registration.owners:
            found[name] = found[name] | curvature if name in found else curvature
    return found
