"""The report in other formats: a graph of networkx, the same in Graphviz' language, and an HTML page.

The graph leads from parameters, or pieces of them, to uses and on to Fisher blocks:

    "stem.weight" --parameter--> "use conv2d" --block--> ("stem.weight", "stem.bias")

Uses are also connected along the data of the model. Operations between uses are nodes only if data of different origin
meets there.

The page is self-contained: no script, nothing loaded, every text escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from torch import fx

from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Program, source_line
from kfac_fx.report.rows import Row

if TYPE_CHECKING:
    import networkx

# --- graphs ---------------------------------------------------------------------------------------------------------


def block_graph(program: Program, rows: Sequence[Row]) -> networkx.DiGraph:
    """The graph of `Report.to_networkx`."""
    import networkx

    graph = networkx.DiGraph()
    for name, parameter in program.parameters.items():
        graph.add_node(name, kind="parameter", label=name, shape=tuple(parameter.shape))
    for number, (registration, row) in enumerate(zip(program.registrations, rows, strict=True)):
        block, label = registration.parameters, f"{number}  {row.layer}\n{row.names}\n{row.block}: {row.factors_text}"
        graph.add_node(block, kind="block", label=label, generic=row.generic, **row.to_dict())
        for piece in registration.pieces:
            graph.add_node(piece.name, kind="piece", label=piece.name, shape=program.shapes[piece.name])
            graph.add_edge(piece.parameter, piece.name, kind="piece")
        for use in registration.uses:
            line, key = source_line(use.output), f"use {use.output.name}"  # registrations that were split share it
            graph.add_node(key, kind="use", label="\n".join(filter(None, (use.output.name, line))), line=line)
            graph.add_edges_from([(name, key) for name in sorted(use.parameter_set)], kind="parameter")
            graph.add_edge(key, block, kind="block")
        if registration.generic:
            graph.add_edges_from([(name, block) for name in block], kind="block")
    add_data(program, graph)
    return graph


def add_data(program: Program, graph: networkx.DiGraph) -> None:
    """Add the edges along the data, and the operations where data meets."""
    uses = {use.output: use.nodes for registration in program.registrations for use in registration.uses}
    inside = {node for nodes in uses.values() for node in nodes}
    origin: dict[fx.Node, str | None] = {}  # of the data in a node: the last node of `graph` on its way
    for node in program.graph.nodes:
        entered = sorted(uses.get(node, [node]))
        operands = [
            operand for inner in entered for operand in inner.all_input_nodes if operand not in uses.get(node, ())
        ]
        origins = list(dict.fromkeys(key for operand in operands if (key := origin.get(operand)) is not None))
        if node in uses:
            key = f"use {node.name}"
        elif len(origins) > 1 and node not in inside:
            key = f"operation {node.name}"
            graph.add_node(key, kind="operation", label=op_name(node))
        else:
            origin[node] = origins[0] if origins else None
            continue
        graph.add_edges_from([(source, key) for source in origins], kind="data")
        origin[node] = key


STYLES = {  # of the nodes that are drawn: the letter of their names, and their attributes
    "block": ("r", 'shape=box, style="filled,rounded", fillcolor="#dbe9f6", '),
    "use": ("u", ""),
    "operation": ("n", "shape=plaintext, "),
}
GENERIC_STYLE = "shape=box, style=dashed, "


def dot(graph: networkx.DiGraph) -> str:
    """The blocks, uses and operations of a `block_graph` in Graphviz' language.

    A box is a block. A dashed line leads from a block to each of its uses, an arrow along the data.
    """
    names: dict[Any, str] = {}
    lines = ["digraph kfac_fx {", "  rankdir=TB;", '  node [fontname="Helvetica", fontsize=10];']
    for kind in STYLES:
        for number, key in enumerate(key for key, data in graph.nodes(data=True) if data["kind"] == kind):
            names[key] = f"{STYLES[kind][0]}{number}"
    for key, name in names.items():
        data = graph.nodes[key]
        style = GENERIC_STYLE if data.get("generic") else STYLES[data["kind"]][1]
        lines.append(f"  {name} [{style}label={quote(data['label'])}];")
    for target, name in names.items():
        for source in (source for source in graph.predecessors(target) if source in names):
            block = graph.edges[source, target]["kind"] == "block"
            lines.append(
                f"  {name} -> {names[source]} [style=dashed, arrowhead=none];"
                if block
                else f"  {names[source]} -> {name};"
            )
    return "\n".join([*lines, "}"]) + "\n"


def quote(text: str) -> str:
    """The text as a string of Graphviz."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# --- the page -------------------------------------------------------------------------------------------------------

REGISTRATION_COLUMNS = ("#", "layer", "parameters", "uses", "Fisher block", "factors", "elements", "memory")
PASS_COLUMNS = ("pass", "nodes", "found", "seconds")
NUMERIC_COLUMNS = {"#", "uses", "elements", "memory", "nodes", "seconds"}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --paper: #fdfdfc; --line: #dfe3e8; --band: #f3f5f7;
  --structured: #2f6db3; --generic: #d9822b; --unused: #b8bfc8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #9aa5b1; --paper: #14181d; --line: #2c343d;
  --band: #1b2128; --structured: #5b9be0; --generic: #e89b4c; --unused: #4a545f; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1.5rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .75rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; white-space: nowrap; } tbody tr:hover { background: var(--band); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { white-space: nowrap; } .name { min-width: 14rem; overflow-wrap: anywhere; } .found { min-width: 14rem; }
td.name { font-family: ui-monospace, monospace; font-size: .9em; }
.bar { display: flex; height: .6rem; border-radius: .3rem; overflow: hidden; background: var(--line); }
.key { color: var(--soft); margin: .4rem 0 0; } .key span { margin-right: 1.5rem; white-space: nowrap; }
.key i { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .4rem; }
ul { margin: 0; padding-left: 1.2rem; } li { overflow-wrap: anywhere; }
"""


def page(
    headline: str,
    share: Mapping[str, int],
    registrations: Sequence[Sequence[str]],
    sections: Sequence[tuple[str, Sequence[str]]],
    passes: Sequence[Sequence[str]],
) -> str:
    """The page as text.

    Args:
        share: the number of elements by kind, for the bar under the headline.
        registrations, passes: the cells of every row of the two tables.
        sections: (title, lines).
    """
    numbered = [(str(number), *cells) for number, cells in enumerate(registrations)]
    body = [f"<h1>{escape(headline)}</h1>", bar(share), html_table(REGISTRATION_COLUMNS, numbered)]
    for title, lines in sections:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        body.append(f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>")
    body.append(f"<h2>passes</h2>\n{html_table(PASS_COLUMNS, passes)}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(headline)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def bar(share: Mapping[str, int]) -> str:
    """A bar with one part for every kind, and its key."""
    present = {kind: count for kind, count in share.items() if count}
    parts = "".join(f'<div style="flex:{count};background:var(--{kind})"></div>' for kind, count in present.items())
    key = "".join(f'<span><i style="background:var(--{kind})"></i>{kind} {n:,}</span>' for kind, n in present.items())
    return f'<div class="bar">{parts}</div>\n<p class="key">{key}</p>'


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f'<th class="{cell_class(column)}">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{cell_class(c)}">{escape(cell)}</td>' for c, cell in zip(columns, cells, strict=True))
        + "</tr>\n"
        for cells in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>'


def cell_class(column: str) -> str:
    """The CSS class of the cells of a column."""
    return "number" if column in NUMERIC_COLUMNS else {"parameters": "name", "found": "found"}.get(column, "text")
