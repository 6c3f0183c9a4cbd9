"""Models with autograd.Functions of their own, as custom activations, adversarial and binary networks have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case, affine, linear


class Mish(torch.autograd.Function):
    """An activation that keeps its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * F.softplus(x).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        t = F.softplus(x).tanh()
        return gradient * (t + x * x.sigmoid() * (1 - t * t))


class Reversed(torch.autograd.Function):
    """A gradient reversal layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.rate * gradient, None


class Binary(torch.autograd.Function):
    """A binarization with the straight-through gradient inside of [-1, 1], in the newer way of writing one."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


def apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class Adversarial(nn.Module):
    """Features for one head, against the other (Ganin and Lempitsky 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(2, 3, 3)
        self.classes, self.domain, self.last = nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = apply(Mish, self.features(x)).mean((2, 3))
        domain = self.last(apply(Mish, self.domain(apply(Reversed, h, 0.3))))
        return torch.stack([self.classes(h), domain], 1)


class BinaryNet(nn.Module):
    """Weights of one bit, and activations of one bit (Courbariaux et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.norm, self.last = (
            nn.Linear(4, 5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        h = apply(Binary, self.first(x))
        h = self.norm(F.linear(h, apply(Binary, self.middle.weight), self.middle.bias))
        return self.last(apply(Binary, h))


class GatesOfHeads(nn.Module):
    """Gates with a weight for every head, by `baddbmm` (De et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 3, 3)), nn.Parameter(torch.randn(2, 3))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        n, t, _ = x.shape
        heads = x.reshape(n * t, 2, 3).permute(1, 0, 2)
        gate = torch.baddbmm(self.bias[:, None, :], heads, self.weight).transpose(0, 1).reshape(n, t, 6).sigmoid()
        return self.out(x * gate)


CASES = (
    Case(
        "adversarial",
        Adversarial,
        lambda: (torch.randn(4, 2, 5, 5),),
        (affine("conv2d", "features"), linear("classes"), linear("domain"), linear("last")),
    ),
    Case(
        "binary",
        BinaryNet,
        lambda: (torch.randn(6, 4),),
        (linear("first"), ("linear", ("middle.bias",), 1), affine("batch_norm", "norm"), linear("last")),
        generic=("middle.weight",),
    ),
    Case(
        "gates_of_heads",
        GatesOfHeads,
        lambda: (torch.randn(4, 3, 6),),
        (("linear", ("weight", "bias"), 1), linear("out")),
    ),
)
