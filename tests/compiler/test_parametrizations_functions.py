"""Derivatives of functions of every element, held to autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.parametrizations.functions import DERIVATIVES, Elementwise, side_of

POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow")
SETTINGS: dict[str, tuple[Any, ...]] = {"clamp": (-0.4, 0.5), "pow": (2.5,)}
OPERAND = fx.Graph().placeholder("operand")


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_every_element(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, dtype=torch.float64)
    x = (x.abs() + 0.1 if name in POSITIVE else x).requires_grad_()
    settings = SETTINGS.get(name, ())
    function = getattr(torch, name, None) or getattr(F, name)
    (wanted,) = torch.autograd.grad(function(x, *settings).sum(), x)
    derivative = Elementwise(OPERAND, Layout((20,)), name, settings).derivative()
    torch.testing.assert_close(derivative({"operand": x.detach()}), wanted)


@pytest.mark.parametrize("settings", [(None, 0.5), (-0.5, None), (-0.5, 0.5)])
def test_a_clamp_may_have_one_end_and_elements_on_its_ends(settings: tuple[float | None, ...]) -> None:
    x = torch.linspace(-1, 1, 9, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.clamp(x, *settings).sum(), x)
    derivative = Elementwise(OPERAND, Layout((9,)), "clamp", settings).derivative()
    torch.testing.assert_close(derivative({"operand": x.detach()}), wanted)


@pytest.mark.parametrize(
    ("sizes", "side"), [((4, 1, 1), "outputs"), ((1, 1, 4), "inputs"), ((1, 3, 1), "outputs"), ((1, 3, 4), None)]
)
def test_a_function_of_every_element_multiplies_one_side(sizes: tuple[int, int, int], side: str | None) -> None:
    function = Elementwise(OPERAND, Layout((4,)), "exp")
    assert side_of([function], sizes, lambda dim, axis: False) == side
