"""Attributes of modules beside their parameters: compared, and put back."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kfac_fx.passes.ir import Options
from kfac_fx.passes.trace import symbolic_trace
from kfac_fx.passes.tracing.effects import counts, cumulative_averages, untouched


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [torch.zeros(1)]
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.last = x
        self.mean = x.mean(0)
        return x


def test_what_forward_assigns_is_put_back_and_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), memory := Memory())
    buffer = memory.mean
    with untouched(model) as assigned:
        model(torch.randn(2, 3))
    assert sorted(assigned) == ["1.calls", "1.last", "1.mean", "1.seen"]
    assert memory.mean is buffer and memory.calls == 0 and len(memory.seen) == 1 and not hasattr(memory, "last")


def test_what_forward_assigned_is_put_back_after_an_error() -> None:
    memory = Memory()
    with pytest.raises(ZeroDivisionError), untouched(memory):
        memory(torch.randn(2, 3))
        memory.eval()
        1 / 0  # noqa: B018
    assert memory.calls == 0 and memory.training


class Frozen(dict[str, int]):
    """As the configurations that libraries keep in their models."""

    def __setitem__(self, key: str, value: int) -> None:
        raise TypeError("frozen")

    clear = update = __setitem__  # type: ignore[assignment]


def test_a_container_that_cannot_be_changed_is_let_alone() -> None:
    memory = Memory()
    memory.config = Frozen({"width": 3})
    with untouched(memory):
        memory(torch.randn(2, 3))
    assert memory.config == {"width": 3} and len(memory.seen) == 1


class Kept(nn.Module):
    """State in every kind of container, and random streams."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.options, self.config = deque([1]), {"tau": 1.0}, SimpleNamespace(scale=2.0)
        self.streams = (1, 2)
        self.torchs, self.pythons, self.numpys = torch.Generator(), random.Random(0), np.random.default_rng(0)
        self.old = np.random.RandomState(0)

    def forward(self) -> None:
        self.queue.append(2)
        self.options["tau"] = 0.5
        self.config.scale = 3.0


def test_what_is_in_containers_and_objects_is_put_back() -> None:
    model = Kept()
    with untouched(model) as changed:
        model()
    assert sorted(changed) == ["config", "options", "queue"]
    assert model.queue == deque([1]) and model.options == {"tau": 1.0} and model.config.scale == 2.0


def test_random_streams_of_a_model_are_put_back() -> None:
    def drawn() -> list[float]:
        own = float(torch.rand((), generator=model.torchs))
        return [own, model.pythons.random(), model.numpys.random(), model.old.random()]

    model = Kept()
    with untouched(model) as changed:
        first = drawn()
    assert sorted(changed) == ["numpys", "old", "pythons", "torchs"]
    assert drawn() == first


def test_numbers_that_forward_counts_with_are_found_in_what_holds_them() -> None:
    assert counts(3) == 3
    assert counts({"calls": 2, "last": torch.ones(1)}) == (2,)
    assert counts(SimpleNamespace(n=1, name="x")) == (1,)
    assert counts([torch.ones(1)]) == ()


def test_a_renamed_key_of_a_dictionary_is_put_back() -> None:
    model = nn.Linear(2, 2)
    model.options = {"a": (value := torch.zeros(1))}
    with untouched(model):
        model.options["b"] = model.options.pop("a")
    assert model.options == {"a": value}


def test_only_norms_that_keep_averages_average_over_all_batches() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, momentum=None, track_running_stats=False))
    assert cumulative_averages(model) == ["averages over all batches in 0"]
    assert [module.momentum for module in model] == [0.0, 0.0]


class Positions(nn.Module):
    """A constant of the graph, and an attribute that forward sets."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layer, self.keeps, self._tensor_constant1 = nn.Linear(3, 2), keeps, torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self._tensor_constant1 = torch.ones(3)
        outputs: Tensor = self.layer(x + torch.arange(3) + torch.tensor([1.0, 2.0, 3.0]))
        return outputs


@pytest.mark.parametrize("keeps", [False, True])
def test_the_constants_of_a_graph_are_no_effects(keeps: bool) -> None:
    model = Positions(keeps)
    capture = symbolic_trace(model, Options(), {})
    assert capture.effects == (("sets _tensor_constant1",) if keeps else ())
    assert "_tensor_constant0" not in vars(model) and not model._tensor_constant1.any()
