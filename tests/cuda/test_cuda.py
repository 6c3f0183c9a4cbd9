"""On a GPU: the statistics of the CPU, training with every momentum type, the compiled backends. See run_cuda.sh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.torch_private import pytree
from tests.cuda.on_cuda import ON_CUDA, waiting_is_an_error
from tests.models import CASES, ZOO, Case

pytestmark = ON_CUDA
COMPILED = ("mlp", "resnet18", "gpt_tied", "encoder_batch_first", "separable")


def on_gpu(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.cuda(), value)


def in_float64(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, value)


def without_dropout(model: nn.Module) -> nn.Module:
    """The two devices draw other masks."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model


def labels_for(net: kfac_fx.CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Targets of the right shape: what the model itself would sample."""
    outputs, fisher = net.functional({}, args, kwargs)
    return [loss.sample(None) for _, loss in net.losses(outputs, fisher)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_are_those_of_the_cpu(case: Case) -> None:
    """In float64, where what cancels in a statistic leaves little rounding. "language" casts to float32 itself, and
    CUDA's weight norm takes a root in float32."""
    torch.manual_seed(0)
    model = without_dropout(case.make()).double()
    args, kwargs = in_float64(case.inputs()), in_float64(dict(case.keywords()))
    here = kfac_fx.compile(model, args, kwargs, loss=case.loss, layers=case.layers)
    there = kfac_fx.compile(
        copy.deepcopy(model).cuda(), on_gpu(args), on_gpu(kwargs), loss=case.loss, layers=case.layers
    )
    assert [str(registration) for registration in here.registrations] == [
        str(registration) for registration in there.registrations
    ]
    targets = labels_for(here, args, kwargs)
    mine = here.record(args, kwargs, mode="empirical", targets=targets)
    other = there.record(on_gpu(args), on_gpu(kwargs), mode="empirical", targets=on_gpu(targets))
    assert mine.cases == other.cases
    for key, statistics in mine.statistics.items():
        for name, value in statistics.items():
            found = other.statistics[key][name]
            assert found.is_cuda and found.dtype == value.dtype
            scale = float(value.abs().max()) + 1e-12
            torch.testing.assert_close(found.cpu() / scale, value / scale, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", ["record", "record_in_training"])
def test_factors_are_computed_without_tf32(way: str) -> None:
    """Whatever the user allows for training; the statistics of a wide layer show ten bits of mantissa."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        torch.manual_seed(0)
        model = nn.Linear(512, 8).cuda()
        x = torch.randn(4096, 512, device="cuda")
        net = kfac_fx.compile(model, (x,), loss="categorical")
        if way == "record":
            moments = net.record((x,), {})
        else:
            outputs, pending = net.record_in_training((x,), {})
            nn.functional.cross_entropy(outputs, torch.zeros(4096, dtype=torch.int64, device="cuda")).backward()
            moments = pending.moments()
        found = moments.statistics[("weight", "bias")]["A"][0, :-1, :-1]
        expected = (x.double().mT @ x.double()).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-2)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(previous)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.05, "momentum_type": "regular"},
        {"lr": 0.05, "momentum_type": "adam"},
        {"momentum": None, "momentum_type": "qmodel"},
        {"momentum": None, "momentum_type": "qmodel", "adapt_damping": True},
        {"lr": 0.05, "estimation_mode": "empirical"},
        {"momentum_type": "eigen_moments", "damping": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["eager", "inductor", "cudagraphs"])
def test_training_lowers_the_loss(options: dict[str, Any], backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    x = torch.randn(256, 16, device="cuda")
    y = (x[:, :4] * 2).argmax(-1)
    net = kfac_fx.compile(model, (x,), loss="categorical", backend=backend)
    optimizer = kfac_fx.KFAC(net, **{"damping": 1e-2, "cov_update_every": 2, "invert_every": 4, **options})
    losses = []
    for _ in range(25):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(evaluate=lambda: nn.functional.cross_entropy(net(x), y))
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.is_cuda for p in net.parameters())


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("backend", ["inductor", "cudagraphs"])
def test_compiled_statistics_are_the_eager_ones(name: str, backend: str) -> None:
    case = ZOO[name]
    torch.manual_seed(0)
    model = without_dropout(case.make()).cuda()
    args, kwargs = on_gpu(case.inputs()), on_gpu(dict(case.keywords()))
    eager = kfac_fx.compile(model, args, kwargs, loss=case.loss, layers=case.layers)
    compiled = kfac_fx.compile(model, args, kwargs, loss=case.loss, layers=case.layers, backend=backend)
    targets = labels_for(eager, args, kwargs)
    for _ in range(3):  # CUDA graphs warm up, capture, then replay
        found = compiled.record(args, kwargs, mode="empirical", targets=targets)
    expected = eager.record(args, kwargs, mode="empirical", targets=targets)
    for key, statistics in expected.statistics.items():
        for statistic, value in statistics.items():
            scale = float(value.abs().max()) + 1e-12
            torch.testing.assert_close(found.statistics[key][statistic] / scale, value / scale, rtol=1e-3, atol=1e-4)


def test_recording_leaves_the_random_stream_of_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).cuda()
    x = torch.randn(32, 8, device="cuda")
    net = kfac_fx.compile(model, (x,), loss="categorical")
    before = torch.cuda.get_rng_state()
    net.record((x,), {})
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("backend", ["eager", "inductor", "cudagraphs"])
def test_micro_batches_add_up(backend: str) -> None:
    """A CUDA graph writes its next results where the last ones are; those of a recording are to stay."""
    torch.manual_seed(0)
    model, batches = nn.Linear(8, 4).cuda(), torch.randn(4, 16, 8, device="cuda")
    net = kfac_fx.compile(model, (batches[0],), loss="categorical", backend=backend)
    y = torch.zeros(16, dtype=torch.int64, device="cuda")
    moments = [net.record((x,), {}, mode="empirical", targets=y).statistics["weight", "bias"] for x in batches]
    ones = torch.ones(16, 1, device="cuda")
    for x, moment in zip(batches, moments, strict=True):
        rows = torch.cat([x, ones], 1)
        torch.testing.assert_close(moment["A"][0], rows.mT @ rows, rtol=1e-4, atol=1e-4)


def test_training_in_float16_with_a_scaler_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    x = torch.randn(256, 16, device="cuda")
    y = x[:, :4].argmax(-1)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", torch.float16):
        net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.05, damping=1e-2, estimation_mode="empirical", grad_scaler=scaler)
    losses = []
    for _ in range(25):
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.01},
        {"lr": 0.01, "momentum_type": "adam"},
        {"lr": 0.01, "estimation_mode": "empirical"},
        {"momentum": None, "momentum_type": "qmodel"},
        {"lr": 0.01, "adapt_damping": True, "damping_adaptation_interval": 1},
    ],
    ids=str,
)
def test_a_step_does_not_wait_for_the_device(options: dict[str, Any]) -> None:
    """After the first, nothing is read back to the host, new inverses included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    x = torch.randn(64, 16, device="cuda")
    y = torch.randint(4, (64,), device="cuda")
    net = kfac_fx.compile(model, (x,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, damping=1e-2, invert_every=2, **options)

    def closure() -> Tensor:
        return nn.functional.cross_entropy(net(x), y)

    def step() -> None:
        loss = closure()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(evaluate=closure)

    step()  # the first one looks at the loss, and at the first inverses
    with waiting_is_an_error():
        for _ in range(4):
            step()
