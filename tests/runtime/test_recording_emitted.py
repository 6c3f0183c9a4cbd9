"""A captured model, emitted: whole or in submodules, it runs as the model does and leaves no trace."""

from __future__ import annotations

from abc import ABC
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx import LossError
from kfac_fx.recording.emitted import EmittedGraph, EmittedModel, value_of
from kfac_fx.recording.emitted_submodules import EmittedSubmodules
from kfac_fx.recording.meeting_cases import collecting
from kfac_fx.recording.proof import ProofTap
from tests.whole.divided import Branching, Normalized

X = torch.randn(6, 4)


class Straight(Branching):
    def between(self, h: Tensor) -> Any:
        return self.middle(h)


def emitted(model: nn.Module, **options: Any) -> EmittedModel:
    first = kfac_fx.compile(model, (X,), **{"loss": "normal", **options}).captures.first
    assert first is not None
    return first.emitted


BOTH = pytest.mark.parametrize("build", [Straight, Branching], ids=["graph", "submodules"])


def state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters, {name: buffer.clone() for name, buffer in model.named_buffers()}


def without_probes(emitted_model: EmittedModel) -> list[None]:
    return [None] * len(emitted_model.program.registrations)


def test_the_one_is_a_graph_and_the_other_are_submodules_and_neither_is_the_other() -> None:
    graph, submodules = emitted(Straight()), emitted(Branching())
    assert isinstance(graph, EmittedGraph) and graph.whole
    assert isinstance(submodules, EmittedSubmodules) and not submodules.whole
    assert type(graph).__mro__[1:] == type(submodules).__mro__[1:] == (EmittedModel, ABC, object)


@BOTH
def test_a_run_at_other_parameters_is_the_model_there(build: Any) -> None:
    model, other = build(), build()
    emitted_model = emitted(model)
    values = emitted_model.capture.flatten((X,), {})
    output, fisher = emitted_model.run(*state(other), values, without_probes(emitted_model), compiled=False)
    torch.testing.assert_close(emitted_model.capture.unflatten(output), other(X))
    assert len(fisher) == 1


