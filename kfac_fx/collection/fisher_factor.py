"""Factors as a `LayerCollection` sees them: what is averaged, and which blocks have it in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor

from kfac_fx.fisher_blocks import FisherBlock
from kfac_fx.passes.ir import Registration, Use


class FisherFactor:
    """One factor of one or several blocks. Blocks that read the same rows have equal input factors.

    name: "A" of the rows, "G" of the gradient rows, "F" of all parameters of a block. Every block averages a tensor of
    its own, since blocks are stacked by shape; equal factors hold equal numbers.
    """

    def __init__(self, name: str, diagonal: bool, source: Hashable) -> None:
        self.name, self.diagonal, self.source = name, diagonal, source
        self.blocks: list[FisherBlock] = []

    def __repr__(self) -> str:
        return f"FisherFactor({self.name}, of {', '.join(map(repr, self.blocks))})"

    @property
    def value(self) -> Tensor:
        """Its average. Raises FactorNotReady before the first update."""
        return self.blocks[0].operator.factors[self.name].value


def factor_keys(registration: Registration) -> Iterator[tuple[str, bool, Hashable]]:
    """The arguments of `FisherFactor` for each of the block's."""
    for side in (registration.structure.left, registration.structure.right):
        if side is not None:
            yield side.factor, side.diagonal, source(registration, side.factor)


def source(registration: Registration, factor: str) -> Hashable:
    """What the factor is computed from: equal for equal factors."""
    if factor == "F" or registration.matrix is None:
        return registration.parameters, registration.generic
    if factor == "G":
        return tuple((use.output, use.transposed, registration.matrix.shape[:2]) for use in registration.uses)
    g, _, i = registration.matrix.shape
    if registration.structure.needs_pixels:
        return (g, "pixels", *(use.input for use in registration.uses))
    return (g, i, registration.matrix.bias is None, *(rows_of(use) for use in registration.uses))


def rows_of(use: Use) -> Hashable:
    """The input, and all that its rows depend on besides: geometry, but not the number of outputs."""
    weight: Any = use.attrs.get("weight")
    literals = {name: value for name, value in use.attrs.items() if name not in ("weight", "bias")}
    return use.input, use.layer, use.form, use.transposed, weight and weight[2:], repr(sorted(literals.items()))
