"""Layer collections on tiny functions, whose nodes are found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.fisher_blocks import FisherBlock
from tests.compiler.toy import Toy

W, B, BOTH = "w", "b", ("w", "b")


def collection(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> LayerCollection:
    """Of `function(x, **parameters)`; captured with inputs if there are any."""
    return LayerCollection(kfac_fx.capture(Toy(function, **shapes), inputs or None))


def affine(*inputs: Tensor) -> LayerCollection:
    """y = x w + b, at the node `add`; the product is `matmul`."""
    return collection(lambda x, w, b: torch.matmul(x, w) + b, *inputs, w=(10, 5), b=(5,))


def fully_connected(lc: LayerCollection, params: Any = BOTH, **options: Any) -> FisherBlock:
    """Registered in `affine`."""
    return lc.register_fully_connected(params, "x", "add", **options)


def two_uses(*inputs: Tensor) -> LayerCollection:
    """One weight on both halves of x, each with a bias of its own; nodes `matmul`, `add`, `matmul_1`, `add_1`."""

    def function(x: Tensor, w: Tensor, b0: Tensor, b1: Tensor) -> Tensor:
        return torch.cat([torch.matmul(x[:, :10], w) + b0, torch.matmul(x[:, 10:], w) + b1], 1)

    return collection(function, *inputs, w=(10, 10), b0=(10,), b1=(10,))


def towers(*inputs: Tensor) -> LayerCollection:
    """One layer on two mini-batches, the halves of x along dimension 1."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.matmul(x[:, 0], w) + b, torch.matmul(x[:, 1], w) + b

    return collection(function, *inputs, w=(3, 4), b=(4,))
