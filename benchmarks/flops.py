"""The cost model: how many floating-point operations a step of K-FAC cannot do without.

A layer with n rows costs 6 n i o forward and backward, its statistics n (i² + o²) with symmetric products and twice
that as plain products, preconditioning 2 i o (i + o) a step, an inverse of a side about d³.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kfac_fx
from benchmarks.step_models import Make
from kfac_fx.optim.schedule import LayerFlops


@dataclass(frozen=True)
class Flops:
    """Operations of all layers that have rows. Those of the statistics are symmetric products."""

    training: float
    statistics: float
    preconditioning: float
    inverses: float

    def floor(self, every: tuple[int, int], symmetric: bool) -> float:
        """A step over the training step, with statistics recorded in it, and inverses every so many steps."""
        statistics = (1 if symmetric else 2) * self.statistics / every[0]
        return 1 + (statistics + self.preconditioning + self.inverses / every[1]) / self.training


def flops_of(make: Make) -> Flops:
    torch.manual_seed(0)
    problem = make()
    net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind)
    counts = {key: sums["count"] for key, sums in net.record((problem.x,), {}).statistics.items() if "count" in sums}
    rows = {key: float(count) for key, count in counts.items()}
    flops = LayerFlops.of(kfac_fx.FisherEstimator(net).groups, rows)
    return Flops(3 * flops.forward, flops.statistics / 2, flops.turning, flops.cubes)
