"""Series blocks against the dense formulas of the paper, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kfac_fx.blocks.block import FisherBlock, make_block, make_groups
from kfac_fx.factors.inverses import Inverter
from kfac_fx.linalg.chain import doublings, fejer, resolvent, rounds, triangle
from kfac_fx.linalg.krylov import inverse_power
from kfac_fx.linalg.matrices import Root
from kfac_fx.passes.errors import ApproximationError, FactorNotReady
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import MatrixForm
from kfac_fx.statistics.lagged import LAGGED
from kfac_fx.statistics.row_sums import Rows
from tests.runtime.fisher_cases import (
    FORMS,
    SERIES,
    assumed_lag,
    dense_series,
    sequence_statistics,
    sequences,
    use_of,
    weight,
)

ROOTS: tuple[Root, ...] = (-1.0, "cholesky", "cholesky_inverse")
FORM = FORMS["linear with bias"]  # [3, 2] and a bias: K = 3 · 3
G, O, I = 1, 3, 3  # noqa: E741
both = pytest.mark.parametrize("approximation", SERIES)
pytestmark = pytest.mark.usefixtures("float64")


def registered(approximation: str, steps: int, shape: tuple[int, int] | None = None) -> Registration:
    """shape: of a weight alone; None: `FORM`."""
    form = FORM.matrix if shape is None else MatrixForm(weight(shape, "o i -> o i"), None)
    assert form is not None
    return Registration("linear", form, form.parameters, (use_of("linear", {}),) * steps, approximation)


def block_of(
    approximation: str,
    steps: int,
    damping: float = 0.3,
    positions: int = 1,
    roots: tuple[Root, ...] = ROOTS,
    dtype: torch.dtype = torch.float64,
) -> FisherBlock:
    """A block that has seen three batches."""
    torch.manual_seed(steps)
    registration = registered(approximation, steps)
    block = make_block(registration, parameters=FORM.parameters, damping=damping, roots=roots, dtype=dtype)
    for _ in range(3):
        x, d = sequences(steps, (6, positions, 1), 2, 3)
        block.update(sequence_statistics(x, d, True, (G, O, I)), 6, decay=0.9)
    block.update_inverses()
    return block


def sides(block: FisherBlock, damping: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(A_λ, G_λ, A1, G1, c) as the paper damps them: c λ_A λ_G = λ, split by π."""
    a, g, a1, g1, c = (block.factors[name].value.squeeze(0) for name in ("A", "G", "A1", "G1", "positions"))
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    root = (damping / c).sqrt()
    return a + pi * root * torch.eye(len(a)), g + root / pi * torch.eye(len(g)), a1, g1, c


def chain_covariance(v0: Tensor, psi: Tensor, steps: int) -> Tensor:
    """Of (w_1, ..., w_T), each of K numbers: the blocks Ψ^(s-t) V_0 of a linear Gaussian chain, [T·K, T·K]."""
    lags = [torch.linalg.matrix_power(psi, d) @ v0 for d in range(steps)]
    return torch.cat(
        [torch.cat([lags[s - t] if s >= t else lags[t - s].mT for t in range(steps)], dim=1) for s in range(steps)]
    )


def dense_block(block: FisherBlock, damping: float, steps: int) -> Tensor:
    """F, written down as in the paper: K x K in the order of the flattened [o, i]."""
    a, g, a1, g1, c = sides(block, damping)
    name = block.registration.approximation
    v1 = torch.kron(assumed_lag(name, g, g1), assumed_lag(name, a, a1))
    return c / steps * dense_series(name, torch.kron(g, a), v1, steps)


def flat(block: FisherBlock, vector: dict[str, Tensor]) -> Tensor:
    return block.group.pack(vector, block.member).flatten()


def draw_vector() -> dict[str, Tensor]:
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in FORM.shapes.items()}


