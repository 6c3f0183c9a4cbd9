"""The state of a KFAC from step to step, each part with the stage of the step that owns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.jacobian_products import JacobianProducts, exact_products
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher import bases
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim.checks import Checks, StepSize
from kfac_fx.optim.forwards import Forwards, without_batch
from kfac_fx.optim.groups import FlatParameters, Vectors, first_order_update
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rule import MEASURED, BlockStep, Memory
from kfac_fx.optim.rules import first_three
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.standstill import StandstillWatch
from kfac_fx.passes.errors import nearest
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import real_parameters
from kfac_fx.passes.torch_private import mark_static
from kfac_fx.passes.tracing.effects import RandomState
from kfac_fx.recording.emitted import compiled_function
from kfac_fx.recording.statistics import Key

PHASES = ("record", "statistics", "inverses", "update")


class PhaseSeconds:
    """Seconds of the host by phase, see `Metrics`. The phases do not overlap.

    Attributes:
        readers: how many read the seconds; without any, no clock is read.
        totals: the seconds of every phase since the first reader came.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.totals = dict.fromkeys(PHASES, 0.0)

    def measure(self, phase: str) -> AbstractContextManager[None]:
        """Add the seconds that the block takes, also if it raises."""
        return self.measured(phase) if self.readers else nullcontext()

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.totals[phase] += time.perf_counter() - start


class ScalarsByName(dict[str, Tensor]):
    """0-dim tensors by name; a KeyError of another name says those that there are."""

    def __missing__(self, name: object) -> Tensor:
        raise KeyError(f"optimizer.scalars has {', '.join(self)}, and no {name!r}.{nearest(name, self)}")


