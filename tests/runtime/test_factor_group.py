"""The factors of a group: vectors as matrices, batches that are averaged in, and the split of the damping."""

from __future__ import annotations

import math

import pytest
import torch

from kfac_fx.fisher.block import make_block
from kfac_fx.fisher.series import SeriesGroup
from kfac_fx.passes.ir import Registration
from tests.runtime.fisher_cases import FORMS, draw, register
from tests.runtime.two_blocks import NAMES, group_of, vector

pytestmark = pytest.mark.usefixtures("float64")


def test_unpack_is_the_inverse_of_pack_in_the_precision_of_the_vector() -> None:
    group, _ = group_of()
    tensors = {**vector(), "second": torch.randn(3, 2, dtype=torch.float32)}
    matrices = group.pack(tensors)
    assert matrices.shape == (2, 1, 3, 2) and matrices.dtype is torch.float64
    unpacked = group.unpack(matrices, tensors)
    assert all(torch.equal(unpacked[name], tensors[name]) for name in NAMES)
    only = group.pack(tensors, slice(1, 2))
    assert torch.equal(only, matrices[1:]) and list(group.unpack(only, tensors, slice(1, 2))) == ["second"]


def test_a_block_whose_sums_are_not_finite_is_skipped_alone() -> None:
    group, sums = group_of()
    sums[1]["G"][0, 0, 0] = torch.inf
    group.update(sums, 5, decay=0.0)
    assert group.skipped.tolist() == [0, 1] and group.factors["A"].total_weight.tolist() == [1, 0]
    assert group.failures(slice(0, 1)) == (0, 0) and group.failures() == (0, 1)


def test_sums_that_are_not_accepted_change_nothing_and_are_no_failure() -> None:
    group, sums = group_of()
    group.update(sums, 5, decay=0.5, accept=torch.tensor(False))
    assert not any(stack.total_weight.any() for stack in group.factors.values()) and group.failures() == (0, 0)


def test_the_split_damping_is_the_whole_one_in_the_product() -> None:
    """c λ_A λ_G = λ."""
    group, sums = group_of()
    group.update(sums, 5, decay=0.0)
    dampings = group.split_damping()
    assert group.right is not None
    product = group.positions().unsqueeze(-1) * dampings[group.left] * dampings[group.right]
    torch.testing.assert_close(product, torch.full((2, 1), 0.3))


def test_a_relative_damping_is_a_share_of_the_mean_eigenvalue_of_every_side() -> None:
    """One, where a side is zero and has no share."""
    group, sums = group_of()
    group.update(sums, 5, decay=0.0)
    group.update(sums, 5, decay=0.5)
    group.factors["A"].moment[1] = 0.0
    group.relative_damping = 0.1
    assert group.right is not None
    dampings = group.split_damping()
    for side in (group.left, group.right):
        means = group.factors[side.factor].value.diagonal(dim1=-2, dim2=-1).mean(-1)
        torch.testing.assert_close(dampings[side], torch.where(means > 0, 0.1 * means, 1.0))
    assert dampings[group.right][1].item() == 1.0


@pytest.mark.parametrize("name", ["linear", "generic"])
def test_matrices_have_the_precision_of_the_factors_and_products_that_of_the_vector(name: str) -> None:
    approximation = "diagonal" if name == "generic" else "kron"
    registration, parameters = register(FORMS[name], approximation), FORMS[name].parameters
    block = make_block(registration, parameters=parameters, damping=0.1, dtype=torch.float32)
    block.update({n: t.float() for n, t in draw(registration, FORMS[name], 5).items()}, 5, decay=0.0)
    given = {n: t.double() for n, t in parameters.items()}
    assert block.group.pack(given).dtype is torch.float32
    assert {tensor.dtype for tensor in block.multiply(given).values()} == {torch.float64}


def test_a_batch_without_rows_leaves_the_number_of_steps() -> None:
    """Pairs of rows are numbers a case, as rows are, so both fall together."""
    registration = register(FORMS["linear"], "kron_series_1")
    block = make_block(registration, parameters=FORMS["linear"].parameters, damping=0.1)
    sums = draw(registration, FORMS["linear"], 6)
    block.update(sums, 6, decay=0.5)
    assert isinstance(block.group, SeriesGroup)
    steps = block.group.steps().clone()
    block.update({name: torch.zeros_like(tensor) for name, tensor in sums.items()}, 6, decay=0.5)
    assert steps.item() > 1 and torch.equal(block.group.steps(), steps)


def test_the_cost_is_that_of_the_decompositions_of_all_blocks() -> None:
    assert group_of()[0].cost == 2 * (3**3 + 2**3)
    assert group_of("diagonal")[0].cost == 0


def test_in_the_state_a_total_weight_is_a_number_and_a_diagonal_a_matrix() -> None:
    for shape in ((), (3,)):
        registration = Registration("generic", None, ("t",), (), "diagonal")
        state = make_block(registration, parameters={"t": torch.zeros(shape)}).state()
        assert state["F/total_weight"].shape == () and state["F/moment"].shape == (1, math.prod(shape), 1)
