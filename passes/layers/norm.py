"""Normalizations with a gain and a shift: a group for every element of the parameters, its row the normalized input.

    y = weight * normalized(x) + bias

The declarations say how to normalize again, without the parameters. The derivative of the normalization by x does not
enter the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir import Attrs
from .declaration import ELEMENTWISE, Example, Layer, by_group, elements, layer


def channels(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, g, ...] -> [N, S, g, 1]: parameters along the second dimension."""
    return by_group(x.unsqueeze(-1), attrs["weight"] + (1,) * (x.dim() - 2))


@layer(
    rows=lambda x, attrs: elements(F.layer_norm(x, attrs["normalized_shape"], eps=attrs["eps"]), attrs),
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
    rows=lambda x, attrs: elements(F.rms_norm(x, attrs["normalized_shape"], eps=attrs["eps"]), attrs),
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
    rows=lambda x, attrs: channels(F.group_norm(x, attrs["num_groups"], eps=attrs["eps"]), attrs),
    grad_rows=channels,
    example=(lambda: (nn.GroupNorm(2, 6), torch.randn(4, 6, 5, 3)), lambda: (nn.GroupNorm(1, 6), torch.randn(4, 6))),
    **ELEMENTWISE,
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
        rows=lambda x, attrs: channels(norm(x, None, None, None, None, True, 0.0, attrs["eps"]), attrs),
        grad_rows=channels,
        example=in_training,
        **ELEMENTWISE,
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
