"""The report as one HTML page: a table to search and sort, and the graph of the uses beside it.

The page loads nothing, and every text is escaped. Its policy lets the browser run the script of this module only, so a
name in a model cannot become code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx

BLOCK_COLUMNS = ("#", "layer", "parameters", "uses", "Fisher block", "factors", "elements", "memory")
PASS_COLUMNS = ("pass", "nodes", "result", "seconds")
NUMERIC_COLUMNS = {"#", "uses", "elements", "memory", "nodes", "seconds"}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --paper: #fdfdfc; --line: #dfe3e8; --band: #f3f5f7;
  --on: #fff1c9; --structured: #2f6db3; --generic: #b9640f; --unused: #b8bfc8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #9aa5b1; --paper: #14181d; --line: #2c343d;
  --band: #1b2128; --on: #4a3d12; --structured: #5b9be0; --generic: #e89b4c; --unused: #4a545f; } }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1.5rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .75rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--structured); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
#blocks tbody tr { cursor: pointer; } #blocks tr[hidden] { display: none; }
tbody tr:hover { background: var(--band); } tbody tr.on { background: var(--on); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { white-space: nowrap; } .name { min-width: 12rem; overflow-wrap: anywhere; }
td.name { font-family: ui-monospace, monospace; font-size: .9em; }
.bar { display: flex; height: .6rem; border-radius: .3rem; overflow: hidden; background: var(--line); }
.key, .count, .where { color: var(--soft); margin: .4rem 0; } .key span { margin-right: 1.5rem; white-space: nowrap; }
.key i { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .4rem; }
input { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line); border-radius: .3rem;
  padding: .35rem .6rem; width: min(26rem, 100%); box-sizing: border-box; margin-top: 1rem; }
#graph { max-height: 75vh; overflow: auto; border: 1px solid var(--line); border-radius: .3rem; }
svg { display: block; } svg text { fill: var(--ink); font: 12px ui-monospace, monospace; }
svg path { fill: none; stroke: var(--unused); stroke-width: 1.5; } svg g { cursor: pointer; }
svg g.operation text { fill: var(--soft); } svg g rect { fill: transparent; } svg g.on rect { fill: var(--on); }
svg g:focus-visible { outline: none; } svg g:focus-visible rect { stroke: var(--structured); }
ul { margin: 0; padding-left: 1.2rem; } li { overflow-wrap: anywhere; }
@media (max-width: 46rem) { body { padding: 0 .8rem; margin: 1rem auto; }
  #blocks, #blocks thead, #blocks tbody, #blocks tr, #blocks td { display: block; }
  #blocks thead tr { display: flex; flex-wrap: wrap; gap: 0 1rem; } #blocks th { border: 0; padding: 0; min-width: 0; }
  #blocks thead tr::before { content: "sort by"; color: var(--soft); }
  #blocks tbody tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  #blocks td { border: 0; padding: 0 0 0 7rem; text-align: left; white-space: normal; min-height: 1.5em; }
  #blocks td::before { content: attr(data-column); float: left; margin-left: -7rem; color: var(--soft);
    font: 15px/1.5 system-ui, sans-serif; } }
"""

# Rows and nodes carry the numbers of their blocks in data-blocks. A click on either selects both.
SCRIPT = """
"use strict";
const table = document.getElementById("blocks"), body = table.tBodies[0], rows = [...body.rows];
const nodes = [...document.querySelectorAll("#graph g")], where = document.getElementById("where");
const numbers = element => element.dataset.blocks ? element.dataset.blocks.split(" ") : [];
const search = document.getElementById("search"), count = document.getElementById("count");
function filter() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  const shown = rows.filter(row => !row.hidden).length;
  count.textContent = words.length ? `${shown} of ${rows.length} blocks` : "";
}
search.addEventListener("input", filter);
[...table.tHead.rows[0].cells].forEach((head, column) => head.firstChild.addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const numeric = head.classList.contains("number");
  const order = (a, b) => numeric ? key(a) - key(b) : key(a).localeCompare(key(b), undefined, { numeric: true });
  body.append(...rows.slice().sort((a, b) => up ? order(a, b) : order(b, a)));
}));
function select(element, others) {
  const chosen = numbers(element);
  for (const each of [...rows, ...nodes])
    each.classList.toggle("on", each === element || numbers(each).some(number => chosen.includes(number)));
  const selected = others.filter(each => each.classList.contains("on"));
  if (selected.length) selected[0].scrollIntoView({ block: "nearest", inline: "nearest" });
  const uses = nodes.filter(node => node.classList.contains("on"));
  where.textContent = (element.dataset.where ? [element] : uses).map(node => node.dataset.where).join("; ");
}
for (const [elements, others] of [[rows, nodes], [nodes, rows]])
  for (const element of elements) {
    element.addEventListener("click", () => select(element, others));
    element.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(element, others); }
    });
  }
"""


