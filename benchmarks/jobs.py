"""The networks and batches of short jobs. Half of the jobs repeat one batch, and the others draw a new one a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.losses import Categorical, Normal, NormalMeanVariance

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
    """A network and its batches.

    Attributes:
        words: a line for the table.
        model: made under the seed.
        batch: the batch of a step; the first `inputs` tensors are the network's.
        loss: of the network's outputs and the batch.
        declared: the `loss` of kfac_fx.compile.
    """

    words: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    declared: Any
    inputs: int = 1


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fixed(*tensors: Tensor) -> Callable[[int], Batch]:
    """The same batch in every step."""
    return lambda step: tensors


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch[-1])


def square(outputs: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(outputs, batch[-1])


# --- the networks -----------------------------------------------------------------------------------------------------


class Siamese(nn.Module):
    """One network on both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)), nn.Linear(8, 2)

    def forward(self, pair: Tensor) -> Tensor:
        left, right = self.tower(pair[:, 0]), self.tower(pair[:, 1])
        out: Tensor = self.head((left - right).square())
        return out


class Encoder(nn.Module):
    """Two layers of a transformer over tokens, with one class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 16), nn.Parameter(0.1 * torch.randn(8, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 12)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.tokens(ids) + self.places))
        return out.movedim(-1, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0][:, -1])
        return out


class Sine(nn.Module):
    """A layer of a coordinate network."""

    def __init__(self, inputs: int, outputs: int, bound: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(20 * self.linear(x))


class PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.policy(hidden), self.value(hidden)


class Graph(nn.Module):
    """Two rounds of messages along the edges of a graph, and a class for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(10, 16), nn.Linear(32, 16), nn.Linear(32, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = torch.relu(layer(x))
            x = torch.cat([x, torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])], 1)
        out: Tensor = self.head(x)
        return out


