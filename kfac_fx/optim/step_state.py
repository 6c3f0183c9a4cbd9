"""The state of a KFAC from step to step, the seconds of its phases, and the moves that a step proposes from it.

A proposal needs products with the present damping, and those of "qmodel" need the step's batch. The model that made it
also predicts the change of the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.fisher.placement import UNDIVIDED, DivisionByOwners, DivisionByShards, VectorDivision
from kfac_fx.linalg.matrices import zero_unless_
from kfac_fx.linalg.processes import Replicas, Shards
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim.batch_loss import SHARE
from kfac_fx.optim.curvature import JacobianProducts, LossTerms, at_least_one, fisher_inner_products
from kfac_fx.optim.eigen_moments import Means, directions, step_in_bases, without_basis
from kfac_fx.optim.forwards import Forwards
from kfac_fx.optim.groups import (
    FlatParameters,
    GroupedParameters,
    Proposal,
    first_order_update,
    move_in_blocks,
    propose_by_momentum,
)
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.padded_step import PaddedStep, product_dtype
from kfac_fx.optim.rules import (
    FirstOrder,
    MomentumRule,
    Preconditioner,
    Product,
    Products,
    QuadraticModel,
    StepBound,
    change_by_blocks,
    grafted,
    is_finite,
)
from kfac_fx.optim.schedule import Schedule
from kfac_fx.optim.step_checks import StepSize
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.torch_private import mark_static
from kfac_fx.passes.tracing.random_streams import RandomState
from kfac_fx.recording.backends import compiled_function
from kfac_fx.recording.statistics import Key

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
    by_product: str | None = None  # why the last check of "eigen_moments" took a product with the Jacobian
    share: float = 1.0  # the part of the examples that the last check of "eigen_moments" took
    by_whole_batch: str | None = None  # why it took all of them, on an accelerator
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
        self.directions = compiled_function(directions, self.net.backend)
        self._division: VectorDivision = UNDIVIDED
        self._divided: list[BlockGroup] | None = None  # the blocks that it belongs to
        self._means: Means | None = None
        self._padded: PaddedStep | None = None

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

    @property
    def means(self) -> Means:
        """Those of "eigen_moments", of the blocks that have factors at present."""
        if self._means is None or not self._means.are_of(self.estimator):
            self._means = Means.of(self.estimator)
        return self._means

    def padded_step(self, flat: FlatParameters) -> PaddedStep | None:
        """The step of "eigen_moments" by products in bfloat16; None where gradients are multiplied as they are."""
        if not self.options.eigen_moments or self.division is not UNDIVIDED or not (means := self.means).groups:
            return None
        device, dtype = self.scalar.device, means.groups[0].dtype
        products = product_dtype(device, dtype)
        if products is None or any(group.dtype is not dtype or group.device != device for group in means.groups):
            return None
        if self._padded is None or self._padded.means is not means:
            decay, exponent = map(self.options.value, ("second_moment_decay", "eigenvalue_exponent"))
            self._padded = PaddedStep.of(means, self.scalar, decay, exponent, products)
        return self._padded if self._padded.fits(means, flat) else None

    def mark_static(self, in_blocks: FlatParameters) -> None:
        """Tell CUDA graphs that what an update reads and writes lies where it is as long as it lives."""
        if self.net.backend != "cudagraphs":
            return
        tensors = [in_blocks.g, *in_blocks.state.values()]
        for group in self.estimator.groups:
            tensors += [*group.extras.values(), *(root for operators in group.roots.values() for root in operators)]
        if self.options.eigen_moments:
            tensors += [stack.moment for stack in self.means.joint or ()]
        for tensor in tensors:
            mark_static(tensor)

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

    def intervals(self) -> list[str]:
        """How often statistics, inverses and checks are due, how much of a batch checks take, and the precision of a
        step."""
        part = f"checks take the first {Fraction(self.share)} of the examples of a batch, rounded up, on an accelerator"
        of_products = [] if self._padded is None else [self._padded.described]
        return [*self.schedule.described(), *[part] * (self.share < 1.0), *of_products]

    def fallbacks(self, registrations: Sequence[Registration]) -> list[str]:
        """Each part that was not done as it should be, and why."""
        reasons = []
        if self.unobserved:
            reasons.append(
                "the checks of the step size take the loss as linear in the parameters beside its curvature, and undo "
                "no steps: no backward was seen to reach the Fisher's outputs, or a loss that forward returns"
            )
        if self.by_product is not None:
            reasons.append(
                "the checks of the step size take a product with the Jacobian, which costs four forwards "
                f"instead of one: {self.by_product}"
            )
        if self.by_whole_batch is not None:
            reasons.append(
                f"the checks of the step size take whole batches and not {Fraction(SHARE)} of their examples, "
                f"which costs time on an accelerator: {self.by_whole_batch}"
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
        reasons += [] if self._padded is None else self._padded.reasons
        return [*reasons, *self.multiply_jacobian.fallbacks(), *self.forwards.fallbacks()]


def first_three(registrations: Sequence[Registration]) -> str:
    others = len(registrations) - 3
    return ", ".join(map(str, registrations[:3])) + (f" and {others} more" if others > 0 else "")


# --- the moves that a step proposes -----------------------------------------------------------------------------------


def propose(state: StepState, flat: FlatParameters) -> Proposal:
    """The move of the parameters in Fisher blocks."""
    precondition = preconditioner(state, flat, state.multiply_inverse)
    if state.options.grafted:
        return propose_grafted(state, flat, precondition)
    if not state.options.quadratic:
        return propose_by_momentum(state.rule, flat, precondition, step_bound(state, flat))
    return propose_quadratic(state, flat, precondition)


def step_bound(state: StepState, flat: FlatParameters) -> StepBound | None:
    bound = state.options.bound_on("update")
    return None if bound is None else StepBound(bound, fisher_product(state, flat), flat.inner)


def propose_quadratic(state: StepState, flat: FlatParameters, precondition: Product) -> Proposal:
    """The best step along d₁ = P g and d₂ = -v, the previous update: v <- -(α d₁ + μ d₂) = μ v - α P g.

    "qmodel_fixedmu" fixes μ. If the model is not finite, the move is not. Stores -α, μ and the predicted change.
    """
    v = flat.state["velocity"]
    directions = [precondition(flat.g), -v]
    model = QuadraticModel.along(directions, flat.g, exact_products(state, flat), flat.inner)
    s = model.best(state.damping)
    if state.options.momentum is not None:  # None exactly for "qmodel"
        s = model.best_with_momentum(state.damping, torch.full_like(s[0], state.options.momentum))
    s = torch.where(model.fisher.isfinite().all(), s, torch.nan)
    state.qmodel_learning_rate.copy_(-s[0])
    state.qmodel_momentum.copy_(s[1])
    if flat.one_scale:
        state.predicted_change.copy_(model.change(flat.lr * s, state.options.l2_reg))
    velocity = s[1] * v - s[0] * directions[0]
    return Proposal(flat.displacement(velocity), {"velocity": velocity})


def eigen_update(state: StepState, flat: FlatParameters, ok: Tensor) -> Tensor:
    """Δ of "eigen_moments", [P]. The gradient enters the means if `ok` is true, and becomes zero if not."""
    assert state.grouped is not None, "bug in kfac_fx: a move before the parameter groups are read"
    if (padded := state.padded_step(flat)) is not None:
        return padded.vector(flat, ok, state.grouped.scalars["momentum"], state.size.nesterov)
    absent = preconditioner(state, flat, state.estimator.multiply_kept).absent
    parts = flat.flat.parts(zero_unless_(ok, flat.g))
    gradient = flat.division.to_blocks(parts)
    update = step_in_bases(
        state.estimator,
        state.means,
        {**gradient, **absent},
        state.grouped.scalars["momentum"],
        state.options.value("second_moment_decay"),
        state.options.value("eigenvalue_exponent"),
        nesterov=state.size.nesterov,
        accept=ok,
        still=absent.keys(),
        run=state.directions,
    )
    return flat.flat.joined(flat.division.from_blocks({name: update[name] for name in gradient}, parts))


def propose_grafted(state: StepState, flat: FlatParameters, precondition: Product) -> Proposal:
    """The direction P m̂ with the norms of Adam's step; NaN where a new average is not finite."""
    momentum = state.options.momentum
    assert momentum is not None, "bug in kfac_fx: 'grafted' without a momentum"
    adam, new = FirstOrder(betas=(momentum, state.options.value("second_moment_decay")))(flat.g, flat.state, flat.flat)
    blocks = [block.registration.owners for block in state.estimator.blocks.values()]
    update = grafted(precondition(new["exp_avg"]), adam, flat.flat, blocks, flat.division)
    finite = torch.stack([is_finite(average) for average in new.values()]).all()
    return Proposal(flat.displacement(torch.where(finite, update, torch.nan)), new)


