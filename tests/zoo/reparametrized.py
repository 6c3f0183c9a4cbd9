"""Parameters behind functions: gates, standardized convolutions, weight normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .case import Case, Expected, linear
from .dense import batch


class Gates(nn.Module):
    """A function of every element of a gain, before it multiplies or shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.rate = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.randn(4))
        self.gate, self.floor, self.size = (nn.Parameter(torch.randn(4)) for _ in range(3))
        self.norm, self.linear = nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 4, bias=False)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.temperature.clamp(max=4.6).exp()
        x = self.norm(x * -torch.exp(0.5 * self.rate)) * F.softplus(self.size)
        x = torch.sigmoid(2 * self.gate - 1).view(1, -1, 1) * x.mT + self.floor.abs().unsqueeze(-1)
        return F.linear(x.mT, self.linear.weight, torch.tanh(self.bias))


GATES: tuple[Expected, ...] = (
    *(("scale_and_shift", (name,), 1) for name in ("temperature", "rate", "size", "gate", "floor")),
    linear("linear", bias=False),
    ("linear", ("bias",), 1),
)


class StandardizedConv(nn.Conv2d):
    """As in NFNets, with a gain; without one as in BiT."""

    def __init__(self, channels: int, filters: int, kernel: int, *, gain: bool, groups: int = 1) -> None:
        super().__init__(channels, filters, kernel, groups=groups)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        filters = self.weight.reshape(1, self.out_channels, -1)
        gain = None if self.gain is None else (0.3 * self.gain).view(-1)
        weight = F.batch_norm(filters, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding, 1, self.groups)


class Standardized(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            StandardizedConv(3, 6, 3, gain=True),
            nn.GELU(),
            StandardizedConv(6, 6, 3, gain=True, groups=2),
            nn.GELU(),
            StandardizedConv(6, 4, 1, gain=False),
            nn.Flatten(2),
        )


class StandardizedByHand(nn.Module):
    """Without batch_norm: as Qiao et al. wrote it, as BiT did, with groups; centered; demodulated as in StyleGAN 2."""

    def __init__(self) -> None:
        super().__init__()
        self.qiao, self.bit, self.grouped = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 4, 2, groups=2)
        self.centered, self.style = nn.Linear(4, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.qiao.weight
        w = w - w.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True).mean(dim=3, keepdim=True)
        w = w / (w.view(w.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5).expand_as(w)
        x = F.relu(F.conv2d(x, w, self.qiao.bias))
        var, mean = torch.var_mean(self.bit.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        x = F.relu(F.conv2d(x, (self.bit.weight - mean) / torch.sqrt(var + 1e-10), self.bit.bias))
        w = self.grouped.weight
        w = torch.rsqrt(w.var((1, 2, 3), keepdim=True) + 1e-5) * (w - w.flatten(1).mean(-1).view(-1, 1, 1, 1))
        x = F.relu(F.conv2d(x, w, self.grouped.bias, groups=2)).mean((2, 3))
        w = self.centered.weight
        x = torch.tanh(F.linear(x, w - w.mean(1, keepdim=True)))
        w = self.style.weight
        return F.linear(x, w * torch.rsqrt(w.pow(2).sum(1, keepdim=True) + 1e-8), self.style.bias)


class WeightNorm(nn.Module):
    """Filter by filter, by place in the kernel, as the position embedding of wav2vec 2, by channel of the input, as in
    decoders of audio, and of a whole table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(4, 6))
        self.conv = weight_norm(nn.Conv1d(6, 6, 3, padding=1, groups=2), dim=2)
        self.up = weight_norm(nn.ConvTranspose1d(6, 4, 4, 2))
        self.kinds = weight_norm(nn.Embedding(3, 4), dim=None)
        self.head = spectral_norm(nn.Linear(4, 2))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        h = self.up(torch.tanh(self.conv(torch.tanh(self.linear(x)).mT)))
        y: Tensor = self.head(torch.tanh(h.mT) + self.kinds(kinds))
        return y


class Discriminator(nn.Module):
    """Spectrally normalized, with a projection of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(1, 3, 3, 2, 1))
        self.kinds, self.head = spectral_norm(nn.Embedding(3, 12)), spectral_norm(nn.Linear(12, 1))

    def forward(self, images: Tensor, kinds: Tensor) -> Tensor:
        h = F.leaky_relu(self.conv(images), 0.2).flatten(1)
        y: Tensor = self.head(h) + (self.kinds(kinds) * h).sum(1, keepdim=True)
        return y


class Cosine(nn.Module):
    """Classes are directions, as in recognition of faces."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.directions = nn.Linear(5, 6), nn.Parameter(torch.randn(4, 6))
        self.sharpness = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.sharpness * F.linear(F.normalize(self.features(x)), F.normalize(self.directions))


class AdaptiveRank(nn.Module):
    """An adapter of AdaLoRA: singular values of their own between two thin matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.right, self.left = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(4, 2))
        self.values = nn.Parameter(torch.randn(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + x @ (self.right * self.values).T @ self.left.T * 0.5
        return y


class Differential(nn.Module):
    """Attention less attention, by a number of four small vectors (Ye et al. 2024); branches by shares that sum to one;
    a temperature, and a width that shifts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(0.3 * torch.randn(3)) for _ in range(4))
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.shares, self.gates = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 4))
        self.width, self.temperature = nn.Parameter(torch.rand(4) + 1), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.exp((self.q1 * self.k1).sum()), torch.exp((self.q2 * self.k2).sum())
        x = self.inner(torch.softmax(x, -1) - (first - second + 0.8) * torch.softmax(-x, -1))
        shares, gates = self.shares.softmax(0), torch.sigmoid(self.gates)
        x = shares[0] * x + shares[1] * torch.tanh(x) + shares[2] * torch.sin(x)
        x = gates[0] * x + gates[1] * torch.tanh(x)
        y: Tensor = self.head(x / self.width + self.width)
        return y / torch.exp(self.temperature)


class Blended(nn.Module):
    """A learned mixture of images and frames, as in Stable Video Diffusion, and a row for what is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.missing = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.randn(4))
        self.space, self.time = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, single: Tensor) -> Tensor:
        x = torch.where(single[:, 1:, None], self.missing, x)
        one = torch.ones(1, 1, device=x.device)
        share = torch.where(single, one, torch.sigmoid(self.mix)[..., None])[:, :-1, None]
        return share * self.space(x) + (1.0 - share) * torch.tanh(self.time(x))


