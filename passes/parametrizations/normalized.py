"""Weights that are normalized, or multiplied slice by slice, and the gains that multiply them.

    conv2d(x, batch_norm(v, weight=γ))   W = γ (v - mean v) / √(var v + ε), filter by filter (Qiao et al. 2019)
    conv2d(x, (v - mean v) / σ(v))       the same without batch_norm, with any σ, which may multiply instead
    conv1d(x, weight_norm(v, g))         W = g v / |v|, weight normalization (Salimans and Kingma 2016)
    linear(x, v / σ(v))                  spectral normalization (Miyato et al. 2018), cosine classifiers: one number for
                                         all of v, or one for every slice, however it is computed
    linear(x, a * e), linear(x, a / e)   a number of another parameter for every slice (AdaLoRA, Zhang et al. 2023)

Let D be the gradient of W. The gradient of v is s C D + remainder. Here s = γ / √(var v + ε), g / |v| or 1 / σ
multiplies each slice, and C takes the mean off each filter (standardization only). Both belong to one side of the
matrix, so a Kronecker product has them. The remainder is the change of σ with v, of rank one in every slice or
in all of v. A Kronecker product does not have it: the block leaves it out, the report says so, and the numeric proof
adds it. The gradient of a in W = a e is e D, and nothing is left out.

The gain, γ, g or e, is a layer of its own, see `parts`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..graphs.operations import EXPANDS, VIEWS, op_name
from ..matrix import Layout, Shape
from ..parametrization import (
    INPUTS,
    OUTPUTS,
    NodeValues,
    ParameterExpr,
    Piece,
    RowPair,
    RowsStep,
    Slice,
    WeightExample,
    is_one_slice,
    layout_in,
    unallocated,
    view_of,
    viewed,
)
from ..torch_private import WEIGHT_NORM, weight_normalized
from .functions import Constant, Derivative, Diagonal

PROJECTION = "its filters are normalized: without the projection of their gradients that this makes"
CHANGE = "it is divided by a function of itself: without the change of that, which is of rank one"
SPREADS = {"var_mean", "std_mean"}
OTHERWISE = -1  # instead of a dimension


# --- functions slice by slice -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BySlice(Diagonal):
    """A function that multiplies every slice of a weight along `dim` by a number; None: all of it is one slice."""

    dim: int | None

    def sides(self, sizes: Sequence[int], constant: Constant) -> set[str]:
        if self.dim is None:
            return {OUTPUTS, INPUTS}
        return {side for side, axis in ((OUTPUTS, 2), (INPUTS, 1)) if constant(self.dim, axis)}


@dataclass(frozen=True)
class Scaled(BySlice):
    """`v * e` or `v / e`, with a factor e that does not depend on v, or e itself with a gain.

    factor: the node of e.
    gain: the parameter that the factor, or 1 / e, is in its own order, perhaps behind element functions; or None.
    """

    factor: fx.Node
    divides: bool
    gain: Slice | None = None

    def derivative(self) -> Derivative:
        divides = self.divides
        return lambda tensors: by_number(tensors["operand"], tensors["factor"], divides)

    def filters(self) -> Callable[[Tensor], Tensor]:
        """From the operand to the filters that the gain multiplies."""
        return lambda value: value


def by_number(value: Tensor, number: Tensor, divides: bool) -> Tensor:
    return (1 / number if divides else number).expand_as(value)


@dataclass(frozen=True)
class Centered(BySlice):
    """`v - mean v`, of every filter."""

    def derivative(self) -> Derivative:
        return lambda tensors: torch.ones_like(tensors["operand"])

    def sides(self, sizes: Sequence[int], constant: Constant) -> set[str]:
        return of_filters(self, sizes, constant)

    def step(self) -> RowsStep:
        return lambda both, tensors: (without_mean(both[0]), both[1])


def of_filters(step: BySlice, sizes: Sequence[int], constant: Constant) -> set[str]:
    """Where the mean of a filter is that of the inputs of one output."""
    g, o, _ = sizes
    return {OUTPUTS} if step.layout.shape[0] == g * o and constant(0, 2) else set()


def without_mean(rows: Tensor) -> Tensor:
    return rows - rows.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Normalized(BySlice):
    """A weight divided by, or multiplied with, a number σ of its own. The rows contain σ, but not its derivative."""

    left_out = PROJECTION

    @property
    def sign(self) -> float:
        """The sign of the change of σ in the gradient: W falls as σ grows."""
        return -1.0

    @abstractmethod
    def number(self, tensors: NodeValues) -> Tensor:
        """σ, of a shape that broadcasts with the operand's."""

    def remainder(self, gradient: Tensor, tensors: NodeValues) -> Tensor:
        """W = u(v) / σ(v) has ∂L/∂σ = -⟨∂L/∂W, u⟩ / σ². The rows make ∂L/∂W / σ, or that without its mean; of this
        ⟨·, u⟩ is ⟨·, v⟩. If σ multiplies, the sign is positive."""
        with torch.enable_grad():
            number = self.number(tensors)
            products = self.layout.apply(gradient) * tensors["operand"].detach() / number.detach()
            return self.sign * (number * products.sum_to_size(number.shape).to(number)).sum()


