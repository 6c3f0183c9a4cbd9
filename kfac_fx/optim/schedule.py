"""The steps at which a KFAC updates statistics, inverses and the damping, and checks its steps.

A cost model of the network chooses the intervals of rules with checks. It counts floating-point
operations. A layer with n rows and a matrix [o, i] takes 2 n i o in a forward, its statistics take 2 n (i² + o²), and
its inverses D(i) + D(o). Other work counts as the products that the machine does in the same time (`Rates`): an
operation for the time in which the host issues it, which decides in small networks, a pass over the parameters for the
time that memory takes, and a decomposition D(d) for a polynomial of its width d. With a forward f = Σ 2 n i o + the
operations of the graph, and P parameters:

    a training step          3 f + the operations of a loss and of a first-order optimizer
    statistics               f + Σ 2 n i o + Σ 2 n (i² + o²) + their operations; only the last two if the training step
                             records them
    inverses                 Σ D(i) + D(o) + their operations; new bases also turn two means, Σ 4 i o (i + o)
    a check                  3 f + its operations + passes over P: three forwards, with torch's kernels for recurrent
                             layers; on an accelerator without TF32, of a part of the batch
    with products            2 f + 3 Σ 2 n i o + the same: two forwards, and a product with the Jacobian

Costs c divided by intervals s sum up to at most the stated overhead of a training step. Among such intervals those
with the smallest sum are taken: s = √c Σ √c / (overhead · training). Inverses follow every second update of the
factors, or every k-th where k² times the cost of statistics is theirs.

No interval of statistics or checks is longer than the rule's `longest`, because stale factors and
step sizes make the loss rise, which only a check undoes. Where an interval is cut to this, the other takes what is
left; in networks of a few operations, whose training step is short beside all else, the overhead is then larger than
stated.

On an accelerator decompositions take as long as products of tens of times d³ operations, so those of wide layers can
cost ten training steps. There k is also so large that inverses cost at most an eighth of the overhead. The early
inverses, after 1, 2, 5, 10, 20, ... steps, are in no overhead.

The checks of a rule become rarer, if it says so, where they find nothing to do: after a check that was calm
(`kfac_fx.optim.rules.eigen_moments`), the next one comes after twice as many intervals as the last one did, at most
`MOST_INTERVALS`, and after no more than half of the steps so far, because a training changes fast in its first steps;
after any other, it comes after one interval. An interval that is given stays as it is. The host reads whether a check
was calm when the next one may be due, so that it hardly waits. A rule may also ask for a check in the next step. Where
such checks end, the steps are of another kind, so the next ones come 2 and 5 steps after the last of them.

The model sees no clock. It sees whether the parameters are on the CPU or on an accelerator, and whether the forward
computes in half precision there, and has three machines for these. So equal networks and batches have equal intervals
on all machines of a kind, and on all processes.
Preconditioning and momentum are in every step, so no interval changes what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kfac_fx.fisher.bases import block_width
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.matrices import HostCopy
from kfac_fx.optim.options import KFACOptions
from kfac_fx.optim.rule import StepIntervals
from kfac_fx.passes.ir import UNROLLED, Program
from kfac_fx.recording.statistics import Key

PER_USE = 40  # operations that record a use
PER_GROUP = 60  # operations that average the factors of equal blocks
PER_INVERSE = 30  # operations that invert them
PER_RECORDING = 100  # the other operations
PER_TRAINING = 30  # operations of the loss and of a first-order optimizer with lists of tensors
PER_CHECK, PER_TENSOR = 290, 18  # operations of a check in addition to its forwards: all, and for each parameter
CHECK_PASSES = 12  # of a check over all parameters
PRODUCT = 4  # operations for one of the graph in a product with the Jacobian
CHECK_FORWARDS = 3  # of a check without such a product
FUSED = 10  # the operations of an unrolled recurrent layer for one of its kernel, which training and checks run

UPDATES = 2  # of the factors for one of the inverses, at least
MOST_INTERVALS = 4  # from a check to the next
AFTERWARDS = (2, 3)  # steps: from the last of checks in consecutive steps to the next one, and on to that after it
DENSER = 5  # times, where every step has a check and takes about as many times as long
SHORTEST_TO_MULTIPLY = 3  # steps: the host would wait for the check of one or two steps ago


@dataclass(frozen=True)
class LayerFlops:
    """Floating-point operations of blocks: statistics as plain products, and to turn one vector by all sides.

    widths, squares, cubes: Σ d, Σ d² and Σ d³ of the matrices that are decomposed. parameters: their number.
    """

    forward: float = 0.0
    statistics: float = 0.0
    turning: float = 0.0
    widths: float = 0.0
    squares: float = 0.0
    cubes: float = 0.0
    parameters: float = 0.0

    @staticmethod
    def of(groups: Sequence[BlockGroup], rows: Mapping[Key, float], eigenbases: bool = False) -> LayerFlops:
        """rows: n of every registration; others are left out. eigenbases: whether wide sides are decomposed in
        blocks (`kfac_fx.fisher.bases`)."""
        forward = statistics = turning = widths = squares = cubes = parameters = 0.0
        for group in groups:
            members = [r.parameters for r in group.registrations if r.parameters in rows]
            n, elements = sum(rows[key] for key in members), math.prod(group.whole_shape)
            forward += 2 * n * elements
            parameters += len(members) * elements
            for side in group.sides:
                dense = math.prod(side.statistic.shape(group.whole_shape))
                statistics += 2 * n * dense
                if side.diagonal:
                    turning += 2 * len(members) * elements
                    continue
                width = block_width(group, side) if eigenbases else group.size(side)
                turning += 2 * len(members) * elements * width
                rows_in_blocks = len(members) * dense / max(1, group.size(side))
                widths += rows_in_blocks
                squares += rows_in_blocks * width
                cubes += rows_in_blocks * width**2
        return LayerFlops(forward, statistics, turning, widths, squares, cubes, parameters)


@dataclass(frozen=True)
class Decomposition:
    """A decomposition of a matrix of width d: linear · d + square · d² + cubic · d³ flops."""

    linear: float
    square: float
    cubic: float

    def flops(self, layers: LayerFlops) -> float:
        """Those of all matrices."""
        return self.linear * layers.widths + self.square * layers.squares + self.cubic * layers.cubes


@dataclass(frozen=True)
class Rates:
    """A kind of machine: the flops of matrix products that it does in the time of other work.

    Attributes:
        operation: the host issues an operation.
        element: a number is read or written, in a pass over the parameters.
        bases: new eigenvectors of a matrix.
        cholesky: a Cholesky decomposition, and the inverse from it.
        full: products of float32 without TF32, as the forwards of a check have them, take so many times as long.
        share: inverses may cost this part of the overhead.
    """

    operation: float
    element: float
    bases: Decomposition
    cholesky: Decomposition
    full: float
    share: float

    @staticmethod
    def of(device_types: Iterable[str], halves: bool = False) -> Rates:
        """device_types: those of the parameters. All but "cpu" are accelerators. halves: whether the forward computes
        in half precision."""
        if set(device_types) <= {"cpu"}:
            return HOST
        return ACCELERATOR_IN_HALVES if halves else ACCELERATOR


HOST = Rates(
    operation=3e5,  # flops of one core in the 7 µs in which it dispatches an operation
    element=70.0,
    # Measured for LAPACK's eigh on one core with 85 to 97 Gflop/s in products of float32: 22 d³ at a width of 129, 14
    # to 20 at 257, 9 to 12 at 513, 8 to 10 at 1025 and 7 to 9 at 2305. This gives 22, 15, 12, 10 and 9.
    bases=Decomposition(0.0, 1800.0, 8.5),
    cholesky=Decomposition(0.0, 0.0, 2.0),  # d³ multiplications and as many additions, with the inverse
    full=1.0,
    share=math.inf,
)


def accelerator(speed: float) -> Rates:
    """speed: of products, flops/s."""
    return Rates(
        operation=5e-6 * speed,  # the host takes about 5 µs for an operation, as without an accelerator
        element=3e-12 * speed,  # 8 bytes at 2.8 TB/s
        # Measured by hand on an H100, for one of 12 in a stack: 0.44 ms at a width of 784, 4.2 at 2304 and 8.5 at 3072
        # for the orthogonal iteration. These seconds give 0.37, 4.1 and 9.0 ms.
        bases=Decomposition(3e-7 * speed, 0.0, 2.8e-13 * speed),
        # Measured on an H100 by benchmarks/decompositions, for one of a stack of 16: 0.05 ms at a width of 256, 0.09
        # at 512, 0.26 at 1024 and 2.3 at 2048. These seconds give 0.05, 0.12, 0.31 and 1.3 ms.
        cholesky=Decomposition(2e-7 * speed, 0.0, 1e-13 * speed),
        full=speed / 4e13,
        share=0.125,
    )


ACCELERATOR = accelerator(5e13)  # products of float32 with TF32
ACCELERATOR_IN_HALVES = accelerator(2e14)


@dataclass(frozen=True)
class StepCosts:
    """The costs of the parts of a step, in flops."""

    training: float
    statistics: float
    inverses: float
    check: float
    share: float = math.inf  # as of `Rates`

    @staticmethod
    def of(
        program: Program,
        groups: Sequence[BlockGroup],
        rows: Mapping[Key, float],
        fraction: float = 1.0,
        in_training: bool = False,
        with_product: bool = True,
        check_share: float = 1.0,
        rates: Rates = HOST,
        eigenbases: bool = True,
    ) -> StepCosts:
        """
        Args:
            groups: the blocks of the program.
            rows: n of every registration in one batch.
            fraction: the part of a batch that is recorded.
            in_training: whether the training step records it.
            with_product: whether a check takes a product with the Jacobian.
            check_share: the part of a batch that a check takes.
            rates: the kind of machine.
            eigenbases: whether new inverses are eigenbases, and not inverses from Cholesky decompositions.
        """
        flops, operation = LayerFlops.of(groups, rows, eigenbases), rates.operation
        decomposition = rates.bases if eigenbases else rates.cholesky
        calls = [node for node in program.graph.nodes if node.op.startswith("call_")]
        unrolled = sum(UNROLLED in node.meta for node in calls)
        uses = sum(len(registration.uses) for registration in program.registrations)
        recording = operation * (PER_USE * uses + PER_GROUP * len(groups) + PER_RECORDING)
        passes = 0.0 if in_training else 2 * fraction * flops.forward + 3 * operation * len(calls)
        of_kernels = len(calls) - unrolled * (1 - 1 / FUSED)
        check, operations = CHECK_FORWARDS, CHECK_FORWARDS * of_kernels
        if with_product:
            check, operations = 5, (2 + PRODUCT) * len(calls)
        return StepCosts(
            training=3 * (flops.forward + operation * of_kernels) + operation * PER_TRAINING,
            statistics=passes + fraction * flops.statistics + recording,
            inverses=decomposition.flops(flops)
            + 2 * eigenbases * flops.turning
            + operation * PER_INVERSE * len(groups),
            check=check * check_share * rates.full * flops.forward
            + operation * (operations + PER_CHECK + PER_TENSOR * len(program.parameters))
            + rates.element * CHECK_PASSES * flops.parameters,
            share=rates.share,
        )

    def overhead(self, intervals: StepIntervals) -> float:
        """The cost of statistics, inverses and checks per step, as a part of the training step's."""
        each = zip((self.statistics, self.inverses, self.check), intervals, strict=True)
        return sum(cost / steps for cost, steps in each) / self.training

    def intervals(self, overhead: float, longest: StepIntervals) -> StepIntervals:
        """The shortest intervals whose overhead is at most that, or the longest ones."""
        updates = max(UPDATES, round(math.sqrt(self.inverses / self.statistics)))
        update, allowed = self.statistics + self.inverses / updates, overhead * self.training
        roots = math.sqrt(update), math.sqrt(self.check)
        checks = min(math.ceil(roots[1] * sum(roots) / allowed), longest.checks)
        left = allowed - self.check / checks
        statistics = min(math.ceil(update / left), longest.statistics) if left > 0 else longest.statistics
        updates = max(updates, math.ceil(self.inverses / (self.share * allowed * statistics)))
        return StepIntervals(statistics, updates * statistics, checks)


