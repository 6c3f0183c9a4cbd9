"""Convolutions: fully connected layers on patches, with one row for each output position (Grosse and Martens, 2016).

Rows are patches, [N, S, g, c k]: channels and kernel positions in the order of the weight, and a group for each of the
convolution's `groups`. A transposed convolution is an ordinary one, with its kernel reversed, over its input with zeros
between the neighbors.

The second moment of the patches takes fewer products than there are pairs of kernel positions. Let u_y [c k / k₁] be
the rows of a kernel without its first axis at line y of the padded input. Then

    Σ_p r_p r_pᵀ  has, for the lines m and n of the kernel, the block  Σ_p u_(s p + d m) u_(s p + d n)ᵀ

with stride s and dilation d. For s = 1, all blocks with the same n - m are the same sum, except for lines at the edge
of the image. A kernel of 3 therefore takes three sums instead of nine, and only a third of the patches is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..graphs.operations import XW, Spelling
from ..ir import Attrs
from ..matrix import row_products
from .declaration import Example, Layer, composite, layer


def per_axis(name: str, attrs: Attrs) -> list[int]:
    value, axes = attrs[name], len(attrs["weight"]) - 2
    return list(value) * (axes // len(value)) if isinstance(value, (list, tuple)) else [value] * axes


def padding_of(attrs: Attrs) -> list[tuple[int, int]]:
    """Padding at both ends of every axis. With "same", an odd pixel goes to the far end."""
    if attrs["padding"] == "valid":
        return [(0, 0) for _ in attrs["weight"][2:]]
    if attrs["padding"] != "same":
        return [(p, p) for p in per_axis("padding", attrs)]
    total = [d * (k - 1) for k, d in zip(attrs["weight"][2:], per_axis("dilation", attrs), strict=True)]
    return [(t // 2, t - t // 2) for t in total]


def disagreement(attrs: Attrs, strides: Any, padding: Any, dilations: Any) -> tuple[str, Any] | None:
    """The first argument of a user's that contradicts the layer, as ("strides=[1, 2]", the layer's value), or None."""
    for name, sizes, attribute in (("strides", strides, "stride"), ("dilations", dilations, "dilation")):
        actual = per_axis(attribute, attrs)
        possible = [actual] if sizes is None else readings(sizes, len(actual))
        if actual not in possible:
            return f"{name}={possible[0] if possible else list(sizes)}", actual
    lower = padding.lower() if isinstance(padding, str) else padding  # TensorFlow writes "SAME"
    if padding is not None and padding_of({**attrs, "padding": lower}) != padding_of(attrs):
        return f"padding={padding!r}", repr(attrs["padding"])
    return None


def readings(sizes: Any, axes: int) -> list[list[int]]:
    """The possible sizes for each axis: TensorFlow's lists also have batch and channels, in either order."""
    values = [sizes] if isinstance(sizes, int) else list(sizes)
    if len(values) == axes + 2:
        orders = (values[:1] + values[-1:], values[1:-1]), (values[:2], values[2:])
        return [spatial for others, spatial in orders if others == [1, 1]]
    return [values * axes if len(values) == 1 else values]


# --- patches ----------------------------------------------------------------------------------------------------------


def patches(x: Tensor, attrs: Attrs) -> Tensor:
    kernel, stride, dilation = attrs["weight"][2:], per_axis("stride", attrs), per_axis("dilation", attrs)
    return merged(windows(padded(batched(x, attrs), padding_of(attrs)), kernel, stride, dilation), attrs)