@dataclass
class StepState:
    """The state of a KFAC from step to step. Scalars are 0-dim tensors, written in place."""

    net: CompiledModule
    options: KFACOptions
    schedule: Schedule
    estimator: FisherEstimator
    forwards: Forwards
    replicas: Replicas  # the processes that take the same step
    vectors: Vectors
    damping: Tensor  # λ
    scalars: dict[str, Tensor] = field(init=False)  # of the last step that computed them; NaN before
    checks: Checks = field(init=False)
    skipped: Tensor = field(init=False)  # the number of steps that changed nothing
    undone: Tensor = field(init=False)  # that of those which checks undid
    standstill: StandstillWatch = field(default_factory=StandstillWatch)
    late: RandomState | None = None  # before the forward of a step whose loss is still to be measured
    first_recorded: dict[Key, int] = field(default_factory=dict)  # the steps that gave later blocks their first factors
    phases: PhaseSeconds = field(default_factory=PhaseSeconds)
    memory: Memory = field(init=False)  # of the rule

    def __post_init__(self) -> None:
        scalar, rule = self.vectors.scalar, self.options.rule
        first = {**dict.fromkeys(MEASURED, torch.nan), **rule.scalars}
        self.scalars = ScalarsByName({name: torch.full_like(self.damping, value) for name, value in first.items()})
        self.checks = Checks(StepSize.first(scalar))
        self.skipped = torch.zeros((), dtype=torch.int64, device=scalar.device)
        self.undone = torch.zeros_like(self.skipped)
        self.memory = rule.memory(scalar, self.estimator)
        self.multiply_jacobian = JacobianProducts(lambda values: self.vectors.division.total(values))
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.first_order_update = self.compiled(first_order_update)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of this package under the backend of the net."""
        if function not in self._compiled:
            self._compiled[function] = compiled_function(function, self.net.backend)
        return self._compiled[function]

    def block_step(self, flat: FlatParameters) -> BlockStep:
        """All that a rule computes with."""
        assert self.vectors.grouped is not None, "bug in kfac_fx: a step before the parameter groups are read"
        return BlockStep(
            flat=flat,
            estimator=self.estimator,
            present_damping=self.damping,
            precon_damping_mult=self.options.rule.precon_damping_mult,
            size=self.checks.size,
            of_groups=self.vectors.grouped.scalars,
            scalars=self.scalars,
            memory=self.memory,
            find_absent=partial(self.vectors.absent, flat),
            compiled=self.compiled,
            products_in_batch=partial(self.exact_products, flat),
        )

    def exact_products(self, flat: FlatParameters, vectors: Sequence[Tensor]) -> Tensor:
        """<d_i, F d_j> of vectors [P] in the exact Fisher of all micro-batches of the step, averaged by cases: [k, k].

        Raises RuntimeError if there was no forward to compute with, and ValueError if the rule says that it needs none.
        """
        calls, kind = self.forwards.seen.calls, type(self.options.rule)
        if not kind.is_exact:
            raise ValueError(
                f"direction of {kind.__name__} multiplies with the exact Fisher of the step's batch, which is not kept "
                "for it: write is_exact: ClassVar[bool] = True in its class"
            )
        if not calls:
            raise without_batch(self.net, f"{self.options.rule.written} computes this step")
        return exact_products(
            self.net,
            calls,
            real_parameters((name, parameter.detach()) for parameter, name in self.vectors.names.items()),
            [flat.everywhere(vector) for vector in vectors],
            ggn=self.estimator.estimation_mode.endswith("GGN"),
            multiply_jacobian=self.multiply_jacobian,
            replicas=self.replicas,
            scalar=self.vectors.scalar,
        )

    def mark_static(self, step: BlockStep) -> None:
        """Tell CUDA graphs that what an update reads and writes lies where it is as long as it lives."""
        tensors = [step.g, *step.state.values(), *self.memory.static()]
        for group in self.estimator.groups:
            tensors += [*group.extras.values(), *(root for operators in group.roots.values() for root in operators)]
        for tensor in tensors:
            mark_static(tensor)

    # --- for the report -----------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """The steps so far, and those that failed. Waits for the device."""
        failures = [block.failures for block in self.estimator.blocks.values()]
        return {
            "steps": self.schedule.counter,
            "skipped steps": int(self.skipped),
            "of these undone by checks": int(self.undone),
            "skipped statistics": sum(block.updates for block in failures),
            "failed decompositions": sum(block.decompositions for block in failures),
        }

    def intervals(self) -> list[str]:
        """How often statistics, inverses and checks are due, how much of a batch checks take, and how the rule
        computes."""
        share = self.checks.share
        part = f"checks take the first {Fraction(share)} of the examples of a batch, rounded up, on an accelerator"
        of_rule = self.options.rule.described(self.scalars)
        of_bases = bases.described(self.estimator.kept) if self.options.rule.has_bases else []
        return [*self.schedule.described(), *[part] * (share < 1.0), *of_rule, *of_bases, *self.memory.described()]

    def fallbacks(self, registrations: Sequence[Registration]) -> list[str]:
        """Each part that was not done as it should be, and why."""
        reasons = self.checks.fallbacks()
        if self.options.because is not None:
            reasons.append(self.options.because)
        if self.vectors.shards is not None and self.vectors.shards.tensor_parallel:
            reasons.append(
                "recordings and checks run the whole model in every process: they gather the weights that tensor "
                "parallelism divides, one message a weight, and processes with the same cases compute the same sums"
            )
        owners = (self.estimator.owner_of if self.vectors.shards is not None else None) or {}
        if owned := [r for r in registrations if r.structure.diagonal and r.owners[0] in owners]:
            reasons.append(
                "gradients of these diagonal blocks travel to an owner, because the diagonals are not divided as the "
                f"parameters are: {first_three(owned)}"
            )
        reasons += [reason for of in self._compiled.values() if (reason := getattr(of, "reason", None)) is not None]
        return [*reasons, *self.memory.reasons(), *self.multiply_jacobian.fallbacks(), *self.forwards.fallbacks()]
