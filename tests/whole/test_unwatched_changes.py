"""Changes that cannot be watched: outputs of recordings differ from the model's, and nothing of the batch is used."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.recording.recorder import Recorder
from tests.tables import pairs

HIDDEN = (ctypes.c_double * 1)(1.0)  # memory of C, which Python's objects do not tell about
X, Y = torch.randn(8, 3), torch.randint(2, (8,))


@pytest.fixture(autouse=True)
def at_first() -> None:
    HIDDEN[0] = 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.first(x)))) * HIDDEN[0]  # type: ignore[no-any-return]


class Divided(Model):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if float(hidden.sum()) > 1e9:  # no graph has both ways
            return hidden[:, :2]
        return self.last(hidden) * HIDDEN[0]  # type: ignore[no-any-return]


OPTIONS: dict[str, dict[str, Any]] = {
    "sampled": {"lr": 0.1},
    "exact": {"lr": 0.1, "estimation_mode": "exact"},
    "empirical": {"lr": 0.1, "estimation_mode": "empirical"},
    "a part of the batch": {"lr": 0.1, "fraction": 0.5},
    "qmodel between recordings": {"momentum_type": "qmodel", "momentum": None, "cov_update_every": 100},
}


def train(net: Any, optimizer: Any, x: Tensor = X) -> None:
    optimizer.zero_grad()
    F.cross_entropy(net(x), Y).backward()
    optimizer.step()


def kept(net: Any, optimizer: Any) -> list[Tensor]:
    factors = [value for value in optimizer.estimator.state_dict().values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*net.parameters(), *factors)]


@pairs(("kind", list(OPTIONS)), ("model", [Model, Divided]))
def test_a_change_is_an_error_and_nothing_of_the_batch_is_used(kind: str, model: type[Model]) -> None:
    net = kfac_fx.compile(model(), (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, damping=0.1, seed=0, **OPTIONS[kind])
    for _ in range(7):
        train(net, optimizer)
    HIDDEN[0] = 3.0
    before = kept(net, optimizer)
    if model is Divided:  # its Python code runs in every recording, so that nothing is stale
        train(net, optimizer)
        return
    with pytest.raises(ModelChangedError, match="Model computes other outputs now than its captured graph"):
        train(net, optimizer)  # the eighth recording, which every rule compares
    assert all(map(torch.equal, before, kept(net, optimizer)))
    HIDDEN[0] = 1.0
    train(net, optimizer)


def test_an_estimator_compares_its_first_batches() -> None:
    net = kfac_fx.compile(Model(), (X,), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, damping=0.1)
    estimator.update_covariances(X)
    HIDDEN[0] = 3.0
    before = {name: value.clone() for name, value in estimator.state_dict().items() if isinstance(value, Tensor)}
    with pytest.raises(ModelChangedError, match="Nothing of this batch was used"):
        estimator.update_covariances(X)
    after = estimator.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    HIDDEN[0] = 1.0
    estimator.update_covariances(X)


@pytest.mark.parametrize("options", [{}, {"estimation_mode": "exact"}, {"fraction": 0.5}], ids=str)
def test_an_estimator_finds_a_change_since_it_was_compiled(options: dict[str, Any]) -> None:
    net = kfac_fx.compile(Model().eval(), (X,), loss="categorical")
    net.recorder((X,), {})  # the proof of the same batch
    HIDDEN[0] = 3.0
    estimator = kfac_fx.FisherEstimator(net, damping=0.1, **options)
    with pytest.raises(ModelChangedError, match="Nothing of this batch was used"):
        estimator.update_covariances(X)


@pytest.mark.parametrize(("fraction", "graphs"), [(1.0, 0), (0.5, 1)])
def test_a_recording_of_an_estimator_is_compared_itself(
    fraction: float, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one forward of the model, and one more of the graph for a part of a batch."""
    forwards: list[bool] = []
    outputs = Recorder.outputs
    net = kfac_fx.compile(Model(), (X,), loss="categorical")
    net.recorder((X,), {})

    def counted(*args: Any, **kwargs: Any) -> Any:
        forwards.append(True)
        return outputs(*args, **kwargs)

    monkeypatch.setattr(Recorder, "outputs", counted)
    kfac_fx.FisherEstimator(net, damping=0.1, fraction=fraction).update_covariances(X)
    assert len(forwards) == graphs


