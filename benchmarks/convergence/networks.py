"""The networks of the tasks. The last matrix of each is its output layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.decoder import Decoder
from benchmarks.step_models import Residual


def plain(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Tanh layers without skips and norms, from Glorot's start."""
    widths = (inputs, *(layers - 1) * (width,), outputs)
    modules: list[nn.Module] = []
    for i, o in zip(widths, widths[1:], strict=False):
        linear = nn.Linear(i, o)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


class Adder(nn.Module):
    """An LSTM whose last state tells the sum: [N, T, 2] -> [N, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(2, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.head(states[:, -1])  # type: ignore[no-any-return]


class Residual1d(nn.Module):
    """The block of ResNet-8 on sequences."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm1d(outputs)
        self.conv2 = nn.Conv1d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm1d(outputs)
        short = nn.Sequential(nn.Conv1d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm1d(outputs))
        self.short = short if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def resnet8_1d(widths: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """[N, 40] -> [N, 10]."""
    first, second, third = widths
    return nn.Sequential(
        nn.Unflatten(1, (1, -1)),
        nn.Conv1d(1, first, 3, 1, 1, bias=False),
        nn.BatchNorm1d(first),
        nn.ReLU(),
        Residual1d(first, first, 1),
        Residual1d(first, second, 2),
        Residual1d(second, third, 2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(third, 10),
    )


def resnet8_2d(widths: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """[N, 8, 8] -> [N, 10]."""
    first, second, third = widths
    return nn.Sequential(
        nn.Unflatten(1, (1, -1)),
        nn.Conv2d(1, first, 3, 1, 1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        Residual(first, first, 1),
        Residual(first, second, 2),
        Residual(second, third, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, 10),
    )


class GPT(nn.Module):
    """Decoders between an embedding of tokens and positions and an output layer: [N, S] tokens -> [N, S, tokens]."""

    positions: Tensor

    def __init__(self, tokens: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Decoder(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        self.register_buffer("positions", torch.arange(length), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # GPT-2's 0.02 is for its width: with 48 it holds first-order methods back
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=(parameter.shape[1] * (2 * layers if deep else 1)) ** -0.5)
            elif not name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(self.positions[: tokens.shape[1]])
        for decoder in self.blocks:
            x = decoder(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """An embedding of intensities, a convolution, a depthwise-separable one, a norm, and a layer with two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.intensity = nn.Embedding(17, 8)  # a pixel counts 0 to 16 dark dots
        self.stem = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.depthwise = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16, bias=False)
        self.pointwise = nn.Conv2d(16, 32, 1)
        self.project = nn.Linear(128, 32)
        self.refine = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, intensities: Tensor) -> Tensor:
        """[N, 8, 8] whole numbers -> [N, 10] logits."""
        image = self.intensity(intensities).permute(0, 3, 1, 2)
        image = image.contiguous()  # group_norm has no forward-mode derivative in another memory order
        image = F.silu(self.norm(self.stem(image)))
        image = F.silu(self.pointwise(self.depthwise(image)))
        features = torch.tanh(self.project(image.flatten(1)))
        for _ in range(2):
            features = features + torch.tanh(self.refine(features))
        return self.head(features)  # type: ignore[no-any-return]
