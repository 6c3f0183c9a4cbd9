"""A training with a linear schedule, and the gradients of a net next to those of its plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LossOfStep = Callable[[Any, int], Tensor]  # of a model or a compiled module, at a step


def trained(model: Any, optimizer: torch.optim.Optimizer, loss_of: LossOfStep, steps: int, last: int = 1) -> float:
    """The mean loss of the next `last` steps, which are not taken."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    with torch.no_grad():
        return sum(float(loss_of(model, steps + step)) for step in range(last)) / last


def by_adamw(
    model: nn.Module, loss_of: LossOfStep, steps: int, last: int = 1, rates: Sequence[float] = (1e-2, 3e-2)
) -> float:
    """The lowest loss of AdamW with these rates, from copies of the model."""
    losses = []
    for lr in rates:
        other = copy.deepcopy(model)
        losses.append(trained(other, torch.optim.AdamW(other.parameters(), lr=lr), loss_of, steps, last))
    return min(losses)


def same_gradients(model: nn.Module, net: Any, loss_of: LossOfStep, steps: int) -> None:
    """The gradients of every step are those of the plain model, also where there are none."""
    for step in range(steps):
        for of in (model, net):
            of.zero_grad()
            loss_of(of, step).backward()
        for (name, parameter), (_, wanted) in zip(net.named_parameters(), model.named_parameters(), strict=True):
            assert (parameter.grad is None) == (wanted.grad is None), name
            if wanted.grad is not None:
                torch.testing.assert_close(parameter.grad, wanted.grad)
    net.zero_grad()
