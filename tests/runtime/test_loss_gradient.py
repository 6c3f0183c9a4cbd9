"""The gradient that arrives at the outputs, and its factor: the functions that read them, on small tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.compiled import loss_scale
from kfac_fx.compiled.loss_scale import (
    LossFactor,
    SquaredError,
    Watched,
    advice,
    axis_of_classes,
    enough,
    factor_of_step,
    factors,
    factors_of_squares,
    first,
    gradient_behind,
    is_loss_scale,
    is_right,
    near,
    part_with_targets,
    ratio,
    short_name,
)
from kfac_fx.losses import Categorical, Normal, OnehotCategorical
from kfac_fx.losses.declared import LossSpec, RegisteredLosses, loss_from
from kfac_fx.passes import results
from tests.tables import pairs

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.tensor([0, 3, 1, 1, 2, 0])


def watched_of(loss: Callable[[Tensor], Any], outputs: Tensor, cases: int | None = None, part: float = 1.0) -> Watched:
    """A forward that returned its only Fisher output, under a registered loss."""
    spec = loss_from(loss)
    losses = SimpleNamespace(on=lambda tree, _, targets, kept: spec(tree, targets), averaged=list)
    recorder = SimpleNamespace(loss=spec, losses=losses, whole=False)
    structure = results.tree_flatten(outputs)[1]
    return Watched(
        cast(Any, recorder), [outputs], structure, [0], [first(outputs, cases)], None, {}, cases, part, False
    )


# --- what arrives ---------------------------------------------------------------------------------------------------


def test_gradients_of_several_backwards_add_up() -> None:
    forward = watched_of(Categorical, LOGITS)
    for scale in (1.0, 2.0):
        forward.take(0, torch.full_like(LOGITS, scale))
    (arrived,) = forward.arrived()
    assert torch.equal(arrived, torch.full_like(LOGITS, 3.0))


def test_of_a_part_only_its_cases_arrive() -> None:
    forward = watched_of(Categorical, LOGITS, cases=2, part=1 / 3)
    forward.take(0, LOGITS)
    (arrived,) = forward.arrived()
    assert torch.equal(arrived, LOGITS[:2])


def test_a_number_s_gradient_arrives_through_its_own_inner_gradients() -> None:
    forward = watched_of(Categorical, LOGITS)
    forward.inner = {0: [2 * torch.ones_like(LOGITS)]}
    forward.take(0, torch.tensor(3.0))
    assert torch.equal(forward.arrived()[0], torch.full_like(LOGITS, 6.0))


@pytest.mark.parametrize(
    ("shapes", "limit", "expected"),
    [
        ([(8, 4)], 32, (None, 1.0)),
        ([(8, 4)], 20, (5, 5 / 8)),
        ([(8, 4)], 2, (1, 1 / 8)),
        ([(8, 4), (6, 4)], 20, (0, 0.0)),  # cases of different numbers
        ([(8, 4), ()], 20, (0, 0.0)),  # a number has no cases
    ],
)
def test_of_large_outputs_the_first_cases_are_enough(
    shapes: list[tuple[int, ...]], limit: int, expected: tuple[int | None, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "LIMIT", limit)
    assert enough([torch.zeros(shape) for shape in shapes]) == expected


# --- factors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 0.25, 6.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_factor_of_a_cross_entropy_is_found(factor: float, scaled: bool) -> None:
    """For targets that are told by the gradient alone."""
    make = (lambda y: Categorical(y / 5)) if scaled else Categorical
    leaf = LOGITS.clone().requires_grad_()
    (factor * F.cross_entropy(leaf / 5 if scaled else leaf, TARGETS)).backward()
    forward = watched_of(make, LOGITS)
    assert leaf.grad is not None
    forward.take(0, leaf.grad)
    (told,) = factors(forward, None)
    assert told.multiple == pytest.approx(factor) and (told.cases, told.with_targets) == (6, 1.0)


def test_a_gradient_that_no_targets_fit_tells_nothing() -> None:
    leaf = LOGITS.clone().requires_grad_()
    F.cross_entropy(leaf, TARGETS, label_smoothing=0.1).backward()
    forward = watched_of(Categorical, LOGITS)
    assert leaf.grad is not None
    forward.take(0, leaf.grad)
    assert factors(forward, None) == []


def test_the_gradient_behind_an_elementwise_function_is_found() -> None:
    leaf = LOGITS.clone().requires_grad_()
    inputs, gradient = 3 * leaf.T + leaf.T.exp(), torch.randn(4, 6, dtype=torch.float64)
    (arrived,) = torch.autograd.grad(inputs, leaf, gradient, retain_graph=True)
    found = gradient_behind(inputs, [leaf], [arrived])
    assert found is not None
    torch.testing.assert_close(found, gradient)
    assert gradient_behind(LOGITS, [leaf], [arrived]) is None
    elsewhere = torch.randn(2, 3, requires_grad=True)
    assert gradient_behind(inputs, [elsewhere], [arrived]) is None  # as logits inside of an object are of no output


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        (3 * LOGITS, 3.0),
        (3 * LOGITS * (1 + 1e-4), 3.0003),
        (LOGITS + 0.1, None),  # no multiple
        (-LOGITS, None),
        (0 * LOGITS, None),
        (LOGITS / 0, None),
    ],
)
def test_a_ratio_is_that_of_proportional_gradients(arrived: Tensor, expected: float | None) -> None:
    assert ratio([arrived], [LOGITS]) == (expected if expected is None else pytest.approx(expected))
    assert ratio([arrived], [torch.zeros_like(LOGITS)]) is None


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.5, 6.0, 10.0, 1e-3, 0.37])
def test_a_squared_error_s_factor_is_told_by_its_value_if_people_write_it(factor: float) -> None:
    loss = Normal(LOGITS, var=0.5)
    error = LOGITS - 0.3
    value = factor * float(error.square().sum()) / 6
    gradient = factor * 2 * error / 6
    square = SquaredError(loss, 1.0, gradient)
    assert factors_of_squares([square], value) == [(pytest.approx(factor), factor != 0.37)]
    assert all(factors_of_squares([square], bad) is None for bad in (None, 0.0, math.nan, math.inf))
    still = SquaredError(loss, 1.0, 0 * gradient)
    assert factors_of_squares([still], value) is None and factors_of_squares([], value) is None


@pairs(
    ("parts", [1, 3]),
    (
        "factors, told",
        [((1, 1), True), ((1, 10), True), ((100, 1), True), ((5, 5), True), ((0.37, 1), False), ((1.7, 11.3), False)],
    ),
)
def test_one_value_tells_the_factor_of_one_of_several_squared_errors(
    factors: tuple[float, float], told: bool, parts: int
) -> None:
    squares, value = [], 0.0
    for number, factor in enumerate(factors):
        loss, weight, error = Normal(LOGITS, var=0.5 + number), 1.0 + number, (LOGITS - 0.3 * number) / 3
        scale = factor / parts * weight / (loss.var * len(LOGITS))
        squares.append(SquaredError(loss, weight, scale * error))
        value += scale * float(error.square().sum()) / 2
    expected = [(pytest.approx(factor / parts), True) for factor in factors]
    assert factors_of_squares(squares, value, parts) == (expected if told else None)


def test_cases_without_a_target_are_told() -> None:
    loss = Categorical(LOGITS)
    assert part_with_targets(loss) == 1.0
    loss.with_targets(torch.tensor([0, -100, 1, -100, 2, 0]))
    assert part_with_targets(loss) == pytest.approx(4 / 6)
    classes = torch.nn.functional.one_hot(torch.arange(6) % 3, 3)  # whole numbers, and none of them a class
    assert part_with_targets(OnehotCategorical(torch.randn(6, 3), classes)) == 1.0


# --- what a factor means --------------------------------------------------------------------------------------------


def told(multiple: float, cases: int = 8, with_targets: float = 1.0, spec: object = None) -> LossFactor:
    return LossFactor(multiple, Categorical(torch.zeros(cases, 3)), 1.0, cases, with_targets, spec)


def test_micro_batches_have_one_factor_or_none() -> None:
    assert factor_of_step([told(3.0)], "mean", 1.0) == 3.0
    assert factor_of_step([told(3.0)], "mean", 2.0) == 1.5
    assert factor_of_step([told(8.0)], "sum", 1.0) == 1.0
    assert factor_of_step([told(0.5), told(0.5)], "mean", 1.0) == 1.0
    assert factor_of_step([told(0.5), told(0.7)], "mean", 1.0) is None


def test_a_factor_is_right_with_or_without_the_cases_that_have_no_target() -> None:
    assert is_right(1.0, [told(1.0, with_targets=0.5)]) and is_right(2.0, [told(2.0, with_targets=0.5)])
    assert not is_right(2.0, [told(2.0)])


@pytest.mark.parametrize(
    ("multiple", "autocast", "may_be"),
    [(2.0**16, False, True), (64.0, False, False), (64.0, True, True), (65.0, True, False), (0.5, True, False)],
)
def test_large_powers_of_two_may_be_a_loss_scale(multiple: float, autocast: bool, may_be: bool) -> None:
    assert is_loss_scale(multiple, autocast) is may_be


def test_the_advice_names_the_usual_cause_and_the_code() -> None:
    collection, spec = told(8.0, spec=RegisteredLosses(())), told(3.0, spec=LossSpec(Categorical, "Categorical"))
    assert "it is their sum: divide it" in advice(8.0, [collection], 8, "mean")
    assert "the step has 2 forwards" in advice(2.0, [collection, collection], 8, "mean")
    assert advice(3.0, [collection], 8, "mean").endswith("register it on a LayerCollection with coeff=3.")
    assert advice(3.0, [told(8.0)], 8, "mean").endswith("let forward multiply its loss by 3.")
    several = advice(3.0, [replace(spec, of=2, is_single=False)], 8, "mean")
    assert "Categorical loss of [8, 3] over its" in several
    assert several.endswith("give it the coefficient of (3, kfac_fx.losses.Categorical(...)) in loss=.")
    assert advice(3.0, [spec], 8, "mean").endswith("loss=lambda outputs: (3, kfac_fx.losses.Categorical(outputs)).")


def test_classes_are_on_the_axis_that_the_gradient_sums_to_zero_over() -> None:
    scores = torch.randn(2, 3, 5, requires_grad=True)
    F.cross_entropy(scores, torch.randint(3, (2, 5)), weight=torch.tensor([1.0, 2.0, 0.5])).backward()
    assert scores.grad is not None
    assert axis_of_classes(scores.grad) == 1
    assert axis_of_classes(scores.grad.mT) is None  # on the last, where they belong
    assert axis_of_classes(scores.grad.transpose(0, 1)) is None  # on the first, where the cases are
    assert axis_of_classes(torch.zeros(2, 3, 5)) is None and axis_of_classes(torch.ones(2, 3)) is None


@pytest.mark.parametrize(("var", "name"), [(0.5, "mse"), (0.25, None)])
def test_a_loss_of_torch_is_named_only_if_it_is_that_of_the_variance(var: float, name: str | None) -> None:
    spec = LossSpec(lambda mean: Normal(mean, var), "Normal")
    factor = LossFactor(3.0, Normal(torch.zeros(8, 3), var), 1.0, 8, 1.0, spec)
    assert short_name(factor) == name


def test_near_is_within_a_hundredth() -> None:
    assert near(1.009, 1.0) and not near(1.011, 1.0)


@pytest.mark.parametrize(("cases", "part", "told"), [(None, 1.0, [0.5]), (3, 0.5, [])])
def test_a_squared_error_s_value_is_not_compared_with_a_part_of_its_cases(
    cases: int | None, part: float, told: list[float]
) -> None:
    forward = watched_of(lambda outputs: Normal(outputs, var=0.5), LOGITS, cases, part)
    gradient = LOGITS.flip(0)  # no multiple of the outputs, as that of residuals is
    forward.take(0, gradient)
    seen = gradient[:cases]
    value = float(seen.square().sum()) * 0.5 * len(seen) / (2 * 0.5)  # a factor of a half
    assert [factor.multiple for factor in factors(forward, value)] == pytest.approx(told)
