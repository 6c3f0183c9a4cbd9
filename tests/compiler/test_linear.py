"""Rows, gradient rows and matrices of linear layers, on numbers that tell every dimension apart.

`y = W r` row by row: of each way to write the layer, the matrix times the rows is the output, as gradient rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.layers import linear as forms
from kfac_fx.passes.layers.declaration import Form
from kfac_fx.passes.matrix import Layout, Shape

SOME = torch.tensor([2, 0])

# (form, what it computes, sizes of the input, of the weight, attributes)
WRITTEN: dict[str, tuple[Form, Callable[[Tensor, Tensor], Tensor], Shape, Shape, dict[str, Any]]] = {
    "linear": (forms.linear.forms[0], F.linear, (4, 7, 2, 5), (3, 5), {}),
    "of a vector": (forms.linear.forms[0], F.linear, (5,), (3, 5), {}),
    "on the right": (forms.product, torch.matmul, (4, 7, 5), (5, 3), {}),
    "one output": (forms.one_output, torch.matmul, (4, 7, 5), (5,), {}),
    "from the left": (forms.product_from_left, lambda x, w: w @ x, (4, 5, 7), (3, 5), {}),
    "a vector from the left": (forms.product_from_left, lambda x, w: w @ x, (5,), (3, 5), {}),
    "a stack": (forms.products, torch.matmul, (4, 2, 7, 5), (2, 5, 3), {}),
    "a stack on one input": (forms.products, torch.matmul, (4, 5), (2, 5, 3), {}),
    "two stacked dimensions": (forms.products, torch.matmul, (4, 1, 6, 7, 5), (2, 1, 5, 3), {}),
    "bmm": (forms.baddbmm, torch.bmm, (2, 4, 5), (2, 5, 3), {}),
    "tensordot": (
        forms.tensordot,
        lambda x, w: torch.tensordot(x, w, dims=([2, 1], [1, 2])),
        (4, 7, 5),
        (3, 5, 7, 2),
        {"dims": [2, 1], "weight_dims": [1, 2]},
    ),
    "tensordot without outputs": (
        forms.tensordot,
        lambda x, w: torch.tensordot(x, w, ([1, 2], [0, 1])),
        (4, 7, 5),
        (7, 5),
        {"dims": [1, 2], "weight_dims": [0, 1]},
    ),
    "addbmm": (forms.addbmm, lambda x, w: torch.bmm(x, w).sum(0), (2, 4, 5), (2, 5, 3), {}),
    "copies": (forms.product_of_copies, torch.matmul, (4, 7, 5), (1, 5, 3), {}),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", WRITTEN)
def test_the_matrix_times_the_rows_is_the_output(name: str) -> None:
    form, function, x_shape, w_shape, attrs = WRITTEN[name]
    x, w = torch.randn(x_shape), torch.randn(w_shape)
    attrs = {**attrs, "weight": w_shape}
    rows, outputs = form.rows(x, attrs), form.grad_rows(function(x, w), attrs)
    matrix = form.layout("weight", Layout(w_shape), attrs).apply(w)
    rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
    outputs = outputs if outputs.dim() == 4 else outputs.unsqueeze(2)
    torch.testing.assert_close(torch.einsum("goi,nsgi->nsgo", matrix, rows), outputs)


def test_gradient_rows_of_some_outputs_are_those_of_their_places() -> None:
    dy = torch.randn(4, 7, 3)
    rows = forms.some_outputs.grad_rows(dy, {"index": SOME})
    assert torch.equal(rows, dy[..., [2, 0]])


def test_a_bilinear_layer_has_a_row_of_all_products_in_the_order_of_its_weight() -> None:
    x, second, w = torch.randn(4, 7, 5), torch.randn(4, 7, 2), torch.randn(3, 5, 2)
    form = forms.bilinear.forms[0]
    rows = form.rows(x, {"second": second})
    matrix = form.layout("weight", Layout((3, 5, 2)), {}).apply(w)
    torch.testing.assert_close(rows @ matrix[0].mT, F.bilinear(x, second, w))


@pytest.mark.parametrize(
    ("form", "attrs", "taken"),
    [
        (forms.linear.forms[0], {"weight": (3, 5), "bias": (3,)}, True),
        (forms.linear.forms[0], {"weight": (3, 5)}, True),
        (forms.products, {"weight": (2, 5, 3)}, True),
        (forms.products, {"weight": (5, 3)}, False),
        (forms.tensordot, {"dims": [2, 1]}, True),
        (forms.tensordot, {"dims": [0]}, False),  # the cases are summed
        (forms.product_of_copies, {"weight": (1, 5, 3)}, True),
        (forms.product_of_copies, {"weight": (2, 5, 3)}, False),
        (forms.product_of_copies, {"weight": (1, 3)}, False),  # expanded along its own dimension
    ],
)
def test_which_shapes_are_a_layer(form: Form, attrs: dict[str, Any], taken: bool) -> None:
    assert form.where(attrs) is taken


@pytest.mark.parametrize(
    ("form", "weight", "bias", "order", "taken"),
    [
        (forms.linear.forms[0], (3, 5), (1, 3), None, True),
        (forms.linear.forms[0], (3, 5), (1, 1, 3), None, False),  # which may have more dimensions than the product
        (forms.linear.forms[0], (3, 5), (1, 1, 3), (0, 1, 2), True),
        (forms.linear.forms[0], (3, 5), (7, 3), None, False),  # a bias of every position
        (forms.linear.forms[0], (3, 5), (), None, False),  # one number for all outputs
        (forms.linear.forms[0], (1, 5), (), None, True),
        (forms.linear.forms[0], (3, 5), (3,), (1, 0), False),  # along the positions, behind a transpose
        (forms.linear.forms[0], (3, 5), (3, 1), (1, 0), True),
        (forms.product, (5, 3), (3,), None, True),
        (forms.product, (5, 3), (5,), None, False),
        (forms.one_output, (5,), (1,), None, True),
        (forms.one_output, (5,), (1, 1), None, False),
        (forms.product_from_left, (3, 5), (3, 1), None, True),
        (forms.product_from_left, (3, 5), (3,), None, False),  # along the positions
        (forms.product_from_left, (3, 5), (3,), (0,), True),  # times a vector
        (forms.product_from_left, (3, 5), (3,), (1, 0), True),
        (forms.products, (2, 5, 3), (2, 1, 3), None, True),
        (forms.products, (2, 5, 3), (1, 1, 3), None, False),  # shared by the matrices
        (forms.products, (2, 5, 3), (2, 3), (1, 0, 2), True),
    ],
)
def test_which_biases_are_in_the_block_of_their_weight(
    form: Form, weight: Shape, bias: Shape, order: Shape | None, taken: bool
) -> None:
    assert form.takes_bias({"weight": weight, "bias": bias}, order) is taken


def test_a_bias_of_stacked_weights_is_laid_out_by_group() -> None:
    bias = torch.arange(6.0).view(2, 1, 3)
    layout = forms.products.layout("bias", Layout((2, 1, 3)), {})
    assert layout.apply(bias).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_bias_behind_tensordot_is_in_the_block_of_its_weight() -> None:
    class Contracted(nn.Module):
        def __init__(self, bias: tuple[int, ...]) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(4, 5, 3, 2)), nn.Parameter(torch.randn(bias))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tensordot(x, self.w, 2) + self.b

    for bias, keys in (((3, 2), [("w", "b")]), ((2,), [("w",), ("b",)])):  # the second varies along a part of the rows
        net = kfac_fx.compile(Contracted(bias), (torch.randn(6, 4, 5),), loss="normal", strict=True)
        assert [registration.parameters for registration in net.registrations] == keys
