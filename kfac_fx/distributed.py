"""Training by several processes, each with a copy of the model and a part of every batch.

As in DistributedDataParallel, the gradient is the mean over processes, and so must be everything else that a step is
computed from. Statistics are sums over cases (`factors.additive`), so those of the whole batch are the sums over
processes, and only these are sent. From equal factors every process computes equal inverses and takes the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_fx.passes.errors import table

NORM_TOLERANCE = 1e-3  # relative difference of the norms of one gradient, as the processes compute it


class Replicas:
    """The processes of `group` of torch.distributed; None: those of the default group, once it is initialized."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    @property
    def number(self) -> int:
        """The number of processes; 1 if torch.distributed is not initialized."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    def own(self, seed: int | None) -> int:
        """A seed of this process, from a common seed; None: from torch's."""
        rank = dist.get_rank(self.group) if self.number > 1 else 0
        return rank + (torch.initial_seed() if seed is None else seed)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over processes."""
        if self.number == 1:
            return tensor
        (total,) = self.total([tensor])
        return total / self.number

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over processes, in one message for every dtype and device."""
        if self.number == 1:
            return list(tensors)
        members_of: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for n, tensor in enumerate(tensors):
            members_of.setdefault((tensor.dtype, tensor.device), []).append(n)
        totals: dict[int, Tensor] = {}
        for members in members_of.values():
            message = torch.cat([tensors[n].detach().reshape(-1) for n in members])
            dist.all_reduce(message, group=self.group)
            parts = message.split([tensors[n].numel() for n in members])
            totals |= {n: part.view(tensors[n].shape) for n, part in zip(members, parts, strict=True)}
        return [totals[n] for n in range(len(tensors))]

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raises ValueError if the processes have different options, with all of them. options: by name, as text."""
        if self.number == 1:
            return
        everywhere: list[dict[str, str]] = [{} for _ in range(self.number)]
        dist.all_gather_object(everywhere, dict(options), group=self.group)
        by_name = {name: [of_process.get(name, "nothing") for of_process in everywhere] for name in options}
        if rows := [
            (name, " and ".join(dict.fromkeys(texts))) for name, texts in by_name.items() if len(set(texts)) > 1
        ]:
            raise ValueError(
                f"{self.number} processes train one model with different options:\n{table(rows)}\n"
                "Give KFAC the same options in all processes. They take the same steps from common factors, so other "
                "options would make their parameters drift apart."
            )

    def check_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Raises RuntimeError if the processes have different gradients. Waits for the device."""
        if self.number == 1 or not gradients:
            return
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
        ends = torch.stack([norm, -norm])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        most, least = ends[0].item(), -ends[1].item()
        if most - least > NORM_TOLERANCE * most:
            raise RuntimeError(
                f"the gradients of {self.number} processes differ: their norms are {least:.4g} to {most:.4g}. Average "
                "the gradients, as torch.nn.parallel.DistributedDataParallel(net) does, or train the processes "
                "independently with KFAC(..., process_group=g), where g = torch.distributed.new_group([rank], "
                "use_local_synchronization=True)."
            )
