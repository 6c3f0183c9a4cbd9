"""Powers of blocks that are given by a square root: by eigenvectors of the dense block and by Lanczos' process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kfac_fx.fisher.block import make_block, make_groups
from kfac_fx.fisher.groups import Inverter
from kfac_fx.passes.errors import ApproximationError
from kfac_fx.passes.matrix import MatrixForm
from tests.runtime.fisher_cases import sequence_statistics, sequences, weight
from tests.runtime.test_series import FORM, block_of, both, dense_block, draw_vector, flat, registered

pytestmark = pytest.mark.usefixtures("float64")
POWERS = (-2.5, -2.0, -1.3, -0.5, 0.0, 0.7, 1.5, 3.0)


@both
@pytest.mark.parametrize("dense", [True, False])
def test_every_real_power_is_that_of_the_dense_block(
    approximation: str, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks by eigenvectors, large ones by Lanczos' process."""
    monkeypatch.setattr("kfac_fx.fisher.series.DENSE_ROWS", 9 if dense else 8)
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
        monkeypatch.setattr("kfac_fx.fisher.series.DENSE_ROWS", limit)
        (group,) = make_groups(registrations, vector, roots=(0.5, -1.5), damping=torch.tensor(0.1))
        assert len(group) == 2 and group.is_dense is (limit == 8)
        group.update(sums, 6, decay=0.0)
        Inverter([group], tuple(group.roots)).update()
        products.append([group.multiply(group.pack(vector), exp) for exp in (0.5, -1.5)])
    for dense, other in zip(*products, strict=True):
        torch.testing.assert_close(other, dense, rtol=1e-9, atol=1e-9)


@both
def test_what_lanczos_does_not_come_to_is_an_error(approximation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.fisher.series.DENSE_ROWS", 1)
    monkeypatch.setattr("kfac_fx.fisher.series.LANCZOS_STEPS", 3)
    block = block_of(approximation, 4, roots=(-0.5, 2.0))
    text = (
        rf"linear\(weight, bias\): 3 steps of Lanczos' process left a relative error of .* in the power -0.5 of "
        rf"{approximation}, wanted 1e-10.\nUse more damping, whole numbers for `exps`, or 'kron_indep' for these"
    )
    with pytest.raises(ApproximationError, match=text):
        block.multiply_matpower(draw_vector(), -0.5)
    block.multiply_matpower(draw_vector(), 2)


def test_powers_of_blocks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.fisher.series.DENSE_ROWS", 1)
    single, double = (block_of("kron_series_2", 4, roots=(-0.5,), dtype=d) for d in (torch.float32, torch.float64))
    vector = draw_vector()
    found = single.multiply_matpower({name: tensor.float() for name, tensor in vector.items()}, -0.5)
    for name, exact in double.multiply_matpower(vector, -0.5).items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name].double(), exact, rtol=1e-4, atol=1e-5)


def test_powers_of_a_block_that_never_decomposed_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_fx.fisher.series.DENSE_ROWS", 1)
    block = make_block(
        registered("kron_series_2", 3), parameters=FORM.parameters, damping=0.1, roots=(-0.5,), dtype=torch.float64
    )
    block.factors["G"].moment.fill_(torch.nan)
    block.group.updated = True
    block.update_inverses()
    assert block.failures.decompositions == 1
    assert not any(product.any() for product in block.multiply_matpower(draw_vector(), -0.5).values())


def test_a_block_of_low_rank_has_no_negative_eigenvalues() -> None:
    registration = registered("kron_series_2", 3)
    block = make_block(registration, parameters=FORM.parameters, damping=0.1, roots=(-1.0,), dtype=torch.float64)
    block.update(sequence_statistics(*sequences(3, (1, 1, 1), 2, 3), True, (1, 3, 3)), 1, decay=0.0)
    values, (vectors,) = block.group.eigensystem()
    assert (values >= 0).all() and (values < 1e-9).any()
    rebuilt = (vectors * values.view(*vectors.shape[:-2], 1, -1)) @ vectors.mT
    torch.testing.assert_close(rebuilt.squeeze(), block.group.dense(0).squeeze())


def test_every_block_of_a_stack_is_rescued_on_its_own() -> None:
    """A block that failed takes the roots of the first attempt in which it does not; the others keep theirs."""
    registrations = [registered("kron_series_1", 3, (3, 2)) for _ in range(3)]
    (group,) = make_groups(registrations, {"weight": torch.zeros(3, 2)}, roots=(-1.0,), damping=torch.tensor(0.1))
    group.update(
        [sequence_statistics(*sequences(3, (6, 1, 1), 2, 3), False, (1, 3, 2)) for _ in range(3)], 6, decay=0.0
    )
    attempts = iter([[True, False, True], [False, True, True], [True, True, False]])
    numbers = iter(range(1, 4))

    def decomposition(_: object) -> tuple[object, torch.Tensor]:
        number = next(numbers)
        return {
            name: [torch.full_like(tensor, number) for tensor in tensors] for name, tensors in group.ingredients.items()
        }, torch.tensor(next(attempts))

    group.decomposition = decomposition
    group.store({}, group.split_damping())
    assert group.failed.tolist() == [0, 0, 0]
    for tensor in group.ingredients["N inverse"]:
        assert [block.unique().tolist() for block in tensor] == [[2], [1], [3]]
