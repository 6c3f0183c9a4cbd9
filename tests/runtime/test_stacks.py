"""Groups of blocks: vectors as matrices, batches that are averaged in, and products with many vectors at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kfac_fx.blocks.block import make_groups
from kfac_fx.factors.factor import additive
from kfac_fx.factors.inverses import Inverter
from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.passes.matrix import MatrixForm
from tests.runtime.fisher_cases import Form as ToyForm
from tests.runtime.fisher_cases import draw, register, weight

pytestmark = pytest.mark.usefixtures("float64")
NAMES = ("first", "second")
FORMS = [ToyForm(MatrixForm((name, weight((3, 2), "o i -> o i")[1]), None), {name: (3, 2)}) for name in NAMES]
PARAMETERS = {name: torch.zeros(3, 2, dtype=torch.float64) for name in NAMES}


def group_of(approximation: str = "kron") -> tuple[BlockGroup, list[dict[str, Tensor]]]:
    """A group of two blocks, and the sums of one batch of five cases."""
    torch.manual_seed(0)
    registrations = [register(form, approximation) for form in FORMS]
    (group,) = make_groups(registrations, PARAMETERS, roots=(-1.0, "cholesky"), damping=torch.tensor(0.3))
    sums = [
        additive(registration.structure, draw(registration, form, 5))
        for registration, form in zip(registrations, FORMS, strict=True)
    ]
    return group, sums


def vector() -> dict[str, Tensor]:
    return {name: torch.randn(3, 2) for name in NAMES}


def test_unpack_is_the_inverse_of_pack_in_the_precision_of_the_vector() -> None:
    group, _ = group_of()
    tensors = {**vector(), "second": torch.randn(3, 2, dtype=torch.float32)}
    matrices = group.pack(tensors)
    assert matrices.shape == (2, 1, 3, 2) and matrices.dtype is torch.float64
    unpacked = group.unpack(matrices, tensors)
    assert all(torch.equal(unpacked[name], tensors[name]) for name in NAMES)
    only = group.pack(tensors, slice(1, 2))
    assert torch.equal(only, matrices[1:]) and list(group.unpack(only, tensors, slice(1, 2))) == ["second"]


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
