"""Sides in diagonal blocks, from rows to products, against dense sides with all between the blocks struck out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.compiled.report import rows
from kfac_fx.passes.approximations import INPUTS, OUTPUTS, named
from kfac_fx.recording.statistics import sum_of


def struck_out(dense: Tensor, width: int) -> Tensor:
    """A matrix [d, d] without what is outside of its diagonal blocks [width, width]."""
    block = torch.arange(len(dense)) // width
    return torch.where(block[:, None] == block[None, :], dense, 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("blocks", [2, 3, 5])
@pytest.mark.parametrize("mask", [None, (4, 3), (4, 3, 2)], ids=["all rows", "some rows", "some rows of each group"])
def test_the_statistics_are_the_diagonal_blocks_of_the_dense_ones(
    bias: bool, blocks: int, mask: tuple[int, ...] | None
) -> None:
    x, d = torch.randn(4, 3, 2, 5, dtype=torch.float64), torch.randn(4, 3, 2, 7, dtype=torch.float64)
    kept = None if mask is None else torch.arange(math.prod(mask)).view(mask) % 5 < 3
    for name, size in (("A", 5 + bias), ("G", 7)):
        arguments = x, d, bias, (2, 7, 5 + bias), kept
        dense, cut = (sum_of(s.name, *arguments) for s in (named(name), named(name).in_blocks(blocks)))
        width = -(-size // blocks)
        assert cut.shape == named(f"{name}/{blocks}").shape((2, 7, 5 + bias), 4) == (2 * blocks, width, width)
        for matrix, parts in zip(dense, cut.unflatten(0, (2, blocks)), strict=True):
            torch.testing.assert_close(torch.block_diag(*parts)[:size, :size], struck_out(matrix, width))


@pytest.mark.parametrize("name", ["A", "G"])
def test_rows_that_all_cases_share_count_for_every_case(name: str) -> None:
    x, d = torch.randn(1, 3, 1, 5, dtype=torch.float64), torch.randn(4, 3, 1, 2, dtype=torch.float64)
    halves = named(name).in_blocks(2).name
    every = x.expand(4, -1, -1, -1).contiguous()
    torch.testing.assert_close(*(sum_of(halves, rows, d, True, (1, 2, 6)) for rows in (x, every)))


def estimated(model: nn.Module, x: Tensor, **options: int) -> kfac_fx.FisherEstimator:
    net = kfac_fx.compile(model, loss="normal", **options)
    estimator = kfac_fx.FisherEstimator(net, damping=0.1, seed=0)
    estimator.update_covariances(x)
    estimator.update_inverses()
    return estimator


def model_and_batch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    return model, torch.randn(50, 10, dtype=torch.float64)


def test_a_wide_layer_has_the_block_diagonal_part_of_its_dense_block() -> None:
    model, x = model_and_batch()
    dense, wide = (estimated(model, x, dense_limit=limit).blocks[("0.weight", "0.bias")] for limit in (4096, 8))
    assert wide.registration.blocks == (2, 3)  # of at most 64 // 9 = 7 outputs, 64 // 11 = 5 columns
    a, g, c = (dense.factors[name].value for name in ("A", "G", "positions"))
    expected = c * torch.kron(struck_out(g[0], 5), struck_out(a[0], 4))
    torch.testing.assert_close(wide.full_fisher_block(), expected)


@pytest.mark.parametrize(
    "mode", ["gradients", "empirical", "curvature_prop", "exact", "curvature_prop_GGN", "exact_GGN"]
)
def test_every_estimation_mode_knows_wide_sides(mode: str) -> None:
    model, x = model_and_batch()
    found = {}
    for limit in (4096, 8):
        net = kfac_fx.compile(model, loss="normal", dense_limit=limit)
        estimator = kfac_fx.FisherEstimator(net, estimation_mode=mode, seed=0)
        estimator.update_covariances(x, targets=x[:, :4] if mode == "empirical" else None)
        found[limit] = estimator.blocks["0.weight", "0.bias"].factors
    for name, width in (("A", 4), ("G", 5)):
        dense, parts = found[4096][name].value[0], found[8][name].value
        torch.testing.assert_close(torch.block_diag(*parts)[: len(dense), : len(dense)], struck_out(dense, width))


def test_the_training_backward_records_wide_sides_over_micro_batches() -> None:
    model, x = model_and_batch()
    found = {}
    for limit in (4096, 8):
        net = kfac_fx.compile(model, loss="normal", dense_limit=limit)
        optimizer = kfac_fx.KFAC(net, lr=0.0, damping=1.0, estimation_mode="empirical")
        for half in x.split(25):
            ((net(half) - half[:, :4]).square().sum() / 50).backward()
        optimizer.step()
        found[limit] = optimizer.estimator.blocks["0.weight", "0.bias"].factors
        model.zero_grad()
    for name, width in (("A", 4), ("G", 5)):
        dense, parts = found[4096][name].value[0], found[8][name].value
        torch.testing.assert_close(torch.block_diag(*parts)[: len(dense), : len(dense)], struck_out(dense, width))


def test_products_compile_whole_and_the_state_is_resumed() -> None:
    model, x = model_and_batch()
    estimator = estimated(model, x, dense_limit=8)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    expected = estimator.multiply_inverse(vector)
    compiled = torch.compile(estimator.multiply_inverse, fullgraph=True, backend="aot_eager")
    for name, product in compiled(vector).items():
        torch.testing.assert_close(product, expected[name])
    net = kfac_fx.compile(model, loss="normal", dense_limit=8)
    other = kfac_fx.FisherEstimator(net, damping=0.1, seed=1)
    other.load_state_dict(estimator.state_dict())
    assert all(torch.equal(product, expected[name]) for name, product in other.multiply_inverse(vector).items())


def test_the_report_shows_the_blocks_and_the_memory_they_take() -> None:
    model, x = model_and_batch()
    net = kfac_fx.compile(model, loss="normal", dense_limit=8)
    first = net.report.to_dict()["registrations"][0]
    assert first["factors"] == {"A": [3, 4, 4], "G": [2, 5, 5]}
    assert first["reason"] == "a side is wider than dense_limit=8"
    assert rows(net.program)[0].factors_text == "A 3 blocks of 4 x 4, G 2 blocks of 5 x 5"


def test_the_mean_eigenvalue_is_that_of_the_whole_side() -> None:
    """Its filling counts for nothing, so that the damping is split as for a dense side of these blocks."""
    model, x = model_and_batch()
    dense, wide = (estimated(model, x, dense_limit=limit) for limit in (4096, 8))
    for side, width in ((OUTPUTS, 9), (INPUTS, 11)):
        means = [
            group.mean_eigenvalue(side) for est in (dense, wide) for group in est.groups if group.shape == (1, 9, 11)
        ]
        value = dense.blocks["0.weight", "0.bias"].factors[side.factor].value[0]
        torch.testing.assert_close(means, [(value.trace() / width).view(1, 1)] * 2)
