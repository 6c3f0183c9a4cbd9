"""The report in color, as a page, as a graph of networkx and in Graphviz' language."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import networkx as nx
import pytest
import rich
import torch
from rich.console import Console

import kfac_fx
from kfac_fx.passes.ir import Note, PassRecord, Program
from kfac_fx.report import Report
from tests.runtime.toy_reports import small_program
from tests.zoo.parts import Slices


@pytest.fixture
def program() -> Program:
    return small_program()


def shown_by_rich(report: Report) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system="truecolor")
    console.print(report)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_rich_shows_a_table_in_color_and_plain_text_stays_plain(program: Program) -> None:
    report = Report(program, counters=lambda: {"skipped updates": 2})
    shown = shown_by_rich(report)
    assert "\x1b[" in shown and "\x1b[" not in str(report)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for text in ("kfac_fx registered 1,547", "16 of (A 10 x 10, G 1 x 1)", "generic diagonal", "skipped updates 2"):
        assert text in plain


def test_rich_takes_names_literally(program: Program) -> None:
    program = program.but(dropped=(Note("linear([bold]w[/bold])", "[red]"),))
    assert "linear([bold]w[/bold]): [red]" in re.sub(r"\x1b\[[0-9;]*m", "", shown_by_rich(Report(program)))


def test_rich_print_finds_the_rich_form(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    rich.print(Report(program))
    assert "Fisher block" in capsys.readouterr().out


class Page(HTMLParser):
    """Collects what a browser would load or run, and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_self_contained_and_escapes_everything(program: Program) -> None:
    evil = "<script>alert('&')</script>"
    program = program.but(
        dropped=(Note(evil, evil),),
        unused=(evil,),
        history=(PassRecord(evil, 1, evil, 0.0),),
        registrations=(replace(program.registrations[0], layer=evil, reason=evil), *program.registrations[1:]),
    )
    html = Report(program, counters=lambda: {evil: 1}).to_html()
    page = Page()
    page.feed(html)
    assert page.open == [] and page.loads == []
    assert page.tags.isdisjoint({"script", "link", "img", "iframe"})
    assert page.text.count(evil) == 8
    assert "url(" not in html and "@import" not in html
    assert "prefers-color-scheme: dark" in html


def test_the_page_shows_shares_rows_and_times(program: Program) -> None:
    page = Page()
    page.feed(Report(program).to_html())
    for text in ("structured 1,546", "generic 1", "16 of (A 10 x 10, G 1 x 1)", "temperature: no layer", "0.250"):
        assert text in page.text
    assert "unused 0" not in page.text


def test_the_page_lists_everything(program: Program) -> None:
    program = program.but(unused=tuple(f"layers.{n}.bias" for n in range(200)))
    assert "layers.199.bias" in Report(program).to_html()


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
  r0 -> u0 [style=dashed, arrowhead=none];
  r1 -> u1 [style=dashed, arrowhead=none];
  r1 -> u2 [style=dashed, arrowhead=none];
  r1 -> u3 [style=dashed, arrowhead=none];
  u0 -> u1;
  u0 -> u2;
  u0 -> u3;
  u1 -> n0;
  u2 -> n0;
  n0 -> n1;
  u3 -> n1;
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


def test_generic_parameters_lead_to_their_block_and_unused_ones_nowhere(program: Program) -> None:
    graph = Report(program).to_networkx()
    assert list(graph.successors("temperature")) == [("temperature",)] and graph.nodes[("temperature",)]["generic"]
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
