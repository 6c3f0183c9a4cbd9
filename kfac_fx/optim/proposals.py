"""The moves that a step proposes, the change of the loss that a move predicts, and the products that both need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.curvature import LossTerms, at_least_one, fisher_inner_products
from kfac_fx.optim.eigen_moments import adam_in_bases
from kfac_fx.optim.groups import FlatParameters, Proposal, propose_by_momentum
from kfac_fx.optim.rules import (
    FirstOrder,
    Preconditioner,
    Product,
    Products,
    QuadraticModel,
    StepBound,
    change_by_blocks,
    grafted,
    is_finite,
)
from kfac_fx.optim.step_checks import RATE
from kfac_fx.optim.step_state import StepState


def propose(state: StepState, flat: FlatParameters) -> Proposal:
    """The move of the parameters in Fisher blocks."""
    precondition = preconditioner(state, flat, state.multiply_inverse)
    if state.options.grafted:
        return propose_grafted(state, flat, precondition)
    if not state.options.quadratic:
        return propose_by_momentum(state.rule, flat, precondition, step_bound(state, flat))
    return propose_quadratic(state, flat, precondition)


def step_bound(state: StepState, flat: FlatParameters) -> StepBound | None:
    bound = state.options.bound_on("update")
    return None if bound is None else StepBound(bound, fisher_product(state, flat), flat.inner)


def propose_quadratic(state: StepState, flat: FlatParameters, precondition: Product) -> Proposal:
    """The best step along d₁ = P g and d₂ = -v, the previous update: v <- -(α d₁ + μ d₂) = μ v - α P g.

    "qmodel_fixedmu" fixes μ. If the model is not finite, the move is not. Stores -α, μ and the predicted change.
    """
    v = flat.state["velocity"]
    directions = [precondition(flat.g), -v]
    model = QuadraticModel.along(directions, flat.g, exact_products(state, flat), flat.inner)
    s = model.best(state.damping)
    if state.options.momentum is not None:  # None exactly for "qmodel"
        s = model.best_with_momentum(state.damping, torch.full_like(s[0], state.options.momentum))
    s = torch.where(model.fisher.isfinite().all(), s, torch.nan)
    state.qmodel_learning_rate.copy_(-s[0])
    state.qmodel_momentum.copy_(s[1])
    if flat.one_scale:
        state.predicted_change.copy_(model.change(flat.lr * s, state.options.l2_reg))
    velocity = s[1] * v - s[0] * directions[0]
    return Proposal(flat.displacement(velocity), {"velocity": velocity})


def propose_eigen(state: StepState, flat: FlatParameters, ok: Tensor) -> Proposal:
    """Adam's move in the eigenbasis at `RATE`; the gradient enters the second moments where `ok` is true."""
    momentum, decay = flat.momentum, state.options.decay_of_squares
    assert momentum is not None, "bug in kfac_fx: groups without a momentum for 'eigen_moments'"
    velocity = momentum * flat.state["velocity"] + (1 - momentum) * flat.g
    step = flat.state["step"] + 1
    # One momentum for all parameters needs a power a parameter, and not one an element.
    number = step if momentum.dim() == 0 else flat.flat.spread(dict(zip(flat.flat.shapes, step.unbind(), strict=True)))
    weight = 1 - momentum**number
    if momentum.dim() == 0:
        weight = flat.flat.spread(dict(zip(flat.flat.shapes, weight.unbind(), strict=True)))
    absent = preconditioner(state, flat, state.estimator.multiply_kept).absent
    parts, averages = (flat.flat.parts(vector) for vector in (flat.g, velocity / weight))
    gradient, average = flat.division.to_blocks(parts, averages)
    update = adam_in_bases(state.estimator, {**gradient, **absent}, {**average, **absent}, decay, ok, absent.keys())
    update = flat.division.from_blocks({name: update[name] for name in average}, averages)
    return Proposal(RATE * flat.displacement(flat.flat.joined(update)), {"velocity": velocity, "step": step})


