"""The names of operations, and what they are known to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kfac_fx.passes.graphs.operations import is_random, op_name
from kfac_fx.passes.trace import capture
from tests.compiler.toy import Toy


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
