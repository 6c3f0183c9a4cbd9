"""Equations of einsum as contractions: which index is a group, an input, an output or a position."""

from __future__ import annotations

import pytest
import torch

from kfac_fx.passes.layers import linear as forms
from kfac_fx.passes.layers.linear import Contraction, contraction
from kfac_fx.passes.matrix import Layout, Shape


@pytest.mark.parametrize(
    ("equation", "weight_first", "terms"),
    [
        ("bti,oi->bto", False, ("bti", "oi", "bto")),
        ("oi, nij -> noj", True, ("nij", "oi", "noj")),
        ("bi,io", False, ("bi", "io", "bo")),
        ("bi,ao", False, ("bi", "ao", "abio")),  # without an arrow in the order of the alphabet
        ("...i,oi", False, ("...i", "oi", "...o")),
    ],
)
def test_the_terms_of_an_equation(equation: str, weight_first: bool, terms: tuple[str, str, str]) -> None:
    weight = tuple(range(2, 2 + len(terms[1])))
    assert contraction({"equation": equation, "weight": weight}, weight_first) == Contraction(*terms, weight)


@pytest.mark.parametrize(
    ("x", "weight", "y", "sizes", "roles"),
    [
        ("bti", "oi", "bto", (3, 5), ("", "o", "i")),
        ("bnhk", "khd", "bnd", (3, 2, 5), ("", "d", "kh")),
        ("...hi", "hio", "...ho", (2, 5, 3), ("h", "o", "i")),
        ("btd", "d", "btd", (5,), ("d", "", "")),
        ("bhi", "hio", "bho", (1, 5, 3), ("", "o", "i")),  # the h of the input is a position
        ("bi", "hio", "bho", (1, 5, 3), ("", "ho", "i")),  # the weight alone has an h
    ],
)
def test_the_roles_of_the_indices_of_the_weight(
    x: str, weight: str, y: str, sizes: Shape, roles: tuple[str, str, str]
) -> None:
    terms = Contraction(x, weight, y, sizes)
    assert tuple("".join(role) for role in (terms.groups, terms.outputs, terms.inputs)) == roles


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("equation", "x_shape", "w_shape"),
    [
        ("bti,oi->bto", (4, 7, 5), (3, 5)),
        ("btd,dhk->bhtk", (4, 7, 5), (5, 2, 3)),
        ("bnhk,khd->bnd", (4, 7, 2, 3), (3, 2, 5)),
        ("...hi,hio->...ho", (4, 7, 2, 5), (2, 5, 3)),
        ("btd,d->btd", (4, 7, 5), (5,)),
        ("bhi,hio->bho", (4, 1, 5), (2, 5, 3)),  # the input is broadcast to the groups
        ("bhi,hio->bho", (4, 2, 5), (1, 5, 3)),
    ],
)
def test_the_matrix_times_the_rows_is_the_output(equation: str, x_shape: Shape, w_shape: Shape) -> None:
    x, w = torch.randn(x_shape), torch.randn(w_shape)
    terms = contraction({"equation": equation, "weight": w_shape}, False)
    matrix = terms.weight_layout(Layout(w_shape)).apply(w)
    outputs = torch.einsum("goi,nsgi->nsgo", matrix, terms.rows(x))
    torch.testing.assert_close(outputs, terms.grad_rows(torch.einsum(equation, x, w)))


def test_a_position_that_is_summed_leaves_one_row_a_case() -> None:
    x = torch.randn(4, 7, 5)
    rows = contraction({"equation": "bsi,io->bo", "weight": (5, 3)}, False).rows(x)
    torch.testing.assert_close(rows, x.sum(1)[:, None, None])


@pytest.mark.parametrize(
    ("terms", "linear"),
    [
        (("bi", "io", "bo"), True),
        (("bii", "io", "bo"), False),  # a diagonal of the input
        (("bi", "iio", "bo"), False),  # a diagonal of the weight
        (("bi", "ioz", "bo"), False),  # a sum over the weight alone
        (("bi", "...o", "b...o"), False),
    ],
)
def test_which_contractions_hold_every_element_of_the_weight_once(terms: tuple[str, str, str], linear: bool) -> None:
    assert Contraction(*terms, tuple(range(2, 2 + len(terms[1])))).linear() is linear


@pytest.mark.parametrize(
    ("bias", "taken"),
    [
        ((2, 1, 3), True),
        ((2, 7, 3), False),  # varies along the positions
        ((1, 1, 3), False),  # not along all outputs
        ((1, 2, 1, 3), True),
        ((1, 1, 2, 1, 3), False),  # has more dimensions than the output
        ((3,), False),
    ],
)
def test_which_biases_belong_to_the_layer(bias: Shape, taken: bool) -> None:
    attrs = {"equation": "btd,dhk->bhtk", "weight": (5, 2, 3), "bias": bias}
    assert forms.einsum.takes_bias(attrs, None) is taken
    assert forms.einsum.takes_bias(attrs, (0, 1, 2, 3)) is taken


def test_a_bias_is_laid_out_as_the_outputs_of_the_weight() -> None:
    terms = Contraction("btd", "dkh", "bhtk", (5, 3, 2))
    bias = torch.arange(6.0).view(2, 1, 3)  # [h, t, k]; the matrix has the outputs in the order of the weight, (k h)
    assert terms.bias_layout(Layout((2, 1, 3))).apply(bias).tolist() == [[0, 3, 1, 4, 2, 5]]
