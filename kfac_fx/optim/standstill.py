"""Whether steps change anything: a warning, once, of steps that cannot be made, and of parameters that stand still.

Steps are looked at after 1, 2, 5, 10, 20, 50 and 100 steps, and then after every hundredth. Each look compares a few
numbers of every parameter with those at the look before. The host reads it some steps later, so that it hardly waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import HostCopy
from kfac_fx.linalg.processes import shard
from kfac_fx.optim.checks import STEPS_TO_READ, StalledWarning
from kfac_fx.optim.schedule import is_early
from kfac_fx.passes.errors import plural
from kfac_fx.passes.users_code import warn_user

EVERY = 100  # steps from look to look
SAMPLED = 64  # numbers of every parameter
LEAST_STEPS = 3  # in which parameters stand still, for a warning
LOSS, GRADIENT = "the loss is not finite", "the gradient is not finite"
UPDATE = "the update is not finite, or so long that its square is not"
NO_CASES = "no statistics came of the batch, as of one without cases"
UNKNOWN = "the gradient or the loss was not finite, or a batch had no cases"  # between two looks
FROM_DATA = (
    "Look for NaN and infinity in the inputs, the targets and the parameters, and for squares that overflow. If the "
    "first steps were made, they were too long: write a smaller lr or a larger damping, and begin anew. In float16, "
    "use autocast with a GradScaler, or bfloat16"
)
REMEDIES = {
    UPDATE: "Write a smaller lr or weight_decay, or a larger damping",
    NO_CASES: "Leave out batches without cases, or with ignored targets alone",
}


@dataclass(frozen=True)
class Look:
    """The numbers of a look, on the device: 0-dim tensors that become one message to the host.

    Attributes:
        failed: the number of steps that could not be made, so far.
        undone: that of steps which a check undid.
        moved: whether a parameter has changed since the last look.
        pushed: whether a gradient is other than zero.
        rate: whether an lr is.
        finite: for each cause of a failure, whether it is none in this step.
    """

    failed: Tensor
    undone: Tensor
    moved: Tensor
    pushed: Tensor
    rate: Tensor
    finite: Mapping[str, Tensor]

    def stacked(self) -> Tensor:
        numbers = self.failed, self.undone, self.moved, self.pushed, self.rate, *self.finite.values()
        return torch.stack([number.to(torch.int64) for number in numbers])


@dataclass
class StandstillWatch:
    """The looks at an optimizer, and what they have told.

    Attributes:
        tried: the number of steps with a gradient.
        failed, undone: the numbers of the last look that was read.
        sample: numbers of the parameters at the last look.
        last: the step of the last look.
        unread: looks by the steps before and after, with the causes that they tell apart.
        told: the kinds of warnings that were given.
    """

    tried: int = 0
    failed: int = 0
    undone: int = 0
    sample: list[Tensor] = field(default_factory=list)
    last: int = 0
    unread: list[tuple[int, int, list[str], HostCopy]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    def due(self) -> bool:
        """Count a step. Whether it is looked at."""
        self.tried += 1
        while self.unread and self.tried - self.unread[0][1] >= STEPS_TO_READ:
            self.read(*self.unread.pop(0))
        return len(self.told) < 2 and (is_early(self.tried, EVERY) or self.tried % EVERY == 0)

    def compare(self, parameters: Iterable[Tensor], like: Tensor) -> Tensor:
        """Whether a parameter has changed since the last look, 0-dim. like: a tensor on the device of the answer."""
        new = sampled(parameters)
        old, self.sample = self.sample, new
        if [tensor.shape for tensor in old] != [tensor.shape for tensor in new] or not new:
            return like.new_ones((), dtype=torch.bool)  # the first look, or other parameters
        return torch.stack([(a != b).any().to(like.device) for a, b in zip(old, new, strict=True)]).any()

    def look(self, look: Look) -> None:
        copy = HostCopy(look.stacked())
        of_look = self.last, self.tried, list(look.finite), copy
        self.last = self.tried
        self.read(*of_look) if copy.event is None else self.unread.append(of_look)

    def read(self, before: int, step: int, causes: Sequence[str], copy: HostCopy) -> None:
        failed, undone, moved, pushed, rate, *finite = copy.wait().tolist()
        new, self.failed = failed - self.failed, failed
        withdrawn, self.undone = undone - self.undone, undone
        if new > 0:
            because = next((cause for cause, fine in zip(causes, finite, strict=True) if not fine), None)
            self.tell_failed(new, before, step, because)
        elif not (moved or withdrawn) and rate and step - before >= LEAST_STEPS:
            self.tell_still(before, step, bool(pushed))

    def forget(self, failed: int) -> None:
        """Begin anew, with a state that was loaded. failed: the number of failed steps in it."""
        self.failed, self.undone, self.sample, self.last = failed, 0, [], self.tried
        self.unread.clear()

    def tell_failed(self, number: int, before: int, step: int, because: str | None) -> None:
        text = f"{because or UNKNOWN}. {REMEDIES.get(because or UNKNOWN, FROM_DATA)}"
        steps = f"step {step}" if step - before == 1 else f"{plural(number, 'step')} of steps {before + 1} to {step}"
        self.tell("failed", f"{steps} changed nothing, because {text}. optimizer.skipped counts such steps.")

    def tell_still(self, before: int, step: int, pushed: bool) -> None:
        if pushed:
            text = (
                "though gradients and lr are not zero: the updates are smaller than the rounding of the parameters. "
                "Usual causes are an lr or a factor of the loss that is far too small, a damping that is far too "
                "large, and parameters in float16 or bfloat16, which autocast keeps in float32."
            )
        else:
            text = (
                "because all gradients are zero. If the loss is not at its minimum, they underflow, or no unit is "
                "active: compare parameter.grad with zero after backward, and in float16 use autocast with a "
                "GradScaler, or bfloat16."
            )
        self.tell("still", f"no parameter has changed from step {before + 1} to step {step}, {text}")

    def tell(self, kind: str, text: str) -> None:
        if kind not in self.told:
            self.told.add(kind)
            warn_user(StalledWarning(text))


def sampled(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Copies of a few numbers of every parameter, of those that this process has."""
    flat = (shard(parameter.detach()).reshape(-1) for parameter in parameters)
    return [tensor[:: max(1, tensor.numel() // SAMPLED)].clone() for tensor in flat]
