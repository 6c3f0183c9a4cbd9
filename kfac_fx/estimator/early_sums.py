"""Sums of a batch that travel to their owners in the backward that makes them.

The dense sums of large models take more memory than a process has beside its activations. With owners, a process that
does not own a block therefore drops its sums as soon as they are sent. As DistributedDataParallel does with gradients,
messages leave in an order that all processes know, whatever the order of their backwards is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfac_fx.fisher.block import BlockOperator
from kfac_fx.fisher.placement import BlockOwners
from kfac_fx.linalg.matrices import pack_symmetric, unpack_symmetric
from kfac_fx.passes.approximations import named
from kfac_fx.passes.ir import Registration
from kfac_fx.recording.statistics import Key

EARLY = 1 << 30  # bytes of the dense sums of a batch, from which on they travel in the backward
BUCKET = 1 << 28  # bytes of the sums that travel together
Entry = tuple[Key, str]  # a registration, and the name of one of its sums


def dense_sums(registration: Registration) -> list[str]:
    """The names of the symmetric sums of a registration that its backward makes as they are."""
    if registration.generic or any(use.transposed for use in registration.uses):
        return []
    recorded = {statistic.name for statistic in registration.statistics}
    names = [side.statistic.whole.name for side in registration.structure.sides if not side.diagonal]
    return [name for name in names if name in recorded]


@dataclass(eq=False)
class EarlySums:
    """The dense sums of one recording.

    Attributes:
        blocks: those with owners whose sums are recorded, by registration.
        totals: the sums over processes that this process owns.
    """

    blocks: Mapping[Key, BlockOperator]
    owners: BlockOwners
    like: Tensor  # of the device and the dtype of sums that the backward does not make
    waiting: dict[Entry, Tensor] = field(default_factory=dict)
    totals: dict[Key, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buckets: list[list[Entry]] = []
        room = 0
        for key in reversed([*self.blocks]):  # about the order of a backward
            for name in dense_sums(self.blocks[key].registration):
                size = self.shape((key, name)).numel() * self.like.element_size()
                if not self.buckets or size > room:
                    self.buckets.append([])
                    room = BUCKET
                self.buckets[-1].append((key, name))
                room -= size
        self.sent = {entry for bucket in self.buckets for entry in bucket}
        self.unsent = self.buckets[::-1]

    @property
    def bytes(self) -> int:
        return sum(self.shape(entry).numel() for entry in self.sent) * self.like.element_size()

    def shape(self, entry: Entry) -> torch.Size:
        key, name = entry
        matrix, _ = self.blocks[key].registration.rows
        return torch.Size(named(name).shape(matrix, 1))

    def take(self, key: Key, name: str, value: Tensor) -> Tensor | None:
        """Called in a backward with a finished sum. Returns zeros without memory that take its place; None for a sum
        that does not travel early."""
        if (key, name) not in self.sent:
            return None
        self.waiting[key, name] = value
        while self.unsent and all(entry in self.waiting for entry in self.unsent[-1]):
            self.send(self.unsent.pop())
        return value.new_zeros(()).expand(value.shape)

    def finish(self) -> None:
        """Send what is left, and zeros for sums that the backward did not make."""
        while self.unsent:
            self.send(self.unsent.pop())

    @torch.no_grad()
    def send(self, bucket: Iterable[Entry]) -> None:
        by_owner: list[list[Tensor]] = [[] for _ in range(self.owners.replicas.number)]
        mine = []
        for entry in bucket:
            group = self.blocks[entry[0]].group
            assert group.owner is not None, f"bug in kfac_fx: {entry[0]} has no owner"
            value = self.waiting.pop(entry, None)
            value = self.like.new_zeros(self.shape(entry)) if value is None else value
            by_owner[group.owner].append(pack_symmetric(value))
            mine += [entry] * group.here
        for (key, name), total in zip(mine, self.owners.reduce(by_owner), strict=True):
            self.totals.setdefault(key, {})[name] = unpack_symmetric(total)