def script_source(script: str) -> str:
    """The entry of a content security policy that lets a browser run this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src {script_source(SCRIPT)}"


@dataclass(frozen=True)
class TableCell:
    """A cell of a table. sort: the number that it is sorted by, if its text is none."""

    text: str
    sort: float | None = None


@dataclass(frozen=True)
class Contents:
    """The data of the page.

    Attributes:
        headline: the title.
        share: the number of elements by kind, for the bar under the headline.
        blocks, passes: the cells of every row of the two tables, without the number of the row.
        sections: (title, lines).
        graph: of `Report.to_networkx`.
    """

    headline: str
    share: Mapping[str, int]
    blocks: Sequence[Sequence[TableCell]]
    passes: Sequence[Sequence[TableCell]]
    sections: Sequence[tuple[str, Sequence[str]]]
    graph: networkx.DiGraph


def page(contents: Contents) -> str:
    """The page as text."""
    headline = escape(contents.headline)
    body = [
        f"<h1>{headline}</h1>",
        bar(contents.share),
        '<input id="search" type="search" placeholder="filter by layer, parameter or block" '
        'aria-label="filter the blocks">\n<p class="count" id="count" aria-live="polite"></p>',
        block_table(contents.blocks),
        '<h2>graph</h2>\n<p class="where" id="where" aria-live="polite">Select a row or a node.</p>\n'
        f'<div id="graph">{drawing(contents.graph)}</div>',
        *(section(title, lines) for title, lines in contents.sections),
        f"<h2>passes</h2>\n{html_table(PASS_COLUMNS, contents.passes)}",
        f"<script>{SCRIPT}</script>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{headline}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def fragment(contents: Contents) -> str:
    """The headline, the bar and the table of blocks, for a notebook: no script, and no style of other parts."""
    colors = "--structured:#2f6db3;--generic:#b9640f;--unused:#b8bfc8"
    return f'<div style="{colors}"><p>{escape(contents.headline)}</p>{block_table(contents.blocks, linked=False)}</div>'


# --- parts ------------------------------------------------------------------------------------------------------------


def section(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>"


def bar(share: Mapping[str, int]) -> str:
    """A bar with one part for every kind, and its key."""
    present = {kind: count for kind, count in share.items() if count}
    parts = "".join(f'<div style="flex:{count};background:var(--{kind})"></div>' for kind, count in present.items())
    key = "".join(f'<span><i style="background:var(--{kind})"></i>{kind} {n:,}</span>' for kind, n in present.items())
    return f'<div class="bar">{parts}</div>\n<p class="key">{key}</p>'


def block_table(blocks: Sequence[Sequence[TableCell]], linked: bool = True) -> str:
    """The table of blocks. linked: with what the script needs to sort it and to connect it with the graph."""
    numbered = [(TableCell(str(number)), *cells) for number, cells in enumerate(blocks)]
    if not linked:
        return html_table(BLOCK_COLUMNS, numbered)
    attributes = [f' data-blocks="{number}" tabindex="0"' for number in range(len(blocks))]
    return html_table(BLOCK_COLUMNS, numbered, attributes)


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[TableCell]], attributes: Sequence[str] | None = None
) -> str:
    """A table. attributes: of every row, if the script sorts the table."""
    label = "<button>{}</button>" if attributes is not None else "{}"
    heads = (f'<th class="{cell_class(column)}">{label.format(escape(column))}</th>' for column in columns)
    lines = (
        f"<tr{mark}>{''.join(map(cell_text, columns, cells))}</tr>\n"
        for mark, cells in zip(attributes or [""] * len(rows), rows, strict=True)
    )
    name = ' id="blocks"' if attributes is not None else ""
    body = f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    return f'<div class="wide"><table{name}>\n{body}\n</table></div>'


def cell_text(column: str, cell: TableCell) -> str:
    sort = "" if cell.sort is None else f' data-sort="{cell.sort}"'
    return f'<td class="{cell_class(column)}" data-column="{escape(column)}"{sort}>{escape(cell.text)}</td>'


def cell_class(column: str) -> str:
    """The CSS class of the cells of a column."""
    return "number" if column in NUMERIC_COLUMNS else {"parameters": "name", "result": "name"}.get(column, "text")


# --- the drawing of the graph -----------------------------------------------------------------------------------------

ROW, LANE, MARGIN, CHARACTER = 22, 14, 14, 7.4  # pixels
HUE = 137.508  # degrees between the colors of neighboring blocks: the golden angle keeps them apart


@dataclass
class Lanes:
    """The columns of a drawing with one row a node, as of a history of commits.

    The lines of a node go down its lane as far as the last node that reads it, and no other node is in their way. A
    node goes on in the lane of its first predecessor if that is free, or else in the first lane that is.
    """

    graph: networkx.DiGraph
    free: list[int] = field(default_factory=list)  # of every lane, the first row that is free again
    lane: dict[Any, int] = field(default_factory=dict)
    row: dict[Any, int] = field(default_factory=dict)

    def place(self, order: Sequence[Any]) -> None:
        self.row = {node: number for number, node in enumerate(order)}
        for node, row in self.row.items():
            before = sorted(self.graph.predecessors(node), key=self.row.__getitem__)
            wanted = [self.lane[source] for source in before] + list(range(len(self.free)))
            lane = next((lane for lane in wanted if self.free[lane] <= row), len(self.free))
            readers = [self.row[reader] for reader in self.graph.successors(node)]
            self.lane[node] = lane
            self.free[lane : lane + 1] = [max(readers, default=row + 1)]

    def point(self, node: Any) -> tuple[int, int]:
        return MARGIN + LANE * self.lane[node], MARGIN + ROW * self.row[node]


def drawing(graph: networkx.DiGraph) -> str:
    """The uses and the operations between them as SVG, in the order of the data, in the colors of their blocks."""
    import networkx

    numbers = {node: number for number, (node, data) in enumerate(of_kind(graph, "block"))}
    shown = [node for kind in ("use", "operation") for node, _ in of_kind(graph, kind)]
    data = graph.edge_subgraph([edge for edge in graph.edges if graph.edges[edge]["kind"] == "data"])
    flow = networkx.DiGraph(data)
    flow.add_nodes_from(shown)
    position = {node: number for number, node in enumerate(graph)}
    order = list(networkx.lexicographical_topological_sort(flow, key=position.__getitem__))
    lanes = Lanes(flow)
    lanes.place(order)
    left = 2 * MARGIN + LANE * max(1, len(lanes.free))
    labels = {node: label(graph, node, numbers) for node in order}
    width = left + CHARACTER * max((len(text) for text in labels.values()), default=0) + MARGIN
    edges = "".join(f'<path d="{curve(*lanes.point(a), *lanes.point(b))}"/>' for a, b in flow.edges)
    groups = "".join(node_text(graph, node, numbers, lanes.point(node), left, width, labels[node]) for node in order)
    height = 2 * MARGIN + ROW * max(0, len(order) - 1)
    return f'<svg width="{width:.0f}" height="{height}" role="group" aria-label="uses">{edges}{groups}</svg>'


def of_kind(graph: networkx.DiGraph, kind: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    return ((node, data) for node, data in graph.nodes(data=True) if data["kind"] == kind)


def blocks_of(graph: networkx.DiGraph, node: Any, numbers: Mapping[Any, int]) -> list[int]:
    """The numbers of the blocks that a use is in, or whose parameters an operation reads."""
    return [numbers[block] for block in graph.successors(node) if block in numbers]


def label(graph: networkx.DiGraph, node: Any, numbers: Mapping[Any, int]) -> str:
    """`"3 linear  head.weight, head.bias"` for a use, `"exp: 4 generic  scale"` for an operation."""
    data = graph.nodes[node]
    blocks = [block for block in graph.successors(node) if block in numbers]
    parts = "; ".join(f"{numbers[block]} {graph.nodes[block]['layer']}  {', '.join(block)}" for block in blocks)
    if not parts:
        return str(data["label"])
    return parts if data["kind"] == "use" else f"{data['label']}: {parts}"


def node_text(
    graph: networkx.DiGraph,
    node: Any,
    numbers: Mapping[Any, int],
    point: tuple[int, int],
    left: float,
    width: float,
    text: str,
) -> str:
    (x, y), data, blocks = point, graph.nodes[node], blocks_of(graph, node, numbers)
    name = str(data["label"]).splitlines()[0]
    place = f"{name} at {data['line']}" if data.get("line") else name
    color = f"hsl({HUE * blocks[0] % 360:.0f} 60% 52%)" if blocks else "var(--unused)"
    mark = f'<circle cx="{x}" cy="{y}" r="{5 if blocks else 3}" fill="{color}"/>'
    marks = f'class="{data["kind"]}" data-blocks="{" ".join(map(str, blocks))}" data-where="{escape(place)}"'
    return (
        f'<g {marks} tabindex="0">'
        f"<title>{escape(place)}</title>"
        f'<rect x="0" y="{y - ROW // 2}" width="{width:.0f}" height="{ROW}"/>{mark}'
        f'<text x="{left}" y="{y + 4}">{escape(text)}</text></g>'
    )


def curve(x0: int, y0: int, x1: int, y1: int) -> str:
    """A path that goes straight down its lane, and into the other one in the last row."""
    if x0 == x1:
        return f"M{x0} {y0}V{y1}"
    return f"M{x0} {y0}V{y1 - ROW}C{x0} {y1} {x1} {y1 - ROW} {x1} {y1}"
