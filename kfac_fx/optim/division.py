"""How the vectors of a step are divided among processes: not at all, by shards of FSDP2, or by the owners of blocks.

A vector of a process has one part of every parameter: all of it, a shard, or nothing where another process owns it.
Every process does with its parts what a rule does element by element. Inner products are added up over processes, the
blocks multiply whole tensors, and the copies of the parameters are moved everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kfac_fx.distributed import Replicas
from kfac_fx.linalg.sharded import Shards, shard
from kfac_fx.linalg.vectors import Tensors


class VectorDivision:
    """Vectors that every process has as a whole."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over the parts of all processes."""
        return values

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

    def to_blocks(self, *vectors: Tensors) -> list[Tensors]:
        """From parts by name to the tensors that the blocks of this process multiply, in one message.

        vectors: of the same names."""
        return list(vectors)

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

    def multiplies(self, name: str) -> bool:
        rank = dist.get_rank(self.shards.group)
        return self.owners is None or self.owners.get(name, rank) == rank

    def in_blocks(self, name: str, parameter: Tensor) -> torch.Size:
        return parameter.shape if self.owners is None or name in self.owners else shard(parameter).shape

    def part(self, name: str, parameter: Tensor) -> Tensor:
        return shard(parameter)

    def to_blocks(self, *vectors: Tensors) -> list[Tensors]:
        if self.owners is None:
            return self.shards.gathered(*vectors)
        here, owned = zip(*(self.by_owner(parts) for parts in vectors), strict=True)
        wholes = self.shards.to_owners(owned, self.owners) if owned[0] else owned
        return [{**parts, **of_owner} for parts, of_owner in zip(here, wholes, strict=True)]

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

    def to_blocks(self, *vectors: Tensors) -> list[Tensors]:
        return [{name: part for name, part in parts.items() if self.keeps(name)} for parts in vectors]

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
