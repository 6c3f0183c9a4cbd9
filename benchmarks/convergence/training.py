"""A step of training and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence.tasks import Batch, Task

WARM_UP = 0.03  # of the steps
Step = Callable[[Batch], int]
"""Takes a step, and returns the number of evaluations of loss and gradient that the budget counts."""


@dataclass(frozen=True)
class Training:
    step: Step
    optimizers: Sequence[Optimizer] = ()  # with a learning rate that is scheduled

    def schedules(self, steps: int) -> list[LambdaLR]:
        """Warm-up and a linear decay to 0, which is reached behind the last step."""

        def factor(step: int) -> float:
            return min((step + 1) / max(1.0, WARM_UP * steps), max(0.0, 1 - step / steps))

        return [LambdaLR(optimizer, factor) for optimizer in self.optimizers]


def first_order(
    task: Task, model: nn.Module, *optimizers: Optimizer, before: Callable[[], None] | None = None
) -> Training:
    """before: called between the backward pass and the optimizers' steps."""

    def step(batch: Batch) -> int:
        inputs, target = batch
        task.loss(model(*inputs), target).backward()
        if before is not None:
            before()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        return 1

    return Training(step, optimizers)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def number(lr: float | None) -> float:
    assert lr is not None, "bug in the benchmark: a method with a search has a learning rate"
    return lr
