"""The default's steps on a GPU: products in bfloat16, compiled regions and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.recording.backends import CudaGraph
from tests.cuda.on_cuda import ON_CUDA

pytestmark = ON_CUDA
DEVICE = "cuda"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 4))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE), (2 * x[:, :4]).argmax(-1).to(DEVICE)


def trained(steps: int) -> tuple[Tensor, kfac_fx.KFAC, list[float]]:
    (x, y), net_model = batch(), model().to(DEVICE)
    net = kfac_fx.compile(net_model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, seed=0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return nn.utils.parameters_to_vector(net.parameters()).detach(), optimizer, torch.stack(losses).tolist()


def test_steps_are_one_graph_and_one_compiled_region() -> None:
    _, optimizer, losses = trained(20)
    padded = optimizer._step_state._padded
    assert padded is not None and not padded.reasons
    assert padded.graph.graph is not None
    assert all(group.gradients.dtype is torch.bfloat16 for group in padded.groups if group.bases)
    assert losses[-1] < 0.5 * losses[0]


def test_a_graph_takes_the_steps_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    with_graph, _, _ = trained(20)

    def as_it_is(graph: CudaGraph, function: Callable[[], None], key: Hashable) -> None:
        function()

    monkeypatch.setattr(CudaGraph, "__call__", as_it_is)
    without, _, _ = trained(20)
    torch.testing.assert_close(with_graph, without, rtol=1e-6, atol=1e-6)


def test_another_learning_rate_and_replaced_parameters_reach_the_graph() -> None:
    (x, y), net_model = batch(), model().to(DEVICE)
    net = kfac_fx.compile(net_model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, seed=0)

    def step() -> Tensor:
        before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        return nn.utils.parameters_to_vector(net.parameters()).detach() - before

    for _ in range(9):
        step()
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2):
        assert not step().any()
    optimizer.param_groups[0]["lr"] = 1.0
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
    assert all(step().norm() > 0 for _ in range(3))