def is_early(steps: int, every: int) -> bool:
    """Whether `steps` is 0, 1, 2, 5, 10, 20, 50, ... and below `every`."""
    return steps < every and str(steps).rstrip("0") in ("", "1", "2", "5")


@dataclass(frozen=True)
class Due:
    """The parts of one step that are due; the attributes of `Schedule` at its beginning."""

    burning_in: bool
    recording: bool
    inverting: bool
    checking: bool
    adapting: bool
    adapting_late: bool
    first: bool  # the first step after the burn-in


@dataclass
class Schedule:
    """Which steps record, invert and adapt."""

    options: KFACOptions
    counter: int = 0  # steps taken
    burned_in: int = 0  # steps before them that only averaged statistics
    last_check: int = 0  # the number of its step
    intervals_apart: int = 1  # from the last check to the next; 0: the next step has a check
    soon: int = 0  # steps from the last check to the next, at most; 0: intervals alone decide
    calm: HostCopy | None = None  # whether the last check was, until this is read
    intervals: StepIntervals = field(init=False)  # those of the options, until the first step chooses
    overhead: float = 0.0  # what they cost by the cost model; 0 until then

    def __post_init__(self) -> None:
        self.damping_rule = self.options.rule.damping_rule
        self.intervals = self.with_given(self.options.rule.intervals)

    def due(self) -> Due:
        """At the present step."""
        return Due(
            self.burning_in,
            self.recording,
            self.inverting,
            self.checking,
            self.adapting,
            self.adapting_late,
            self.counter == 0 and not self.burning_in,
        )

    @property
    def burning_in(self) -> bool:
        return self.burned_in < self.options.num_burnin_steps

    @property
    def recording(self) -> bool:
        return self.burning_in or self.every(self.present.statistics, early=self.options.rule.checked)

    @property
    def inverting(self) -> bool:
        """Every `invert_every` steps; and before that after 1, 2, 5, 10, 20, 50, ... steps."""
        return self.every(self.present.inverses, early=True)

    @property
    def present(self) -> StepIntervals:
        """The intervals at this step: where every step has a check, a part of those that the options do not give."""
        if self.intervals_apart:
            return self.intervals
        statistics, inverses, checks = self.intervals
        return self.with_given(StepIntervals(math.ceil(statistics / DENSER), math.ceil(inverses / DENSER), checks))

    def early(self, steps: int) -> bool:
        """Whether the inverses of blocks are due that got their first factors so many steps ago."""
        return is_early(steps, self.intervals.inverses)

    def every(self, every: int, early: bool) -> bool:
        return (early and is_early(self.counter, every)) or self.counter % every == 0

    @property
    def checking(self) -> bool:
        """Whether this step is checked: after 0, 1, 2, 5, 10, ... steps of the first interval, and then
        `intervals_apart` intervals after the last check, or `soon` after it."""
        if not self.options.rule.checked or self.burning_in:
            return False
        early = is_early(self.counter, self.intervals.checks)
        soon = 0 < self.soon <= self.counter - self.last_check
        return early or soon or self.counter >= self.intervals_later(self.intervals_apart)

    def intervals_later(self, number: int) -> int:
        """The step so many intervals after the last check."""
        every = self.intervals.checks
        return (self.last_check // every + number) * every

    @property
    def steps_since_check(self) -> int:
        """The number of steps since the last check; 1 at the first."""
        return max(1, self.counter - self.last_check)

    @property
    def multiplies_checks(self) -> bool:
        """Whether checks may be several intervals apart."""
        rule = self.options.checks
        rarer = rule is not None and rule.rarer_checks and rule.damping_adaptation_interval is None
        return rarer and self.intervals.checks >= SHORTEST_TO_MULTIPLY

    def checked(self, step: int, intervals_apart: int, calm: Tensor, soon: int = 0) -> None:
        """Take the last check. calm: whether it was, 0-dim. intervals_apart: how far the check before it was."""
        self.last_check, self.intervals_apart, self.soon = step, intervals_apart, soon
        unread = not is_early(step, self.intervals.checks) and self.counter < self.intervals_later(1)
        self.calm = HostCopy(calm) if self.multiplies_checks and unread and intervals_apart else None

    def advance(self, calm: Tensor | None, check_next: bool = False) -> None:
        """Go to the next step.

        calm: whether the check of this one was, 0-dim; None without a check. check_next: whether the next step has a
            check, if no interval of checks is given.
        """
        free = self.options.checks is not None and self.options.checks.damping_adaptation_interval is None
        apart = 0 if check_next and free else max(1, self.intervals_apart)
        if calm is not None:
            first, second = AFTERWARDS
            soon = first if self.intervals_apart == 0 else second if self.soon == first else 0
            self.checked(self.counter, apart, calm, 0 if check_next else soon)
        elif check_next:
            self.intervals_apart, self.calm = apart, None
        self.counter += 1
        if self.calm is not None and self.counter >= self.intervals_later(1):
            half = self.last_check // (2 * self.intervals.checks)
            twice = min(2 * self.intervals_apart, MOST_INTERVALS, max(1, half))
            self.intervals_apart = twice if self.calm.wait() else 1
            self.calm = None

    def choose(self, costs: StepCosts) -> None:
        """Take the intervals that a cost model allows, and those that are given."""
        rule = self.options.checks
        assert rule is not None, "bug in kfac_fx: intervals that are chosen for a rule without checks"
        self.intervals = self.with_given(costs.intervals(rule.overhead, rule.longest))
        self.overhead = costs.overhead(self.intervals)

    def with_given(self, chosen: StepIntervals) -> StepIntervals:
        """These intervals, with those of the options instead of their own where they are given."""
        return StepIntervals(
            self.options.cov_update_every or chosen.statistics,
            self.options.invert_every or chosen.inverses,
            (self.options.checks and self.options.checks.damping_adaptation_interval) or chosen.checks,
        )

    @property
    def decay(self) -> float:
        """The decay of the factors at one update, so that their decay in a step does not depend on how rare that is."""
        return self.options.factor_decay**self.intervals.statistics

    @property
    def present_decay(self) -> float | None:
        """The decay at an update where every step has a check; None: the usual one."""
        if self.intervals_apart:
            return None
        return self.options.factor_decay**self.present.statistics

    def described(self) -> list[str]:
        """For the report: the intervals of a rule with checks."""
        every, rule = self.intervals, self.options.checks
        if rule is None:
            return []
        most = f" to {MOST_INTERVALS * every.checks}" if self.multiplies_checks else ""
        checks = f"checks every {every.checks}{most} steps"
        text = f"statistics every {every.statistics}, inverses every {every.inverses}, {checks}"
        if not self.overhead:
            return [f"{text}, until the first step chooses the intervals for an overhead of {rule.overhead:.0%}"]
        cost = f"{text}. By a count of operations this adds {self.overhead:.0%} to a training step"
        if self.overhead <= rule.overhead:
            return [f"{cost}; overhead={rule.overhead:g} allows {rule.overhead:.0%}"]
        more = f"{cost}, more than the {rule.overhead:.0%} of overhead={rule.overhead:g}, because"
        if self.with_given(rule.longest) != rule.longest:
            return [f"{more} intervals are given"]
        least = f"statistics at every {rule.longest.statistics}th step and checks at every {rule.longest.checks}th"
        return [f"{more} {least} are the rarest. A training step of this network is short, so nothing is wrong"]

    @property
    def adapting(self) -> bool:
        """Whether the change of the loss in this step is measured, to adapt the damping."""
        rule = self.damping_rule
        return rule is not None and rule.due(self.counter) and not self.burning_in

    @property
    def adapting_late(self) -> bool:
        """Whether the change of the loss in the last step is still to be measured."""
        rule = self.damping_rule
        return rule is not None and not rule.immediately and self.counter > 0 and rule.due(self.counter - 1)
