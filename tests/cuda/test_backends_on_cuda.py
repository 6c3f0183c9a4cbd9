"""On a GPU: steady steps of every backend compile nothing and wait for nothing, and train as eager mode does."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kfac_fx
from kfac_fx.linalg.matrices import full_precision
from tests.cuda.on_cuda import ON_CUDA, waiting_is_an_error

pytestmark = ON_CUDA
DEVICE = "cuda"
BACKENDS = ("eager", "inductor", "cudagraphs")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "default": {},
    "regular": {"lr": 0.02, "damping": 1e-2, "momentum_type": "regular"},
    "empirical": {"lr": 0.02, "damping": 1e-2, "estimation_mode": "empirical"},
    "qmodel": {"momentum": None, "momentum_type": "qmodel", "damping": 1e-2},
}
WARM_UP, STEADY = 16, 16  # steps

# `torch._dynamo.utils.counters` is private, and so are the names of what it counts. No public name tells whether a CUDA
# graph was captured; of compilation, `torch.compiler.set_stance("fail_on_recompile")` tells.
COMPILED = ("frames", "total")
SKIPPED = ("inductor", "cudagraph_skips")  # regions that run without a CUDA graph
CAPTURED = ("inductor", "cudagraph_recorded_non_static_inputs")  # grows with every new CUDA graph


def count(what: tuple[str, str]) -> int:
    kind, name = what
    return counters[kind][name]


def smooth_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def labelled(cases: int = 128) -> tuple[Tensor, Tensor]:
    """Made on the CPU, so that the numbers do not depend on the device."""
    x = torch.randn(cases, 16, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE), (2 * x[:, :4]).argmax(-1).to(DEVICE)


class Training:
    """A net with its optimizer, and steps of it on one batch; the loss is that of a classifier."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, backend: str = "eager", **options: Any) -> None:
        self.x, self.y = x, y
        self.net = kfac_fx.compile(model, (x,), loss="categorical", backend=backend)
        self.optimizer = kfac_fx.KFAC(self.net, **{"seed": 0, **options})

    def step(self) -> Tensor:
        """Returns the loss before the step, which nobody has read yet."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(self.x).flatten(0, -2), self.y.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach().clone()

    def steps(self, number: int) -> list[float]:
        return torch.stack([self.step() for _ in range(number)]).tolist()  # type: ignore[no-any-return]

    @property
    def renews_bases(self) -> bool:
        """Whether the next step waits for `eigh`: only the default has bases, and no public name tells when."""
        return self.optimizer.options.rule.has_bases and self.optimizer._step_state.schedule.inverting


def trained_mlp(backend: str, options: dict[str, Any]) -> Training:
    torch.manual_seed(0)
    training = Training(smooth_mlp().to(DEVICE), *labelled(), backend, **options)
    training.steps(WARM_UP)
    return training


# --- steady steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steady_steps_compile_nothing(backend: str, options: dict[str, Any]) -> None:
    training = trained_mlp(backend, options)
    before = count(COMPILED), count(CAPTURED)
    with torch.compiler.set_stance("fail_on_recompile"):
        training.steps(STEADY)
    assert (count(COMPILED), count(CAPTURED)) == before
    assert int(training.optimizer.skipped) == 0


@pytest.mark.parametrize("backend", ["inductor", "cudagraphs"])
def test_a_batch_of_another_size_would_be_compiled(backend: str) -> None:
    """That the test above can fail."""
    training = trained_mlp(backend, OPTIMIZERS["regular"])
    training.x, training.y = training.x[:96], training.y[:96]
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        training.step()


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_does_not_wait_in_steady_steps(backend: str, options: dict[str, Any]) -> None:
    training = trained_mlp(backend, options)
    guarded = 0
    for _ in range(STEADY):
        if training.renews_bases:
            training.step()
            continue
        with waiting_is_an_error():
            training.step()
        guarded += 1
    assert guarded >= STEADY - 2


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_compiled_region_is_a_cuda_graph(options: dict[str, Any]) -> None:
    """Torch runs a region without a CUDA graph if, for example, it writes into tensors that may lie elsewhere later."""
    skipped, captured = count(SKIPPED), count(CAPTURED)
    trained_mlp("cudagraphs", options)
    assert count(CAPTURED) > captured
    assert count(SKIPPED) == skipped


# --- the backends agree -----------------------------------------------------------------------------------------------


AGREEING: dict[str, tuple[str, torch.dtype, float]] = {  # an optimizer, a precision, and how far apart changes may be
    "default": ("default", torch.float64, 1e-5),
    "regular": ("regular", torch.float32, 1e-3),
    "qmodel": ("qmodel", torch.float32, 1e-3),
}


@pytest.mark.parametrize(("optimizer", "dtype", "bound"), AGREEING.values(), ids=AGREEING)
@pytest.mark.parametrize("backend", ["inductor", "cudagraphs"])
def test_parameters_after_twenty_steps_are_those_of_eager_mode(
    backend: str, optimizer: str, dtype: torch.dtype, bound: float
) -> None:
    """Up to a part of their change. True targets, so that nothing is sampled."""
    ends = {}
    options = {**OPTIMIZERS[optimizer], "estimation_mode": "empirical"}
    x, y = labelled()
    with full_precision():
        for name in ("eager", backend):
            torch.manual_seed(0)
            training = Training(smooth_mlp().to(DEVICE, dtype), x.to(dtype), y, name, **options)
            start = nn.utils.parameters_to_vector(training.net.parameters()).detach().clone()
            training.steps(20)
            ends[name] = nn.utils.parameters_to_vector(training.net.parameters()).detach().clone()
    change = (ends["eager"] - start).norm()
    assert change > 0.1
    assert float((ends[backend] - ends["eager"]).norm() / change) < bound


# --- networks with other layers ---------------------------------------------------------------------------------------


class Text(nn.Module):
    """A transformer whose output layer is the transposed embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.layer(self.words(ids)), self.words.weight)


