"""Batched linear algebra against plain formulas, failed decompositions, and the precision of products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.linalg import matrices as linalg
from kfac_fx.linalg.matrices import (
    RESCUES,
    are_finite,
    bordered,
    damp,
    dense_roots,
    diagonal_root,
    eigh,
    full_precision,
    full_precision_in_eager,
    gram,
    half_products,
    iterated_basis,
    mean_eigenvalue,
    pi_correction,
    renewed_eigh,
    rescued_roots,
    without_cudnn,
)
from kfac_fx.recording import statistics as statistics

EVERY: tuple[linalg.Root, ...] = (-2.0, -1.0, -0.5, 0.5, "cholesky", "cholesky_inverse")


def spd(batch: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(batch, 3 * d, d, dtype=dtype)
    return x.mT @ x / (3 * d)


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [3, linalg.WORTH_ALIGNING, linalg.WORTH_ALIGNING + 1])
def test_a_product_is_one_whatever_rows_its_result_has(columns: int) -> None:
    rows = linalg.WORTH_ALIGNING
    left, right = torch.randn(2, 3, rows, 5, dtype=torch.float64), torch.randn(2, 3, 5, columns, dtype=torch.float64)
    with torch.no_grad():
        found = linalg.matmul(left, right)
    torch.testing.assert_close(found, torch.einsum("lgab,lgbc->lgac", left, right))
    assert columns < linalg.WORTH_ALIGNING or found.stride(-2) % linalg.CACHE_LINE == 0


def test_what_lies_between_the_rows_of_a_product_is_zero(free_memory_is_nan: None) -> None:
    """On processors with AMX, a product in bfloat16 reads a number behind each of its rows of odd width."""
    rows, columns = linalg.WORTH_ALIGNING, linalg.WORTH_ALIGNING + 1
    with torch.no_grad():
        found = linalg.matmul(torch.ones(1, 1, rows, 5), torch.ones(1, 1, 5, columns))[0, 0]
        whole = found.as_strided((rows, found.stride(0)), found.stride())
    assert whole.shape[1] > found.shape[1]
    torch.testing.assert_close(whole.sum(1), torch.full((rows,), 5.0 * columns))


@pytest.mark.parametrize(("rows", "dtype"), [(8, torch.float32), (linalg.WORTH_ALIGNING, torch.bfloat16)])
def test_results_that_gain_nothing_by_aligned_rows_have_none(rows: int, dtype: torch.dtype) -> None:
    with torch.no_grad():
        found = linalg.matmul(torch.ones(1, rows, 5).to(dtype), torch.ones(1, 5, linalg.WORTH_ALIGNING + 1).to(dtype))
    assert found.is_contiguous()


@pytest.mark.parametrize("transpose", [False, True])
def test_a_product_with_both_sides_is_that_of_two_products(transpose: bool) -> None:
    left, matrix, right = (torch.randn(2, 3, *shape, dtype=torch.float64) for shape in ((4, 4), (4, 5), (5, 5)))
    found = linalg.multiply_both(left, matrix, right, transpose)
    torch.testing.assert_close(found, left.mT @ matrix @ right if transpose else left @ matrix @ right.mT)


def test_a_product_with_wide_rows_has_a_gradient_and_no_graph_break() -> None:
    left = torch.randn(1, 2, linalg.WORTH_ALIGNING, 3)
    right = torch.randn(1, 2, 3, linalg.WORTH_ALIGNING + 1, requires_grad=True)
    linalg.matmul(left, right).sum().backward()
    assert right.grad is not None
    torch.testing.assert_close(right.grad, left.sum(-2).unsqueeze(-1).expand_as(right))
    with torch.no_grad():
        compiled = torch.compile(linalg.matmul, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(left, right), left @ right)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("d", [1, 4])
def test_gram_sums_outer_products(groups: int, d: int) -> None:
    rows = torch.randn(7, groups, d, dtype=torch.float64)
    torch.testing.assert_close(gram(rows), torch.einsum("ngi,ngj->gij", rows, rows))


@pytest.mark.parametrize("d", [linalg.WORTH_STRIPS, linalg.WORTH_STRIPS + 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("in_place", [True, False])
def test_gram_of_many_columns_is_symmetric_and_the_same(groups: int, d: int, in_place: bool) -> None:
    rows = torch.randn(65, 2, groups, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.set_grad_enabled(not in_place):
        found = gram(rows)
    torch.testing.assert_close(found, torch.einsum("nsgi,nsgj->gij", rows, rows))
    width = linalg.cache_aligned(-(-d // 4))
    assert torch.equal(found[:, width:, :width], found[:, :width, width:].mT)


def test_gram_of_many_columns_goes_through_vmap_autograd_and_compilers() -> None:
    rows = torch.randn(2, 65, 1, linalg.WORTH_STRIPS, dtype=torch.float64, requires_grad=True)
    gram(rows[0]).sum().backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad[0], 2 * rows[0].sum(-1, keepdim=True).expand_as(rows[0]))
    with torch.no_grad():
        each = [gram(of) for of in rows]
        torch.testing.assert_close(torch.vmap(gram)(rows), torch.stack(each))
        compiled = torch.compile(gram, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(rows[0]), each[0])


def test_gram_of_few_rows_is_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    monkeypatch.setattr(
        linalg, "gram_by_strips", lambda columns: widths.append(len(columns[0])) or columns @ columns.mT
    )
    for number in (1, 42, 43):
        rows = torch.randn(number, 1, linalg.WORTH_STRIPS, dtype=torch.float64)
        torch.testing.assert_close(gram(rows), torch.einsum("ngi,ngj->gij", rows, rows))
    assert widths == [linalg.WORTH_STRIPS]  # of 43 rows, a sixth of the width


@pytest.mark.parametrize("in_place", [True, False])
def test_a_border_is_that_of_every_group(in_place: bool) -> None:
    body, border, corner = torch.randn(2, 3, 3), torch.randn(2, 3), torch.randn(2)
    with torch.set_grad_enabled(not in_place):
        found = linalg.bordered(body, border, corner)
        assert torch.equal(linalg.bordered(body[None], border[None], corner[None]), found[None])
    for group in range(2):
        above = torch.cat([body[group], border[group].unsqueeze(1)], dim=1)
        below = torch.cat([border[group], corner[group].unsqueeze(0)])
        assert torch.equal(found[group], torch.cat([above, below.unsqueeze(0)]))
    with torch.no_grad():
        assert torch.equal(torch.vmap(linalg.bordered)(body[None], border[None], corner[None])[0], found)


def test_bordered_is_the_gram_of_rows_with_a_one() -> None:
    rows = torch.randn(7, 3, 4, dtype=torch.float64)
    whole = gram(torch.cat([rows, torch.ones(7, 3, 1, dtype=torch.float64)], dim=-1))
    corner = torch.full((3,), 7.0, dtype=torch.float64)
    torch.testing.assert_close(bordered(gram(rows), rows.sum(0), corner), whole)


# --- sides ----------------------------------------------------------------------------------------------------------


def test_diagonal_sides_are_dense_sides_in_short() -> None:
    side, damping = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    dense, matrix = torch.diag_embed(side), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(mean_eigenvalue(side, True), mean_eigenvalue(dense, False))
    torch.testing.assert_close(torch.diag_embed(damp(side, damping, True)), damp(dense, damping, False))
    torch.testing.assert_close(linalg.multiply_left(side, matrix, True), linalg.multiply_left(dense, matrix, False))
    torch.testing.assert_close(linalg.multiply_right(matrix, side, True), linalg.multiply_right(matrix, dense, False))


def test_damping_does_not_change_the_side() -> None:
    side = spd(2, 3)
    before = side.clone()
    damp(side, torch.ones(2, dtype=torch.float64), diagonal=False)
    assert torch.equal(side, before)


def test_pi_is_the_root_of_the_ratio_of_mean_eigenvalues_and_one_for_a_zero_side() -> None:
    inputs, outputs = torch.tensor([4.0, 0.0, 3.0, 0.0]), torch.tensor([1.0, 2.0, 0.0, 0.0])
    assert pi_correction(inputs, outputs).tolist() == [2.0, 1.0, 1.0, 1.0]


def test_golden_pi() -> None:
    left, right = torch.tensor([[1.0, 2.0, 0.0, 1.0]]), torch.ones(1, 2, 2)
    assert pi_correction(mean_eigenvalue(left, True), mean_eigenvalue(right, False)).tolist() == [1.0]


# --- roots ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roots", [EVERY, (-1.0,), ("cholesky",), ("cholesky_inverse", -1.0), (-0.5,), ()])
def test_roots_are_those_of_each_damped_matrix(roots: tuple[linalg.Root, ...]) -> None:
    side, damping = spd(5, 4), torch.rand(5, dtype=torch.float64)
    found, right = dense_roots(side, damping, roots)
    assert right.all() and set(found) == set(roots)
    for k in range(5):
        damped = side[k] + damping[k] * torch.eye(4)
        values, vectors = torch.linalg.eigh(damped)
        for root, stack in found.items():
            expected = {
                "cholesky": torch.linalg.cholesky(damped),
                "cholesky_inverse": torch.linalg.inv(torch.linalg.cholesky(damped)),
            }.get(root) if isinstance(root, str) else (vectors * values**root) @ vectors.mT  # fmt: skip
            torch.testing.assert_close(stack[k], expected)


def test_both_ways_to_invert_agree() -> None:
    """-1 comes from Cholesky alone, or from the eigenvalues that another power needs."""
    side, damping = spd(3, 6), torch.rand(3, dtype=torch.float64)
    by_cholesky, by_eigenvalues = (dense_roots(side, damping, roots)[0][-1.0] for roots in ((-1.0,), (-1.0, -0.5)))
    torch.testing.assert_close(by_cholesky, by_eigenvalues)


def test_eigenvalues_below_zero_count_as_zero() -> None:
    side, damping = torch.diag_embed(torch.tensor([[1.0, -1e-3]])), torch.tensor([0.1])
    expected = torch.tensor([[1.1, 0.1]]) ** -0.5
    torch.testing.assert_close(dense_roots(side, damping, (-0.5,))[0][-0.5], torch.diag_embed(expected))
    torch.testing.assert_close(diagonal_root(torch.tensor([[1.0, -1e-3]]), damping, -0.5), expected)


@pytest.mark.parametrize("roots", [(-1.0,), (-0.5,), EVERY])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_matrix_does_not_spoil_the_batch(roots: tuple[linalg.Root, ...], bad: float) -> None:
    side, damping = spd(4, 5), torch.full((4,), 0.1, dtype=torch.float64)
    good, _ = dense_roots(side, damping, roots)
    side[2, 1, 1] = bad
    found, right = dense_roots(side, damping, roots)
    assert right.tolist() == [True, True, False, True]
    for root in roots:
        torch.testing.assert_close(found[root][right], good[root][right])


def test_failures_are_found_without_an_error() -> None:
    side = torch.stack([torch.eye(3), -torch.eye(3), torch.zeros(3, 3)])
    assert dense_roots(side, torch.zeros(3), (-1.0,))[1].tolist() == [True, False, False]


def test_a_failed_matrix_is_rescued_with_more_damping() -> None:
    """-0.5 is indefinite with λ = 0.1, and definite with ten times that: the first rescue."""
    side, damping = torch.diag_embed(torch.tensor([[1.0, -0.5]])), torch.tensor([0.1])
    assert not dense_roots(side, damping, (-1.0,))[1].any()
    found, right = rescued_roots(side, damping, (-1.0,))
    assert right.all() and RESCUES[0] == (None, 10.0)
    torch.testing.assert_close(found[-1.0], torch.diag_embed(torch.tensor([[1 / 2.0, 1 / 0.5]])))


def test_a_failed_matrix_is_rescued_in_float64() -> None:
    """Rounded to float32 the damping of a huge matrix is lost, however often it is multiplied."""
    side = torch.full((1, 2, 2), 1e8)
    damping = torch.tensor([0.02])
    assert not dense_roots(side, 100 * damping, (-1.0,))[1].any()
    found, right = rescued_roots(side, damping, (-1.0,))
    assert right.all() and found[-1.0].dtype is torch.float32
    expected = torch.linalg.inv(side.double() + damping.double() * torch.eye(2))
    torch.testing.assert_close(found[-1.0].double(), expected, rtol=1e-5, atol=0)


def test_what_cannot_be_rescued_is_reported() -> None:
    side = torch.stack([torch.eye(2), torch.full((2, 2), torch.nan), -100 * torch.eye(2)])
    found, right = rescued_roots(side, torch.full((3,), 0.1), (-1.0,))
    assert right.tolist() == [True, False, False]
    assert found[-1.0][0].isfinite().all()


def test_a_matrix_whose_eigenvalues_do_not_converge_is_done_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, side = torch.linalg.eigh, spd(3, 4)

    def stumble(matrix: Tensor) -> Any:
        if (matrix == side[1]).all(-1).all(-1).any():
            raise torch.linalg.LinAlgError("did not converge")  # type: ignore[attr-defined]
        return solve(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", stumble)
    values, vectors = eigh(side)
    assert values.isnan().all(1).tolist() == [False, True, False]
    torch.testing.assert_close(((vectors * values.unsqueeze(-2)) @ vectors.mT)[[0, 2]], side[[0, 2]])
    assert dense_roots(side, torch.full((3,), 0.1, dtype=torch.float64), (-0.5,))[1].tolist() == [True, False, True]


def test_is_finite_looks_at_every_entry() -> None:
    stack = torch.zeros(3, 4, 5)
    stack[1, 3, 4], stack[2, 0, 2] = torch.nan, -torch.inf
    assert are_finite(stack).tolist() == [True, False, False]
    assert are_finite(torch.tensor([1.0, torch.nan])).tolist() == [True, False]


def test_the_inverse_from_triangular_solves_is_that_of_lapack() -> None:
    """The first is what CUDA takes."""
    lower = torch.linalg.cholesky(spd(3, 5))
    inverse = linalg.invert_triangular(lower)
    torch.testing.assert_close(inverse.mT @ inverse, linalg.invert_from_cholesky(lower))


# --- precision --------------------------------------------------------------------------------------------------------

CUDNN: Any = torch.backends.cudnn


@pytest.fixture
def user_precision() -> Iterator[Any]:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


@pytest.mark.parametrize("chosen", ["tf32", "ieee", "none"])
def test_full_precision_puts_the_users_setting_back(chosen: str, user_precision: Any) -> None:
    user_precision.fp32_precision = chosen
    with pytest.raises(KeyError), full_precision():
        assert user_precision.fp32_precision == "ieee"
        raise KeyError
    assert user_precision.fp32_precision == chosen


def test_full_precision_serves_the_older_setting(user_precision: Any) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision():
            assert user_precision.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("chosen", ["tf32", "ieee", "none"])
def test_a_backward_makes_the_settings_of_full_precision_unless_they_are_made(
    chosen: str, user_precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []
    setting = linalg.full_precision
    monkeypatch.setattr(linalg, "full_precision", lambda: entered.append(chosen) or setting())
    user_precision.fp32_precision = chosen
    with full_precision_in_eager():
        assert user_precision.fp32_precision == "ieee"
    assert user_precision.fp32_precision == chosen
    assert entered == [chosen] * (chosen != "ieee")


def test_a_backward_reads_the_older_setting(user_precision: Any) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision_in_eager():
            assert user_precision.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def convolutions() -> Iterator[Any]:
    before = CUDNN.conv.fp32_precision
    yield CUDNN.conv
    CUDNN.conv.fp32_precision = before


def chosen() -> list[str]:
    return [CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision]


def test_convolutions_and_recurrent_layers_are_left_alone_but_in_full_precision_of_everything() -> None:
    before = chosen()
    with full_precision():
        assert chosen() == before
    with full_precision(everything=True):
        assert chosen() == ["ieee", "ieee"]
        assert not CUDNN.allow_tf32  # which raises where the older setting and the newer ones differ
    assert chosen() == before and CUDNN.allow_tf32


def test_who_set_convolutions_by_the_newer_setting_has_it_back(convolutions: Any) -> None:
    convolutions.fp32_precision = "ieee"
    before = chosen()
    assert before[0] != before[1]
    with full_precision(everything=True):
        assert chosen() == ["ieee", "ieee"]
    assert chosen() == before


def test_the_older_setting_can_be_read_inside(user_precision: Any) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_without_cudnn_nothing_else_changes(convolutions: Any) -> None:
    convolutions.fp32_precision = "ieee"  # torch.backends.cudnn.flags raises then
    before = chosen()
    with pytest.raises(KeyError), without_cudnn():
        assert not CUDNN.enabled and chosen() == before
        raise KeyError
    assert CUDNN.enabled and chosen() == before


@pytest.mark.parametrize("way", ["record_in_training", "record"])
def test_factors_are_products_in_full_precision(way: str, user_precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is recorded during training, whose backward is the user's."""
    x = torch.randn(6, 4)
    net = kfac_fx.compile(nn.Linear(4, 3), (x,), loss="categorical")
    seen: list[str] = []

    def gram(*rows: Tensor) -> Tensor:
        seen.append(user_precision.fp32_precision)
        return product(*rows)

    product = statistics.gram
    monkeypatch.setattr(statistics, "gram", gram)
    user_precision.fp32_precision = "tf32"
    if way == "record":
        net.record((x,), {})
    else:
        outputs, _ = net.record_in_training((x,), {})
        F.cross_entropy(outputs, torch.zeros(6, dtype=torch.int64)).backward()
    assert seen == ["ieee", "ieee"]
    assert user_precision.fp32_precision == "tf32"


