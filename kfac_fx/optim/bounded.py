"""The steps of "eigen_moments": Adam's, scaled by the exact Fisher of a batch now and then.

    θ <- θ - lr a d / r        d: Adam's step in the eigenbasis (`kfac_fx.optim.eigen_moments`); a = `RATE`

A *check*, at the first three steps and then every `damping_adaptation_interval` steps, computes on the step's batch,
with its exact Fisher F (one product with the Jacobian) and its loss h (`BatchLoss`):

    r <- max(t, √(r t), 0.95 min(1, r))
    t = max(lr ρ, min(1, max(√ρ, 1/3)))
                               ρ = a √(<d, F d> / (c max(1, h))), with c the `norm_constraint`. The squared Fisher norm
                               of the step is twice the Kullback-Leibler divergence between the predictions before and
                               after it. It is at most c max(1, h), as r >= lr ρ. A step that is far below this bound
                               gets longer, half of the way to it on a logarithmic scale, and at most three times; this
                               does not depend on lr, so that it leaves a schedule alone
    θ <- θ at the last check   if h has risen by more than is tolerated since then (`kfac_fx.optim.step_checks`), on the
                               present batch: m is forgotten, and r grows
    θ <- θ before the step     if h has risen by more than is tolerated in the step

A check is *calm* if it undid nothing and lr ρ <= 0.4 r, so that the squared norm is below a sixth of its bound. The
check after a calm one may come later (`kfac_fx.optim.schedule`).

Adam's rate alone suits many networks, but not deep ones without skips and norms: there the steps of all layers add up,
the loss is far from its quadratic model, and the bound is what makes training possible. The step along d that minimizes
the quadratic model is no substitute: it is several times too short, because directions of large curvature, along which
Adam's steps may oscillate, decide it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_fx.optim.groups import FlatParameters, Proposal
from kfac_fx.optim.step_checks import Check, StepSize, take, tolerated

RATE = 0.02
STRETCH = 3.0  # the largest multiple of Adam's step
CALM = 0.4  # of the bound, for the norm of a step
FALL = 0.95  # of r below 1, from one check to the next: a loss falls lower if its first steps are short


def move_bounded(
    size: StepSize, flat: FlatParameters, proposal: Proposal, bound: float, ok: Tensor, check: Check | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the proposed step divided by r.

    Args:
        bound: c.

    Returns (whether it was made, the predicted change, actual over predicted change): NaN without a check.
    """
    last = torch.where(size.ratio > 0, size.ratio, 1.0)
    if check is None:
        move = proposal.move / last
        ok = ok & flat.is_finite(move)
        flat.commit(Proposal(move, proposal.state), ok)
        nothing = torch.full_like(size.ratio, torch.nan)
        return ok, nothing, nothing
    fisher, slope, before = check.batch.along(check.parameters, flat.everywhere(proposal.move))
    longest = bound * torch.where(check.value.isfinite(), check.value, 1.0).clamp(min=1.0)
    norm = (fisher / longest).sqrt()
    ratio = next_divisor(last, norm, flat.largest_lr)
    move = proposal.move / ratio
    ok = ok & flat.is_finite(move) & fisher.isfinite()
    linear = slope / ratio if check.batch.observed else flat.inner(flat.g, move)
    predicted = linear + 0.5 * fisher / ratio.square()
    kept, change = take(flat, Proposal(move, proposal.state), check, before, linear, tolerated(check.value), ok)
    size.store(ok, ratio=torch.where(kept, ratio, 2 * ratio), value=check.value)
    size.calm.copy_(kept & (norm <= CALM * ratio))
    return kept, predicted, change / predicted


def next_divisor(last: Tensor, norm: Tensor, lr: Tensor) -> Tensor:
    """r; all are 0-dim. last: r at the last check. norm: lr ρ."""
    rho = norm / lr.clamp(min=torch.finfo(norm.dtype).tiny)
    target = torch.maximum(norm, rho.sqrt().clamp(min=1 / STRETCH, max=1.0))
    return torch.stack([target, (last * target).sqrt(), FALL * last.clamp(max=1.0)]).amax(0)
