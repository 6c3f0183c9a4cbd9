"""The models whose steps are timed: on a GPU in their usual precision, and on a CPU at the widths that people have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt2_factors import GPT2
from benchmarks.step_models import Loss, Problem, autoencoder


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al. 2016, figure 5), with the stride in the middle."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1))
        layers: list[nn.Module] = []
        for i, o, k, s in sizes:
            layers += [nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.short = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.short(x))


class Basic(nn.Module):
    """The block of ResNet-18."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.short(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def resnet(
    block: Callable[[int, int, int], nn.Module], expansion: int, depths: Sequence[int], start: nn.Module, classes: int
) -> nn.Module:
    """start: from images to 64 channels."""
    inputs, layers = 64, [start]
    for stage, depth in enumerate(depths):
        for n in range(depth):
            width = 64 * 2**stage
            layers.append(block(inputs, width, 2 if stage and not n else 1))
            inputs = expansion * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def images(model: nn.Module, batch: int, size: int, classes: int) -> Problem:
    x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Problem(model, x, torch.randint(classes, (batch,)), Loss("categorical"))


def resnet18(batch: int = 128, depths: Sequence[int] = (2, 2, 2, 2)) -> Problem:
    """For CIFAR: images of 32 x 32 pixels, and a first convolution without stride or pooling."""
    start = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return images(resnet(Basic, 1, depths, start, 10), batch, 32, 10)


def resnet50(batch: int = 64, size: int = 224, depths: Sequence[int] = (3, 4, 6, 3)) -> Problem:
    start = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return images(resnet(Bottleneck, 4, depths, start, 1000), batch, size, 1000)


def gpt2(batch: int = 8, length: int = 1024, layers: int = 12, width: int = 768, vocabulary: int = 50257) -> Problem:
    """GPT-2 small, with the vocabulary filled up to a multiple of 64, as it is usually trained."""
    vocabulary = -(-vocabulary // 64) * 64
    ids = torch.randint(vocabulary, (batch, length + 1))
    return Problem(GPT2(layers, width, vocabulary, length), ids[:, :-1], ids[:, 1:], Loss("categorical"))


class Residual(nn.Module):
    """The residual of Poisson's equation by the forward Laplacian of a tanh network: [N, 2] -> [N, 1]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = (2, *depth * (width,), 1)
        self.layers = nn.ModuleList(
            nn.Linear(a, b, dtype=torch.float64) for a, b in zip(widths, widths[1:], strict=False)
        )

    def forward(self, points: Tensor) -> Tensor:
        x = points
        slopes = torch.eye(2, dtype=x.dtype, device=x.device).expand(x.shape[0], 2, 2)
        second = torch.zeros_like(x)
        for n, layer in enumerate(self.layers):
            if n:
                x = torch.tanh(x)
                first = 1 - x.square()
                second = first * second - 2 * x * first * slopes.square().sum(1)
                slopes = first.unsqueeze(1) * slopes
            x, slopes, second = layer(x), slopes @ layer.weight.T, second @ layer.weight.T
        return second + 2 * math.pi**2 * torch.sin(math.pi * points).prod(-1, keepdim=True)


def pinn(points: int = 3000, width: int = 64, depth: int = 4) -> Problem:
    x = torch.rand(points, 2, dtype=torch.float64)
    return Problem(Residual(width, depth), x, torch.zeros_like(x[:, :1]), Loss("normal"))


def perceptron(batch: int = 128, widths: Sequence[int] = (784, 1024, 1024, 10)) -> Problem:
    layers: list[nn.Module] = []
    for i, o in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(i, o), nn.ReLU()]
    targets = torch.randint(widths[-1], (batch,))
    return Problem(nn.Sequential(*layers[:-1]), torch.randn(batch, widths[0]), targets, Loss("categorical"))


class Recurrent(nn.Module):
    """A language model of LSTM layers: [N, T] -> [N, T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(ids))[0])
        return logits


def lstm(batch: int = 32, length: int = 64, width: int = 256, layers: int = 3, vocabulary: int = 128) -> Problem:
    ids = torch.randint(vocabulary, (batch, length + 1))
    return Problem(Recurrent(vocabulary, width, layers), ids[:, :-1], ids[:, 1:], Loss("categorical"))


class ViT(nn.Module):
    """Dosovitskiy et al. 2021, "An image is worth 16x16 words", with the mean of all tokens as its output."""

    def __init__(self, size: int, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(0.02 * torch.randn((size // 16) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.positions
        logits: Tensor = self.head(self.layers(tokens).mean(1))
        return logits


def vit(batch: int = 16, size: int = 224, width: int = 192, layers: int = 12) -> Problem:
    model = ViT(size, width, layers, width // 64, 100)
    return Problem(model, torch.randn(batch, 3, size, size), torch.randint(100, (batch,)), Loss("categorical"))


def narrow_pinn(points: int = 256) -> Problem:
    problem = pinn(points)
    return replace(problem, model=problem.model.float(), x=problem.x.float(), y=problem.y.float())


def small_resnet18() -> Problem:
    """ResNet-18 for images of 64 x 64 pixels, 16 of them."""
    start = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return images(resnet(Basic, 1, (2, 2, 2, 2), start, 10), 16, 64, 10)


@dataclass(frozen=True)
class Subject:
    """
    make: the model and its batch, on the host. cast: the dtype of autocast. peers: whether the K-FAC of other packages
    knows the layers, the loss and the precision. muon: whether most parameters are in matrices of hidden layers.
    """

    title: str
    make: Callable[[], Problem]
    cast: torch.dtype | None = None
    backends: tuple[str, ...] = ("eager",)
    peers: bool = False
    muon: bool = False


BF16, BOTH = torch.bfloat16, ("eager", "inductor")
MODELS: Mapping[str, Subject] = {
    "autoencoder": Subject("autoencoder, batch 512, float32", autoencoder, peers=True),
    "resnet18": Subject("ResNet-18, CIFAR's shapes, batch 128, float32", resnet18, peers=True),
    "pinn": Subject("PINN, 4 x 64, 3,000 points, float64", pinn),
    "gpt2": Subject("GPT-2 small, batch 8 x 1024, bfloat16 autocast", gpt2, BF16, BOTH, muon=True),
    "resnet50": Subject("ResNet-50, batch 64 of 224 x 224, channels-last, bfloat16 autocast", resnet50, BF16, BOTH),
}
ON_CPU: Mapping[str, Subject] = {
    "mlp": Subject("MLP 784-1024-1024-10, batch 128", perceptron, peers=True),
    "autoencoder": Subject("autoencoder 784-1000-500-250-30, batch 512", autoencoder),
    "pinn": Subject("PINN, 4 x 64, 256 points", narrow_pinn),
    "lstm": Subject("LSTM, 3 x 256, batch 32 x 64", lstm),
    "gpt2": Subject("GPT-2's shapes, 2 layers, batch 4 x 128", lambda: gpt2(4, 128, 2, vocabulary=1024), muon=True),
    "resnet18": Subject("ResNet-18, batch 16 of 64 x 64", small_resnet18),
    "vit": Subject("ViT-tiny, batch 16 of 224 x 224", vit),
}
QUICK: Mapping[str, Subject] = {
    "gpt2": Subject("a small GPT", lambda: gpt2(2, 8, 1, 64, 64), BF16, muon=True),
    "pinn": Subject("a small PINN", lambda: pinn(8, 4, 2)),
}