@dataclass(frozen=True)
class OwnNumber(Normalized):
    """`v / σ` or `v * σ`, with σ a function of v: one number, or one for every slice. sigma: its node."""

    left_out = CHANGE

    sigma: fx.Node
    divides: bool

    @property
    def sign(self) -> float:
        return -1.0 if self.divides else 1.0

    def derivative(self) -> Derivative:
        divides = self.divides
        return lambda tensors: by_number(tensors["operand"], tensors["sigma"], divides)

    def number(self, tensors: NodeValues) -> Tensor:
        return tensors["sigma"]


@dataclass(frozen=True)
class WeightNorm(Normalized):
    """`_weight_norm(v, g, dim)`. factor, gain: see `Scaled`."""

    factor: fx.Node
    gain: Slice | None = None

    def derivative(self) -> Derivative:
        dim = self.dim

        def derivative(tensors: NodeValues) -> Tensor:
            value = tensors["operand"]
            by = 1 / length(value, dim)
            return (by * tensors["factor"].reshape(by.shape)).expand_as(value)

        return derivative

    def number(self, tensors: NodeValues) -> Tensor:
        return length(tensors["operand"], self.dim)

    def filters(self) -> Callable[[Tensor], Tensor]:
        dim = self.dim
        return lambda value: value / length(value, dim)


def length(value: Tensor, dim: int | None) -> Tensor:
    """|v| of every slice along `dim`."""
    others = [other for other in range(value.dim()) if other != dim]
    norms: Tensor = torch.linalg.vector_norm(value, dim=others, keepdim=True)
    return norms


@dataclass(frozen=True)
class Standardized(Normalized):
    """`batch_norm(v.reshape(1, o, -1), weight=γ)`. factor, gain: see `Scaled`; None without γ."""

    eps: float
    factor: fx.Node | None
    gain: Slice | None = None

    def derivative(self) -> Derivative:
        eps, bare = self.eps, self.factor is None

        def derivative(tensors: NodeValues) -> Tensor:
            value = tensors["operand"]
            by = 1 / deviation(value, eps)
            return (by if bare else by * tensors["factor"].reshape(by.shape)).expand_as(value)

        return derivative

    def sides(self, sizes: Sequence[int], constant: Constant) -> set[str]:
        return of_filters(self, sizes, constant)

    def step(self) -> RowsStep:
        scale = super().step()

        def step(both: RowPair, tensors: NodeValues) -> RowPair:
            rows, grad_rows = scale(both, tensors)
            return without_mean(rows), grad_rows

        return step

    def number(self, tensors: NodeValues) -> Tensor:
        return deviation(tensors["operand"], self.eps)

    def filters(self) -> Callable[[Tensor], Tensor]:
        eps = self.eps
        return lambda value: (value - value.mean((0, 2), keepdim=True)) / deviation(value, eps)


def deviation(value: Tensor, eps: float) -> Tensor:
    """√(var v + ε) of every filter of [1, filters, elements]."""
    return (value.var((0, 2), unbiased=False, keepdim=True) + eps).sqrt()


WithGain = Scaled | WeightNorm | Standardized


# --- in a graph -------------------------------------------------------------------------------------------------------


def laid_out(value: ParameterExpr, shape: Shape) -> Layout | None:
    """From a parameter of `shape` to a value that is all of it and may have one more function; else None."""
    if not is_one_slice(value) or any(isinstance(step, BySlice) for step in value.slices[0].through):
        return None
    (slice_,) = value.slices
    return layout_in(Piece(slice_.parameter, 0, 0, *shape[:1] or (1,)), shape, view_of(slice_))


def standardized(node: fx.Node, operand: fx.Node, layout: Layout) -> Standardized | None:
    """`batch_norm(v.reshape(1, o, -1), weight=γ)`, of a weight whose first dimension counts filters."""
    _, mean, var, gain, shift, training, _, eps = node.args
    filters = bool(layout.shape) and layout.result == (1, layout.shape[0], math.prod(layout.shape[1:]))
    if not filters or training is not True or (mean, var, shift) != (None, None, None) or reordered(layout):
        return None
    return Standardized(operand, layout, 0, eps, gain) if isinstance(gain, fx.Node | None) else None  # type: ignore[arg-type]


def weight_norm(node: fx.Node, operand: fx.Node, layout: Layout) -> WeightNorm | None:
    """`_weight_norm(v, g, dim)`; -1 stands for the whole tensor."""
    gain, dim = (*node.args[1:], 0)[:2]
    slices = isinstance(dim, int) and -1 <= dim < len(layout.shape) and layout.result == layout.shape
    if not slices or reordered(layout) or not isinstance(gain, fx.Node) or not isinstance(dim, int):
        return None
    return WeightNorm(operand, layout, None if dim < 0 else dim, gain)


