"""Rows of layers that scale and shift every element: derivatives by the scale, and where a shift comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kfac_fx.passes.layers import Layer
from kfac_fx.passes.layers import elementwise as forms
from kfac_fx.passes.matrix import Shape

N = 4


def test_the_gradient_of_a_shift_is_that_of_its_own_place() -> None:
    dy = torch.randn(N, 3, 2)
    rows = forms.shifted(dy, {"bias": (3, 1), "elements": None})
    assert rows.shape == (N, 2, 3, 1) and torch.equal(rows[..., 0], dy.mT)


def test_the_gradients_of_gathered_elements_add_up_where_they_came_from() -> None:
    """Numbers of elements of a table of 5; -1 is no element."""
    places = torch.tensor([[0, 3, 3], [-1, 0, 4]])
    dy = torch.arange(1.0, 7).view(1, 2, 3).repeat(2, 1, 1)
    rows = forms.shifted(dy, {"bias": (5,), "elements": places})
    assert rows.shape == (2, 1, 5, 1) and rows[1].flatten().tolist() == [1 + 5, 0, 0, 2 + 3, 6]


def test_the_gradients_of_all_positions_of_a_gathered_table_add_up() -> None:
    dy = torch.randn(2, 7, 3)
    rows = forms.shifted(dy, {"bias": (5,), "elements": torch.tensor([1, 1, 4])})
    wanted = torch.zeros(2, 5)
    wanted[:, 1], wanted[:, 4] = dy[..., :2].sum((1, 2)), dy[..., 2].sum(1)
    torch.testing.assert_close(rows[:, 0, :, 0], wanted)


@pytest.mark.parametrize(
    ("places", "shape"), [(None, (N, 2, 3, 0)), (torch.zeros(3, 2, dtype=torch.long), (N, 1, 3, 0))]
)
def test_a_shift_has_rows_without_inputs_as_many_as_gradient_rows(places: Tensor | None, shape: Shape) -> None:
    attrs = {"bias": (3, 1), "elements": places}
    x = torch.randn(N, 3, 2)
    assert forms.no_inputs(x, attrs).shape == shape and forms.shifted(x, attrs).shape[:-1] == shape[:-1]


X = torch.rand(N, 5, dtype=torch.float64) - 0.5
END = torch.rand(N, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("form", "function", "weight", "attrs"),
    [
        (forms.scale_and_shift.forms[0], lambda x, w: x * w, (5,), {}),
        (forms.quotient, lambda x, w: x / w, (5,), {"value": None}),
        (forms.numerator, lambda x, w: w / x, (5,), {}),
        (forms.mixed, lambda x, w: torch.lerp(x, END, w), (5,), {"end": END}),
        (forms.prelu.forms[0], lambda x, w: torch.prelu(x, w), (5,), {}),
        (forms.prelu.forms[0], lambda x, w: torch.prelu(x, w), (1,), {}),
    ],
)
def test_the_rows_are_the_derivative_by_the_weight(form: Any, function: Any, weight: Shape, attrs: Any) -> None:
    w = (torch.rand(weight, dtype=torch.float64) + 0.5).requires_grad_()
    dy = torch.randn(N, 5, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(function(X, w), w, dy)
    attrs = {"weight": weight, **attrs, **({"value": w.detach()} if "value" in attrs else {})}
    rows, grad_rows = form.rows(X, attrs), form.grad_rows(dy, attrs)
    torch.testing.assert_close((rows * grad_rows).sum((0, 1)).flatten(), wanted)


def test_an_outer_product_has_one_input_for_all_outputs() -> None:
    x, w, dy = torch.randn(N), torch.randn(5, requires_grad=True), torch.randn(N, 5)
    attrs = {"weight": (5,)}
    (wanted,) = torch.autograd.grad(torch.outer(x, w), w, dy)
    rows, grad_rows = forms.outer_scale.rows(x, attrs), forms.outer_scale.grad_rows(dy, attrs)
    torch.testing.assert_close((rows * grad_rows).sum((0, 1)).flatten(), wanted)


@pytest.mark.parametrize(
    ("form", "function", "attrs"),
    [
        (forms.shift_where, lambda mask, b, other: torch.where(mask, b, other), {}),
        (forms.shift_else_where, lambda mask, b, other: torch.where(mask, other, b), {}),
        (forms.shift_but_where, lambda mask, b, other: b.masked_fill(mask, -9.0), {}),
    ],
)
def test_only_the_places_that_show_a_shift_have_its_gradient(form: Any, function: Any, attrs: Any) -> None:
    b, dy, mask = torch.randn(5, requires_grad=True), torch.randn(N, 5), torch.rand(N, 5) > 0.5
    (wanted,) = torch.autograd.grad(function(mask, b, torch.randn(N, 5)), b, dy)
    rows = form.grad_rows(dy, {"mask": mask, "bias": (5,), "elements": None})
    torch.testing.assert_close(rows.sum((0, 1)).flatten(), wanted)


def test_a_value_that_is_put_through_a_mask_has_the_gradient_of_its_places() -> None:
    b, dy, mask = torch.randn(5, requires_grad=True), torch.randn(N, 7, 5), torch.rand(N, 7) > 0.5
    (wanted,) = torch.autograd.grad(torch.index_put(torch.randn(N, 7, 5), (mask,), b), b, dy)
    rows = forms.put(dy, {"mask": mask, "bias": (5,), "elements": None})
    torch.testing.assert_close(rows.sum((0, 1)).flatten(), wanted)


@pytest.mark.parametrize(
    ("mask", "bias", "same"),
    [
        (torch.ones(N, 7, dtype=torch.bool), (5,), True),
        (torch.ones(N, dtype=torch.bool), (7, 5), True),
        (torch.ones(N, 7, dtype=torch.bool), (1, 5), False),  # a value for every place
        (torch.ones(N, 7, dtype=torch.long), (5,), False),  # indices
    ],
)
def test_which_masks_put_one_value_everywhere(mask: Tensor, bias: Shape, same: bool) -> None:
    dy = torch.zeros(N, 7, 5)
    assert forms.same_everywhere(mask, dy, bias) is same
    if not same:
        with pytest.raises(ValueError, match="a value of its own"):
            forms.put(dy, {"mask": mask, "bias": bias, "elements": None})


@pytest.mark.parametrize(
    ("layer", "weight", "bias", "dims", "taken"),
    [
        (forms.scale_and_shift, (5,), (5,), None, True),
        (forms.scale_and_shift, (5,), (7, 5), 3, False),
        (forms.scale_and_shift, (7, 5), (5,), 3, False),
        (forms.scale_and_shift, (1, 5), (5,), None, True),
        (forms.group_norm, (6,), (6, 1), 3, True),
        (forms.group_norm, (6,), (6, 1), 4, False),
        (forms.group_norm, (6,), (6, 1), None, False),  # the second dimension from the front
        (forms.prelu, (4,), (4, 1, 1), 4, True),
        (forms.prelu, (1,), (), 4, True),
    ],
)
def test_which_shifts_are_in_the_block_of_their_scale(
    layer: Layer, weight: Shape, bias: Shape, dims: int | None, taken: bool
) -> None:
    order = None if dims is None else tuple(range(dims))
    assert layer.forms[0].takes_bias({"weight": weight, "bias": bias}, order) is taken


@pytest.mark.parametrize(
    ("weight", "sizes", "shape"), [((4,), (3, 4), (4,)), ((4,), (3, 4, 5, 2), (4, 1, 1)), ((1,), (3, 4, 5), (1,))]
)
def test_slopes_are_of_channels_or_of_all(weight: Shape, sizes: Shape, shape: Shape) -> None:
    assert forms.slopes(weight, len(sizes)) == shape
