"""Forwards that enter autocast themselves, as Accelerate and Hugging Face's Trainer make them for `bf16=True`."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.tables import pairs

IDS = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(0))
BFLOAT16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)


class Text(nn.Module):
    """The last position has no target, as in a language model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.norm, self.head = (
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 20),
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        logits = self.head(self.norm(x + torch.tanh(self.mix(x)).cumsum(1)))
        targets = F.pad(ids, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), logits


def as_trainers_do(model: nn.Module) -> None:
    """Accelerate replaces `forward` of the instance: autocast inside, a cast of all outputs outside."""
    inside = BFLOAT16()(type(model).forward)

    def forward(self: nn.Module, *args: Any) -> tuple[Tensor, ...]:
        return tuple(output.float() for output in inside(self, *args))

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]


def twice(model: nn.Module) -> None:
    as_trainers_do(model)
    inside = model.forward

    def forward(self: nn.Module, *args: Any) -> Any:
        with BFLOAT16():
            return inside(*args)

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]


def text() -> nn.Module:
    torch.manual_seed(0)
    return Text()


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def training(wrap: Callable[[nn.Module], None] | None, late: bool = False, **options: Any) -> tuple[list[Tensor], Any]:
    """(the losses and the parameters of some steps, the net). wrap: None: autocast is around the forward instead."""
    model = text()
    if wrap is not None and not late:
        wrap(model)
    with BFLOAT16(enabled=wrap is None):
        net = kfac_fx.compile(model, (IDS,), in_place=True, **options)
    if wrap is not None and late:
        wrap(model)
    optimizer, losses = kfac_fx.KFAC(net, seed=0), []
    for number in range(3):
        optimizer.zero_grad()
        with BFLOAT16(enabled=wrap is None):
            loss = model((IDS + number) % 20)[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())], net


@pairs(("late", {"before compile": False, "after compile": True}), ("wrap", [as_trainers_do, twice]))
def test_autocast_inside_of_forward_trains_as_autocast_around_it(wrap: Callable[[nn.Module], None], late: bool) -> None:
    around, _ = training(None)
    inside, net = training(wrap, late)
    assert not any(capture.program.submodules for capture in net.captures.all)
    assert all(map(torch.equal, inside, around))


@pytest.mark.parametrize("mode", ["exact", "empirical", "gradients"])
def test_statistics_are_those_of_autocast_around_the_forward(mode: str) -> None:
    """Rows without a target are in no factor: the graph is one, and sees the targets."""
    wrapped = text()
    as_trainers_do(wrapped)
    net = kfac_fx.compile(wrapped, (IDS,))
    inside = net.record((IDS,), {}, mode=mode, generator=torch.Generator().manual_seed(0))
    with BFLOAT16():
        net = kfac_fx.compile(text(), (IDS,))
        around = net.record((IDS,), {}, mode=mode, generator=torch.Generator().manual_seed(0))
    assert inside.statistics.keys() == around.statistics.keys()
    for key, statistics in around.statistics.items():
        for name, value in statistics.items():
            assert value.dtype is torch.float32 and torch.equal(inside.statistics[key][name], value)


class Half(nn.Module):
    """Only its body is under autocast: a product outside of it is of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with BFLOAT16():
            h = torch.tanh(self.body(x))
        y: Tensor = self.head(h.float())
        return y


def test_a_product_outside_of_autocast_stays_outside() -> None:
    net = kfac_fx.compile(Half(), (torch.randn(4, 8),), loss="categorical")
    assert net.captures.all[0].program.submodules
    assert net.report.elements["structured"] == net.report.elements["total"]


class OneInside(nn.Module):
    """A layer that switches autocast off, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ torch.eye(8) * 3
        return (self.head(torch.tanh(h)),)


def test_a_region_without_autocast_inside_of_one_with_it_keeps_its_precision() -> None:
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    wrapped = OneInside()
    as_trainers_do(wrapped)
    net = kfac_fx.compile(wrapped, (x,), loss=lambda outputs: kfac_fx.losses.Categorical(outputs[0]))
    inside = net.record((x,), {}, mode="exact")
    with BFLOAT16():
        torch.manual_seed(0)
        net = kfac_fx.compile(OneInside(), (x,), loss=lambda outputs: kfac_fx.losses.Categorical(outputs[0].float()))
        around = net.record((x,), {}, mode="exact")
    for key, statistics in around.statistics.items():
        for name, value in statistics.items():
            torch.testing.assert_close(inside.statistics[key][name], value)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_compiled_recording_enters_autocast_too(backend: str) -> None:
    eager, _ = training(as_trainers_do)
    compiled, _ = training(as_trainers_do, backend=backend)
    for value, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(value, expected)
