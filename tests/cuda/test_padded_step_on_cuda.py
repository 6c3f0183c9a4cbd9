"""The default's steps on a GPU: products in bfloat16, compiled regions and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.fisher.bases import StepScalars
from kfac_fx.optim import padded_step
from kfac_fx.recording.emitted import CudaGraph
from tests.cuda.on_cuda import ON_CUDA

if torch.cuda.is_available():  # Triton comes with torch's builds for CUDA
    from kfac_fx.optim import padded_kernels
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


def test_steps_are_one_graph_with_kernels_of_triton() -> None:
    _, optimizer, losses = trained(20)
    padded = optimizer._step_state.memory._padded
    assert padded is not None and not padded.reasons
    assert padded.graph.graph is not None
    assert all(group.rows.dtype is torch.bfloat16 for group in padded.groups if group.bases)
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


@pytest.mark.parametrize(
    "shape", [((3, 1, 20, 131), (32, 144)), ((1, 1, 5, 7), (16, 16)), ((2, 3, 6, 9), (6, 9))], ids=str
)
@pytest.mark.parametrize("exponent", [0.5, 0.3, 0.0])
@pytest.mark.parametrize("sides", [1, 2])
def test_kernels_compute_what_torch_computes(
    shape: tuple[tuple[int, int, int, int], tuple[int, int]], exponent: float, sides: int
) -> None:
    (blocks, g, o, i), padded = shape
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=DEVICE)

    h = torch.zeros(blocks, g, *padded, device=DEVICE)
    h[..., :o, :i] = random(blocks, g, o, i) - 0.5
    means = random(blocks, g, o, i), random(blocks, g, o, i)
    scalars = StepScalars(*(random(blocks, 1, 1, 1) for _ in range(5)))
    one, two = [1 + random(blocks, g, o, i)], [1 + random(blocks, g, o, 1), 1 + random(blocks, g, 1, i)]
    for accept in (True, False):
        results = []
        for function in (padded_step.grafted_direction, padded_kernels.graft_by_kernel):
            out, written = torch.zeros_like(h), [tensor.clone() for tensor in means]
            norms = function(
                h[..., :o, :i],
                *written,
                scalars,
                one if sides == 1 else two,
                exponent,
                torch.tensor(accept, device=DEVICE),
                out[..., :o, :i],
            )
            results.append((*written, norms, out))
        for computed, expected in zip(*results, strict=True):
            torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)


def test_the_kernel_of_scales_multiplies_blocks_and_turns_nan_into_zeros() -> None:
    directions = torch.randn(3, 1, 20, 300, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE).bfloat16()
    directions[0] = torch.nan
    scales = torch.tensor([0.0, 0.7, -2.0], device=DEVICE).view(3, 1, 1, 1)
    results = []
    for function in (padded_step.scaled_directions, padded_kernels.scale_by_kernel):
        results.append(directions.clone())
        function(results[-1], scales)
    assert torch.equal(*results)