def second_moment(x: Tensor, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """(Σ r rᵀ [g, i, i], Σ r [g, i]) over all `patches`, in at least float32; see the module's docstring."""
    kernel, stride, dilation = attrs["weight"][2:], per_axis("stride", attrs), per_axis("dilation", attrs)
    (k, *_), (s, *_), (d, *_) = kernel, stride, dilation
    x = padded(batched(x, attrs), padding_of(attrs))
    outputs = (x.shape[2] - d * (k - 1) - 1) // s + 1
    u = lines(x, kernel, stride, dilation, attrs["groups"])
    starts = [d * m % s * (u.shape[2] // s) + d * m // s for m in range(k)]

    def product(m: int, n: int, begin: int, end: int) -> Tensor:
        """The product of the lines that meet the kernel's lines m and n, from one output line to another."""
        return row_products(*(u[:, :, starts[at] + begin : starts[at] + end].flatten(2) for at in (m, n)))

    # Pairs at the same distance that begin in the same residue of the stride meet the same lines, except at the edge.
    alike: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for m in range(k):
        for n in range(m, k):
            alike[d * m % s, d * n % s, starts[n] - starts[m]].append((m, n))
    blocks: dict[tuple[int, int], Tensor] = {}
    for pairs in alike.values():
        (first, with_first), last = pairs[0], pairs[-1][0]
        apart = starts[last] - starts[first]  # in the first pair, the common lines begin at this output
        shared = product(first, with_first, apart, outputs) if apart < outputs else None
        for m, n in pairs:
            skipped = starts[m] - starts[first]
            if shared is None:
                blocks[m, n] = product(m, n, 0, outputs)
                continue
            before, after = product(m, n, 0, apart - skipped), product(m, n, outputs - skipped, outputs)
            blocks[m, n] = before + shared + after
    square = torch.stack([torch.stack([block(blocks, m, n) for n in range(k)]) for m in range(k)])
    sums = u.sum(-1, dtype=square.dtype)
    total = torch.stack([sums[:, :, at : at + outputs].sum(-1) for at in starts])
    channels, g = attrs["weight"][1], attrs["groups"]
    square = square.unflatten(4, (channels, -1)).unflatten(3, (channels, -1)).permute(2, 3, 0, 4, 5, 1, 6)
    total = total.unflatten(2, (channels, -1)).permute(1, 2, 0, 3)
    inputs = total[0].numel()
    return square.reshape(g, inputs, inputs), total.reshape(g, inputs)


def transposed_patches(x: Tensor, attrs: Attrs) -> Tensor:
    kernel, dilation = attrs["weight"][2:], per_axis("dilation", attrs)
    around = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, per_axis("padding", attrs), strict=True)]
    ends = [(a, a + more) for a, more in zip(around, per_axis("output_padding", attrs), strict=True)]
    apart = padded(with_zeros_between(batched(x, attrs), per_axis("stride", attrs)), ends)
    patched = windows(apart, kernel, [1] * len(kernel), dilation)
    return merged(patched.flip([axis - len(kernel) for axis in range(len(kernel))]), attrs)


def block(blocks: Mapping[tuple[int, int], Tensor], m: int, n: int) -> Tensor:
    return blocks[m, n] if m <= n else blocks[n, m].mT


def lines(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """[N, C, Y, ...] -> [g, c k / k₁, Y, N ·positions of the other axes]: patches along all axes but the first.

    The lines are in the order 0, s, 2 s, ..., 1, s + 1, ...: those that a stride s skips come last.
    """
    s, others = stride[0], len(kernel) - 1
    x = padded(x, [(0, -x.shape[2] % s), *[(0, 0)] * others])
    patched = windows(x, kernel[1:], stride[1:], dilation[1:], first=3).unflatten(2, (-1, s))
    places, offsets = range(4, 4 + others), range(4 + others, 4 + 2 * others)
    patched = patched.permute(1, *offsets, 3, 2, 0, *places)  # [C, *kernel, s, Y / s, N, *positions]
    patched = patched.flatten(3 + others).flatten(1 + others, 2 + others).flatten(0, others)
    return torch.unflatten(patched, 0, (groups, -1))


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], first: int = 2) -> Tensor:
    """[N, C, *sizes] -> [N, C, *output sizes, *kernel], a view. first: the dimension of the first axis."""
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=first):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return x


def positions(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, g o, ...] -> [N, S, g, o], for an output or for an input without patches."""
    return torch.unflatten(batched(dy, attrs).flatten(2).mT, 2, (attrs["groups"], -1))


def merged(patched: Tensor, attrs: Attrs) -> Tensor:
    """[N, C, *output sizes, *kernel] -> [N, S, g, c k].

    The result is a view of [c k, N, S], which copies lines of the image and takes a third of the time of [N, S, c k].
    """
    axes = len(attrs["weight"]) - 2
    offsets, places = range(2 + axes, 2 + 2 * axes), range(2, 2 + axes)
    columns = patched.permute(1, *offsets, 0, *places).flatten(2 + axes).flatten(0, axes)
    return torch.unflatten(columns.permute(1, 2, 0), 2, (attrs["groups"], -1))


def padded(x: Tensor, ends: Sequence[tuple[int, int]]) -> Tensor:
    widths = tuple(chain.from_iterable(reversed(ends)))  # F.pad begins with the last axis
    return F.pad(x, widths) if any(widths) else x


def with_zeros_between(x: Tensor, stride: Sequence[int]) -> Tensor:
    """x with stride - 1 zeros between neighbors."""
    sizes = [s * (size - 1) + 1 for s, size in zip(stride, x.shape[2:], strict=True)]
    apart = x.new_zeros(*x.shape[:2], *sizes)
    places: Any = (..., *(slice(None, None, s) for s in stride))
    apart[places] = x
    return apart


def batched(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, C, ...], also if x is a single case without N."""
    return x if x.dim() == len(attrs["weight"]) else x.unsqueeze(0)


# --- examples ---------------------------------------------------------------------------------------------------------

Convolve = Callable[..., Tensor]
Module = type[nn.Module]
Size = tuple[int, ...]
Arguments = Mapping[str, Any]

