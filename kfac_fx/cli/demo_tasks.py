"""Two small problems that are hard for first-order methods, and the methods' settings.

One is a deep sigmoid autoencoder of the 1,797 digits of scikit-learn, 8 x 8 pixels (Hinton & Salakhutdinov 2006;
Martens & Grosse 2015, section 13). The other is a deep network without skips and norms. `benchmarks/sweep.py` chose the
settings of SGD and AdamW; a test compares them with `benchmarks/results/sweep.json`. K-FAC has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Settings = dict[str, Any]
"""Keyword arguments of an optimizer."""

SETTINGS: dict[str, dict[str, Settings]] = {
    "autoencoder": {
        "sgd": {"lr": 0.03, "momentum": 0.9},
        "adamw": {"lr": 0.01, "weight_decay": 0.01},
        "kfac": {},
    },
    "deep plain network": {
        "sgd": {"lr": 0.01, "momentum": 0.9},
        "adamw": {"lr": 0.001, "weight_decay": 0.0},
        "kfac": {},
    },
}
METHODS = {"sgd": "SGD", "adamw": "AdamW", "kfac": "K-FAC"}
"""The methods in the order in which they run, and their names in print."""

FEWER = 5
"""K-FAC takes this many times fewer steps than the first-order methods."""


def method_steps(method: str, steps: int) -> int:
    """The steps of a method if the first-order methods take `steps`."""
    return max(1, steps // FEWER) if method == "kfac" else steps


INTENSITIES = 17  # a pixel counts the dark dots, 0 to 16, of a 4 x 4 patch of the scan
CODE = 16
WIDTHS = (64, 256, 128, 64, CODE)

POINTS, CLASSES = 40, 10  # of a shape
PLAIN_WIDTH, PLAIN_LAYERS = 64, 34


@dataclass(frozen=True)
class Task:
    """A training set that is evaluated in one batch, and the model that is trained on it.

    Attributes:
        inputs, targets: all cases, on the device, along dimension 0.
        make: makes an initialized model, with random numbers of torch's global generator.
        loss: of `model(inputs)` and `targets`, a mean over the cases.
        distribution: the name of the loss in `kfac_fx.compile(loss=...)`.
        steps: of the first-order methods.
        batch: the number of cases of a training step.
        measure_every: the number of steps between two measurements of the loss of the whole training set.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    distribution: str
    steps: int
    batch: int = 512
    measure_every: int = 10

    def model(self, seed: int) -> nn.Module:
        """The initial model of all methods."""
        torch.manual_seed(seed)
        return self.make().to(self.inputs.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless shuffled epochs of full batches, the same for every method."""
        generator = torch.Generator().manual_seed(seed)
        cases = len(self.inputs)
        while True:
            order = torch.randperm(cases, generator=generator).to(self.inputs.device)
            for start in range(0, cases - self.batch + 1, self.batch):
                chosen = order[start : start + self.batch]
                yield self.inputs[chosen], self.targets[chosen]

    def measure(self, model: nn.Module) -> float:
        """The loss of the whole training set."""
        model.eval()
        with torch.no_grad():
            loss = self.loss(model(self.inputs), self.targets)
        model.train()
        return float(loss)


def tasks(device: torch.device) -> list[Task]:
    """Both tasks, their data on `device`. Needs scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.as_tensor(digits.data, dtype=torch.float32).to(device) / (INTENSITIES - 1)  # [1797, 64], 0 to 1
    shapes, labels = (tensor.to(device) for tensor in shifted_shapes())
    return [
        Task("autoencoder", pixels, pixels, autoencoder, summed_cross_entropy, "multi_bernoulli", steps=3000),
        Task("deep plain network", shapes, labels, plain_network, F.cross_entropy, "categorical", steps=1000),
    ]


def shifted_shapes(cases: int = 4096) -> tuple[Tensor, Tensor]:
    """Noisy shapes [N, 40] of ten classes and their labels [N], in the manner of MNIST-1D (Greydanus 2020).

    A class is a smooth random shape of 12 points. A case is its shape at a random place of a circle, scaled, and
    disturbed by smooth noise.
    """
    random = partial(torch.randn, generator=(generator := torch.Generator().manual_seed(0)))

    def smooth(rows: int, points: int) -> Tensor:
        return F.avg_pool1d(random(rows, points + 4), 5, stride=1) * 5**0.5

    labels = torch.randint(CLASSES, (cases,), generator=generator)
    shapes = F.pad(smooth(CLASSES, 12)[labels], (0, POINTS - 12))
    starts = torch.randint(POINTS, (cases, 1), generator=generator)
    placed = shapes.gather(1, (torch.arange(POINTS) - starts) % POINTS)
    waves = placed * (1 + 0.4 * random(cases, 1)) + 0.25 * smooth(cases, POINTS)
    return waves / waves.std(), labels


def summed_cross_entropy(logits: Tensor, pixels: Tensor) -> Tensor:
    """Sigmoid cross-entropy, summed over the pixels of an image and averaged over the images."""
    return F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum") / len(logits)


def autoencoder() -> nn.Sequential:
    """64-256-128-64-16 and back, sigmoids between the layers but not on the code."""
    widths = (*WIDTHS, *reversed(WIDTHS[:-1]))
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        linear = nn.Linear(inputs, outputs)
        # Four times Glorot's width, because the slope of a sigmoid at 0 is 1/4. With less, every method first spends
        # hundreds of steps on a plateau where the code carries no information.
        nn.init.xavier_uniform_(linear.weight, gain=4.0)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if outputs != CODE:
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers[:-1])


def plain_network() -> nn.Sequential:
    """34 tanh layers of width 64 without skips and norms, from Glorot's start: [N, 40] -> [N, 10] logits."""
    widths = (POINTS, *(PLAIN_LAYERS - 1) * (PLAIN_WIDTH,), CLASSES)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
