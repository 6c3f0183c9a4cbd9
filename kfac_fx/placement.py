"""The process that keeps a Fisher block: its factors, its inverses, and K-FAC's momentum of its parameters.

With `KFAC(..., placement="owners")` or "round_robin" every block has one owner among the processes of a training. The
sums of all processes over a batch are added up at the owner alone, who decomposes the factors, multiplies with the
inverses and keeps the momentum; one message brings the moves of all owners to all processes. Memory and decompositions
are divided by the number of processes. "replicated" keeps everything in all processes, which saves this message.

Every process computes the placement by itself, without a message, so equal costs in equal order must give equal owners
everywhere.

A step waits for the process with the most work. The work of a process is the sum of the costs of its blocks, and the
largest such sum is the makespan of a placement. To find the placement with the smallest makespan is NP-hard; longest
processing time first comes within 4/3 - 1 / (3 ranks) of it (Graham 1969, theorem 2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kfac_fx.distributed import Replicas
from kfac_fx.factors.stacks import BlockGroup
from kfac_fx.linalg.sharded import Shards
from kfac_fx.linalg.vectors import connected

# --- placements of costs ----------------------------------------------------------------------------------------------


def longest_processing_time(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The owner of every block: the largest cost first, each to the process that has the least work so far.

    Blocks of equal cost are placed in their order. Among processes with equal work the first takes the block.

    costs: of every block, none negative. Raises ValueError for others, and if `ranks` is not positive.
    """
    check_costs(costs, ranks)
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for block in sorted(range(len(costs)), key=lambda block: -costs[block]):
        load, rank = loads[0]
        owners[block] = rank
        heapq.heapreplace(loads, (load + costs[block], rank))
    return tuple(owners)


def round_robin(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The owner of every block: block n goes to process n mod `ranks`, as in TensorFlow's RoundRobinPlacementMixin.

    Raises ValueError as `longest_processing_time` does.
    """
    check_costs(costs, ranks)
    return tuple(block % ranks for block in range(len(costs)))


def loads_of(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    """The sum of the costs of the blocks of every process."""
    loads = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def makespan(costs: Sequence[float], owners: Sequence[int], ranks: int) -> float:
    """The work of the process that has the most."""
    return max(loads_of(costs, owners, ranks))


def check_costs(costs: Sequence[float], ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"blocks need a process to own them, and `ranks` is {ranks}; give the number of processes")
    if negative := [f"block {n}: {cost}" for n, cost in enumerate(costs) if not cost >= 0]:
        raise ValueError(f"a cost is at least 0, but these are not: {', '.join(negative)}")


# --- owners of blocks -------------------------------------------------------------------------------------------------


Strategy = Callable[[Sequence[float], int], tuple[int, ...]]
STRATEGIES: Mapping[str, Strategy] = {"owners": longest_processing_time, "round_robin": round_robin}


@dataclass(frozen=True)
class BlockOwners:
    """The owners of the blocks of one optimizer.

    Args:
        strategy: a key of `STRATEGIES`.
        vectors: the number of vectors of the size of the parameters that the owners keep, too: K-FAC's momentum.
        shards: the parameters of a sharded model. Its processes divide some blocks, which have no owner then
            (`kfac_fx.factors.group_kinds`).
    """

    replicas: Replicas
    strategy: str
    vectors: int = 0
    shards: Shards | None = None

    @property
    def rank(self) -> int:
        return self.replicas.rank

    def assign(self, blocks: Sequence[BlockGroup], owners: Mapping[str, int]) -> list[int]:
        """The owner of every block.

        Blocks with a parameter in common have one owner, because the momentum of a parameter has one place. Processing
        times are the operations of the decompositions. Where this leaves a process with more than its part of all
        elements and a largest block, the numbers of elements take their place; then none has more (Graham 1969).

        Args:
            blocks: groups of one block each.
            owners: of parameters by name, where they have one already.
        """
        number, result = self.replicas.number, [0] * len(blocks)
        new: list[list[int]] = []
        for members in connected([named_in(block) for block in blocks]):
            known = [owners[name] for n in members for name in named_in(blocks[n]) if name in owners]
            for n in members if known else ():
                result[n] = known[0]
            new += [] if known else [members]
        elements = [sum(self.elements(blocks[n]) for n in members) for members in new]
        costs = [sum(blocks[n].cost + self.elements(blocks[n]) for n in members) for members in new]
        placed = STRATEGIES[self.strategy](costs, number)
        if self.strategy == "owners" and makespan(elements, placed, number) > most(elements, number):
            placed = longest_processing_time(elements, number)
        for members, owner in zip(new, placed, strict=True):
            for n in members:
                result[n] = owner
        return result

    def elements(self, block: BlockGroup) -> int:
        """The elements of a group of one block: its factors, inverses and vectors."""
        return block.elements + self.vectors * math.prod(block.shape)

    def gather(self, tensors: Sequence[Tensor], like: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """See `Replicas.gather`."""
        return tensors if self.replicas.number == 1 else self.replicas.gather(tensors, like)


def most(elements: Sequence[float], ranks: int) -> float:
    """The most elements that a process should have."""
    return sum(elements) / ranks + max(elements, default=0)


def named_in(block: BlockGroup) -> tuple[str, ...]:
    """The parameters of a group of one block."""
    return block.registrations[0].owners
