"""Steps of "eigen_moments" by products of padded matrices: against those of the matrices as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.fisher.bases import EPSILON
from kfac_fx.linalg.matrices import CACHE_LINE
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.optim import padded_step
from kfac_fx.optim.groups import FlatParameters
from kfac_fx.optim.padded_step import PaddedStep
from kfac_fx.optim.rules import eigen_moments
from kfac_fx.optim.rules.eigen_moments import most_momentum, nesterov, step_in_bases
from kfac_fx.recording.emitted import CudaGraph

STEPS = 9  # with checks after 0, 1, 2 and 5
# Updates are about one. Adam's step divides the rounding of zeros by its ε.
EXACT = {"rtol": 1e-9, "atol": 16 * torch.finfo(torch.float64).eps / EPSILON}


class Tied(nn.Module):
    """A transposed and shared weight, slices of a parameter, and a norm; no size is a multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.norm = nn.Embedding(11, 7), nn.Linear(7, 7), nn.LayerNorm(7)
        self.both = nn.Parameter(0.3 * torch.randn(14, 7))

    def forward(self, ids: Tensor) -> Tensor:
        y = self.words(ids)
        y = y + torch.tanh(F.linear(y, self.both[:7]) * F.linear(y, self.both[7:]))
        return F.linear(self.norm(self.layer(torch.tanh(y))), self.words.weight)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, groups=2),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 4, 2, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Flatten(),
        nn.Linear(36, 5, bias=False),
    )


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))
    return ids, (3 * ids + 1) % 11


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 6, 6, generator=generator), torch.randint(5, (8,), generator=generator)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], dict[str, Any]]] = {
    "text": (Tied, texts, {}),
    "images": (convolutions, images, {}),
    "images, sides in blocks": (convolutions, images, {"dense_limit": 16}),
    "Adam in the bases": (Tied, texts, {"eigenvalue_exponent": 0.0}),
    "weight decay": (convolutions, images, {"weight_decay": 0.2}),
    "parameter groups": (Tied, texts, {"groups": True}),
}


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Biases and matrices with their own rates, so that a block has two."""
    parameters = dict(model.named_parameters())
    biases = [parameter for name, parameter in parameters.items() if "bias" in name]
    others = [parameter for name, parameter in parameters.items() if "bias" not in name]
    return [{"params": biases, "lr": 0.5}, {"params": others, "weight_decay": 0.1}]


class Training:
    def __init__(self, case: str, dtype: torch.dtype) -> None:
        make, batch, options = CASES[case]
        torch.manual_seed(0)
        model, (x, self.y) = make().to(dtype), batch()
        self.x = x.to(dtype) if x.is_floating_point() else x
        options = dict(options)
        of_compile = {"dense_limit": options.pop("dense_limit")} if "dense_limit" in options else {}
        if options.pop("groups", False):
            options["params"] = by_kind(model)
        self.net = kfac_fx.compile(model, (self.x,), loss="categorical", **of_compile)
        self.optimizer = kfac_fx.KFAC(self.net, seed=0, exact_steps=False, **options)
        self.state = self.optimizer._step_state

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(self.x).flatten(0, -2), self.y.flatten())
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded steps on the CPU, by products in the precision of the factors."""
    monkeypatch.setattr(eigen_moments, "product_dtype", lambda device, dtype: dtype)


