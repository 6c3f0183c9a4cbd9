"""A recurrent network written out, its statistics by hand, and what compares estimators; for the tests of series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import FisherEstimator
from tests.runtime.fisher_cases import sequence_statistics

T, N, I, H, O = 4, 6, 3, 2, 2  # noqa: E741


class Cell(nn.Module):
    """A recurrent network written as a loop, which hands out the inputs and outputs of every use if asked."""

    def __init__(self, steps: int = T, all_outputs: bool = False) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(I + H, H), nn.Linear(H, O)
        self.steps, self.all_outputs = steps, all_outputs
        self.seen: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h, hs = x.new_zeros(x.shape[0], H), []
        for t in range(self.steps):
            row = torch.cat([x[:, t], h], dim=1)
            y = self.cell(row)
            if self.seen is not None:
                y.retain_grad()
                self.seen.append((row, y))
            h = torch.tanh(y)
            hs.append(self.out(h))
        return torch.stack(hs, dim=1) if self.all_outputs else hs[-1]


def by_hand(model: Cell, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The statistics of the cell, from the gradients of the loss summed over cases at the outputs of all uses."""
    model.seen = []
    (0.5 * (model(x) - y) ** 2).sum().backward()
    rows, grads = (torch.stack(tensors) for tensors in zip(*[(r.detach(), o.grad) for r, o in model.seen], strict=True))
    model.seen = None
    return sequence_statistics(rows[:, :, None, None], grads[:, :, None, None], True, (1, H, I + H + 1))


def normal(output: Tensor) -> kfac_fx.losses.Normal:
    return kfac_fx.losses.Normal(output, var=1.0)


def same_fisher(one: FisherEstimator, other: FisherEstimator) -> None:
    for mine, its in zip(one.blocks.values(), other.blocks.values(), strict=True):
        torch.testing.assert_close(mine.full_fisher_block(), its.full_fisher_block())


def empirical(net: Any, *inputs: Tensor, targets: Any) -> FisherEstimator:
    est = FisherEstimator(net, estimation_mode="empirical", damping=0.1)
    est.update_covariances(*inputs, targets=targets)
    return est
