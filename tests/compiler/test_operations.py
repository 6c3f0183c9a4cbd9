"""The names of operations, and what they are known to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kfac_fx.passes.graphs.operations import (
    REQUIRED,
    SPELLED_OUT,
    aten_order,
    is_random,
    op_name,
    returns_view,
    writes_elsewhere,
)
from kfac_fx.passes.trace import trace_model
from tests.compiler.toy import Toy


def spelled(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    graph = trace_model(Toy(function), inputs or None).program.graph
    return [op_name(node) for node in graph.nodes if node.op.startswith("call")]


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
    graph = trace_model(Toy(function), (torch.randn(3, 3),) if exported else None).program.graph
    assert any(is_random(node) for node in graph.nodes) is random


@pytest.mark.parametrize(
    ("name", "writes"),
    [("fused_moving_avg_obs_fake_quant", True), ("fake_quantize_per_tensor_affine", False), ("add", False)]
    + [("add_", False), ("sort", False), ("batch_norm", False), ("linear", False), ("no_operation", False)],
)
def test_what_writes_into_another_argument_than_its_first(name: str, writes: bool) -> None:
    assert writes_elsewhere(name) is writes


@pytest.mark.parametrize("name", SPELLED_OUT)
def test_defaults_are_those_of_the_function(name: str) -> None:
    function, defaults = SPELLED_OUT[name]
    required = [parameter for parameter, default in defaults.items() if default is REQUIRED]
    assert list(defaults)[: len(required)] == required
    overload = getattr(torch.ops.aten, {"cross_entropy": "cross_entropy_loss"}.get(name, name)).overloads()[0]
    aten = getattr(getattr(torch.ops.aten, {"cross_entropy": "cross_entropy_loss"}.get(name, name)), overload)
    assert set(required) <= set(aten_order(aten, name))
    with pytest.raises(TypeError):
        function()


@pytest.mark.parametrize(
    ("overload", "name", "order"),
    [
        (torch.ops.aten.mm.default, "matmul", ("input", "other")),
        (torch.ops.aten.mv.default, "matmul", ("input", "other")),
        (torch.ops.aten.embedding.default, "embedding", ("weight", "input", "padding_idx")),
        (torch.ops.aten.embedding_bag.default, "embedding_bag", ("weight", "indices", "offsets")),
        (torch.ops.aten.cross_entropy_loss.default, "cross_entropy", ("input", "target", "weight", "reduction")),
    ],
)
def test_arguments_of_aten_have_the_functions_names(overload: Any, name: str, order: tuple[str, ...]) -> None:
    assert aten_order(overload, name)[: len(order)] == order


@pytest.mark.parametrize(
    ("name", "view"),
    [("transpose", True), ("select", True), ("split", True), ("add", False), ("add_", False), ("no_such_name", False)],
)
def test_views_are_told_by_schemas(name: str, view: bool) -> None:
    assert returns_view(name) is view