class Field(nn.Module):
    """Twelve steps of Euler along a vector field, with the network in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        path = [x]
        for _ in range(12):
            path.append(path[-1] + 0.1 * self.field(path[-1]))
        return torch.stack(path[1:], 1)


class Ratings(nn.Module):
    """A factorized matrix of ratings, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 6), nn.Embedding(40, 6)
        self.of_user, self.of_item = nn.Embedding(60, 1), nn.Embedding(40, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = (self.users(user) * self.items(item)).sum(-1, keepdim=True)
        out: Tensor = product + self.of_user(user) + self.of_item(item)
        return out


class Denoiser(nn.Module):
    """A small U-Net that predicts the noise of an image at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = nn.Linear(1, 12), nn.Conv2d(1, 12, 3, padding=1)
        self.down, self.norm = nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.GroupNorm(4, 24)
        self.middle, self.up = nn.Conv2d(24, 24, 3, padding=1), nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.last = nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        fine = F.silu(self.first(x) + self.time(time)[..., None, None])
        coarse = F.silu(self.norm(self.down(fine)))
        coarse = coarse + F.silu(self.middle(coarse))
        out: Tensor = self.last(torch.cat([F.silu(self.up(coarse)), fine], 1))
        return out


class Inverted(nn.Module):
    """A wide depthwise convolution between two narrow ones, with batch norm, and with a skip where it fits."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        wide, self.skips = 6 * inputs, inputs == outputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.skips else out


class Sets(nn.Module):
    """A mean over the elements of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.element = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.whole = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.whole(self.element(x).mean(1))
        return out


class Dilated(nn.Module):
    """Gated convolutions of growing dilation with normalized weights."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.first, self.last = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 8, 1)
        self.gates = nn.ModuleList(normed(nn.Conv1d(16, 32, 2, dilation=2**k)) for k in range(4))
        self.mixes = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for k, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            value, opening = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            x = x + mix(torch.tanh(value) * torch.sigmoid(opening))
        out: Tensor = self.last(x)
        return out


class Text(nn.Module):
    """Two layers of LSTM that predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(20, 24), nn.LSTM(24, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 20)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(self.tokens(ids))[0])
        return out.movedim(-1, 1)


class Experts(nn.Module):
    """Four experts in stacked weights, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.first, self.second = nn.Parameter(0.3 * torch.randn(4, 8, 24)), nn.Parameter(0.2 * torch.randn(4, 24, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(torch.einsum("ni,eih->neh", x, self.first))
        return torch.einsum("neh,eho,ne->no", hidden, self.second, self.gate(x).softmax(-1))


class Attention(nn.Module):
    """Attention along the edges of a graph, and a class for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores, self.head = nn.Linear(6, 32, bias=False), nn.Linear(64, 1), nn.Linear(32, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.values(x)
        weight = F.leaky_relu(self.scores(torch.cat([x[edges[0]], x[edges[1]]], -1))).exp()
        total = torch.zeros(len(x), 1).index_add(0, edges[1], weight)
        mean = torch.zeros_like(x).index_add(0, edges[1], weight * x[edges[0]]) / (total + 1e-6)
        out: Tensor = self.head(F.elu(mean))
        return out


class Spread(nn.Module):
    """A mean and a variance."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.mean, self.variance = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.mean(hidden), F.softplus(self.variance(hidden)) + 1e-3


# --- the batches ------------------------------------------------------------------------------------------------------


def path(x: Tensor) -> Tensor:
    """Twelve steps along a spiral."""
    turn, steps = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]), [x]
    for _ in range(12):
        steps.append(steps[-1] + 0.1 * steps[-1] ** 3 @ turn)
    return torch.stack(steps[1:], 1)


def noisy_squares(step: int) -> Batch:
    """Squares in a mixture with noise, the part of the noise, and the noise."""
    g = generator(step)
    sizes, part = torch.randint(2, 8, (32,), generator=g), torch.rand(32, 1, generator=g)
    noise, places = torch.randn(32, 1, 12, 12, generator=g), torch.arange(12)
    square = (places[:, None] < sizes[:, None, None]) & (places >= sizes[:, None, None])
    share = part[..., None, None]
    return (1 - share) * square[:, None] + share * noise, part, noise


def few_images(step: int) -> Batch:
    """Eight images of ten shapes in much noise."""
    g = generator(step)
    shapes, kinds = torch.randn(10, 3, 12, 12, generator=generator(0)), torch.randint(10, (8,), generator=g)
    return 0.7 * shapes[kinds] + torch.randn(8, 3, 12, 12, generator=g), kinds


def sets(step: int) -> Batch:
    x = torch.randn(64, 10, 3, generator=generator(step))
    return x, x.norm(dim=-1, keepdim=True).amax(1)


def sines(step: int) -> Batch:
    """Sines of random phase and frequency, and the next of their eight levels."""
    g = generator(step)
    phase, frequency = 6 * torch.rand(16, 1, generator=g), 0.2 + 0.5 * torch.rand(16, 1, generator=g)
    x = torch.sin(frequency * torch.arange(49.0) + phase)
    return x[:, None, :-1], ((x + 1) * 3.999).long()[:, 1:]


def sequences(step: int) -> Batch:
    """Every token is a sum of the two before it, and of 0 or 1 by chance."""
    g = generator(step)
    tokens = [*torch.randint(20, (2, 16), generator=g)]
    for _ in range(23):
        tokens.append((tokens[-1] + 3 * tokens[-2] + torch.randint(2, (16,), generator=g)) % 20)
    ids = torch.stack(tokens, 1)
    return ids[:, :-1], ids[:, 1:]


def uneven_noise(step: int) -> Batch:
    g = generator(step)
    x = torch.randn(64, 4, generator=g)
    return x, torch.sin(2 * x[:, :1]) + (0.1 + 0.4 * x[:, 1:2].abs()) * torch.randn(64, 1, generator=g)


def jobs() -> dict[str, Job]:
    g = generator(0)
    pairs, ids = torch.randn(96, 2, 8, generator=g), torch.randint(12, (32, 8), generator=g)
    series, images = torch.randn(48, 10, 3, generator=g), torch.randn(32, 1, 12, 12, generator=g)
    states, rows = torch.randn(128, 6, generator=g), torch.randn(512, 12, generator=g)
    line = torch.linspace(-1, 1, 20)
    plane = torch.cartesian_prod(line, line)
    wave = torch.sin(6 * plane[:, :1]) * torch.cos(4 * plane[:, 1:])
    nodes, edges = torch.randn(120, 10, generator=g), torch.randint(120, (2, 480), generator=g)
    digits = (torch.rand(128, 24, generator=g) < torch.rand(128, 1, generator=g)).float()
    noisy = rows @ torch.randn(12, 1, generator=g) / 4 + 0.1 * torch.randn(512, 1, generator=g)
    kinds = (images.mean((1, 2, 3)) > 0).long() + 2 * (images[:, 0, :6].mean((1, 2)) > 0).long()
    starts, users, items = 2 * torch.rand(64, 2, generator=g) - 1, *torch.randn(2, 60, 3, generator=g)
    cases, gated = torch.randn(400, 10, generator=g), torch.randn(200, 8, generator=g)
    of_experts = torch.where(gated[:, :1] > 0, gated[:, 1:2] * gated[:, 2:4], gated[:, 4:6].sin())
    labels = torch.where(
        torch.rand(400, generator=g) < 0.4, torch.randint(4, (400,), generator=g), cases[:, :4].argmax(1)
    )
    points, links = torch.randn(150, 6, generator=g), torch.randint(150, (2, 900), generator=g)
    signs = (torch.zeros(150).index_add(0, links[1], points[links[0], 0]) > 0).long()

    def part(step: int) -> Batch:
        chosen = torch.randint(512, (64,), generator=generator(step))
        return rows[chosen], noisy[chosen]

    def ratings(step: int) -> Batch:
        g = generator(step)
        user, item = torch.randint(60, (128,), generator=g), torch.randint(40, (128,), generator=g)
        return user, item, (users[user] * items[item]).sum(-1, keepdim=True) + 0.1 * torch.randn(128, 1, generator=g)

    def wrongly_labeled(step: int) -> Batch:
        chosen = torch.randint(400, (8,), generator=generator(step))
        return cases[chosen], labels[chosen]

    def actor_critic(outputs: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs[0], batch[1]) + 0.5 * F.mse_loss(outputs[1], batch[2])

    return {
        "siamese": Job(
            "one tower on two inputs", Siamese, fixed(pairs, (pairs[:, 0, 0] > pairs[:, 1, 0]).long()),
            cross_entropy, "categorical",
        ),
        "encoder": Job(
            "a transformer that rolls tokens", Encoder, fixed(ids, torch.roll(ids, 1, 1)), cross_entropy,
            lambda outputs: Categorical(outputs.movedim(1, -1)),
        ),
        "recurrent": Job(
            "a GRU that adds up", Recurrent, fixed(series, series[..., :1].sum(1) / 3), square, "mse",
        ),
        "images": Job(
            "convolutions with group norm",
            lambda: nn.Sequential(
                nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
                nn.Flatten(), nn.Linear(128, 4),
            ),
            fixed(images, kinds), cross_entropy, "categorical",
        ),
        "coordinates": Job(
            "sines of coordinates",
            lambda: nn.Sequential(Sine(2, 32, 0.5), Sine(32, 32, 0.02), nn.Linear(32, 1)),
            fixed(plane, wave), square, "mse",
        ),
        "actor-critic": Job(
            "a policy and a value, two losses", PolicyAndValue,
            fixed(states, states[:, :3].argmax(1), states[:, 3:4] * states[:, 4:5]), actor_critic,
            lambda outputs: [Categorical(outputs[0]), Normal(outputs[1])],
        ),
        "graph": Job(
            "messages along edges", Graph, fixed(nodes, edges, nodes[edges[0], :4].argmax(1)[:120]), cross_entropy,
            "categorical", inputs=2,
        ),
        "autoencoder": Job(
            "an autoencoder of bits",
            lambda: nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 16), nn.Tanh(),
                                  nn.Linear(16, 24)),
            fixed(digits, digits), lambda outputs, batch: F.binary_cross_entropy_with_logits(outputs, batch[-1]),
            "bce_with_logits",
        ),
        "table": Job(
            "rows of a table in batches of 64, with batch norm and dropout",
            lambda: nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)),
            part, square, "mse",
        ),
        "field": Job("twelve steps along a vector field", Field, fixed(starts, path(starts)), square, "mse"),
        "experts": Job("a mixture of four experts", Experts, fixed(gated, of_experts), square, "mse"),
        "attention": Job(
            "attention along edges", Attention, fixed(points, links, signs), cross_entropy, "categorical", inputs=2
        ),
        "ratings": Job("a factorized matrix, 128 new ratings a step", Ratings, ratings, square, "mse", inputs=2),
        "denoiser": Job("a U-Net, 32 new images a step", Denoiser, noisy_squares, square, "mse", inputs=2),
        "few images": Job(
            "inverted residuals with batch norm, 8 new images a step",
            lambda: nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                *(Inverted(*pair) for pair in [(16, 16), (16, 24), (24, 24), (24, 32), (32, 32), (32, 48), (48, 48)]),
                nn.Conv2d(48, 256, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
            ),
            few_images, cross_entropy, "categorical",
        ),
        "sets": Job("a mean over elements, 64 new sets a step", Sets, sets, square, "mse"),
        "sines": Job(
            "gated dilated convolutions, 16 new waves a step", Dilated, sines, cross_entropy,
            lambda outputs: Categorical(outputs.movedim(1, -1)),
        ),
        "text": Job(
            "two layers of LSTM, 16 new sequences a step", Text, sequences, cross_entropy,
            lambda outputs: Categorical(outputs.movedim(1, -1)),
        ),
        "variance": Job(
            "a mean and a variance, 64 new cases a step", Spread, uneven_noise,
            lambda outputs, batch: F.gaussian_nll_loss(outputs[0], batch[-1], outputs[1]),
            lambda outputs: NormalMeanVariance(*outputs),
        ),
        "wrong labels": Job(
            "rows in batches of 8, of which 40 % have random labels",
            lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
            wrongly_labeled, cross_entropy, "categorical",
        ),
    }  # fmt: skip