class Tied(nn.Module):
    """One layer under two names, one of which the emitted module has for itself, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(4, 4)
        self.twin = self.code
        self.register_buffer("offset", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.twin(torch.tanh(self.code(x) + self.get_buffer("offset")))


def test_an_eager_run_lends_the_tensors_to_every_place_and_takes_them_back_after_an_error() -> None:
    model, other = Tied(), Tied()
    graph = emitted(model)
    assert isinstance(graph, EmittedGraph) and graph.renamed
    values, probes = graph.capture.flatten((X,), {}), without_probes(graph)
    before = dict(graph.module.state_dict(keep_vars=True))
    (output,), _ = graph.run_eagerly(*state(other), values, probes)
    torch.testing.assert_close(output, other(X))
    torch.testing.assert_close(output, graph.call(*state(other), values, probes)[0][0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        graph.run_eagerly(*state(other), (X[:, :3],), probes)
    after = graph.module.state_dict(keep_vars=True)
    assert after.keys() == before.keys() and all(after[name] is tensor for name, tensor in before.items())


def test_buffers_are_written_where_they_were_given() -> None:
    model = Normalized()
    emitted_model = emitted(model)
    parameters, buffers = state(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    emitted_model.run(parameters, buffers, ((X,), {}), without_probes(emitted_model))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not torch.equal(buffers["middle.1.running_mean"], before["middle.1.running_mean"])
    assert "last_size" not in model.__dict__


@BOTH
def test_emitted_again_it_has_other_taps_and_the_same_capture(build: Any) -> None:
    emitted_model = emitted(build())
    again = emitted_model.but(make_tap=ProofTap)
    assert again.capture is emitted_model.capture and again.taps.keys() == emitted_model.taps.keys()
    assert all(isinstance(tap, ProofTap) for taps in again.taps.values() for tap in taps)
    assert not any(isinstance(tap, ProofTap) for taps in emitted_model.taps.values() for tap in taps)


@BOTH
@pytest.mark.parametrize(("fraction", "examples"), [(1.0, 6), (0.5, 3), (0.01, 1)])
def test_a_part_of_a_batch_has_at_least_one_example(build: Any, fraction: float, examples: int) -> None:
    emitted_model = emitted(build())
    assert emitted_model.examples(emitted_model.part(emitted_model.capture.flatten((X,), {}), fraction)) == examples


@BOTH
def test_random_streams_are_restored(build: Any) -> None:
    emitted_model = emitted(nn.Sequential(build(), nn.Dropout()))
    before = torch.random.get_rng_state()
    with emitted_model.isolated():
        assert torch.is_grad_enabled()
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_losses_of_python_are_those_of_the_last_run() -> None:
    class Inside(Branching):
        def forward(self, x: Tensor) -> Any:
            return nn.functional.mse_loss(super().forward(x), x[:, :3])

    emitted_model = emitted(Inside(), loss=None)
    emitted_model.run(*state(emitted_model.model), ((X,), {}), without_probes(emitted_model))
    (site,) = emitted_model.loss_sites
    assert (site.loss, site.reduction) == ("mse_loss", "mean")
    assert torch.equal(emitted_model.target_values(site.targets, ((X,), {})), X[:, :3])


def test_a_value_is_computed_from_inputs_and_not_from_parameters() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    shifted = graph.call_function(torch.add, (x, 1))
    product = graph.call_method("mul", (shifted, w))
    held = {"mean": X.mean(0)}
    centered = graph.call_function(torch.sub, (shifted, graph.get_attr("mean")))
    assert torch.equal(value_of(shifted, {x: X}, held.__getitem__), X + 1)
    assert torch.equal(value_of(centered, {x: X}, held.__getitem__), X + 1 - X.mean(0))
    with pytest.raises(LossError, match="the loss at w are computed from parameters; pass `targets`"):
        value_of(product, {x: X}, held.__getitem__)


def test_only_buffers_that_the_graph_reads_are_copied_for_a_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model.register_buffer("unread", torch.zeros(1000))
    graph = emitted(model)
    assert graph.buffer_names == ["1.running_mean", "1.running_var"]


def test_other_taps_stand_in_the_same_code_and_others_graphs_are_emitted_anew() -> None:
    first = emitted(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    assert isinstance(first, EmittedGraph)
    other = first.but(make_tap=ProofTap)
    assert type(other.module) is type(first.module)  # each emission has a class of its own
    (key, *_), counted = first.taps, sum(map(len, first.taps.values()))
    assert all(isinstance(tap, ProofTap) for taps in other.taps.values() for tap in taps)
    assert not any(isinstance(tap, ProofTap) for tap in first.module.modules())
    assert [tap for tap in other.module.modules() if isinstance(tap, ProofTap)] == [
        t for ts in other.taps.values() for t in ts
    ]
    assert sum(map(len, other.taps.values())) == counted and other.like is None
    fewer = first.program.but(registrations=tuple(r for r in first.program.registrations if r.parameters != key))
    assert type(first.but(program=fewer).module) is not type(first.module)
    assert type(first.but(backend="aot_eager").module) is not type(first.module)
    behind = first.program.but(outputs=(first.program.outputs[0], first.program.registrations[0].uses[0].output))
    _, outputs = first.but(program=behind).run(*state(first.model), (X,), without_probes(first))
    assert len(outputs) == 2


def test_one_graph_has_one_emission_with_collecting_taps() -> None:
    graph, submodules = emitted(Straight()), emitted(Branching())
    assert collecting(graph) is collecting(graph) and collecting(graph).like is None
    assert collecting(submodules) is not collecting(submodules)


def test_masks_of_padding_are_in_the_graph_of_taps_that_read_them_alone() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            return self.last((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))

    inputs = torch.randn(6, 7, 4), (torch.rand(6, 7) < 0.7).float().index_fill(1, torch.tensor(0), 1.0)
    net = kfac_fx.compile(Masked(), inputs, loss="normal", padding_mask="mask")
    first = net.captures.first
    assert first is not None and first.program.mask is not None
    assert type(collecting(first.emitted).module) is not type(first.emitted.module)  # type: ignore[attr-defined]


class FrozenAverages(nn.Module):
    """A batch normalization by hand, whose averages are frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.gain, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.var = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.layer(x), self.mean, self.var, self.gain, self.shift, True)


@pytest.mark.parametrize("examples", [(X,), None])
def test_frozen_averages_of_a_norm_move_once_a_forward(examples: Any) -> None:
    torch.manual_seed(0)
    model = FrozenAverages()
    net = kfac_fx.compile(model, examples, loss="mse", strict=True)
    assert not model.mean.any()
    optimizer = kfac_fx.KFAC(net)
    mean, var = torch.zeros(3), torch.ones(3)
    for _ in range(3):
        x = torch.randn(6, 4)
        F.batch_norm(model.layer(x).detach(), mean, var, training=True)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close((model.mean.data, model.var.data), (mean, var))
    assert [registration.layer for registration in net.registrations] == ["linear", "batch_norm"]
