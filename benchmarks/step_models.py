"""The two models whose steps are timed: a batch, and a loss that is a mean over its cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Loss(nn.Module):
    """Summed over the outputs of a case, whose mean or sum is taken over cases: negative log likelihoods.

    kind: as `kfac_fx.compile` names the distribution.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.reduction = kind, "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.kind == "categorical":
            return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction=self.reduction)
        if self.kind == "normal":
            total = F.mse_loss(output, target, reduction="sum")
        else:
            total = F.binary_cross_entropy_with_logits(output, target, reduction="sum")
        return total / len(output) if self.reduction == "mean" else total


@dataclass(frozen=True)
class Problem:
    """cast: the dtype of autocast; None for none."""

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Loss
    cast: torch.dtype | None = None

    def backward(self, run: Callable[..., Any] | None = None) -> None:
        """Gradients of the batch's loss. run: what stands for the model."""
        with self.autocast():
            loss = self.loss((self.model if run is None else run)(self.x), self.y)
        loss.backward()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.x.device.type, self.cast or torch.bfloat16, enabled=self.cast is not None)

    def to(self, device: torch.device) -> Problem:
        """The same numbers on another device."""
        return replace(self, model=self.model.to(device), x=self.x.to(device), y=self.y.to(device))


Make = Callable[[], Problem]


def autoencoder(batch: int = 512, half: Sequence[int] = (784, 1000, 500, 250, 30)) -> Problem:
    """half: the widths down to the code; the way back has them, too."""
    sizes = (*half, *reversed(half[:-1]))
    layers: list[nn.Module] = []
    for i, o in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(i, o), nn.Sigmoid()]
    x = torch.rand(batch, half[0])
    return Problem(nn.Sequential(*layers[:-1]), x, x, Loss("multi_bernoulli"))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = short if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def resnet8(batch: int = 128) -> Problem:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return Problem(model, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)), Loss("categorical"))


MODELS: dict[str, Make] = {"autoencoder": autoencoder, "resnet8": resnet8}
QUICK: dict[str, Make] = {"quick": partial(autoencoder, 8, (12, 8, 4))}  # everything runs, and nothing is measured
