"""Blocks of parameters that are multiplied with parameters, held to the dense Fisher of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kfac_fx
from tests.compiler.toy import Toy
from tests.runtime.squares import dense_fisher, recorded

pytestmark = pytest.mark.usefixtures("float64")

Function = Callable[..., Any]


def toy(function: Function, **shapes: tuple[int, ...]) -> Toy:
    """With parameters that may be divided by."""
    torch.manual_seed(0)
    model = Toy(function, **shapes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return model


GAINS: list[tuple[Function, dict[str, tuple[int, ...]]]] = [
    (lambda x, w, e: x @ (w * e).T, {"w": (6, 4), "e": (6, 1)}),
    (lambda x, w, e: x @ (e * w), {"w": (4, 6), "e": (6,)}),
    (lambda x, w, e: F.linear(x, w * e), {"w": (6, 4), "e": (4,)}),
    (lambda x, w, e: F.linear(x, e * w), {"w": (6, 4), "e": ()}),
    (lambda x, w, e: F.linear(x, w * e.exp()[:, None]), {"w": (6, 4), "e": (6,)}),
    (lambda x, w, e: F.linear(x, w / e), {"w": (6, 4), "e": (6, 1)}),
    (lambda x, w, e: F.linear(x, w / (1 + 2 * e)), {"w": (6, 4), "e": (4,)}),
    (lambda x, w, e: 3 * F.conv1d(x.mT, 2 * (w * e)), {"w": (6, 4, 2), "e": (6, 1, 1)}),
    (lambda x, w, e: x * (w * e), {"w": (4,), "e": (4,)}),
    (lambda x, w, e: x * (w / e), {"w": (4,), "e": ()}),
]


@pytest.mark.parametrize(("function", "shapes"), GAINS)
def test_the_block_of_a_factor_of_a_weight_is_the_dense_fisher(function: Function, shapes: Any) -> None:
    model, x = toy(function, **shapes), torch.randn(5, 3, 4)
    block = recorded(model, x).blocks["e",]
    assert block.registration.approximation == "full"
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


@pytest.mark.parametrize(("function", "shapes"), GAINS)
def test_the_weights_block_is_exact_for_one_row(function: Function, shapes: Any) -> None:
    """The Fisher of one case without weight sharing, where K-FAC is exact."""
    model, x = toy(function, **shapes), torch.randn(1, 2 if len(shapes["w"]) == 3 else 1, 4)
    block = recorded(model, x).blocks["w",]
    assert block.registration.reason is None
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def test_the_factors_of_a_weight_with_numbers_for_its_outputs() -> None:
    """A: of the inputs; G: of the gradients times the numbers (AdaLoRA, Zhang et al. 2023)."""
    model, x = toy(lambda x, w, e: x @ (w * e).T, w=(6, 4), e=(6, 1)), torch.randn(5, 3, 4)
    block = recorded(model, x).blocks["w",]
    rows, grad_rows = x.flatten(0, 1), 2 * model(x).flatten(0, 1) * model.get_parameter("e").flatten()
    torch.testing.assert_close(block.factors["A"].value[0], rows.mT @ rows / 15)
    torch.testing.assert_close(block.factors["G"].value[0], grad_rows.mT @ grad_rows / 15)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, w: F.linear(x, w / torch.arange(1.0, 5.0)), (6, 4)),
        (lambda x, w: x * (w * torch.arange(1.0, 5.0)), (4,)),
    ],
)
def test_a_weight_times_constants_is_exact(function: Function, shape: tuple[int, ...]) -> None:
    model, x = toy(function, w=shape), torch.randn(1, 1, 4)
    block = recorded(model, x).blocks["w",]
    assert block.registration.reason is None
    torch.testing.assert_close(block.full_fisher_block(), dense_fisher(model, x, block))


def test_a_factor_that_is_read_elsewhere_and_unmatched_is_generic() -> None:
    model = toy(lambda x, w, e: torch.hypot(F.linear(x, w * e), e.sum()), w=(6, 4), e=(4,))
    net = kfac_fx.compile(model, (torch.rand(5, 4),), loss="normal")
    generic = {
        name: registration.reason
        for registration in net.registrations
        if registration.generic
        for name in registration.parameters
    }
    assert set(generic) == {"e"} and "2 uses, 1 of them matched" in str(generic["e"])


def test_a_factor_that_is_also_in_the_bias_of_the_layer_is_no_gain() -> None:
    model = toy(lambda x, w, e: F.linear(x, w, w[:, 0] * e), w=(6, 4), e=(6,))
    net = kfac_fx.compile(model, (torch.randn(5, 4),), loss="normal")
    assert all(
        registration.generic and "no layer has the form" in str(registration.reason)
        for registration in net.registrations
    )
