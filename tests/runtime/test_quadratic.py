"""The quadratic model: golden numbers, the minimum, the degenerate cases."""

import pytest
import torch
from torch import Tensor

from kfac_fx.optim.quadratic import QuadraticModel, inner, inner_products, slopes


def double(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


DAMPING = double(0.5).squeeze()
# Of the reference: m, the damped matrix, and its part b from the damping.
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
    vectors = [direction, -0.3 * direction]
    b = inner_products(vectors)
    model = QuadraticModel(2 * b, b, slopes(-direction, vectors))
    s = model.best(torch.tensor(0.5, dtype=dtype))
    torch.testing.assert_close(s, torch.tensor([1 / 2.5, 0.0], dtype=dtype))


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
    torch.testing.assert_close(inner_products([a, b]), torch.tensor([[14.0, 10.0], [10.0, 13.25]]))
    torch.testing.assert_close(slopes(b, [a, b]), torch.tensor([10.0, 13.25]))


def test_an_inner_product_of_many_terms_keeps_its_precision() -> None:
    ones = torch.ones(1 << 22)
    assert inner(0.1 * ones, ones).item() == pytest.approx(0.1 * (1 << 22), rel=1e-6)
