"""Replicas: several processes, each with a copy of the model and a part of every batch, and the messages between them.

As in DistributedDataParallel, the gradient is the mean over processes, and so must be everything else that a step is
computed from. Statistics are sums over cases, so those of the whole batch are the sums over processes. From equal sums
every process computes equal factors and inverses, and takes the same step.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_fx.passes.errors import fatal, first_line, table

NORM_TOLERANCE = 1e-3  # relative difference of the norms of one gradient, as the processes compute it


class Replicas:
    """The processes of `group` of torch.distributed; None: those of the default group, once it is initialized."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    @property
    def number(self) -> int:
        """The number of processes; 1 if torch.distributed is not initialized."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return dist.get_rank(self.group) if self.number > 1 else 0

    def stream(self, common: torch.Generator, *place: int) -> torch.Generator:
        """The random stream of this process at a place of the training, such as the number of the step.

        With one process it is `common`, wherever that stands. Several have streams of their own, which depend on the
        seed of `common`, the place and the process alone: `common` stays the same in all of them, so one copy of it in
        a checkpoint restores the streams of any number of processes.
        """
        if self.number == 1:
            return common
        digest = hashlib.blake2b(repr((common.initial_seed(), *place, self.rank)).encode(), digest_size=8).digest()
        return torch.Generator(common.device).manual_seed(int.from_bytes(digest) >> 1)

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
        totals: dict[int, Tensor] = {}
        for members in fitting_together(tensors):
            message = message_of(tensors, members)
            with self.exchanging("sums"):
                dist.all_reduce(message, group=self.group)
            totals |= zip(members, parts(message, [tensors[n] for n in members]), strict=True)
        return [totals[n] for n in range(len(tensors))]

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> list[Tensor]:
        """The tensors of one process, in one message for every dtype and device. All pass tensors of its shapes."""
        received: dict[int, Tensor] = {}
        for members in fitting_together(tensors):
            message = message_of(tensors, members)
            with self.exchanging("gradients"):
                dist.broadcast(message, group=self.group, group_src=source)
            received |= zip(members, parts(message, [tensors[n] for n in members]), strict=True)
        return [received[n] for n in range(len(tensors))]

    def reduce(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Sums over processes, each in one process only: those of tensors[n] in process n, and here of one's own.

        One message for every process, dtype and device. Every process passes tensors of the same shapes.
        """
        totals: dict[int, Tensor] = {}
        waiting: list[Any] = []
        for process, of_process in enumerate(tensors):
            for members in fitting_together(of_process):
                message = message_of(of_process, members)
                with self.exchanging("statistics"):
                    waiting.append(dist.reduce(message, group=self.group, group_dst=process, async_op=True))
                if process == self.rank:
                    totals |= zip(members, parts(message, [of_process[n] for n in members]), strict=True)
        with self.exchanging("statistics"):
            for work in waiting:
                work.wait()
        return [totals[n] for n in range(len(totals))]

    def gather(self, tensors: Sequence[Tensor], like: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The tensors of all processes in all processes, in one message, behind each other in the order of `like`.

        tensors: of this process. like[n]: tensors of the shapes and dtypes of those of process n.
        """
        everything = [tensor for of_process in like for tensor in of_process]
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in everything))
        sizes = [sum(tensor.numel() for tensor in of_process) for of_process in like]
        sizes += [0] * (self.number - len(sizes))
        message = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors]) if tensors else None
        device = everything[0].device
        # An all-gather sends shares of equal length, and an all-reduce sends every element twice.
        if self.number * max(sizes) <= 2 * sum(sizes):
            share = torch.zeros(max(sizes), dtype=dtype, device=device)
            if message is not None:
                share[: len(message)] = message
            shares = [torch.empty_like(share) for _ in sizes]
            with self.exchanging("products"):
                dist.all_gather(shares, share, group=self.group)
            whole = torch.cat([filled[:size] for filled, size in zip(shares, sizes, strict=True)])
        else:
            whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
            if message is not None:
                start = sum(sizes[: self.rank])
                whole[start : start + len(message)] = message
            with self.exchanging("products"):
                dist.all_reduce(whole, group=self.group)
        return [part.to(tensor.dtype) for part, tensor in zip(parts(whole, everything), everything, strict=True)]

    def exchanging(self, what: str) -> AbstractContextManager[None]:
        """Around a message; torch's error is raised again with the part of the step that it ended."""
        return nullcontext() if torch.compiler.is_compiling() else self.explained(what)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if fatal(error):
                raise
            raise RuntimeError(
                f"process {self.rank} of {self.number} could not exchange {what} with the others: {first_line(error)}\n"
                "Another process has ended or raised an error, was slower than the timeout of the process group, or "
                "left a step out: see the first error of all processes. All of them take every step; one without cases "
                "calls the net with an empty batch. Start all processes again, from the last checkpoint."
            ) from error

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raises ValueError if the processes have different options, with all of them. options: by name, as text."""
        if self.number == 1:
            return
        everywhere: list[dict[str, str]] = [{} for _ in range(self.number)]
        with self.exchanging("options"):
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
        with self.exchanging("the norms of gradients"):
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        most, least = ends[0].item(), -ends[1].item()
        if most - least > NORM_TOLERANCE * most:
            raise RuntimeError(
                f"the gradients of {self.number} processes differ: their norms are {least:.4g} to {most:.4g}. Average "
                "the gradients, as torch.nn.parallel.DistributedDataParallel(net) does, or train the processes "
                "independently with KFAC(..., process_group=g), where g = torch.distributed.new_group([rank], "
                "use_local_synchronization=True)."
            )


def fitting_together(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors that fit into one message, by dtype and device."""
    members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for n, tensor in enumerate(tensors):
        members.setdefault((tensor.dtype, tensor.device), []).append(n)
    return list(members.values())


def message_of(tensors: Sequence[Tensor], members: Sequence[int]) -> Tensor:
    return torch.cat([tensors[n].detach().reshape(-1) for n in members])


def parts(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a message that was made of tensors of these shapes."""
    split = message.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(split, like, strict=True)]