def own_number(node: fx.Node, operand: fx.Node, layout: Layout) -> OwnNumber | None:
    """`v / σ` or `v * σ`, with σ one number, or one for every slice along a dimension of the parameter. A number for
    every element is refused: its change, which a block leaves out, would be as large as what is kept."""
    by: Any = node.args[1] if node.args[0] is operand else node.args[0]
    while op_name(by) in EXPANDS:
        by = by.args[0]
    value = by.meta.get("val")
    dim = dim_of(tuple(value.shape), layout) if isinstance(value, Tensor) else OTHERWISE
    if dim == OTHERWISE or math.prod(layout.shape) == (1 if dim is None else layout.shape[dim]):
        return None
    return OwnNumber(operand, layout, dim, by, op_name(node) == "div")


def scaled_by(node: fx.Node, operand: fx.Node, layout: Layout, other: Shape) -> Scaled | None:
    """`v * e` or `v / e`, with e one number, or one for every slice."""
    left, right = node.args
    by, dim = left if right is operand else right, dim_of(other, layout)
    assert isinstance(by, fx.Node), "bug in kfac_fx: a product of one node"
    return None if dim == OTHERWISE else Scaled(operand, layout, dim, by, op_name(node) == "div")


def dim_of(sizes: Shape, layout: Layout) -> int | None:
    """The dimension of a parameter along which a factor of these sizes varies, None if along none; OTHERWISE if the
    factor varies in another way or broadcasts the parameter."""
    new = len(layout.result) - len(sizes)
    several = [new + dim for dim, size in enumerate(sizes) if size != 1]
    if not several:
        return None if new >= 0 else OTHERWISE
    dim, fits = several[0], len(several) == 1 and layout.result == layout.shape and not reordered(layout)
    return dim if fits and new >= 0 and sizes[dim - new] == layout.shape[dim] else OTHERWISE


def reordered(layout: Layout) -> bool:
    """Whether the elements are in another order than in the parameter."""
    view = viewed(layout, unallocated(layout.shape))
    return view is None or not view.is_contiguous()


# --- means of filters, whichever way they are written: v.mean((1, 2, 3), keepdim=True), v.flatten(1).mean(1), ... -----


def is_mean(node: fx.Node, weight: Slice, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a node is the mean of a whole parameter over all dimensions but the first.

    weight: all of the parameter. values: of the expressions in the graph.
    """
    left = dimensions_left(node, weight, values)
    return left is not None and filters_only(left)


def dimensions_left(node: fx.Node, weight: Slice, values: Mapping[fx.Node, Any]) -> list[bool] | None:
    """For each dimension of the parameter, or of its filters [o, ...], whether it is not averaged yet.

    None for a node that is no mean of the parameter.
    """
    value = values.get(node)
    if isinstance(value, ParameterExpr):
        if not is_one_slice(value):
            return None
        (slice_,) = value.slices
        entire = view_of(slice_).is_contiguous() and math.prod(slice_.shape) == math.prod(weight.shape)
        same = slice_.parameter == weight.parameter and slice_.scale == 1.0 and not slice_.through
        return [True] * len(value.shape) if entire and same else None
    name, source = op_name(node), node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "getitem" and node.args[1] == 1 and op_name(source) in SPREADS:
        return averaged(source, weight, values)
    if name == "mean":
        return averaged(node, weight, values)
    left = dimensions_left(source, weight, values) if name in VIEWS else None
    return [True] if left is not None and filters_only(left) else None


def averaged(node: fx.Node, weight: Slice, values: Mapping[fx.Node, Any]) -> list[bool] | None:
    """The same after the mean that a node takes."""
    source: Any = node.args[0]
    left = dimensions_left(source, weight, values)
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if left is None or dims is None:
        return None
    over = {dim % len(left) for dim in ([dims] if isinstance(dims, int) else dims)}
    if 0 in over:
        return None  # a mean over filters: what is left of it would be taken for a number of each filter
    keepdim = node.kwargs.get("keepdim", len(node.args) > 2 and node.args[-1] is True)
    return [remains and n not in over for n, remains in enumerate(left) if keepdim or n not in over]


def filters_only(left: list[bool]) -> bool:
    return left[:1] == [True] and not any(left[1:])


MAKERS = {"batch_norm": standardized, WEIGHT_NORM: weight_norm, "div": own_number, "mul": own_number}


EXAMPLES = {
    "weight norm": WeightExample(lambda w, g: weight_normalized(w, g, 0), {"w": (4, 4), "g": (4, 1)}),
    "standardized": WeightExample(
        lambda w, g: F.batch_norm(w.reshape(1, 4, -1), None, None, g, training=True).reshape_as(w),
        {"w": (4, 4), "g": (4,)},
    ),
    "spectral norm": WeightExample(lambda w: w / torch.linalg.matrix_norm(w, 2), {"w": (4, 4)}),
    "centered": WeightExample(lambda w: w - w.mean(1, keepdim=True), {"w": (4, 4)}),
}
