"""Values that a use needs and no node computes: the nodes behind them, and the same in a copy of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.parametrization import Computed, nodes_of, with_nodes

GRAPH, COPY = fx.Graph(), fx.Graph()
X, Y = (GRAPH.placeholder(name) for name in "xy")
COPIES = {X: COPY.placeholder("x"), Y: COPY.placeholder("y")}
NEW_X, NEW_Y = COPIES[X], COPIES[Y]


@dataclass(frozen=True)
class Data:
    value: Any
    layout: Layout = Layout((2, 3))


def test_a_node_is_behind_itself_and_a_computed_value_has_its_arguments_behind_it() -> None:
    assert nodes_of(X) == [X]
    assert nodes_of(Computed(torch.narrow, (X, 1, 0, Y))) == [X, Y]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (X, NEW_X),
        ((X, 3, (Y, "y")), (NEW_X, 3, (NEW_Y, "y"))),
        (frozenset({X, Y}), frozenset({NEW_X, NEW_Y})),
        ({X: Y, "a": (X,)}, {NEW_X: NEW_Y, "a": (NEW_X,)}),
        (Data(X), Data(NEW_X)),
        (Data(Computed(torch.t, (Data(Y), 1))), Data(Computed(torch.t, (Data(NEW_Y), 1)))),
        (fx.Node, fx.Node),
    ],
)
def test_nodes_are_replaced_wherever_they_stand(value: Any, wanted: Any) -> None:
    assert with_nodes(value, COPIES) == wanted


@pytest.mark.parametrize("value", [(1, "a", (2.0,)), Data(3), frozenset({1}), Layout((2, 3)), Data, None])
def test_data_without_nodes_is_the_same_object(value: Any) -> None:
    assert with_nodes(value, COPIES) is value


def test_a_node_that_the_copy_lacks_is_an_error() -> None:
    with pytest.raises(KeyError):
        with_nodes((GRAPH.placeholder("z"),), COPIES)
