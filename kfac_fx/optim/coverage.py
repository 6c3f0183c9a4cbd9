"""Parameters that have a gradient and no curvature: the first step warns of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kfac_fx.compiled.loss_scale import LossScaleWarning
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.block import BlockOperator
from kfac_fx.passes.users_code import warn_user
from kfac_fx.recording.proof import NO_LOSS

CERTAINTY = 1e-7  # of the length of a gradient, for the root of the mean squared length of those of sampled targets
LISTED_PARAMETERS = 8  # parameters that a warning names


def check_coverage(estimator: FisherEstimator, gradients: Mapping[str, Tensor], whole: bool) -> None:
    """Warn of parameters of Fisher blocks that have a gradient and no curvature.

    Their step would follow the gradient alone. This happens if the predictive distributions of the
    whole batch are certain, as those of a saturated softmax; and if forward computes losses of which only some are
    distributions that the library knows. Parameters in no block follow the first-order rule; they are right.

    Curvature is too little if √tr F is below `CERTAINTY` of the gradient's length. If targets were samples of the
    predictive distributions, tr F would be the mean squared length of the gradients of cases. So the targets are as far
    away as if a Normal distribution missed them by ten million deviations.

    Args:
        gradients: by parameter.
        whole: whether one graph is the whole model. A registered loss then depends on all parameters of blocks.
    """
    curved: dict[str, Tensor] = {}
    for block in (block for block in estimator.blocks.values() if block.group.here):
        flat = ~block.factors["G" if "G" in block.factors else "F"].moment.any()
        lengths = [gradients[name].norm().to(flat.device) for name in block.registration.owners if name in gradients]
        far = bool(lengths) and root_of_trace(block) <= CERTAINTY * torch.stack(lengths).norm()
        curvature = ~(block.group.agreed(flat) | far)
        for name in block.registration.owners:
            curved[name] = curved[name] | curvature if name in curved else curvature
    names = [name for name in gradients if name in curved]
    if not names:
        return
    right = torch.stack([curved[name] | ~gradients[name].any() for name in names])
    wrong = [name for name, is_right in zip(names, right.tolist(), strict=True) if not is_right]
    if wrong:
        registrations = [block.registration for block in estimator.blocks.values()]
        behind = {
            name for registration in registrations if registration.reason == NO_LOSS for name in registration.owners
        }
        heads = [name for name in wrong if name in behind]
        wrong, certain = heads or wrong, not heads and (whole or len(wrong) == len(names))
        more = f" and {len(wrong) - LISTED_PARAMETERS:,} more" if len(wrong) > LISTED_PARAMETERS else ""
        cause, remedy = (
            (
                "the model is certain of its outputs, as a saturated softmax is, or a Normal distribution far away "
                "from its targets, so these parameters have no curvature to speak of",
                "Scale the inputs and the targets, or initialize the last layer with smaller weights",
            )
            if certain
            else (
                "the trained loss depends on parameters that no registered loss depends on",
                "Register all losses, as in loss=lambda outputs: [...], or train these parameters with another "
                "optimizer",
            )
        )
        warn_user(
            LossScaleWarning(
                f"{cause}: {', '.join(wrong[:LISTED_PARAMETERS])}{more}.\n"
                f"Without curvature their steps follow the gradients alone. {remedy}. This was seen at the first step, "
                "from gradients and factors."
            )
        )


def root_of_trace(block: BlockOperator) -> Tensor:
    """√tr F, 0-dim."""
    group, sizes = block.group, dict(zip("GA", block.group.whole_shape[1:], strict=True))
    sizes["F"] = math.prod(group.whole_shape)
    traces = [group.mean_eigenvalue(side)[block.member.start] * sizes[side.factor] for side in group.structure.sides]
    roots = [trace.sqrt() for trace in traces]
    root: Tensor = torch.linalg.vector_norm(roots[0] * roots[1] if len(roots) > 1 else roots[0])
    return root * group.positions()[block.member.start].sqrt()
