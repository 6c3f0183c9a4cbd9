"""The rule "grafted": K-FAC's direction with the length of Adam's step, block by block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kfac_fx.fisher.placement import UNDIVIDED, VectorDivision
from kfac_fx.linalg.arguments import a_decay, a_weight, positive
from kfac_fx.linalg.entries import Values
from kfac_fx.linalg.vectors import Flat, Tensors, connected
from kfac_fx.optim.first_order import ADAM_VALUES, FirstOrder, new_adam_state
from kfac_fx.optim.groups import is_finite
from kfac_fx.optim.rule import BlockStep, Damped, Update


@dataclass(frozen=True, kw_only=True, eq=False)
class Grafted(Damped):
    """Every Fisher block moves along P m̂, with the averaged gradient m̂, as far as Adam would move it.

    Its lr is of the size of Adam's and needs tuning.

    Args, next to those of `Damped`:
        momentum, second_moment_decay: β₁ and β₂ of Adam.
    """

    name: ClassVar[str] = "grafted"
    values: ClassVar[Mapping[str, Values]] = ADAM_VALUES

    relative_damping: Annotated[float | None, positive] = None
    momentum: Annotated[float, a_decay] = 0.9
    second_moment_decay: Annotated[float, a_weight] = 0.999

    @property
    def side_damping(self) -> float | None:
        return self.relative_damping

    def new_state(self, parameter: Tensor) -> Tensors:
        return new_adam_state(parameter)

    def direction(self, step: BlockStep) -> Update:
        """NaN where a new average is not finite."""
        betas = self.momentum, self.second_moment_decay
        adam, new = FirstOrder(betas=betas)(step.g, step.state, step.flat.flat)
        blocks = [block.registration.owners for block in step.estimator.blocks.values()]
        update = grafted(step.precondition(new["exp_avg"]), adam, step.flat.flat, blocks, step.flat.division)
        finite = torch.stack([is_finite(average) for average in new.values()]).all()
        return Update(torch.where(finite, update, torch.nan), new)


def joined_blocks(names: Iterable[str], blocks: Iterable[Sequence[str]]) -> list[int]:
    """A number for every name; names that a block has in common, or several blocks that overlap, have the same."""
    known = list(names)
    sets = connected([*((name,) for name in known), *({*block}.intersection(known) for block in blocks)])
    number = {place: places[0] for places in sets for place in places}  # the first places are those of names
    return [number[n] for n in range(len(known))]


def grafted(
    direction: Tensor, length: Tensor, flat: Flat, blocks: Iterable[Sequence[str]], division: VectorDivision = UNDIVIDED
) -> Tensor:
    """The direction, scaled block by block to the norm of `length`; zero where the direction is.

        Δ_b = d_b |a_b| / |d_b|        for every Fisher block b, with the norms over its parameters that have a gradient

    "grafted" takes d = P m̂ and Adam's a = m̂ / (√v̂ + ε). Sources: Agarwal et al. 2020, "Disentangling adaptive gradient
    methods from learning rates", which names it grafting; Anil et al. 2020, "Scalable second order optimization for
    deep learning", which grafts Shampoo layer by layer. Blocks that have a parameter in common count as one.

    Args:
        direction, length: [P].
        flat: where the parameters lie in the vectors.
        blocks: the names of the parameters of every Fisher block.
        division: of the vectors among processes.
    """
    numbers = joined_blocks(flat.shapes, blocks)
    of_names = [
        [part.square().sum() * division.weight(name) for name, part in flat.parts(vector).items()]
        for vector in (length, direction)
    ]
    of_blocks: dict[int, list[Tensor]] = defaultdict(list)
    for n, squares in zip(
        numbers, division.total(torch.stack(list(map(torch.stack, of_names)))).unbind(1), strict=True
    ):
        of_blocks[n].append(squares)
    scales: dict[int, Tensor] = {}
    for n, squares_of_names in of_blocks.items():
        of_length, of_direction = torch.stack(squares_of_names).sum(0)
        scales[n] = (of_length / of_direction.clamp(min=torch.finfo(direction.dtype).tiny)).sqrt()
    return flat.spread({name: scales[n] for name, n in zip(flat.shapes, numbers, strict=True)}) * direction
