"""Groups of blocks: products with many vectors at once, and what shares a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kfac_fx.fisher.block import make_block, make_groups
from kfac_fx.fisher.groups import Inverter
from tests.runtime.fisher_cases import FORMS as FORMS_OF_ALL
from tests.runtime.fisher_cases import draw, register
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
    wider = replace(register(FORMS[1], "kron"), blocks=(3, 1))
    for members in (registrations, [wide, register(FORMS[1], "kron")], [wide, wider]):
        assert len(make_groups(members, PARAMETERS, roots=(), damping=torch.tensor(0.1))) == 2


def test_the_elements_are_those_of_factors_roots_and_extras() -> None:
    group, _ = group_of()
    group.extras = {"of an optimizer": torch.zeros(2, 1, 3, 2)}
    sides = 3 * 3 + 2 * 2
    assert group.elements == 2 * ((sides + 1) + 2 * sides + 6)  # A, G and c; two roots; the extra


@pytest.mark.parametrize("approximation", ["kron", "kron_in_diag", "kron_both_diag", "full", "diagonal"])
def test_a_factor_that_rounding_made_negative_has_no_negative_eigenvalues(approximation: str) -> None:
    group, sums = group_of(approximation, cases=8)  # more than a row has elements: no eigenvalue is zero
    group.update(sums, 8, decay=0.0)
    group.factors[group.left.factor].moment.neg_()
    assert not group.eigensystem()[0].any()


def test_a_block_with_one_group_that_cannot_be_decomposed_keeps_its_last_roots() -> None:
    form = FORMS_OF_ALL["grouped convolution"]
    registration = register(form, "kron")
    block = make_block(registration, parameters=form.parameters, damping=0.1, roots=(-1.0, "cholesky"))
    block.update(draw(registration, form, 5), 5, decay=0.0)
    block.update_inverses()
    before = [operator.clone() for operators in block.group.roots.values() for operator in operators]
    block.factors["G"].moment[0] -= 1e9 * torch.eye(2)
    block.update_inverses()
    assert block.failures.decompositions == 1
    after = [operator for operators in block.group.roots.values() for operator in operators]
    assert all(map(torch.equal, before, after))


def test_a_process_that_keeps_no_factors_knows_no_failures() -> None:
    group, _ = group_of()
    group.here, group.failed = False, group.failed.to("meta")
    assert group.failures() == (0, 0)
