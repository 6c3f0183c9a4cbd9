"""Training by several processes, each with a copy of the model and a part of every batch.

As in DistributedDataParallel, the gradient is the mean over processes, and so must be everything else that a step is
computed from. Statistics are sums over cases (`kfac_fx.factors.factor.additive`), so those of the whole batch are the
sums over processes, and only these are sent: a `PendingBatch` adds them up over micro-batches and processes before they
enter the factors. From equal factors every process computes equal inverses and takes the same step.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_fx.factors.group_kinds import DividedGroup
from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.linalg.matrices import are_finite, pack_symmetric, unpack_symmetric
from kfac_fx.linalg.sharded import scattered
from kfac_fx.passes.approximations import Approximation
from kfac_fx.passes.errors import fatal, first_line, table
from kfac_fx.statistics.moments import Key

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


# --- messages ---------------------------------------------------------------------------------------------------------


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


@dataclass
class PendingBatch:
    """The batch that the next fold takes.

    Attributes:
        sums: the sums of every recorded registration, by name.
        gradients: the gradients of parameters, if they are asked for.
        cases: the number of cases.
        lost: among these, the cases of micro-batches that were not finite and left out.
        paused: the registrations that were frozen in a micro-batch.
    """

    sums: dict[Key, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    cases: int | Tensor = 0
    lost: int | Tensor = 0
    paused: set[Key] = field(default_factory=set)

    def copy(self) -> PendingBatch:
        """As it is now, whatever is added to this one later."""
        return replace(self, sums=dict(self.sums), gradients=dict(self.gradients), paused=set(self.paused))

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget the sums of all registrations but these."""
        kept = set(keys)
        self.sums = {key: sums for key, sums in self.sums.items() if key in kept}

    def add(
        self,
        recorded: Mapping[Key, dict[str, Tensor]],
        gradients: Mapping[str, Tensor],
        cases: int | Tensor,
        paused: Iterable[Key],
        guarded: bool,
        device: torch.device,
    ) -> Tensor | None:
        """Add a micro-batch.

        Args:
            guarded: leave it out if it is not finite.
            device: of the answer.

        Returns:
            Whether a guarded micro-batch is finite, 0-dim on the device; None for one that is not guarded.
        """
        self.paused |= set(paused)
        self.cases = self.cases + cases
        finite = None
        if guarded and recorded:
            each = [value for sums in (*recorded.values(), gradients) for value in sums.values()]
            finite = torch.cat([are_finite(value.unsqueeze(0)).to(device) for value in each]).all()
            recorded = {key: only_where(finite, sums) for key, sums in recorded.items()}
            gradients = only_where(finite, gradients)
            self.lost = self.lost + torch.where(finite, 0, cases)
        for key, sums in recorded.items():
            before = self.sums.get(key)
            self.sums[key] = sums if before is None else {name: before[name] + sums[name] for name in sums}
        for name, gradient in gradients.items():
            self.gradients[name] = gradient + self.gradients.get(name, 0)
        return finite

    def total(
        self, replicas: Replicas | None, groups: Mapping[Key, BlockGroup], damping: Tensor, *, divided: bool
    ) -> int | Tensor:
        """Add all sums up over the processes, or over those of each owner at the owner. Returns the number of cases.

        Args:
            groups: the group of blocks of every registration that has sums.
            damping: its device and at least its precision are those of the number of cases.
            divided: whether blocks have owners.
        """
        if replicas is None or replicas.number == 1:
            return self.cases - self.lost
        totals = replicas.total(list(self.gradients.values()))
        self.gradients = dict(zip(self.gradients, totals, strict=True))
        messages = {key: packed_sums(group.structure, self.sums[key]) for key, group in groups.items()}
        dtypes = [tensor.dtype for sums in messages.values() for tensor in sums.values()]
        precise = functools.reduce(torch.promote_types, dtypes[:1], damping.dtype)
        cases = torch.as_tensor(self.cases - self.lost, dtype=precise, device=damping.device)
        members = [key for key, group in groups.items() if group.here]
        if not divided:
            cases, *totals = replicas.total([cases, *(t for key in members for t in messages[key].values())])
        else:
            by_owner: list[list[Tensor]] = [[] for _ in range(replicas.number)]
            for key, group in groups.items():
                if group.owner is not None:
                    by_owner[group.owner] += messages[key].values()
            parts = {key: group for key, group in groups.items() if isinstance(group, DividedGroup)}
            members = [key for key in members if key not in parts]
            totals = replicas.reduce([[cases, *tensors] if tensors else [] for tensors in by_owner])
            here = cases
            cases, totals = (totals[0], totals[1:]) if totals else (cases, [])
            if parts:
                with replicas.exchanging("statistics"):
                    cases = self.scatter(parts, here)
        total = iter(totals)
        for key in members:
            sums = {name: next(total) for name in messages[key]}
            self.sums[key] = unpacked_sums(groups[key].structure, sums)
        return cases

    def scatter(self, groups: Mapping[Key, DividedGroup], cases: Tensor) -> Tensor:
        """Add the sums of divided blocks up, each entry in the process that keeps it, in one message. Returns the
        number of cases."""
        layouts = [group.layout for group in groups.values()]
        wholes = [self.sums[key]["square"].view(group.whole_shape) for key, group in groups.items()]
        layouts.append(replace(layouts[0], shape=torch.Size([layouts[0].ranks]), dim=0))
        *parts, total = scattered([*wholes, cases.expand(layouts[0].ranks)], layouts)
        for key, part in zip(groups, parts, strict=True):
            self.sums[key] = {"square": part}
        return total.squeeze(0)


def only_where(accepted: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, or zeros if `accepted`, 0-dim, is false."""
    return {name: torch.where(accepted.to(tensor.device), tensor, 0) for name, tensor in tensors.items()}


def packed_sums(approximation: Approximation, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of `additive` as messages carry them: of symmetric matrices the elements on and above the diagonal."""
    symmetric = symmetric_statistics(approximation)
    return {name: pack_symmetric(tensor) if name in symmetric else tensor for name, tensor in sums.items()}


def unpacked_sums(approximation: Approximation, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `packed_sums`."""
    symmetric = symmetric_statistics(approximation)
    return {name: unpack_symmetric(tensor) if name in symmetric else tensor for name, tensor in sums.items()}


def symmetric_statistics(approximation: Approximation) -> set[str]:
    sides = (side for side in (approximation.left, approximation.right) if side is not None)
    return {side.statistic for side in sides if not side.diagonal}