# --- orthogonal iteration ---------------------------------------------------------------------------------------------


def covariances(width: int, number: int, rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(number, width, rank, generator=generator, dtype=dtype)
    return columns * torch.arange(1, rank + 1).to(dtype).rsqrt() @ columns.mT / rank


@pytest.mark.parametrize("rank", [40, 7], ids=["full rank", "rank 7"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_step_of_orthogonal_iteration_is_orthogonal(dtype: torch.dtype, rank: int) -> None:
    before = covariances(40, 3, rank, dtype)
    matrix = before + 0.1 * covariances(40, 3, rank, dtype, seed=1)
    values, vectors, good = iterated_basis(matrix, torch.linalg.eigh(before)[1])
    assert good.all()
    identity = torch.eye(40, dtype=dtype).expand(3, -1, -1)
    torch.testing.assert_close(vectors.mT @ vectors, identity, rtol=0.0, atol=5e-5)
    torch.testing.assert_close(values, (vectors.mT @ matrix @ vectors).diagonal(dim1=-2, dim2=-1))


def test_orthogonal_iteration_keeps_eigenvectors_and_orders_them() -> None:
    matrix = covariances(20, 2, 20, torch.float64)
    values, vectors = torch.linalg.eigh(matrix)
    found, same, good = iterated_basis(matrix, vectors)
    assert good.all()
    torch.testing.assert_close(found, values.flip(-1), rtol=1e-5, atol=1e-12)
    overlap = (same.mT @ vectors.flip(-1)).abs()
    torch.testing.assert_close(overlap, torch.eye(20, dtype=overlap.dtype).expand(2, -1, -1), rtol=0.0, atol=1e-4)


def test_repeated_orthogonal_iteration_finds_the_eigenvectors() -> None:
    """With a ratio of two between neighbors of the eigenvalues, a step halves the error."""
    generator = torch.Generator().manual_seed(0)
    first, other = (torch.linalg.qr(torch.randn(2, 8, 8, generator=generator).double())[0] for _ in range(2))
    eigenvalues = 2.0 ** -torch.arange(8).double()
    matrix, basis = (first * eigenvalues) @ first.mT, other
    for _ in range(60):
        values, basis, good = iterated_basis(matrix, basis)
        assert good.all()
    torch.testing.assert_close(values, eigenvalues.expand(2, -1), rtol=1e-6, atol=0.0)


def test_matrices_without_a_basis_are_decomposed() -> None:
    matrix = covariances(12, 3, 12, torch.float64)
    basis = torch.linalg.eigh(matrix)[1]
    basis[1] = 0
    assert iterated_basis(matrix, basis)[2].tolist() == [True, False, True]
    values, vectors = renewed_eigh(matrix, basis)
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mT, matrix, rtol=1e-4, atol=1e-6)


def test_orthogonal_iteration_of_a_matrix_that_is_not_finite_fails_alone() -> None:
    matrix = covariances(12, 3, 12, torch.float64)
    basis = torch.linalg.eigh(matrix)[1]
    matrix[2, 0, 0] = torch.nan
    values, vectors = renewed_eigh(matrix, basis)
    assert values[:2].isfinite().all() and vectors[:2].isfinite().all()
    assert values[2].isnan().all()


def test_products_of_halves_are_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(2, 30, 30, generator=generator).bfloat16() for _ in range(2))
    assert torch.equal(half_products(left, right, torch.float32), left.float() @ right.float())
    assert half_products(left, right).dtype is torch.bfloat16
