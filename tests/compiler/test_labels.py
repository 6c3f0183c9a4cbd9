"""Labels of nodes: what each depends on, which parameter stands behind it, and where parameters enter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes.graphs import labels as module
from kfac_fx.passes.graphs.labels import (
    Label,
    ancestors,
    entries,
    gradient_stop,
    labels,
    labels_of,
    parameters_behind,
    use_edges,
)
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, before, node


def traced(function: Callable[..., Any], **shapes: tuple[int, ...]) -> tuple[fx.Graph, dict[fx.Node, Label]]:
    graph = trace_model(Toy(function, **shapes)).program.graph
    return graph, labels(graph, shapes)


def label(function: Callable[..., Any]) -> Label:
    """The label of the value that `function` returns."""
    graph, found = traced(function, w=(3, 3))
    (output,) = (node for node in graph.nodes if node.op == "output")
    return found[output.args[0]]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: x, Label.ACT),
        (lambda x, w: w, Label.PURE),
        (lambda x, w: w.t().exp() * 2, Label.PURE),
        (lambda x, w: x @ w, Label.ACT),
        (lambda x, w: x.detach(), Label.ACT),
        (lambda x, w: w.detach(), Label.CONST),
        (lambda x, w: w.data, Label.CONST),
        (lambda x, w: w > 0, Label.CONST),
        (lambda x, w: torch.zeros_like(x), Label.CONST),
        (lambda x, w: x.shape[0], Label.CONST),
        (lambda x, w: x.new_ones(x.size(0)) + w, Label.PURE),
        (lambda x, w: F.linear(torch.ones(2, 3), w), Label.FREE),
        (lambda x, w: torch.relu(F.linear(w, w.t())) * w, Label.FREE),
        (lambda x, w: F.linear(torch.ones(2, 3), w).detach(), Label.CONST),
        (lambda x, w: F.layer_norm(w, (3,), w[0], w[1]), Label.FREE),
        (lambda x, w: F.layer_norm(w, (3,)), Label.PURE),
        (lambda x, w: w @ torch.ones(3, 3), Label.PURE),
        (lambda x, w: F.linear(x, F.linear(torch.ones(3, 3), w)), Label.ACT),
        (lambda x, w: w.expand(x.shape[0], 3, 3), Label.ACT),
        (lambda x, w: w.repeat(x.size(0), 1, 1), Label.ACT),
        (lambda x, w: w.expand(2, 3, 3), Label.PURE),
        (lambda x, w: torch.einsum("td,do->to", torch.ones(2, 3), w), Label.FREE),
        (lambda x, w: torch.einsum("do, td -> to", w, torch.ones(2, 3)), Label.FREE),
        (lambda x, w: torch.einsum("o,od->od", torch.ones(3), w), Label.PURE),  # scaled, not applied to anything
        (lambda x, w: torch.einsum("d,do->o", torch.ones(3), w), Label.PURE),
        (lambda x, w: torch.einsum("td,do->to", w, w), Label.PURE),
        (lambda x, w: torch.einsum("td,do", torch.ones(2, 3), w), Label.PURE),
        (lambda x, w: torch.einsum("td,do->to", x, w), Label.ACT),
    ],
)
def test_a_node_is_what_it_depends_on(function: Callable[..., Any], expected: Label) -> None:
    assert label(function) is expected


def test_an_expansion_to_the_first_size_of_any_input_has_a_row_a_case() -> None:
    """torch.export ties two inputs only where forward does, and not where it divides one size by the other."""

    class Captions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.words = nn.Parameter(torch.randn(4)), nn.Embedding(5, 4)

        def forward(self, ids: Tensor, images: Tensor) -> Tensor:
            images = torch.cat([self.token.expand(images.shape[0], 1, -1), images], dim=1)
            return torch.cat([images.repeat(ids.shape[0] // images.shape[0], 1, 1), self.words(ids)], dim=1)

    net = kfac_fx.compile(Captions(), (torch.ones(3, 2, dtype=torch.int64), torch.randn(3, 6, 4)), loss="normal")
    found = {(registration.layer, registration.parameters) for registration in net.registrations}
    assert found == {("scale_and_shift", ("token",)), ("embedding", ("words.weight",))}


def test_a_constant_with_a_row_a_case_is_an_activation() -> None:
    model = Toy(lambda x, w: torch.zeros(x.shape[0], 3) @ w + torch.zeros(x.shape[1]), w=(3, 3))
    program = before("match", model, torch.randn(5, 3))
    assert program.cases is not None
    found = labels(program.graph, program.parameters, cases=program.cases)
    assert found[node(program, "zeros")] is Label.ACT
    assert found[node(program, "zeros_1")] is Label.CONST


def test_an_expansion_to_the_cases_is_an_activation_and_a_slice_is_none() -> None:
    def both(x: Any, w: Any, p: Any) -> Any:
        return torch.cat(
            [w.expand(x.shape[0], -1, -1), x + p[:, : x.shape[1]], w.expand(x.shape[1], -1, -1)[:1] * x], 1
        )

    program = before("match", Toy(both, w=(1, 1, 3), p=(1, 9, 3)), torch.randn(5, 4, 3))
    found = labels(program.graph, program.parameters, cases=program.cases)
    assert found[node(program, "expand")] is Label.ACT
    assert found[node(program, "expand_1")] is Label.PURE
    assert {found[node] for node in program.graph.nodes if "slice" in node.name} <= {Label.PURE, Label.CONST}


def edges(function: Callable[..., Any]) -> list[str]:
    graph, found = traced(function, w=(3, 3))
    outputs = [node.all_input_nodes[0] for node in graph.nodes if node.op == "output"]
    return [f"{pure} -> {act}" for pure, act in use_edges(graph, found, outputs)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: x @ w, ["w -> matmul"]),
        (lambda x, w: x @ w.t(), ["t -> matmul"]),
        (lambda x, w: (x @ w) @ w, ["w -> matmul", "w -> matmul_1"]),
        (lambda x, w: x + (x @ w).detach(), []),
        (lambda x, w: x @ w.detach(), []),
        (lambda x, w: x.view_as(w), []),
        (lambda x, w: x.expand_as(w) * 2, []),
        (lambda x, w: torch.where(x @ w > 0, x, -x), []),
        (lambda x, w: w.exp(), ["exp -> exp"]),  # an output that is PURE itself
        (lambda x, w: x * w.sum() + w.mean(), ["sum_1 -> mul", "mean -> add"]),
    ],
)
def test_edges_are_the_places_where_a_parameter_enters(function: Callable[..., Any], expected: list[str]) -> None:
    assert edges(function) == expected


def test_what_nothing_behind_the_losses_reads_is_no_use() -> None:
    graph, found = traced(lambda x, w: (x * 2, x @ w), w=(3, 3))
    assert use_edges(graph, found, [node(graph, "mul")]) == []
    assert node(graph, "matmul") not in ancestors([node(graph, "mul")])


def test_all_parameters_behind_a_node() -> None:
    graph, found = traced(lambda x, v, w: x * (v.exp() + w.detach() + w).sum(), v=(3,), w=(3,))
    assert parameters_behind(node(graph, "sum_1"), found) == {"v", "w"}
    graph, found = traced(lambda x, v, w: x * (v.exp() + w.detach()), v=(3,), w=(3,))
    assert parameters_behind(node(graph, "add"), found) == {"v"}


def test_the_labels_of_a_program_are_computed_once_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[fx.Graph] = []
    real = module.labels
    monkeypatch.setattr(
        module, "labels", lambda graph, *rest, **more: walks.append(graph) or real(graph, *rest, **more)
    )
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    program = trace_model(model, (torch.randn(5, 3),)).program.but(layers=LAYERS)
    found = run(program)
    assert len(found.registrations) == 2 and not any(registration.generic for registration in found.registrations)
    assert walks.count(found.graph) == 1  # express, match, cut and check
    entries(found)
    assert walks.count(found.graph) == 1


def test_a_program_of_another_graph_has_labels_of_its_own() -> None:
    program = run(trace_model(nn.Linear(3, 4), (torch.randn(5, 3),)).program)
    copied = program.copied()
    assert set(labels_of(program)) == set(program.graph.nodes)
    assert set(labels_of(copied)) == set(copied.graph.nodes)
    assert program.but(unused=()).labeled is program.labeled
    assert program.but(cases=None).labeled == {} and program.but(parameters={}).labeled == {}


def test_behind_a_node_made_of_pieces_are_the_pieces_and_not_their_parameter() -> None:
    graph, label = traced(lambda x, w, v: x @ (w[:2].exp() * v), w=(3, 3), v=(2, 3))
    pure, cut = node(graph, "mul"), node(graph, "getitem")
    assert parameters_behind(pure, label) == {"w", "v"}
    assert parameters_behind(pure, label, {cut: ["w[0:2]"]}) == {"w[0:2]", "v"}


# --- where gradients stop ---------------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def without_gradient(y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y.abs().amax()
    return y / scale


STOPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of an input and the output of a linear layer
    "a rounded value": lambda x, y: y.round() + y,
    "a detached value": lambda x, y: y * y.detach(),
    "a comparison": lambda x, y: torch.where(y > 0, y + 1, y),
    "chosen experts": lambda x, y: y * y.topk(2).indices.sum(),
    "a class": lambda x, y: y * y.argmax(-1, keepdim=True),
    "whole numbers": lambda x, y: y * y.to(torch.int32),
    "without gradients": lambda x, y: without_gradient(y),
    "a function of the user's": lambda x, y: Rounded.apply(y),  # type: ignore[no-any-return]
}
SMOOTH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mask of the inputs": lambda x, y: y.masked_fill(x > 0, 0.0) + x.round() * y,
    "kinks": lambda x, y: F.max_pool1d(y.relu().abs().clamp(max=2.0), 2),
    "sizes": lambda x, y: y / y.shape[-1] + torch.zeros_like(y),
    "the shape of outputs": lambda x, y: y.gather(1, torch.broadcast_tensors((x[:, :1] > 0).long(), y)[0]),
    "attention": lambda x, y: F.scaled_dot_product_attention(y[None], y[None], y[None], is_causal=True)[0],
    "the largest": lambda x, y: y.max(-1).values + y.amax(-1) + y.topk(2).values.sum(-1),
}


def stop_of(of: Callable[[Tensor, Tensor], Tensor]) -> fx.Node | None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(F.dropout(self.norm(self.linear(x))))
            return of(x, y)

    net = kfac_fx.compile(Model(), (torch.randn(6, 4),), loss="normal", verify=False)
    return gradient_stop(net.program)


@pytest.mark.parametrize("of", STOPS.values(), ids=STOPS)
def test_a_gradient_stops_where_values_jump_or_move_without_it(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert stop_of(of) is not None


@pytest.mark.parametrize("alone", [False, True])
def test_a_value_that_is_returned_to_be_logged_stops_no_gradient(alone: bool) -> None:
    """Checks took products with the Jacobian because of it, which costs four forwards instead of one."""

    class Logged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            z = self.layer(x)
            loss = F.mse_loss(z, x)
            return (loss, loss.detach(), z.argmax(-1)) if alone else (loss + z.detach().round().mean(), z.detach())

    stop = gradient_stop(kfac_fx.compile(Logged(), (torch.randn(6, 4),)).program)
    assert (stop is None) == alone


@pytest.mark.parametrize("of", SMOOTH.values(), ids=SMOOTH)
def test_no_gradient_stops_in_what_is_continuous_in_the_parameters(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert stop_of(of) is None
