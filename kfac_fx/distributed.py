"""Training by several processes, each with a copy of the model and a part of every batch, as DistributedDataParallel
has it: the gradient is the mean over processes, and so must be all else that a step is computed from.

Statistics are sums over cases (`factors.additive`), so those of the whole batch are the sums over processes; from equal
factors every process computes equal inverses and takes the same step. Nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

AGREEMENT = 1e-3  # relative difference of gradient norms that are one and the same gradient's


class Replicas:
    """The processes of `group`; None: those of torch's default group, once there is one."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    @property
    def number(self) -> int:
        """1 without processes, and in a group that is the process alone."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    def own(self, seed: int | None) -> int:
        """A seed for this process alone; None: from torch's."""
        rank = dist.get_rank(self.group) if self.number > 1 else 0
        return rank + (torch.initial_seed() if seed is None else seed)

    def mean(self, tensor: Tensor) -> Tensor:
        if self.number == 1:
            return tensor
        (total,) = self.total([tensor])
        return total / self.number

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over processes, in one message for every dtype and device."""
        if self.number == 1:
            return list(tensors)
        kinds = dict.fromkeys((one.dtype, one.device) for one in tensors)
        found: dict[int, Tensor] = {}
        for kind in kinds:
            members = [n for n, one in enumerate(tensors) if (one.dtype, one.device) == kind]
            message = torch.cat([tensors[n].detach().reshape(-1) for n in members])
            dist.all_reduce(message, group=self.group)
            parts = message.split([tensors[n].numel() for n in members])
            found |= {n: part.view(tensors[n].shape) for n, part in zip(members, parts, strict=True)}
        return [found[n] for n in range(len(tensors))]

    def check_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Waits for the device. Raises RuntimeError where the processes do not have one gradient."""
        if self.number == 1 or not gradients:
            return
        norm = torch.stack([one.double().norm() for one in gradients]).norm()
        ends = torch.stack([norm, -norm])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        most, least = ends[0].item(), -ends[1].item()
        if most - least > AGREEMENT * most:
            raise RuntimeError(
                f"the gradients of {self.number} processes differ, their norms are {least:.4g} to {most:.4g}: average "
                "them, as torch.nn.parallel.DistributedDataParallel(net) does, or keep the processes apart with "
                "KFAC(..., process_group=g), where g = torch.distributed.new_group([rank], "
                "use_local_synchronization=True)"
            )