def expected_update(training: Training, padded: PaddedStep, flat: FlatParameters, ok: Tensor) -> Tensors:
    """Δ by the other way, which leaves no trace."""
    kept = [tensor for group in padded.means.groups for tensor in group.extras.values()]
    before = [tensor.clone() for tensor in kept]
    grouped, rule = training.state.vectors.grouped, training.state.options.rule
    assert grouped is not None and isinstance(rule, eigen_moments.EigenMoments)
    update = step_in_bases(
        training.state.estimator,
        padded.means,
        flat.flat.parts(flat.g),
        grouped.scalars["momentum"],
        rule.second_moment_decay,
        rule.exponent(training.state.estimator),
        nesterov=nesterov(training.state.checks.size),
        accept=ok,
        most=most_momentum(training.state.scalars["steps"] + ok),
    )
    for tensor, value in zip(kept, before, strict=True):
        tensor.copy_(value)
    return update


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_that_of_matrices_as_they_are(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(case, torch.float64)
    kinds: list[str] = []

    def vector(padded: PaddedStep, flat: FlatParameters, ok: Tensor, *arguments: Any) -> Tensor:
        expected = expected_update(training, padded, flat, ok)
        update = plain_vector(padded, flat, ok, *arguments)
        for name, part in flat.flat.parts(update).items():
            torch.testing.assert_close(part, expected[name], **EXACT)
        kinds.append("vector")
        return update

    def step(padded: PaddedStep, flat: FlatParameters, ok: Tensor, rate: Any, scalars: Any, *arguments: Any) -> Tensor:
        update = expected_update(training, padded, flat, ok)
        before = {name: parameter.clone() for name, parameter in flat.copies.items()}
        moved = plain_step(padded, flat, ok, rate, scalars, *arguments)
        assert moved
        for name, parameter in flat.copies.items():  # the step has changed the rate
            whole = update[name] + scalars["weight_decay"][name] * before[name]
            torch.testing.assert_close(parameter, before[name] - rate() * scalars["lr"][name] * whole, **EXACT)
        kinds.append("step")
        return moved

    plain_vector, plain_step = PaddedStep.vector, PaddedStep.step
    monkeypatch.setattr(PaddedStep, "vector", vector)
    monkeypatch.setattr(PaddedStep, "step", step)
    for _ in range(STEPS):
        training.step()
    assert kinds == ["vector", "vector", "vector", "step", "step", "vector", "step", "step", "step"]
    assert int(training.optimizer.skipped) == 0


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("case", CASES)
def test_the_multiplier_grows_as_with_updates_that_are_kept(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a schedule, new bases after 0, 1, 2, 5, 10 and 20 steps, and steps that the check of step 20 undoes."""
    training = Training(case, torch.float64)
    multiplier, skipped = training.optimizer.scalars["multiplier"], training.optimizer.skipped
    last, peak, inside, forgotten = None, 0.0, 0, 0

    def growing(padded: PaddedStep, flat: FlatParameters, ok: Tensor, *arguments: Any, make: Any) -> Tensor:
        nonlocal last, peak, inside
        updates, gradient, names = (
            expected_update(training, padded, flat, ok),
            flat.g.clone(),
            training.state.vectors.names,
        )
        back = {
            names[p]: group["lr"] * (updates[names[p]] + group["weight_decay"] * p.detach())
            for group in training.optimizer.param_groups
            for p in group["params"]
        }
        way_back = flat.flat.joined(back)
        lr, before = float(flat.largest_lr), float(multiplier)
        peak = max(peak, lr)
        result: Tensor = make(padded, flat, ok, *arguments)
        if ok:
            cosine = 0.0 if last is None else float(gradient @ last / (gradient.norm() * last.norm()))
            least = min(before, 1.0) if lr < peak else 0.1
            expected = min(30.0, max(least, before * math.exp(cosine * lr / peak)))
            assert float(multiplier) == pytest.approx(expected, rel=1e-6)
            inside += cosine != 0 and expected < 30
            last = way_back
        return result

    for name in ("vector", "step"):
        monkeypatch.setattr(PaddedStep, name, partialmethod(growing, make=getattr(PaddedStep, name)))
    for number in range(24):
        for group in training.optimizer.param_groups:
            group["lr"] *= 0.8
        if number == 17:
            with torch.no_grad():
                for parameter in training.net.parameters():
                    parameter.add_(10 * torch.randn_like(parameter))
            training.state.checks.place.values = None  # as wrong steps do
        before = int(skipped)
        training.step()
        if int(skipped) > before:
            last, forgotten = None, forgotten + 1
    assert inside > 5 and forgotten


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("case", ["text", "weight decay"])
def test_a_checked_step_that_is_undone_leaves_no_last_move(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(case, torch.float64)
    for _ in range(5):
        training.step()
    monkeypatch.setattr(eigen_moments, "tolerated", lambda value: torch.full_like(value, -math.inf))  # undo every step
    before = int(training.optimizer.skipped)
    while int(training.optimizer.skipped) == before:
        training.step()
    multiplier = float(training.optimizer.scalars["multiplier"])
    monkeypatch.undo()
    monkeypatch.setattr(eigen_moments, "product_dtype", lambda device, dtype: dtype)
    training.step()
    assert float(training.optimizer.scalars["multiplier"]) == multiplier


def with_a_nan(gradients: list[torch.Tensor]) -> None:
    gradients[0][0, 0] = torch.nan


def zeroed(gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        gradient.zero_()


@pytest.mark.usefixtures("exact_products")
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
@pytest.mark.parametrize("spoil", [with_a_nan, zeroed])
def test_gradients_that_are_not_finite_or_zero_change_nothing(spoil: Callable[[list[torch.Tensor]], None]) -> None:
    training = Training("text", torch.float64)
    for _ in range(4):
        training.step()
    parameters = list(training.net.parameters())
    means = [tensor for group in training.state.memory.means.groups for tensor in group.extras.values()]
    before = [tensor.detach().clone() for tensor in (*parameters, *means)]
    training.optimizer.zero_grad()
    F.cross_entropy(training.net(training.x).flatten(0, -2), training.y.flatten()).backward()
    spoil([parameter.grad for parameter in parameters if parameter.grad is not None])
    training.optimizer.step()
    assert int(training.optimizer.skipped) == 1
    for tensor, value in zip((*parameters, *means), before, strict=True):
        assert torch.equal(tensor, value)
    assert training.step() > training.step()  # it goes on


@pytest.mark.usefixtures("exact_products")
@pytest.mark.filterwarnings("ignore::kfac_fx.StalledWarning")
def test_an_update_that_is_not_finite_makes_no_step() -> None:
    training = Training("text", torch.float64)
    for _ in range(4):
        training.step()
    training.state.memory.means.groups[0].extras["eigenvalues/outputs"].fill_(torch.nan)
    before = [parameter.detach().clone() for parameter in training.net.parameters()]
    training.step()
    assert int(training.optimizer.skipped) == 1
    for parameter, value in zip(training.net.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.usefixtures("exact_products")
def test_a_parameter_without_a_gradient_takes_the_other_way() -> None:
    training = Training("text", torch.float64)
    for _ in range(4):
        training.step()
    training.optimizer.zero_grad()
    F.cross_entropy(training.net(training.x).flatten(0, -2), training.y.flatten()).backward()
    model: Any = training.net.model
    model.layer.bias.grad = None
    bias, weight = model.layer.bias.detach().clone(), model.layer.weight.detach().clone()
    training.optimizer.step()
    assert torch.equal(model.layer.bias, bias) and not torch.equal(model.layer.weight, weight)


@pytest.mark.usefixtures("exact_products")
def test_buffers_have_rows_of_a_multiple_of_16_and_zeros_behind_the_matrix() -> None:
    training = Training("text", torch.float64)
    for _ in range(4):
        training.step()
    padded = training.state.memory._padded
    assert padded is not None
    products = [group for group in padded.groups if group.bases and group.group.multiplies_whole]
    assert products
    for group in products:
        for side, size in zip(group.group.sides, group.rows.shape[2:], strict=True):
            assert side.diagonal or size % CACHE_LINE == 0
        for buffer in (group.rows, group.directions):
            whole, inside = buffer.abs().sum(), group.inside(buffer).abs().sum()
            torch.testing.assert_close(whole, inside, rtol=1e-12, atol=0.0)
            assert inside > 0


def test_in_bfloat16_a_training_ends_where_float32_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a lowest loss within a part of its fall that two roundings of 2⁻⁹ explain. The last loss may be that of a
    step that the next check undoes."""
    ends = []
    for dtype in (None, torch.bfloat16):
        monkeypatch.setattr(eigen_moments, "product_dtype", lambda device, of_factors, dtype=dtype: dtype)
        training = Training("text", torch.float32)
        ends.append([training.step() for _ in range(40)])
    report = " ".join(str(training.net.report).split())
    assert "gradients are turned by products of torch.bfloat16 with sums in torch.float32" in report
    first, lowest, other = ends[0][0], min(ends[0]), min(ends[1])
    assert lowest < 0.5 * first
    assert abs(other - lowest) < 0.02 * (first - lowest)


def test_a_cpu_multiplies_matrices_as_they_are() -> None:
    assert eigen_moments.product_dtype(torch.device("cpu"), torch.float32) is None
    training = Training("text", torch.float32)
    training.step()
    assert training.state.memory._padded is None


def test_without_triton_the_operations_are_those_of_torch_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eigen_moments, "product_dtype", lambda device, dtype: dtype)
    training = Training("text", torch.float64)
    training.step()
    padded = training.state.memory._padded
    assert padded is not None and not padded.reasons

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(padded_step, "import_module", missing)
    padded.region.name = "graft_by_kernel"
    training.step()
    words = "the step is slower than it could be: Triton cannot run graft_by_kernel: No module named 'triton'"
    assert padded.reasons == [words]
    assert words in " ".join(str(training.net.report).split())
    assert int(training.optimizer.skipped) == 0


@pytest.mark.usefixtures("exact_products")
def test_a_graph_is_captured_anew_if_its_tensors_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Hashable] = []

    def keep_key(graph: CudaGraph, function: Callable[[], None], key: Hashable) -> None:
        keys.append(key)
        function()

    monkeypatch.setattr(CudaGraph, "__call__", keep_key)
    training = Training("text", torch.float64)
    for _ in range(5):
        training.step()
    assert len(keys) == 2 and keys[0] == keys[1]
    kept = training.state.vectors.grouped
    training.optimizer.load_state_dict(training.optimizer.state_dict())  # the scalars of the groups are new tensors
    training.optimizer.param_groups[0]["lr"] = 0.5
    assert kept is not None and training.state.vectors.grouped is None
    for _ in range(3):
        training.step()
    assert len(keys) == 4 and keys[2] == keys[3] != keys[1]
    with torch.no_grad():
        for parameter in training.net.parameters():
            parameter.data = parameter.data.clone()
    training.step()
    assert keys[4] != keys[3]


def test_without_cuda_a_graph_runs_the_function() -> None:
    calls: list[int] = []
    graph = CudaGraph()
    for key in (1, 1, 2):
        graph(lambda: calls.append(1), key)
    assert len(calls) == 3 and graph.reason is None
