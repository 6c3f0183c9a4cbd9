"""Steps of "regular" with a damping relative to mean eigenvalues, and with the damping λ: against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import compile
from kfac_fx.optim.optimizer import KFAC


@pytest.mark.parametrize("options", [{"relative_damping": 0.1}, {"damping": 0.3}], ids=str)
def test_steps_are_those_of_the_formulas(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    w = torch.cat([model.weight, model.bias.unsqueeze(1)], 1).detach()
    opt = KFAC(
        net := compile(model, loss="mse"),
        lr=0.1,
        momentum=0.5,
        momentum_type="regular",
        estimation_mode="empirical",
        invert_every=1,
        **options,
    )
    velocity, a, g, weight = torch.zeros_like(w), torch.zeros(4, 4), torch.zeros(2, 2), 0.0
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(12, width, generator=generator, dtype=torch.float64) for width in (3, 2))
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
        rows = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        d = 2 * (rows @ w.T - y) / 2  # of the loss summed over cases
        a, g, weight = 0.95 * a + rows.T @ rows / len(x), 0.95 * g + d.T @ d / len(x), 0.95 * weight + 1
        mean_a, mean_g = a / weight, g / weight
        inputs, outputs = mean_a.trace() / 4, mean_g.trace() / 2
        damping_a, damping_g = 0.1 * inputs, 0.1 * outputs
        if "damping" in options:
            pi = (inputs / outputs).sqrt()
            damping_a, damping_g = pi * 0.3**0.5, 0.3**0.5 / pi
        eye_a, eye_g = torch.eye(4, dtype=x.dtype), torch.eye(2, dtype=x.dtype)
        natural = torch.linalg.solve(mean_g + damping_g * eye_g, d.T @ rows / len(x))
        velocity = 0.5 * velocity + natural @ torch.linalg.inv(mean_a + damping_a * eye_a)
        w = w - 0.1 * velocity
        torch.testing.assert_close(model.weight.detach(), w[:, :-1])
        torch.testing.assert_close(model.bias.detach(), w[:, -1])
