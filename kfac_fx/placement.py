"""The process that owns a block: which of `ranks` processes computes the inverse of which of several blocks.

A step waits for the process with the most work. The work of a process is the sum of the costs of its blocks, and the
largest such sum is the makespan of a placement. To find the placement with the smallest makespan is NP-hard; longest
processing time first comes within 4/3 - 1 / (3 ranks) of it (Graham 1969, theorem 2).

Every process computes the placement by itself, so equal costs in equal order must give equal owners everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def decomposition_cost(sides: Iterable[int]) -> int:
    """Σ n³ over the sides n of the dense factors of a block, the operations of their decompositions up to a constant.

    A factor with several groups has one side for each group. Diagonal factors have no side.
    """
    return sum(side**3 for side in sides)


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
