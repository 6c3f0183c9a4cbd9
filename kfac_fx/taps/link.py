"""The link: an identity that brings the gradients of consecutive uses of a weight together, for series blocks.

A link stands on the output of a use, in front of its tap. It returns the output and a *carrier*, a zero tensor of the
same shape, which enters the link of the next use. The "gradient" of the carrier is the gradient of the output of the
next use. So the backward of a link has the gradients of two consecutive outputs, and autograd runs it after the
backward of the next link, however the two uses are connected. The forward has the inputs of both uses. The second
moments leave as the gradients of probes, as the statistics of a tap do (`kfac_fx.taps.tap`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kfac_fx.linalg.matrices import full_precision_in_eager
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Registration, Use, where
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.padding import real_rows
from kfac_fx.statistics.lagged import LAGGED, unfolded
from kfac_fx.statistics.row_sums import Matrix, canonical
from kfac_fx.taps.rows import BothRows, both_rows
from kfac_fx.taps.tap import Probes, RealRows, apart, quick


class Link(nn.Module):
    """One use of a series. first, last: whether no use is before it, and none behind it."""

    def __init__(self, registration: Registration, use: Use, layer: Layer, first: bool, last: bool) -> None:
        super().__init__()
        assert registration.matrix is not None, "bug in kfac_fx: a link in a generic registration"
        self.owner, self.place = str(registration), where(use.output)
        self.function = link_function(
            both_rows(registration, use, layer),
            registration.matrix.shape,
            registration.matrix.bias is not None,
            (first, last, use.steps, use.steps_in_positions),
            (
                f"{self.owner} at {self.place} has ids as rows, which have no series: use 'kron_indep'",
                f"{self.owner} at {self.place} should hold {use.steps} uses, but its rows are not a multiple of that",
            ),
            real_rows(use, layer) if use.mask_dims else None,
        )

    def forward(
        self,
        output: Tensor,
        input: Tensor,
        probes: Probes | None,
        carried: Tensor | None,
        earlier: Tensor | None,
        *masks: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """`output` unchanged, and the carrier for the next use. Raises RegistrationError if the use before has another
        shape. carried, earlier: the carrier and the input of the use before. masks: of the rows without padding, of
        this use, the use before and the use behind."""
        if not probes:
            return output, None
        if carried is not None and carried.shape != output.shape:
            raise RegistrationError(
                f"{self.owner} at {self.place} has an output of shape {list(output.shape)}, but "
                f"{list(carried.shape)} one use before, so its uses are not a series: use 'kron_indep'"
            )
        input, carried, earlier, *masks = apart(output, input, carried, earlier, *masks)  # type: ignore[assignment]
        pair: tuple[Tensor, Tensor] = self.function.apply(
            output, input, carried, earlier, *(probes[name] for name in LAGGED), *masks
        )
        return pair

    def extra_repr(self) -> str:
        return self.place


def link_function(
    both: BothRows,
    matrix: Matrix,
    bias: bool,
    place: tuple[bool, bool, int, bool],
    errors: tuple[str, str],
    real: RealRows | None = None,
) -> type[torch.autograd.Function]:
    """The autograd.Function of one link. Each link has its own class, which closes over functions and literals only.

    The arguments of the function are (output, input, carrier and input of the use before or None, the probes of
    `LAGGED`, no masks or those of this use, of the use before and of the use behind).

    place: (first, last, the number of uses in these rows one after another, whether they lie along the positions).
    errors: for rows that are ids, and for rows that do not hold this number of uses.
    real: from (output, mask) to the mask of the rows, if the masks are not of rows.
    """
    first, last, steps, in_positions = place
    of_ids, uneven = errors

    class LinkFunction(torch.autograd.Function):
        @staticmethod
        def forward(
            output: Tensor, input: Tensor, carried: Tensor | None, earlier: Tensor | None, *rest: Tensor
        ) -> tuple[Tensor, Tensor]:
            return output.view_as(output), output.new_zeros(()).expand(output.shape)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _, input, _, earlier, *rest = inputs
            ctx.save_for_backward(input, input if first else earlier, *rest[len(LAGGED) :])

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            output_grad, later_grad = grads
            input, earlier, *masks = ctx.saved_tensors
            row_masks = [mask if real is None else real(output_grad, mask) for mask in masks]
            device = output_grad.device.type
            with torch.no_grad(), torch.autocast(device, enabled=False), full_precision_in_eager():
                here = canonical(
                    *both(output_grad, input, *masks[:1]), bias, matrix, row_masks[0] if row_masks else None
                )
                if not here.x.is_floating_point():
                    raise RegistrationError(of_ids)
                if here.d.shape[in_positions] % steps:
                    raise RegistrationError(uneven)
                sums: list[Tensor | None]
                a, g, pairs = (LAGGED[name].compute for name in LAGGED)
                if steps > 1:
                    pair = unfolded(here, steps, in_positions)
                    sums = [a(*pair), g(*pair), pairs(*pair)]
                else:
                    # All uses have the same form, so the rows before and the gradients behind are made as those here.
                    # They are zero at padding, and so is the bias column.
                    beside = both(later_grad, earlier, *masks[1:2])
                    before = canonical(beside[0], here.d, bias, matrix, row_masks[1] if row_masks else None)
                    behind = canonical(here.x, beside[1], bias, matrix, row_masks[2] if row_masks else None)
                    sums = [None if first else a(here, before), None if last else g(behind, here)]
                    sums += [None if first else pairs(here, before)]
            return output_grad, None, None if first else output_grad, None, *sums, *(None for _ in masks)

    return quick(LinkFunction)
