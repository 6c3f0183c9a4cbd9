"""The inputs of a divided model, whose arguments may have any structure: its examples, and the mask of padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.divided.masks import SITES, Site
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.graphs import pytree
from kfac_fx.passes.ir import Program


def examples_in(value: Any) -> int | None:
    """The number of examples in one argument; None if it has no tensors."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, (list, tuple)) and any(isinstance(leaf, Tensor) for leaf in pytree.leaves(value)):
        return len(value)
    leaves = (leaf for leaf in pytree.leaves(value) if isinstance(leaf, Tensor) and leaf.dim())
    return next((leaf.shape[0] for leaf in leaves), None)


def number_of_examples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """That of the first argument with examples: the length of a list or tuple, the first dimension of a tensor."""
    lengths = (examples_in(value) for value in (*args, *kwargs.values()))
    return next((n for n in lengths if n is not None), 1)


def first_examples(value: Any, total: int, wanted: int) -> Any:
    """The first `wanted` of `total` examples: of a list of that length, or of the tensors in anything else."""
    if isinstance(value, (list, tuple)) and len(value) == total and type(value) in (list, tuple):
        return value[:wanted]

    def shortened(leaf: Any) -> Any:
        has_all = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        return leaf[:wanted] if has_all else leaf

    return pytree.mapped(shortened, value)


@dataclass(frozen=True)
class MaskedInputs:
    """The mask of a call of the model as one more input of its captured submodules.

    sites: of every submodule, the (input, dimension) of the cases and of the positions; None: it has no mask.
    """

    sites: tuple[tuple[Site, Site] | None, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[Program], paths: Sequence[str]) -> MaskedInputs:
        sites = (next((node.meta[SITES] for node in part.graph.nodes if SITES in node.meta), None) for part in parts)
        return cls(tuple(sites), tuple(paths))

    def of_call(self, number: int, values: tuple[Any, ...], mask: Tensor | None) -> tuple[Any, ...]:
        """The inputs of a submodule and the mask behind them; `mask` is None if nothing is padding.

        Raises ModelChangedError if the mask does not fit the inputs.
        """
        site = self.sites[number]
        if site is None:
            return values
        sizes = tuple(values[place].shape[dim] for place, dim in site)
        if mask is None:
            return *values, torch.ones(sizes, device=values[site[0][0]].device)
        if tuple(mask.shape) != sizes:
            raise ModelChangedError(
                f"padding_mask has shape {list(mask.shape)}, but {self.paths[number]} is called on {sizes[0]} cases "
                f"and {sizes[1]} positions; with the first inputs these numbers were equal.\n"
                "Compile with an example in which the numbers of cases and positions differ from all other sizes."
            )
        return *values, mask
