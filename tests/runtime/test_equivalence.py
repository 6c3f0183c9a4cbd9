"""Whether a graph is the model: outputs, gradients, buffers."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx import UntraceableError
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.equivalence import check_equivalence, close, equal_up_to_rounding
from kfac_fx.recording.recorder import Recorder

X = torch.randn(5, 3)


def recorder(model: nn.Module, exported: bool = True, x: Tensor = X) -> Recorder:
    traced = trace_model(model, (x,) if exported else None, layers=LAYERS)
    return Recorder(EmittedGraph(traced, run(traced.program), model))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.scales = itertools.count(1)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * next(self.scales)


def test_a_graph_that_computes_something_else_is_refused() -> None:
    with pytest.raises(UntraceableError) as failure:
        check_equivalence(recorder(Scaled()), (X,), {})
    first, advice = str(failure.value).splitlines()
    assert first.startswith("Scaled computes something else than its graph: outputs differ by ")
    assert advice.startswith(
        "A capture does not include clocks, random numbers from outside of torch, or state outside of the model."
    )


def test_an_input_that_is_given_back_may_require_a_gradient() -> None:
    class Coordinates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            points = x.clone().detach().requires_grad_(True)
            return {"points": points, "values": self.inner(points).sin()}

    net = kfac_fx.compile(Coordinates(), (X,), loss=lambda outputs: kfac_fx.losses.Normal(outputs["values"]))
    assert not net.report.rows[0].generic and net.report.rows[0].layer == "linear"
    assert net(X)["points"].requires_grad


def test_a_hook_that_changes_gradients_is_refused_with_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))
    with pytest.raises(UntraceableError) as failure:
        check_equivalence(recorder(model), (X,), {})
    first, advice = str(failure.value).splitlines()
    assert first == "Sequential has other gradients than its graph, in 0.weight, 0.bias, 1.weight, 1.bias."
    assert "torch.library.custom_op" in advice


class Sensitive(nn.Module):
    """Its gradients change by as much as one rounding of the parameters, times 1e5."""

    def __init__(self, other_gradients: bool) -> None:
        super().__init__()
        self.inner, self.out = nn.LSTM(3, 16, num_layers=2), nn.Linear(16, 2)
        if other_gradients:
            self.out.register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],))

    def forward(self, x: Tensor) -> Tensor:
        return 1e-5 * (1e5 * self.out(self.inner(x)[0])).sin()


def test_gradients_that_rounding_changes_as_much_are_those_of_the_graph_and_told() -> None:
    torch.manual_seed(0)
    (told,) = check_equivalence(recorder(Sensitive(other_gradients=False)), (X,), {})
    assert told.startswith("gradients of the model differ from those of its graph by more than rounding. They also ")
    assert told.endswith("To compare it, compile it in float64")
    with pytest.raises(UntraceableError, match="other gradients than its graph, in inner"):
        check_equivalence(recorder(Sensitive(other_gradients=True).double(), x=X.double()), (X.double(),), {})
    with pytest.raises(UntraceableError, match="other gradients than its graph, in inner"):
        check_equivalence(recorder(Sensitive(other_gradients=True)), (X,), {})


def test_a_hook_of_a_parameter_changes_training_and_not_the_fisher() -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    hooked, frozen_rows = network(), torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    hooked[0].weight.register_hook(lambda gradient: gradient * frozen_rows)
    with pytest.warns(
        UserWarning, match=r"hooks of parameters change the gradients of 0\.weight, which are right"
    ) as told:
        net = kfac_fx.compile(hooked, (X,), loss="normal", approximations={"0.weight": "diagonal"})
    assert str(told[0].message) in " ".join(str(net.report).split()) and not net.report.rows[0].generic
    statistics = kfac_fx.compile(network(), (X,), loss="normal", approximations={"0.weight": "diagonal"})
    for key, of_model in statistics.record((X,), {}, mode="exact").statistics.items():
        for name, value in net.record((X,), {}, mode="exact").statistics[key].items():
            torch.testing.assert_close(value, of_model[name])
    before, optimizer = hooked[0].weight.detach().clone(), kfac_fx.KFAC(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(X).square().sum(1).mean().backward()
        optimizer.step()
    moved = (hooked[0].weight.detach() - before).abs().sum(1) > 0
    assert moved.tolist() == [False, True, True, True]


def test_parameters_that_forward_reads_from_a_dictionary_of_its_own_are_registered() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(2))
            self.register_buffer("mask", torch.tensor([1.0, 0.0]))
            self.tensors = {"w": self.weight, "more": [self.bias, self.mask]}

        def forward(self, x: Tensor) -> Tensor:
            bias, mask = self.tensors["more"]
            return (x @ self.tensors["w"].T + bias) * mask

    net = kfac_fx.compile(Held(), (X,), loss="normal", strict=True)
    assert [(row.layer, row.parameters) for row in net.report.rows] == [("linear", ("weight", "bias"))]
    net.model.mask.data = torch.tensor([0.0, 1.0])  # a constant of the graph would stay the old one
    first, second = net.record((X,), {}, mode="exact").statistics["weight", "bias"]["G"][0].diagonal().tolist()
    assert first == 0 < second


def test_a_tensor_that_was_made_from_a_parameter_before_forward_is_refused() -> None:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.zeros(2))
            self.turned = self.weight.t()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.turned + self.bias

    with warnings.catch_warnings(), pytest.raises(UntraceableError) as failure:
        warnings.simplefilter("error")
        kfac_fx.compile(Made(), (X,), loss="normal")
    first, advice, _ = str(failure.value).splitlines()
    assert first.startswith("Made computes with tensors that were made from weight before forward, such as ")
    assert advice == "Make them in forward."


def test_a_hook_that_only_looks_is_an_effect() -> None:
    model = nn.Linear(3, 2)
    model.register_full_backward_hook(lambda module, before, after: None)
    given = recorder(model)
    check_equivalence(given, (X,), {})
    assert given.capture.effects == ("calls the backward hooks of Linear",)


def test_a_graph_that_does_not_run_is_refused() -> None:
    class Dispatch(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if isinstance(x, Tensor) else x["a"] * 2

    traced = trace_model(Dispatch())
    given = Recorder(EmittedGraph(traced, run(traced.program), Dispatch()))
    with pytest.raises(
        UntraceableError, match=r"the graph of Dispatch does not run on these inputs: .*\n.*example inputs"
    ):
        check_equivalence(given, (X,), {})


def test_buffers_that_are_updated_otherwise_are_an_effect() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    given = recorder(model)
    check_equivalence(given, (X,), {})
    assert given.capture.effects == (
        "averages over all batches in 0", "updates the buffer 0.running_mean", "updates the buffer 0.running_var",
    )  # fmt: skip


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
def test_comparing_leaves_no_trace(exported: bool) -> None:
    class Cached(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            self.last = super().forward(x)
            return self.last

    model = Cached(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    stream = torch.random.get_rng_state()
    x = X.clone()
    check_equivalence(recorder(model, exported), (x,), {})
    assert torch.equal(torch.random.get_rng_state(), stream) and torch.equal(x, X)
    assert all(parameter.grad is None for parameter in model.parameters()) and not hasattr(model, "last")
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0] and torch.equal(buffer, buffers[name][1])


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 2).requires_grad_(False), nn.Identity(), nn.Linear(3, 2).to(torch.bfloat16)]
)
def test_nothing_to_differentiate_and_low_precision(model: nn.Module) -> None:
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    traced = trace_model(model, (X.to(dtype),), layers=LAYERS)
    check_equivalence(Recorder(EmittedGraph(traced, run(traced.program), model)), (X.to(dtype),), {})


def test_what_is_close() -> None:
    one = torch.ones(3)
    assert (
        equal_up_to_rounding(one, one + 1e-6)
        and not equal_up_to_rounding(one, one + 1e-2)
        and not equal_up_to_rounding(one, torch.ones(2))
        and not equal_up_to_rounding(one, None)
    )
    assert equal_up_to_rounding(torch.tensor([1, 2]), torch.tensor([1, 2])) and not equal_up_to_rounding(
        torch.tensor([1, 2]), torch.tensor([1, 3])
    )
    assert close(None, None, 0, 0) and close(None, torch.zeros(3), 0, 0) and not close(one, None, 1e-3, 0)
    assert close(one * torch.nan, one, 0, 0)
