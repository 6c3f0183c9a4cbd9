"""The updates of a step without the quadratic model: by momentum, and of the first-order rule."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.groups import FlatParameters, Proposal
from kfac_fx.optim.rules import (
    FirstOrder,
    MomentumRule,
    Product,
    StepBound,
)


def move_in_blocks(
    rule: MomentumRule, flat: FlatParameters, precondition: Product, bound: StepBound | None, ok: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A whole update of "regular" or "adam", compiled as one. Returns whether it was made, and κ of the proposal."""
    proposal = propose_by_momentum(rule, flat, precondition, bound)
    ok = ok & flat.is_finite(proposal.move)
    flat.commit(proposal, ok)
    return ok, proposal.kappa


def first_order_update(rule: FirstOrder, flat: FlatParameters) -> tuple[tuple[Tensor, Tensors], Tensor]:
    """An update of the first-order rule, compiled as one: (its move and its new state, whether both are finite).

    A gradient whose square is infinite would give a finite move, and none ever after.
    """
    update, new = rule(flat.g, flat.state, flat.flat)
    move = flat.displacement(update)
    finite = torch.stack([flat.is_finite(move), *map(flat.is_finite, new.values())]).all()
    return (move, new), finite


def propose_by_momentum(
    rule: MomentumRule, flat: FlatParameters, precondition: Product, bound: StepBound | None
) -> Proposal:
    assert flat.momentum is not None, f"bug in kfac_fx: groups without a momentum for {rule.kind!r}"
    velocity, update, kappa = rule(flat.g, flat.state["velocity"], flat.momentum, precondition, flat.lr, flat.inner)
    if bound is not None:  # the velocity stays as it is: momentum is that of an optimizer without the bound
        assert flat.first_lr is not None, "bug in kfac_fx: a bound on steps, and groups without a first lr"
        update, kappa = bound(update, flat.lr, flat.first_lr)
    return Proposal(flat.displacement(update), {"velocity": velocity}, kappa)
