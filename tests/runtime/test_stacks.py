"""Groups of blocks: products with many vectors at once, and what shares a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kfac_fx.blocks.block import make_groups
from kfac_fx.factors.inverses import Inverter
from tests.runtime.fisher_cases import register
from tests.runtime.two_blocks import FORMS, PARAMETERS, group_of, vector

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("approximation", ["kron", "kron_in_diag", "kron_both_diag", "full", "diagonal"])
@pytest.mark.parametrize("root", [1.0, -1.0, "cholesky"])
@pytest.mark.parametrize("transpose", [False, True])
def test_many_vectors_at_once_are_multiplied_as_each_alone(
    approximation: str, root: float | str, transpose: bool
) -> None:
    group, sums = group_of(approximation)
    group.update(sums, 5, decay=0.0)
    Inverter([group], tuple(group.roots)).update()
    matrices = torch.stack([group.pack(vector()) for _ in range(4)])
    operators = group.operators(root)
    products = group.applied(matrices, operators, transpose)
    each = torch.stack([group.multiply(matrix, root, transpose) for matrix in matrices])
    torch.testing.assert_close(products, each)


def test_fewer_rows_than_cases_scale_the_block_down() -> None:
    """F = c A ⊗ G with c = count / N, also below 1: cases that are padding have no rows."""
    (group, sums), matrices = group_of(), torch.randn(2, 1, 3, 2)
    group.damping = torch.zeros(())
    group.update(sums, 20, decay=0.0)
    assert float(sums[0]["count"]) == 10
    a, g = (group.factors[name].value for name in ("A", "G"))
    torch.testing.assert_close(group.multiply(matrices, 1.0), 0.5 * g @ matrices @ a)


def test_groups_share_a_shape_and_an_approximation() -> None:
    registrations = [register(FORMS[0], "kron"), register(FORMS[1], "full")]
    wide = replace(registrations[0], blocks=(1, 2))
    for members in (registrations, [wide, register(FORMS[1], "kron")]):
        assert len(make_groups(members, PARAMETERS, roots=(), damping=torch.tensor(0.1))) == 2
