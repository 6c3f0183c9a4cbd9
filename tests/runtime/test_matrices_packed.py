"""Symmetric matrices in half of their memory: kfac_fx/linalg/matrices.py."""

import pytest
import torch

from kfac_fx.linalg.matrices import pack_symmetric, unpack_symmetric


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_symmetric_matrices_come_back_bit_for_bit(size: int) -> None:
    matrices = torch.randn(2, 3, size, size)
    symmetric = matrices.triu() + matrices.triu(1).mT
    rows = pack_symmetric(matrices)  # reads the elements on and above the diagonal only
    assert rows.shape == (2, 3, (size + 1) // 2, size + 1)
    assert torch.equal(unpack_symmetric(rows), symmetric)


def test_sums_of_packed_matrices_are_packed_sums() -> None:
    first, second = (m.mT @ m for m in torch.randn(2, 9, 5, dtype=torch.float64))
    torch.testing.assert_close(unpack_symmetric(pack_symmetric(first) + pack_symmetric(second)), first + second)


def test_elements_that_are_not_finite_stay_where_they_are() -> None:
    matrix = torch.eye(4)
    matrix[1, 2] = matrix[2, 1] = torch.nan
    assert torch.equal(unpack_symmetric(pack_symmetric(matrix)).isfinite(), matrix.isfinite())
