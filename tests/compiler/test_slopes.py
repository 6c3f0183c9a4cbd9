"""Slopes and projections of functions of parameters, held to autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.words.slopes import DIVIDED, ELEMENTWISE, OVER, STANDARDIZED, TIMES, UNIT, filters, projected, slope

POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow")
SETTINGS: dict[str, tuple[Any, ...]] = {"clamp": (-0.4, 0.5), "pow": (2.5,)}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_slopes_of_every_element_are_derivatives(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, dtype=torch.float64)
    x = (x.abs() + 0.1 if name in POSITIVE else x).requires_grad_()
    settings = SETTINGS.get(name, ())
    function = getattr(torch, name, None) or getattr(F, name)
    (wanted,) = torch.autograd.grad(function(x, *settings).sum(), x)
    torch.testing.assert_close(slope(name, x.detach(), None, settings), wanted)


@pytest.mark.parametrize("settings", [(None, 0.5), (-0.4, None)])
def test_a_clamp_may_have_one_end(settings: tuple[float | None, ...]) -> None:
    x = torch.linspace(-1, 1, 9, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.clamp(x, *settings).sum(), x)
    torch.testing.assert_close(slope("clamp", x.detach(), None, settings), wanted)


def standardized(v: Tensor, gain: Tensor, eps: float) -> Tensor:
    return F.batch_norm(v, None, None, gain, training=True, eps=eps)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_gradient_through_a_standardization(eps: float) -> None:
    """P (s C D), of an ε that matters, too."""
    torch.manual_seed(0)
    v, gain = torch.randn(1, 4, 6, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    outer = torch.randn(1, 4, 6, dtype=torch.float64)
    v.requires_grad_()
    (wanted,) = torch.autograd.grad((standardized(v, gain, eps) * outer).sum(), v)
    v = v.detach()
    centered = outer - outer.mean(-1, keepdim=True)
    found = projected(STANDARDIZED, slope(STANDARDIZED, v, gain, (1, eps)) * centered, v, 1, eps)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_through_a_weight_normalization(dim: int) -> None:
    torch.manual_seed(0)
    v, outer = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    v.requires_grad_()
    g = torch.rand([size if n == dim else 1 for n, size in enumerate(v.shape)], dtype=torch.float64)
    (wanted,) = torch.autograd.grad((torch._weight_norm(v, g, dim) * outer).sum(), v)
    v = v.detach()
    found = projected(UNIT, slope(UNIT, v, g, (dim, 0.0)) * outer, v, dim, 0.0)
    torch.testing.assert_close(found, wanted)


def test_a_gain_multiplies_the_filters() -> None:
    torch.manual_seed(0)
    v, gain = torch.randn(1, 4, 6, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    found = filters(STANDARDIZED, v, 1, 0.5) * gain.view(1, -1, 1)
    torch.testing.assert_close(found, standardized(v, gain, 0.5))
    torch.testing.assert_close(filters(UNIT, v[0], 0, 0.0), torch._weight_norm(v[0], torch.ones(4, 1).double(), 0))


def test_a_projection_takes_one_dimension_of_every_slice() -> None:
    torch.manual_seed(0)
    v, gradient = torch.randn(2, 4, 6, dtype=torch.float64)
    once = projected(UNIT, gradient, v, 0, 0.0)
    torch.testing.assert_close(projected(UNIT, once, v, 0, 0.0), once)
    torch.testing.assert_close((once * v).sum(1), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(), (4, 1), (1, 6)])
def test_what_is_divided_is_divided_on_the_way_back(shape: tuple[int, ...]) -> None:
    v, number = torch.randn(4, 6), torch.rand(shape) + 0.5
    torch.testing.assert_close(slope(DIVIDED, v, number, (None,)), torch.ones(4, 6) / number)
    torch.testing.assert_close(slope(OVER, v, number, (0, 0.0)), torch.ones(4, 6) / number)
    torch.testing.assert_close(slope(TIMES, v, number, (0, 0.0)), torch.ones(4, 6) * number)
    assert filters(TIMES, v, 0, 0.0) is v
