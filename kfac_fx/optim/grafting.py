"""The momentum type "grafted": the direction of K-FAC with the length of Adam's step, block by block.

    m̂, v̂ = the averages of the gradient and of its square, as Adam's;  a = m̂ / (√v̂ + ε)
    Δ_b = P m̂_b |a_b| / |P m̂_b|        for every Fisher block b, with the norms over its parameters that have a gradient

Sources: Agarwal et al. 2020, "Disentangling adaptive gradient methods from learning rates", which names it grafting;
Anil et al. 2020, "Scalable second order optimization for deep learning", which grafts Shampoo layer by layer. Blocks
that have a parameter in common count as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Flat


def joined_blocks(names: Iterable[str], blocks: Iterable[Sequence[str]]) -> list[int]:
    """A number for every name; names that a block has in common, or several blocks that overlap, have the same."""
    number = {name: n for n, name in enumerate(names)}
    for block in blocks:
        members = {number[name] for name in block if name in number}
        number = {name: min(members) if n in members else n for name, n in number.items()}
    return list(number.values())


def grafted(direction: Tensor, length: Tensor, flat: Flat, blocks: Iterable[Sequence[str]]) -> Tensor:
    """The direction, scaled block by block to the norm of `length`; zero where the direction is.

    Args:
        direction, length: [P].
        flat: where the parameters lie in the vectors.
        blocks: the names of the parameters of every Fisher block.
    """
    numbers = joined_blocks(flat.shapes, blocks)

    def squares(vector: Tensor) -> list[Tensor]:
        of_names = [part.square().sum() for part in flat.parts(vector).values()]
        sums = {n: sum(square for square, m in zip(of_names, numbers, strict=True) if m == n) for n in set(numbers)}
        return [torch.as_tensor(sums[n]) for n in numbers]

    tiny = torch.finfo(direction.dtype).tiny
    scales = [(a / d.clamp(min=tiny)).sqrt() for a, d in zip(squares(length), squares(direction), strict=True)]
    return flat.spread(dict(zip(flat.shapes, scales, strict=True))) * direction
