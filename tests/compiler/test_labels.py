"""What a node depends on, which parameter stands behind it, and where parameters enter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from kfac_fx.passes.labels import (
    Label,
    ancestors,
    bound_parameter,
    is_random,
    labels,
    op_name,
    parameters_behind,
    use_edges,
)
from kfac_fx.passes.trace import capture
from tests.compiler.toy import Toy, before, node


def traced(function: Callable[..., Any], **shapes: tuple[int, ...]) -> tuple[fx.Graph, dict[fx.Node, Label]]:
    graph = capture(Toy(function, **shapes)).program.graph
    return graph, labels(graph, shapes)


def label(function: Callable[..., Any]) -> Label:
    """Of what `function` returns."""
    graph, found = traced(function, w=(3, 3))
    (output,) = (one for one in graph.nodes if one.op == "output")
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
    ],
)
def test_a_node_is_what_it_depends_on(function: Callable[..., Any], expected: Label) -> None:
    assert label(function) is expected


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
    assert {found[one] for one in program.graph.nodes if "slice" in one.name} <= {Label.PURE, Label.CONST}


def spelled(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    graph = capture(Toy(function), inputs or None).program.graph
    return [op_name(one) for one in graph.nodes if one.op.startswith("call")]


def test_all_spellings_have_one_name() -> None:
    def many(x: Any) -> Any:
        return torch.add(x, 1), x.add(1), x + 1, x.shape

    assert spelled(many)[:3] == ["add", "add", "add"]
    assert spelled(many)[-1] == "shape"
    assert spelled(lambda x: x.add(1), torch.randn(2, 2)) == ["add"]


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    ("function", "random"),
    [
        (lambda x: F.dropout(x, 0.5), True),
        (lambda x: F.dropout2d(x[None, :, :, None], 0.5), True),
        (lambda x: x.bernoulli(), True),
        (lambda x: F.gumbel_softmax(x), True),
        (lambda x: F.rrelu(x, training=True), True),
        (lambda x: x.clone().uniform_(), True),
        (lambda x: torch.tanh(F.linear(x, x)), False),
    ],
)
def test_what_draws_from_the_random_stream(function: Callable[..., Any], random: bool, exported: bool) -> None:
    graph = capture(Toy(function), (torch.randn(3, 3),) if exported else None).program.graph
    assert any(is_random(one) for one in graph.nodes) is random


def edges(function: Callable[..., Any]) -> list[str]:
    graph, found = traced(function, w=(3, 3))
    outputs = [one.all_input_nodes[0] for one in graph.nodes if one.op == "output"]
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


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.t(),
        lambda w: w.T,
        lambda w: w.transpose(0, 1).contiguous(),
        lambda w: torch.permute(w, (1, 0)),
        lambda w: w.reshape(3, 2, 2).transpose(1, 2),
        lambda w: w.view(-1).unsqueeze(0),
        lambda w: w.unflatten(1, (2, 2)).movedim(0, -1),
        lambda w: w.float().to(torch.float32).clone(),
    ],
)
@pytest.mark.parametrize("exported", [False, True])
def test_invertible_views_are_looked_through(view: Callable[[Any], Any], exported: bool) -> None:
    model = Toy(lambda x, w: x.sum() * view(w), w=(3, 4))
    graph = capture(model, (torch.randn(5),) if exported else None).program.graph
    (product,) = (one for one in graph.nodes if op_name(one) == "mul")
    bound = bound_parameter(product.args[1], {"w": (3, 4)})
    assert bound is not None
    name, layout = bound
    assert name == "w"
    weight = model.get_parameter("w")
    assert torch.equal(layout.apply(weight), view(weight))
    assert torch.equal(layout.invert(layout.apply(weight)), weight)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[0],
        lambda w: w.exp().t(),
        lambda w: w.expand(2, 3, 4),
        lambda w: w.repeat(2, 1),
        lambda w: w.view(torch.int32),
        lambda w: torch.cat([w, w]),
    ],
)
def test_other_operations_are_not(view: Callable[[Any], Any]) -> None:
    graph, _ = traced(lambda x, w: x.sum() * view(w), w=(3, 4))
    assert bound_parameter(node(graph, "mul").args[1], {"w": (3, 4)}) is None  # type: ignore[arg-type]


def test_a_view_by_a_size_of_the_batch_is_not_looked_through() -> None:
    graph, _ = traced(lambda x, w: x * w.view(x.shape[1], -1), w=(3, 4))
    assert bound_parameter(node(graph, "mul").args[1], {"w": (3, 4)}) is None  # type: ignore[arg-type]