CASES = (
    Case("gates", Gates, lambda: batch(3, 5, 4), GATES),
    Case(
        "standardized",
        Standardized,
        lambda: batch(3, 3, 8, 8),
        (
            *(("conv2d", (f"{n}.{name}",), 1) for n in (0, 2) for name in ("weight", "gain", "bias")),
            *(("conv2d", (f"4.{name}",), 1) for name in ("weight", "bias")),
        ),
    ),
    Case(
        "standardized_by_hand",
        StandardizedByHand,
        lambda: batch(3, 3, 8, 8),
        (
            *(("conv2d", (f"{n}.{name}",), 1) for n in ("qiao", "bit", "grouped") for name in ("weight", "bias")),
            ("linear", ("centered.weight",), 1),
            *(("linear", (f"style.{name}",), 1) for name in ("weight", "bias")),
        ),
    ),
    Case(
        "weight_norm",
        WeightNorm,
        lambda: (torch.randn(3, 5, 4), torch.randint(3, (3, 1))),
        (
            *(
                (layer, (f"{name}.parametrizations.weight.original{n}",), 1)
                for layer, name in (("linear", "linear"), ("conv1d", "conv"), ("conv_transpose1d", "up"))
                for n in range(2)
            ),
            *(("embedding", (f"kinds.parametrizations.weight.original{n}",), 1) for n in range(2)),
            ("linear", ("linear.bias",), 1),
            ("conv1d", ("conv.bias",), 1),
            ("conv_transpose1d", ("up.bias",), 1),
            *(("linear", (f"head.{name}",), 1) for name in ("parametrizations.weight.original", "bias")),
        ),
    ),
    Case(
        "discriminator",
        Discriminator,
        lambda: (torch.randn(3, 1, 4, 4), torch.randint(3, (3,))),
        (
            *(("conv2d", (f"conv.{name}",), 1) for name in ("parametrizations.weight.original", "bias")),
            *(("linear", (f"head.{name}",), 1) for name in ("parametrizations.weight.original", "bias")),
            ("embedding", ("kinds.parametrizations.weight.original",), 1),
        ),
        "multi_bernoulli",
    ),
    Case(
        "adaptive_rank",
        AdaptiveRank,
        lambda: batch(3, 5),
        (linear("linear"), *(("linear", (name,), 1) for name in ("right", "left", "values"))),
    ),
    Case(
        "differential",
        Differential,
        lambda: batch(3, 5, 4),
        (
            *(("scale_and_shift", (name,), 1) for name in ("q1", "k1", "q2", "k2", "temperature")),
            *(("scale_and_shift", (name,), 1) for name in ("gates[0:1]", "gates[1:2]")),
            ("scale_and_shift", ("shares",), 3),
            ("scale_and_shift", ("width",), 2),
            *(linear(name) for name in ("inner", "head")),
        ),
    ),
    Case(
        "blended",
        Blended,
        lambda: (torch.randn(3, 5, 4), torch.rand(3, 6) > 0.5),
        (linear("space"), linear("time"), *(("scale_and_shift", (name,), 1) for name in ("mix", "missing"))),
    ),
    Case(
        "cosine",
        Cosine,
        lambda: batch(3, 5),
        (linear("features"), ("linear", ("directions",), 1), ("scale_and_shift", ("sharpness",), 1)),
        "categorical",
    ),
)
