"""One update of the parameters of a step, in pieces: propose, predict, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Flat, Tensors
from kfac_fx.optim.first_order import FirstOrder
from kfac_fx.optim.momentum import MomentumRule, Preconditioner
from kfac_fx.optim.quadratic import QuadraticModel, inner, inner_products, slopes

Products = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Work:
    """What an update is made of: vectors [P] over the parameters that have a gradient, in the order of `flat`.

    parameters: by name. g: the gradient, in float32 at least. state: what is kept between steps, written in place. lr,
    momentum, weight_decay: 0-dim tensors or, where groups differ, [P], so that a compiled update is not specialized to
    their values; None: no decay anywhere, and a momentum that is no option of groups.
    """

    flat: Flat
    parameters: Tensors
    g: Tensor
    state: Tensors
    lr: Tensor
    momentum: Tensor | None
    weight_decay: Tensor | None

    def displacement(self, update: Tensor) -> Tensor:
        """δ = -lr (Δ + weight_decay θ), in the precision of the update Δ."""
        if self.weight_decay is None:
            return -self.lr * update
        theta = self.flat.joined(self.parameters).to(update.dtype)
        return -self.lr * (update + self.weight_decay * theta)

    def commit(self, proposal: Proposal, ok: Tensor) -> None:
        """Add the move and store the new state; where `ok` is False everything stays as it was. Overwrites the move."""
        self.flat.add_to(self.parameters, proposal.move.masked_fill_(~ok, 0))
        for name, new in proposal.state.items():
            torch.where(ok, new, self.state[name], out=self.state[name])


@dataclass(frozen=True)
class Proposal:
    """move: δ; state: the new state."""

    move: Tensor
    state: Tensors


def advance(rule: MomentumRule, work: Work, precondition: Preconditioner, ok: Tensor) -> Tensor:
    """A whole step of "regular" or "adam"; returns whether it was made."""
    proposal = propose(rule, work, precondition)
    ok = ok & is_finite(proposal.move)
    work.commit(proposal, ok)
    return ok


def advance_first_order(rule: FirstOrder, work: Work, ok: Tensor) -> None:
    work.commit(propose_first_order(rule, work), ok)


def propose_first_order(rule: FirstOrder, work: Work) -> Proposal:
    update, state = rule.propose(work.g, work.state, work.flat)
    return Proposal(work.displacement(update), state)


def propose(rule: MomentumRule, work: Work, precondition: Preconditioner) -> Proposal:
    assert work.momentum is not None, f"bug in kfac_fx: groups without a momentum for {rule.kind!r}"
    velocity, update = rule(work.g, work.state["velocity"], work.momentum, precondition, work.lr)
    return Proposal(work.displacement(update), {"velocity": velocity})


def propose_quadratic(
    work: Work, precondition: Preconditioner, products: Products, damping: Tensor, momentum: float | None
) -> tuple[Proposal, QuadraticModel, Tensor]:
    """The best step along d₁ = P g and d₂ = -v, the previous update: v <- -(α d₁ + μ d₂) = μ v - α P g.

    momentum: a fixed μ, or None. Returns the proposal, the model and its solution (α, μ). Where the model is not
    finite, the move is not.
    """
    v = work.state["velocity"]
    directions = [precondition(work.g), -v]
    model = QuadraticModel(products(directions), inner_products(directions), slopes(work.g, directions))
    s = model.best(damping)
    if momentum is not None:
        s = model.best_with_momentum(damping, torch.full_like(s[0], momentum))
    s = torch.where(model.fisher.isfinite().all(), s, torch.nan)
    velocity = s[1] * v - s[0] * directions[0]
    return Proposal(work.displacement(velocity), {"velocity": velocity}), model, s


def predict_by_blocks(work: Work, move: Tensor, multiply: Callable[[Tensor], Tensor], excess: Tensor) -> Tensor:
    """<g, δ> + ½ <δ, (F̂ + λ I) δ> - ½ excess |δ|², with F̂ the block-diagonal Fisher.

    multiply: the damped F̂. excess: the part of its damping that is no curvature of the loss.
    """
    return inner(work.g, move) + 0.5 * (inner(move, multiply(move)) - excess * inner(move, move))


def predict_exactly(work: Work, move: Tensor, products: Products, l2_reg: float) -> Tensor:
    """<g, δ> + ½ <δ, (F + l2 I) δ>, with the exact Fisher of the batch."""
    model = QuadraticModel(products([move]), inner_products([move]), slopes(work.g, [move]))
    return model.change(torch.ones_like(model.slopes), l2_reg)


def is_finite(vector: Tensor) -> Tensor:
    """A 0-dim bool. A sum shows every NaN and infinity, and costs a thirtieth of a maximum norm on a CPU."""
    return vector.sum().isfinite()
