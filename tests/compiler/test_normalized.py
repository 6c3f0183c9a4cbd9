"""Normalized weights: derivatives, and what they leave out of gradients, held to autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.parametrizations.normalized import (
    OTHERWISE,
    Normalized,
    OwnNumber,
    Scaled,
    Standardized,
    WeightNorm,
    dim_of,
)

pytestmark = pytest.mark.usefixtures("float64")

OPERAND, FACTOR = (fx.Graph().placeholder(name) for name in ("operand", "factor"))


def with_remainder(step: Normalized, kept: Tensor, value: Tensor, **tensors: Tensor) -> Tensor:
    """The gradient that is made of what the rows keep of it."""
    number = step.remainder(kept, {"operand": value, **tensors})
    (more,) = torch.autograd.grad(number, value)
    return kept + more


def standardized(v: Tensor, gain: Tensor, eps: float) -> Tensor:
    return F.batch_norm(v, None, None, gain, training=True, eps=eps)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_gradient_through_a_standardization(eps: float) -> None:
    """Also with an ε that matters."""
    torch.manual_seed(0)
    v, gain, outer = torch.randn(1, 4, 6, requires_grad=True), torch.rand(4), torch.randn(1, 4, 6)
    (wanted,) = torch.autograd.grad((standardized(v, gain, eps) * outer).sum(), v)
    step = Standardized(OPERAND, Layout((1, 4, 6)), 0, eps, FACTOR)
    centered = outer - outer.mean(-1, keepdim=True)
    kept = step.derivative()({"operand": v.detach(), "factor": gain}) * centered
    torch.testing.assert_close(with_remainder(step, kept, v), wanted)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_through_a_weight_normalization(dim: int) -> None:
    torch.manual_seed(0)
    v, outer = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, 5)
    g = torch.rand([size if n == dim else 1 for n, size in enumerate(v.shape)])
    (wanted,) = torch.autograd.grad((torch._weight_norm(v, g, dim) * outer).sum(), v)
    step = WeightNorm(OPERAND, Layout((3, 4, 5)), dim, FACTOR)
    kept = step.derivative()({"operand": v.detach(), "factor": g}) * outer
    torch.testing.assert_close(with_remainder(step, kept, v), wanted)


@pytest.mark.parametrize("divides", [True, False])
def test_the_gradient_through_a_number_of_its_own(divides: bool) -> None:
    torch.manual_seed(0)
    v, outer = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    number = v.square().sum(1, keepdim=True)
    (wanted,) = torch.autograd.grad(((v / number if divides else v * number) * outer).sum(), v, retain_graph=True)
    step = OwnNumber(OPERAND, Layout((4, 6)), 0, FACTOR, divides)
    kept = step.derivative()({"operand": v.detach(), "sigma": number.detach()}) * outer
    torch.testing.assert_close(with_remainder(step, kept, v, sigma=number), wanted)


def test_a_gain_multiplies_the_filters() -> None:
    torch.manual_seed(0)
    v, gain = torch.randn(1, 4, 6), torch.rand(4)
    filters = Standardized(OPERAND, Layout((1, 4, 6)), 0, 0.5, FACTOR).filters()
    torch.testing.assert_close(filters(v) * gain.view(1, -1, 1), standardized(v, gain, 0.5))
    filters = WeightNorm(OPERAND, Layout((4, 6)), 0, FACTOR).filters()
    torch.testing.assert_close(filters(v[0]), torch._weight_norm(v[0], torch.ones(4, 1), 0))
    assert torch.equal(Scaled(OPERAND, Layout((4, 6)), 0, FACTOR, False).filters()(v[0]), v[0])


@pytest.mark.parametrize("shape", [(), (4, 1), (1, 6)])
@pytest.mark.parametrize("make", [OwnNumber, Scaled])
def test_what_is_divided_is_divided_on_the_way_back(shape: tuple[int, ...], make: Any) -> None:
    v, number = torch.randn(4, 6), torch.rand(shape) + 0.5
    tensors = {"operand": v, "factor": number, "sigma": number}
    for divides, wanted in ((True, 1 / number), (False, number)):
        derivative = make(OPERAND, Layout((4, 6)), 0, FACTOR, divides).derivative()
        torch.testing.assert_close(derivative(tensors), torch.ones(4, 6) * wanted)


@pytest.mark.parametrize(
    ("sizes", "shape", "dim"),
    [
        ((), (3, 4), None), ((1, 1), (3, 4), None), ((3, 1), (3, 4), 0), ((4,), (3, 4), 1),
        ((3, 4), (3, 4), OTHERWISE), ((5, 1), (1, 4), OTHERWISE), ((2, 1, 1), (3, 4), OTHERWISE),
    ],
)  # fmt: skip
def test_a_factor_varies_along_one_dimension_of_its_size_or_none(
    sizes: tuple[int, ...], shape: tuple[int, ...], dim: int | None
) -> None:
    assert dim_of(sizes, Layout(shape)) == dim
