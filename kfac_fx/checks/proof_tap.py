"""The tap of the proof: rows that may be wrong, and what of a gradient no rows have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.graphs.failures import fatal, first_line
from kfac_fx.passes.ir import Registration, Use, tensor_attrs
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.words.pieces import Slope
from kfac_fx.passes.words.slopes import DIVIDED, OWN
from kfac_fx.statistics.row_sums import named
from kfac_fx.taps.tap import Tap
from kfac_fx.taps.use_rows import BothRows


class ProofTap(Tap):
    """A tap whose rows may be wrong: it keeps what went wrong instead of raising in the middle of a backward."""

    failure: str | None = None
    changes: list[tuple[Tensor, Tensor]]  # of numbers that weights are divided by: (a number, the gradient for it)
    kind: tuple[Any, ...] = ()  # of its rows: are they ids, and how many
    reached: bool = False  # whether the last backward sent anything to other cases than the first

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        assert registration.matrix is not None, "bug in kfac_fx: a proof of a generic registration"
        both = super().both_rows(registration, use, layer)
        g, o, i = self.matrix
        inputs = i - (registration.matrix.bias is not None)
        self.cases: set[int] = set()  # of every call
        self.changes = []
        matrix, names, bias = registration.matrix, tuple(tensor_attrs(use)), registration.matrix.bias is not None
        own = next(((n, one) for n, one in enumerate(use.slopes) if one.name in OWN), None)

        def guarded(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            try:
                rows, grad_rows = both(output_grad, input, *tensors)
                check_shapes(rows, grad_rows, (g, o, inputs))
                self.cases.add(grad_rows.shape[0])
                self.reached = self.reached or reaches_others(rows, grad_rows)
                if own is not None:
                    n, slope = own
                    (sums,) = matrix.unpack(
                        named("gradient").compute(rows, grad_rows, bias, self.matrix, None)
                    ).values()
                    attrs = dict(zip(names, tensors, strict=True))
                    self.changes.append(change(slope, sums, attrs[f"factor{n}"], attrs[f"operand{n}"]))
                self.kind = not rows.is_floating_point(), list(grad_rows.shape[:2])
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if fatal(error):
                    raise
                self.failure = f"its rows could not be made: {first_line(error)}"
                return output_grad.new_zeros(1, 1, g, inputs), output_grad.new_zeros(1, 1, g, o)
            return rows, grad_rows

        return guarded


def change(slope: Slope, gradient: Tensor, number: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """σ, and the gradient for it: -⟨D / σ, v⟩ / σ, where `gradient` is D / σ; or ⟨D σ, v⟩ / σ where it is D σ."""
    products = slope.layout.apply(gradient) * value / number
    products = -products if slope.name == DIVIDED else products
    return number, products.sum_to_size(number.shape).to(number)


def reaches_others(rows: Tensor, grad_rows: Tensor) -> bool:
    """Whether the gradient of any case but the first is not zero. Of transposed uses the gradient is in the rows."""
    sides = [grad_rows] + ([rows] if rows.is_floating_point() and rows.shape[0] == grad_rows.shape[0] else [])
    both = torch.stack([side.detach()[1:].flatten(1).any(1) for side in sides])
    return bool(both.all(0).any())


def check_shapes(rows: Tensor, grad_rows: Tensor, sizes: tuple[int, int, int]) -> None:
    """Raises ValueError if these are no rows of a matrix [g, o, i]."""
    g, o, i = sizes
    cases, positions = grad_rows.shape[:2]
    wanted = [cases, positions, g, o] if grad_rows.dim() == 4 else [cases, positions, o]
    if list(grad_rows.shape) != wanted or (grad_rows.dim() == 3 and g > 1):
        raise ValueError(f"gradient rows of shape {list(grad_rows.shape)}, wanted [N, S, {g}, {o}]")
    if rows.is_floating_point():
        ends = ([g, i], [i]) if g == 1 else ([g, i],)
        right = rows.shape[1] == positions and list(rows.shape[2:]) in ends
    else:
        right = rows.shape[1:] == grad_rows.shape[1:2] and g == 1
    if not right or rows.shape[0] not in (1, cases):
        raise ValueError(f"rows of shape {list(rows.shape)}, wanted [{cases}, {positions}, {g}, {i}]")


def divides(one: Registration) -> bool:
    return any(slope.name in OWN for use in one.uses for slope in use.slopes)


def gradient_of(parameter: Tensor, changes: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the numbers that it is divided by."""
    learned = [(number, gradient) for number, gradient in changes if number.requires_grad]
    if not learned:
        return torch.zeros_like(parameter)
    numbers, gradients = zip(*learned, strict=True)
    return torch.autograd.grad(numbers, parameter, gradients)[0]
