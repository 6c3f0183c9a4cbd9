"""Norms, tables, recurrent nets, unusual signatures, losses inside forward, and parameters that no layer claims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.layers import layer

from .case import Case, affine, linear
from .dense import batch, mlp, parameter


class Norms(nn.Module):
    """Every norm with its affine part, in one chain."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.batch, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.layer = nn.LayerNorm([4, 3, 3])
        self.flat, self.rms = nn.BatchNorm1d(6), nn.RMSNorm(6)
        self.own_scale, self.own_shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.inner, self.head = nn.Linear(36, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.instance(torch.relu(self.group(self.batch(self.conv(x))))))
        x = self.rms(torch.tanh(self.flat(self.inner(x.flatten(1)))))
        x = (x - x.mean(-1, keepdim=True)) * self.own_scale + self.own_shift
        y: Tensor = self.head(x)
        return y


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 4, mode="sum")
        self.means = nn.EmbeddingBag(13, 4, mode="mean")
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:  # [N, S]
        y: Tensor = self.head(torch.cat([self.bag(ids), self.means(ids)], dim=1))
        return y


class Tables(nn.Module):
    """Embeddings with a padding index, used twice, and through the functional."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.head = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # [N, S], [N]
        both = self.words(a).mean(1) * F.embedding(b, self.words.weight, padding_idx=0)
        y: Tensor = self.head(both)
        return y


class Recurrent(nn.Module):
    """A net unrolled in time, its cell written with linear layers; one bias, in the input's half."""

    def __init__(self, zero_start: bool) -> None:
        super().__init__()
        self.zero_start = zero_start
        self.input, self.state = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 3]
        h = x.new_zeros(x.shape[0], 4) if self.zero_start else torch.tanh(self.input(x[:, 0]))
        for t in range(0 if self.zero_start else 1, 4):
            h = torch.tanh(self.input(x[:, t]) + self.state(h))
        y: Tensor = self.head(h)
        return y


class SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.mean, self.spread = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.trunk(x))
        return {"mean": self.mean(h), "spread": self.spread(h)}


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(3, 4)

    def forward(self, *, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = scale * self.left(left) + self.right(right)
        return y


class LossInside(nn.Module):
    """Forward computes the loss, as language models do when they are given labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.head(torch.tanh(self.inner(x)))
        losses = {"ce": F.cross_entropy, "mse": F.mse_loss, "bce": F.binary_cross_entropy_with_logits}
        return {"loss": losses[self.kind](out, y), "out": out}


class Frozen(nn.Module):
    """A frozen body, a frozen bias in a trainable layer, a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.body.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.middle(torch.tanh(self.body(x)))))
        return y


class Unused(nn.Module):
    """A layer that forward never calls, and one whose result nothing behind the output reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.detached = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x) + self.detached(x).detach()
        return y


class Generic(nn.Module):
    """Parameters that no layer takes: one side of a triangle, the base of a power, one side of an angle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.gate, self.width = parameter(4), parameter(4)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.hypot(self.inner(x), self.gate)
        h = F.softplus(self.width) ** torch.tanh(h)
        return torch.atan2(self.head(h), torch.exp(self.temperature))


class Elementwise(nn.Module):
    """Positions, scales and shifts of every shape that broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(0.1 * torch.randn(4, 5))
        self.scale, self.channel_shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(4, 1))
        self.one = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, 4, 5]
        x = torch.tanh(x + self.position)
        x = torch.tanh(self.scale * x)
        x = torch.tanh(x + self.channel_shift)
        x = torch.tanh(x * self.one)
        y: Tensor = self.head(x)
        return y


class Prototypes(nn.Module):
    """Distances from what is learned, as in prototype and radial basis networks; and a threshold, on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.centers, self.threshold = parameter(3, 4), parameter(3)

    def forward(self, x: Tensor) -> Tensor:
        distances = (self.inner(x).unsqueeze(1) - self.centers).square().sum(-1)
        return torch.tanh(self.threshold - distances)


