"""Convolutions: fully connected layers on patches, one row an output position (Grosse and Martens, 2016).

Rows are [N, S, g, c k]: channels and kernel positions in the order of the weight, a group for each of the convolution's
`groups`. A transposed convolution is an ordinary one, with its kernel reversed, over its input with zeros in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir import Attrs
from .declaration import Example, Layer, composite, layer
from .patches import patches, positions, second_moment, transposed_patches

Function = Callable[..., Tensor]
Module = type[nn.Module]
Size = tuple[int, ...]
Options = Mapping[str, Any]

DENSE: tuple[Options, ...] = (
    {"in_channels": 1, "kernel_size": 1},
    {"stride": 2, "padding": 1},
    {"stride": 2, "dilation": 2, "padding": 2, "bias": False},
    {"padding": "same", "kernel_size": 2, "dilation": 3},
    {"padding": "valid", "groups": 2},
    {"groups": 2, "stride": 3, "padding": 1},
    {"kernel_size": (3, 2, 1), "stride": (1, 2, 3), "padding": (0, 1, 2), "dilation": (2, 3, 1)},
)
DEPTHWISE: tuple[Options, ...] = (
    {"groups": 4, "out_channels": 4, "stride": 2, "padding": 1},
    {"groups": 4, "out_channels": 12, "padding": "same", "bias": False},
)
TRANSPOSED: tuple[Options, ...] = (
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": 3, "dilation": 2, "padding": 3, "output_padding": 2, "bias": False},
    {"stride": 2, "padding": 3, "groups": 2},
    {"stride": 2, "groups": 4, "out_channels": 8},
    {"kernel_size": (3, 2, 1), "stride": (1, 2, 3), "padding": (2, 0, 0), "output_padding": (0, 1, 2)},
)


def groups(attrs: Attrs) -> dict[str, int]:
    return {"g": attrs["groups"]}


def examples(module: Module, size: Size, *options: Options) -> tuple[Example, ...]:
    """Modules with 4 channels in, 6 out and a kernel of 3, unless `options` say so; the last also on a single case."""
    usual: Options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}

    def example(given: Options, *cases: int) -> Example:
        cut = {key: value[: len(size)] if isinstance(value, tuple) else value for key, value in given.items()}
        arguments = {**usual, **cut}
        return lambda: (module(**arguments), torch.randn(*cases, arguments["in_channels"], *size))

    return *(example(given, 3) for given in options), example(options[-1])


# --- dense, grouped, depthwise --------------------------------------------------------------------------------------


def depthwise(attrs: Attrs) -> bool:
    """Every input channel is a group, with one or more outputs."""
    return bool(attrs["groups"] > 1 and attrs["weight"][1] == 1)


def dense(attrs: Attrs) -> bool:
    return not depthwise(attrs)


def convolution(function: Function, axes: str, module: Module, size: Size) -> tuple[Layer, Layer]:
    """The dense or grouped layer, and the depthwise one."""

    def form(
        x: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, *, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return function(x, weight, bias, stride, padding, dilation, groups)

    layouts = {"weight": f"(g o) c {axes} -> g o (c {axes})", "bias": "(g o) -> g o"}
    common: dict[str, Any] = {
        "rows": patches,
        "second_moment": second_moment,
        "grad_rows": positions,
        "layouts": layouts,
        "sizes": groups,
    }
    name = function.__name__
    return (
        layer(name=name, where=dense, pixels=positions, example=examples(module, size, *DENSE), **common)(form),
        layer(name=f"depthwise_{name}", where=depthwise, example=examples(module, size, *DEPTHWISE), **common)(form),
    )


conv1d, depthwise_conv1d = convolution(F.conv1d, "l", nn.Conv1d, (11,))
conv2d, depthwise_conv2d = convolution(F.conv2d, "h w", nn.Conv2d, (9, 7))
conv3d, depthwise_conv3d = convolution(F.conv3d, "d h w", nn.Conv3d, (7, 6, 5))


# --- transposed: rows at the output's positions, so that the bias meets every one of them ---------------------------


def transposed(function: Function, axes: str, module: Module, size: Size) -> Layer:
    def form(
        x: Tensor,
        stride: Any,
        padding: Any,
        output_padding: Any,
        groups: int,
        dilation: Any,
        *,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        return function(x, weight, bias, stride, padding, output_padding, groups, dilation)

    return layer(
        name=function.__name__,
        rows=transposed_patches,
        grad_rows=positions,
        layouts={"weight": f"(g c) o {axes} -> g o (c {axes})", "bias": "(g o) -> g o"},
        sizes=groups,
        example=examples(module, size, *TRANSPOSED),
    )(form)


conv_transpose1d = transposed(F.conv_transpose1d, "l", nn.ConvTranspose1d, (5,))
conv_transpose2d = transposed(F.conv_transpose2d, "h w", nn.ConvTranspose2d, (5, 4))
conv_transpose3d = transposed(F.conv_transpose3d, "d h w", nn.ConvTranspose3d, (3, 4, 5))


# --- separable: depthwise, then across channels ---------------------------------------------------------------------


def across_channels(attrs: Attrs) -> bool:
    """Depthwise, then dense with a kernel and a stride of 1."""
    stride = attrs["stride2"]
    ones = [*attrs["pointwise"][2:], *(stride if isinstance(stride, (list, tuple)) else [stride]), attrs["groups2"]]
    return depthwise({"groups": attrs["groups"], "weight": attrs["depthwise"]}) and all(size == 1 for size in ones)


def separable(function: Function, module: Module, size: Size) -> Layer:
    def form(
        x: Tensor,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        stride2: Any,
        padding2: Any,
        dilation2: Any,
        groups2: int,
        *,
        depthwise: Tensor,
        depthwise_bias: Tensor | None = None,
        pointwise: Tensor,
        pointwise_bias: Tensor | None = None,
    ) -> Tensor:
        each = function(x, depthwise, depthwise_bias, stride, padding, dilation, groups)
        return function(each, pointwise, pointwise_bias, stride2, padding2, dilation2, groups2)

    def example() -> tuple[nn.Module, Tensor]:
        across = module(12, 5, 1)
        return nn.Sequential(module(4, 12, 3, groups=4, padding=1, bias=False), across), torch.randn(3, 4, *size)

    name = function.__name__
    parts = (f"depthwise_{name}", name)
    return composite(name=f"separable_{name}", parts=parts, where=across_channels, example=example)(form)


separable_conv1d = separable(F.conv1d, nn.Conv1d, (11,))
separable_conv2d = separable(F.conv2d, nn.Conv2d, (9, 7))
