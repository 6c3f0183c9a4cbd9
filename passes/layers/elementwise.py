"""Layers that scale and shift every element on its own: a group of one input and one output for each element.

    y = x * w + b     y = x / w     y = torch.lerp(x, end, w)     y = torch.where(mask, x, b)
    y = weight * normalized(x) + bias

A token in front of every sequence is a shift, too: its gradient is that of its own places. The row of a normalization
is the normalized input, which the declarations compute again, without the parameters. The derivative of the
normalization by x does not enter the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..graphs.operations import Spelling
from ..ir import Attrs
from ..matrix import Shape
from .declaration import ELEMENTWISE, Example, Layer, by_group, elements, layer, written

INDEX = torch.tensor([[0, 1, 3], [1, 0, 1], [3, 1, 0]])  # of the examples' tables


def shifted(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, ...] -> [N, S, g, 1]. Gathered elements are added up where they came from: [N, 1, g, 1]."""
    places = attrs["elements"]
    if places is None:
        return by_group(dy.unsqueeze(-1), attrs["bias"])
    dy = by_group(dy.unsqueeze(-1), places.shape).sum(1, keepdim=True)
    dy = torch.where((places >= 0).flatten().unsqueeze(-1), dy, 0)
    table = dy.new_zeros(*dy.shape[:2], math.prod(attrs["bias"]), 1)
    return table.index_add(2, places.clamp(min=0).flatten(), dy)


