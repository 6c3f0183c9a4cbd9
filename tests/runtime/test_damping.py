"""The Levenberg-Marquardt rule."""

import math

import pytest
import torch

from kfac_fx.optim.damping import DampingRule

OMEGA = 0.95**5


@pytest.mark.parametrize(
    ("change", "predicted", "factor"),
    [
        (-0.9, -1.0, OMEGA),  # as good as predicted
        (-0.5, -1.0, 1.0),
        (-0.1, -1.0, 1 / OMEGA),  # far worse than predicted
        (0.3, -1.0, 1 / OMEGA),  # the loss rose
        (-0.3, 1.0, OMEGA),  # the model expected worse
        (0.3, 1.0, 1.0),
        (2.0, 1.0, OMEGA),  # by the ratio alone
        (math.nan, -1.0, 1.0),
        (math.inf, -1.0, 1 / OMEGA),
        (-0.3, math.nan, 1.0),
        (0.0, 0.0, 1.0),
    ],
)
def test_damping_follows_the_reduction_ratio(change: float, predicted: float, factor: float) -> None:
    before = torch.tensor(2.0, dtype=torch.float64)
    damping, rho = DampingRule()(before.new_tensor(0.1), before, before + change, before.new_tensor(predicted))
    assert damping.dtype is torch.float64
    assert damping.item() == pytest.approx(0.1 * factor, rel=1e-14)
    expected = change / predicted if predicted else math.nan
    assert rho.item() == pytest.approx(expected, nan_ok=True)


def test_the_floor_holds_the_loss_s_own_l2_term() -> None:
    rule = DampingRule(min_damping=1e-3, l2_reg=1e-2)
    one = torch.tensor(1.0)
    damping, _ = rule(torch.tensor(0.0112), one, one - 1, -one)
    assert damping.item() == pytest.approx(0.011)


def test_adaptation_is_due_at_the_end_of_every_interval() -> None:
    assert [step for step in range(12) if DampingRule(interval=5).due(step)] == [4, 9]
