"""Uncorrelated activations: the roots of A from two matrices as wide as the channels, against the dense A."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kfac_fx.fisher.block import make_block, make_groups
from kfac_fx.fisher.block_diagonal import UncorrelatedGroup, waves
from kfac_fx.passes.matrix import MatrixForm
from tests.runtime.fisher_cases import FORMS, Form, draw, register, weight

pytestmark = pytest.mark.usefixtures("float64")
VARIANTS = ("kron_sua", "kron_sua_zero_mean", "kron_sua_centered")
FORM = FORMS["grouped convolution"]


def group_of(approximation: str) -> UncorrelatedGroup:
    torch.manual_seed(0)
    registration = register(FORM, approximation)
    block = make_block(registration, parameters=FORM.parameters, damping=0.3)
    block.update(draw(registration, FORM, 7), 7, decay=0.0)
    assert isinstance(block.group, UncorrelatedGroup)
    return block.group


def dense_inputs(group: UncorrelatedGroup, approximation: str) -> Tensor:
    """A = Σ ⊗ I ⊕ [0] + m mᵀ of the module's docstring, [g, i, i]."""
    second = group.factors["A"].value[0]
    channels, kernel, bias = group.channels, group.kernel, int(group.bias)
    mean, square = second[:, :-1, -1], second[:, :-1, :-1]
    covariance = square if approximation == "kron_sua_zero_mean" else square - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    mean = mean if approximation == "kron_sua" else torch.zeros_like(mean)
    m = torch.cat([mean.repeat_interleave(kernel, -1), torch.ones(len(mean), bias)], dim=-1)
    body = torch.stack([torch.kron(group_covariance, torch.eye(kernel)) for group_covariance in covariance])
    size = channels * kernel
    a = m.unsqueeze(-1) * m.unsqueeze(-2)
    a[:, :size, :size] += body
    return a


@pytest.mark.parametrize("approximation", VARIANTS)
def test_the_dense_side_is_that_of_the_assumptions(approximation: str) -> None:
    group = group_of(approximation)
    parts = [group.value(side)[0] for side in group.sides[1:]]
    torch.testing.assert_close(group.joined(parts), dense_inputs(group, approximation))


@pytest.mark.parametrize("approximation", VARIANTS)
def test_the_mean_eigenvalue_is_that_of_the_dense_side(approximation: str) -> None:
    group = group_of(approximation)
    assert group.right is not None
    trace = dense_inputs(group, approximation).diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(group.mean_eigenvalue(group.right)[0], trace)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_waves_are_orthonormal_and_begin_with_the_mean(size: int) -> None:
    basis = waves(size)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(size))
    torch.testing.assert_close(basis[:, 0], torch.full((size,), size**-0.5))


def test_blocks_of_other_assumptions_are_other_groups() -> None:
    parameters = {f"{n}.{name}": tensor for n in range(4) for name, tensor in FORM.parameters.items()}
    registrations = []
    for n, approximation in enumerate((*VARIANTS, VARIANTS[0])):
        plain = register(FORM, approximation)
        registrations.append(replace(plain, parameters=tuple(f"{n}.{name}" for name in plain.parameters)))
    groups = make_groups(registrations, parameters, roots=(-1.0,), damping=torch.tensor(0.1))
    assert [[r.approximation for r in group.registrations] for group in groups] == [
        ["kron_sua", "kron_sua"], ["kron_sua_zero_mean"], ["kron_sua_centered"],
    ]  # fmt: skip


def test_kernels_of_other_sizes_are_other_groups_also_if_their_matrices_are_of_one_shape() -> None:
    shapes = {"wide": (2, 2, 3), "tall": (2, 3, 2)}
    registrations = [
        replace(
            register(
                Form(MatrixForm((name, weight(shape, "o c k -> o (c k)")[1]), None), {"weight": shape}), "kron_sua"
            ),
            parameters=(name,),
        )
        for name, shape in shapes.items()
    ]
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert len(make_groups(registrations, parameters, roots=(-1.0,), damping=torch.tensor(0.1))) == 2