def images_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def labelled_images(cases: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(4, (cases,), generator=generator)
    x = torch.randn(cases, 3, 8, 8, generator=generator)
    x[:, 0] += y[:, None, None] - 1.5
    return x.to(DEVICE), y.to(DEVICE)


def labelled_texts(cases: int = 32) -> tuple[Tensor, Tensor]:
    ids = torch.randint(20, (cases, 8), generator=torch.Generator().manual_seed(1))
    return ids.to(DEVICE), ((3 * ids + 1) % 20).to(DEVICE)


@pytest.mark.parametrize("network", ["images", "texts"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_lowers_the_loss(backend: str, network: str) -> None:
    torch.manual_seed(0)
    model, batch = (images_net(), labelled_images()) if network == "images" else (Text(), labelled_texts())
    training = Training(model.to(DEVICE), *batch, backend)
    losses = training.steps(40)
    assert losses[-1] < 0.5 * losses[0]
    assert int(training.optimizer.skipped) == 0


def test_autocast_to_bfloat16_lowers_the_loss_of_a_net_in_channels_last() -> None:
    torch.manual_seed(0)
    model = images_net().to(DEVICE, memory_format=torch.channels_last)
    x, y = labelled_images()
    with torch.autocast(DEVICE, torch.bfloat16):
        training = Training(model, x.to(memory_format=torch.channels_last), y)
    losses = []
    for _ in range(40):
        training.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(training.net(training.x), y)
        loss.backward()
        training.optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in training.net.parameters())


def test_factors_under_autocast_to_bfloat16_are_float32_and_near_those_of_float32() -> None:
    torch.manual_seed(0)
    model = images_net().to(DEVICE, memory_format=torch.channels_last)
    x, y = labelled_images()
    x = x.to(memory_format=torch.channels_last)
    with full_precision(everything=True):
        expected = kfac_fx.compile(model, (x,), loss="categorical").record((x,), {}, mode="empirical", targets=y)
        with torch.autocast(DEVICE, torch.bfloat16):
            net = kfac_fx.compile(model, (x,), loss="categorical")
            computed = net.record((x,), {}, mode="empirical", targets=y)
    for key, statistics in expected.statistics.items():
        for name, value in statistics.items():
            other = computed.statistics[key][name]
            assert other.dtype == torch.float32
            if name == "per_case":  # gradients of cases; the factor is their second moment
                value, other = value.mT @ value, other.mT @ other
            assert float((other - value).norm()) <= 3e-2 * float(value.norm()), (key, name)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("way", ["in memory", "by a file that is read on the CPU"])
def test_training_goes_on_from_a_checkpoint(way: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first = Training(smooth_mlp().to(DEVICE), *labelled(), **options)
    first.steps(7)
    second = Training(copy.deepcopy(first.net.model), first.x, first.y, **{**options, "seed": 1})
    state = first.optimizer.state_dict()
    if way != "in memory":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
    second.optimizer.load_state_dict(state)
    for _ in range(4):  # with new statistics, a check and new inverses
        first.step()
        second.step()
        for here, there in zip(first.net.parameters(), second.net.parameters(), strict=True):
            assert there.device.type == DEVICE
            torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6)
    of_state = [tensor for entries in second.optimizer.state.values() for tensor in entries.values()]
    assert all(tensor.device.type == DEVICE for tensor in of_state)
    assert first.optimizer.counter == second.optimizer.counter == 11


# --- reports and statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_report_prints(backend: str) -> None:
    torch.manual_seed(0)
    training = Training(images_net().to(DEVICE), *labelled_images(), backend)
    training.steps(3)
    report = str(training.net.report)
    assert "5 Fisher blocks" in report and "steps 3, skipped steps 0" in report


def equal_on_both_devices(computed: Any, expected: Any) -> None:
    assert computed.device.type == DEVICE
    torch.testing.assert_close(computed.cpu(), expected, rtol=1e-7, atol=1e-9)


def test_spectra_in_float64_are_those_of_the_cpu() -> None:
    """Whatever the signs of eigenvectors are."""
    torch.manual_seed(0)
    model = smooth_mlp().double()
    x = torch.randn(96, 16, dtype=torch.float64)  # more cases than the sides are wide: no space has several bases
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    cases = {name: torch.randn(5, *parameter.shape, dtype=torch.float64) for name, parameter in vector.items()}
    results = []
    for device in ("cpu", DEVICE):
        here = x.to(device)
        net = kfac_fx.compile(copy.deepcopy(model).to(device), (here,), loss="categorical")
        estimator = kfac_fx.FisherEstimator(net, damping=0.1, estimation_mode="exact")
        estimator.update_covariances(here)
        estimator.update_inverses()
        v = {name: tensor.to(device) for name, tensor in vector.items()}
        spectrum = estimator.spectrum(scale=10.0, damping=0.1)
        corrected = spectrum.corrected([{name: tensor.to(device) for name, tensor in cases.items()}])
        results.append(
            [
                *estimator.multiply_inverse(v).values(),
                *spectrum.eigenvalues().values(),
                *spectrum.diagonal(-1).values(),
                *spectrum.multiply_inverse(v).values(),
                *corrected.multiply_inverse(v).values(),
                *(of.log_determinant() for of in (spectrum, corrected)),
                *(of.trace(-1) for of in (spectrum, corrected)),
            ]
        )
    for expected, computed in zip(*results, strict=True):
        equal_on_both_devices(computed, expected)


@pytest.mark.parametrize("case", ["row", "sequence"])
def test_scores_in_float64_are_those_of_the_cpu(case: str) -> None:
    torch.manual_seed(0)
    model = Text().double().eval()
    ids, labels = (tensor.cpu() for tensor in labelled_texts(12))
    results = []
    for device in ("cpu", DEVICE):
        x, y = ids.to(device), labels.to(device)
        net = kfac_fx.compile(copy.deepcopy(model).to(device).eval(), (x[:4],), loss="categorical")
        batches = [(x[n : n + 4], y[n : n + 4]) for n in range(0, len(x), 4)]
        spectrum = kfac_fx.fit_spectrum(net, batches, mode="empirical", case=case, damping=1e-3)
        queries = spectrum.precondition((x[:2], y[:2]))
        scores = [queries.scores(batch) for batch in batches]
        results.append([torch.cat(scores, dim=1), spectrum.self_scores((x[:3], y[:3]))])
    for expected, computed in zip(*results, strict=True):
        equal_on_both_devices(computed, expected)
