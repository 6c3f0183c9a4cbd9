"""Rows of a parameter behind functions: those of the tensor in the use, times what multiplies gradients on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.ir import Registration, Use
from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.words.pieces import Slope
from kfac_fx.passes.words.slopes import CENTERED, NORMALIZED, STANDARDIZED, filters, projected, slope
from kfac_fx.passes.words.uses import Gain

Rows = tuple[Tensor, Tensor]
Attrs = Mapping[str, Any]
View = tuple[tuple[int, ...], tuple[int, ...]]
Views = tuple[View, ...]


def slopes_of(registration: Registration, use: Use) -> Callable[[Rows, Attrs], Rows] | None:
    """(rows, gradient rows) of W = f(v) -> those of v, but for the projection of a norm; see `passes.words.slopes`.

    Of the gain of normalized filters: what each of them computes without it, and the gradient of its output. None for a
    use without either. What is returned closes over literals and functions only.
    """
    gains = None if use.gain_of is None else gains_of(use.gain_of)
    if not use.slopes:
        return gains
    assert registration.matrix is not None, "bug in kfac_fx: slopes of a generic registration"
    entry = registration.matrix.weight or registration.matrix.bias
    assert entry is not None, "bug in kfac_fx: a matrix form without parameters"
    canonical, outputs, transposed = use.flat or entry[1], use.slope_side == "outputs", use.transposed
    steps = [(n, one.name, one.settings, *sides(one, canonical)) for n, one in enumerate(use.slopes)]
    centered = any(one.name in (CENTERED, STANDARDIZED) for one in use.slopes)

    def sloped(both: Rows, attrs: Attrs) -> Rows:
        rows, grad_rows = both if gains is None else gains(both, attrs)
        for n, name, settings, back, place, to_matrix in steps:
            by = viewed(slope(name, attrs[f"operand{n}"], attrs.get(f"factor{n}"), settings), back)
            by = by if place is None else by.narrow(*place)
            matrix = viewed(by, to_matrix)  # [g, o, i], or [g, o] of a bias
            matrix = matrix.mT if transposed else matrix
            if outputs:
                side = matrix if matrix.dim() == 2 else matrix[:, :, 0]
                grad_rows = grad_rows * (side if grad_rows.dim() == 4 else side[0])
            elif not rows.is_floating_point():
                grad_rows = grad_rows * matrix[0, 0][rows.clamp(min=0)].unsqueeze(-1)
            else:
                rows = rows * (matrix[:, 0] if rows.dim() == 4 else matrix[0, 0])
        if centered:
            rows = rows - rows.mean(-1, keepdim=True)
        return rows, grad_rows

    return sloped


def gains_of(gain: Gain) -> Callable[[Rows, Attrs], Rows]:
    """rows [N, S, g, i] with filters [g, o, i], gradient rows [N, S, g, o] -> [N, S, slices, 1] both.

    One gain an output: what the output is without it, and its gradient. Else Σ d u r, over what the slice multiplies,
    is the gradient of the gain at a position, and the rows are ones.
    """
    name, settings, to_matrix = gain.slope.name, gain.slope.settings, views(gain.slope.layout, gain.filters)
    of_outputs, inputs, (before, after), ids = gain.of_outputs, gain.side == "inputs", gain.repeats, gain.ids

    def gains(both: Rows, attrs: Attrs) -> Rows:
        rows, grad_rows = both[0], both[1] if both[1].dim() == 4 else both[1].unsqueeze(2)
        matrix = viewed(filters(name, attrs["filters"], *settings), to_matrix).to(grad_rows)
        if ids:
            outputs = F.embedding(rows.clamp(min=0), matrix[0].mT).unsqueeze(2)
            outputs = torch.where((rows >= 0)[..., None, None], outputs, 0)
            if inputs:
                return rows, (grad_rows * outputs).sum(-1)
        elif inputs:
            rows = rows if rows.dim() == 4 else rows.unsqueeze(2)
            sums = rows * torch.einsum("nsgo,goi->nsgi", grad_rows, matrix)
        else:
            outputs = torch.einsum("nsgi,goi->nsgo", rows if rows.dim() == 4 else rows.unsqueeze(2), matrix)
        if of_outputs:
            return outputs.flatten(2).unsqueeze(-1), grad_rows.flatten(2).unsqueeze(-1)
        sums = (sums if inputs else outputs * grad_rows).flatten(2).unflatten(2, (before, -1, after)).sum((2, 4))
        return torch.ones_like(sums).unsqueeze(-1), sums.unsqueeze(-1)

    return gains


def sides(one: Slope, canonical: Layout) -> tuple[Views, tuple[int, int, int] | None, Views]:
    """Back to the parameter, (dimension, start, length) of the piece of it, and on to the matrix."""
    piece, whole = one.piece, Layout(one.layout.shape)
    place = None if piece is None else (piece.dim, piece.start, piece.stop - piece.start)
    return views(one.layout, whole), place, views(Layout(canonical.shape), canonical)


def views(before: Layout, after: Layout) -> Views:
    """Back through one layout and on through another: (order, shape) of every view, one of them empty."""
    back = [(one.back, ()) if one.back else ((), one.before) for one in reversed(before.steps)]
    return (*back, *((one.order, ()) if one.order else ((), one.after) for one in after.steps))


def viewed(tensor: Tensor, steps: Views) -> Tensor:
    for order, shape in steps:
        tensor = tensor.permute(order) if order else tensor.reshape(shape)
    return tensor


def project(registration: Registration, gradient: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """The gradient of W in the place of v's, as a matrix [g, o, i], with the projection that rows leave out.

    values: of the parameters.
    """
    found = [one for use in registration.uses for one in use.slopes if one.name in NORMALIZED]
    if not found or registration.matrix is None:
        return gradient
    layout = found[0].layout
    ((name, tensor),) = registration.matrix.unpack(gradient).items()
    value = layout.apply(values[name].detach())
    tensor = layout.invert(projected(found[0].name, layout.apply(tensor), value, *found[0].settings))
    return registration.matrix.pack({name: tensor})
