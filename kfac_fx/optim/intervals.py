"""The intervals of "adaptive": how often statistics, inverses and checks are due, by a cost model of the network.

The model counts floating-point operations. A layer with n rows and a matrix [o, i] takes 2 n i o in a forward, its
statistics take 2 n (i² + o²), and its inverses 2 (i³ + o³). The time that the host needs for an operation counts as
`OPERATION` of them, which decides in small networks. With a forward f = Σ 2 n i o + the operations of the graph:

    a training step          3 f
    statistics               f + Σ 2 n i o + Σ 2 n (i² + o²) + their operations; only the last two if the training step
                             records them
    inverses                 Σ 2 (i³ + o³) + their operations
    a check                  2 f + 3 Σ 2 n i o + its operations: two forwards, and a product with the Jacobian

Costs c divided by intervals s sum up to at most the stated overhead of a training step. Among such intervals those
with the smallest sum are taken: s = √c Σ √c / (overhead · training). Inverses follow every second update of the
factors, or every k-th where k² times the cost of statistics is theirs.

No interval of statistics or checks is longer than `LONGEST_INTERVALS`, because stale factors and step sizes make the
loss rise, which only a check undoes. Where an interval is cut to this, the other takes what is left; in networks of a
few operations, whose training step is short beside all else, the overhead is then larger than stated.

The model knows no device: equal networks and batches have equal intervals everywhere. Preconditioning and momentum are
in every step, so no interval changes what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.passes.ir import UNROLLED, Program
from kfac_fx.statistics.moments import Key

OPERATION = 3e5  # flops of one core in the 7 µs in which it dispatches an operation
PER_USE = 40  # operations that record a use
PER_GROUP = 60  # operations that average the factors of equal blocks
PER_INVERSE = 30  # operations that invert them
PER_RECORDING = PER_CHECK = 100  # the other operations
PRODUCT = 4  # operations for one of the graph in a product with the Jacobian
FUSED = 10  # the operations of an unrolled recurrent layer for one of its kernel

UPDATES = 2  # of the factors for one of the inverses, at least


class StepIntervals(NamedTuple):
    """In steps."""

    statistics: int
    inverses: int
    checks: int


LONGEST_INTERVALS = StepIntervals(statistics=10, inverses=10**6, checks=5)


@dataclass(frozen=True)
class LayerFlops:
    """Floating-point operations of blocks: statistics as plain products, inverses d³ of a side."""

    forward: float
    statistics: float
    preconditioning: float
    inverses: float

    @staticmethod
    def of(groups: Sequence[BlockGroup], rows: Mapping[Key, float]) -> LayerFlops:
        """rows: n of every registration; others are left out."""
        forward = statistics = preconditioning = inverses = 0.0
        for group in groups:
            members = [r.parameters for r in group.registrations if r.parameters in rows]
            n, elements = sum(rows[key] for key in members), math.prod(group.whole_shape)
            forward += 2 * n * elements
            for side in group.sides:
                dense, width = math.prod(side.shape(group.whole_shape)), group.size(side)
                statistics += 2 * n * dense
                preconditioning += 2 * len(members) * elements * (1 if side.diagonal else width)
                inverses += len(members) * dense * (0 if side.diagonal else width)
        return LayerFlops(forward, statistics, preconditioning, inverses)


@dataclass(frozen=True)
class StepCosts:
    """The costs of the parts of a step, in flops."""

    training: float
    statistics: float
    inverses: float
    check: float

    @staticmethod
    def of(
        program: Program,
        groups: Sequence[BlockGroup],
        rows: Mapping[Key, float],
        fraction: float = 1.0,
        in_training: bool = False,
    ) -> StepCosts:
        """
        Args:
            groups: the blocks of the program.
            rows: n of every registration in one batch.
            fraction: the part of a batch that is recorded.
            in_training: whether the training step records it.
        """
        flops = LayerFlops.of(groups, rows)
        calls = [node for node in program.graph.nodes if node.op.startswith("call_")]
        unrolled = sum(UNROLLED in node.meta for node in calls)
        forward = flops.forward + OPERATION * len(calls)
        uses = sum(len(registration.uses) for registration in program.registrations)
        recording = OPERATION * (PER_USE * uses + PER_GROUP * len(groups) + PER_RECORDING)
        passes = 0.0 if in_training else 2 * fraction * flops.forward + 3 * OPERATION * len(calls)
        return StepCosts(
            training=3 * (forward - OPERATION * unrolled * (1 - 1 / FUSED)),
            statistics=passes + fraction * flops.statistics + recording,
            inverses=2 * flops.inverses + OPERATION * PER_INVERSE * len(groups),
            check=5 * flops.forward + OPERATION * ((2 + PRODUCT) * len(calls) + PER_CHECK),
        )

    def overhead(self, intervals: StepIntervals) -> float:
        """The cost of statistics, inverses and checks per step, as a part of the training step's."""
        each = zip((self.statistics, self.inverses, self.check), intervals, strict=True)
        return sum(cost / steps for cost, steps in each) / self.training

    def intervals(self, overhead: float) -> StepIntervals:
        """The shortest intervals whose overhead is at most that, or `LONGEST_INTERVALS`."""
        updates = max(UPDATES, round(math.sqrt(self.inverses / self.statistics)))
        update, allowed = self.statistics + self.inverses / updates, overhead * self.training
        roots = math.sqrt(update), math.sqrt(self.check)
        checks = min(math.ceil(roots[1] * sum(roots) / allowed), LONGEST_INTERVALS.checks)
        left = allowed - self.check / checks
        statistics = (
            min(math.ceil(update / left), LONGEST_INTERVALS.statistics) if left > 0 else LONGEST_INTERVALS.statistics
        )
        return StepIntervals(statistics, updates * statistics, checks)
