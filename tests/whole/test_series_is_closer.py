"""Series against the exact Fisher of linear recurrent networks with Gaussian inputs, whose steps are a Markov chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.losses import Normal

STEPS, CASES = 5, 400
APPROXIMATIONS = ("full", "kron_indep", "kron_series_1", "kron_series_2")


class LinearRecurrence(nn.Module):
    """h_t = W h_t-1 + U x_t, with W a shrunken rotation; outputs V h_t at every step, or at the last."""

    def __init__(self, every_step: bool) -> None:
        super().__init__()
        self.w, self.u, self.v = (nn.Linear(size, out, bias=False) for size, out in ((3, 3), (2, 3), (3, 2)))
        rotation, _ = torch.linalg.qr(torch.randn(3, 3))
        self.w.weight.data = 0.8 * rotation
        self.every_step = every_step

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(x.shape[0], 3), []
        for t in range(STEPS):
            h = self.w(h) + self.u(x[:, t])
            outputs.append(self.v(h))
        return torch.cat(outputs, dim=1) if self.every_step else outputs[-1]


def remembering(memory: float) -> Tensor:
    """Inputs [N, T, 2] with correlation `memory` from one step to the next, of variance 1."""
    x = torch.randn(CASES, STEPS, 2)
    for t in range(1, STEPS):
        x[:, t] = memory * x[:, t - 1] + (1 - memory**2) ** 0.5 * x[:, t]
    return x


def fishers(model: nn.Module, x: Tensor, approximation: str) -> dict[str, Tensor]:
    """Without sampling: every output sent back."""
    net = kfac_fx.compile(model, (x,), loss=lambda y: Normal(y, var=1.0), approximations={"linear": approximation})
    est = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    est.update_covariances(x)
    return {key[0]: block.full_fisher_block() for key, block in est.blocks.items()}


@pytest.mark.parametrize(
    ("seed", "memory", "every_step"),
    [
        (0, 0.9, True),
        (0, -0.9, False),
        pytest.param(1, -0.9, True, marks=pytest.mark.slow),
        pytest.param(1, 0.9, False, marks=pytest.mark.slow),
    ],
)
def test_a_series_is_closer_to_the_exact_fisher_than_independent_steps(
    seed: int, memory: float, every_step: bool
) -> None:
    torch.manual_seed(seed)
    model, x = LinearRecurrence(every_step).double(), remembering(memory).double()
    exact, independent, first, second = (fishers(model, x, name) for name in APPROXIMATIONS)
    for name in ("w.weight", "u.weight"):
        away = {k: float((f[name] - exact[name]).norm()) for k, f in enumerate((independent, first, second))}
        assert max(away[1], away[2]) < away[0], f"{name}: {away}"
    if every_step:  # the output layer's gradients of different steps have nothing in common
        for series in (first, second):
            torch.testing.assert_close(series["v.weight"], independent["v.weight"])
    else:
        assert torch.equal(first["v.weight"], independent["v.weight"])
