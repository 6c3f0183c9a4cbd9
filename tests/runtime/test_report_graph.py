"""The report as a graph of networkx and in Graphviz' language."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
import torch

import kfac_fx
from kfac_fx.compiled.report import Report
from kfac_fx.passes.ir import Program
from tests.runtime.toy_reports import small_program
from tests.zoo.parts import Slices


@pytest.fixture
def program() -> Program:
    return small_program()


DOT = r"""digraph kfac_fx {
  rankdir=TB;
  node [fontname="Helvetica", fontsize=10];
  r0 [shape=box, style="filled,rounded", fillcolor="#dbe9f6", label="0  conv2d\nstem.{weight, bias}\nkronecker: A 28 x 28, G 16 x 16"];
  r1 [shape=box, style="filled,rounded", fillcolor="#dbe9f6", label="1  linear\nhead.{weight, bias}\nkronecker, independent: A 33 x 33, G 10 x 10"];
  r2 [shape=box, style=dashed, label="2  generic\ntemperature\ngeneric diagonal: F diag 1"];
  u0 [label="conv2d"];
  u1 [label="linear"];
  u2 [label="linear_1"];
  u3 [label="linear_2"];
  n0 [shape=plaintext, label="add"];
  n1 [shape=plaintext, label="add"];
  n2 [shape=plaintext, label="exp"];
  n3 [shape=plaintext, label="mul"];
  r0 -> u0 [style=dashed, arrowhead=none];
  r1 -> u1 [style=dashed, arrowhead=none];
  r1 -> u2 [style=dashed, arrowhead=none];
  r1 -> u3 [style=dashed, arrowhead=none];
  r2 -> n2 [style=dashed, arrowhead=none];
  u0 -> u1;
  u0 -> u2;
  u0 -> u3;
  u1 -> n0;
  u2 -> n0;
  n0 -> n1;
  u3 -> n1;
  n1 -> n3;
  n2 -> n3;
}
"""  # noqa: E501


def test_the_graph_shows_registrations_uses_and_where_data_meets(program: Program) -> None:
    registrations = tuple(program.registrations[n] for n in (0, 4, 5))
    assert Report(program.but(registrations=registrations)).to_dot() == DOT


def test_the_graph_escapes_its_labels(program: Program) -> None:
    head = replace(program.registrations[4], layer='my "own"\\layer')
    assert r'label="0  my \"own\"\\layer\nhead' in Report(program.but(registrations=(head,))).to_dot()


# --- networkx ---------------------------------------------------------------------------------------------------------


def of_kind(graph: nx.DiGraph, kind: str) -> list[object]:
    return [node for node, data in graph.nodes(data=True) if data["kind"] == kind]


def test_the_graph_leads_from_parameters_through_uses_to_blocks(program: Program) -> None:
    graph = Report(program).to_networkx()
    head = ("head.weight", "head.bias")
    uses = ["use linear", "use linear_1", "use linear_2"]
    assert list(graph.successors("head.weight")) == list(graph.predecessors(head)) == uses
    assert [graph.edges["head.weight", use]["kind"] for use in uses] == ["parameter"] * 3
    assert [graph.edges[use, head]["kind"] for use in uses] == ["block"] * 3
    assert graph.nodes["head.weight"] == {"kind": "parameter", "label": "head.weight", "shape": (10, 32)}
    assert graph.nodes[head]["approximation"] == "kron" and graph.nodes[head]["factors"] == {
        "A": [1, 33, 33], "G": [1, 10, 10]
    }  # fmt: skip
    assert of_kind(graph, "block") == [registration.parameters for registration in program.registrations]


def test_generic_parameters_and_what_reads_them_lead_to_their_block_and_unused_ones_nowhere(program: Program) -> None:
    graph = Report(program).to_networkx()
    block = ("temperature",)
    assert list(graph.successors("temperature")) == [block, "operation exp"] and graph.nodes[block]["generic"]
    assert graph.edges["operation exp", block]["kind"] == "block"
    graph = Report(program.but(registrations=program.registrations[:-1], unused=("temperature",))).to_networkx()
    assert graph.degree("temperature") == 0


def test_data_flows_between_uses_and_through_the_operations_where_it_meets(program: Program) -> None:
    graph = Report(program).to_networkx()
    data = nx.subgraph_view(graph, filter_edge=lambda *edge: graph.edges[edge]["kind"] == "data")
    assert nx.has_path(data, "use conv2d", "use conv2d_2") and not nx.has_path(data, "use linear", "use linear_1")
    (last,) = [node for node in of_kind(graph, "operation") if not list(data.successors(node))]
    assert {"use linear", "use linear_1", "use linear_2"} <= nx.ancestors(data, last)


def test_pieces_stand_between_a_parameter_and_their_uses() -> None:
    graph = kfac_fx.compile(Slices(), (torch.randn(5, 3, 4),), loss="normal").report.to_networkx()
    first, rest = "linear.weight[0:4]", "linear.weight[4:6]"
    assert list(graph.successors("linear.weight")) == [first, rest] and graph.nodes[first]["shape"] == (4, 4)
    whole, part = graph.successors(first)
    assert list(graph.successors(rest)) == [whole] and graph.has_edge(part, (first, "linear.bias[0:4]"))
