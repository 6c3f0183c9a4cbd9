"""Idioms of language models and of vision models that no other model of the zoo has, as their libraries write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, affine, linear
from .dense import batch, parameter


class Language(nn.Module):
    """An encoder and a decoder of one table, which is a part of the output's weight, too (MobileBERT); gains on the
    left (Llama) and counted from one (Gemma); weights on the left, a kernel that loses a dimension and gets it back,
    and -exp of a parameter (Mamba); halves that add up to one (RWKV); a scaled sum of two products (DoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.more = nn.Embedding(9, 4), parameter(9, 2)
        self.llama, self.gemma, self.mix = parameter(4), parameter(4), parameter(1, 1, 4)
        self.dt, self.rate, self.conv = nn.Linear(4, 4, bias=False), parameter(4), nn.Conv1d(4, 4, 3, groups=4)
        self.base, self.down, self.up = (nn.Linear(*sizes, bias=False) for sizes in ((4, 6), (4, 2), (2, 6)))
        self.magnitude = nn.Parameter(torch.rand(6) + 0.5)

    def normalized(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # [N, S], [N, T]
        x = self.table(target) + self.table(source).mean(1, keepdim=True)
        x = self.llama * self.normalized(x)
        x = self.normalized(x) * (1.0 + self.gemma.float())
        x = x * self.mix + F.pad(x, (0, 0, 1, -1)) * (1 - self.mix)
        steps = F.softplus(torch.matmul(self.dt.weight, x.mT)).mT
        x = x * torch.exp(-torch.exp(self.rate.float()) * steps)
        kernel = self.conv.weight.squeeze(1).unsqueeze(1)
        x = x + F.silu(F.conv1d(F.pad(x.mT, (2, 0)), kernel, self.conv.bias, groups=4)).mT
        weight = self.base.weight + self.up.weight @ self.down.weight
        size = torch.linalg.norm(weight, dim=1).detach()
        x = (self.magnitude / size) * (self.base(x) + self.up(self.down(x)))
        return torch.tanh(x).matmul(torch.cat([self.table.weight.t(), self.more.t()], dim=0))


class Vision(nn.Module):
    """Two branches through one depthwise convolution and one norm (CoaT, BLIP); a token with the first position, which
    is fixed (ViT-MAE); normalized responses with addcmul (ConvNeXt V2); gates of heads that add up to one (ConViT);
    biases that are cut from one tensor by attention (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.token, self.gate = parameter(1, 1, 4), parameter(2)
        self.register_buffer("position", torch.randn(1, 17, 4))
        self.weight, self.bias = parameter(4), parameter(4)
        self.query, self.key, self.value, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # [N, 4, 4, 4]
        small = F.interpolate(self.conv(F.avg_pool2d(x, 2)), scale_factor=2)
        x = self.norm(self.conv(x).flatten(2).mT) + self.norm(small.flatten(2).mT)
        response = x.norm(p=2, dim=1, keepdim=True)
        response = response / (response.mean(-1, keepdim=True) + 1e-6)
        x = x + torch.addcmul(self.bias.view(1, 1, -1), self.weight.view(1, 1, -1), x * response)
        x = x + self.position[:, 1:]
        x = torch.cat([(self.token + self.position[:, :1]).expand(x.shape[0], -1, -1), x], dim=1)
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        gate = torch.sigmoid(self.gate).view(1, -1, 1, 1)
        scores = heads @ heads.mT
        scores = (1 - gate) * scores.softmax(-1) + gate * (-scores).softmax(-1)
        x = (scores @ heads).transpose(1, 2).flatten(2).transpose(0, 1)
        pooled, _ = F.multi_head_attention_forward(
            x[:1], x, x, 4, 2, None, torch.cat([self.query.bias, self.key.bias, self.value.bias]), None, None, False,
            0.0, self.out.weight, self.out.bias, use_separate_proj_weight=True, q_proj_weight=self.query.weight,
            k_proj_weight=self.key.weight, v_proj_weight=self.value.weight, need_weights=False,
        )  # fmt: skip
        return pooled[0]


CASES = (
    Case(
        "language",
        Language,
        lambda: (torch.randint(9, (3, 5)), torch.randint(9, (3, 4))),
        (
            affine("embedding", "table", 3, bias=False),
            ("linear", ("more",), 1),
            *(("scale_and_shift", (name,), 1) for name in ("llama", "gemma", "rate", "magnitude")),
            ("scale_and_shift", ("mix",), 2),
            affine("depthwise_conv1d", "conv"),
            *(linear(name, bias=False) for name in ("dt", "base", "down", "up")),
        ),
        "categorical",
    ),
    Case(
        "vision",
        Vision,
        lambda: batch(3, 4, 4, 4),
        (
            affine("depthwise_conv2d", "conv", 2),
            affine("layer_norm", "norm", 2),
            ("scale_and_shift", ("token",), 1),
            ("scale_and_shift", ("weight", "bias"), 1),
            ("scale_and_shift", ("gate",), 2),
            *(linear(name) for name in ("query", "key", "value", "out")),
        ),
    ),
)
