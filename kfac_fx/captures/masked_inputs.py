"""The mask of a model's call as one more input of its captured submodules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.ir import Program
from kfac_fx.passes.submodule_masks import SITES, Site


@dataclass(frozen=True)
class MaskedInputs:
    """sites: of every submodule, the (input, dimension) of the cases and of the positions; None: it has no mask."""

    sites: tuple[tuple[Site, Site] | None, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[Program], paths: Sequence[str]) -> MaskedInputs:
        found = (next((one.meta[SITES] for one in part.graph.nodes if SITES in one.meta), None) for part in parts)
        return cls(tuple(found), tuple(paths))

    def of_call(self, number: int, values: tuple[Any, ...], mask: Tensor | None) -> tuple[Any, ...]:
        """A submodule's inputs, and the mask behind them. None: everything is real.

        Raises ModelChangedError if the mask does not fit them.
        """
        site = self.sites[number]
        if site is None:
            return values
        sizes = tuple(values[place].shape[dim] for place, dim in site)
        if mask is None:
            return *values, torch.ones(sizes, device=values[site[0][0]].device)
        if tuple(mask.shape) != sizes:
            raise ModelChangedError(
                f"padding_mask has shape {list(mask.shape)}, and {self.paths[number]} is called on {sizes[0]} cases "
                f"and {sizes[1]} positions, which were as many on the first inputs.\n"
                "Compile with an example in which all of these numbers are unlike each other."
            )
        return *values, mask
