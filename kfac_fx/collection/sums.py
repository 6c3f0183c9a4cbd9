"""The statistics of one batch of tensors of one's own, without a graph: what taps and links do in a backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kfac_fx.blocks.block import statistics_of
from kfac_fx.checks.proof import check_shapes
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import Registration, Use, where
from kfac_fx.passes.layers import Layer
from kfac_fx.statistics.lagged import LAGGED, unfolded
from kfac_fx.statistics.row_sums import Rows, canonical, named, whole
from kfac_fx.taps.rows import both_rows


def summed(
    registration: Registration, grads: Sequence[Tensor], inputs: Sequence[Tensor], layers: Mapping[str, Layer]
) -> dict[str, Tensor]:
    """The statistics of one source over all uses; gradients of single cases add up within a tower."""
    total: dict[tuple[str, int], Tensor] = {}
    towers: defaultdict[int, list[Rows]] = defaultdict(list)
    matrix, bias = registration.rows
    names = statistics_of(registration)
    for use, grad, value in zip(registration.uses, grads, inputs, strict=True):
        rows, grad_rows = rows_of(registration, use, layers[use.layer], grad, value)
        towers[use.tower].append(canonical(rows, grad_rows, bias, matrix))
        for name in names:
            if name not in LAGGED:
                found = named(name).compute(rows, grad_rows, bias, matrix)
                key = name, use.tower if name == "per_case" else 0
                total[key] = total[key] + found if key in total else found
    sums = {name: parts(total, name) for name in names if name not in LAGGED}
    first = registration.uses[0]
    pairs = [pair for tower in towers.values() for pair in zip(tower[1:], tower, strict=False)]
    if first.steps > 1:
        pairs = [unfolded(rows, first.steps, first.steps_in_positions) for tower in towers.values() for rows in tower]
    zero = towers[first.tower][0].d.new_zeros(())
    lagged = {
        name: sum((LAGGED[name].compute(*pair) for pair in pairs), zero.expand(LAGGED[name].shape(matrix)))
        for name in names
        if name in LAGGED
    }
    return sums | lagged


def rows_of(registration: Registration, use: Use, layer: Layer, grad: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Raises ValueError for tensors that are not those of this use."""
    (g, o, i), bias = registration.rows
    try:
        rows, grad_rows = both_rows(registration, use, layer)(grad, value)
        if not registration.structure.needs_pixels:  # pixels are not as many as output positions
            check_shapes(rows, grad_rows, (g, o, i - bias))
    except (RuntimeError, ValueError, IndexError) as error:
        if fatal(error):
            raise
        raise ValueError(
            f"{registration} at {where(use.output)}: an input of shape {list(value.shape)} and an output's gradient of "
            f"shape {list(grad.shape)} are not of one {use.layer}: {first_line(error)}"
        ) from error
    return rows, grad_rows


def parts(total: Mapping[tuple[str, int], Tensor], name: str) -> Tensor:
    """Of all towers, one after another, where they are kept apart."""
    found = [one for key, one in total.items() if key[0] == name]
    return torch.cat(found) if len(found) > 1 else found[0]


def joined(sources: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Over sources: inputs count once, second moments of gradients add up, gradients of single cases are listed."""
    once, listed = ("count", "A", "A_diag", "A1", "pairs"), ("per_case", "gradient")
    return {
        name: first if whole(name) in once else torch.stack([s[name] for s in sources]) if name in listed
        else torch.stack([s[name] for s in sources]).sum(0)
        for name, first in sources[0].items()
    }  # fmt: skip
