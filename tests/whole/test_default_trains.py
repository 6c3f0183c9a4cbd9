"""`KFAC(net)` without a number lowers the loss of generated problems with every kind of layer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.passes.layers import LAYERS

STEPS = 50
SCALES = (1.0, 1e-3, 1e3)  # of the inputs


class Flat(nn.Module):
    """All of a layer's outputs of a case in one row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Positions(nn.Module):
    """The last state of a recurrent network, or a network on positions of a sequence."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        states: Tensor = found[0] if isinstance(found, tuple) else found
        return states[:, -1]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z: Tensor = self.attention(y, y, y, need_weights=False)[0]
        return x + z


class Table(nn.Module):
    """Positions are a parameter that is added."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, Flat())


def sequence(*layers: nn.Module) -> nn.Module:
    return Positions(nn.Sequential(*layers))


def activation(draw: random.Random) -> nn.Module:
    return draw.choice([nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU, nn.PReLU])()


def embedded(draw: random.Random) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, draw.choice([3, 6])), activation(draw), Flat())


BODIES: dict[str, tuple[tuple[int, ...], Callable[[random.Random], nn.Module]]] = {
    # by name: the shape of a case, and the layers in front of the head
    "linear": ((7,), lambda d: nn.Sequential(nn.Linear(7, 9), activation(d), nn.Linear(9, 6), activation(d))),
    "deep": ((7,), lambda d: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(7, 7), nn.Tanh())))),
    "conv1d": ((2, 9), lambda d: image(nn.Conv1d(2, 4, 3), activation(d), nn.Conv1d(4, 3, 2, stride=2))),
    "conv2d": ((2, 6, 6), lambda d: image(nn.Conv2d(2, 4, 3, padding=1), activation(d), nn.Conv2d(4, 3, 3, stride=2))),
    "conv3d": ((1, 4, 4, 4), lambda d: image(nn.Conv3d(1, 3, 2), activation(d))),
    "depthwise": (
        (4, 6, 6),
        lambda d: image(nn.Conv2d(4, 4, 3, groups=4), activation(d), nn.Conv2d(4, 4, 1, groups=2)),
    ),
    "transposed": ((2, 4, 4), lambda d: image(nn.ConvTranspose2d(2, 3, 2, stride=2), activation(d))),
    "batch norm": ((2, 6, 6), lambda d: image(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), activation(d))),
    "group norm": ((2, 6, 6), lambda d: image(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), activation(d))),
    "instance norm": ((2, 6, 6), lambda d: image(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), activation(d))),
    "layer norm": ((7,), lambda d: nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), activation(d))),
    "rms norm": ((7,), lambda d: nn.Sequential(nn.Linear(7, 9), nn.RMSNorm(9), activation(d))),
    "embedding": ((5,), embedded),
    "attention": ((5, 4), lambda d: sequence(Table(5, 4), Attention(4), nn.Linear(4, 6), activation(d))),
    "rnn": ((5, 3), lambda d: Positions(nn.RNN(3, 6, batch_first=True))),
    "lstm": ((5, 3), lambda d: Positions(nn.LSTM(3, 6, batch_first=True))),
    "gru": ((5, 3), lambda d: Positions(nn.GRU(3, 6, batch_first=True))),
    "weight norm": (
        (7,),
        lambda d: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(7, 9)), activation(d)),
    ),
    "bilinear": ((7,), lambda d: Products()),
}


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.bilinear = nn.Linear(7, 3), nn.Linear(7, 4), nn.Bilinear(3, 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bilinear(torch.tanh(self.left(x)), torch.tanh(self.right(x)))
        return y


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    x: Tensor
    distribution: str
    loss: Callable[[Tensor], Tensor]


def problem(kind: str, seed: int, scale: float) -> Problem:
    draw = random.Random(f"{kind} {seed}")
    torch.manual_seed(draw.randrange(1 << 30))
    shape, body = BODIES[kind]
    cases = draw.choice([4, 16, 64])
    x = torch.randint(11, (cases, *shape)) if kind == "embedding" else scale * torch.randn(cases, *shape)
    layers = body(draw)
    with torch.no_grad():
        width = layers(x[:2]).shape[-1]
    outputs = draw.choice([2, 5])
    model = nn.Sequential(layers, nn.Linear(width, outputs))
    distribution = draw.choice(["categorical", "normal", "multi_bernoulli"])
    classes, values = torch.randint(outputs, (cases,)), torch.randn(cases, outputs) * draw.choice([1.0, 100.0])
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "categorical": lambda z: F.cross_entropy(z, classes),
        "normal": lambda z: (z - values).square().sum(1).mean(),
        "multi_bernoulli": lambda z: F.binary_cross_entropy_with_logits(z, (values > 0).to(z), reduction="sum") / cases,
    }
    return Problem(model, x, distribution, losses[distribution])


def check_trained(kind: str, seed: int, scale: float) -> None:
    given = problem(kind, seed, scale)
    net = kfac_fx.compile(given.model, (given.x,), loss=given.distribution)
    optimizer = kfac_fx.KFAC(net, seed=seed)
    history: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = given.loss(net(given.x))
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    last = given.loss(net(given.x)).item()
    where = f"{kind}, seed {seed}, inputs times {scale:g}, {given.distribution}: {history[::7]} -> {last}"
    assert all(parameter.isfinite().all() for parameter in net.parameters()), where
    assert last < history[0], where


def chosen(number: int) -> Sequence[tuple[str, int, float]]:
    """The first problems of an endless list that goes through all kinds and scales."""
    kinds = list(BODIES)
    return [(kinds[n % len(kinds)], n, SCALES[n % len(SCALES)]) for n in range(number)]


@pytest.mark.parametrize(("kind", "seed", "scale"), chosen(6))
def test_fifty_steps_without_a_number_lower_the_loss(kind: str, seed: int, scale: float) -> None:
    check_trained(kind, seed, scale)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed", "scale"), chosen(200)[6:])
def test_fifty_steps_without_a_number_lower_the_loss_of_two_hundred_problems(
    kind: str, seed: int, scale: float
) -> None:
    check_trained(kind, seed, scale)


@pytest.mark.slow
def test_the_problems_have_every_family_of_layers() -> None:
    found: set[str] = set()
    for kind in BODIES:
        given = problem(kind, 0, 1.0)
        net = kfac_fx.compile(given.model, (given.x,), loss=given.distribution, verify=False)
        found |= {registration.layer for registration in net.registrations}
    families = {name.rstrip("123d").removesuffix("_") for name in LAYERS}
    missing = families - {name.rstrip("123d").removesuffix("_") for name in found}
    assert missing <= {"experts", "embedding_bag", "separable_conv"}, missing
