"""How much memory the proof takes beside a training step: counted, tensor by tensor."""

from __future__ import annotations

import gc
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from benchmarks.alive import AliveBytes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.linear(x, self.table.weight)


def deep(width: int = 64) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(10)))


def convolutional() -> nn.Module:
    channels = (3, 8, 8, 16, 16)
    convs = [nn.Sequential(nn.Conv2d(i, o, 3), nn.BatchNorm2d(o)) for i, o in zip(channels, channels[1:], strict=False)]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


MODELS = {
    "many parameters": (deep, torch.randn(4, 64), 0),
    "a batch that is larger than the model": (deep, torch.randn(1000, 64), 0),
    "a table that is tied": (Tied, torch.randint(600, (4, 6)), 0),
    "patches": (convolutional, torch.randn(8, 3, 12, 12), 8 * 8 * 8 * 8 * 9 * 4),  # of the second: N · places · i
}


@pytest.mark.parametrize("name", MODELS)
def test_the_proof_takes_one_gradient_more_than_a_training_step(name: str) -> None:
    make, x, patches = MODELS[name]
    model = make()
    size = 4 * sum(p.numel() for p in model.parameters())
    net = kfac_fx.compile(model, loss="normal")
    model(x).square().mean().backward()  # what torch keeps after the first time
    model.zero_grad()
    gc.collect()
    with AliveBytes() as step:
        model(x).square().mean().backward()
    model.zero_grad()
    with AliveBytes() as proof:
        net.captures.recorder((x,), {})
    shapes = [registration.matrix.shape for registration in net.registrations if registration.matrix is not None]
    largest, sides = 4 * max(map(prod, shapes)), 4 * sum(g * (o + i) for g, o, i in shapes)
    assert size < step.peak
    assert proof.peak <= step.peak + size + 3 * largest + sides + 2 * patches


def test_without_verify_there_is_none() -> None:
    net = kfac_fx.compile(deep(), loss="normal", verify=False)
    x = torch.randn(4, 64)
    with AliveBytes() as alive:
        recorder = net.captures.recorder((x,), {})
    assert alive.peak == 0 and recorder.proven


def test_bytes_are_counted_as_long_as_they_live() -> None:
    with AliveBytes() as alive:
        x = torch.zeros(10)
        y = x[2:].view(2, 4)
        del x
        assert alive.now == 40
        z = y + 1
        assert (alive.now, alive.peak) == (72, 72)
        del y, z
        assert (alive.now, alive.peak) == (0, 72)
