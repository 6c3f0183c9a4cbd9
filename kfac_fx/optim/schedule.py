"""What is due at which step: statistics, inverses, and the losses that adapting the damping needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kfac_fx.optim.closure import Closure
from kfac_fx.optim.options import Options


@dataclass
class Schedule:
    """counter: steps taken; burned_in: steps before them that only averaged statistics."""

    options: Options
    counter: int = 0
    burned_in: int = 0

    @property
    def burning_in(self) -> bool:
        return self.burned_in < self.options.num_burnin_steps

    @property
    def recording(self) -> bool:
        return self.burning_in or self.counter % self.options.cov_update_every == 0

    @property
    def inverting(self) -> bool:
        return self.counter % self.options.invert_every == 0

    @property
    def adapting(self) -> bool:
        """Is this step one to be measured?"""
        due = self.options.damping_rule.due(self.counter)
        return self.options.adapt_damping and due and not self.burning_in

    @property
    def adapting_late(self) -> bool:
        """Is the damping still to be adapted to the last step?"""
        measured = self.counter > 0 and self.options.damping_rule.due(self.counter - 1)
        return self.options.adapt_damping and not self.options.update_damping_immediately and measured

    def check_losses(self, closure: Closure | None, loss: Tensor | float | None, previous: Closure | None) -> None:
        """Raises ValueError for a loss that the damping rule needs and nobody gives."""
        every = f"every {self.options.damping_rule.interval} steps"
        if self.adapting and self.options.update_damping_immediately and closure is None:
            raise ValueError(
                f"adapt_damping needs the loss after the update, {every}: "
                "call step(closure) with a closure that returns the loss of the batch"
            )
        if self.adapting and closure is None and loss is None:
            raise ValueError(f"adapt_damping needs the loss before the update, {every}: call step(loss=loss)")
        if self.adapting_late and previous is None:
            raise ValueError(
                f"update_damping_immediately=False measures a step in the next one, {every}: call step(loss=loss, "
                "previous=closure) with a closure that returns the loss of the last step's batch"
            )
