"""A training does not depend on the numbers that are in free memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.optim.rules import RULES

GIVEN = {"regular": {"lr": 0.1, "damping": 0.1}, "adam": {"lr": 0.1, "damping": 0.1}}
WIDE = 300  # wider than what has bases in bfloat16 and results with padded rows


def trained(rule: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, WIDE), nn.Tanh(), nn.Linear(WIDE, 40))
    net = kfac_fx.compile(model, loss="mse")
    optimizer = kfac_fx.KFAC(net, momentum_type=rule, seed=0, **GIVEN.get(rule, {}))
    for _ in range(5):
        x, y = torch.randn(100, 20), torch.randn(100, 40)
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    assert not int(optimizer.skipped)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("rule", [name for name in RULES if not name.startswith("qmodel")])
def test_a_training_does_not_depend_on_free_memory(rule: str, request: pytest.FixtureRequest) -> None:
    expected = trained(rule)
    request.getfixturevalue("free_memory_is_nan")
    torch.testing.assert_close(trained(rule), expected, rtol=0, atol=0)
