"""The quadratic model of a step along several directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_fx.optim.rules.momentum import QuadraticModel


def test_a_direction_of_zero_changes_nothing_though_difference_quotients_of_it_are_rounding() -> None:
    """The minimum along the other directions, against a dense solution."""
    torch.manual_seed(0)
    half, g, first, second = torch.randn(4, 4).double(), *torch.randn(3, 4).double()
    f, zero, damping = half @ half.mT, torch.zeros(4).double(), torch.tensor(0.1).double()

    def noisy(directions: Sequence[Tensor]) -> Tensor:
        d = torch.stack(list(directions))
        rounding = 1e-13 * torch.tensor([1.0, -1.0, 1e-9]).double()
        noise = torch.zeros(3, 3).double()
        noise[2], noise[:, 2] = rounding, rounding
        return d @ f @ d.mT + noise

    model = QuadraticModel.along([first, second, zero], g, noisy)
    d = torch.stack([first, second])
    expected = torch.linalg.solve(d @ (f + damping * torch.eye(4).double()) @ d.mT, -(d @ g))
    s = model.minimum(damping)
    torch.testing.assert_close(s[:2], expected)
    assert s[2] == 0 and not model.fisher[2].any()
    torch.testing.assert_close(model.change(s, damping), 0.5 * (d @ g) @ expected)
