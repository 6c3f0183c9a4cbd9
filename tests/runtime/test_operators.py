"""Fractional powers by Lanczos' process, and the bound of their error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kfac_fx.linalg.vectors import inverse_power

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_the_bound_of_the_error_holds(alpha: float) -> None:
    """At every number of steps, on eigenvalues over five orders of magnitude, some of them many times."""
    values = torch.cat([torch.logspace(-4, 1, 40), torch.full((10,), 1e-4)])
    basis, _ = torch.linalg.qr(torch.randn(50, 50))
    f, u = (basis * values) @ basis.mT, torch.randn(50)
    exact = basis @ (values**-alpha * (basis.mT @ u))
    bounds = []
    for most in range(1, 42):
        found, bound = inverse_power(lambda v: f @ v, u, alpha, 0.9e-4, 1e-10, most)
        away = (found - exact).norm() / found.norm()
        assert away <= bound + 1e-9
        bounds.append(bound)
    assert bounds[0] > 1 and bounds[-1] <= 1e-10


def test_a_vector_of_few_eigenvectors_needs_as_many_steps() -> None:
    calls = []

    def product(v: Tensor) -> Tensor:
        calls.append(v)
        return torch.tensor([1.0, 2, 2, 4]) * v

    found, bound = inverse_power(product, torch.tensor([0.0, 3, 4, 0]), 0.5, 1.0, 1e-10, 100)
    torch.testing.assert_close(found, torch.tensor([0.0, 3, 4, 0]) / 2**0.5)
    assert (bound, len(calls)) == (0, 1)
    assert inverse_power(product, torch.zeros(4), 0.5, 1.0, 1e-10, 100)[1] == 0 and len(calls) == 1
