"""The momentum type "grafted", and the damping relative to mean eigenvalues: against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.linalg.vectors import Flat
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.rules.grafted import grafted, joined_blocks


def test_blocks_that_overlap_count_as_one() -> None:
    blocks = [("a",), ("b", "c"), ("d", "e"), ("c", "d"), ("absent", "f")]
    assert joined_blocks(["a", "b", "c", "d", "e", "f"], blocks) == [0, 1, 1, 1, 1, 5]


def test_every_block_has_the_norm_of_the_other_vector() -> None:
    flat = Flat({"w": torch.Size([3, 2]), "b": torch.Size([3]), "v": torch.Size([4])})
    direction, length = torch.randn(2, 13, dtype=torch.float64)
    result = grafted(direction, length, flat, [("w", "b"), ("v",)])
    for members in (slice(0, 9), slice(9, 13)):
        expected = direction[members] * length[members].norm() / direction[members].norm()
        torch.testing.assert_close(result[members], expected)


def test_a_direction_of_zero_stays_zero() -> None:
    flat = Flat({"w": torch.Size([3])})
    assert torch.equal(grafted(torch.zeros(3), torch.ones(3), flat, [("w",)]), torch.zeros(3))


def data(number: int, cases: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(cases, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(cases, 2, generator=generator, dtype=torch.float64)


def made(**options: Any) -> tuple[CompiledModule, KFAC]:
    torch.manual_seed(0)
    net = compile(nn.Linear(3, 2).double(), loss="mse")
    defaults = {"lr": 0.1, "momentum_type": "grafted", "estimation_mode": "empirical", "invert_every": 1}
    return net, KFAC(net, **{**defaults, **options})


@pytest.mark.parametrize(
    "options",
    [{"relative_damping": 0.1}, {"damping": 0.3, "momentum": 0.5}, {"damping": 0.3, "second_moment_decay": 0.9}],
    ids=str,
)
def test_steps_are_those_of_the_formulas(options: dict[str, Any]) -> None:
    net, opt = made(**options)
    w = torch.cat([net.model.weight, net.model.bias.unsqueeze(1)], 1).detach()  # type: ignore[union-attr, operator]
    b1, b2 = options.get("momentum", 0.9), options.get("second_moment_decay", 0.999)
    m, v, a, g, weight = torch.zeros_like(w), torch.zeros_like(w), 0, 0, 0
    for number in range(6):
        x, y = data(number)
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        opt.step()
        rows = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        d = 2 * (rows @ w.T - y) / 2  # of the loss summed over cases
        gradient = d.T @ rows / len(x)
        a, g, weight = 0.95 * a + rows.T @ rows / len(x), 0.95 * g + d.T @ d / len(x), 0.95 * weight + 1
        mean_a, mean_g = a / weight, g / weight
        inputs, outputs = mean_a.trace() / 4, mean_g.trace() / 2
        damping_a, damping_g = 0.1 * inputs, 0.1 * outputs
        if "damping" in options:
            pi = (inputs / outputs).sqrt()
            damping_a, damping_g = pi * 0.3**0.5, 0.3**0.5 / pi
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        adam = m / (1 - b1 ** (number + 1)) / ((v / (1 - b2 ** (number + 1))).sqrt() + 1e-8)
        eye_a, eye_g = torch.eye(4, dtype=x.dtype), torch.eye(2, dtype=x.dtype)
        direction = torch.linalg.solve(mean_g + damping_g * eye_g, m) @ torch.linalg.inv(mean_a + damping_a * eye_a)
        w = w - 0.1 * direction * adam.norm() / direction.norm()
        torch.testing.assert_close(net.model.weight.detach(), w[:, :-1])  # type: ignore[operator, union-attr]


@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_averages_that_are_not_finite_change_nothing() -> None:
    net, opt = made(damping=0.1)
    for number, scale in enumerate((1.0, 1e200, 1.0)):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        x, y = data(number)
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        opt.step()
        same = [torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True)]
        assert same == [scale != 1.0] * 2
    assert opt.skipped == 1
