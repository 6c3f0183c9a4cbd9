"""The factors of a group: vectors as matrices, batches that are averaged in, and the split of the damping."""

from __future__ import annotations

import pytest
import torch

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