@both
@pytest.mark.parametrize("steps", [2, 3, 5, 8])
@pytest.mark.parametrize("positions", [1, 2])
def test_a_series_block_is_the_dense_formula(approximation: str, steps: int, positions: int) -> None:
    block, vector = block_of(approximation, steps, positions=positions), draw_vector()
    dense, v = dense_block(block, 0.3, steps), flat(block, vector)
    assert torch.linalg.eigvalsh(dense).min() > 0
    for product, expected in (
        (block.multiply(vector), dense @ v),
        (block.multiply_inverse(vector), torch.linalg.solve(dense, v)),
    ):
        torch.testing.assert_close(flat(block, product), expected, rtol=1e-10, atol=1e-10)


@both
def test_without_damping_it_is_its_full_block(approximation: str) -> None:
    block, vector = block_of(approximation, 4, damping=0.0), draw_vector()
    full = block.full_fisher_block()
    torch.testing.assert_close(full, dense_block(block, 0.0, 4), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(flat(block, block.multiply(vector)), full @ flat(block, vector), rtol=1e-10, atol=1e-10)


def test_a_case_goes_through_the_steps_of_one_tower() -> None:
    one = registered("kron_series_1", 3)
    other = tuple(replace(use, tower=1) for use in one.uses)
    assert one.steps == replace(one, uses=(*one.uses, *other)).steps == 3


def test_it_is_not_ready_before_its_first_update() -> None:
    block = make_block(registered("kron_series_1", 3), parameters=FORM.parameters, damping=0.1)
    for early in (block.full_fisher_block, lambda: block.multiply(draw_vector())):
        with pytest.raises(FactorNotReady, match=r"factors of linear\(weight, bias\) read before their first update"):
            early()


def test_the_covariance_behind_it_is_a_chain() -> None:
    """Its inverse couples neighbors in time only: the oracle is the model that it claims to be."""
    a, g, a1, g1, _ = sides(block_of("kron_series_2", 5), 0.3)
    v0 = torch.kron(g, a)
    precision = torch.linalg.inv(chain_covariance(v0, torch.kron(g1, a1) @ torch.linalg.inv(v0), 5))
    blocks = precision.view(5, 9, 5, 9).abs().amax((1, 3))
    apart = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    assert (blocks[apart <= 1] > 1e-3).all()
    assert blocks[apart > 1].max() < 1e-10


@both
def test_its_square_root_makes_the_block(approximation: str) -> None:
    block, v = block_of(approximation, 5), draw_vector()
    again = block.multiply_cholesky(block.multiply_cholesky(v, transpose=True))
    inverse = block.multiply_cholesky_inverse(block.multiply_cholesky_inverse(v), transpose=True)
    same = block.multiply_cholesky(block.multiply_cholesky_inverse(v))
    for got, wanted in ((again, block.multiply(v)), (inverse, block.multiply_inverse(v)), (same, v)):
        torch.testing.assert_close(flat(block, got), flat(block, wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("approximation", "expected"),
    [("kron_series_1", [-7 / 12, 1.5]), ("kron_series_1_abs", [-1 / 3, 1.0]), ("kron_series_2", [-6 / 7, 2.0])],
)
def test_worked_out_by_hand(approximation: str, expected: list[float]) -> None:
    """Two steps of one case: a = (1, 0), (1, 1) and g = 1, 2; without damping F⁻¹ (1, 2)."""
    block = make_block(registered(approximation, 2, (1, 2)), parameters={"weight": torch.zeros(1, 2)}, damping=0.0)
    x, d = torch.tensor([[1.0, 0], [1, 1]]).view(2, 1, 1, 1, 2), torch.tensor([1.0, 2]).view(2, 1, 1, 1, 1)
    block.update(sequence_statistics(x, d, False, (1, 1, 2)), 1, decay=0.0)
    block.update_inverses()
    torch.testing.assert_close(block.factors["A1"].value, torch.tensor([[[0.5, 0], [0.5, 0]]]))
    assert block.factors["G1"].value.item() == 1
    found = block.multiply_inverse({"weight": torch.tensor([[1.0, 2]])})["weight"]
    torch.testing.assert_close(found, torch.tensor([expected]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("approximation", "expected"),
    [("kron_indep", 0.0827586), ("kron_series_1", 0.0808832), ("kron_series_2", 0.0799532)],
)
def test_numbers_of_one_weight(approximation: str, expected: float) -> None:
    """T = 3 and A, A1, G, G1 = 10/3, 5/6, 1.208333, 0.083333: γ(ψ) / (A G) with ψ = A1 G1 / (A G)."""
    block = make_block(registered(approximation, 3, (1, 1)), parameters={"weight": torch.zeros(1, 1)}, damping=0.0)
    sums = {"A": 10 / 3, "A1": 5 / 6, "G": 1.208333333, "G1": 0.083333333}
    moments = {name: torch.full((1, 1, 1), 6 * value) for name, value in sums.items()}
    block.update({**moments, "count": torch.tensor(6.0), "pairs": torch.tensor(4.0)}, 2, decay=0.0)
    block.update_inverses()
    found = block.multiply_inverse({"weight": torch.ones(1, 1)})["weight"].item()
    assert found == pytest.approx(expected, abs=1e-6)


@both
def test_one_step_is_the_independent_block(approximation: str) -> None:
    series, plain, v = block_of(approximation, 1), block_of("kron_indep", 1), draw_vector()
    for one, other in (
        (series.multiply(v), plain.multiply(v)),
        (series.multiply_inverse(v), plain.multiply_inverse(v)),
    ):
        torch.testing.assert_close(flat(series, one), flat(plain, other))
    torch.testing.assert_close(series.full_fisher_block(), plain.full_fisher_block())


def test_what_alternates_makes_the_block_smaller() -> None:
    """The sign of a correlation in time counts: steady rows and gradient rows add up, alternating ones cancel."""
    x = torch.ones(6, 3, 1, 1, 2) + 0.1 * torch.randn(6, 3, 1, 1, 2)
    d = torch.ones(6, 3, 1, 1, 3) + 0.1 * torch.randn(6, 3, 1, 1, 3)
    sign = torch.tensor([1.0, -1] * 3).view(6, 1, 1, 1, 1)
    size = {}
    for name, rows in (("steady", d), ("alternating", d * sign)):
        for approximation in ("kron_indep", *SERIES):
            block = make_block(registered(approximation, 6), parameters=FORM.parameters, damping=1e-2)
            block.update(sequence_statistics(x, rows, True, (G, O, I)), 3, decay=0.0)
            size[name, approximation] = block.full_fisher_block().trace()
    for approximation in SERIES:
        assert size["steady", approximation] > 2 * size["steady", "kron_indep"]
    for approximation in ("kron_series_1", "kron_series_2"):
        assert size["alternating", approximation] < 0.5 * size["alternating", "kron_indep"]
    assert size["alternating", "kron_series_1_abs"] > 2 * size["alternating", "kron_indep"]


# --- powers -----------------------------------------------------------------------------------------------------------

POWERS = (-2.5, -2.0, -1.3, -0.5, 0.0, 0.7, 1.5, 3.0)


@both
@pytest.mark.parametrize("dense", [True, False])
def test_every_real_power_is_that_of_the_dense_block(
    approximation: str, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks by eigenvectors, large ones by Lanczos' process."""
    monkeypatch.setattr("kfac_fx.blocks.rooted.DENSE_ROWS", 9 if dense else 8)
    block, vector = block_of(approximation, 4, positions=2, roots=POWERS), draw_vector()
    values, vectors = torch.linalg.eigh(dense_block(block, 0.3, 4))
    v = vectors.mT @ flat(block, vector)
    for exp in POWERS:
        found = flat(block, block.multiply_matpower(vector, exp))
        torch.testing.assert_close(
            found, vectors @ (values**exp * v), rtol=1e-9, atol=1e-9, msg=lambda m, e=exp: f"{e}: {m}"
        )


@both
def test_every_block_of_a_stack_has_its_own_power(approximation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of two groups each, dense and by Lanczos' process."""
    layout, names = weight((4, 2, 2), "(g o) c k -> g o (c k)", g=2)[1], ("one", "two")
    registrations = [
        replace(registered(approximation, 3), matrix=MatrixForm((name, layout), None), parameters=(name,))
        for name in names
    ]
    vector = {name: torch.randn(4, 2, 2) for name in names}
    sums = [sequence_statistics(*sequences(3, (6, 1, 2), 4, 2), False, (2, 2, 4)) for _ in names]
    products = []
    for limit in (8, 7):
        monkeypatch.setattr("kfac_fx.blocks.rooted.DENSE_ROWS", limit)
        (group,) = make_groups(registrations, vector, roots=(0.5, -1.5), damping=torch.tensor(0.1))
        assert len(group) == 2 and group.is_dense is (limit == 8)
        group.update(sums, 6, decay=0.0)
        Inverter([group], tuple(group.roots)).update()
        products.append([group.multiply(group.pack(vector), exp) for exp in (0.5, -1.5)])
    for dense, other in zip(*products, strict=True):
        torch.testing.assert_close(other, dense, rtol=1e-9, atol=1e-9)


@both
def test_what_lanczos_does_not_come_to_is_an_error(approximation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.blocks.rooted.DENSE_ROWS", 1)
    monkeypatch.setattr("kfac_fx.blocks.rooted.LANCZOS_STEPS", 3)
    block = block_of(approximation, 4, roots=(-0.5, 2.0))
    text = (
        rf"linear\(weight, bias\): 3 steps of Lanczos' process left a relative error of .* in the power -0.5 of "
        rf"{approximation}, wanted 1e-10.\nUse more damping, whole numbers for `exps`, or 'kron_indep' for these"
    )
    with pytest.raises(ApproximationError, match=text):
        block.multiply_matpower(draw_vector(), -0.5)
    block.multiply_matpower(draw_vector(), 2)


def test_powers_of_blocks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.blocks.rooted.DENSE_ROWS", 1)
    single, double = (block_of("kron_series_2", 4, roots=(-0.5,), dtype=d) for d in (torch.float32, torch.float64))
    vector = draw_vector()
    found = single.multiply_matpower({name: one.float() for name, one in vector.items()}, -0.5)
    for name, exact in double.multiply_matpower(vector, -0.5).items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name].double(), exact, rtol=1e-4, atol=1e-5)


def test_powers_of_a_block_that_never_decomposed_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.blocks.rooted.DENSE_ROWS", 1)
    block = make_block(
        registered("kron_series_2", 3), parameters=FORM.parameters, damping=0.1, roots=(-0.5,), dtype=torch.float64
    )
    block.factors["G"].moment.fill_(torch.nan)
    block.group.updated = True
    block.update_inverses()
    assert block.failures.decompositions == 1
    assert not any(product.any() for product in block.multiply_matpower(draw_vector(), -0.5).values())


# --- Lanczos' process ----------------------------------------------------------------------------------------------


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


# --- sums over lags ---------------------------------------------------------------------------------------------------


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


def test_lagged_rows_of_one_case_for_all() -> None:
    """Rows that all cases share, N = 1, stand for as many as there are gradient rows."""
    shared, own = torch.randn(1, 2, 1, 3), torch.randn(4, 2, 1, 3)
    d = torch.randn(4, 2, 1, 2)
    lag = LAGGED["A1"].compute
    for bias in (False, True):
        matrix = (1, 2, 3 + bias)
        for later, earlier in ((shared, own), (own, shared), (shared, shared)):
            got = lag(Rows(later, d, bias, matrix), Rows(earlier, d, bias, matrix))
            wide = lag(
                Rows(later.expand(4, 2, 1, 3), d, bias, matrix), Rows(earlier.expand(4, 2, 1, 3), d, bias, matrix)
            )
            torch.testing.assert_close(got, wide)
