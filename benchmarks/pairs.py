"""Ordinary modules that keep the shape of their input, so that any of them may follow any other.

Two sizes are equal on purpose: the cases and the features, so that a dimension that was taken for another is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

N, STEPS, WIDTH, SIDE = 4, 6, 4, 5
Make = Callable[[], nn.Module]


class Of(nn.Module):
    """A function of the input, of parameters of these shapes, and of modules."""

    def __init__(self, function: Callable[..., Tensor], *parts: tuple[int, ...] | nn.Module) -> None:
        super().__init__()
        self.function = function
        shapes = [part for part in parts if isinstance(part, tuple)]
        self.weights = nn.ParameterList([torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes])
        self.modules_inside = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights, *self.modules_inside)


def recurrent(kind: Any, **options: Any) -> Make:
    wide = 2 if options.get("bidirectional") else 1

    def forward(x: Tensor, layer: nn.Module) -> Tensor:
        if options.get("batch_first"):
            output: Tensor = layer(x)[0]
            return output
        return layer(x.transpose(0, 1))[0].transpose(0, 1)

    return lambda: Of(forward, kind(WIDTH, WIDTH // wide, **options))


def packed(kind: Any) -> Make:
    def forward(x: Tensor, layer: nn.Module) -> Tensor:
        lengths = torch.arange(x.shape[0]) % (STEPS - 2) + 3
        sequences = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(layer(sequences)[0], batch_first=True, total_length=STEPS)
        return output

    return lambda: Of(forward, kind(WIDTH, WIDTH, batch_first=True))


def stepwise(x: Tensor, cell: nn.Module) -> Tensor:
    state, outputs = x.new_zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state = cell(x[:, t], state)
        outputs.append(state)
    return torch.stack(outputs, 1)


def attention(x: Tensor, layer: nn.Module) -> Tensor:
    output: Tensor = layer(x, x, x, need_weights=False)[0]
    return output


def turned(layer: nn.Module) -> nn.Module:
    """A layer on [N, C, T]."""
    return Of(lambda x, inner: inner(x.mT).mT, layer)


def with_token(x: Tensor, token: Tensor, layer: nn.Module) -> Tensor:
    longer = torch.cat([token.expand(x.shape[0], 1, -1), x], 1)
    output: Tensor = layer(longer)[:, 1:]
    return output


def lookup(x: Tensor, table: nn.Module) -> Tensor:
    output: Tensor = x + table(x.argmax(-1))
    return output


def drop_path(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape[0], *(1,) * (x.dim() - 1)).round()


def drop_path_by_len(x: Tensor) -> Tensor:
    return x * torch.rand(len(x), *(1,) * (x.dim() - 1)).round()


def mixture(x: Tensor, gate: nn.Module, experts: Tensor) -> Tensor:
    output: Tensor = torch.einsum("nte,nteo->nto", gate(x).softmax(-1), torch.einsum("nti,eoi->nteo", x, experts))
    return output


SEQUENCES: dict[str, Make] = {
    **{
        f"{kind.__name__}{', steps first' * (not first)}": recurrent(kind, batch_first=first)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for first in (True, False)
    },
    "LSTM in two directions": recurrent(nn.LSTM, batch_first=True, bidirectional=True, num_layers=2, dropout=0.2),
    "LSTM, packed": packed(nn.LSTM),
    "GRU, packed": packed(nn.GRU),
    "GRUCell": lambda: Of(stepwise, nn.GRUCell(WIDTH, WIDTH)),
    "attention": lambda: Of(attention, nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True),
    "encoder, norm first": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, norm_first=True),
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Dropout(0.1), nn.Linear(7, WIDTH)),
    "residual": lambda: Of(lambda x, layer: x + layer(x), nn.Linear(WIDTH, WIDTH)),
    "GLU": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "product from the left": lambda: Of(lambda x, w: (w @ x.mT).mT, (WIDTH, WIDTH)),
    "einsum": lambda: Of(lambda x, w: torch.einsum("bti,oi->bto", x, w), (WIDTH, WIDTH)),
    "mixing of positions": lambda: turned(nn.Linear(STEPS, STEPS)),
    "Conv1d": lambda: turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "Conv1d, depthwise": lambda: turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)),
    "ConvTranspose1d": lambda: turned(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "BatchNorm1d": lambda: turned(nn.BatchNorm1d(WIDTH)),
    "GroupNorm": lambda: turned(nn.GroupNorm(2, WIDTH)),
    "InstanceNorm1d": lambda: turned(nn.InstanceNorm1d(WIDTH, affine=True)),
    "PReLU": lambda: turned(nn.PReLU(WIDTH)),
    "ReLU in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "positions": lambda: Of(lambda x, table: table + x, (STEPS, WIDTH)),
    "positions, cut": lambda: Of(lambda x, table: x + table[:, : x.shape[1]], (1, 9, WIDTH)),
    "token": lambda: Of(with_token, (1, 1, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "lookup": lambda: Of(lookup, nn.Embedding(WIDTH, WIDTH)),
    "scale": lambda: Of(lambda x, g: g * x, (WIDTH,)),
    "shift": lambda: Of(lambda x, b: b - x, (WIDTH,)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "adapter": lambda: Of(lambda x, a, b: x + x @ a @ b, (WIDTH, 2), (2, WIDTH)),
    "mixture": lambda: Of(lambda x, e, gate: mixture(x, gate, e), (3, WIDTH, WIDTH), nn.Linear(WIDTH, 3)),
    "checkpoint": lambda: Of(lambda x, layer: checkpoint(layer, x, use_reentrant=False), nn.Linear(WIDTH, WIDTH)),
    "Dropout": lambda: nn.Dropout(0.3),
    "Dropout1d": lambda: nn.Dropout1d(0.3),
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "RReLU": lambda: nn.RReLU(),
    "noise": lambda: Of(lambda x: x + 0.1 * torch.randn_like(x)),
    "drop path": lambda: Of(drop_path),
    "drop path by len": lambda: Of(drop_path_by_len),
    "transposed twice": lambda: Of(lambda x: x.mT.contiguous().mT),
}

# --- images -----------------------------------------------------------------------------------------------------------


def over_pixels(layer: nn.Module) -> nn.Module:
    """A layer on [N, pixels, C]."""
    return Of(lambda x, inner: inner(x.flatten(2).mT).mT.reshape(x.shape), layer)


def squeeze(x: Tensor, down: nn.Module, up: nn.Module) -> Tensor:
    gate: Tensor = torch.sigmoid(up(torch.relu(down(x.mean((2, 3))))))
    return x * gate[:, :, None, None]


def two_dims(kind: Any, **options: Any) -> Make:
    return lambda: kind(WIDTH, WIDTH, 3, padding=1, **options)


def permuted(layer: nn.Module) -> nn.Module:
    """A layer on [N, H, W, C]."""
    return Of(lambda x, inner: inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), layer)


IMAGES: dict[str, Make] = {
    "Conv2d": two_dims(nn.Conv2d),
    "Conv2d, no bias": two_dims(nn.Conv2d, bias=False),
    "Conv2d, grouped": two_dims(nn.Conv2d, groups=2),
    "Conv2d, depthwise": two_dims(nn.Conv2d, groups=WIDTH),
    "Conv2d, reflected": two_dims(nn.Conv2d, padding_mode="reflect"),
    "Conv2d, of pixels": lambda: nn.Conv2d(WIDTH, WIDTH, 1),
    "ConvTranspose2d": two_dims(nn.ConvTranspose2d),
    "separable": lambda: nn.Sequential(two_dims(nn.Conv2d, groups=WIDTH)(), nn.Conv2d(WIDTH, WIDTH, 1)),
    "residual": lambda: Of(lambda x, layer: x + layer(x), two_dims(nn.Conv2d)()),
    "block": lambda: nn.Sequential(two_dims(nn.Conv2d, bias=False)(), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)),
    "squeeze": lambda: Of(squeeze, nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)),
    "attention": lambda: over_pixels(Of(attention, nn.MultiheadAttention(WIDTH, 2, batch_first=True))),
    "attention over lines": lambda: Of(
        lambda x, layer: (
            attention(x.permute(0, 2, 3, 1).flatten(0, 1), layer)
            .view(x.shape[0], SIDE, SIDE, WIDTH)
            .permute(0, 3, 1, 2)
        ),
        nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "LSTM over pixels": lambda: over_pixels(recurrent(nn.LSTM, batch_first=True)()),
    "Linear of channels": lambda: permuted(nn.Linear(WIDTH, WIDTH)),
    "Linear of columns": lambda: nn.Linear(SIDE, SIDE),
    "LayerNorm of channels": lambda: permuted(nn.LayerNorm(WIDTH)),
    "LayerNorm of images": lambda: nn.LayerNorm([WIDTH, SIDE, SIDE]),
    "BatchNorm2d": lambda: nn.BatchNorm2d(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(2, WIDTH),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    "PReLU": lambda: nn.PReLU(WIDTH),
    "scale": lambda: Of(lambda x, g: g * x, (WIDTH, 1, 1)),
    "shift": lambda: Of(lambda x, b: b - x, (WIDTH, 1, 1)),
    "table": lambda: Of(lambda x, table: table + x, (1, WIDTH, SIDE, SIDE)),
    "weight norm": lambda: parametrizations.weight_norm(two_dims(nn.Conv2d)()),
    "shuffle": lambda: nn.ChannelShuffle(2),
    "pool": lambda: nn.AvgPool2d(3, 1, 1),
    "resized": lambda: Of(lambda x: F.interpolate(F.interpolate(x, scale_factor=2), (SIDE, SIDE), mode="bilinear")),
    "channels last": lambda: Of(lambda x: x.to(memory_format=torch.channels_last)),
    "transposed twice": lambda: Of(lambda x: x.mT.contiguous().mT),
    "Dropout": lambda: nn.Dropout(0.3),
    "Dropout2d": lambda: nn.Dropout2d(0.3),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.3),
    "RReLU": lambda: nn.RReLU(),
    "noise": lambda: Of(lambda x: x + 0.1 * torch.randn_like(x)),
    "drop path": lambda: Of(drop_path),
    "drop path by len": lambda: Of(drop_path_by_len),
}


class Chain(nn.Module):
    """Modules one after another, and a head."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.modules_inside, self.head = nn.ModuleList(modules), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        images = x.dim() == 4
        for module in self.modules_inside:
            x = module(x)
        logits: Tensor = self.head(x.mean((2, 3)) if images else x.mean(1))
        return logits
