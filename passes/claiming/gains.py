"""What functions between a parameter and its use multiply, outputs or inputs of its matrix; and the gains among them,
each a layer of its own.

    conv1d(x, g v / |v|)          g for every filter: outputs
    conv_transpose1d(x, ...)      g for every channel of the input, as torch counts them: inputs, [1, channels, kernel]
    conv1d(x, ..., dim=2)         g for every place in the kernel: inputs, [channels, kernel, 1]
    linear(x, a * exp(e))         exp(e) for every output, and e behind a function of every element
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..graphs.labels import has_gradient
from ..ir import Bound, Use
from ..matrix import Layout, Shape
from ..words.pieces import Slope
from ..words.slopes import CENTERED, SLICED, STANDARDIZED
from ..words.uses import Gain


def side_of(slopes: Sequence[Slope], sizes: Sequence[int], constant: Callable[[int, int], bool]) -> str | None:
    """Whether what the slopes multiply varies along outputs only, or along inputs only; None if along both.

    sizes: of the matrix [g, o, i]. constant: of a dimension of the parameter, whether one step along an axis of the
    matrix stays in the same slice along it.
    """
    g, o, i = sizes
    dims = [dim_of(one) for one in slopes if one.name in SLICED]
    if dims:
        whole = dims[0] is None or dims[0] < 0
        outputs = whole or constant(dims[0] or 0, 2)
        centered = any(one.name in (CENTERED, STANDARDIZED) for one in slopes)  # takes the mean of all inputs off
        if centered and slopes[0].layout.shape[0] != g * o:
            return None  # a filter is not what one output computes
        inputs = not centered and constant(dims[0] or 0, 1)  # groups have inputs of their own
    else:
        outputs, inputs = i == 1, g * o == 1
    return "outputs" if outputs else "inputs" if inputs else None


def dim_of(slope: Slope) -> int | None:
    """Along which its slices are counted; None or -1 if there is one."""
    dim: int | None = 0 if slope.name == STANDARDIZED else slope.settings[0]
    return dim


def with_slopes(use: Use, slopes: tuple[Slope, ...], side: str | None) -> Use:
    """What the tap needs beside the input: arguments of the functions, and the gains."""
    if not slopes:
        return use
    nodes = {f"operand{n}": one.operand for n, one in enumerate(slopes)}
    nodes |= {f"factor{n}": one.factor for n, one in enumerate(slopes) if one.factor is not None}
    return replace(use, attrs={**use.attrs, **nodes}, slopes=slopes, slope_side=side)


def gains_of(use: Use, shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """Beside the use of a normalized weight that of its gain, if there is one for every slice in their order."""
    (bound,) = use.parameters.values()
    found = next((one for one in use.slopes if one.gain is not None), None)
    if found is None or found.gain is None:
        return
    dim, shape = dim_of(found), bound.layout.shape
    slices = 1 if dim is None or dim < 0 else shape[dim]
    place = repeats(numbers(bound.layout, dim), slices)
    own = shapes[found.gain.parameter]
    if place is None or math.prod(own) != slices:
        return
    side, around = place
    gain = Gain(found, bound.layout, side, around, reads_ids(use))
    matrix = (1, 1, slices) if gain.ids and side == "inputs" else (slices, 1, 1)
    weight = Bound(found.gain.parameter, Layout(own), Layout(own).reshape(matrix), found.gain.scale * bound.scale)
    kept = {name: value for name, value in use.attrs.items() if not name.startswith(("operand", "factor"))}
    attrs = {**kept, "filters": found.operand}
    use = replace(use, parameters={"weight": weight}, attrs=attrs, slopes=(), slope_side=None, gain_of=gain)
    yield with_slopes(use, found.gain.slopes, "outputs" if matrix[0] == slices else "inputs")


def numbers(layout: Layout, dim: int | None) -> Tensor:
    """The number of the slice that every element of a matrix [g, o, i] is in."""
    sizes = [1] * len(layout.shape)
    if dim is None or dim < 0:
        return layout.apply(torch.zeros(sizes, dtype=torch.int32).expand(layout.shape))
    sizes[dim] = layout.shape[dim]
    return layout.apply(torch.arange(layout.shape[dim], dtype=torch.int32).view(sizes).expand(layout.shape))


def constant_in(layout: Layout) -> Callable[[int, int], bool]:
    """For `side_of`, of a whole parameter: found by trying, since the matrix may be no view of it."""

    def constant(dim: int, axis: int) -> bool:
        slices = numbers(layout, dim)
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
    return ("outputs" if outputs else "inputs", (before, after)) if not rest and torch.equal(flat, wanted) else None


def reads_ids(use: Use) -> bool:
    value = use.input.meta.get("val")
    return use.layer == "embedding" or (isinstance(value, Tensor) and not has_gradient(use.input))