def no_inputs(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, S, g, 0], the rows of a shift."""
    places = attrs["elements"]
    rows = by_group(x.unsqueeze(-1)[..., :0], attrs["bias"] if places is None else places.shape)
    return rows if places is None else rows.new_zeros(rows.shape[0], 1, math.prod(attrs["bias"]), 0)


@layer(
    rows=elements,
    grad_rows=elements,
    example=(
        written(lambda x, w: w * x, (4, 7, 5), w=(7, 5)),
        written(lambda x, w: x * w, (4, 1, 5), w=(7, 5)),
        written(lambda x, w: x * w, (4,), w=()),
        written(lambda x, w: x * w, (4, 5), w=(4, 5)),
    ),
    **ELEMENTWISE,
)
def scale_and_shift(x: Tensor, *, weight: Tensor) -> Tensor:
    return x * weight


PLACES: dict[str, Any] = {"rows": no_inputs, "bias_along": None}
SHIFT: dict[str, Any] = {**PLACES, "grad_rows": shifted}


@scale_and_shift.form(
    **SHIFT,
    example=(
        written(lambda x, b: x + b, (4, 7, 5), b=(1, 7, 5)),
        written(lambda x, b: b + x, (4, 3, 2, 5), b=(3, 1, 1)),
        written(lambda x, b: x + b[INDEX].permute(2, 0, 1), (4, 2, 3, 3), b=(4, 2)),
        written(lambda x, b: x + F.embedding(INDEX, b, 2).permute(2, 0, 1).unsqueeze(0), (4, 2, 3, 3), b=(4, 2)),
        written(lambda x, b: x + b[:, : x.shape[1]], (4, 3, 5), b=(1, 7, 5)),
    ),
)
def shift(x: Tensor, elements: Any = None, *, bias: Tensor) -> Tensor:
    return x + bias


@scale_and_shift.form(
    **SHIFT,
    example=(
        written(lambda x, b: torch.cat([b.expand(x.shape[0], -1, -1), x], 1), (4, 7, 5), b=(1, 2, 5)),
        written(lambda x, b: torch.cat([x, b.view(1, 2, 1).expand(x.size(0), 2, 3)], 2), (4, 2, 5), b=(2,)),
        written(lambda x, b: torch.cat([b[INDEX].expand(x.shape[0], 3, 3, 2), x], 1), (4, 3, 3, 2), b=(4, 2)),
    ),
)
def token(_sizes: Any, elements: Any = None, *, bias: Tensor) -> Tensor:
    return bias.expand(_sizes)


@scale_and_shift.form(
    **SHIFT,
    example=(
        written(lambda x, b: torch.cat([b.expand_as(x), x], 1), (4, 7, 5), b=(1, 5)),
        written(lambda x, b: torch.cat([F.embedding(INDEX[0], b).expand_as(x), x], 1), (4, 3, 2), b=(4, 2)),
    ),
)
def token_like(_other: Any, elements: Any = None, *, bias: Tensor) -> Tensor:
    return bias.expand_as(_other)


@scale_and_shift.form(
    **SHIFT, example=written(lambda x, b: torch.cat([b.repeat(x.shape[0], 1, 1), x], 1), (4, 7, 5), b=(1, 2, 5))
)
def token_repeated(_sizes: Any, elements: Any = None, *, bias: Tensor) -> Tensor:
    return bias.repeat(_sizes)


@scale_and_shift.form(
    **PLACES,
    grad_rows=lambda dy, attrs: shifted(torch.where(attrs["mask"], dy, 0), attrs),
    example=(
        written(lambda x, b: x + torch.where(x > 0, b, -9.0), (4, 7, 5), b=(7, 5)),
        written(lambda x, b: x + torch.where(x > 0, b[INDEX].permute(2, 0, 1), -9.0), (4, 2, 3, 3), b=(4, 2)),
    ),
)
def shift_where(_output: Any, mask: Tensor, _other: Any, elements: Any = None, *, bias: Tensor) -> Tensor:
    return torch.where(mask, bias, _other)


@scale_and_shift.form(
    **PLACES,
    grad_rows=lambda dy, attrs: shifted(torch.where(attrs["mask"], 0, dy), attrs),
    example=(
        written(lambda x, b: x * torch.where(x > 0, 1.0, b), (4, 7, 5), b=(7, 5)),
        written(lambda x, b: torch.where(x.sum(-1, keepdim=True) > 0, x, b), (4, 7, 5), b=(5,)),
        written(lambda x, b: x + torch.where(x > 0, x, b[INDEX].permute(2, 0, 1)), (4, 2, 3, 3), b=(4, 2)),
    ),
)
def shift_else_where(_output: Any, mask: Tensor, _other: Any, elements: Any = None, *, bias: Tensor) -> Tensor:
    return torch.where(mask, _other, bias)


@scale_and_shift.form(
    **PLACES,
    grad_rows=lambda dy, attrs: shifted(dy.masked_fill(attrs["mask"], 0), attrs),
    example=written(lambda x, b: x + b.masked_fill(x > 0, -9.0), (4, 7, 5), b=(7, 5)),
)
def shift_but_where(_output: Any, mask: Tensor, _value: Any, elements: Any = None, *, bias: Tensor) -> Tensor:
    return bias.masked_fill(mask, _value)


def same_everywhere(mask: Tensor, other: Tensor, bias: Shape) -> bool:
    """Whether all places of a mask get one value: the places are no indices, and have no values of their own."""
    return mask.dtype == torch.bool and len(bias) <= other.dim() - mask.dim()


def may_be_put(attrs: Attrs) -> bool:
    """As `same_everywhere`. Without sizes in the graph, `put` checks it when it has the tensors."""
    mask, other = (attrs[name].meta.get("val") for name in ("mask", "_other"))
    return mask is None or other is None or same_everywhere(mask, other, attrs["bias"])


def put(dy: Tensor, attrs: Attrs) -> Tensor:
    mask = attrs["mask"]
    if not same_everywhere(mask, dy, attrs["bias"]):
        raise ValueError("every place has a value of its own")
    return shifted(torch.where(mask.view(*mask.shape, *(1,) * (dy.dim() - mask.dim())), dy, 0), attrs)


@scale_and_shift.form(
    **PLACES,
    grad_rows=put,
    where=may_be_put,
    example=(
        written(lambda x, b: torch.index_put(x, (x[..., 0] > 0,), b), (4, 7, 5), b=(5,)),
        written(lambda x, b: torch.index_put(x, (x[:, 0, 0] > 0,), b), (4, 2, 3), b=(2, 1)),
    ),
)
def put_where(_output: Any, mask: Tensor, _other: Any, elements: Any = None, *, bias: Tensor) -> Tensor:
    return torch.index_put(_other, (mask,), bias)


@scale_and_shift.form(example=written(lambda x, w: x * (w + 1), (4, 7, 5), w=(5,)))
def scale_from_one(x: Tensor, *, weight: Tensor) -> Tensor:
    return x * (weight + 1)


@scale_and_shift.form(example=written(lambda x, w, b: torch.addcmul(b, x, w), (4, 7, 5), w=(5,), b=(5,)))
def addcmul(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(bias, x, weight)


@scale_and_shift.form(example=written(lambda x, w, b: torch.addcmul(b, w, x), (4, 7, 5), w=(5,), b=(5,)))
def addcmul_from_left(x: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(bias, weight, x)


# --- the negative part ------------------------------------------------------------------------------------------------


def slopes(weight: Shape, dims: int) -> Shape:
    """The shape that broadcasts with x of so many dimensions: a slope for each channel, or one for all."""
    return (*weight, *(1,) * (dims - 2)) if weight != (1,) else weight


def along_slopes(attrs: Attrs, dims: int | None) -> Shape | None:
    return None if dims is None else slopes(attrs["weight"], dims)


@layer(
    rows=lambda x, attrs: by_group(x.clamp(max=0).unsqueeze(-1), slopes(attrs["weight"], x.dim())),
    grad_rows=lambda dy, attrs: by_group(dy.unsqueeze(-1), slopes(attrs["weight"], dy.dim())),
    example=(
        lambda: (nn.PReLU(4), torch.randn(3, 4)),
        lambda: (nn.PReLU(4), torch.randn(3, 4, 5, 2)),
        lambda: (nn.PReLU(), torch.randn(3, 4, 5)),
    ),
    **{**ELEMENTWISE, "bias_along": along_slopes, "tf_kind": None},
)
def prelu(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.prelu(x, weight)


# --- scales that are not written as products --------------------------------------------------------------------------


def by_quotient(x: Tensor, attrs: Attrs) -> Tensor:
    """The derivative of x / w by w is -x / w²."""
    return elements(-x / attrs["value"].square(), attrs)


@scale_and_shift.form(
    rows=by_quotient,
    example=(
        written(lambda x, w: x / w, (4, 7, 5), w=(7, 5)),
        written(lambda x, w: x / w, (4, 1, 5), w=()),
        written(lambda x, w: x / w.view(-1, 1), (4, 7, 5), w=(7,)),
    ),
)
def quotient(x: Tensor, value: Any = None, *, weight: Tensor) -> Tensor:
    return torch.div(x, weight)


def by_exponent(x: Tensor, attrs: Attrs) -> Tensor:
    """The derivative of x ** w by w is x ** w log x, and 0 at 0."""
    return elements(torch.where(x == 0, 0, torch.pow(x, attrs["value"]) * x.log()), attrs)


@scale_and_shift.form(
    rows=by_exponent,
    example=(
        written(lambda x, w: (1 + x.square()) ** w, (4, 7, 5), w=(7, 5)),
        written(lambda x, w: x.exp().pow(w), (4, 7, 5), w=()),
    ),
)
def power(x: Tensor, value: Any = None, *, weight: Tensor) -> Tensor:
    return torch.pow(x, weight)


def where_larger(x: Tensor, attrs: Attrs) -> Tensor:
    """The derivative of max(x, w) by w: torch gives both a half where they are equal."""
    return elements(torch.heaviside(attrs["value"] - x, x.new_tensor(0.5)), attrs)


def where_smaller(x: Tensor, attrs: Attrs) -> Tensor:
    return elements(torch.heaviside(x - attrs["value"], x.new_tensor(0.5)), attrs)


@scale_and_shift.form(
    rows=where_larger,
    example=(
        written(lambda x, w: torch.maximum(x, w), (4, 7, 5), w=(7, 5)),
        written(lambda x, w: torch.maximum(w, x), (4, 7, 5), w=()),
    ),
)
def lower_bound(x: Tensor, value: Any = None, *, weight: Tensor) -> Tensor:
    return torch.maximum(x, weight)


@scale_and_shift.form(
    rows=where_smaller,
    example=(
        written(lambda x, w: torch.minimum(x, w), (4, 7, 5), w=(5,)),
        written(lambda x, w: torch.min(w, x), (4, 7, 5), w=()),
    ),
)
def upper_bound(x: Tensor, value: Any = None, *, weight: Tensor) -> Tensor:
    return torch.minimum(x, weight)


@scale_and_shift.form(
    rows=lambda x, attrs: elements(x.reciprocal(), attrs),
    example=written(lambda x, w: w / (1 + x.square()), (4, 7, 5), w=(7, 5)),
)
def numerator(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.div(weight, x)


@scale_and_shift.form(
    rows=lambda x, attrs: elements(attrs["end"] - x, attrs),
    example=written(lambda x, w: torch.lerp(x, torch.tanh(x), w), (4, 7, 5), w=(7, 5)),
)
def mixed(x: Tensor, end: Tensor, *, weight: Tensor) -> Tensor:
    return torch.lerp(x, end, weight)


@scale_and_shift.form(example=written(lambda x, w: torch.addcmul(torch.tanh(x), x, w), (4, 7, 5), w=(7, 5)))
def scaled_and_added(x: Tensor, _other: Any, *, weight: Tensor) -> Tensor:
    return torch.addcmul(_other, x, weight)


@scale_and_shift.form(example=written(lambda x, w: torch.addcmul(torch.tanh(x), w, x), (4, 7, 5), w=(7, 5)))
def scaled_and_added_from_left(x: Tensor, _other: Any, *, weight: Tensor) -> Tensor:
    return torch.addcmul(_other, weight, x)


@scale_and_shift.form(
    rows=lambda x, attrs: elements(x.unsqueeze(-1), attrs),
    where=lambda attrs: len(attrs["weight"]) == 1,
    example=written(lambda x, w: torch.outer(x, w), (4,), w=(5,)),
)
def outer_scale(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.outer(x, weight)


def along_channels(attrs: Attrs, dims: int | None) -> Shape | None:
    return None if dims is None else attrs["weight"] + (1,) * (dims - 2)


CHANNELS: dict[str, Any] = {**ELEMENTWISE, "bias_along": along_channels}


def channels(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, g, ...] -> [N, S, g, 1]: parameters along the second dimension."""
    return by_group(x.unsqueeze(-1), attrs["weight"] + (1,) * (x.dim() - 2))


