"""A Program: names, shapes and pieces of its parameters, and the same Program on a copy of its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_fx.passes.graphs.labels import labels_of
from kfac_fx.passes.ir import ELEMENTS, WITH_NODES, Note, Options, Program
from kfac_fx.passes.parametrization import Piece
from tests.compiler.toy import Toy, before

PIECES = {piece.name: piece for piece in (Piece("w", 0, 0, 2), Piece("w", 0, 2, 6))}


def program(**changes: Any) -> Program:
    toy = Toy(lambda x, w, b: F.linear(x, w, b[index()]), w=(6, 4), b=(9,))
    return before("resolve", toy, torch.randn(3, 4)).but(**changes)


def index() -> torch.Tensor:
    return torch.tensor([0, 2, 4, 6, 8, 1])


def test_all_names_of_a_parameter_stand_under_its_canonical_one() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight  # type: ignore[assignment]
    captured = before("resolve", tied, torch.randn(3, 4))
    assert captured.names == {"0.weight": ("0.weight", "2.weight"), "0.bias": ("0.bias",), "2.bias": ("2.bias",)}


def test_a_parameter_that_is_used_in_pieces_has_their_names_and_shapes() -> None:
    in_pieces = program(pieces=PIECES)
    assert in_pieces.shapes == {"w[0:2]": (2, 4), "w[2:6]": (4, 4), "b": (9,)}
    assert in_pieces.parts("w") == ("w[0:2]", "w[2:6]") and in_pieces.parts("b") == ("b",)
    assert [in_pieces.owner(name) for name in in_pieces.shapes] == ["w", "w", "b"]
    assert in_pieces.pieces_among(["b", "w[2:6]"]) == (PIECES["w[2:6]"],)
    assert program().shapes == {"w": (6, 4), "b": (9,)}


def test_a_generic_registration_holds_its_piece_and_its_reason() -> None:
    registration = program(pieces=PIECES).generic("w[0:2]", "a reason")
    assert (registration.parameters, registration.reason) == (("w[0:2]",), "a reason")
    assert registration.approximation == "diagonal" and registration.pieces == (PIECES["w[0:2]"],)


@pytest.mark.parametrize(("changes", "again"), [({"dropped": ()}, False), ({"cases": "s77"}, True)])
def test_labels_are_shared_until_something_changes_that_they_depend_on(changes: dict[str, Any], again: bool) -> None:
    captured = program()
    label = labels_of(captured)
    assert (labels_of(captured.but(**changes)) is not label) is again


def test_a_copy_has_nodes_of_its_own_wherever_a_program_refers_to_nodes() -> None:
    captured = program()
    copied = captured.copied()
    theirs, ours = set(captured.graph.nodes), set(copied.graph.nodes)
    assert [node.format_node() for node in copied.graph.nodes] == [node.format_node() for node in captured.graph.nodes]
    assert theirs.isdisjoint(ours)
    for use, other in zip(captured.matches, copied.matches, strict=True):
        assert (use.input.name, use.output.name) == (other.input.name, other.output.name)
        assert {other.input, other.output, *other.nodes} <= ours
    assert captured.outputs and set(copied.outputs) <= ours
    elements = [node for node in copied.graph.nodes if ELEMENTS in node.meta]
    assert elements
    for node in elements:
        assert not any(repr(id(other)) in repr(node.meta[ELEMENTS]) for other in theirs)


def test_a_copy_can_be_written_into() -> None:
    captured = program()
    before_ = captured.graph.python_code("self").src
    copied = captured.copied()
    copied.graph.erase_node(next(node for node in copied.graph.nodes if node.op == "output"))
    assert captured.graph.python_code("self").src == before_


def test_every_field_that_holds_nodes_is_moved_to_another_graph() -> None:
    """Held to the types of the fields, so that a new field with nodes is not forgotten."""
    fields = {name for name, kind in Program.__annotations__.items() if "fx.Node" in kind or "Use" in kind}
    fields |= {"losses", "registrations"}  # of records that hold nodes
    assert fields == set(WITH_NODES)


def test_options_know_groups_patterns_and_classes() -> None:
    group = frozenset({"w", "b"})
    options = Options(linked={group: None}, approximations={"w": "kron", "blocks.*": "full", nn.Linear: "kron", 3: ""})
    assert options.groups == {"w": group, "b": group}
    assert options.patterns == ("blocks.*",) and options.classes == (nn.Linear,)


def test_a_program_prints_what_the_passes_found() -> None:
    lines = str(program(dropped=(Note("linear(w)", "a reason"),), unused=("b",))).splitlines()
    assert any(line.startswith("match         linear(w") for line in lines)
    assert lines[-2:] == ["dropped       linear(w): a reason", "unused        b"]
    assert "def forward(self, x):" in lines and not any(line.endswith("= None") for line in lines)
