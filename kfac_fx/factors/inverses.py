"""Decompositions of all factors: one batch for every size of matrix, over all blocks and sides.

A failed decomposition is repeated with more damping and then in float64. If a block still fails, it keeps its last
valid inverse. The host would have to wait for the device to learn of a failure. Except on a CPU, it therefore waits
only at the first update, when there is no earlier inverse. Later it learns of a failure at the next update and repeats
the decomposition then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from kfac_fx.factors.stacks import BlockGroup, Roots
from kfac_fx.linalg.matrices import HostCopy, Root, dense_roots, full_precision, rescued_roots, unsqueeze_like
from kfac_fx.passes.approximations import Side


class FailureWatch:
    """The failed matrices of a batch; deferred: known one call late, except at the first call, without waiting."""

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self.failed: HostCopy | None = None  # of the last call

    def known_failures(self, valid: Tensor) -> Tensor:
        """The indices of the matrices to decompose again now. valid: [m], of the present attempt."""
        if not self.deferred:
            return (~valid).nonzero().squeeze(-1)
        last, self.failed = self.failed, HostCopy(~valid)
        if last is None:
            return self.failed.wait().nonzero().squeeze(-1)
        return (last.value if last.arrived else torch.zeros_like(last.value)).nonzero().squeeze(-1)


class Inverter:
    """Updates the roots of the damped factors of all groups. deferred: see `FailureWatch`; None: except on a CPU."""

    def __init__(self, groups: Sequence[BlockGroup], roots: Sequence[Root], deferred: bool | None = None) -> None:
        self.groups, self.roots = groups, roots
        self.batches: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[int, Side]]] = defaultdict(list)
        for g, group in enumerate(groups):
            for side in group.decomposed:
                self.batches[group.size(side), group.dtype, group.device].append((g, side))
        self.watches = {
            key: FailureWatch(key[2].type != "cpu" if deferred is None else deferred) for key in self.batches
        }

    @torch.no_grad()
    def update(self) -> None:
        if not self.roots:
            return
        with full_precision():
            dampings = [group.split_damping() for group in self.groups]
            decomposed: list[dict[Side, Roots]] = [{} for _ in self.groups]
            for key, members in self.batches.items():
                stacks = [self.groups[g].value(side) for g, side in members]
                matrices = torch.cat([stack.flatten(0, 1) for stack in stacks])
                roots, valid = self.decompose(
                    matrices, torch.cat([dampings[g][side].flatten() for g, side in members]), self.watches[key]
                )
                sizes = [stack.shape[0] * stack.shape[1] for stack in stacks]
                for part, (g, side) in enumerate(members):
                    of_side = {root: torch.split(matrices, sizes)[part] for root, matrices in roots.items()}
                    decomposed[g][side] = of_side, torch.split(valid, sizes)[part]
            for group, sides, damping in zip(self.groups, decomposed, dampings, strict=True):
                group.store(sides, damping)

    def decompose(self, matrices: Tensor, damping: Tensor, watch: FailureWatch) -> tuple[dict[Root, Tensor], Tensor]:
        """From matrices [m, d, d] and damping [m]: the roots [m, d, d], and which of them are valid [m]."""
        roots, valid = dense_roots(matrices, damping, self.roots)
        again = watch.known_failures(valid)
        if len(again):
            again = again.to(valid.device)
            rescued, rescued_valid = rescued_roots(matrices[again], damping[again], self.roots)
            use = rescued_valid & ~valid[again]
            for root, better in rescued.items():
                roots[root][again] = torch.where(unsqueeze_like(use, better), better, roots[root][again])
            valid[again] |= rescued_valid
        return roots, valid
