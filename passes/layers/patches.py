"""Rows of convolutions: patches, [N, S, g, c k], in the order (channel, kernel position) of the weight.

Their second moment needs fewer products than there are pairs of kernel positions. Let u_y be the rows of a kernel
without its first axis at line y of the padded input, [c k / k₁]. Then

    Σ_p r_p r_pᵀ  has, for the lines m and n of the kernel, the block  Σ_p u_(s p + d m) u_(s p + d n)ᵀ

with stride s and dilation d, and for s = 1 all blocks of one n - m are the same sum but for lines at the image's edge:
a kernel of 3 has three sums in the place of nine, and a third of the patches is ever made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ir import Attrs
from .geometry import per_axis, same_or_given


def patches(x: Tensor, attrs: Attrs) -> Tensor:
    kernel, stride, dilation = attrs["weight"][2:], per_axis("stride", attrs), per_axis("dilation", attrs)
    return merged(windows(padded(batched(x, attrs), same_or_given(attrs)), kernel, stride, dilation), attrs)


def second_moment(x: Tensor, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """(Σ r rᵀ [g, i, i], Σ r [g, i]) of all `patches`, in the precision of x; see the module's docstring."""
    kernel, stride, dilation = attrs["weight"][2:], per_axis("stride", attrs), per_axis("dilation", attrs)
    (k, *_), (s, *_), (d, *_) = kernel, stride, dilation
    x = padded(batched(x, attrs), same_or_given(attrs))
    outputs = (x.shape[2] - d * (k - 1) - 1) // s + 1
    u = lines(x, kernel, stride, dilation, attrs["groups"])
    starts = [d * m % s * (u.shape[2] // s) + d * m // s for m in range(k)]

    def product(m: int, n: int, begin: int, end: int) -> Tensor:
        """Of the lines that meet the kernel's lines m and n, from one output line to another."""
        left, right = (u[:, :, starts[at] + begin : starts[at] + end].flatten(2) for at in (m, n))
        return (left[0] @ right[0].mT).unsqueeze(0) if len(u) == 1 else left @ right.mT

    # Pairs that are as far apart, and begin in the same residue of the stride, meet the same lines but at the edge.
    alike: defaultdict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for m in range(k):
        for n in range(m, k):
            alike[d * m % s, d * n % s, starts[n] - starts[m]].append((m, n))
    blocks: dict[tuple[int, int], Tensor] = {}
    for pairs in alike.values():
        (first, with_first), last = pairs[0], pairs[-1][0]
        apart = starts[last] - starts[first]  # the common lines are the outputs from here on, seen from the first pair
        shared = product(first, with_first, apart, outputs) if apart < outputs else None
        for m, n in pairs:
            skipped = starts[m] - starts[first]
            if shared is None:
                blocks[m, n] = product(m, n, 0, outputs)
                continue
            before, after = product(m, n, 0, apart - skipped), product(m, n, outputs - skipped, outputs)
            blocks[m, n] = before + shared + after
    square = torch.stack([torch.stack([whole(blocks, m, n) for n in range(k)]) for m in range(k)])
    sums = u.sum(-1)
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
    apart = padded(spread(batched(x, attrs), per_axis("stride", attrs)), ends)
    found = windows(apart, kernel, [1] * len(kernel), dilation)
    return merged(found.flip([axis - len(kernel) for axis in range(len(kernel))]), attrs)


def whole(blocks: Mapping[tuple[int, int], Tensor], m: int, n: int) -> Tensor:
    return blocks[m, n] if m <= n else blocks[n, m].mT


def lines(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """[N, C, Y, ...] -> [g, c k / k₁, Y, N ·positions of the other axes]: patches along all axes but the first.

    The lines that a stride s leaves out come behind the others: 0, s, 2 s, ..., 1, s + 1, ...
    """
    s, others = stride[0], len(kernel) - 1
    x = padded(x, [(0, -x.shape[2] % s), *[(0, 0)] * others])
    found = windows(x, kernel[1:], stride[1:], dilation[1:], first=3).unflatten(2, (-1, s))
    places, offsets = range(4, 4 + others), range(4 + others, 4 + 2 * others)
    found = found.permute(1, *offsets, 3, 2, 0, *places)  # [C, *kernel, s, Y / s, N, *positions]
    found = found.flatten(3 + others).flatten(1 + others, 2 + others).flatten(0, others)
    return torch.unflatten(found, 0, (groups, -1))


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], first: int = 2) -> Tensor:
    """[N, C, *sizes] -> [N, C, *output sizes, *kernel], a view. first: the axis where they begin."""
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=first):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    return x


def positions(dy: Tensor, attrs: Attrs) -> Tensor:
    """[N, g o, ...] -> [N, S, g, o]: of an output, or of an input without patches."""
    return torch.unflatten(batched(dy, attrs).flatten(2).mT, 2, (attrs["groups"], -1))


def merged(found: Tensor, attrs: Attrs) -> Tensor:
    """[N, C, *output sizes, *kernel] -> [N, S, g, c k], a view of [c k, N, S]: lines of an image are copied, in a
    third of the time that patches take."""
    axes = len(attrs["weight"]) - 2
    offsets, places = range(2 + axes, 2 + 2 * axes), range(2, 2 + axes)
    columns = found.permute(1, *offsets, 0, *places).flatten(2 + axes).flatten(0, axes)
    return torch.unflatten(columns.permute(1, 2, 0), 2, (attrs["groups"], -1))


def padded(x: Tensor, ends: Sequence[tuple[int, int]]) -> Tensor:
    counted = tuple(chain.from_iterable(reversed(ends)))  # from the last axis
    return F.pad(x, counted) if any(counted) else x


def spread(x: Tensor, stride: Sequence[int]) -> Tensor:
    """With stride - 1 zeros between neighbors."""
    sizes = [s * (size - 1) + 1 for s, size in zip(stride, x.shape[2:], strict=True)]
    apart = x.new_zeros(*x.shape[:2], *sizes)
    places: Any = (..., *(slice(None, None, s) for s in stride))
    apart[places] = x
    return apart


def batched(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, C, ...], also of a single case without N."""
    return x if x.dim() == len(attrs["weight"]) else x.unsqueeze(0)
