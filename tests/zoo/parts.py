"""Parameters that reach their use in pieces, put together from several, or multiplied by a number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Expected, affine, linear
from .dense import batch


class Decoder(nn.Module):
    """torch's own decoder: cross attention takes the first rows of one weight for queries, the others for memory."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = self.head(self.decoder(x, memory).mean(1))
        return y


def decoder_expected() -> tuple[Expected, ...]:
    prefix = "decoder.layers.0"
    own, other = f"{prefix}.self_attn", f"{prefix}.multihead_attn"
    return (
        linear("head"),
        ("linear", (f"{own}.in_proj_weight", f"{own}.in_proj_bias"), 1),
        ("linear", (f"{other}.in_proj_weight[0:8]", f"{other}.in_proj_bias[0:8]"), 1),
        ("linear", (f"{other}.in_proj_weight[8:24]", f"{other}.in_proj_bias[8:24]"), 1),
        *(linear(f"{path}.out_proj") for path in (own, other)),
        *(linear(f"{prefix}.{name}") for name in ("linear1", "linear2")),
        *(affine("layer_norm", f"{prefix}.{name}") for name in ("norm1", "norm2", "norm3")),
    )


class OtherWidths(nn.Module):
    """Keys and values of other widths: three weights, and one bias in three pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        y: Tensor = self.attention(query, key, value, need_weights=False)[0]
        return y


class Projections(nn.Module):
    """Three projections of their own, whose biases torch's attention takes as one, as in WavLM; keys have none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))
        self.keyless = nn.ModuleList(nn.Linear(4, 4, bias=n != 1) for n in range(3))

    def forward(self, x: Tensor) -> Tensor:
        time_first = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            *(time_first, time_first, time_first, 4, 2, None),
            *(torch.cat([self.q.bias, self.k.bias, self.v.bias]), None, None, False, 0.0),
            *(self.out.weight, self.out.bias),
            use_separate_proj_weight=True,
            q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight,
            v_proj_weight=self.v.weight,
            need_weights=False,
        )
        x = y.transpose(0, 1)
        first, _, last = (layer.bias for layer in self.keyless)
        biases = torch.stack([first, torch.zeros_like(first), last])
        q, k, v = (F.linear(x, layer.weight, bias) for layer, bias in zip(self.keyless, biases.unbind(0), strict=True))
        return torch.softmax(q @ k.mT, -1) @ v


