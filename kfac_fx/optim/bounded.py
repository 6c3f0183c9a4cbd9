"""The steps of "eigen_moments": as long as Adam's, and bounded by the exact Fisher of a batch now and then.

    θ <- θ - lr a d / r        d: Adam's step in the eigenbasis (`kfac_fx.optim.eigen_moments`); a = `RATE`

A *check*, at the first three steps and then every `damping_adaptation_interval` steps, computes on the step's batch,
with its exact Fisher F (one product with the Jacobian) and its loss h (`BatchLoss`):

    r <- max(ρ, √(r ρ))        ρ = max(1, lr a √(<d, F d> / (c max(1, h)))), with c the `norm_constraint`, so that the
                               squared Fisher norm of the step, twice the Kullback-Leibler divergence between the
                               predictions before and after it, is at most c max(1, h); r follows at once where it
                               grows
    θ <- θ at the last check   if h has risen by more than is tolerated since then (`kfac_fx.optim.step_checks`), on the
                               present batch: m is forgotten, and r grows
    θ <- θ before the step     if h has risen by more than is tolerated in the step

Adam's rate alone suits most networks, or a third of it does, but not deep ones without skips and norms: there the
steps of all layers add up, the loss is far from its quadratic model, and the bound is what makes training possible. The
step along d that minimizes the quadratic model is no substitute: it is several times too short, because directions of
large curvature, along which Adam's steps may oscillate, decide it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_fx.optim.groups import FlatParameters, Proposal
from kfac_fx.optim.step_checks import Check, StepSize, take, tolerated

RATE = 0.02


def move_bounded(
    size: StepSize, flat: FlatParameters, proposal: Proposal, bound: float, ok: Tensor, check: Check | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Take a step, r times shorter than proposed.

    Args:
        bound: c.

    Returns (whether it was made, the predicted change, actual over predicted change): NaN without a check.
    """
    if check is None:
        move = proposal.move / size.ratio.clamp(min=1.0)
        ok = ok & flat.is_finite(move)
        flat.commit(Proposal(move, proposal.state), ok)
        nothing = torch.full_like(size.ratio, torch.nan)
        return ok, nothing, nothing
    fisher, slope, before = check.batch.along(check.parameters, flat.everywhere(proposal.move))
    longest = bound * torch.where(check.value.isfinite(), check.value, 1.0).clamp(min=1.0)
    now = (fisher / longest).sqrt().clamp(min=1.0)
    ratio = torch.maximum(now, (size.ratio * now).sqrt())
    move = proposal.move / ratio
    ok = ok & flat.is_finite(move) & fisher.isfinite()
    linear = slope / ratio if check.batch.observed else flat.inner(flat.g, move)
    predicted = linear + 0.5 * fisher / ratio.square()
    kept, change = take(flat, Proposal(move, proposal.state), check, before, linear, tolerated(check.value), ok)
    size.store(ok, ratio=torch.where(kept, ratio, 2 * ratio), value=check.value)
    return kept, predicted, change / predicted
