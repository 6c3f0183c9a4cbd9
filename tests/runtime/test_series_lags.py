"""Sums over the lags of a Markov chain, against the plain sums."""

from __future__ import annotations

import pytest
import torch

from kfac_fx.fisher.series import (
    doublings,
    fejer,
    inverse_root,
    least_eigenvalue,
    resolvent,
    root_of,
    rounds,
    triangle,
)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 12])
def test_sums_over_lags_are_the_plain_sums(steps: int) -> None:
    torch.manual_seed(steps)
    x = torch.linspace(-1, 1, 21)
    plain = sum((steps - abs(d)) * x ** abs(d) for d in range(1 - steps, steps))
    torch.testing.assert_close(fejer(x, torch.tensor(float(steps)), 15), plain, rtol=1e-12, atol=1e-12)
    hats = [torch.randn(size, size) / 3 for size in (2, 3)]
    w = torch.randn(2, 3)
    terms = [torch.linalg.matrix_power(hats[0], d) @ w @ torch.linalg.matrix_power(hats[1], d).mT for d in range(steps)]
    t = torch.tensor(float(steps))
    for longest in (steps, 31):
        torch.testing.assert_close(triangle(hats, w, t, longest), sum((steps - d) * x for d, x in enumerate(terms)))


@pytest.mark.parametrize("steps", [2, 25, 400])
def test_sums_over_lags_lose_no_figures_in_float32(steps: int) -> None:
    """Next to 1, where all terms are alike, and next to -1, where they cancel: as many rounding errors as there are
    powers in the last term, of numbers that float32 has exactly."""
    away = torch.cat([torch.zeros(1), 2.0 ** torch.arange(-23, 0)]).float()
    x = torch.cat([1 - away, away - 1]).float()
    t = torch.tensor(float(steps))
    exact = sum((steps - abs(d)) * x.double() ** abs(d) for d in range(1 - steps, steps))
    found = fejer(x, t.float(), 511)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=steps * 1.2e-7, atol=0)


@pytest.mark.parametrize("steps", [2, 5, 30])
def test_the_series_of_powers_is_summed_to_the_end(steps: int) -> None:
    """At the worst correlation that T steps can have with themselves one later."""
    r = torch.cos(torch.tensor(torch.pi / (steps + 1)))
    hats = [r.view(1, 1), r.view(1, 1)]
    for wait in (False, True):
        found = resolvent(doublings(hats, steps, wait), torch.ones(1, 1))
        torch.testing.assert_close(found.squeeze(), 1 / (1 - r**2), rtol=1e-12, atol=0)


def test_powers_that_are_nothing_are_not_summed_if_the_device_may_be_asked() -> None:
    hats = [torch.full((1, 1), 0.5), torch.full((1, 1), 0.5)]
    assert len(doublings(hats, 1023)) == rounds(1023, 2.2e-16) > 20
    assert len(doublings(hats, 1023, wait=True)) == 5  # Ψ̂^32 = 2^-64
    assert doublings([], 1023) == []


def test_a_single_step_has_no_powers_to_sum() -> None:
    assert rounds(1, 1e-16) == 0


def square_root(series_2: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(operands of N, operands of N⁻¹) with M = [M_G, M_A], w and, of kron_series_2, Ψ̃ and (M⁻¹ Ψ)ᵀ."""
    torch.manual_seed(0)
    m = [torch.eye(size).expand(1, 1, -1, -1) + 0.1 * torch.randn(1, 1, size, size) for size in (2, 3)]
    root_weights = torch.rand(1, 1, 2, 3) + 0.5
    psi = [0.3 * torch.randn(1, 1, size, size) for size in (2, 3)] if series_2 else []
    inverse = [torch.linalg.inv(side).mT for side in m]
    lagging = [(side @ torch.linalg.inv(basis)).mT for side, basis in zip(psi, m, strict=False)]
    return [*m, root_weights, *psi], [*inverse, 1 / root_weights, *lagging]


@pytest.mark.parametrize("series_2", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_square_root_and_its_inverse_undo_each_other(series_2: bool, transpose: bool) -> None:
    forward, backward = square_root(series_2)
    w = torch.randn(1, 1, 2, 3)
    product = root_of(forward, doublings(forward[3:], 100), w, transpose)
    torch.testing.assert_close(inverse_root(backward, product, transpose), w)


@pytest.mark.parametrize("series_2", [False, True])
def test_the_bound_of_the_least_eigenvalue_is_below_it(series_2: bool) -> None:
    forward, backward = square_root(series_2)
    basis = torch.eye(6).view(6, 1, 1, 2, 3)
    n = torch.stack([root_of(forward, doublings(forward[3:], 100), column).flatten() for column in basis], dim=1)
    smallest = torch.linalg.eigvalsh(n @ n.mT)[0]
    assert 0 < least_eigenvalue(backward).item() <= smallest


def test_the_bound_of_the_least_eigenvalue_is_exact_for_a_product_of_multiples_of_the_identity() -> None:
    """N = 2 · 3 · w of the smallest weight."""
    sides = [torch.eye(size).expand(1, 1, -1, -1) / scale for size, scale in ((2, 2.0), (3, 3.0))]
    root_weights = torch.full((1, 1, 2, 3), 0.5)
    root_weights[..., 0, 0] = 0.25
    assert least_eigenvalue([*sides, 1 / root_weights]).item() == pytest.approx((2 * 3 * 0.25) ** 2, rel=1e-12)