class Biases(nn.Module):
    """Queries and values with a bias, keys without: put together as in BEiT, zeroed as in Swin 2, added as in EVA."""

    def __init__(self) -> None:
        super().__init__()
        self.beit, self.eva = nn.Linear(4, 12, bias=False), nn.Linear(4, 12, bias=False)
        self.swin = nn.Linear(4, 12)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.q, self.v = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("k_bias", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + attended(
            F.linear(x, self.beit.weight, torch.cat((self.q_bias, self.get_buffer("k_bias"), self.v_bias)))
        )
        x = x + attended(self.eva(x) + torch.cat((self.q, torch.zeros_like(self.v), self.v)))
        bias = self.swin.bias.clone()
        length = bias.numel() // 3
        bias[length : 2 * length].zero_()
        return x + attended(F.linear(x, self.swin.weight, bias))


def attended(qkv: Tensor) -> Tensor:
    q, k, v = qkv.chunk(3, -1)
    return torch.softmax(q @ k.mT, -1) @ v


def biases_expected() -> tuple[Expected, ...]:
    found: list[Expected] = []
    biases = {"beit": ("q_bias", "v_bias"), "eva": ("q", "v"), "swin": ("swin.bias[0:4]", "swin.bias[8:12]")}
    for name, (q, v) in biases.items():
        found += [
            ("linear", (f"{name}.weight[0:4]", q), 1),
            ("linear", (f"{name}.weight[4:8]",), 1),
            ("linear", (f"{name}.weight[8:12]", v), 1),
        ]
    return tuple(found)


class Head(nn.Module):
    """The output layer of MobileBERT: the embedding in front of a weight of its own, along the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(11, 3), nn.Linear(3, 5)
        self.more = nn.Linear(11, 2, bias=False)
        self.bias = nn.Parameter(torch.zeros(11))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.words(ids).mean(1)))
        return x @ torch.cat([self.words.weight.t(), self.more.weight], dim=0) + self.bias


class Slices(nn.Module):
    """Parts of one weight in layers of their own, beside the whole; a stack of weights, one of them never used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.conv = nn.Conv1d(4, 4, 3, padding="same")
        self.stack = nn.Parameter(torch.randn(3, 4, 4))
        self.gain = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        wide, narrow = self.linear(x), F.linear(x, self.linear.weight[:4], self.linear.bias[:4])
        x = torch.tanh(wide[..., 2:] + narrow * self.gain[:4]) * self.gain[4:]
        x = self.conv(x.mT) + F.conv1d(x.mT[:, :2], self.conv.weight[:, :2], padding="same")
        return torch.tanh(x.mT @ self.stack[0]) @ self.stack[2]


SLICES: tuple[Expected, ...] = (
    ("linear", ("linear.weight[0:4]", "linear.bias[0:4]"), 2),
    ("linear", ("linear.weight[4:6]", "linear.bias[4:6]"), 1),
    ("scale_and_shift", ("gain[0:4]",), 1),
    ("scale_and_shift", ("gain[4:8]",), 1),
    ("conv1d", ("conv.weight[:, 0:2]",), 2),
    ("conv1d", ("conv.weight[:, 2:4]",), 1),
    ("conv1d", ("conv.bias",), 1),
    ("linear", ("stack[0:1]",), 1),
    ("linear", ("stack[2:3]",), 1),
)


class Multiples(nn.Module):
    """Gains around one, weights of equalized learning rates (Karras et al. 2018), one of them in two multiples."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.gate = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
        self.equalized, self.conv = nn.Linear(4, 4), nn.Conv1d(4, 4, 3, padding="same", bias=False)
        self.shared = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + 0.5 * self.gain) * (2 - self.gate)
        x = torch.tanh(F.linear(x, self.equalized.weight / 2, 1 - 3 * self.equalized.bias))
        x = F.conv1d(x.mT, self.conv.weight * 0.25, padding="same").mT
        return F.linear(torch.tanh(F.linear(x, -self.shared.weight)), self.shared.weight * 2)


MULTIPLES: tuple[Expected, ...] = (
    ("scale_and_shift", ("gain",), 1),
    ("scale_and_shift", ("gate",), 1),
    linear("equalized"),
    affine("conv1d", "conv", bias=False),
    linear("shared", 2, bias=False),
)


def two_sequences() -> tuple[Tensor, ...]:
    return torch.randn(3, 5, 8), torch.randn(3, 4, 8)


def three_sequences() -> tuple[Tensor, ...]:
    return torch.randn(3, 5, 8), torch.randn(3, 4, 6), torch.randn(3, 4, 4)


CASES = (
    Case("cross_attention", Decoder, two_sequences, decoder_expected(), "categorical"),
    Case(
        "attention_of_other_widths",
        OtherWidths,
        three_sequences,
        (
            *(
                ("linear", (f"attention.{name}_proj_weight", f"attention.in_proj_bias[{8 * n}:{8 * n + 8}]"), 1)
                for n, name in enumerate("qkv")
            ),
            linear("attention.out_proj"),
        ),
    ),
    Case(
        "biases_of_several",
        Projections,
        lambda: batch(3, 5, 4),
        (
            *(linear(name) for name in ("q", "k", "v", "out")),
            *(linear(f"keyless.{n}", bias=n != 1) for n in range(3)),
        ),
    ),
    Case("biases_in_pieces", Biases, lambda: batch(3, 5, 4), biases_expected(), unused=("swin.bias[4:8]",)),
    Case(
        "weight_of_two",
        Head,
        lambda: (torch.randint(11, (3, 4)),),
        (
            affine("embedding", "words", 2, bias=False),
            linear("up"),
            ("linear", ("more.weight",), 1),
            ("linear", ("bias",), 1),
        ),
        "categorical",
    ),
    Case("slices", Slices, lambda: batch(3, 5, 4), SLICES, unused=("stack[1:2]",)),
    Case("multiples", Multiples, lambda: batch(3, 5, 4), MULTIPLES),
)