def propose_grafted(state: StepState, flat: FlatParameters, precondition: Product) -> Proposal:
    """The direction P m̂ with the norms of Adam's step; NaN where a new average is not finite."""
    momentum = state.options.momentum
    assert momentum is not None, "bug in kfac_fx: 'grafted' without a momentum"
    adam, new = FirstOrder(betas=(momentum, state.options.decay_of_squares))(flat.g, flat.state, flat.flat)
    blocks = [block.registration.owners for block in state.estimator.blocks.values()]
    update = grafted(precondition(new["exp_avg"]), adam, flat.flat, blocks, flat.division)
    finite = torch.stack([is_finite(average) for average in new.values()]).all()
    return Proposal(flat.displacement(torch.where(finite, update, torch.nan)), new)


def predicted_change(state: StepState, flat: FlatParameters, move: Tensor) -> Tensor:
    """The change of the loss that the quadratic model predicts for a move, with weight decay, clipping and groups.

    The damping counts only as far as it is curvature of the loss: the l2 term.
    """
    if not state.options.quadratic:
        return change_by_blocks(
            flat.g, move, fisher_product(state, flat), state.estimator.damping - state.options.l2_reg, flat.inner
        )
    if flat.one_scale:
        return state.predicted_change.clone()
    model = QuadraticModel.along([move], flat.g, exact_products(state, flat), flat.inner)
    return model.change(torch.ones_like(model.slopes), state.options.l2_reg)


def preconditioner(state: StepState, flat: FlatParameters, multiply: Callable[[Tensors], Tensors]) -> Preconditioner:
    """`multiply` as a product with vectors: the parameters in Fisher blocks that have no gradient count as zero."""
    idle = state.estimator.idle(flat.parameters)
    absent = {
        name: state.scalar.new_zeros(flat.division.in_blocks(name, parameter))
        for parameter, name in state.names.items()
        if name in state.registered
        and name not in flat.parameters
        and name not in idle
        and flat.division.multiplies(name)
    }
    return Preconditioner(multiply, flat.flat, absent, flat.division)


def fisher_product(state: StepState, flat: FlatParameters) -> Preconditioner:
    """The product with the damped block-diagonal Fisher, with the present damping."""
    set_estimator_damping(state)
    return preconditioner(state, flat, state.estimator.multiply_kept)


def exact_products(state: StepState, flat: FlatParameters) -> Products:
    """Inner products of vectors in the exact Fisher of all micro-batches of the step, averaged by cases."""
    calls = state.forwards.seen.calls
    if not calls:
        raise RuntimeError(
            f"momentum_type={state.options.kind!r} computes with the step's batch, and net(x) was not "
            "called in training mode with gradients enabled since the last step"
        )
    ggn = state.options.estimation_mode.endswith("GGN")
    parameters = {name: parameter.detach() for parameter, name in state.names.items()}

    def products(vectors: Sequence[Tensor]) -> Tensor:
        by_name, total = [flat.everywhere(vector) for vector in vectors], torch.zeros_like(state.damping)
        cases: int | Tensor = 0
        for args, kwargs in calls:
            pairs: LossTerms = []

            def losses(at: Tensors, args: Any = args, kwargs: Any = kwargs) -> LossTerms:
                nonlocal pairs
                pairs = state.net.losses(*state.net.functional(at, args, kwargs), call=(args, kwargs))
                return pairs

            of_call = fisher_inner_products(
                losses, parameters, by_name, ggn=ggn, multiply_jacobian=state.multiply_jacobian
            )
            total, cases = total + pairs[0][1].cases * of_call, cases + pairs[0][1].cases
        if state.replicas.number > 1:  # batches may have different sizes, and no cases at all
            total, cases = state.replicas.total([total, torch.as_tensor(cases).to(total)])
        return total / at_least_one(cases)

    return products


def set_estimator_damping(state: StepState) -> None:
    state.estimator.damping.copy_(state.damping * state.options.precon_damping_mult)
