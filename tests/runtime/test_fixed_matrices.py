"""A step of a small network reads and writes matrices by views that were made once: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.fisher import bases
from kfac_fx.fisher.groups import FixedMatrices
from kfac_fx.optim.rule import BlockStep, Update
from kfac_fx.optim.rules.eigen_moments import EigenMemory, EigenMoments


class Tied(nn.Module):
    """A decoder with the weight of its encoder, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class Halves(nn.Module):
    """A weight whose halves are two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight[:4].T) @ self.weight[4:].T


def deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())), nn.LayerNorm(4))


def images() -> nn.Module:
    layers = nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.ConvTranspose2d(3, 2, 2, bias=False)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 4))


pytestmark = pytest.mark.filterwarnings("ignore:1 step of steps 6 to 10 changed nothing:kfac_fx.StalledWarning")

MODELS: dict[str, Callable[[], nn.Module]] = {"deep": deep, "images": images, "tied": Tied, "pieces": Halves}


def trained(
    make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[kfac_fx.KFAC, list[Tensor]]:
    """The optimizer after twelve steps, in some of which a parameter has no gradient, and a gradient is infinite; the
    parameters."""
    torch.manual_seed(0)
    model = make().to(dtype)
    x, y = torch.randn(16, 4, dtype=dtype), torch.randn(16, 4, dtype=dtype)
    net = kfac_fx.compile(model, (x,), loss="mse")
    optimizer = kfac_fx.KFAC(net, seed=0, **(options or {"exact_steps": False}))
    parameters = list(model.parameters())
    for step in range(12):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        if step == 6:
            parameters[-1].grad = None
        if step == 8:
            parameters[0].grad = torch.full_like(parameters[0], torch.inf)
        optimizer.step()
    return optimizer, [parameter.detach() for parameter in parameters]


def memory_of(optimizer: kfac_fx.KFAC) -> EigenMemory:
    memory = optimizer._step_state.memory
    assert isinstance(memory, EigenMemory)
    return memory


@pytest.mark.parametrize("name", MODELS)
def test_steps_by_fixed_views_are_those_by_new_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, by_views = trained(MODELS[name])
    monkeypatch.setattr(EigenMemory, "fixed", lambda self, flat: None)
    _, by_new_memory = trained(MODELS[name])
    for left, right in zip(by_views, by_new_memory, strict=True):
        assert torch.equal(left, right)
    monkeypatch.undo()
    groups = memory_of(optimizer).means.groups
    assert FixedMatrices.of(groups, [group.dtype for group in groups]) is not None
    flat, _ = optimizer._step_state.vectors.of(optimizer.param_groups, optimizer.state)
    assert flat is not None
    assert (memory_of(optimizer).fixed(flat) is None) == (name == "pieces")


def test_factors_of_another_precision_have_matrices_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, by_views = trained(deep, torch.bfloat16)
    assert {group.dtype for group in memory_of(optimizer).means.groups} == {torch.float32}
    monkeypatch.setattr(EigenMemory, "fixed", lambda self, flat: None)
    for left, right in zip(by_views, trained(deep, torch.bfloat16)[1], strict=True):
        assert torch.equal(left, right)


def test_a_large_network_has_no_memory_for_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "WORTH_PARTS", 10)
    optimizer, _ = trained(deep)
    assert memory_of(optimizer)._fixed is None


def test_views_that_there_are_not_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(FixedMatrices, "of", staticmethod(lambda groups, dtypes: looked.append(len(groups))))
    trained(deep)
    assert len(looked) == 1


def test_the_rule_of_a_user_may_keep_an_update() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    class Keeping(EigenMoments):
        def direction(self, step: BlockStep) -> Update:
            update = super().direction(step)
            kept.append((update.vector, update.vector.clone()))
            return update

    trained(deep, rule=Keeping(exact_steps=False))
    assert len(kept) > 5
    for vector, value in kept:
        assert torch.equal(vector, value)
