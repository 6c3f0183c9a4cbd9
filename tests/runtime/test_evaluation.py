"""Evaluations with torch's kernels of recurrent layers: the values of the graph whose steps are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kfac_fx
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.jacobian_products import JacobianProducts
from kfac_fx.linalg.processes import Replicas
from kfac_fx.optim.batch_loss import BatchLoss, ObservedForward
from kfac_fx.optim.checks import Check
from kfac_fx.passes.tracing import substitutes
from kfac_fx.passes.tracing.effects import RandomState
from kfac_fx.recording.equivalence import BagsByLookups, evaluated
from kfac_fx.recording.recorder import Recorder
from tests.tables import every
from tests.zoo.recurrent import Last

X = torch.randn(5, 4, 3)


class Count(TorchDispatchMode):
    """The number of operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


class Packed(nn.Module):
    """Packed sequences, whose outputs are padded again and whose last states are returned."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner, self.head = kind(3, 4, num_layers=2, dropout=0.3), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, last = self.inner(rows)
        state: Tensor = last[0] if isinstance(last, tuple) else last
        padded = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, padding_value=0.5, total_length=6)[0]
        return self.head(state[-1]), padded.sum(1)


class WithLoss(nn.Module):
    """A model that returns its loss alone, behind noise and a batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.head = nn.BatchNorm1d(3), nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(x.mT).mT
        return F.mse_loss(self.head(F.dropout(self.inner(x)[0][:, -1], 0.2, self.training)), y)


class TwoKinds(nn.Module):
    """A cell behind a stack, on a first state that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cell = nn.GRU(3, 4, batch_first=True), nn.GRUCell(4, 4)
        self.start = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.inner(x, self.start.expand(-1, len(x), -1).contiguous())
        return torch.stack([self.cell(y[:, 0], last[0]), self.cell(last[0])])


LENGTHS = torch.tensor([2, 4, 1])
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "lstm": (lambda: Last(nn.LSTM(3, 4, batch_first=True)), (X,)),
    "lstm, two layers, both ways": (lambda: Last(nn.LSTM(3, 4, num_layers=2, bidirectional=True, bias=False)), (X,)),
    "lstm with projections": (lambda: Last(nn.LSTM(3, 4, proj_size=2)), (X,)),
    "lstm with dropout": (lambda: Last(nn.LSTM(3, 4, num_layers=3, dropout=0.4, batch_first=True)), (X,)),
    "gru with dropout": (lambda: Last(nn.GRU(3, 4, num_layers=2, dropout=0.4, bidirectional=True)), (X,)),
    "rnn": (lambda: Last(nn.RNN(3, 4, num_layers=2)), (X,)),
    "rnn of relus": (lambda: Last(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)), (X,)),
    "packed lstm": (lambda: Packed(nn.LSTM), (X, LENGTHS)),
    "packed gru": (lambda: Packed(nn.GRU), (X, LENGTHS)),
    "cells and a learned start": (TwoKinds, (X,)),
    "a loss inside": (WithLoss, (X, torch.randn(5, 2))),
    "one sequence": (lambda: nn.Sequential(First(), nn.Linear(4, 2)), (X[0],)),
    "float64": (lambda: Last(nn.LSTM(3, 4)).double(), (X.double(),)),
}


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y


def compiled(model: nn.Module, inputs: tuple[Any, ...]) -> CompiledModule:
    loss = (
        None
        if isinstance(model, WithLoss)
        else (lambda out: kfac_fx.losses.Normal(out[0]))
        if isinstance(model, Packed)
        else "normal"
    )
    return kfac_fx.compile(model, inputs, loss=loss)


def at_others(recorder: Recorder) -> dict[str, Tensor]:
    return {name: value.detach() + 0.1 for name, value in recorder.live_parameters().items()}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", every(2, MODELS))
def test_values_are_those_of_the_written_out_graph(name: str) -> None:
    """Under the same noise, at other parameters than the model's; the model is left as it was."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    net = compiled(make(), inputs)
    recorder = net.recorder(inputs, {})
    values, parameters = recorder.capture.flatten(inputs, {}), at_others(recorder)
    state, random = {key: value.clone() for key, value in net.state_dict().items()}, torch.get_rng_state()
    first = evaluated(recorder, parameters, values)
    assert recorder.kernels is not None and recorder.kernels_reason is None
    for outputs in (first, evaluated(recorder, parameters, values)):
        torch.testing.assert_close(outputs, recorder.outputs(parameters, values))
    with Count() as by_kernels:
        evaluated(recorder, parameters, values)
    with Count() as written_out:
        recorder.outputs(parameters, values)
    assert by_kernels.number <= written_out.number
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(dict(net.state_dict()), state, rtol=0, atol=0)


