"""The matrix of a layer: how parameters are laid out in it, and the products of rows that its statistics are sums of.

Every layer is, group by group, a matrix times rows: `y = W r`, with `W` of shape [g, o, i] (groups, outputs, inputs)
and the bias, if any, as one more input column that is always 1. A `Layout` says how one parameter is laid out in that
matrix; a `MatrixForm` collects the roles of a registration. Both are plain data.

Products of rows are exact in float32. A product of two numbers of float16 or bfloat16 fits into float32 without
rounding, and a GPU multiplies such numbers as they are and adds up in float32, in a fraction of the time that the same
rows take in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from .errors import LayerError
from .torch_private import is_batched

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One invertible view: a permutation of dimensions if `order` is set, else a reshape."""

    before: Shape
    after: Shape
    order: Shape | None = None
    back: Shape | None = field(init=False, repr=False, compare=False, default=None)  # the inverse of `order`

    def __post_init__(self) -> None:
        if self.order is not None:  # here, since Dynamo does not sort
            back = tuple(sorted(range(len(self.order)), key=self.order.__getitem__))
            object.__setattr__(self, "back", back)

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self.order) if self.order is not None else tensor.reshape(self.after)

    def invert(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.before) if self.back is None else tensor.permute(self.back)


@dataclass(frozen=True)
class Layout:
    """A chain of invertible views from the shape a parameter is stored in to the shape it is wanted in."""

    shape: Shape
    steps: tuple[Step, ...] = ()

    @property
    def result(self) -> Shape:
        return self.steps[-1].after if self.steps else self.shape

    def apply(self, tensor: Tensor) -> Tensor:
        for step in self.steps:
            tensor = step.apply(tensor)
        return tensor

    def invert(self, tensor: Tensor) -> Tensor:
        for step in reversed(self.steps):
            tensor = step.invert(tensor)
        return tensor

    def reshape(self, shape: Shape) -> Layout:
        if math.prod(shape) != math.prod(self.result):
            raise LayerError(f"a parameter of shape {list(self.result)} cannot be laid out as {list(shape)}")
        if shape == self.result:
            return self
        return Layout(self.shape, (*self.steps, Step(self.result, shape)))

    def permute(self, order: Shape) -> Layout:
        if list(order) == list(range(len(order))):
            return self
        after = tuple(self.result[d] for d in order)
        return Layout(self.shape, (*self.steps, Step(self.result, after, order)))

    def rearrange(self, pattern: str, **sizes: int) -> Layout:
        """`Layout((6, 2, 3, 3)).rearrange("(g o) c h w -> g o (c h w)", g=2)`: a view in named axes.

        Parentheses split an axis on the left and merge axes on the right; `1` and `()` are an axis of size 1.
        Raises LayerError if the pattern does not fit the shape.
        """
        left, right = (named_axes(side) for side in pattern.partition("->")[::2])
        before, after = [name for axis in left for name in axis], [name for axis in right for name in axis]
        if sorted(before) != sorted(after) or len(set(before)) < len(before):
            raise LayerError(f"layout {pattern!r} must name the same axes on both sides, each once")
        if len(left) != len(self.result):
            raise LayerError(f"layout {pattern!r} has {len(left)} axes, the parameter has shape {list(self.result)}")
        size: dict[str, int] = {}
        for axis, whole in zip(left, self.result, strict=True):
            rest, over = divmod(whole, math.prod(sizes.get(name, 1) for name in axis))
            unknown = sum(name not in sizes for name in axis)
            if over or unknown > 1 or (unknown == 0 and rest != 1):
                raise LayerError(f"layout {pattern!r} with {sizes} does not fit shape {list(self.result)}")
            size |= {name: sizes.get(name, rest) for name in axis}
        split = self.reshape(tuple(size[name] for name in before))
        ordered = split.permute(tuple(before.index(name) for name in after))
        return ordered.reshape(tuple(math.prod(size[name] for name in axis) for axis in right))

    def in_pairs(self) -> Layout:
        """The layout of pairs of numbers, on one more dimension: the real and imaginary parts of complex numbers."""

        def of_pairs(step: Step) -> Step:
            order = None if step.order is None else (*step.order, len(step.order))
            return Step((*step.before, 2), (*step.after, 2), order)

        return Layout((*self.shape, 2), tuple(map(of_pairs, self.steps)))

    def cut(self, dim: int, rows: int) -> tuple[Layout, int] | None:
        """The layout of `rows` of the parameter along `dim`, and the dimension of the result in which they are; None if
        a step merges or splits that dimension."""
        part = Layout((*self.shape[:dim], rows, *self.shape[dim + 1 :]))
        for step in self.steps:
            if step.order is not None:
                part, dim = part.permute(step.order), step.order.index(dim)
                continue
            whole = math.prod(step.before[:dim]), step.before[dim]
            same = [d for d, size in enumerate(step.after) if (math.prod(step.after[:d]), size) == whole]
            if not same:
                return None
            dim = same[0]
            part = part.reshape((*step.after[:dim], rows, *step.after[dim + 1 :]))
        return part, dim


