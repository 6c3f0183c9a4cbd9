"""Parameters that reach their use in slices, and uses that are put together from several parameters.

    linear(x, w[:4])                                 a part of w in another order, perhaps
    linear(x, w, torch.cat([q, zeros, v]))           two parts of the layer's matrix [g, o, i]
    linear(x, 1 - 0.5 * w)                           a multiple, which is the bound parameter's `scale`

A use is taken apart along its matrix: outputs that are a parameter's own have gradient rows of their own, inputs have
rows, and groups have both. So each part is a use of the same layer on a region of its matrix, and exact.

The functions below follow such values through a graph. No values are computed: a slice of a parameter is a view of a
tensor without data, whose strides say which elements it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..graphs.operations import computed
from ..matrix import Shape
from ..parametrization import Parametrization, RowPair, RowsStep, WeightExample
from ..pieces import Box, ParameterExpr, Region, Slice, narrowed_slice, slice_of, unallocated, view_of
from ..registration import Use

JOINS = {"cat", "concat", "concatenate", "stack"}


@dataclass(frozen=True)
class Sliced(Parametrization):
    """The parameters of the use are a region of the layer's matrix: (start, stop) of groups, outputs and inputs."""

    keeps_elements = True

    region: Region

    def step(self) -> RowsStep:
        region = self.region
        return lambda both, tensors: in_region(*both, region)


def in_region(rows: Tensor, grad_rows: Tensor, region: Region) -> RowPair:
    """The rows and gradient rows that belong to a part of the matrix: its groups and inputs, its groups and outputs."""
    groups, outputs, inputs = (slice(*ends) for ends in region)
    grad_rows = grad_rows[:, :, groups, outputs] if grad_rows.dim() == 4 else grad_rows[..., outputs]
    if rows.is_floating_point():
        return rows[:, :, groups, inputs] if rows.dim() == 4 else rows[..., inputs], grad_rows
    inside = (rows >= inputs.start) & (rows < inputs.stop)
    return torch.where(inside, rows - inputs.start, -1), grad_rows


def region_of(use: Use) -> Region | None:
    """The region of the layer's matrix that a use has; None if it has all of it."""
    return next((step.region for step in use.through if isinstance(step, Sliced)), None)


# --- values in a graph ------------------------------------------------------------------------------------------------


def applied_to(node: fx.Node, args: Any) -> Any:
    return computed(node, args, node.kwargs)


def without_data(arguments: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Arguments with the values of their nodes; those that are tensors have shapes only.

    Raises ValueError for a node whose value is not known.
    """

    def value_of(node: fx.Node) -> Any:
        if node not in values:
            raise ValueError(f"{node} has no value")
        value = values[node]
        return unallocated(value.shape) if isinstance(value, ParameterExpr) else value

    return fx.map_arg(arguments, value_of)


def is_one_slice(value: ParameterExpr) -> bool:
    return len(value.slices) == 1 and value.slices[0].shape == value.shape and not value.products


def expr_of(view: Tensor, slice_: Slice) -> ParameterExpr:
    """A view of a slice. Raises ValueError where elements are repeated."""
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)):
        raise ValueError
    return ParameterExpr(tuple(view.shape), (slice_of(slice_.parameter, view, slice_.scale, slice_.through),))


def seen_part(value: ParameterExpr, view: Tensor) -> ParameterExpr | None:
    """The part of a value that a view of `unallocated(value.shape)` shows; None if it is no box of it."""
    rest, box = int(view.storage_offset()), list[tuple[int, int]]()
    dims: list[int] = []
    for dim, step in enumerate(unallocated(value.shape).stride()):
        start, rest = divmod(rest, step)
        shown = len(dims) < view.dim() and view.stride(len(dims)) == step
        box.append((start, start + int(view.shape[len(dims)]) if shown else start + 1))
        dims += [dim] if shown else []
    if len(dims) < view.dim() or any(stop > size for (_, stop), size in zip(box, value.shape, strict=True)):
        return None
    slices = (cropped(slice_, tuple(box), dims) for slice_ in value.slices)
    return ParameterExpr(tuple(view.shape), tuple(slice_ for slice_ in slices if slice_ is not None))


def cropped(slice_: Slice, box: Box, dims: list[int]) -> Slice | None:
    """The elements of a slice in a box, in coordinates of the box's dimensions `kept`; None if there are none."""
    for dim, (start, stop) in enumerate(box):
        first, last = max(start, slice_.box[dim][0]), min(stop, slice_.box[dim][1])
        if first >= last:
            return None
        slice_ = narrowed_slice(slice_, dim, first, last)
    inside = tuple((slice_.box[dim][0] - box[dim][0], slice_.box[dim][1] - box[dim][0]) for dim in dims)
    return replace(slice_, box=inside, strides=tuple(slice_.strides[dim] for dim in dims))


def multiple_of(value: ParameterExpr | None, by: float | None) -> ParameterExpr | None:
    if value is None or by is None:
        return None
    slices = tuple(replace(slice_, scale=by * slice_.scale) for slice_ in value.slices)
    return ParameterExpr(
        value.shape, slices, tuple(replace(product, scale=by * product.scale) for product in value.products)
    )


def factor(name: str, node: fx.Node) -> float | None:
    """The number that a product multiplies with; None for a product with something else."""
    if name == "neg":
        return -1.0
    by = node.args[1]
    if node.kwargs or not isinstance(by, (int, float)) or by == 0:
        return None
    return 1.0 / by if name == "div" else float(by)


def unsqueezed(value: ParameterExpr, dim: int) -> ParameterExpr:
    dim = dim % (len(value.shape) + 1)
    slices = tuple(
        replace(
            slice_, box=(*slice_.box[:dim], (0, 1), *slice_.box[dim:]), strides=view_of(slice_).unsqueeze(dim).stride()
        )
        for slice_ in value.slices
    )
    return ParameterExpr((*value.shape[:dim], 1, *value.shape[dim:]), slices)


def concatenated(parts: Sequence[ParameterExpr], dim: int) -> ParameterExpr | None:
    """Concatenated along `dim`; None where all are constants."""
    shape, at = parts[0].shape, 0
    dim %= len(shape)
    slices: list[Slice] = []
    for part in parts:
        slices += [replace(slice_, box=moved_box(slice_.box, dim, at)) for slice_ in part.slices]
        at += part.shape[dim]
    return ParameterExpr((*shape[:dim], at, *shape[dim + 1 :]), tuple(slices)) if slices else None


def permuted(slice_: Slice, order: Shape) -> Slice:
    return replace(slice_, box=tuple(slice_.box[d] for d in order), strides=tuple(slice_.strides[d] for d in order))


def moved_box(box: Box, dim: int, by: int) -> Box:
    start, stop = box[dim]
    return (*box[:dim], (start + by, stop + by), *box[dim + 1 :])


def basic(index: Any) -> bool:
    """Whether an index makes a view."""
    items = index if isinstance(index, tuple) else (index,)
    return all(item is None or item is ... or isinstance(item, (int, slice, fx.Node)) for item in items)


EXAMPLES = {
    "slices": WeightExample(lambda w, v: torch.cat([w[1:], v]), {"w": (4, 4), "v": (1, 4)}),
    "multiple": WeightExample(lambda w: 1 - 0.3 * w, {"w": (4, 4)}),
}
