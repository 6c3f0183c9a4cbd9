"""The norm constraint's golden numbers, and what the rules do on one dimension by hand."""

import math

import pytest
import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Flat
from kfac_fx.optim.momentum import MomentumRule, Preconditioner

G = torch.tensor([1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 5.0])  # of two parameters [2, 2]
PG = torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
SQUARED_NORM = 174.0
ZERO = torch.zeros(8)
LR = torch.tensor(0.1)


@pytest.mark.parametrize(("constraint", "kappa"), [(None, 1.0), (10.0, 1.0), (0.5, 0.536056)])
def test_golden_clipping_of_the_fisher_norm(constraint: float | None, kappa: float) -> None:
    u = MomentumRule("regular", constraint).clipped(G, PG, LR)
    torch.testing.assert_close(u, kappa * PG)
    if constraint == 0.5:  # the squared Fisher norm of the clipped step is the constraint itself
        assert kappa == pytest.approx(math.sqrt(constraint / (0.01 * SQUARED_NORM)), abs=1e-6)
        assert (0.01 * G * u**2 / PG).sum().item() == pytest.approx(constraint)


def test_the_constraint_weighs_every_parameter_with_its_own_learning_rate() -> None:
    lr = torch.tensor([0.1, 0.0]).repeat_interleave(4)
    u = MomentumRule("regular", 0.25).clipped(G, PG, lr)
    norm = 0.01 * (G[:4] * PG[:4]).sum().item()
    torch.testing.assert_close(u[4:], math.sqrt(0.25 / norm) * PG[4:])


def test_a_zero_gradient_is_not_clipped_to_nan() -> None:
    u = MomentumRule("regular", 0.5).clipped(ZERO, ZERO, LR)
    assert not u.any()


def test_momentum_before_and_after_the_preconditioner() -> None:
    def halve(vector: Tensor) -> Tensor:
        return vector / 2

    for momentum in (torch.tensor(0.9), torch.tensor([0.9, 0.5]).repeat_interleave(4)):
        v, update = MomentumRule("regular", None)(G, PG, momentum, halve, LR)
        torch.testing.assert_close(v, momentum * PG + G / 2)
        assert update is v
        v, update = MomentumRule("adam", None)(G, PG, momentum, halve, LR)
        torch.testing.assert_close(v, momentum * PG + G)
        torch.testing.assert_close(update, v / 2)


def test_the_preconditioner_sees_zeros_where_there_is_no_gradient() -> None:
    seen: dict[str, Tensor] = {}

    def multiply(vector: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.update(vector)
        return {name: 2 * vector[name] for name in ("b", "c", "a")}

    flat = Flat({"a": torch.Size([2, 2]), "c": torch.Size([4])})
    product = Preconditioner(multiply, flat, {"b": torch.zeros(3)})(G)
    assert torch.equal(product, 2 * G)
    assert {name: part.tolist() for name, part in seen.items()} == {
        "a": [[1, 2], [3, 4]],
        "b": [0, 0, 0],
        "c": [2, 3, 4, 5],
    }
