"""The batch that the next fold takes into the factors: sums of micro-batches, added up over processes.

Statistics are sums over cases, so those of the whole batch are the sums over micro-batches and processes, and only
these are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kfac_fx.fisher.group_kinds import DividedGroup
from kfac_fx.fisher.stacks import BlockGroup
from kfac_fx.linalg.matrices import are_finite, pack_symmetric, unpack_symmetric
from kfac_fx.linalg.replicas import Replicas
from kfac_fx.linalg.sharded import scattered
from kfac_fx.passes.approximations import Approximation
from kfac_fx.recording.statistics.moments import Key


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