def predicted_change(state: StepState, flat: FlatParameters, move: Tensor) -> Tensor:
    """The change of the loss that the quadratic model predicts for a move, with weight decay, clipping and groups.

    The damping counts only as far as it is curvature of the loss: the l2 term.
    """
    if not state.options.quadratic:
        return change_by_blocks(
            flat.g, move, fisher_product(state, flat), state.estimator.damping - state.options.l2_reg, flat.inner
        )
    if flat.one_scale:
        return state.predicted_change.clone()
    model = QuadraticModel.along([move], flat.g, exact_products(state, flat), flat.inner)
    return model.change(torch.ones_like(model.slopes), state.options.l2_reg)


def preconditioner(state: StepState, flat: FlatParameters, multiply: Callable[[Tensors], Tensors]) -> Preconditioner:
    """`multiply` as a product with vectors: the parameters in Fisher blocks that have no gradient count as zero."""
    idle = state.estimator.idle(flat.parameters)
    absent = {
        name: state.scalar.new_zeros(flat.division.in_blocks(name, parameter))
        for parameter, name in state.names.items()
        if name in state.registered
        and name not in flat.parameters
        and name not in idle
        and flat.division.multiplies(name)
    }
    return Preconditioner(multiply, flat.flat, absent, flat.division)


def fisher_product(state: StepState, flat: FlatParameters) -> Preconditioner:
    """The product with the damped block-diagonal Fisher, with the present damping."""
    set_estimator_damping(state)
    return preconditioner(state, flat, state.estimator.multiply_kept)


