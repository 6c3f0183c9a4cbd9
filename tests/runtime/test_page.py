"""The report as a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

import kfac_fx
from kfac_fx.compiled.report import POLICY, SCRIPT, Lanes, Report, script_source
from kfac_fx.passes.ir import Note, PassRecord, Program
from tests.compiler.toy import Toy, before
from tests.runtime.toy_reports import small_program


@pytest.fixture
def program() -> Program:
    return small_program()


class Page(HTMLParser):
    """Collects what a browser would load or run, and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.policy: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
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
    assert page.tags.isdisjoint({"link", "img", "iframe"})
    assert page.text.count(evil) == 9 and page.scripts == [SCRIPT]
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


def test_the_policy_of_the_page_admits_its_own_script_only(program: Program) -> None:
    page = Page()
    page.feed(Report(program).to_html())
    assert page.policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src {script_source(SCRIPT)}"
    assert script_source("alert(1)") == "'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='"  # openssl's


def test_a_notebook_shows_the_table_without_a_script(program: Program) -> None:
    page = Page()
    page.feed(Report(program)._repr_html_())
    assert page.open == [] and page.tags == {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert "kfac_fx registered 1,547 of 1,547" in page.text and "16 of (A 10 x 10, G 1 x 1)" in page.text


def test_a_notebook_shows_equal_layers_in_one_row() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(150)), nn.Linear(3, 2))
    table = kfac_fx.compile(model, (torch.randn(2, 3),), loss="normal").report._repr_html_()
    assert table.count("<tr>") == 1 + 2 and "0..149.{weight, bias} (150 x)" in table


# --- the drawing ------------------------------------------------------------------------------------------------------


def flow(*edges: tuple[str, str]) -> Lanes:
    lanes = Lanes(nx.DiGraph(edges))
    lanes.place(list(nx.lexicographical_topological_sort(lanes.graph)))
    return lanes


def test_a_chain_stays_in_one_lane() -> None:
    assert flow(("a", "b"), ("b", "c")).lane == {"a": 0, "b": 0, "c": 0}


def test_data_that_is_read_later_keeps_its_lane() -> None:
    """a is read by b and, behind it, by c: b moves aside, and c goes on in the lane of a."""
    lanes = flow(("a", "b"), ("a", "c"), ("b", "c"))
    assert lanes.lane == {"a": 0, "b": 1, "c": 0} and lanes.row == {"a": 0, "b": 1, "c": 2}


def test_a_lane_is_free_again_where_its_data_is_read_last() -> None:
    lanes = flow(("a", "b"), ("a", "c"), ("b", "c"), ("c", "d"), ("c", "e"), ("d", "e"))
    assert lanes.lane == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}


def test_no_line_runs_through_a_node_of_other_data() -> None:
    edges = [(f"n{i:02}", f"n{j:02}") for i in range(12) for j in range(i + 1, 12) if (i * j) % 3 == 1 or j == i + 1]
    lanes = flow(*edges)
    for source, target in edges:
        for node, row in lanes.row.items():
            between = lanes.row[source] < row < lanes.row[target]
            assert not (between and lanes.lane[node] == lanes.lane[source]), (source, node, target)


def test_nodes_and_rows_carry_the_numbers_of_their_blocks(program: Program) -> None:
    html = Report(program).to_html()
    assert html.count('<g class="use" data-blocks="4"') == 3  # the head is used three times
    assert html.count(' data-blocks="4"') == 4
    assert "hsl(190 60% 52%)" in html  # 4 times the golden angle


def test_a_use_in_the_drawing_says_its_line() -> None:
    program = before("check", Toy(lambda x, w: x @ w, w=(4, 3)), torch.randn(5, 4))
    assert re.search(r'class="use" [^>]*data-where="matmul at toy\.py:\d+"', Report(program).to_html())


@pytest.mark.parametrize(("element", "cells"), [("th", 8 + 4), ("td", 6 * 8 + 3 * 4)])
def test_every_cell_has_its_column(program: Program, element: str, cells: int) -> None:
    assert Report(program).to_html().count(f"<{element} ") == cells


# --- in a browser -----------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CLICKS = """
const result = {};
const first = selector => document.querySelector(selector);
search.value = "HEAD kron"; search.dispatchEvent(new Event("input"));
result.found = rows.filter(row => row.offsetHeight > 0).map(row => row.cells[2].textContent);
result.count = count.textContent;
search.value = ""; search.dispatchEvent(new Event("input"));
const memory = table.tHead.rows[0].cells[7].firstChild;
memory.click(); memory.click();
result.largest = body.rows[0].cells[2].textContent;
first('#graph g[data-blocks="4"]').dispatchEvent(new MouseEvent("click", { bubbles: true }));
result.rows = rows.filter(row => row.classList.contains("on")).map(row => row.cells[0].textContent);
rows[0].click();
result.uses = [...document.querySelectorAll("#graph g.on text")].map(text => text.textContent);
result.where = document.getElementById("where").textContent;
result.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
document.body.textContent = JSON.stringify(result);
"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_searches_sorts_and_connects_rows_with_uses(program: Program, tmp_path: Path, width: int) -> None:
    html = Report(program).to_html()
    assert html.count(POLICY) == 1 and html.count("</body>") == 1
    policy = POLICY.replace("script-src ", f"script-src {script_source(CLICKS)} ")
    html = html.replace(POLICY, policy).replace("</body>", f"<script>{CLICKS}</script></body>")
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    command = [
        str(BROWSER),
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        "--dump-dom",
        (tmp_path / "report.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"<body>({.*})", done.stdout)
    assert found is not None, done.stdout[-2000:]
    assert json.loads(unescape(found[1])) == {
        "found": ["head.{weight, bias}"],
        "count": "1 of 6 blocks",
        "largest": "norm.{weight, bias}",
        "rows": ["4"],
        "uses": ["0 conv2d  stem.weight, stem.bias"],
        "where": "conv2d",
        "wide": False,
    }
