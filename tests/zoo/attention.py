"""Transformers: torch's own encoder, one by hand, and two shaped like GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Expected, affine, linear
from .dense import batch


class Encoder(nn.Module):
    """torch's own encoder layers, in training mode with dropout."""

    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.1, "gelu", batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, S, 8] or [S, N, 8]
        y: Tensor = self.head(self.encoder(x).mean(1 if self.batch_first else 0))
        return y


def encoder_expected() -> tuple[Expected, ...]:
    found: list[Expected] = [linear("head")]
    for prefix in ("encoder.layers.0", "encoder.layers.1"):
        found += [
            ("linear", (f"{prefix}.self_attn.in_proj_weight", f"{prefix}.self_attn.in_proj_bias"), 1),
            linear(f"{prefix}.self_attn.out_proj"),
            linear(f"{prefix}.linear1"),
            linear(f"{prefix}.linear2"),
            affine("layer_norm", f"{prefix}.norm1"),
            affine("layer_norm", f"{prefix}.norm2"),
        ]
    return tuple(found)


class HandWritten(nn.Module):
    """Separate projections, softmax written out, a learned position per patch, LayerScale, perhaps a class token."""

    def __init__(self, token: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8)) if token else None
        self.position = nn.Parameter(0.1 * torch.randn(1, 4 + token, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma1, self.gamma2 = nn.Parameter(0.1 * torch.ones(8)), nn.Parameter(0.1 * torch.ones(8))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 3)

    def attention(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        q, k, v = (f(x).view(n, s, 2, d // 2).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = self.drop(torch.softmax(q @ k.transpose(-2, -1) / (d // 2) ** 0.5, dim=-1))
        y: Tensor = self.out((weights @ v).transpose(1, 2).reshape(n, s, d))
        return y

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.position
        x = x + self.gamma1 * self.attention(self.norm1(x))
        x = x + self.gamma2 * self.down(F.gelu(self.up(self.norm2(x))))
        y: Tensor = self.head(x[:, 0])
        return y


HAND_WRITTEN: tuple[Expected, ...] = (
    affine("conv2d", "patch"),
    *(("scale_and_shift", (name,), 1) for name in ("position", "gamma1", "gamma2")),
    *(affine("layer_norm", name) for name in ("norm1", "norm2")),
    *(linear(name) for name in ("query", "key", "value", "up", "down", "head")),
    linear("out", bias=False),
)


class GPT(nn.Module):
    """Token and position embeddings, causal attention from one projection, pre-norm, a head that may be tied."""

    def __init__(self, tied: bool, vocabulary: int = 11, context: int = 7, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.ln_f(x))
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        q, k, v = (t.view(n, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, s, d))
        return x + self.mlp(self.ln_2(x))


def gpt_expected(tied: bool) -> tuple[Expected, ...]:
    found = [affine("embedding", "wte", 2 if tied else 1, bias=False), affine("embedding", "wpe", bias=False)]
    found += [affine("layer_norm", "ln_f")] + ([] if tied else [linear("head", bias=False)])
    for n in range(2):
        found += [affine("layer_norm", f"blocks.{n}.{name}") for name in ("ln_1", "ln_2")]
        found += [linear(f"blocks.{n}.{name}") for name in ("qkv", "proj", "mlp.0", "mlp.2")]
    return tuple(found)


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(11, (3, 7)),)


CASES = (
    Case("encoder_batch_first", lambda: Encoder(True), lambda: batch(3, 5, 8), encoder_expected(), "categorical"),
    Case("encoder_sequence_first", lambda: Encoder(False), lambda: batch(5, 3, 8), encoder_expected(), "categorical"),
    Case("encoder_norm_first", lambda: Encoder(True, True), lambda: batch(3, 5, 8), encoder_expected(), "categorical"),
    Case("encoder_by_hand", lambda: HandWritten(False), lambda: batch(3, 3, 8, 8), HAND_WRITTEN, "categorical"),
    Case(
        "class_token",
        lambda: HandWritten(True),
        lambda: batch(3, 3, 8, 8),
        (*HAND_WRITTEN, ("scale_and_shift", ("token",), 1)),
        "categorical",
    ),
    Case("gpt", lambda: GPT(tied=False), tokens, gpt_expected(tied=False), "categorical"),
    Case("gpt_tied", lambda: GPT(tied=True), tokens, gpt_expected(tied=True), "categorical"),
)
