"""Functions of parameters in a graph: means of filters in all spellings, gains, and factors that are no gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.expressions import Expressions
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.parametrization import ParameterExpr, Slice, unallocated
from kfac_fx.passes.parametrization import slice_of as all_of
from kfac_fx.passes.parametrizations.functions import Elementwise
from kfac_fx.passes.parametrizations.normalized import (
    Centered,
    Scaled,
    WithGain,
    dimensions_left,
    filters_only,
    is_mean,
)
from tests.compiler.toy import Toy, before

Function = Callable[..., Any]


def expressed(function: Function, **shapes: tuple[int, ...]) -> Expressions:
    return Expressions(before("express", Toy(lambda x, **parameters: x * function(**parameters), **shapes)))


def value_of(function: Function, **shapes: tuple[int, ...]) -> Any:
    """The value of what the function returns; None if it has none."""
    expressions = expressed(function, **shapes)
    product = [node for node in expressions.label if op_name(node) == "mul"][-1]
    return expressions.values.get(product.args[1])  # type: ignore[call-overload]


def slice_of(function: Function, **shapes: tuple[int, ...]) -> Slice:
    value = value_of(function, **shapes)
    assert isinstance(value, ParameterExpr) and len(value.slices) == 1
    return value.slices[0]


V = all_of("v", unallocated((6, 3, 2)))


# --- means ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "left"),
    [
        (lambda v: v.mean((1, 2), keepdim=True), [True, False, False]),
        (lambda v: v.mean((1, -1)), [True]),
        (lambda v: v.mean(2).mean(1), [True]),
        (lambda v: v.mean(2, keepdim=True).mean(1, keepdim=True), [True, False, False]),
        (lambda v: v.flatten(1).mean(1), [True]),
        (lambda v: v.mean((1, 2)).view(-1, 1, 1), [True]),
        (lambda v: torch.var_mean(v, (1, 2), keepdim=True)[1], [True, False, False]),
        (lambda v: torch.std_mean(v, dim=(1, 2))[1], [True]),
    ],
)
def test_a_mean_of_filters_is_known_in_all_its_spellings(mean: Function, left: list[bool]) -> None:
    expressions = expressed(lambda v: v.sin() + mean(v).sum(), v=(6, 3, 2))
    (total,) = [node for node in expressions.label if op_name(node) == "sum"]
    node: Any = total.args[0]
    assert dimensions_left(node, V, expressions.values) == left and is_mean(node, V, expressions.values)


@pytest.mark.parametrize(
    "mean",
    [
        lambda v, w: v.mean(1),  # not of the last dimension
        lambda v, w: v.mean((0, 1)),
        lambda v, w: v.mean(),
        lambda v, w: w.mean((1, 2)),  # of another parameter
        lambda v, w: (2 * v).mean((1, 2)),
        lambda v, w: v[:3].mean((1, 2)),
        lambda v, w: v.exp().mean((1, 2)),
        lambda v, w: v.permute(2, 1, 0).mean((1, 2)),
        lambda v, w: torch.var_mean(v, (1, 2))[0],
        lambda v, w: v.sum((1, 2)),
    ],
)
def test_other_numbers_are_no_means_of_filters(mean: Function) -> None:
    expressions = expressed(lambda v, w: v.sin() + w.sin() + mean(v, w).prod(), v=(6, 3, 2), w=(6, 3, 2))
    (total,) = [node for node in expressions.label if op_name(node) == "prod"]
    node: Any = total.args[0]
    assert not is_mean(node, V, expressions.values)


@pytest.mark.parametrize(
    ("left", "filters"),
    [([True], True), ([True, False], True), ([True, True], False), ([False, True], False), ([], False)],
)
def test_a_mean_leaves_the_filters_only(left: list[bool], filters: bool) -> None:
    assert filters_only(left) is filters


def test_a_weight_without_its_means_is_centered_along_its_first_dimension() -> None:
    (step,) = slice_of(lambda v: v - v.mean(1, keepdim=True), v=(6, 3)).through
    assert isinstance(step, Centered) and step.dim == 0 and step.layout.shape == (6, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda v: v - v.mean(0, keepdim=True),
        lambda v: v - v.mean(0)[:, None],  # as many means as filters, and none of them a filter's
        lambda v: 2 * v - v.mean(1, keepdim=True),
        lambda v: torch.sub(v, v.mean(1, keepdim=True), alpha=2),
        lambda v: v - v.amax(1, keepdim=True),
    ],
)
def test_other_differences_are_not_centered(function: Function) -> None:
    assert value_of(function, v=(3, 3)) is None


# --- gains ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "parameter", "through"),
    [
        (lambda v, g: v * g[:, None], "g", []),
        (lambda v, g: g.view(-1, 1) * v, "g", []),
        (lambda v, g: v / g[:, None], "g", ["reciprocal"]),
        (lambda v, g: v * g.exp()[:, None], "g", ["exp"]),
        (lambda v, g: v / g.exp()[:, None], "g", ["exp", "reciprocal"]),
        (lambda v, g: torch._weight_norm(v, g[:, None], 0), "g", []),
    ],
)
def test_the_factor_of_a_weight_is_its_gain(function: Function, parameter: str, through: list[str]) -> None:
    slice_ = slice_of(function, v=(6, 3), g=(6,))
    (step,) = slice_.through
    assert slice_.parameter == "v" and isinstance(step, WithGain) and step.gain is not None and step.dim == 0
    assert step.gain.parameter == parameter
    assert [f.function for f in step.gain.through if isinstance(f, Elementwise)] == through


@pytest.mark.parametrize("factor", [lambda g: g[:6, None], lambda g: torch.ones(6, 1)])
def test_a_factor_that_is_no_whole_parameter_is_no_gain(factor: Function) -> None:
    (step,) = slice_of(lambda v, g: v * factor(g), v=(6, 3), g=(8,)).through
    assert isinstance(step, Scaled) and step.gain is None


def test_a_factor_of_the_inputs_scales_them() -> None:
    (step,) = slice_of(lambda v, g: v * g, v=(6, 3), g=(3,)).through
    assert isinstance(step, Scaled) and step.dim == 1


def test_a_factor_of_every_element_is_none() -> None:
    assert value_of(lambda v, g: v * g, v=(6, 3), g=(6, 3)) is None


def test_a_function_of_a_multiple_of_a_weight_is_followed_and_its_norm_is_not() -> None:
    def halved(v: Tensor) -> Tensor:
        return (0.5 * v).exp()

    slice_ = slice_of(halved, v=(6, 3))
    assert slice_.scale == 0.5 and [type(step) for step in slice_.through] == [Elementwise]
    assert value_of(lambda v, g: torch._weight_norm(0.5 * v, g, 0), v=(6, 3), g=(6, 1)) is None
    assert value_of(lambda v: F.softmax(v, 0), v=(6, 3)) is None
