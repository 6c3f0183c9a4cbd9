"""Sizes of nodes: numbers and symbols, where the cases are, how many there are, and a mask in the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from kfac_fx.passes.cases import case_size, number_of_cases, size, with_batch_dim, with_mask, with_row_mask
from kfac_fx.passes.graphs.labels import in_example, known_number, shape_of, sizes_of
from kfac_fx.passes.ir import CASES, NUMBER, ROW_MASK, Program, Use
from kfac_fx.passes.parametrization import Computed
from tests.compiler.toy import Toy, before, node

N, T = 4, 7


def program() -> Program:
    return before("cut", Toy(lambda x, w: F.linear(x, w).mT, w=(3, 5)), torch.randn(N, T, 5))


def test_sizes_are_numbers_or_the_symbols_of_the_capture() -> None:
    x, y = node(program(), "x"), node(program(), "linear")
    cases, positions, width = sizes_of(y)
    assert width == "3" and not cases.isdigit() and not positions.isdigit() and cases != positions
    assert sizes_of(x)[:2] == [cases, positions] or sizes_of(x)[2] == "5"
    assert [known_number(size) for size in shape_of(y)] == [None, None, 3]
    assert [in_example(size) for size in shape_of(y)] == [N, T, 3]


def test_a_node_without_a_tensor_has_no_sizes() -> None:
    nothing = fx.Graph().placeholder("x")
    assert shape_of(nothing) == () and sizes_of(nothing) == []


def test_the_dimension_of_the_cases_is_the_one_with_their_size() -> None:
    (use,) = program().matches
    cases, positions, _ = sizes_of(use.output)
    assert with_batch_dim(use, cases).batch_dim == 0
    assert with_batch_dim(use, positions).batch_dim == 1
    assert with_batch_dim(use, "s77").batch_dim is None


def test_only_the_first_size_of_an_output_may_count_the_cases() -> None:
    graph, sizes = program().graph, sizes_of(node(program(), "x"))
    output = before("cut", Toy(lambda x, w: F.linear(x, w).new_zeros(2, x.shape[1]), w=(3, 5)), torch.randn(N, T, 5))
    assert sizes_of(output.outputs[0]) == ["2", sizes[1]]
    assert case_size(graph, output.outputs) == sizes[0]


def test_where_the_cases_are_a_number_the_outputs_do_not_count_them() -> None:
    """As in a forward with `len(x)`, for as many cases as outputs. Cases that are merged with positions are none."""
    graph = fx.Graph()
    for shape, outputs_last, wanted in (((144, 4), True, None), ((36, 4, 4), True, 1), ((4, 36), False, 0)):
        output = graph.placeholder("x")
        output.meta["val"] = torch.empty(shape)
        use = Use("linear", 0, output, output, {}, {}, frozenset())
        assert with_batch_dim(use, "4", outputs_last).batch_dim == wanted


def test_without_sizes_the_dimension_of_the_cases_stays() -> None:
    bare = fx.Graph().placeholder("x")
    use = Use("linear", 0, bare, bare, {}, {}, frozenset(), batch_dim=0)
    assert with_batch_dim(use, "s77") is use


def test_a_use_without_the_batch_is_told_how_many_cases_share_it() -> None:
    """`count` grows with their number, read off the first input that has them."""
    captured = program()
    (use,) = captured.matches
    cases, positions, _ = sizes_of(use.output)
    shared = with_batch_dim(replace(use, attrs={**use.attrs, CASES: None}), positions)
    assert shared.attrs[CASES] == Computed(size, (node(captured, "x"), 1))
    assert number_of_cases(use.output, cases) == Computed(size, (node(captured, "x"), 0))
    assert number_of_cases(use.output, None) == Computed(size, (node(captured, "x"), 0))


def test_cases_are_counted_in_the_inputs_of_the_same_submodule() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    output = graph.call_function(torch.tanh, (second,))
    for of, submodule in ((first, 0), (second, 1), (output, 1)):
        of.meta[NUMBER] = submodule
    assert number_of_cases(output, None) == Computed(size, (second, 0))


@pytest.mark.parametrize(
    ("value", "dim", "expected"),
    [
        (torch.zeros(4, 7), 1, 7),
        ([3, {"x": torch.zeros(5, 2)}, torch.zeros(9)], 0, 5),
        ((torch.tensor(2.0), torch.zeros(6)), 0, 6),  # a number has no sizes
        (torch.tensor(2.0), 0, 1),
        ("no tensor", 0, 1),
    ],
)
def test_the_size_of_an_input_is_that_of_its_first_tensor(value: Any, dim: int, expected: int) -> None:
    assert size(value, dim) == expected


@pytest.mark.parametrize(("readers", "masked"), [("with_row_mask", True), ("both", False), ("as mask", False)])
def test_a_use_whose_only_reader_is_a_mask_has_this_mask(readers: str, masked: bool) -> None:
    graph = fx.Graph()
    output, kept = graph.placeholder("output"), graph.placeholder("kept")
    graph.call_function(with_row_mask, (kept, output) if readers == "as mask" else (output, kept))
    if readers == "both":
        graph.call_function(torch.tanh, (output,))
    use = with_mask(Use("linear", 0, output, output, {}, {"eps": 1}, frozenset()))
    assert use.attrs == ({"eps": 1, ROW_MASK: kept} if masked else {"eps": 1})


def test_a_mask_in_a_graph_changes_no_value() -> None:
    x: Tensor = torch.randn(3)
    assert with_row_mask(x, torch.zeros(3)) is x
