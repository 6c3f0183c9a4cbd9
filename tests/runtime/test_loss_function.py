"""The base class of losses, on a distribution whose Fisher has any factor B: the products that follow from it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kfac_fx.losses import LossFunction, Normal
from kfac_fx.passes.errors import LossError, TargetsMissing
from kfac_fx.passes.matrix import precise

N = 3
B = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]])  # from an inner space of 3 to inputs of 2


class Toy(LossFunction):
    """Cases are rows of two numbers."""

    targets_like = "of shape [cases, 2]"

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return vector @ B.mT

    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        return vector @ B

    @property
    def fisher_factor_inner_shape(self) -> torch.Size:
        return torch.Size([N, 3])

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        return (self.inputs * targets).sum()

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        return self.inputs + torch.randn(self.inputs.shape, generator=generator)


class Unnatural(Toy):
    natural = False


def toy(**options: Any) -> Toy:
    return Toy(torch.randn(N, 2, requires_grad=True), **options)


def test_the_fisher_is_the_factor_times_its_transpose() -> None:
    v = torch.randn(N, 2)
    torch.testing.assert_close(toy().multiply_fisher(v), v @ (B @ B.mT))


@pytest.mark.parametrize("index", [0, 2, (1,)])
def test_a_one_hot_is_a_column_of_the_factor_in_every_case(index: Any) -> None:
    column = B[:, index if isinstance(index, int) else index[0]]
    for product in (toy().multiply_fisher_factor_replicated_one_hot, toy().multiply_ggn_factor_replicated_one_hot):
        assert torch.equal(product(index), column.expand(N, 2))


@pytest.mark.parametrize("index", [3, -1, (0, 0), ()])
def test_a_coordinate_that_no_case_has_is_refused(index: Any) -> None:
    with pytest.raises(ValueError, match=r"names no coordinate of a case of shape \[3\]"):
        toy().multiply_fisher_factor_replicated_one_hot(index)


def test_with_natural_parameters_gauss_newton_is_the_fisher() -> None:
    loss, v, u = toy(), torch.randn(N, 2), torch.randn(N, 3)
    assert torch.equal(loss.multiply_ggn(v), loss.multiply_fisher(v))
    assert torch.equal(loss.multiply_ggn_factor(u), u @ B.mT)
    assert torch.equal(loss.multiply_ggn_factor_transpose(v), v @ B)
    assert loss.ggn_factor_inner_shape == (N, 3)


@pytest.mark.parametrize(
    "product",
    [
        lambda loss: loss.multiply_ggn(torch.zeros(N, 2)),
        lambda loss: loss.multiply_ggn_factor(torch.zeros(N, 3)),
        lambda loss: loss.multiply_ggn_factor_transpose(torch.zeros(N, 2)),
        lambda loss: loss.multiply_ggn_factor_replicated_one_hot(0),
        lambda loss: loss.ggn_factor_inner_shape,
    ],
)
def test_other_parameters_have_no_gauss_newton_products(product: Any) -> None:
    with pytest.raises(LossError, match="Unnatural has no generalized Gauss-Newton factor"):
        product(Unnatural(torch.zeros(N, 2)))


def test_the_loss_of_targets_sends_a_gradient_to_the_inputs_alone() -> None:
    targets = torch.randn(N, 2, requires_grad=True)
    loss = toy().with_targets(targets)
    loss.evaluate().backward()
    assert loss.inputs.grad is not None and torch.equal(loss.inputs.grad, targets) and targets.grad is None


def test_targets_are_needed_and_have_their_shape() -> None:
    with pytest.raises(TargetsMissing, match=r"a Toy loss of inputs \[3, 2\] is evaluated and has no targets"):
        toy().evaluate()
    with pytest.raises(LossError, match=r"Toy: targets have shape \[3\], expected \[3, 2\], of shape \[cases, 2\]"):
        toy(targets=torch.zeros(N)).evaluate()
    for right, wrong in (([N, 1], [N]), ([N], [N, 1]), ([N, 1], [1, N])):  # F.mse_loss repeats both
        loss = Normal(torch.zeros(right)).with_targets(torch.zeros(wrong))
        with pytest.raises(
            LossError, match=re.escape(f": write targets.reshape({right}), or every case is compared with")
        ):
            loss.evaluate()


def test_a_sample_is_drawn_from_the_generator_or_the_seed_and_has_no_gradient() -> None:
    loss = toy(seed=5)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(loss.sample(), loss.sample()) and torch.equal(loss.sample(), loss.sample(generator))
    assert not torch.equal(loss.sample(torch.Generator().manual_seed(6)), loss.sample())
    assert not loss.sample().requires_grad
    torch.testing.assert_close(loss.evaluate_on_sample(), (loss.inputs * loss.sample()).sum())


def test_cases_are_the_first_axis_without_padding() -> None:
    loss = toy()
    assert (loss.cases, Toy(torch.zeros(())).cases) == (N, 1)
    loss.real_cases = 2
    assert loss.cases == 2


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_computations_are_in_float32_at_least(dtype: torch.dtype, wanted: torch.dtype) -> None:
    assert precise(torch.zeros(2, dtype=dtype)).dtype == wanted


def test_targets_and_what_is_kept_of_them_move_with_the_cases() -> None:
    inputs, targets, kept = torch.randn(4, N, 2), torch.randn(4, N, 2), torch.rand(4, N) > 0.5
    loss = Toy(inputs, targets=targets).keeping(kept).with_cases_at(1)
    assert torch.equal(loss.inputs, inputs.transpose(0, 1))
    assert loss.targets is not None and torch.equal(loss.targets, targets.transpose(0, 1))
    assert loss.kept is not None and torch.equal(loss.kept, kept.T)
