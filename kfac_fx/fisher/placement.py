"""Where a training by several processes keeps its blocks and the parts of its vectors.

**Owners.** With `KFAC(..., placement="owners")` or "round_robin" every block has one owner among the processes of a
training. The sums of all processes over a batch are added up at the owner alone, who decomposes the factors, multiplies
with the inverses and keeps the momentum; one message brings the moves of all owners to all processes. Memory and
decompositions are divided by the number of processes. "replicated" keeps everything in all processes, which saves this
message.

Every process computes the placement by itself, without a message, so equal costs in equal order must give equal owners
everywhere. A step waits for the process with the most work. The work of a process is the sum of the costs of its
blocks, and the largest such sum is the makespan of a placement. To find the placement with the smallest makespan is
NP-hard; longest processing time first comes within 4/3 - 1 / (3 ranks) of it (Graham 1969, theorem 2).

**Divided blocks.** Under FSDP2, every process keeps the entries of its own shards of a block with a diagonal F, which
has no owner then.

**Vectors.** A vector of a process has one part of every parameter: all of it, a shard of FSDP2, or nothing where
another process owns it. Every process does with its parts what a rule does element by element. Inner products are added
up over processes, the blocks multiply whole tensors, and the copies of the parameters are moved everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg.processes import Replicas, ShardLayout, Shards, shard
from kfac_fx.linalg.vectors import Tensors, connected
from kfac_fx.passes.approximations import Side
from kfac_fx.passes.errors import NotRegisteredError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import MatrixForm
from kfac_fx.recording.statistics import Key

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


def within_memory(costs: Sequence[float], elements: Sequence[float], ranks: int) -> tuple[int, ...]:
    """`longest_processing_time` of costs or, if this leaves a process with more than its part of all elements and a
    largest block, that of elements; then none has more (Graham 1969)."""
    owners = longest_processing_time(costs, ranks)
    return (
        owners
        if makespan(elements, owners, ranks) <= most(elements, ranks)
        else longest_processing_time(elements, ranks)
    )


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

Strategy = Callable[[Sequence[float], Sequence[float], int], tuple[int, ...]]  # of costs, elements and processes
STRATEGIES: Mapping[str, Strategy] = {
    "owners": within_memory,
    "round_robin": lambda costs, elements, ranks: round_robin(costs, ranks),
}


@dataclass(frozen=True)
class BlockOwners:
    """The owners of the blocks of one optimizer.

    Args:
        replicas: among which the blocks are divided.
        strategy: a key of `STRATEGIES`.
        vectors: the number of vectors of the size of the parameters that the owners keep, too, such as momentum.
        shards: the parameters of a sharded model. Its processes divide some blocks, which have no owner then
        shards: the parameters of a sharded model. Its processes divide some blocks, which have no owner then
            (`DividedGroup`).
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
        times are the operations of the decompositions, within the memory of `within_memory`.

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
        placed = STRATEGIES[self.strategy](costs, elements, number)
        for members, owner in zip(new, placed, strict=True):
            for n in members:
                result[n] = owner
        return result

    def elements(self, block: BlockGroup) -> int:
        """The elements of a group of one block: its factors, inverses and vectors."""
        return block.elements + self.vectors * math.prod(block.shape)

    def reduce(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Sums over all processes that have parts of a batch, at the owners; see `Replicas.reduce`."""
        return self.repeated(self.replicas.reduce(tensors))

    def repeated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the processes that own the same blocks: with hybrid sharding there are several."""
        for group in () if self.shards is None else self.shards.of_mesh.repeating:
            tensors = Replicas(group).total(tensors)
        return list(tensors)

    def gather(self, tensors: Sequence[Tensor], like: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """See `Replicas.gather`."""
        return tensors if self.replicas.number == 1 else self.replicas.gather(tensors, like)


def most(elements: Sequence[float], ranks: int) -> float:
    """The most elements that a process should have."""
    return sum(elements) / ranks + max(elements, default=0)


def named_in(block: BlockGroup) -> tuple[str, ...]:
    """The parameters of a group of one block."""
    return block.registrations[0].owners


# --- divided blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DividedForm(MatrixForm):
    """The shards of one process as a matrix, a part of the whole one. layout: how that is divided."""

    layout: ShardLayout

    @staticmethod
    def of(registration: Registration, shards: Shards) -> DividedForm | None:
        """None for a block whose F is not diagonal, or whose matrix is not divided as its parameters are."""
        matrix, structure = registration.matrix, registration.structure
        if matrix is None or structure.kronecker or not structure.diagonal:
            return None
        if not shards.layouts.keys() >= set(registration.parameters):  # slices, or parameters that are not trained
            return None
        cuts = {}
        for name, layout in (entry for entry in (matrix.weight, matrix.bias) if entry is not None):
            whole = shards.layouts[name]
            if whole.dim is None:
                return None
            shard = whole.part(torch.empty(whole.shape, device="meta"), dist.get_rank(whole.group))
            cuts[name] = layout.cut(whole.dim, shard.shape[whole.dim])
        parts = {name: (name, cut[0]) for name, cut in cuts.items() if cut is not None}
        if len(parts) < len(cuts) or len(dims := {cut[1] for cut in cuts.values() if cut is not None}) > 1:
            return None
        weight, bias = (None if entry is None else parts[entry[0]] for entry in (matrix.weight, matrix.bias))
        return DividedForm(weight, bias, replace(whole, shape=torch.Size(matrix.shape), dim=dims.pop()))


def divided_forms(registrations: Iterable[Registration], shards: Shards | None) -> dict[Key, DividedForm]:
    """The forms of the blocks that can be divided, by the names of their parameters."""
    forms = {r.parameters: None if shards is None else DividedForm.of(r, shards) for r in registrations}
    return {key: form for key, form in forms.items() if form is not None}


class DividedGroup(BlockGroup):
    """Blocks with a diagonal F of which this process keeps the entries of its shards, possibly none.

    They are divided as FSDP2 divides their parameters. A diagonal F multiplies element by element, so shards of
    gradients need no message to be multiplied; only the sums of a batch are added up over processes. The matrix [g, o,
    i] of such a block must be divided along one dimension, as all its parameters are: the outputs of a linear layer
    with its bias, or the elements of a norm. Whether the numbers of a block are finite, and their mean, is known to all
    processes together.
    """

    divided = True

    @property
    def layout(self) -> ShardLayout:
        """The division of every matrix."""
        form = self.forms[0]
        assert isinstance(form, DividedForm), "bug in kfac_fx: a divided block with the form of a whole one"
        return form.layout

    @property
    def whole_shape(self) -> tuple[int, int, int]:
        g, o, i = self.layout.shape
        return g, o, i

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.layout.group)
        return values

    def agreed(self, flags: Tensor) -> Tensor:
        return self.total((~flags).to(self.dtype)) == 0

    def mean_eigenvalue(self, side: Side) -> Tensor:
        stack = self.factors[side.factor]
        traces = self.total(stack.moment.flatten(1).sum(1, keepdim=True))
        return traces / math.prod(self.whole_shape) / stack.total_weight.unsqueeze(-1)

    def in_state(self, entry: Tensor) -> Tensor:
        return self.layout.dtensor(super().in_state(entry)) if entry.dim() else entry

    def check_whole(self) -> None:
        raise NotRegisteredError(
            f"the diagonal of {self.registrations[0]} is divided as its parameters are, and every process has its own "
            "rows: write KFAC(..., placement='replicated'), which keeps all of them in every process, or a "
            "FisherEstimator."
        )


# --- parts of vectors -------------------------------------------------------------------------------------------------


class VectorDivision:
    """Vectors that every process has as a whole."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over the parts of all processes."""
        return values

    def weight(self, name: str) -> float:
        """The factor of the elements of a parameter in such a sum, in which every element counts once."""
        return 1.0

    def keeps(self, name: str) -> bool:
        """Whether this process has a part of the parameter, and the state of a rule for it."""
        return True

    def multiplies(self, name: str) -> bool:
        """Whether this process keeps the Fisher blocks of the parameter."""
        return True

    def in_blocks(self, name: str, parameter: Tensor) -> torch.Size:
        """The shape of a vector that the blocks of this process multiply."""
        return parameter.shape

    def part(self, name: str, parameter: Tensor) -> Tensor:
        """The part of this process, in the memory of the parameter."""
        return parameter

    def to_blocks(self, parts: Tensors) -> Tensors:
        """From parts by name to the tensors that the blocks of this process multiply, in one message."""
        return parts

    def from_blocks(self, products: Tensors, parts: Tensors) -> Tensors:
        """From the products of the blocks of this process to its parts. parts: others of the same names and shapes."""
        return products

    def to_copies(self, parts: Tensors, copies: Tensors) -> Tensors:
        """From parts to tensors of the shapes of the parameters as this process has them, `copies`, by the same
        names."""
        return parts


UNDIVIDED = VectorDivision()


@dataclass(frozen=True, eq=False)
class DivisionByShards(VectorDivision):
    """owners: the processes that multiply whole tensors, by parameter; None: every process multiplies all. Blocks of
    parameters without an owner are divided as these are."""

    shards: Shards
    owners: Mapping[str, int] | None

    def total(self, values: Tensor) -> Tensor:
        return self.shards.total(values)

    def weight(self, name: str) -> float:
        return self.shards.weight(name)

    def multiplies(self, name: str) -> bool:
        rank = dist.get_rank(self.shards.group)
        return self.owners is None or self.owners.get(name, rank) == rank

    def in_blocks(self, name: str, parameter: Tensor) -> torch.Size:
        return parameter.shape if self.owners is None or name in self.owners else shard(parameter).shape

    def part(self, name: str, parameter: Tensor) -> Tensor:
        return shard(parameter)

    def to_blocks(self, parts: Tensors) -> Tensors:
        if self.owners is None:
            return self.shards.gathered(parts)
        here, owned = self.by_owner(parts)
        return {**here, **(self.shards.to_owners(owned, self.owners) if owned else {})}

    def from_blocks(self, products: Tensors, parts: Tensors) -> Tensors:
        if self.owners is None:
            return self.shards.parts({name: products[name] for name in parts})
        here, owned = self.by_owner(parts)
        back = self.shards.from_owners(products, self.owners, owned) if owned else {}
        return {name: products[name] for name in here} | back

    def by_owner(self, parts: Tensors) -> tuple[Tensors, Tensors]:
        """The parts of parameters whose blocks are divided as they are, and of those whose blocks have an owner."""
        assert self.owners is not None, "bug in kfac_fx: no owners among processes that multiply all"
        here = {name: part for name, part in parts.items() if name not in self.owners}
        return here, {name: part for name, part in parts.items() if name in self.owners}


@dataclass(frozen=True, eq=False)
class DivisionByOwners(VectorDivision):
    """Every process has the parameters that it owns, in vectors; of the parameters themselves all have copies."""

    replicas: Replicas
    owners: Mapping[str, int]

    def total(self, values: Tensor) -> Tensor:
        return self.replicas.total([values])[0]

    def keeps(self, name: str) -> bool:
        return self.owners[name] == self.replicas.rank

    def multiplies(self, name: str) -> bool:
        return self.keeps(name)

    def part(self, name: str, parameter: Tensor) -> Tensor:
        return parameter if self.keeps(name) else torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def to_blocks(self, parts: Tensors) -> Tensors:
        return {name: part for name, part in parts.items() if self.keeps(name)}

    def from_blocks(self, products: Tensors, parts: Tensors) -> Tensors:
        return {**parts, **products}

    def to_copies(self, parts: Tensors, copies: Tensors) -> Tensors:
        """In one message."""
        names: list[list[str]] = [[] for _ in range(self.replicas.number)]
        for name in parts:
            names[self.owners[name]].append(name)
        like = [[parts[n].new_zeros(()).expand(copies[n].shape) for n in of_process] for of_process in names]
        tensors = self.replicas.gather([parts[name] for name in names[self.replicas.rank]], like)
        by_name = dict(zip((name for of_process in names for name in of_process), tensors, strict=True))
        return {name: by_name[name] for name in parts}
