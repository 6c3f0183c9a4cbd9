"""Parameters that reach their use in slices, and uses that are put together from several parameters.

    linear(x, w[:4])                                 a part of w in another order, perhaps
    linear(x, w, torch.cat([q, zeros, v]))           two parts of the layer's matrix [g, o, i]
    linear(x, 1 - 0.5 * w)                           a multiple, which is the bound parameter's `scale`

A use is taken apart along its matrix: outputs that are a parameter's own have gradient rows of their own, inputs have
rows, and groups have both. So each part is a use of the same layer on a region of its matrix, and exact.

The functions below follow such values through a graph. Nothing is computed: a slice of a parameter is a view of a
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
from ..parametrization import Parametrization, Rows, RowsStep
from ..pieces import Box, Made, Region, Slab, narrowed, slab_of, view_of, whole
from ..registration import Use


@dataclass(frozen=True)
class Sliced(Parametrization):
    """The parameters of the use are a region of the layer's matrix: (start, stop) of groups, outputs and inputs."""

    region: Region

    def step(self) -> RowsStep:
        region = self.region
        return lambda both, tensors: within(*both, region)

    @property
    def keeps_elements(self) -> bool:
        return True


def within(rows: Tensor, grad_rows: Tensor, region: Region) -> Rows:
    """What of the rows belongs to a part of the matrix: its groups and inputs, and its groups and outputs."""
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


def called(node: fx.Node, args: Any) -> Any:
    return computed(node, args, node.kwargs)


def without_data(arguments: Any, known: Mapping[fx.Node, Any]) -> Any:
    """Arguments with the values of their nodes; those that are tensors have shapes only."""

    def value_of(node: fx.Node) -> Any:
        value = known[node]
        return whole(value.shape) if isinstance(value, Made) else value

    return fx.map_arg(arguments, value_of)


def is_one_slab(value: Made) -> bool:
    return len(value.slabs) == 1 and value.slabs[0].shape == value.shape and not value.products


def made_of(view: Tensor, slab: Slab) -> Made:
    """A view of a slab. Raises ValueError where elements are repeated."""
    if any(size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)):
        raise ValueError
    return Made(tuple(view.shape), (slab_of(slab.parameter, view, slab.scale, slab.slopes),))


def part_of(value: Made, view: Tensor) -> Made | None:
    """What a view of all of a value, of `whole(value.shape)`, shows; None if it is no box of it."""
    rest, box = int(view.storage_offset()), list[tuple[int, int]]()
    kept: list[int] = []
    for dim, step in enumerate(whole(value.shape).stride()):
        start, rest = divmod(rest, step)
        shown = len(kept) < view.dim() and view.stride(len(kept)) == step
        box.append((start, start + int(view.shape[len(kept)]) if shown else start + 1))
        kept += [dim] if shown else []
    if len(kept) < view.dim() or any(stop > size for (_, stop), size in zip(box, value.shape, strict=True)):
        return None
    slabs = [slab for slab in (cropped(one, tuple(box), kept) for one in value.slabs) if slab is not None]
    return Made(tuple(view.shape), tuple(slabs))


def cropped(slab: Slab, box: Box, kept: list[int]) -> Slab | None:
    """What of a slab is in a box, in coordinates of the box's dimensions that are kept; None if nothing is."""
    for dim, (start, stop) in enumerate(box):
        first, last = max(start, slab.box[dim][0]), min(stop, slab.box[dim][1])
        if first >= last:
            return None
        slab = narrowed(slab, dim, first, last)
    inside = tuple((slab.box[dim][0] - box[dim][0], slab.box[dim][1] - box[dim][0]) for dim in kept)
    return replace(slab, box=inside, strides=tuple(slab.strides[dim] for dim in kept))


def scaled(value: Made | None, by: float | None) -> Made | None:
    if value is None or by is None:
        return None
    slabs = tuple(replace(slab, scale=by * slab.scale) for slab in value.slabs)
    return Made(value.shape, slabs, tuple(replace(one, scale=by * one.scale) for one in value.products))


def factor(name: str, node: fx.Node) -> float | None:
    """Of a product with a number; None for another product."""
    if name == "neg":
        return -1.0
    by = node.args[1]
    if node.kwargs or not isinstance(by, (int, float)) or by == 0:
        return None
    return 1.0 / by if name == "div" else float(by)


def unsqueezed(value: Made, dim: int) -> Made:
    dim = dim % (len(value.shape) + 1)
    slabs = [view_of(slab).unsqueeze(dim).stride() for slab in value.slabs]
    boxes = [(*slab.box[:dim], (0, 1), *slab.box[dim:]) for slab in value.slabs]
    new = [replace(old, box=box, strides=by) for old, box, by in zip(value.slabs, boxes, slabs, strict=True)]
    return Made((*value.shape[:dim], 1, *value.shape[dim:]), tuple(new))


def joined(parts: Sequence[Made], dim: int) -> Made | None:
    """One behind the other; None where all are constants."""
    shape, at = parts[0].shape, 0
    dim %= len(shape)
    slabs: list[Slab] = []
    for one in parts:
        slabs += [replace(slab, box=moved(slab.box, dim, at)) for slab in one.slabs]
        at += one.shape[dim]
    return Made((*shape[:dim], at, *shape[dim + 1 :]), tuple(slabs)) if slabs else None


def permuted(slab: Slab, order: Shape) -> Slab:
    return replace(slab, box=tuple(slab.box[d] for d in order), strides=tuple(slab.strides[d] for d in order))


def moved(box: Box, dim: int, by: int) -> Box:
    start, stop = box[dim]
    return (*box[:dim], (start + by, stop + by), *box[dim + 1 :])


def dims_after(node: fx.Node, dims: int, rest: Any) -> Shape:
    """The order that a permuting node leaves the dimensions in."""
    distinct = whole(tuple(range(2, dims + 2)))
    return tuple(int(size) - 2 for size in called(node, (distinct, *rest)).shape)


def basic(index: Any) -> bool:
    """Whether an index makes a view."""
    return all(one is None or one is ... or isinstance(one, (int, slice, fx.Node)) for one in as_tuple(index))


def as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
