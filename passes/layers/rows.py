"""From tensors to rows: the functions that several families of layers share, and the module of their examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ir import Attrs
from ..matrix import Layout, Shape
from .declaration import Example


def as_rows(tensor: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., d] -> [N, S, d]. A vector [d] is a single case."""
    tensor = torch.atleast_2d(tensor)
    return tensor.unsqueeze(1).flatten(1, -2)


def by_group(tensor: Tensor, shape: Shape) -> Tensor:
    """[N, ..., d] -> [N, S, g, d]: a group for each element of a parameter of `shape`, which broadcasts with [N, ...].

    If the parameter varies along the first dimension, that dimension does not count cases, and N = 1.
    """
    full = torch.broadcast_shapes(tensor.shape[:-1], shape)
    tensor = tensor.expand(*full, tensor.shape[-1])
    shape = (1,) * (len(full) - len(shape)) + tuple(shape)
    if not shape or shape[0] != 1:
        tensor, shape = tensor.unsqueeze(0), (1, *shape)
    varies = [dim for dim, size in enumerate(shape) if size != 1]
    shared = [dim for dim, size in enumerate(shape) if size == 1]  # the first counts the cases
    cases, *positions = (tensor.shape[dim] for dim in shared)
    return tensor.permute(*shared, *varies, -1).reshape(cases, math.prod(positions), math.prod(shape), tensor.shape[-1])


def elements(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ...] -> [N, S, g, 1], for parameters along the last dimensions."""
    return by_group(x.unsqueeze(-1), attrs["weight"])


def weights(weight: Layout, attrs: Attrs) -> Layout:
    return weight.reshape((math.prod(weight.result), 1, 1))


def biases(bias: Layout, attrs: Attrs) -> Layout:
    return bias.reshape((math.prod(bias.result), 1))


ELEMENTWISE: dict[str, Any] = {"layouts": {"weight": weights, "bias": biases}, "default": "full"}


class Written(nn.Module):
    """A module that applies `function` to its input and to parameters of these shapes."""

    def __init__(self, function: Callable[..., Any], shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self.function, self.names = function, tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, **{name: getattr(self, name) for name in self.names})


def written(function: Callable[..., Any], x: Shape, **shapes: Shape) -> Example:
    """An example: a `Written` module, and an input of shape `x`."""
    return lambda: (Written(function, shapes), torch.randn(x))
