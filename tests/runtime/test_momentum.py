"""The norm constraint's golden numbers, and what the rules do on one dimension by hand."""

import math

import pytest
import torch
from torch import Tensor

from kfac_fx.momentum import MomentumRule, Preconditioner

G = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([[2.0, 3.0], [4.0, 5.0]])}
PG = {"a": torch.tensor([[3.0, 4.0], [5.0, 6.0]]), "b": torch.tensor([[7.0, 8.0], [9.0, 10.0]])}
SQUARED_NORM = 174.0
ZERO = {name: torch.zeros_like(value) for name, value in G.items()}


def scalars(value: float) -> dict[str, Tensor]:
    return dict.fromkeys(G, torch.tensor(value))


@pytest.mark.parametrize(("constraint", "kappa"), [(None, 1.0), (10.0, 1.0), (0.5, 0.536056)])
def test_golden_clipping_of_the_fisher_norm(constraint: float | None, kappa: float) -> None:
    u = MomentumRule("regular", 0.0, constraint).clipped(G, PG, scalars(0.1))
    torch.testing.assert_close(u["a"], kappa * PG["a"])
    if constraint == 0.5:  # the squared Fisher norm of the clipped step is the constraint itself
        assert kappa == pytest.approx(math.sqrt(constraint / (0.01 * SQUARED_NORM)), abs=1e-6)
        norm = sum((0.01 * G[name] * u[name] ** 2 / PG[name]).sum().item() for name in G)
        assert norm == pytest.approx(constraint)


def test_the_constraint_weighs_every_parameter_with_its_own_learning_rate() -> None:
    lr = {"a": torch.tensor(0.1), "b": torch.tensor(0.0)}
    u = MomentumRule("regular", 0.0, 0.25).clipped(G, PG, lr)
    norm = 0.01 * (G["a"] * PG["a"]).sum().item()
    torch.testing.assert_close(u["b"], math.sqrt(0.25 / norm) * PG["b"])


def test_a_zero_gradient_is_not_clipped_to_nan() -> None:
    u = MomentumRule("regular", 0.0, 0.5).clipped(ZERO, ZERO, scalars(0.1))
    assert not u["a"].any()


def test_momentum_before_and_after_the_preconditioner() -> None:
    halve = Preconditioner(lambda vector: {name: value / 2 for name, value in vector.items()}, {})
    v, update = MomentumRule("regular", 0.9, None)(G, PG, halve, scalars(0.1))
    torch.testing.assert_close(v["a"], 0.9 * PG["a"] + G["a"] / 2)
    assert update is v
    v, update = MomentumRule("adam", 0.9, None)(G, PG, halve, scalars(0.1))
    torch.testing.assert_close(v["a"], 0.9 * PG["a"] + G["a"])
    torch.testing.assert_close(update["a"], v["a"] / 2)


def test_the_preconditioner_sees_zeros_where_there_is_no_gradient() -> None:
    seen: dict[str, Tensor] = {}

    def multiply(vector: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.update(vector)
        return vector

    product = Preconditioner(multiply, {"b": ZERO["b"]})({"a": G["a"]})
    assert product.keys() == {"a"}
    assert seen.keys() == {"a", "b"}