DENSE_OPTIONS: tuple[Arguments, ...] = (
    {"in_channels": 1, "kernel_size": 1},
    {"stride": 2, "padding": 1},
    {"stride": 2, "dilation": 2, "padding": 2, "bias": False},
    {"padding": "same", "kernel_size": 2, "dilation": 3},
    {"padding": "valid", "groups": 2},
    {"groups": 2, "stride": 3, "padding": 1},
    {"kernel_size": (3, 2, 1), "stride": (1, 2, 3), "padding": (0, 1, 2), "dilation": (2, 3, 1)},
)
DEPTHWISE_OPTIONS: tuple[Arguments, ...] = (
    {"groups": 4, "out_channels": 4, "stride": 2, "padding": 1},
    {"groups": 4, "out_channels": 12, "padding": "same", "bias": False},
)
TRANSPOSED_OPTIONS: tuple[Arguments, ...] = (
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": 3, "dilation": 2, "padding": 3, "output_padding": 2, "bias": False},
    {"stride": 2, "padding": 3, "groups": 2},
    {"stride": 2, "groups": 4, "out_channels": 8},
    {"kernel_size": (3, 2, 1), "stride": (1, 2, 3), "padding": (2, 0, 0), "output_padding": (0, 1, 2)},
)


def groups(attrs: Attrs) -> dict[str, int]:
    return {"g": attrs["groups"]}


def examples(module: Module, size: Size, *options: Arguments) -> tuple[Example, ...]:
    """Modules with these options, or else 4 channels in, 6 out and a kernel of 3; the last also on a single case."""
    defaults: Arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}

    def example(changed: Arguments, *cases: int) -> Example:
        cut = {key: value[: len(size)] if isinstance(value, tuple) else value for key, value in changed.items()}
        arguments = {**defaults, **cut}
        return lambda: (module(**arguments), torch.randn(*cases, arguments["in_channels"], *size))

    return *(example(changed, 3) for changed in options), example(options[-1])


# --- dense, grouped, depthwise --------------------------------------------------------------------------------------


CONV = {**XW, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
CONV_TRANSPOSE = {**XW, "bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def known_groups(attrs: Attrs) -> bool:
    """Whether the number of groups is not computed in forward, as `groups=x.size(1)` is: matrices have known sizes."""
    return isinstance(attrs["groups"], int)


def depthwise(attrs: Attrs) -> bool:
    """Whether every input channel is a group of its own, with one or more outputs."""
    return known_groups(attrs) and bool(attrs["groups"] > 1 and attrs["weight"][1] == 1)


def not_depthwise(attrs: Attrs) -> bool:
    return known_groups(attrs) and not depthwise(attrs)


def convolution(function: Convolve, axes: str, module: Module, size: Size) -> tuple[Layer, Layer]:
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
        "bias_along": -1 - len(size),
        "spelled": Spelling(function, CONV, data_first=True),
    }
    name = function.__name__
    return (
        layer(
            name=name,
            where=not_depthwise,
            pixels=positions,
            example=examples(module, size, *DENSE_OPTIONS),
            tf_kind="conv2d",
            **common,
        )(form),
        layer(
            name=f"depthwise_{name}",
            where=depthwise,
            example=examples(module, size, *DEPTHWISE_OPTIONS),
            tf_kind="depthwise_conv2d",
            **common,
        )(form),
    )


conv1d, depthwise_conv1d = convolution(F.conv1d, "l", nn.Conv1d, (11,))
conv2d, depthwise_conv2d = convolution(F.conv2d, "h w", nn.Conv2d, (9, 7))
conv3d, depthwise_conv3d = convolution(F.conv3d, "d h w", nn.Conv3d, (7, 6, 5))


# --- transposed: rows at the output's positions, so that the bias meets every one of them ---------------------------


def transposed(function: Convolve, axes: str, module: Module, size: Size) -> Layer:
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
        where=known_groups,
        bias_along=-1 - len(size),
        spelled=Spelling(function, CONV_TRANSPOSE, data_first=True),
        tf_kind="conv2d",
        example=examples(module, size, *TRANSPOSED_OPTIONS),
    )(form)


conv_transpose1d = transposed(F.conv_transpose1d, "l", nn.ConvTranspose1d, (5,))
conv_transpose2d = transposed(F.conv_transpose2d, "h w", nn.ConvTranspose2d, (5, 4))
conv_transpose3d = transposed(F.conv_transpose3d, "d h w", nn.ConvTranspose3d, (3, 4, 5))


# --- separable: depthwise, then across channels ---------------------------------------------------------------------


def across_channels(attrs: Attrs) -> bool:
    """Whether the first is depthwise, and the second dense with a kernel and a stride of 1."""
    stride = attrs["stride2"]
    ones = [*attrs["pointwise"][2:], *(stride if isinstance(stride, (list, tuple)) else [stride]), attrs["groups2"]]
    return depthwise({"groups": attrs["groups"], "weight": attrs["depthwise"]}) and all(size == 1 for size in ones)


def separable(function: Convolve, module: Module, size: Size) -> Layer:
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
