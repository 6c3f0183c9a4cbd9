"""The collecting tap: it hands the rows of its use to a function, in place of sums over them.

Its probe is a single zero, which makes autograd visit the tap; the "gradient" of the probe is zero. A collecting tap
runs without a compiler and without vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.ir import Registration, Use
from kfac_fx.passes.layers import Layer
from kfac_fx.statistics.row_sums import Rows, canonical
from kfac_fx.taps.rows import BothRows
from kfac_fx.taps.tap import RealRows, StatisticOf, SumsOf, Tap

ROWS = "rows"  # the name of the probe


class CollectingTap(Tap):
    """A tap that calls `sink` with its rows in every backward; before that is set, rows are not made."""

    sink: Callable[[Rows], None] | None = None

    def __init__(self, registration: Registration, use: Use, layer: Layer) -> None:
        super().__init__(registration, use, layer)
        self.use = use

    def sums(
        self, both: BothRows, bias: bool, mask: int | None, real: RealRows | None, axis: int, short: BothRows | None
    ) -> SumsOf:
        def collected(names: Sequence[str], output_grad: Tensor, input: Tensor, values: Sequence[Any]) -> StatisticOf:
            if self.sink is not None:
                row_mask = None if mask is None else values[mask]
                row_mask = row_mask if real is None else real(output_grad, row_mask)
                with torch.autocast(output_grad.device.type, enabled=False):
                    # Saved tensors are part of the graph, and functions of the rows may be differentiated.
                    rows, grad_rows = (side.detach() for side in both(output_grad, input, *values))
                    self.sink(canonical(rows, grad_rows, bias, self.matrix, row_mask))
            return lambda name: output_grad.new_zeros((), dtype=torch.float32)

        return collected
