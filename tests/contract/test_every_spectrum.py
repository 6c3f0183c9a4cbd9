"""s F + δ I by eigenvectors, for every block: against the dense block, in float64."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockOperator, make_block
from kfac_fx.fisher.spectrum import Spectrum, System
from tests.runtime.fisher_cases import CASES, FORMS, draw, register

every_block = pytest.mark.parametrize(("form", "approximation"), CASES, ids=[f"{f}-{a}" for f, a in CASES])
SCALE, DAMPING = 40.0, 0.7


@lru_cache
def seen(form: str, approximation: str) -> tuple[BlockOperator, Spectrum, Tensor, dict[str, Tensor]]:
    """A block, its spectrum, s F + δ I written out densely, and a vector."""
    registration, parameters = register(FORMS[form], approximation), FORMS[form].parameters
    block = make_block(registration, parameters=parameters)
    for _ in range(3):
        block.update(draw(registration, FORMS[form], 7), 7, decay=0.5)
    vector = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    shapes = {name: tensor.shape for name, tensor in vector.items()}
    spectrum = Spectrum([System.of(block.group)], shapes, SCALE, DAMPING)
    full = block.full_fisher_block()
    return block, spectrum, SCALE * full + DAMPING * torch.eye(len(full), dtype=full.dtype), vector


def flat(block: BlockOperator, vector: dict[str, Tensor]) -> Tensor:
    """In the order of the flattened matrix."""
    return block.group.pack(vector, block.member).flatten()


@every_block
def test_products_are_those_of_the_dense_block(form: str, approximation: str) -> None:
    block, spectrum, dense, vector = seen(form, approximation)
    v = flat(block, vector)
    torch.testing.assert_close(flat(block, spectrum.multiply(vector)), dense @ v)
    torch.testing.assert_close(flat(block, spectrum.multiply_inverse(vector)), torch.linalg.solve(dense, v))
    values, vectors = torch.linalg.eigh(dense)
    root = vectors @ (values**-0.5 * (vectors.mT @ v))
    torch.testing.assert_close(flat(block, spectrum.multiply_matpower(-0.5, vector)), root)


@every_block
def test_many_vectors_are_multiplied_as_single_ones_are(form: str, approximation: str) -> None:
    _, spectrum, _, vector = seen(form, approximation)
    other = {name: torch.randn_like(tensor) for name, tensor in vector.items()}
    both = spectrum.multiply_matpower(
        -0.5, {name: torch.stack([tensor, other[name]]) for name, tensor in vector.items()}
    )
    for n, v in enumerate((vector, other)):
        for name, expected in spectrum.multiply_matpower(-0.5, v).items():
            torch.testing.assert_close(both[name][n], expected)


@every_block
def test_numbers_are_those_of_the_dense_block(form: str, approximation: str) -> None:
    block, spectrum, dense, _ = seen(form, approximation)
    torch.testing.assert_close(spectrum.log_determinant(), torch.logdet(dense))
    torch.testing.assert_close(spectrum.trace(), dense.trace())
    torch.testing.assert_close(spectrum.trace(-1), torch.linalg.inv(dense).trace())
    (values,) = spectrum.eigenvalues().values()
    assert values.shape == block.group.shape
    torch.testing.assert_close(values.flatten().sort().values, torch.linalg.eigvalsh(dense))


@every_block
def test_diagonals_are_those_of_the_dense_block(form: str, approximation: str) -> None:
    block, spectrum, dense, _ = seen(form, approximation)
    for exp, expected in ((1, dense), (-1, torch.linalg.inv(dense)), (2, dense @ dense)):
        torch.testing.assert_close(flat(block, spectrum.diagonal(exp)), expected.diagonal())


@every_block
def test_samples_have_the_inverse_for_their_covariance(form: str, approximation: str) -> None:
    """White noise e becomes C e with C Cᵀ the inverse, so no statistics of samples are needed: e is the identity."""
    block, spectrum, dense, vector = seen(form, approximation)
    (system,) = spectrum.systems
    size, shape = len(dense), system.values.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *sizes, **options: torch.eye(size).double().view(sizes))
        columns = spectrum.sample(size)
    assert all(columns[name].shape == (size, *tensor.shape) for name, tensor in vector.items())
    each = [flat(block, {name: columns[name][k] for name in columns}) for k in range(size)]
    c = torch.stack(each, dim=1)
    assert shape[0] == 1  # so that a sample's noise has as many numbers as the block has parameters
    torch.testing.assert_close(c @ c.mT, torch.linalg.inv(dense))
