"""The steps at which a KFAC updates statistics, inverses and the damping, and checks its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from kfac_fx.optim.intervals import LONGEST_INTERVALS, StepCosts, StepIntervals
from kfac_fx.optim.options import KFACOptions

FIRST_CHECKS = 3


def is_early(steps: int, every: int) -> bool:
    """Whether `steps` is 0, 1, 2, 5, 10, 20, 50, ... and below `every`."""
    return steps < every and str(steps).rstrip("0") in ("", "1", "2", "5")


@dataclass
class Schedule:
    """Which steps record, invert and adapt."""

    options: KFACOptions
    counter: int = 0  # steps taken
    burned_in: int = 0  # steps before them that only averaged statistics
    intervals: StepIntervals = field(init=False)  # those of the options, until the first step chooses
    overhead: float = 0.0  # what they cost by the cost model; 0 until then

    def __post_init__(self) -> None:
        self.intervals = self.options.intervals

    @property
    def burning_in(self) -> bool:
        return self.burned_in < self.options.num_burnin_steps

    @property
    def recording(self) -> bool:
        return self.burning_in or self.due(self.intervals.statistics, early=self.options.checked)

    @property
    def inverting(self) -> bool:
        """Every `invert_every` steps; and before that after 1, 2, 5, 10, 20, 50, ... steps."""
        return self.due(self.intervals.inverses, early=True)

    def early(self, steps: int) -> bool:
        """Whether the inverses of blocks are due that got their first factors so many steps ago."""
        return is_early(steps, self.intervals.inverses)

    def due(self, every: int, early: bool) -> bool:
        return (early and is_early(self.counter, every)) or self.counter % every == 0

    @property
    def checking(self) -> bool:
        """Whether the step size, and the damping of "adaptive", is checked in this step: in the first three, and in
        every `intervals.checks`-th."""
        return self.options.checked and not self.burning_in and self.checks(self.counter)

    def checks(self, counter: int) -> bool:
        return counter < FIRST_CHECKS or counter % self.intervals.checks == 0

    @property
    def steps_since_check(self) -> int:
        """The number of steps since the last check; 1 at the first."""
        return next((n for n in range(1, self.counter + 1) if self.checks(self.counter - n)), 1)

    def choose(self, costs: StepCosts) -> None:
        """Take the intervals that a cost model allows, and those that are given."""
        self.intervals = self.options.intervals_of(costs.intervals(self.options.allowed))
        self.overhead = costs.overhead(self.intervals)

    def described(self) -> list[str]:
        """For the report: the intervals of a type with checks."""
        every, options = self.intervals, self.options
        if not options.checked:
            return []
        text = (
            f"statistics every {every.statistics}, inverses every {every.inverses}, checks every {every.checks} steps"
        )
        if not self.overhead:
            return [f"{text}, until the first step chooses the intervals for an overhead of {options.allowed:.0%}"]
        cost = f"{text}: by the cost model {self.overhead:.0%} of a training step"
        if self.overhead <= options.allowed:
            return [f"{cost}, at most the stated {options.allowed:.0%}"]
        longest = f"statistics every {LONGEST_INTERVALS.statistics} and checks every {LONGEST_INTERVALS.checks} steps"
        return [f"{cost}, and not the stated {options.allowed:.0%}, because the longest intervals chosen are {longest}"]

    @property
    def adapting(self) -> bool:
        """Whether the change of the loss in this step is measured."""
        return self.options.adapt_damping and self.options.damping_rule.due(self.counter) and not self.burning_in

    @property
    def adapting_late(self) -> bool:
        """Whether the change of the loss in the last step is still to be measured."""
        measured = self.counter > 0 and self.options.damping_rule.due(self.counter - 1)
        return self.options.adapt_damping and not self.options.update_damping_immediately and measured
