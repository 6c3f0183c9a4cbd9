"""The state that a KFAC keeps from step to step, and the seconds that the phases of its steps take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kfac_fx.compiled_module import CompiledModule
from kfac_fx.distributed import Replicas
from kfac_fx.estimator import FisherEstimator
from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.linalg.sharded import Shards
from kfac_fx.optim.curvature import JacobianProducts
from kfac_fx.optim.eigen_moments import without_basis
from kfac_fx.optim.forwards import Forwards
from kfac_fx.optim.groups import GroupedParameters, first_order_update, move_in_blocks
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rules import MomentumRule
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.step_checks import StepSize
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.tracing.devices import RandomState
from kfac_fx.placement import UNDIVIDED, DivisionByOwners, DivisionByShards, VectorDivision
from kfac_fx.recording.backends import compiled_function
from kfac_fx.statistics.moments import Key

SCALARS = ("rho", "predicted_change", "qmodel_learning_rate", "qmodel_momentum", "loss_before")
PHASES = ("record", "statistics", "inverses", "update")


class PhaseSeconds:
    """Seconds by phase. The phases do not overlap.

    "record" is the forwards of the net that record statistics, "statistics" the averages of the factors, "inverses"
    their decompositions, and "update" the rest of a step, with the checks and the closures that measure the loss. On an
    accelerator these are the seconds in which the host issued the work, not those in which the device did it.

    Attributes:
        readers: how many read the seconds; without any, no clock is read.
        totals: the seconds of every phase since the first reader came.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.totals = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds that the block takes, also if it raises."""
        if not self.readers:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.totals[phase] += time.perf_counter() - start


@dataclass
class StepState:
    """The state that a KFAC keeps from step to step. Scalars are 0-dim tensors, written in place."""

    net: CompiledModule
    names: dict[nn.Parameter, str]
    registered: frozenset[str]  # the names of the parameters in Fisher blocks
    options: KFACOptions
    schedule: Schedule
    estimator: FisherEstimator
    forwards: Forwards
    replicas: Replicas  # the processes that take the same step
    scalar: Tensor  # a zero with the dtype and the device of all scalars
    damping: Tensor  # λ
    # Values of the last step that computed them; NaN before.
    rho: Tensor = field(init=False)
    predicted_change: Tensor = field(init=False)
    qmodel_learning_rate: Tensor = field(init=False)
    qmodel_momentum: Tensor = field(init=False)
    loss_before: Tensor = field(init=False)
    kappa: Tensor = field(init=False)  # by which norm_constraint shortened the step; in no checkpoint
    size: StepSize = field(init=False)  # of the types with checks
    skipped: Tensor = field(init=False)  # the number of steps that changed nothing
    shards: Shards | None = None  # None if every process has whole parameters
    unobserved: bool = False  # a check did not know the gradient of the outputs
    late: RandomState | None = None  # before the forward of a step whose loss is still to be measured
    first_recorded: dict[Key, int] = field(default_factory=dict)  # the steps that gave later blocks their first factors
    grouped: GroupedParameters | None = None  # None to read the parameter groups anew
    phases: PhaseSeconds = field(default_factory=PhaseSeconds)

    def __post_init__(self) -> None:
        for name in (*SCALARS, "kappa"):
            setattr(self, name, torch.full_like(self.damping, torch.nan))
        self.size = StepSize.first(self.scalar)
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.scalar.device)
        self.rule = MomentumRule(self.options.kind, self.options.bound_on("gradient"))
        self.multiply_jacobian = JacobianProducts(lambda values: self.division.total(values))
        self.move_in_blocks = compiled_function(move_in_blocks, self.net.backend)
        self.first_order_update = compiled_function(first_order_update, self.net.backend)
        self.multiply_inverse = compiled_function(self.estimator.multiply_inverse_kept, self.net.backend)
        self._division: VectorDivision = UNDIVIDED
        self._divided: list[BlockGroup] | None = None  # the blocks that it belongs to

    @property
    def division(self) -> VectorDivision:
        """How vectors are divided at present; the same object as long as the owners are the same."""
        estimator, shards = self.estimator, self.shards
        if shards is None and (self.replicas.number == 1 or estimator.owners is None):
            return UNDIVIDED
        estimator.follow_registrations()
        if self._divided is not estimator.groups:
            self._divided, owners = estimator.groups, estimator.owner_of
            if shards is not None:
                self._division = DivisionByShards(shards, owners)
            else:  # parameters in no block are owned in turn: others may join them, and none moves
                in_turn = {name: n % self.replicas.number for n, name in enumerate(self.names.values())}
                self._division = DivisionByOwners(self.replicas, in_turn | dict(owners or {}))
        return self._division

    def keep_kappa(self, kappa: Tensor | None) -> None:
        """Keep κ of a step; None, without a norm constraint, keeps NaN."""
        if kappa is not None:
            self.kappa.copy_(kappa)

    # --- for the report -----------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """The steps so far, and those that failed. Waits for the device."""
        failures = [block.failures for block in self.estimator.blocks.values()]
        return {
            "steps": self.schedule.counter,
            "skipped steps": int(self.skipped),
            "skipped updates": sum(block.updates for block in failures),
            "inverses kept from before": sum(block.decompositions for block in failures),
        }

    def fallbacks(self, registrations: Sequence[Registration]) -> list[str]:
        """Each part that was not done as it should be, and why."""
        reasons = []
        if self.unobserved:
            reasons.append(
                "the checks of the step size take the loss as linear in the parameters beside its curvature, and undo "
                "no steps: no backward was seen to reach the Fisher's outputs, or a loss that forward returns"
            )
        chosen = self.options.momentum_type is None and self.options.damping is None
        if chosen and (without := without_basis(registrations)):
            reasons.append(f"momentum_type is 'adaptive', because blocks have no eigenbasis: {first_three(without)}")
        owners = (self.estimator.owner_of if self.shards is not None else None) or {}
        if owned := [r for r in registrations if r.structure.diagonal and r.owners[0] in owners]:
            reasons.append(
                "gradients of these diagonal blocks travel to an owner, because the diagonals are not divided as the "
                f"parameters are: {first_three(owned)}"
            )
        return [*reasons, *self.multiply_jacobian.fallbacks(), *self.forwards.fallbacks()]


def first_three(registrations: Sequence[Registration]) -> str:
    others = len(registrations) - 3
    return ", ".join(map(str, registrations[:3])) + (f" and {others} more" if others > 0 else "")
