"""Rows of cases without a target, such as -100, that are in input factors all the same.

    x [N, T, i] -> linear -> logits [N, T, V]; targets [N, T], of which some are -100

Losses leave such cases out: their gradient is zero, and they are not counted. A row that has no gradient for this
reason alone says nothing of the Fisher, but an A without a mask is a mean over it. `padding_mask=` and a loss of
[cases, positions] in one graph mask these rows; targets from outside, cases of one row and divided models do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import pulled, with_gradient
from kfac_fx.linalg.processes import unsharded
from kfac_fx.losses.declared import WeightedLosses
from kfac_fx.losses.sources import Cotangents
from kfac_fx.passes.errors import plural
from kfac_fx.passes.ir import ROW_MASK, Registration
from kfac_fx.recording.emitted import EmittedModel
from kfac_fx.recording.meeting_cases import collected, collecting_taps, revealing, row_probes
from kfac_fx.recording.statistics import Key, Rows
from kfac_fx.recording.taps import CollectingTap


@dataclass(frozen=True)
class LeftOut:
    """cases: without a target; all_cases: with these. rows: by block those of A without a gradient for this reason, and
    all."""

    cases: int
    all_cases: int
    rows: Mapping[Key, tuple[int, int]]

    def __str__(self) -> str:
        worst, (left_out, rows) = max(self.rows.items(), key=lambda item: item[1][0] / item[1][1])
        return (
            f"{self.cases:,} of {plural(self.all_cases, 'case')} of the loss have no target, and the input factors A "
            f"of {plural(len(self.rows), 'block')} are means over all of their rows: {100 * left_out / rows:.0f}% of "
            f"those of {', '.join(worst)} have no gradient. The gradients, and so G, are of the cases with a target.\n"
            "Leave cases without a target out of the batch; if they are positions, name them with "
            "compile(..., padding_mask=), or let the forward of a model that one graph holds compute the loss: in one "
            "piece, and with the mask in the sizes of the inputs, as (losses.view(len(x), -1) * mask).sum()."
        )


def unmasked(registration: Registration) -> list[int]:
    """The numbers of the uses whose rows are all in A."""
    if registration.generic or not registration.structure.kronecker:
        return []
    return [number for number, use in enumerate(registration.uses) if ROW_MASK not in use.attrs]


def rows_left_out(
    emitted: EmittedModel,
    parameters: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    values: Any,
    losses_of: Callable[[Any, tuple[Tensor, ...]], tuple[Sequence[Tensor], WeightedLosses]],
    registrations: Sequence[Registration],
) -> dict[Key, tuple[int, int]]:
    """By block with such rows their number, and that of all its rows. One forward and two backwards; the host waits.

    Args:
        emitted: with collecting taps.
        parameters, buffers: of the run; zero parameters get other values, because they would hide what is before them.
        losses_of: from (what the model returns, the Fisher's outputs) to (these as constants, their losses).
        registrations: those that are looked at.
    """
    uses = {registration.parameters: numbers for registration in registrations if (numbers := unmasked(registration))}
    if not uses:
        return {}
    taps = {key: [collecting_taps(emitted, key)[number] for number in numbers] for key, numbers in uses.items()}
    with emitted.isolated():
        live = {name: with_gradient(revealing(unsharded(value.detach()))) for name, value in parameters.items()}
        probes = row_probes(emitted.program.registrations, taps, next(iter(live.values())))
        leaves = [probe for by_name in probes for probe in by_name.values()]
        output, fisher = emitted.run(live, buffers, values, probes, compiled=False)
        constants, losses = losses_of(output, fisher)

        def reached(cotangents: Cotangents) -> dict[tuple[Key, CollectingTap], Tensor]:
            """Which rows have a gradient, by use [N, S]."""
            found: dict[tuple[Key, CollectingTap], Tensor] = {}

            def note(place: tuple[Key, CollectingTap], rows: Rows) -> None:
                found[place] = (rows.d != 0).flatten(2).any(2)

            sinks = {tap: partial(note, (key, tap)) for key, of_key in taps.items() for tap in of_key}
            with collected(sinks, reads_x=False):
                pulled(fisher, cotangents, leaves, keep=True)
            return found

        inputs = [loss.inputs for _, loss in losses]
        generator = torch.Generator(inputs[0].device).manual_seed(0)  # torch's own streams are the user's

        def drawn(tensors: Sequence[Tensor]) -> Cotangents:
            return [torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device) for t in tensors]

        of_kept = reached(pulled(inputs, drawn(inputs), constants, keep=True))
        of_all = reached(drawn(constants))
    totals: dict[Key, tuple[int, int]] = {}
    for (key, tap), rows in of_all.items():
        kept = of_kept.get((key, tap), torch.zeros_like(rows))
        left_out, number = totals.get(key, (0, 0))
        totals[key] = left_out + int((rows & ~kept).sum()), number + rows.numel()
    return {key: numbers for key, numbers in totals.items() if numbers[0]}