# --- no false alarm ---------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.dropout, self.last = nn.Dropout2d(0.2), nn.Linear(4 * 9, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convolution(x.reshape(-1, 1, 3, 1).expand(-1, 1, 3, 3))))
        return self.last(self.dropout(hidden).flatten(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 5, 2, batch_first=True, dropout=0.3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.unsqueeze(-1))[0][:, -1])  # type: ignore[no-any-return]


class InPlace(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class Spectral(Model):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.utils.parametrizations.spectral_norm(self.last)


class Jumping(Model):
    """Skips its dropout at random."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.dropout(hidden) if random.random() < 0.5 else hidden)  # type: ignore[no-any-return]


class TwoOutputs(Model):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"logits": logits, "sum": (logits - logits.mean()).sum(), "classes": logits.argmax(1)}


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "dropout": Model,
    "batch norm": Normalized,
    "unrolled recurrent layers": Recurrent,
    "inputs that are written into": InPlace,
    "power iterations": Spectral,
    "Python's random numbers": Jumping,
    "several outputs": TwoOutputs,
}


def runs_lstm_in_bfloat16() -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            Recurrent()(X)
        except RuntimeError:
            return False
    return True


@pairs(("autocast", [False, True]), ("mode", ["gradients", "empirical"]), ("architecture", list(ARCHITECTURES)))
def test_a_model_that_does_not_change_is_not_told_so(architecture: str, mode: str, autocast: bool) -> None:
    if autocast and architecture == "power iterations":
        pytest.skip("its graph does not run under autocast")
    if autocast and architecture == "unrolled recurrent layers" and not runs_lstm_in_bfloat16():
        pytest.skip("torch has no LSTM in bfloat16 for this processor")
    if mode == "empirical" and architecture in ("inputs that are written into", "Python's random numbers"):
        pytest.skip("its forward cannot be replaced")
    several = architecture == "several outputs"
    loss = (lambda outputs: [kfac_fx.losses.Categorical(outputs["logits"])]) if several else None
    net = kfac_fx.compile(ARCHITECTURES[architecture](), (X.clone(),), loss=loss or "categorical")
    optimizer = kfac_fx.KFAC(net, lr=0.01, damping=0.1, estimation_mode=mode)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = net(torch.randn(8, 3))
            outputs = outputs["logits"] if isinstance(outputs, dict) else outputs
            F.cross_entropy(outputs, Y).backward()
        optimizer.step()
    assert optimizer.estimator.outputs.pending is None and optimizer.counter == 4


@pytest.mark.parametrize("mode", ["gradients", "exact"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_estimator_does_not_say_so_either(architecture: str, mode: str) -> None:
    several = architecture == "several outputs"
    loss = (lambda outputs: [kfac_fx.losses.Categorical(outputs["logits"])]) if several else None
    net = kfac_fx.compile(ARCHITECTURES[architecture](), (X.clone(),), loss=loss or "categorical")
    estimator = kfac_fx.FisherEstimator(net, damping=0.1, estimation_mode=mode)
    for _ in range(2):
        estimator.update_covariances(torch.randn(8, 3))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of any tap
def test_a_compiler_that_draws_other_numbers_is_no_change() -> None:
    net = kfac_fx.compile(Normalized(), (X,), loss="categorical", backend="aot_eager")
    assert net.repeats_recordings is False
    optimizer = kfac_fx.KFAC(net, lr=0.01, damping=0.1)
    for _ in range(3):
        train(net, optimizer, torch.randn(8, 3))


def test_a_comparison_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = Normalized()
    net = kfac_fx.compile(model, (X,), loss="categorical")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert not bool(net.differs((X,), {}))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
