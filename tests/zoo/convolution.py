"""Convolutional models: every option, depthwise and separable, transposed, pyramids, and one shaped like ResNet-18."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Expected, affine, linear
from .dense import batch


def conv_options() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (3, 1), padding=(1, 0), dilation=(2, 1), bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding="same", groups=2),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=2, padding_mode="reflect"),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 1, padding="valid"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 4, 5, padding=2), nn.GELU(), nn.Conv1d(4, 6, 3, stride=2, groups=2), nn.GELU(), nn.Conv1d(6, 2, 1)
    )


def conv3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 2, (1, 2, 3), stride=(1, 2, 1)))


def depthwise() -> nn.Module:
    """With a multiplier, in one and in two dimensions."""
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.SiLU(inplace=True),
        nn.Conv2d(4, 8, 3, groups=4, bias=False),
        nn.Flatten(2),
        nn.Conv1d(8, 8, 3, groups=8),
    )


class Separable(nn.Module):
    """Depthwise and pointwise with nothing between; MobileNet's first blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.dw = nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False)
        self.pw = nn.Conv2d(3, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.pw(self.dw(x))).mean((2, 3)))
        return y


def decoder() -> nn.Module:
    """Transposed convolutions, from a vector to an image."""
    return nn.Sequential(
        nn.Linear(5, 16),
        nn.Unflatten(1, (4, 2, 2)),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2, bias=False),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 1, 3, dilation=2),
    )


class Pyramid(nn.Module):
    """A detection head shared by the levels of a pyramid: one convolution on inputs of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.tower = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.score = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        levels = [x, F.avg_pool2d(x, 2), F.avg_pool2d(x, 4)]
        scores = [self.score(torch.relu(self.norm(self.tower(level)))).flatten(2) for level in levels]
        return torch.cat(scores, dim=2)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += shortcut
        y: Tensor = self.relu(out)
        return y


class ResNet18(nn.Module):
    """ResNet-18's graph with narrow layers."""

    def __init__(self, width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 3 * width, 4 * width]
        for n, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False), start=1):
            blocks = nn.Sequential(BasicBlock(inputs, outputs, 1 if n == 1 else 2), BasicBlock(outputs, outputs, 1))
            self.add_module(f"layer{n}", blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for n in range(1, 5):
            x = self.get_submodule(f"layer{n}")(x)
        y: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return y


def resnet18_expected() -> tuple[Expected, ...]:
    found = [affine("conv2d", "conv1", bias=False), affine("batch_norm", "bn1"), linear("fc")]
    for n in range(1, 5):
        for block in (f"layer{n}.0", f"layer{n}.1"):
            for k in (1, 2):
                found += [affine("conv2d", f"{block}.conv{k}", bias=False), affine("batch_norm", f"{block}.bn{k}")]
        if n > 1:
            found += [
                affine("conv2d", f"layer{n}.0.downsample.0", bias=False),
                affine("batch_norm", f"layer{n}.0.downsample.1"),
            ]
    return tuple(found)


CASES = (
    Case(
        "conv_options",
        conv_options,
        lambda: batch(3, 3, 13, 11),
        (
            affine("conv2d", "0"),
            affine("conv2d", "2", bias=False),
            affine("conv2d", "4"),
            affine("conv2d", "6"),
            affine("conv2d", "8"),
            affine("conv2d", "10"),
            linear("13"),
        ),
        "categorical",
    ),
    Case(
        "conv1d", conv1d, lambda: batch(3, 3, 11), (affine("conv1d", "0"), affine("conv1d", "2"), affine("conv1d", "4"))
    ),
    Case("conv3d", conv3d, lambda: batch(3, 2, 4, 5, 5), (affine("conv3d", "0"), affine("conv3d", "2"))),
    Case(
        "depthwise",
        depthwise,
        lambda: batch(3, 4, 6, 5),
        (
            affine("depthwise_conv2d", "0"),
            affine("depthwise_conv2d", "2", bias=False),
            affine("depthwise_conv1d", "4"),
        ),
    ),
    Case(
        "separable",
        Separable,
        lambda: batch(3, 3, 5, 5),
        (affine("depthwise_conv2d", "dw", bias=False), affine("conv2d", "pw"), linear("head")),
        "categorical",
    ),
    Case(
        "decoder",
        decoder,
        lambda: batch(3, 5),
        (
            linear("0"),
            affine("conv_transpose2d", "3"),
            affine("batch_norm", "4"),
            affine("conv_transpose2d", "6", bias=False),
            affine("conv_transpose2d", "8"),
        ),
        "multi_bernoulli",
    ),
    Case(
        "pyramid",
        Pyramid,
        lambda: batch(3, 3, 8, 8),
        (
            affine("conv2d", "stem"),
            affine("conv2d", "tower", 3),
            affine("group_norm", "norm", 3),
            affine("conv2d", "score", 3),
        ),
    ),
    Case("resnet18", ResNet18, lambda: batch(3, 3, 40, 40), resnet18_expected(), "categorical"),
)