def exact_products(state: StepState, flat: FlatParameters) -> Products:
    """Inner products of vectors in the exact Fisher of all micro-batches of the step, averaged by cases."""
    calls = state.forwards.seen.calls
    if not calls:
        raise RuntimeError(
            f"momentum_type={state.options.kind!r} computes with the step's batch, and net(x) was not "
            "called in training mode with gradients enabled since the last step"
        )
    ggn = state.options.estimation_mode.endswith("GGN")
    parameters = {name: parameter.detach() for parameter, name in state.names.items()}

    def products(vectors: Sequence[Tensor]) -> Tensor:
        by_name, total = [flat.everywhere(vector) for vector in vectors], torch.zeros_like(state.damping)
        cases: int | Tensor = 0
        for args, kwargs in calls:
            pairs: LossTerms = []

            def losses(at: Tensors, args: Any = args, kwargs: Any = kwargs) -> LossTerms:
                nonlocal pairs
                pairs = state.net.losses(*state.net.functional(at, args, kwargs), call=(args, kwargs))
                return pairs

            of_call = fisher_inner_products(
                losses, parameters, by_name, ggn=ggn, multiply_jacobian=state.multiply_jacobian
            )
            total, cases = total + pairs[0][1].cases * of_call, cases + pairs[0][1].cases
        if state.replicas.number > 1:  # batches may have different sizes, and no cases at all
            total, cases = state.replicas.total([total, torch.as_tensor(cases).to(total)])
        return total / at_least_one(cases)

    return products


def set_estimator_damping(state: StepState) -> None:
    state.estimator.damping.copy_(state.damping * state.options.precon_damping_mult)
