"""Linear maps of vectors by name that autograd can pass through, whatever they consist of.

A map that is computed without a graph is differentiable in its argument all the same: its derivative is the map itself,
and its backward is the transposed map. So the backward of X v is Xᵀ g, and derivatives of any order are such products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kfac_fx.linalg.vectors import Tensors, Vector
from kfac_fx.passes.torch_private import transforms

# From (a vector, whether the map is transposed) to a vector of the same names and shapes.
Map = Callable[[Tensors, bool], Tensors]


def applied(map: Map, vector: Vector, transposed: bool = False) -> Tensors:
    """X v, or Xᵀ v, differentiable in v.

    map: takes vectors with any additional dimensions in front if it is used inside of torch.func.vmap.
    """
    if not is_differentiated(vector.values()):
        with torch.no_grad():
            return map(dict(vector), transposed)
    names = tuple(vector)
    products = cast(Any, Applied).apply(map, transposed, names, *vector.values())
    return dict(zip(names, products, strict=True))


def is_differentiated(tensors: Any) -> bool:
    """Whether a derivative by one of these may be asked for: by autograd, or by a transformation of torch.func."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return not torch.compiler.is_compiling() and transforms() > 0


class Applied(torch.autograd.Function):
    """See `applied`."""

    @staticmethod
    def forward(map: Map, transposed: bool, names: Sequence[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            product = map(dict(zip(names, tensors, strict=True)), transposed)
        return tuple(product[name] for name in names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map, ctx.transposed, ctx.names, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = applied(ctx.map, dict(zip(ctx.names, gradients, strict=True)), not ctx.transposed)
        return None, None, None, *(back[name] for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        pushed = applied(ctx.map, dict(zip(ctx.names, tangents[3:], strict=True)), ctx.transposed)
        return tuple(pushed[name] for name in ctx.names)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], map: Map, transposed: bool, names: Any, *tensors: Tensor) -> Any:
        def in_front(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

        many = [in_front(tensor, dim) for tensor, dim in zip(tensors, in_dims[3:], strict=True)]
        products = applied(map, dict(zip(names, many, strict=True)), transposed)
        return tuple(products[name] for name in names), (0,) * len(names)
