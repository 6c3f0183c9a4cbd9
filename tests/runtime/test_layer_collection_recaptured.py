"""A LayerCollection whose model is captured again: in another mode or dtype, on the same path."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from tests.tables import pairs


class BatchIndependent(nn.Module):
    """A layer that is applied to a constant: its use needs the number of cases."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.positions, self.head = nn.Linear(4, 3), nn.Linear(5, 3), nn.Linear(3, 2)
        self.register_buffer("constant", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)) + self.positions(self.constant))
        return out


class Gathered(nn.Module):
    """A gathered weight: its use needs the indices."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = nn.Linear(4, 6), nn.Parameter(torch.randn(7, 6))
        self.register_buffer("index", torch.tensor([0, 3, 3, 5, 6]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)) @ self.table[self.index].t()  # type: ignore[index]


class Branches(nn.Module):
    """Weights of branches behind a softmax: their use needs its Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mixture = nn.Linear(4, 3), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        h, (first, second) = self.body(x), self.mixture.softmax(0)
        return first * torch.tanh(h) + second * F.relu(h)


class Interpolated(nn.Module):
    """A table that is interpolated: its use needs the matrix of the interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = nn.Linear(4, 6), nn.Parameter(torch.randn(1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, None] + F.interpolate(self.table, size=6, mode="linear")


@pairs(("make", [BatchIndependent, Gathered, Branches, Interpolated]), ("change", [nn.Module.double, nn.Module.eval]))
def test_values_that_uses_need_are_those_of_the_new_capture(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], nn.Module]
) -> None:
    model, first = make(), torch.randn(8, 4)
    captured = kfac_fx.capture(model, (first,))
    nodes = list(captured.graph.nodes)
    (output,) = captured.graph.output_node().all_input_nodes
    collection = kfac_fx.LayerCollection(captured)
    collection.register_normal_predictive_distribution(output)
    collection.auto_register_layers()
    assert list(captured.graph.nodes) == nodes
    by_hand = kfac_fx.FisherEstimator(kfac_fx.compile(collection), estimation_mode="exact")
    found = kfac_fx.FisherEstimator(kfac_fx.compile(model, (first,), loss="normal"), estimation_mode="exact")
    assert not any(block.registration.generic for block in found.blocks.values())
    for batch in (first, torch.randn(5, 4)):
        for estimator in (by_hand, found):
            estimator.update_covariances(batch.to(next(model.parameters()).dtype))
        change(model)
    for key, block in found.blocks.items():
        there = by_hand.blocks[key]
        torch.testing.assert_close(there.full_fisher_block(), block.full_fisher_block(), rtol=0, atol=0)
    assert by_hand.blocks.keys() == found.blocks.keys()
