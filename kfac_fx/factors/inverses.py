"""Decompositions of all factors: one batch for every size of matrix, of whichever blocks and sides.

A failed decomposition is tried again with more damping and then in float64; a block that still fails keeps its last
good inverse. To know of a failure the host would have to wait for the device, so beside the CPU it waits only the first
time, when there is no last good inverse; after that it learns of it at the next update, and tries again then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.factors.stacks import BlockGroup, Roots
from kfac_fx.linalg.matrices import Root, dense_roots, full_precision, rescued_roots, unsqueeze_like
from kfac_fx.passes.approximations import Side


class Watch:
    """Which matrices of a batch came out wrong, as far as the host can know without waiting for the device.

    deferred: learn of failures one call late, except at the first call.
    """

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self.wrong: Tensor | None = None  # of the last call, on the host once `copied` has happened
        self.copied: Any = None  # an event of the device

    def known_failures(self, right: Tensor) -> Tensor:
        """Indices to try again now, on the host. right: [m], of the present attempt."""
        if not self.deferred:
            return (~right).nonzero().squeeze(-1)
        if self.wrong is None:
            self.wrong = torch.empty(right.shape, dtype=torch.bool, pin_memory=right.device.type != "cpu")
            known = (~right).nonzero().cpu()
        else:
            arrived = self.copied is None or self.copied.query()
            known = self.wrong.nonzero() if arrived else self.wrong.new_zeros(0, 1, dtype=torch.int64)
        self.wrong.copy_(~right, non_blocking=True)
        if right.device.type != "cpu":
            self.copied = torch.accelerator.current_stream(right.device).record_event()
        return known.squeeze(-1)


class Inverter:
    """Keeps the roots of the damped factors of all groups. deferred: see `Watch`; None: but on a CPU."""

    def __init__(self, groups: Sequence[BlockGroup], roots: Sequence[Root], deferred: bool | None = None) -> None:
        self.groups, self.roots = groups, roots
        self.batches: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[int, Side]]] = defaultdict(list)
        for g, group in enumerate(groups):
            for side in group.decomposed:
                self.batches[group.size(side), group.dtype, group.device].append((g, side))
        self.watches = {key: Watch(key[2].type != "cpu" if deferred is None else deferred) for key in self.batches}

    @torch.no_grad()
    def update(self) -> None:
        if not self.roots:
            return
        with full_precision():
            dampings = [group.split_damping() for group in self.groups]
            found: list[dict[Side, Roots]] = [{} for _ in self.groups]
            for key, members in self.batches.items():
                stacks = [self.groups[g].value(side) for g, side in members]
                matrices = torch.cat([stack.flatten(0, 1) for stack in stacks])
                roots, right = self.decompose(
                    matrices, torch.cat([dampings[g][side].flatten() for g, side in members]), self.watches[key]
                )
                sizes = [stack.shape[0] * stack.shape[1] for stack in stacks]
                for part, (g, side) in enumerate(members):
                    mine = {root: torch.split(found_all, sizes)[part] for root, found_all in roots.items()}
                    found[g][side] = mine, torch.split(right, sizes)[part]
            for group, one, damping in zip(self.groups, found, dampings, strict=True):
                group.store(one, damping)

    def decompose(self, matrices: Tensor, damping: Tensor, watch: Watch) -> tuple[dict[Root, Tensor], Tensor]:
        """[m, d, d] and [m] -> the roots by name [m, d, d] and which are right [m]."""
        roots, right = dense_roots(matrices, damping, self.roots)
        again = watch.known_failures(right)
        if len(again):
            again = again.to(right.device)
            rescued, fine = rescued_roots(matrices[again], damping[again], self.roots)
            use = fine & ~right[again]
            for root, better in rescued.items():
                roots[root][again] = torch.where(unsqueeze_like(use, better), better, roots[root][again])
            right[again] |= fine
        return roots, right
