"""Which parameter is seen through a chain of views, and how it lies there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kfac_fx.passes.graphs.operations import bound_parameter, op_name
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy, node


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
    graph = trace_model(model, (torch.randn(5),) if exported else None).program.graph
    (product,) = (node for node in graph.nodes if op_name(node) == "mul")
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
    graph = trace_model(Toy(lambda x, w: x.sum() * view(w), w=(3, 4))).program.graph
    assert bound_parameter(node(graph, "mul").args[1], {"w": (3, 4)}) is None  # type: ignore[arg-type]


def test_a_view_by_a_size_of_the_batch_is_not_looked_through() -> None:
    graph = trace_model(Toy(lambda x, w: x * w.view(x.shape[1], -1), w=(3, 4))).program.graph
    assert bound_parameter(node(graph, "mul").args[1], {"w": (3, 4)}) is None  # type: ignore[arg-type]
