"""Normalizations with parameters: their rows are the input normalized; how is no business of the parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir import Attrs
from .declaration import layer
from .rows import ELEMENTWISE, by_group, elements


def channels(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, g, ...] -> [N, S, g, 1]."""
    return by_group(x.unsqueeze(-1), attrs["weight"] + (1,) * (x.dim() - 2))


def layer_normalized(x: Tensor, attrs: Attrs) -> Tensor:
    return elements(F.layer_norm(x, attrs["normalized_shape"], eps=attrs["eps"]), attrs)


def rms_normalized(x: Tensor, attrs: Attrs) -> Tensor:
    return elements(F.rms_norm(x, attrs["normalized_shape"], eps=attrs["eps"]), attrs)


def group_normalized(x: Tensor, attrs: Attrs) -> Tensor:
    return channels(F.group_norm(x, attrs["num_groups"], eps=attrs["eps"]), attrs)


def batch_normalized(x: Tensor, attrs: Attrs) -> Tensor:
    return channels(F.batch_norm(x, None, None, training=True, eps=attrs["eps"]), attrs)


def batch_normalized_by_running(x: Tensor, attrs: Attrs) -> Tensor:
    return channels(F.batch_norm(x, attrs["running_mean"], attrs["running_var"], eps=attrs["eps"]), attrs)


def instance_normalized(x: Tensor, attrs: Attrs) -> Tensor:
    return channels(F.instance_norm(x, eps=attrs["eps"]), attrs)


def instance_normalized_by_running(x: Tensor, attrs: Attrs) -> Tensor:
    mean, var = attrs["running_mean"], attrs["running_var"]
    return channels(F.instance_norm(x, mean, var, use_input_stats=False, eps=attrs["eps"]), attrs)


@layer(
    rows=layer_normalized,
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
    x: Tensor, normalized_shape: list[int], eps: float, *, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


@layer(
    rows=rms_normalized,
    grad_rows=elements,
    leading=True,
    example=(
        lambda: (nn.RMSNorm(5), torch.randn(4, 7, 5)),
        lambda: (nn.RMSNorm((2, 5), eps=1e-3), torch.randn(4, 2, 5)),
    ),
    **ELEMENTWISE,
)
def rms_norm(x: Tensor, normalized_shape: list[int], eps: float | None, *, weight: Tensor) -> Tensor:
    return F.rms_norm(x, normalized_shape, weight, eps)


@layer(
    rows=group_normalized,
    grad_rows=channels,
    example=(
        lambda: (nn.GroupNorm(2, 6), torch.randn(4, 6, 5, 3)),
        lambda: (nn.GroupNorm(1, 6), torch.randn(4, 6)),
    ),
    **ELEMENTWISE,
)
def group_norm(x: Tensor, num_groups: int, eps: float, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


# --- with running statistics: forward writes them in training, where the rows do not need them (hence `_`) -----------


@layer(
    rows=batch_normalized,
    grad_rows=channels,
    example=(
        lambda: (nn.BatchNorm1d(3), torch.randn(4, 3)),
        lambda: (nn.BatchNorm2d(3), torch.randn(4, 3, 5, 7)),
        lambda: (nn.BatchNorm3d(3, track_running_stats=False), torch.randn(4, 3, 5, 2, 7)),
        lambda: (nn.BatchNorm1d(1), torch.randn(4, 1, 7)),
    ),
    **ELEMENTWISE,
)
def batch_norm(
    x: Tensor, _mean: Any, _var: Any, momentum: float, eps: float, *, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return F.batch_norm(x, _mean, _var, weight, bias, True, momentum, eps)


@batch_norm.form(
    rows=batch_normalized_by_running,
    example=lambda: (nn.BatchNorm2d(3).eval(), torch.randn(4, 3, 5, 7)),
)
def batch_norm_by_running(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)


@layer(
    rows=instance_normalized,
    grad_rows=channels,
    example=(
        lambda: (nn.InstanceNorm2d(3, affine=True), torch.randn(4, 3, 5, 7)),
        lambda: (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), torch.randn(4, 3, 7)),
    ),
    **ELEMENTWISE,
)
def instance_norm(
    x: Tensor, _mean: Any, _var: Any, momentum: float, eps: float, *, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return F.instance_norm(x, _mean, _var, weight, bias, True, momentum, eps)


@instance_norm.form(
    rows=instance_normalized_by_running,
    example=lambda: (nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(), torch.randn(4, 3, 7)),
)
def instance_norm_by_running(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    return F.instance_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
