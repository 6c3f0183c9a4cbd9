"""What is due at which step of a KFAC: statistics, inverses, checks, the damping."""

from __future__ import annotations

from dataclasses import dataclass

from kfac_fx.optim.options import KFACOptions

FIRST_CHECKS = 3  # before there is a step size to try


def is_early(steps: int, every: int) -> bool:
    """Whether `steps` is 0, 1, 2, 5, 10, 20, 50, ... and below `every`."""
    return steps < every and str(steps).rstrip("0") in ("", "1", "2", "5")


@dataclass
class Schedule:
    """Which steps record, invert and adapt."""

    options: KFACOptions
    counter: int = 0  # steps taken
    burned_in: int = 0  # steps before them that only averaged statistics

    @property
    def burning_in(self) -> bool:
        return self.burned_in < self.options.num_burnin_steps

    @property
    def recording(self) -> bool:
        return self.burning_in or self.due(self.options.intervals[0], early=self.options.adaptive)

    @property
    def inverting(self) -> bool:
        """Every `invert_every` steps; and before that after 1, 2, 5, 10, 20, 50, ... steps."""
        return self.due(self.options.intervals[1], early=True)

    def early(self, steps: int) -> bool:
        """Whether the inverses of blocks are due that got their first factors so many steps ago."""
        return is_early(steps, self.options.intervals[1])

    def due(self, every: int, early: bool) -> bool:
        return (early and is_early(self.counter, every)) or self.counter % every == 0

    @property
    def checking(self) -> bool:
        """Whether "adaptive" checks its step size and damping in this step: in the first three, and every `interval`-th
        step."""
        return self.options.adaptive and not self.burning_in and self.checks(self.counter)

    @property
    def checking_exactly(self) -> bool:
        """Whether a check takes a product with the Jacobian."""
        return self.counter < FIRST_CHECKS

    def checks(self, counter: int) -> bool:
        return counter < FIRST_CHECKS or counter % self.options.damping_rule.interval == 0

    @property
    def steps_since_check(self) -> int:
        """The number of steps since the last check; 1 at the first."""
        return next((n for n in range(1, self.counter + 1) if self.checks(self.counter - n)), 1)

    @property
    def adapting(self) -> bool:
        """Whether the change of the loss in this step is measured."""
        return self.options.adapt_damping and self.options.damping_rule.due(self.counter) and not self.burning_in

    @property
    def adapting_late(self) -> bool:
        """Whether the change of the loss in the last step is still to be measured."""
        measured = self.counter > 0 and self.options.damping_rule.due(self.counter - 1)
        return self.options.adapt_damping and not self.options.update_damping_immediately and measured
