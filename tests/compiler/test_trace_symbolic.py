"""torch.fx's symbolic tracing: the graph, its calling convention, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_fx import UntraceableError
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.trace import trace_model


class Model(nn.Module):
    """A norm behind a linear layer, with an argument that has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor, flag: bool = True) -> Tensor:
        y: Tensor = self.norm(self.layer(x)) * self.scale
        return y if flag else -y


class Doing(nn.Module):
    """A forward that is `function(self, x)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def test_older_backward_hooks_are_an_effect() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    model[0].register_backward_hook(lambda module, before, after: None)  # with these torch unpacks outputs in a loop
    capture = trace_model(model)
    assert [op_name(node) for node in capture.program.graph.nodes if node.op == "call_function"] == ["linear", "tanh"]
    assert capture.effects == ("calls the backward hooks of 0",)


def test_modules_of_torch_are_traced_into_except_norms() -> None:
    graph = trace_model(Model()).program.graph
    assert [op_name(node) for node in graph.nodes if node.op == "call_function"] == ["linear", "mul"]
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["norm"]
    assert {node.target for node in graph.nodes if node.op == "get_attr"} == {"layer.weight", "layer.bias", "scale"}


def test_arguments_are_bound_by_name_and_hold_with_their_defaults() -> None:
    traced, x = trace_model(Model()), torch.ones(1, 3)
    assert traced.flatten((), {"x": x}) == (x, True)
    assert traced.holds((x,), {}) and traced.holds((x, True), {}) and not traced.holds((x,), {"flag": False})


def test_checks_of_defaults_are_no_part_of_the_graph() -> None:
    assert not any("assert" in str(node.target) for node in trace_model(Model()).program.graph.nodes)


def test_the_tensors_are_the_models() -> None:
    model = Model()
    root = trace_model(model).program.root
    assert root.get_parameter("layer.weight") is model.layer.weight and root.get_submodule("norm") is model.norm


def without_gradients(own: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return own.layer(x)


def assigned(own: Any, x: Tensor) -> Any:
    own.seen = own.seen + 1
    return own.layer(x)


def listed(own: Any, x: Tensor) -> Any:
    weights = dict(own.named_parameters())
    return x @ weights["layer.weight"].transpose(0, 1) + weights["layer.bias"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_gradients, "does not see no_grad"),
        (lambda own, x: own.layer(x) + torch.rand(3), "does not see random numbers"),
        (assigned, "assigns a new tensor to its buffer seen"),
        (listed, r"parameters that torch.fx takes for constants, at .*\(test_trace_symbolic.py:\d+\)"),
        (lambda own, x: own.layer(x) if x.sum() > 0 else x, "could not be captured as a graph"),
    ],
    ids=["modes", "random", "buffer", "parameters", "branch"],
)
def test_what_torch_fx_would_capture_wrongly_is_refused(function: Callable[..., Any], words: str) -> None:
    model = Doing(function)
    state, seen = torch.random.get_rng_state(), model.seen
    with pytest.raises(UntraceableError, match=words):
        trace_model(model)
    assert torch.equal(torch.random.get_rng_state(), state) and model.seen is seen


def test_attributes_that_forward_sets_are_effects() -> None:
    traced = trace_model(Doing(lambda own, x: setattr(own, "last", 1) or own.layer(x)))
    assert traced.effects == ("sets last",) and traced.assigned == ("last",)
