"""Gains of normalized weights, each a layer of its own.

    conv1d(x, g v / |v|)          g for every filter: outputs
    conv_transpose1d(x, ...)      g for every channel of the input, as torch counts them: inputs, [1, channels, kernel]
    conv1d(x, ..., dim=2)         g for every place in the kernel: inputs, [channels, kernel, 1]
    linear(x, a * exp(e))         exp(e) for every output, and e behind a function of every element

A gain multiplies what the filters compute without it: a layer of one input and one output a filter, which is exact.
Where a gain belongs to inputs, its own gradient at every position stands for gradient rows, beside rows of ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graphs.labels import has_gradient
from ..matrix import Layout, Shape
from ..parametrization import (
    NodeValues,
    Parametrization,
    RowPair,
    RowsStep,
    Value,
    WeightExample,
    apply_views,
    view_steps,
)
from ..registration import Bound, Use
from .elementwise import INPUTS, OUTPUTS, Constant, Diagonal, placed
from .normalized import WithGain


@dataclass(frozen=True)
class Gain(Parametrization):
    """The parameter multiplies every slice of the filters of another one by a number of its own.

    of: the function that makes the filters.
    matrix: from the other parameter to the matrix [g, o, i] of the use.
    side: where the slices lie, "outputs" or "inputs".
    repeats: (before, after); the numbers of slices along the side, flattened, are those of [before, slices, after].
    ids: whether the rows are ids.
    """

    default = "full", "its elements multiply slices of another parameter"

    of: WithGain
    matrix: Layout
    side: str
    repeats: tuple[int, int] = (1, 1)
    ids: bool = False

    @property
    def nodes(self) -> dict[str, Value]:
        return {"filters": self.of.operand}

    @property
    def of_outputs(self) -> bool:
        """Whether every output has a gain of its own, in their order."""
        return self.side == OUTPUTS and self.repeats == (1, 1)

    def step(self) -> RowsStep:
        """rows [N, S, g, i] with filters [g, o, i], gradient rows [N, S, g, o] -> [N, S, slices, 1] both.

        One gain an output: what the output is without it, and its gradient. Else Σ d u r, over what the slice
        multiplies, is the gradient of the gain at a position, and the rows are ones.
        """
        filters, to_matrix = self.of.filters(), view_steps(self.of.layout, self.matrix)
        of_outputs, inputs, (before, after), ids = self.of_outputs, self.side == INPUTS, self.repeats, self.ids

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            rows, grad_rows = both[0], both[1] if both[1].dim() == 4 else both[1].unsqueeze(2)
            matrix = apply_views(filters(tensors["filters"]), to_matrix).to(grad_rows)
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

        return step


def gains_of(use: Use, shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """Beside the use of a weight with a gain that of the gain, if there is one for every slice in their order."""
    (bound,) = use.parameters.values()
    step = next((step for step in use.through if isinstance(step, WithGain) and step.gain is not None), None)
    if step is None or step.gain is None:
        return
    slices = 1 if step.dim is None else bound.layout.shape[step.dim]
    place = repeats(slice_numbers(bound.layout, step.dim), slices)
    shape = shapes[step.gain.parameter]
    if place is None or math.prod(shape) != slices:
        return
    side, around = place
    gain = Gain(step, bound.layout, side, around, reads_ids(use))
    matrix = (1, 1, slices) if gain.ids and side == INPUTS else (slices, 1, 1)
    weight = Bound(step.gain.parameter, Layout(shape), Layout(shape).reshape(matrix), step.gain.scale * bound.scale)
    before = tuple(other for other in use.through if not isinstance(other, Diagonal))
    behind = placed(step.gain.through, weight.layout, OUTPUTS if matrix[0] == slices else INPUTS)
    yield replace(use, parameters={"weight": weight}, through=(*before, gain, *behind))


def slice_numbers(layout: Layout, dim: int | None) -> Tensor:
    """The number of the slice that every element of a matrix [g, o, i] is in."""
    sizes = [1] * len(layout.shape)
    if dim is None:
        return layout.apply(torch.zeros(sizes, dtype=torch.int32).expand(layout.shape))
    sizes[dim] = layout.shape[dim]
    return layout.apply(torch.arange(layout.shape[dim], dtype=torch.int32).view(sizes).expand(layout.shape))


def constant_in(layout: Layout) -> Constant:
    """For `Diagonal.sides`, of a whole parameter: found by trying, since the matrix may be no view of it."""

    def constant(dim: int, axis: int) -> bool:
        slices = slice_numbers(layout, dim)
        return bool((slices == slices.narrow(axis, 0, 1)).all())

    return constant


def repeats(slices: Tensor, count: int) -> tuple[str, tuple[int, int]] | None:
    """(side, (before, after)) of the numbers of slices in a matrix; None if they lie otherwise."""
    outputs, inputs = bool((slices == slices[..., :1]).all()), bool((slices == slices[:, :1]).all())
    if not outputs and not inputs:
        return None
    flat = (slices[..., 0] if outputs else slices[:, 0]).flatten()
    after = int((flat == flat[0]).int().cumprod(0).sum())
    before, rest = divmod(len(flat), count * after) if count > 1 else (1, 0)
    wanted = torch.arange(count, dtype=flat.dtype).repeat_interleave(after).repeat(before)
    return (OUTPUTS if outputs else INPUTS, (before, after)) if not rest and torch.equal(flat, wanted) else None


def reads_ids(use: Use) -> bool:
    value = use.input.meta.get("val")
    return use.layer == "embedding" or (isinstance(value, Tensor) and not has_gradient(use.input))


EXAMPLES = {
    "gain": WeightExample(lambda w, e: w * e.exp(), {"w": (4, 4), "e": (4, 1)}),
}
