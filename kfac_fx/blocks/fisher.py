"""The block-diagonal Fisher: all blocks of a model as one operator on vectors over all its registered parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_fx.blocks.block import FisherBlock, Operator, check_fits, make_groups
from kfac_fx.blocks.spectrum import Damping, Spectrum, System
from kfac_fx.factors.factor import Failures, NotRegisteredError
from kfac_fx.factors.inverses import Inverter
from kfac_fx.factors.stacks import BlockGroup, Vector
from kfac_fx.linalg.matrices import Root, dense
from kfac_fx.linalg.vectors import joined, split
from kfac_fx.passes.ir import Registration

Key = tuple[str, ...]


class Memory(NamedTuple):
    """In bytes."""

    factors: int
    inverses: int


class Blocks(dict[Key, FisherBlock]):
    """By the names of their parameters, in the order of the registrations."""

    def __missing__(self, key: object) -> FisherBlock:
        """Raises NotRegisteredError, a KeyError, with the keys that may have been meant."""
        wanted = {key} if isinstance(key, str) else set(key) if isinstance(key, tuple) else set()
        meant = [one for one in self if wanted.intersection(name for n in one for name in (n, n.rpartition(".")[0]))]
        shown = [f"  {one!r}" for one in (meant or list(self))[:8]]
        raise NotRegisteredError(
            f"there is no block {key!r}: a key is the tuple of all parameters of a block, in their order, as in\n"
            + "\n".join(shown)
        )


class BlockDiagonalFisher(Operator):
    """F + λ I, by blocks. Vectors are dicts of tensors shaped as the parameters, by name, over all of `parameters`;
    sparse ones are taken, and products are dense.

    Products do not wait for the device, and compile without graph breaks. Powers other than 1 are those of the last
    `update_inverses`, with the damping of that time; the power 1 takes the present factors and damping.
    """

    def __init__(self, roots: Sequence[Root], damping: Tensor) -> None:
        self.roots = tuple(roots)
        self._damping = damping
        self._registrations: tuple[Registration, ...] | None = None

    @abstractmethod
    def wanted(self) -> tuple[tuple[Registration, ...], Mapping[str, Tensor]]:
        """The registrations to make blocks of, and their parameters by name."""

    def build(self) -> None:
        """Empty blocks for the present registrations."""
        registrations, parameters = self.wanted()
        self._groups = make_groups(registrations, parameters, roots=self.roots, damping=self._damping)
        made = [FisherBlock(group, index) for group in self._groups for index in range(len(group))]
        by_key = {block.parameters: block for block in made}
        self._blocks = Blocks((one.parameters, by_key[one.parameters]) for one in registrations)
        names = dict.fromkeys(name for one in registrations for name in one.owners)
        self._shapes = {name: parameters[name].shape for name in names}
        self._inverter = Inverter(self._groups, self.roots)
        self._registrations = registrations

    @property
    def groups(self) -> list[BlockGroup]:
        """Blocks of equal shape, stacked."""
        if self._registrations is None:
            self.build()
        return self._groups

    @property
    def blocks(self) -> Blocks:
        """By the names of their parameters, in the order of the registrations."""
        if self._registrations is None:
            self.build()
        return self._blocks

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for block in self.blocks.values() for name in block.registration.owners))

    @property
    def damping(self) -> Tensor:
        """λ, a 0-d tensor; assigning a number or a tensor writes into it."""
        return self._damping

    @damping.setter
    def damping(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            self._damping.copy_(value)
        else:
            self._damping.fill_(value)

    def update_inverses(self) -> None:
        """Decompose the damped factors anew. Raises FactorNotReady before the first update of the factors."""
        for group in self.groups:
            group.check_updated()
        self._inverter.update()

    @torch.no_grad()
    def spectrum(self, *, scale: float | Tensor = 1.0, damping: Damping | None = None) -> Spectrum:
        """s F + δ I by the eigenvectors of the present factors: all powers, determinants, diagonals and samples, for
        any s and δ. One decomposition of all factors; needs no `update_inverses`, and the damping is not split.

        scale: s; the number of training cases for the precision of a Laplace approximation. damping: δ, see Spectrum;
        None: λ.

        Raises FactorNotReady before the first update, ApproximationError for series too wide to be dense.
        """
        systems = [System.of(group) for group in self.groups]
        return Spectrum(systems, self._shapes, scale, self.damping.clone() if damping is None else damping)

    # --- products ---------------------------------------------------------------------------------------------------

    def multiply_matpower(self, exp: float, vector: Vector) -> dict[str, Tensor]:
        """(F + λ I)^exp v; exp must be 1 or among `exps`, else NotRegisteredError."""
        return self._multiply(vector, float(exp))

    @torch.no_grad()
    def _multiply(self, vector: Vector, root: Root, transpose: bool = False) -> dict[str, Tensor]:
        groups = self.groups
        check_fits(vector, self._shapes, alone=True)
        vector = {name: dense(tensor) for name, tensor in vector.items()}
        registrations = [one for group in groups for one in group.registrations]
        parts = split(vector, registrations)
        product: dict[str, Tensor] = {}
        for group in groups:
            product |= group.unpack(group.multiply(group.pack(parts), root, transpose), parts)
        return joined(product, registrations, vector)

    # --- accounts ---------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> Failures:
        """What went wrong so far; waits for the device."""
        return Failures(*map(sum, zip(*(group.failures() for group in self.groups), strict=True)))

    def factor_memory(self) -> Memory:
        factors = [stack.moment for group in self.groups for stack in group.factors.values()]
        roots = [root for group in self.groups for operators in group.roots.values() for root in operators]
        inverses = {id(root): root for root in roots}.values()  # some roots share what they are made of
        return Memory(*(sum(t.numel() * t.element_size() for t in tensors) for tensors in (factors, inverses)))

    def state_dict(self) -> dict[str, Tensor]:
        """Flat, by readable names, sharing memory; what is accumulated but not yet folded is not in it."""
        state = {"damping": self._damping}
        for key, block in self.blocks.items():
            state |= {f"{','.join(key)}/{name}": tensor for name, tensor in block.state().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError, and loads nothing, if the names or shapes are not those of this estimator's own state."""
        self.check_state(state)
        for name, tensor in BlockDiagonalFisher.state_dict(self).items():
            tensor.copy_(state[name])
        for key, block in self.blocks.items():
            block.group.updated, block.group.inverted = state[f"{','.join(key)}/ready"].tolist()

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        if wrong := sorted(own.keys() ^ state.keys()) or sorted(n for n in own if own[n].shape != state[n].shape):
            raise ValueError(
                f"the state is of another estimator: {len(wrong)} names or shapes differ, the first is {wrong[0]!r}."
            )
