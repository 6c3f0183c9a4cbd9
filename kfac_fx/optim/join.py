"""Processes that run out of batches, inside of `torch.distributed.algorithms.join.Join([wrapped, optimizer])`.

Such a process stands in for itself: it goes on to take part in the messages of the others until none has a batch. The
hook of DistributedDataParallel sends zeros instead of its gradients, and drops the average. That of KFAC takes the
steps of a process without cases. It calls the net with an empty batch, receives the averaged gradient from a process
that has one, and takes the step: the blocks and the momentum that it owns, and its copy of the parameters, go on.

A step inside of Join tells all processes which of them have a batch: one message of a few numbers, for which the host
waits. Two more messages carry the gradient and the numbers of the parameter groups while a process stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.linalg.matrices import dense_or_zero
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim.groups import OF_GROUPS, Group
from kfac_fx.optim.micro_batches import ForwardArguments
from kfac_fx.optim.options import KFACOptions
from kfac_fx.passes import results
from kfac_fx.passes.matrix import complex_numbers, real_numbers

LossOfStep = Tensor | float | None


@dataclass(eq=False)
class StandIn(JoinHook):
    """The hook of one optimizer in one `Join`.

    Args:
        groups: the parameter groups of the optimizer.
        step: takes a step of the optimizer.
        close: called when all processes have joined.
    """

    net: CompiledModule
    replicas: Replicas
    groups: Sequence[Group]
    step: Callable[[], Any]
    close: Callable[[], None]
    call: ForwardArguments | None = None  # with an empty batch
    standing_in: bool = False

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a forward, without its cases."""
        if self.call is None:
            self.call = self.net.recorder(args, kwargs).without_cases(args, kwargs)

    def main_hook(self) -> None:
        """A step of a process without cases. Raises ValueError if this process never had a batch."""
        if self.call is None:
            raise ValueError(
                f"process {self.replicas.rank} of {self.replicas.number} had no batch inside of Join, so KFAC does not "
                "know the inputs of the net and cannot take the steps of the others: give every process one batch, "
                "which may be empty, x[:0]"
            )
        args, kwargs = self.call
        with torch.enable_grad():
            outputs = self.net(*args, **kwargs)
            tensors = [leaf for leaf in results.tree_leaves(outputs) if isinstance(leaf, Tensor)]
            torch.stack([tensor.sum() for tensor in tensors if tensor.requires_grad]).sum().backward()
        self.standing_in = True
        try:
            self.step()
        finally:
            self.standing_in = False

    def post_hook(self, is_last_joiner: bool) -> None:
        self.close()

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.groups for parameter in group["params"]]

    def share(self, loss: LossOfStep) -> LossOfStep:
        """Before a step: a process that stands in gets gradients, and the numbers of the groups. Returns its loss.

        loss: of the batch of this process, if known. It is zero without cases, if the others know theirs.
        """
        mine = torch.zeros(self.replicas.number + 1, dtype=torch.float64, device=self.parameters()[0].device)
        if not self.standing_in:
            mine[self.replicas.rank] = 1
            mine[-1] = float(loss is not None)
        (both,) = self.replicas.total([mine])
        *with_batches, with_loss = both.tolist()
        if all(with_batches):
            return loss
        source = with_batches.index(1)
        self.receive(source)
        return 0.0 if self.standing_in and with_loss else loss

    def receive(self, source: int) -> None:
        """Take the gradients and the numbers of the groups of a process; those that have batches have the same."""
        parameters, numbers = self.parameters(), [(group, key) for group in self.groups for key in OF_GROUPS]
        numbers = [(group, key) for group, key in numbers if key in group]
        values = [float(parameter.grad is not None) for parameter in parameters]
        values += [float(group[key]) for group, key in numbers]
        sent = torch.tensor(values, dtype=torch.float64, device=parameters[0].device)
        gradients = dense_or_zero((parameter.grad for parameter in parameters), parameters)
        *gradients, sent = self.replicas.broadcast([*map(real_numbers, gradients), sent], source)
        if not self.standing_in:
            return
        values = sent.tolist()
        for parameter, gradient, has in zip(parameters, gradients, values, strict=False):
            parameter.grad = complex_numbers(gradient, parameter) if has else None
        for (group, key), value in zip(numbers, values[len(parameters) :], strict=True):
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def refuse_in_join(options: KFACOptions, sharded: bool) -> None:
    """Raises ValueError for an optimizer whose steps a process without batches cannot take."""
    scaler = options.grad_scaler
    why = {
        "sharded parameters, which every process gathers in its own forwards": sharded,
        "adapt_damping=True, which asks the process for the loss of its batch": options.rule.damping_rule is not None,
        "a GradScaler, whose scale that process does not learn": scaler is not None and scaler.is_enabled(),
    }
    if wrong := [words for words, applies in why.items() if applies]:
        raise ValueError(
            "inside of Join, a process that has no more batches takes the steps of the others, and cannot with\n"
            + "\n".join(f"  {words}" for words in wrong)
            + "\nLeave Join out: a process that has no more cases calls the net with an empty batch, x[:0]."
        )


def refuse_other_join() -> None:
    raise ValueError(
        "inside of join(), processes without batches take part in the messages of DistributedDataParallel and not in "
        "those of KFAC, which would wait for them. Write Join([wrapped, optimizer]) in its place, with Join of "
        "torch.distributed.algorithms.join; or leave it out, and a process that has no more cases calls the net with "
        "an empty batch, x[:0], and takes all steps with the others."
    )


def refuse_first(notified: object) -> None:
    """Raises ValueError for an optimizer that is the first in `Join`. notified: of `Join.notify_join_context`."""
    if notified is not None:
        raise ValueError(
            "Join runs the messages of its parts in their order, and those of KFAC come behind those of "
            "DistributedDataParallel: write Join([wrapped, optimizer])"
        )


def refuse_micro_batches(forwards: int) -> None:
    """Raises ValueError for a step inside of Join that has other than one forward."""
    if forwards != 1:
        raise ValueError(
            f"inside of Join, a step has one forward, which processes without batches take part in, and this one has "
            f"{forwards}: call optimizer.step() behind every forward and backward, or leave Join out"
        )