def test_a_model_without_recurrent_layers_has_one_graph() -> None:
    net = kfac_fx.compile(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), (X,), loss="normal")
    recorder = net.recorder((X,), {})
    torch.testing.assert_close(evaluated(recorder, {}, (X,)), recorder.outputs({}, (X,)), rtol=0, atol=0)
    assert recorder.kernels is None and recorder.kernels_reason is None


def missing(*args: Any) -> Any:
    raise NotImplementedError("no kernel for lstm\non this device")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda *args: [2 * result for result in torch.lstm(*args)], "torch's kernel has other outputs"),
        (missing, "torch's kernel does not run: no kernel for lstm"),
    ],
)
def test_a_kernel_that_is_no_measure_of_the_graph_is_not_taken_and_reported(
    broken: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = compiled(Last(nn.LSTM(3, 4)), (X,)), X
    monkeypatch.setitem(substitutes.TORCH_LAYERS, "lstm", broken)
    recorder = net.recorder((x,), {})
    torch.testing.assert_close(evaluated(recorder, {}, (x,)), recorder.outputs({}, (x,)), rtol=0, atol=0)
    text = f"the checks of a step compute recurrent layers step by step, which takes longer: {reason}"
    assert any(sentence.startswith(text) for sentence in net.report.to_dict()["fallbacks"])


def check_of(net: CompiledModule, x: Tensor, by_quotient: bool) -> Check:
    recorder, start = net.recorder((x,), {}), RandomState.now(())
    outputs = net(x)
    forward = ObservedForward.of(recorder, (x,), {}, outputs)
    outputs.square().mean().backward()
    batch = BatchLoss(net, [forward], JacobianProducts(), 1.0, False, Replicas(), (), start)
    return Check.of(batch, {name: value.detach() for name, value in net.named_parameters()}, 1, by_quotient)


def test_a_check_by_quotients_has_values_of_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a probe of zero they are those that it starts from."""
    torch.manual_seed(0)
    net = compiled(Last(nn.LSTM(3, 4, num_layers=2, dropout=0.4)), (X,))
    check = check_of(net, X, by_quotient=True)
    assert not check.batch.differentiated
    monkeypatch.setattr(Recorder, "run_without_taps", None)
    (here,), (before,) = check.values_at({}), check.before
    torch.testing.assert_close(here.leaves, before.leaves)
    assert net.recorder((X,), {}).kernels is not None


def test_a_check_by_products_has_values_of_the_written_out_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = compiled(Last(nn.LSTM(3, 4)), (X,))
    check = check_of(net, X, by_quotient=False)
    monkeypatch.setattr(substitutes, "TORCH_LAYERS", {})
    fisher, _, _ = check.batch.along(
        check.parameters, {name: torch.ones_like(p) for name, p in check.parameters.items()}
    )
    check.values_at({})
    assert fisher > 0 and not net.recorder((X,), {}).looked_for_kernels


def test_a_default_training_checks_by_kernels_and_ends_where_it_does_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained() -> tuple[list[float], CompiledModule]:
        torch.manual_seed(0)
        net, target = compiled(Last(nn.LSTM(3, 4, batch_first=True)), (X,)), torch.randn(5, 2)
        optimizer, values = kfac_fx.KFAC(net, exact_steps=False), []  # exact ones multiply differences of rounding
        for _ in range(12):
            optimizer.zero_grad()
            loss = (net(X) - target).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values, net

    found, net = trained()
    assert net.recorder((X,), {}).kernels is not None
    monkeypatch.setattr("kfac_fx.recording.equivalence.recurrent_stacks", lambda graph: [])
    wanted, other = trained()
    assert other.recorder((X,), {}).kernels is None
    assert found == pytest.approx(wanted, rel=1e-3) and found[-1] < found[0] / 4


# --- bags of embeddings -----------------------------------------------------------------------------------------------

FLAT, OFFSETS = torch.tensor([3, 1, 6, 6, 0, 2, 5, 1, 1]), torch.tensor([0, 2, 2, 7])
BAGS_OF: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "of one size": (torch.tensor([[3, 1, 6, 2], [5, 5, 0, 1], [2, 2, 2, 2]]), {}),
    "by offsets": (FLAT, {"offsets": OFFSETS}),
    "with the last offset": (FLAT, {"offsets": torch.tensor([0, 2, 2, 7, 9]), "include_last_offset": True}),
    "empty": (FLAT[:0], {"offsets": torch.tensor([0, 0])}),
}


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("mode", ["sum", "weighted", "mean", "max"])
@pytest.mark.parametrize("name", BAGS_OF)
def test_lookups_have_the_values_and_derivatives_of_bags(name: str, mode: str, padding_idx: int | None) -> None:
    """torch's backward is the oracle of the forward-mode derivative: <g, J t> = <Jᵀ g, t>."""
    torch.manual_seed(0)
    ids, options = BAGS_OF[name]
    options = {**options, "mode": "sum" if mode == "weighted" else mode, "padding_idx": padding_idx}
    options |= {"per_sample_weights": torch.rand(ids.shape, dtype=torch.float64)} if mode == "weighted" else {}
    weight, tangent = torch.randn(2, 7, 3, dtype=torch.float64)
    weight.requires_grad_()
    expected = F.embedding_bag(ids, weight, **options)
    gradient = torch.randn_like(expected)
    (pulled,) = torch.autograd.grad(expected, weight, gradient)

    def by_function(weight: Tensor) -> Tensor:
        with BagsByLookups():
            return F.embedding_bag(ids, weight, **options)

    def by_numbers(weight: Tensor) -> Tensor:
        number = {"sum": 0, "mean": 1, "max": 2}[options["mode"]]
        offsets, samples = options["offsets"], options.get("per_sample_weights")
        with BagsByLookups():
            bags: Tensor = torch.embedding_bag(
                weight, ids, offsets, False, number, False, samples, "include_last_offset" in options, padding_idx
            )[0]
        return bags

    for function in (by_function, by_numbers)[: 1 + ("offsets" in options)]:
        value, pushed = torch.func.jvp(function, (weight.detach(),), (tangent,))
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close((gradient * pushed).sum(), (pulled * tangent).sum())


class Bags(nn.Module):
    def __init__(self, python: bool) -> None:
        super().__init__()
        self.bag, self.head, self.python = nn.EmbeddingBag(7, 3, mode="mean"), nn.Linear(3, 4), python

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bag(ids)
        if self.python and x.sum() > 1e9:
            x = 2 * x
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("python", [False, True])
def test_models_with_bags_have_exact_products(python: bool) -> None:
    """In training, too: a divided model ended in an error of torch."""
    torch.manual_seed(0)
    model, (ids, _) = Bags(python).double(), BAGS_OF["of one size"]
    net = kfac_fx.compile(model, (ids,), loss="categorical")
    assert bool(net.program.submodules) == python
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def logits(parameters: dict[str, Tensor]) -> Tensor:
        x = parameters["bag.weight"][ids].mean(1)
        return x @ parameters["head.weight"].T + parameters["head.bias"]

    z, pushed = torch.func.jvp(logits, (parameters,), (vector,))
    p = z.softmax(-1)
    (pulled,) = torch.func.vjp(logits, parameters)[1](p * (pushed - (p * pushed).sum(-1, keepdim=True)) / len(ids))
    torch.testing.assert_close(net.fisher_product(ids)(vector), pulled)
    optimizer = kfac_fx.KFAC(net)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids), torch.tensor([0, 1, 2]))
        loss.backward()
        optimizer.step()
    assert int(optimizer.skipped) == 0 and "reverse mode" not in str(net.report)
    assert float(F.cross_entropy(net(ids), torch.tensor([0, 1, 2])).detach()) < float(loss.detach())