class Mixed(nn.Module):
    """With a layer that only the user knows: a mixture of two functions, learned for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mix, self.head = nn.Linear(5, 4), parameter(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        y: Tensor = self.head(torch.lerp(torch.tanh(h), torch.relu(h), self.mix))
        return y


@layer(
    rows=lambda x, attrs: (attrs["end"] - x).unsqueeze(1).unsqueeze(-1),  # [N, C] -> [N, 1, C, 1]
    grad_rows=lambda dy, attrs: dy.unsqueeze(1).unsqueeze(-1),
    layouts={"weight": "g -> g 1 1"},
    example=lambda: (Mixed(), torch.randn(3, 5)),
)
def mixture(x: Tensor, end: Tensor, *, weight: Tensor) -> Tensor:
    return torch.lerp(x, end, weight)


class Rare(nn.Module):
    """Layers that few models have: slopes, products of two inputs, a table that data index."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.slopes, self.slope = nn.Linear(5, 4), nn.PReLU(4), nn.PReLU()
        self.products, self.table = nn.Bilinear(4, 4, 3), parameter(6, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.inner(x)
        y: Tensor = self.products(self.slopes(h), self.slope(-h)) * self.table[ids]
        return y


def of_several_outputs(outputs: Mapping[str, Tensor]) -> Any:
    from kfac_fx import losses

    return [losses.Normal(outputs["mean"]), losses.Categorical(outputs["spread"])]


RECURRENT = (linear("input", 4), linear("state", 3, bias=False), linear("head"))
INSIDE = (linear("inner"), linear("head"))

CASES = (
    Case(
        "norms",
        Norms,
        lambda: batch(4, 2, 5, 5),
        (
            affine("conv2d", "conv", bias=False),
            affine("batch_norm", "batch"),
            affine("group_norm", "group"),
            affine("instance_norm", "instance"),
            affine("layer_norm", "layer"),
            linear("inner"),
            affine("batch_norm", "flat"),
            affine("rms_norm", "rms", bias=False),
            ("scale_and_shift", ("own_scale", "own_shift"), 1),
            linear("head"),
        ),
        "categorical",
    ),
    Case(
        "embedding_bag",
        Bag,
        lambda: (torch.randint(13, (5, 4)),),
        (
            affine("embedding_bag", "bag", bias=False),
            affine("embedding_bag", "means", bias=False),
            linear("head"),
        ),
        "categorical",
    ),
    Case(
        "tables",
        Tables,
        lambda: (torch.randint(9, (5, 4)), torch.randint(9, (5,))),
        (affine("embedding", "words", 2, bias=False), linear("head")),
    ),
    Case("recurrent", lambda: Recurrent(False), lambda: batch(5, 4, 3), RECURRENT),
    Case(
        "recurrent_from_zero",
        lambda: Recurrent(True),
        lambda: batch(5, 4, 3),
        (linear("input", 4), linear("state", 4, bias=False), linear("head")),
    ),
    Case(
        "several_outputs",
        SeveralOutputs,
        lambda: batch(5, 5),
        (linear("trunk"), linear("mean"), linear("spread")),
        of_several_outputs,
    ),
    Case(
        "keywords_only",
        KeywordsOnly,
        tuple,
        (linear("left"), linear("right")),
        keywords=lambda: {"left": torch.randn(5, 5), "right": torch.randn(5, 3), "scale": 0.5},
    ),
    Case(
        "cross_entropy_inside",
        lambda: LossInside("ce"),
        lambda: (*batch(5, 5), torch.randint(3, (5,))),
        INSIDE,
        None,
    ),
    Case("mse_inside", lambda: LossInside("mse"), lambda: (*batch(5, 5), *batch(5, 3)), INSIDE, None),
    Case("bce_inside", lambda: LossInside("bce"), lambda: (*batch(5, 5), torch.rand(5, 3)), INSIDE, None),
    Case("frozen", Frozen, lambda: batch(5, 5), (linear("middle", bias=False), linear("head"))),
    Case(
        "unused",
        Unused,
        lambda: batch(5, 5),
        (linear("used"),),
        unused=("never.weight", "never.bias", "detached.weight", "detached.bias"),
    ),
    Case(
        "generic",
        Generic,
        lambda: batch(5, 5),
        INSIDE,
        generic=("gate", "width", "temperature"),
    ),
    Case(
        "elementwise",
        Elementwise,
        lambda: batch(3, 4, 5),
        (
            *(("scale_and_shift", (name,), 1) for name in ("position", "scale", "channel_shift", "one")),
            linear("head"),
        ),
    ),
    Case(
        "prototypes",
        Prototypes,
        lambda: batch(5, 5),
        (linear("inner"), ("scale_and_shift", ("centers",), 1), ("scale_and_shift", ("threshold",), 1)),
    ),
    Case(
        "own_layer",
        Mixed,
        lambda: batch(5, 5),
        (linear("inner"), ("mixture", ("mix",), 1), linear("head")),
        layers=(mixture,),
    ),
    Case(
        "rare",
        Rare,
        lambda: (*batch(5, 5), torch.randint(6, (5,))),
        (
            linear("inner"),
            affine("prelu", "slopes", bias=False),
            affine("prelu", "slope", bias=False),
            affine("bilinear", "products"),
            ("embedding", ("table",), 1),
        ),
    ),
    Case("evaluated", lambda: mlp().eval(), lambda: batch(5, 6), (linear("0"), linear("2", bias=False), linear("4"))),
)
