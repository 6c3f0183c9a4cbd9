"""Which elements of a parameter a gathered tensor holds, masks with a row a case, tables that layers are applied to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kfac_fx.passes.ir import Program
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.parametrizations.gathered import KEY
from kfac_fx.passes.resolve import resolve
from kfac_fx.passes.trace import capture
from tests.compiler.toy import Toy, before, code, found, node

INDEX = torch.tensor([[0, 2], [2, 1]])


def normal(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Program:
    return normalize(capture(Toy(function, **shapes), inputs or None).program)


GATHERED: dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]] = {
    "rows by an index": (lambda w: w[INDEX], [[[0, 1], [4, 5]], [[4, 5], [2, 3]]]),
    "an index, turned": (lambda w: w[INDEX].permute(2, 0, 1), [[[0, 4], [4, 2]], [[1, 5], [5, 3]]]),
    "an embedding": (lambda w: F.embedding(INDEX[0], w), [[0, 1], [4, 5]]),
    "an embedding with padding": (lambda w: F.embedding(INDEX[0], w, -1), [[0, 1], [-1, -1]]),
    "a slice": (lambda w: w[1:, :1].contiguous(), [[2], [4]]),
    "in another order": (lambda w: w.flip(0), [[4, 5], [2, 3], [0, 1]]),
    "beside a constant": (lambda w: w[:2] + torch.ones(2, 1, 2), [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]),
    "masked": (lambda w: w[:2].masked_fill(INDEX == 2, 0.5), [[0, -1], [-1, 3]]),
    "where": (lambda w: torch.where(INDEX == 2, w[:2], -9.0), [[-1, 1], [2, -1]]),
}


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(("function", "expected"), GATHERED.values(), ids=GATHERED.keys())
def test_elements_are_numbered(function: Callable[[Tensor], Tensor], expected: list[Any], exported: bool) -> None:
    x = torch.randn(1)
    program = normal(lambda x, w: x * function(w).sum(), *([x] if exported else []), w=(3, 2))
    noted = [one for one in program.graph.nodes if KEY in one.meta]
    elements = noted[-1].meta[KEY]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, copies)
    graph.output(copies[elements.numbers])
    assert elements.parameter == "w"
    assert fx.GraphModule(program.root, graph)(x).tolist() == expected


def test_what_is_computed_from_elements_has_no_numbers() -> None:
    program = normal(lambda x, w: x * (2 * w[INDEX]).exp().sum(), w=(3, 2))
    assert [one.name for one in program.graph.nodes if KEY in one.meta] == ["getitem"]
    program = normal(lambda x, w: x * w.t().reshape(-1).exp().sum(), w=(3, 2))
    assert not any(KEY in one.meta for one in program.graph.nodes)


def test_a_mask_of_parameters_gets_a_row_for_every_case() -> None:
    def attention(x: Tensor, table: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=table)

    program = before("match", Toy(attention, table=(2, 5, 5)), torch.randn(3, 2, 5, 4))
    (call,) = (one for one in program.graph.nodes if "scaled" in one.name)
    expanded = call.args[3]
    assert [str(size) for size in expanded.meta["val"].shape] == [program.cases, "2", "5", "5"]
    assert expanded.args[0].target == "table"
    masked = Toy(lambda x, w: F.scaled_dot_product_attention(x, x @ w, x), w=(4, 4))
    program = before("match", masked, torch.randn(3, 5, 4))
    assert not any("expand" in line for line in code(program))


def test_a_parameter_that_a_layer_is_applied_to_is_marked() -> None:
    program = normal(lambda x, t, w: x + F.linear(F.layer_norm(t.view(1, 2, 3), (3,), w[0]), w), t=(2, 3), w=(3, 3))
    assert [line.split(" = ")[1] for line in code(program) if "learned" in line][0] == "learned(view)"
    assert node(program, "learned").users.keys() == {node(program, "layer_norm")}


def test_a_parameter_behind_a_layers_input_is_marked_where_it_is_read() -> None:
    def function(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        table = torch.dropout(t, 0.5, True)[:2]
        return x + F.linear(table, w) + F.linear(table.exp(), w) + t[0]

    program = normal(function, torch.randn(2, 3), t=(4, 3), w=(3, 3))
    assert [line for line in code(program) if "learned" in line][0] == "learned = learned(t)"
    assert node(program, "learned").users.keys() == {node(program, "dropout")}
    vector = normal(lambda x, t, w: x + F.linear(t * 2, w), torch.randn(2, 3), t=(3,), w=(3, 3))
    assert not any("learned" in line for line in code(vector))


def test_weights_are_no_tables() -> None:
    """A product of two parameters is one more parameter, as in low-rank adapters."""
    program = normal(lambda x, a, b: F.linear(x, b @ a), a=(2, 3), b=(3, 2))
    assert not any("learned" in line for line in code(program))


def test_a_token_captured_with_one_case_is_registered_as_with_many() -> None:
    def with_token(x: Tensor, token: Tensor, w: Tensor) -> Tensor:
        return torch.cat([token.expand(x.shape[0], -1, -1), F.linear(x, w)], dim=1)

    model = Toy(with_token, token=(1, 1, 3), w=(3, 4))
    expected = [("scale_and_shift", ("token",), 1), ("linear", ("w",), 1)]
    for inputs in ((torch.randn(1, 5, 4),), (torch.randn(3, 5, 4),), ()):
        assert found(resolve(before("resolve", model, *inputs))) == expected
