"""The formulas of the rules: momentum and its golden clipping, the quadratic model's golden numbers, the damping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kfac_fx.fisher.placement import UNDIVIDED
from kfac_fx.linalg.vectors import Flat
from kfac_fx.optim.groups import FirstOrder, FlatParameters, Preconditioner, StateVectors, inner, new_adam_state
from kfac_fx.optim.rule import AdaptedDamping
from kfac_fx.optim.rules import Adam, Regular
from kfac_fx.optim.rules.momentum import QuadraticModel, shrinking

# --- momentum -------------------------------------------------------------------------------------------------------

G = torch.tensor([1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 5.0])  # of two parameters [2, 2]
PG = torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
SQUARED_NORM = 174.0
ZERO = torch.zeros(8)
LR = torch.tensor(0.1)


def vectors(
    g: Tensor = G, velocity: Tensor = ZERO, momentum: Tensor = ZERO, lr: Tensor = LR, first_lr: Tensor | None = None
) -> FlatParameters:
    """A parameter whose gradient is g."""
    by_name, state = {"a": g}, StateVectors(("a",), {"a": g}, {"velocity": velocity}, {})
    flat = Flat({"a": g.shape})
    return FlatParameters(flat, UNDIVIDED, {}, {}, by_name, state, torch.inf, lr, lr.amax(), first_lr, momentum, None)


def of_gradient(bound: float | None) -> dict[str, Any]:
    """The options of a bound on lr P g."""
    return {"damping": 1.0, "norm_constraint": bound} | ({} if bound is None else {"norm_constraint_form": "gradient"})


@pytest.mark.parametrize(("constraint", "kappa"), [(None, 1.0), (10.0, 1.0), (0.5, 0.536056)])
def test_golden_clipping_of_the_fisher_norm(constraint: float | None, kappa: float) -> None:
    u, got = Regular(**of_gradient(constraint)).clipped(vectors(), G, lambda g: PG.clone())
    torch.testing.assert_close(u, kappa * PG)
    if constraint is None:
        assert got is None
    else:
        assert got is not None and got.item() == pytest.approx(kappa, abs=1e-6)
    if constraint == 0.5:  # the squared Fisher norm of the clipped step is the constraint itself
        assert kappa == pytest.approx(math.sqrt(constraint / (0.01 * SQUARED_NORM)), abs=1e-6)
        assert (0.01 * G * u**2 / PG).sum().item() == pytest.approx(constraint)


def test_the_constraint_weighs_every_parameter_with_its_own_learning_rate() -> None:
    lr = torch.tensor([0.1, 0.0]).repeat_interleave(4)
    u, _ = Regular(**of_gradient(0.25)).clipped(vectors(lr=lr), G, lambda g: PG.clone())
    norm = 0.01 * (G[:4] * PG[:4]).sum().item()
    torch.testing.assert_close(u[4:], math.sqrt(0.25 / norm) * PG[4:])


def test_a_zero_gradient_is_not_clipped_to_nan() -> None:
    u, kappa = Regular(**of_gradient(0.5)).clipped(vectors(ZERO), ZERO, lambda g: ZERO.clone())
    assert not u.any() and kappa == 1


def test_momentum_before_and_after_the_preconditioner() -> None:
    def halve(vector: Tensor) -> Tensor:
        return vector / 2

    for momentum in (torch.tensor(0.9), torch.tensor([0.9, 0.5]).repeat_interleave(4)):
        flat = vectors(velocity=PG, momentum=momentum)
        update, state, _ = Regular(damping=1.0).bounded(flat, halve, None)
        torch.testing.assert_close(state["velocity"], momentum * PG + G / 2)
        assert update is state["velocity"]
        update, state, _ = Adam(damping=1.0).bounded(flat, halve, None)
        torch.testing.assert_close(state["velocity"], momentum * PG + G)
        torch.testing.assert_close(update, state["velocity"] / 2)


def test_the_constraint_of_momentum_before_the_preconditioner_is_on_the_whole_update() -> None:
    bound, flat = 0.25, vectors(velocity=10 * PG, momentum=torch.tensor(0.9))
    update, _, _ = Adam(**of_gradient(bound)).bounded(flat, lambda vector: 2 * vector, None)
    squared = (LR.square() * update * update / 2).sum()  # the Fisher is the inverse of the preconditioner
    torch.testing.assert_close(squared, torch.tensor(bound, dtype=squared.dtype))


FISHER = torch.linspace(0.5, 4.0, 8)  # a diagonal one


def squared_norm(step: Tensor) -> float:
    return (step * FISHER * step).sum().item()


def bounded(bound: float, update: Tensor, lr: Tensor, first_lr: Tensor) -> tuple[Tensor, Tensor]:
    """κ Δ of a first update Δ, and κ."""
    flat = vectors(lr=lr, first_lr=first_lr)
    shortened, state, kappa = Regular(damping=1.0, norm_constraint=bound).bounded(
        flat, lambda g: update.clone(), lambda vector: FISHER * vector
    )
    assert kappa is not None and torch.equal(state["velocity"], update)  # momentum is that without the bound
    return shortened, kappa


@pytest.mark.parametrize("schedule", [1.0, 0.5, 2.0])
def test_the_bound_on_a_step_follows_the_learning_rate(schedule: float) -> None:
    lr = schedule * LR
    update, kappa = bounded(0.25, PG, lr, LR)
    step = lr * update
    assert squared_norm(step) == pytest.approx(0.25 * schedule**2)
    torch.testing.assert_close(update, kappa * PG)
    torch.testing.assert_close(step / step.norm(), PG / PG.norm())


def test_a_step_within_the_bound_is_left_alone() -> None:
    for update in (PG, ZERO):
        left, kappa = bounded(10 * squared_norm(LR * PG), update, LR, LR)
        assert torch.equal(left, update) and kappa == 1


def test_every_group_follows_its_own_schedule() -> None:
    first, ratio = (torch.tensor(values).repeat_interleave(4) for values in ([0.1, 0.3], [1.0, 0.5]))
    at_start, later = (lr * bounded(0.25, PG, lr, first)[0] for lr in (first, ratio * first))
    assert squared_norm(at_start) == pytest.approx(0.25)
    torch.testing.assert_close(later, ratio * at_start)


def test_a_learning_rate_that_began_at_zero_is_bounded_by_its_present_value() -> None:
    assert squared_norm(LR * bounded(0.25, PG, LR, torch.tensor(0.0))[0]) == pytest.approx(0.25)


def test_the_preconditioner_sees_zeros_where_there_is_no_gradient() -> None:
    seen: dict[str, Tensor] = {}

    def multiply(vector: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.update(vector)
        return {name: 2 * vector[name] for name in ("b", "c", "a")}

    flat = Flat({"a": torch.Size([2, 2]), "c": torch.Size([4])})
    product = Preconditioner(multiply, flat, {"b": torch.zeros(3)})(G)
    assert torch.equal(product, 2 * G)
    assert {name: part.tolist() for name, part in seen.items()} == {
        "a": [[1, 2], [3, 4]],
        "b": [0, 0, 0],
        "c": [2, 3, 4, 5],
    }


# --- the quadratic model --------------------------------------------------------------------------------------------


def double(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def dense_products(directions: Sequence[Tensor]) -> Tensor:
    matrix = torch.stack([direction.double() for direction in directions])
    return (matrix @ matrix.T).to(torch.promote_types(directions[-1].dtype, torch.float32))


DAMPING = double(0.5).squeeze()
# The reference's m, the damped matrix, and its part b from the damping.
M, B, C = double([2, 0.5], [0.5, 1]), double([0.2, 0.05], [0.05, 0.1]), double(-1, 0.25)
MODEL = QuadraticModel(fisher=M - B, products=B / DAMPING, slopes=C)


def test_golden_step_and_momentum() -> None:
    s = MODEL.best(DAMPING)
    torch.testing.assert_close(s, double(0.642857, -0.571429), atol=1e-6, rtol=0)
    torch.testing.assert_close(MODEL.change(s, DAMPING), double(-0.392857).squeeze(), atol=1e-6, rtol=0)
    torch.testing.assert_close(MODEL.change(s, 0.0), double(-0.432143).squeeze(), atol=1e-6, rtol=0)


def test_golden_step_with_a_fixed_momentum() -> None:
    s = MODEL.best_with_momentum(DAMPING, double(0.9).squeeze())
    torch.testing.assert_close(s, double(0.275, 0.9))
    torch.testing.assert_close(MODEL.change(s, DAMPING), double(0.554375).squeeze())


def test_golden_step_without_a_previous_update() -> None:
    zero = double([1.0, 0.0], [0.0, 0.0])
    model = QuadraticModel((M - B) * zero, (B / DAMPING) * zero, C * zero[0])
    for s in (model.best(DAMPING), model.best_with_momentum(DAMPING, double(0.0).squeeze())):
        torch.testing.assert_close(s, double(0.5, 0.0))
        torch.testing.assert_close(model.change(s, DAMPING), double(-0.25).squeeze())


def test_the_l2_term_of_the_loss_stays_in_the_predicted_change() -> None:
    s = MODEL.best(DAMPING)
    with_damping = MODEL.change(s, DAMPING)
    l2 = 0.2
    expected = with_damping - (1 - l2 / DAMPING) * 0.5 * (s @ B @ s)
    torch.testing.assert_close(MODEL.change(s, l2), expected)


def test_the_best_step_has_no_slope_left() -> None:
    s = MODEL.best(DAMPING).requires_grad_()
    (gradient,) = torch.autograd.grad(MODEL.change(s, DAMPING), s)
    torch.testing.assert_close(gradient, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_directions_give_the_step_along_the_first(dtype: torch.dtype) -> None:
    direction = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    model = QuadraticModel.along(
        [direction, -0.3 * direction], -direction, lambda directions: 2 * dense_products(directions)
    )
    s = model.best(torch.tensor(0.5, dtype=dtype))
    torch.testing.assert_close(s, torch.tensor([1 / 2.5, 0.0], dtype=dtype))


def test_directions_that_are_parallel_up_to_rounding_count_as_parallel() -> None:
    """Their determinant is a rounding error, which may be positive."""
    tiny = 4 * torch.finfo(torch.float64).eps
    fisher = torch.tensor([[1.0, 1.0], [1.0, 1.0 + tiny]], dtype=torch.float64)
    model = QuadraticModel(fisher, torch.zeros_like(fisher), torch.tensor([-1.0, -2.0], dtype=torch.float64))
    assert fisher.det() > 0
    assert model.best(torch.zeros((), dtype=torch.float64)).tolist() == [1.0, 0.0]


def test_a_zero_gradient_gives_a_zero_step() -> None:
    zero = torch.zeros(2, 2)
    model = QuadraticModel(zero, zero, zero[0])
    assert torch.equal(model.best(torch.tensor(0.5)), zero[0])
    assert torch.equal(model.best_with_momentum(torch.tensor(0.5), torch.tensor(0.9)), torch.tensor([0.0, 0.9]))


def test_nan_stays_nan() -> None:
    model = QuadraticModel(torch.full((2, 2), torch.nan), torch.eye(2), torch.ones(2))
    assert not model.change(model.best(torch.tensor(0.5)), 0.0).isfinite()


def test_inner_products_are_in_single_precision_at_least() -> None:
    a, b = torch.tensor([1.0, 2.0, 3.0]).bfloat16(), torch.tensor([3.0, 0.5, 2.0])
    assert inner(a, b).item() == 10.0
    assert inner(a, b).dtype is torch.float32
    model = QuadraticModel.along([a, b], b, dense_products)
    torch.testing.assert_close(model.products, torch.tensor([[14.0, 10.0], [10.0, 13.25]]))
    torch.testing.assert_close(model.slopes, torch.tensor([10.0, 13.25]))


def test_an_inner_product_of_many_terms_keeps_its_precision() -> None:
    ones = torch.ones(1 << 22)
    assert inner(0.1 * ones, ones).item() == pytest.approx(0.1 * (1 << 22), rel=1e-6)


# --- the damping ----------------------------------------------------------------------------------------------------

OMEGA = 0.95**5


@pytest.mark.parametrize(
    ("change", "predicted", "factor"),
    [
        (-0.9, -1.0, OMEGA),  # as good as predicted
        (-0.5, -1.0, 1.0),
        (-0.1, -1.0, 1 / OMEGA),  # far worse than predicted
        (-0.25, -1.0, 1.0),  # at a threshold, which is between "above" and "below"
        (-0.75, -1.0, 1.0),
        (0.3, -1.0, 1 / OMEGA),  # the loss rose
        (-0.3, 1.0, OMEGA),  # the model expected worse
        (0.3, 1.0, 1.0),
        (2.0, 1.0, OMEGA),  # by the ratio alone
        (math.nan, -1.0, 1.0),
        (math.inf, -1.0, 1 / OMEGA),
        (-0.3, math.nan, 1.0),
        (0.0, 0.0, 1.0),
    ],
)
def test_damping_follows_the_reduction_ratio(change: float, predicted: float, factor: float) -> None:
    before = torch.tensor(2.0, dtype=torch.float64)
    rule, numbers = AdaptedDamping(), (before.new_tensor(0.1), before, before + change, before.new_tensor(predicted))
    damping, rho = rule.adapted(*numbers)
    assert damping.dtype is torch.float64
    assert damping.item() == pytest.approx(0.1 * factor, rel=1e-14)
    expected = change / predicted if predicted else math.nan
    assert rho.item() == pytest.approx(expected, nan_ok=True)


def test_the_floor_holds_the_loss_s_own_l2_term() -> None:
    rule = AdaptedDamping(min_damping=1e-3, l2_reg=1e-2)
    one = torch.tensor(1.0)
    damping, _ = rule.adapted(torch.tensor(0.0112), one, one - 1, -one)
    assert damping.item() == pytest.approx(0.011)


def test_adaptation_is_due_at_the_end_of_every_interval() -> None:
    assert [step for step in range(12) if AdaptedDamping(damping_adaptation_interval=5).due(step)] == [4, 9]


# --- the first-order rule -------------------------------------------------------------------------------------------


def test_the_first_order_rule_is_adamw() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    reference = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9), eps=0.3, weight_decay=0.0)
    rule, flat = FirstOrder(betas=(0.8, 0.9), eps=0.3), Flat({"p": parameter.shape})
    state = {name: value.reshape(-1) for name, value in new_adam_state(parameter.detach()).items()}
    theta = parameter.detach().clone()
    for n in range(3):
        g = torch.sin(theta + n)
        update, state = rule(g, state, flat)
        theta -= 0.1 * update
        parameter.grad = g
        reference.step()
        torch.testing.assert_close(theta, parameter.detach())


# --- predictions ----------------------------------------------------------------------------------------------------


def test_the_change_by_blocks_counts_only_the_damping_that_is_curvature() -> None:
    g, move, fisher = double(1, -2), double(0.5, 0.25), double([2, 0.5], [0.5, 1])
    damping, l2 = 0.3, 0.1
    step = SimpleNamespace(
        g=g,
        flat=SimpleNamespace(inner=inner),
        estimator=SimpleNamespace(damping=torch.tensor(damping)),
        fisher_product=lambda v: fisher @ v + damping * v,
    )
    rule = Regular(damping=damping, adapt_damping=True, l2_reg=l2)
    change = rule.predicted_change(cast(Any, step), move)
    torch.testing.assert_close(change, g @ move + 0.5 * move @ (fisher + l2 * torch.eye(2)) @ move)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_with_one_bad_element_is_not_finite(value: float) -> None:
    vector = torch.ones(5)
    assert vectors(vector).gradient_is_finite()
    vector[3] = value
    assert not vectors(vector).gradient_is_finite()


@pytest.mark.parametrize("numbers", [(1.0, -1.0), (1e-30, 0.0), (math.nan, 0.0)])
def test_a_gradient_whose_numbers_cancel_or_are_small_is_other_than_zero(numbers: tuple[float, float]) -> None:
    assert vectors(torch.tensor(numbers)).has_gradient()


def test_a_gradient_of_zeros_is_none() -> None:
    assert not vectors(torch.zeros(5)).has_gradient()


def test_rounding_of_a_squared_norm_to_zero_or_below_leaves_a_step_as_it_is() -> None:
    assert [shrinking(0.1, torch.tensor(squared)).item() for squared in (0.0, -1e-9, 0.4)] == [1, 1, 0.5]
