"""Models of which an argument, an attribute, a mode or chance decides which modules run, after public ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.whole.beside_adamw import by_adamw, same_gradients, trained

G = torch.Generator().manual_seed(0)
X = torch.randn(48, 6, generator=G)
Y = X[:, :3].argmax(1)
REAL = torch.randn(32, 6, generator=G) + 1
NOISE = torch.randn(32, 4, generator=G)


def inner(model: Any) -> Any:
    """The module whose attributes users set."""
    return getattr(model, "model", model)


class Adapters(nn.Module):
    """Adapters that take turns by an attribute, as those of peft do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.active = nn.Linear(6, 12), nn.Linear(12, 3), "a"
        self.adapters = nn.ModuleDict({
            name: nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 12, bias=False)) for name in "ab"
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x) + self.adapters[self.active](x)))


def turn(model: Any, step: int) -> Tensor:
    inner(model).active = "ab"[step % 2]
    return F.cross_entropy(model(X), (Y + step % 2) % 3)


class Adversarial(nn.Module):
    """A generator and a discriminator in one module; an argument decides which of them is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 6)
        self.discriminator = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        fake = self.generator(noise)
        return self.discriminator(fake if real is None else torch.cat([fake.detach(), real]))


def play(model: Any, step: int) -> Tensor:
    """The loss of the generator, and that of the discriminator."""
    if step % 2 == 0:
        return F.binary_cross_entropy_with_logits(model(NOISE), torch.ones(32, 1))
    return F.binary_cross_entropy_with_logits(model(NOISE, REAL), torch.cat([torch.zeros(32, 1), torch.ones(32, 1)]))


class Exits(nn.Module):
    """A head behind every block; an attribute says where to leave."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(12, 3) for _ in range(depth)])
        self.exit = depth - 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks[: self.exit + 1]:
            h = h + torch.tanh(block(h))
        return self.heads[self.exit](h)


def leave(model: Any, step: int) -> Tensor:
    inner(model).exit = (2, 0, 1)[step % 3]
    return F.cross_entropy(model(X), Y)


class Growing(Exits):
    """A curriculum: one head behind more and more blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks[: self.exit]:
            h = h + torch.tanh(block(h))
        return self.heads[0](h)


def grow(model: Any, step: int) -> Tensor:
    inner(model).exit = min(3, step // 6)
    return F.cross_entropy(model(X), Y)


class Dropped(nn.Module):
    """Layers that are dropped at random, by Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            if not self.training or random.random() > 0.3:
                h = h + torch.tanh(block(h))
        return self.head(h)


def drop(model: Any, step: int) -> Tensor:
    random.seed(step)
    return F.cross_entropy(model(X), Y)


class Auxiliary(nn.Module):
    """A head that only training has, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        return (self.head(h), self.auxiliary(h)) if self.training else self.head(h)


def of_heads(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return kfac_fx.losses.Categorical(outputs)
    return [kfac_fx.losses.Categorical(outputs[0]), (0.4, kfac_fx.losses.Categorical(outputs[1]))]


def with_auxiliary(model: Any, step: int) -> Tensor:
    outputs = model(X)
    return F.cross_entropy(outputs[0], Y) + 0.4 * F.cross_entropy(outputs[1], Y)


class Tasks(nn.Module):
    """A string names the task, its branch and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.branches = nn.ModuleDict({"kind": nn.Linear(12, 3), "size": nn.Linear(12, 2)})

    def forward(self, x: Tensor, task: str, y: Tensor) -> Tensor:
        z = self.branches[task](torch.tanh(self.body(x)))
        return F.cross_entropy(z, y) if task == "kind" else F.mse_loss(z, y)


def of_task(model: Any, step: int) -> Tensor:
    loss: Tensor = model(X, "kind", Y) if step % 2 == 0 else model(X, "size", X[:, :2])
    return loss


SITUATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor], Any, Any, int]] = {
    "adapters": (Adapters, turn, (X,), "categorical", 2),
    "early exits": (Exits, leave, (X,), "categorical", 3),
    "curriculum of depth": (Growing, grow, (X,), "categorical", 1),
    "dropped layers": (Dropped, drop, (X,), "categorical", 4),
    "auxiliary head": (Auxiliary, with_auxiliary, (X,), of_heads, 1),
    "tasks": (Tasks, of_task, (X, "kind", Y), None, 2),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_all_paths_train_below_adamw_and_the_report_is_complete(name: str) -> None:
    make, loss_of, inputs, loss, paths = SITUATIONS[name]
    torch.manual_seed(0)
    model = make()
    net = kfac_fx.compile(copy.deepcopy(model), inputs, loss=loss)
    same_gradients(copy.deepcopy(model), net, loss_of, 4)
    net = kfac_fx.compile(copy.deepcopy(model), inputs, loss=loss)
    optimizer = kfac_fx.KFAC(net)
    assert trained(net, optimizer, loss_of, 36, paths) <= by_adamw(model, loss_of, 36, paths)
    unused = [f"heads.{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")] if make is Growing else []
    assert {name for row in net.report.rows for name in row.parameters} == {
        name for name, _ in net.named_parameters() if name not in unused
    }
    assert list(net.report.unused) == unused
    assert optimizer.counters()["skipped updates"] == 0


def test_a_game_of_two_in_one_module_is_that_of_two_optimizers_of_one_net() -> None:
    """The step leaves alone what had no gradient."""
    torch.manual_seed(0)
    model = Adversarial()
    net = kfac_fx.compile(copy.deepcopy(model), (NOISE,), loss="bce_with_logits")
    same_gradients(copy.deepcopy(model), net, play, 4)
    optimizer = kfac_fx.KFAC(net)
    for step in range(6):
        before = [p.detach().clone() for p in net.model.generator.parameters()]
        optimizer.zero_grad()
        play(net, step).backward()
        optimizer.step()
        moved = not all(map(torch.equal, before, net.model.generator.parameters()))
        assert moved == (step % 2 == 0)
    torch.manual_seed(0)
    net = kfac_fx.compile(copy.deepcopy(model), (NOISE,), loss="bce_with_logits")
    found = [trained(net, kfac_fx.KFAC(net), play, 60, 2), by_adamw(model, play, 60, 2)]
    assert found[0] <= found[1]
