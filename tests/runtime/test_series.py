"""Series blocks against the dense formulas of the paper, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockOperator, make_block
from kfac_fx.linalg.matrices import Root
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import MatrixForm
from tests.runtime.fisher_cases import (
    FORMS,
    SERIES,
    assumed_lag,
    dense_series,
    draw,
    register,
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
) -> BlockOperator:
    """A block that has seen three batches."""
    torch.manual_seed(steps)
    registration = registered(approximation, steps)
    block = make_block(registration, parameters=FORM.parameters, damping=damping, roots=roots, dtype=dtype)
    for _ in range(3):
        x, d = sequences(steps, (6, positions, 1), 2, 3)
        block.update(sequence_statistics(x, d, True, (G, O, I)), 6, decay=0.9)
    block.update_inverses()
    return block


def sides(block: BlockOperator, damping: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(A_λ, G_λ, A1, G1, c) as the paper damps them: c λ_A λ_G = λ, split by π."""
    a, g, a1, g1, c = (block.factors[name].value.squeeze(0) for name in ("A", "G", "A1", "G1", "positions"))
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    root = (damping / c).sqrt()
    return a + pi * root * torch.eye(len(a)), g + root / pi * torch.eye(len(g)), a1, g1, c


def chain_covariance(v0: Tensor, psi: Tensor, steps: int) -> Tensor:
    """The covariance of (w_1, ..., w_T), K numbers each, in a linear Gaussian chain: blocks Ψ^(s-t) V_0, [T·K, T·K]."""
    lags = [torch.linalg.matrix_power(psi, d) @ v0 for d in range(steps)]
    return torch.cat(
        [torch.cat([lags[s - t] if s >= t else lags[t - s].mT for t in range(steps)], dim=1) for s in range(steps)]
    )


def dense_block(block: BlockOperator, damping: float, steps: int) -> Tensor:
    """F, written down as in the paper: K x K in the order of the flattened [o, i]."""
    a, g, a1, g1, c = sides(block, damping)
    name = block.registration.approximation
    v1 = torch.kron(assumed_lag(name, g, g1), assumed_lag(name, a, a1))
    return c / steps * dense_series(name, torch.kron(g, a), v1, steps)


def flat(block: BlockOperator, vector: dict[str, Tensor]) -> Tensor:
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
    for product, other in (
        (series.multiply(v), plain.multiply(v)),
        (series.multiply_inverse(v), plain.multiply_inverse(v)),
    ):
        torch.testing.assert_close(flat(series, product), flat(plain, other))
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


@pytest.mark.parametrize("approximation", ["kron_series_1", "kron_series_2"])
def test_a_dense_block_of_tiny_factors_is_as_small_as_they_are(approximation: str) -> None:
    """Which eigenvalues are zero is told by the largest one."""
    registration, form = register(FORMS["linear"], approximation), FORMS["linear"]
    sums = draw(registration, form, 4)
    tiny = {name: value * 1e-20 if name in ("G", "G1") else value for name, value in sums.items()}
    blocks = []
    for moments in (sums, tiny):
        block = make_block(registration, parameters=form.parameters)
        block.update(moments, 4, decay=0.9)
        blocks.append(block.full_fisher_block())
    torch.testing.assert_close(1e20 * blocks[1], blocks[0])