@layer(
    spelled=Spelling(F.layer_norm, data_first=True),
    rows=lambda x, attrs: elements(F.layer_norm(x, attrs["weight"], eps=attrs["eps"]), attrs),
    grad_rows=elements,
    leading=True,
    example=(
        lambda: (nn.LayerNorm(5), torch.randn(4, 7, 5)),
        lambda: (nn.LayerNorm((2, 5), bias=False), torch.randn(4, 7, 2, 5)),
        lambda: (nn.LayerNorm(5), torch.randn(5)),
    ),
    **ELEMENTWISE,
)
def layer_norm(
    x: Tensor, _normalized_shape: list[int], eps: float, *, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return F.layer_norm(x, _normalized_shape, weight, bias, eps)


@layer(
    spelled=Spelling(F.rms_norm, data_first=True),
    rows=lambda x, attrs: elements(F.rms_norm(x, attrs["weight"], eps=attrs["eps"]), attrs),
    grad_rows=elements,
    leading=True,
    example=(
        lambda: (nn.RMSNorm(5), torch.randn(4, 7, 5)),
        lambda: (nn.RMSNorm((2, 5), eps=1e-3), torch.randn(4, 2, 5)),
    ),
    **ELEMENTWISE,
)
def rms_norm(x: Tensor, _normalized_shape: list[int], eps: float | None, *, weight: Tensor) -> Tensor:
    return F.rms_norm(x, _normalized_shape, weight, eps)


@layer(
    spelled=Spelling(F.group_norm, data_first=True),
    rows=lambda x, attrs: channels(F.group_norm(x, attrs["num_groups"], eps=attrs["eps"]), attrs),
    grad_rows=channels,
    example=(lambda: (nn.GroupNorm(2, 6), torch.randn(4, 6, 5, 3)), lambda: (nn.GroupNorm(1, 6), torch.randn(4, 6))),
    **CHANNELS,
)
def group_norm(x: Tensor, num_groups: int, eps: float, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


# --- with running statistics ------------------------------------------------------------------------------------------


def with_running_statistics(
    norm: Callable[..., Tensor], in_training: tuple[Example, ...], in_evaluation: Example
) -> Layer:
    """The layer of F.batch_norm or F.instance_norm.

    Forward updates the running statistics in training and does not read them, nor do the rows; their names therefore
    begin with an underscore in the first form.
    """

    def by_batch(
        x: Tensor, _mean: Any, _var: Any, momentum: float, eps: float, *, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return norm(x, _mean, _var, weight, bias, True, momentum, eps)

    def by_running(
        x: Tensor, mean: Any, var: Any, momentum: float, eps: float, *, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return norm(x, mean, var, weight, bias, False, momentum, eps)

    declared = layer(
        name=norm.__name__,
        spelled=Spelling(norm),
        rows=lambda x, attrs: channels(norm(x, None, None, None, None, True, 0.0, attrs["eps"]), attrs),
        grad_rows=channels,
        example=in_training,
        **CHANNELS,
    )(by_batch)
    declared.form(
        rows=lambda x, attrs: channels(
            norm(x, attrs["mean"], attrs["var"], None, None, False, 0.0, attrs["eps"]), attrs
        ),
        example=in_evaluation,
    )(by_running)
    return declared


batch_norm = with_running_statistics(
    F.batch_norm,
    in_training=(
        lambda: (nn.BatchNorm1d(3), torch.randn(4, 3)),
        lambda: (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 7)),
        lambda: (nn.BatchNorm3d(3, track_running_stats=False), torch.randn(4, 3, 5, 2, 7)),
        lambda: (nn.BatchNorm1d(1), torch.randn(4, 1, 7)),
    ),
    in_evaluation=lambda: (nn.BatchNorm2d(3).eval(), torch.randn(4, 3, 5, 7)),
)
instance_norm = with_running_statistics(
    F.instance_norm,
    in_training=(
        lambda: (nn.InstanceNorm2d(3, affine=True), torch.randn(4, 3, 5, 7)),
        lambda: (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), torch.randn(4, 3, 7)),
    ),
    in_evaluation=lambda: (nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(), torch.randn(4, 3, 7)),
)