@lru_cache(maxsize=1000)
def named_axes(side: str) -> tuple[tuple[str, ...], ...]:
    """`"(g o) c 1"` -> `(("g", "o"), ("c",), ())`."""
    axes = re.findall(r"\(([^)]*)\)|(\S+)", side)
    return tuple(tuple(name for name in (merged or single).split() if name != "1") for merged, single in axes)


@dataclass(frozen=True)
class MatrixForm:
    """The parameters of a registration as one matrix [g, o, i] or, with a bias, [g, o, i + 1].

    `weight` is None for a layer that only shifts (its matrix is the bias alone, one column).
    Each entry is (parameter name, layout to [g, o, i] for the weight, to [g, o] for the bias).
    """

    weight: tuple[str, Layout] | None
    bias: tuple[str, Layout] | None

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(entry[0] for entry in (self.weight, self.bias) if entry is not None)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the parameters, by name."""
        return {name: layout.shape for name, layout in (entry for entry in (self.weight, self.bias) if entry)}

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, outputs, inputs); inputs count the bias column."""
        bias = 0 if self.bias is None else 1
        if self.weight is None:
            assert self.bias is not None, "bug in kfac_fx: a matrix form without parameters"
            g, o = self.bias[1].result
            return g, o, 1
        g, o, i = self.weight[1].result
        return g, o, i + bias

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Parameter-shaped tensors (values, gradients, vectors) -> [g, o, i]; the bias is the last column."""
        if self.bias is None:
            assert self.weight is not None, "bug in kfac_fx: a matrix form without parameters"
            return self.weight[1].apply(tensors[self.weight[0]])
        column = self.bias[1].apply(tensors[self.bias[0]]).unsqueeze(-1)
        if self.weight is None:
            return column
        return torch.cat([self.weight[1].apply(tensors[self.weight[0]]), column], dim=-1)

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        """[g, o, i] -> parameter-shaped tensors by name; the inverse of `pack`."""
        tensors: dict[str, Tensor] = {}
        if self.weight is not None:
            body = matrix if self.bias is None else matrix[..., :-1]
            tensors[self.weight[0]] = self.weight[1].invert(body)
        if self.bias is not None:
            tensors[self.bias[0]] = self.bias[1].invert(matrix[..., -1])
        return tensors


@dataclass(frozen=True)
class StackedParameters:
    """The weights, or the biases, of forms that are alike.

    Attributes:
        common: the layout of all of them if it only reshapes, so that one reshape of their stack serves all.
    """

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    common: Layout | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        first = self.layouts[0]
        reshapes = all(step.order is None for step in first.steps)
        common = first if reshapes and all(layout == first for layout in self.layouts) else None
        object.__setattr__(self, "common", common)

    @staticmethod
    def of(parameters: Sequence[tuple[str, Layout]]) -> StackedParameters | None:
        """None if there are no such parameters."""
        return StackedParameters(*zip(*parameters, strict=True)) if parameters else None

    def __getitem__(self, members: slice) -> StackedParameters:
        return StackedParameters(self.names[members], self.layouts[members])

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Parameter-shaped tensors -> [forms, *result of the layout]; what is copied, is copied for all at once."""
        if self.common is not None:
            stack = stacked([tensors[name] for name in self.names])
            return stack.reshape(len(self.names), *self.common.result)
        return stacked([layout.apply(tensors[name]) for name, layout in zip(self.names, self.layouts, strict=True)])

    def unpack(self, stack: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`, in views."""
        if self.common is not None:
            return dict(zip(self.names, stack.reshape(len(self.names), *self.common.shape).unbind(), strict=True))
        each = zip(self.names, self.layouts, stack.unbind(), strict=True)
        return {name: layout.invert(tensor) for name, layout, tensor in each}


@dataclass(frozen=True)
class AlikeForms:
    """Forms of matrices of one shape, all with a weight or all without, and all with a bias or all without."""

    weights: StackedParameters | None
    biases: StackedParameters | None

    @staticmethod
    def of(forms: Sequence[object]) -> AlikeForms | None:
        """None for forms that are not alike."""
        matrices = [form for form in forms if isinstance(form, MatrixForm)]
        kinds = {(form.weight is None, form.bias is None) for form in matrices}
        if len(matrices) != len(forms) or len(kinds) != 1:
            return None
        weights = [form.weight for form in matrices if form.weight is not None]
        biases = [form.bias for form in matrices if form.bias is not None]
        return AlikeForms(StackedParameters.of(weights), StackedParameters.of(biases))

    def __getitem__(self, members: slice) -> AlikeForms:
        """Some of the forms."""
        if members == slice(None):
            return self
        return AlikeForms(self.weights and self.weights[members], self.biases and self.biases[members])

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """`pack` of all forms: [forms, g, o, i]."""
        parts = [] if self.weights is None else [self.weights.pack(tensors)]
        if self.biases is not None:
            parts.append(self.biases.pack(tensors).unsqueeze(-1))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    @property
    def both(self) -> bool:
        """Whether the forms have weights and biases."""
        return self.weights is not None and self.biases is not None

    def unpack(self, matrices: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`, in views."""
        bodies = matrices if self.biases is None else matrices[..., :-1]
        return self.unpack_apart(bodies, matrices[..., -1])

    def unpack_apart(self, weights: Tensor, biases: Tensor) -> dict[str, Tensor]:
        """From weights [forms, g, o, i] and biases [forms, g, o]: parameter-shaped tensors by name, in views."""
        tensors = {} if self.weights is None else self.weights.unpack(weights)
        return tensors if self.biases is None else tensors | self.biases.unpack(biases)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Without a copy if there is only one."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def block_width(width: int, blocks: int) -> int:
    """The width of each diagonal block of a side; the last one may be narrower."""
    return -(-width // blocks)


# --- complex parameters -----------------------------------------------------------------------------------------------


def real_numbers(tensor: Tensor) -> Tensor:
    """The tensor, or the real and imaginary parts of a complex one, on one more axis."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def real_parameters(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Parameters by name, and the real and imaginary parts of complex ones."""
    return {name: real_numbers(parameter) for name, parameter in named}


def complex_numbers(tensor: Tensor, like: Tensor) -> Tensor:
    """The inverse of `real_numbers` if `like` is complex."""
    return torch.view_as_complex(tensor) if like.is_complex() and not tensor.is_complex() else tensor


# --- sums of products of rows -----------------------------------------------------------------------------------------


HALVES = (torch.float16, torch.bfloat16)


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, also under autocast."""
    if tensor.dtype is torch.float32:
        return tensor
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Around sums that autocast must not round. To enter a context of autocast takes longer than to ask for it."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()


def has_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device. "meta" has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_n l_n r_nᵀ in every group, in at least float32: columns [g, a, n] and [g, b, n] -> [g, a, b]."""
    if len(left) == 1:  # `bmm` with one matrix is slower than `mm` on some devices
        return products_of_columns(left[0], right[0]).unsqueeze(0)
    if multiplied_as_they_are(left, right):
        return torch.bmm(left, right.mT, torch.float32)
    return precise(left) @ precise(right).mT


def products_of_columns(left: Tensor, right: Tensor) -> Tensor:
    """As `row_products`, of one group: columns [a, n] and [b, n] -> [a, b]."""
    if multiplied_as_they_are(left, right):
        return torch.mm(left, right.mT, torch.float32)
    return precise(left) @ precise(right).mT


def multiplied_as_they_are(left: Tensor, right: Tensor) -> bool:
    """Whether torch has a product of these columns that adds up in float32: of halves, on CUDA, without vmap."""
    halves = left.is_cuda and left.dtype == right.dtype and left.dtype in HALVES
    return halves and (torch.compiler.is_compiling() or not is_batched(left, right))