# --- without taps -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight by two names, a table that no state has, a buffer that forward writes, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head, self.norm = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.BatchNorm1d(4)
        self.head.weight = self.tokens.weight
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(F.dropout(self.norm(self.tokens(ids) + self.table), 0.3) * torch.tensor([2.0]))
        return logits


WITHOUT_RECURRENCE: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "tied": (Tied, torch.tensor([1, 5, 2, 0, 6]), "categorical"),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)),
        torch.randn(5, 2, 6, 6),
        "normal",
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        torch.randn(5, 3),
        "normal",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_RECURRENCE)
def test_values_without_taps_are_those_of_the_model_with_other_parameters(name: str) -> None:
    """Under the same noise; the model is left as it was, and no tap is called."""
    torch.manual_seed(0)
    make, x, loss = WITHOUT_RECURRENCE[name]
    net = kfac_fx.compile(make(), (x,), loss=loss)
    recorder = net.recorder((x,), {})
    values, parameters = recorder.capture.flatten((x,), {}), at_others(recorder)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    taps = [tap for of_registration in recorder.emitted.taps.values() for tap in of_registration]
    calls: list[nn.Module] = []
    for tap in taps:
        tap.register_forward_hook(lambda module, *_: calls.append(module))
    torch.manual_seed(1)
    output, (fisher,) = evaluated(recorder, parameters, values)
    torch.manual_seed(1)
    buffers = {key: value.clone() for key, value in net.model.named_buffers()}
    expected = torch.func.functional_call(net.model, {**parameters, **buffers}, (x,))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(fisher, expected)
    assert taps and not calls
    for key, value in net.state_dict().items():
        assert torch.equal(value, state[key])
    torch.manual_seed(1)
    recorder.outputs(parameters, values)
    assert calls  # recordings have them
