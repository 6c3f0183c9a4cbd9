"""The momentum type "grafted": the direction of K-FAC with the length of Adam's step, block by block.

    m̂, v̂ = the averages of the gradient and of its square, as Adam's;  a = m̂ / (√v̂ + ε)
    Δ_b = P m̂_b |a_b| / |P m̂_b|        for every Fisher block b, with the norms over its parameters that have a gradient

Sources: Agarwal et al. 2020, "Disentangling adaptive gradient methods from learning rates", which names it grafting;
Anil et al. 2020, "Scalable second order optimization for deep learning", which grafts Shampoo layer by layer. Blocks
that have a parameter in common count as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Flat, connected
from kfac_fx.optim.division import UNDIVIDED, VectorDivision


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

    Args:
        direction, length: [P].
        flat: where the parameters lie in the vectors.
        blocks: the names of the parameters of every Fisher block.
        division: of the vectors among processes.
    """
    numbers = joined_blocks(flat.shapes, blocks)
    of_names = [[part.square().sum() for part in flat.parts(vector).values()] for vector in (length, direction)]
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
