"""Layer collections on tiny functions, whose nodes are found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.compiled.fisher_blocks import FisherBlock
from tests.compiler.toy import Toy

W, B, BOTH = "w", "b", ("w", "b")


def collection(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> LayerCollection:
    """The collection of `function(x, **parameters)`; captured with inputs if there are any."""
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


def everything(x: Tensor, **p: Tensor) -> Tensor:
    image = x.view(-1, 2, 4, 4)
    image = F.conv2d(image, p["c1"], p["c1b"], padding=1)
    image = F.conv2d(image, p["c2"])
    image = F.conv2d(F.conv2d(image, p["dw"], groups=2), p["pw"])
    row = F.conv1d(image.flatten(2), p["c3"])
    h = torch.matmul(row.flatten(1), p["w1"]) + p["b1"]
    h = torch.matmul(torch.tanh(h), p["w2"]) * p["scale"] + p["shift"]
    h = torch.matmul(torch.matmul(h, p["w3"]), p["w3"])
    e = F.embedding(x[:, 0].long(), p["emb"]) + F.embedding(x[:, 1].long(), p["emb2"])
    return (h + e + F.embedding(x[:, 2].long(), p["emb2"])) * torch.exp(p["g1"]) + torch.sin(p["g2"])


SHAPES: dict[str, tuple[int, ...]] = {
    "c1": (2, 2, 3, 3), "c1b": (2,), "c2": (2, 2, 1, 1), "dw": (2, 1, 1, 1), "pw": (2, 2, 1, 1), "c3": (2, 2, 1),
    "w1": (32, 5), "b1": (5,), "w2": (5, 5), "scale": (5,), "shift": (5,), "w3": (5, 5), "emb": (7, 5), "emb2": (7, 5),
    "g1": (5,), "g2": (5,),
}  # fmt: skip
