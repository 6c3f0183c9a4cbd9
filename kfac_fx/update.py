"""One update of the parameters of a step, in pieces: propose, predict, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.first_order import FirstOrder
from kfac_fx.momentum import MomentumRule, Preconditioner, Tensors
from kfac_fx.quadratic import QuadraticModel, inner, inner_products, slopes

Products = Callable[[Sequence[Tensors]], Tensor]


@dataclass(frozen=True)
class Work:
    """What an update is made of, by parameter name.

    g: gradients, in float32 at least. state: what is kept between steps, written in place. lr, weight_decay: 0-dim
    tensors, one a parameter, so that a compiled update is not specialized to their values; None: no decay anywhere.
    """

    parameters: Tensors
    g: Tensors
    state: Tensors
    lr: Tensors
    weight_decay: Tensors | None

    def displacement(self, updates: Tensors) -> Tensors:
        """δ = -lr (Δ + weight_decay θ), in the precision of the updates Δ."""
        if self.weight_decay is None:
            return {name: -self.lr[name] * update for name, update in updates.items()}
        return {
            name: -self.lr[name] * (update + self.weight_decay[name] * self.parameters[name].to(update.dtype))
            for name, update in updates.items()
        }

    def commit(self, moves: Tensors, state: Tensors, ok: Tensor) -> None:
        """Add the moves and store the new state; where `ok` is False everything stays as it was."""
        for name, move in moves.items():
            self.parameters[name].add_(torch.where(ok, move, 0))
        for name, new in state.items():
            self.state[name].copy_(torch.where(ok, new, self.state[name]))


@dataclass(frozen=True)
class Proposal:
    """moves: δ by parameter; state: the new state."""

    moves: Tensors
    state: Tensors


def advance(rule: MomentumRule, work: Work, precondition: Preconditioner, ok: Tensor) -> Tensor:
    """A whole step of "regular" or "adam"; returns whether it was made."""
    proposal = propose(rule, work, precondition)
    ok = ok & all_finite(proposal.moves)
    work.commit(proposal.moves, proposal.state, ok)
    return ok


def advance_first_order(rule: FirstOrder, work: Work, ok: Tensor) -> None:
    updates, state = rule.propose(work.g, work.state)
    work.commit(work.displacement(updates), state, ok)


def propose(rule: MomentumRule, work: Work, precondition: Preconditioner) -> Proposal:
    velocity, updates = rule(work.g, work.state, precondition, work.lr)
    return Proposal(work.displacement(updates), velocity)


def propose_quadratic(
    work: Work, precondition: Preconditioner, products: Products, damping: Tensor, momentum: float | None
) -> tuple[Proposal, QuadraticModel, Tensor]:
    """The best step along d₁ = P g and d₂ = -v, the previous update: v <- -(α d₁ + μ d₂) = μ v - α P g.

    momentum: a fixed μ, or None. Returns the proposal, the model and its solution (α, μ). Where the model is not
    finite, the moves are not.
    """
    first = precondition(work.g)
    directions = [first, {name: -v for name, v in work.state.items()}]
    model = QuadraticModel(products(directions), inner_products(directions), slopes(work.g, directions))
    s = model.best(damping)
    if momentum is not None:
        s = model.best_with_momentum(damping, torch.full_like(s[0], momentum))
    s = torch.where(model.fisher.isfinite().all(), s, torch.nan)
    velocity = {name: s[1] * v - s[0] * first[name] for name, v in work.state.items()}
    return Proposal(work.displacement(velocity), velocity), model, s


def predict_by_blocks(work: Work, moves: Tensors, multiply: Callable[[Tensors], Tensors], excess: Tensor) -> Tensor:
    """<g, δ> + ½ <δ, (F̂ + λ I) δ> - ½ excess |δ|², with F̂ the block-diagonal Fisher.

    multiply: the damped F̂. excess: the part of its damping that is no curvature of the loss.
    """
    return inner(work.g, moves) + 0.5 * (inner(moves, multiply(moves)) - excess * inner(moves, moves))


def predict_exactly(work: Work, moves: Tensors, products: Products, l2_reg: float) -> Tensor:
    """<g, δ> + ½ <δ, (F + l2 I) δ>, with the exact Fisher of the batch."""
    model = QuadraticModel(products([moves]), inner_products([moves]), slopes(work.g, [moves]))
    return model.change(torch.ones_like(model.slopes), l2_reg)


def all_finite(tensors: Tensors) -> Tensor:
    """A 0-dim bool. A sum shows every NaN and infinity, and costs a thirtieth of a maximum norm on a CPU."""
    return torch.stack([tensor.sum() for tensor in tensors.values()]).sum().isfinite()
