"""The report's registrations as a graph in Graphviz' language.

A box is a registration, a node its use; a dashed arrow leads from a registration to each of its uses, a full one along
the data. Of the operations between uses only those are drawn where data of different origin meets.

The report as one self-contained HTML page: no script, nothing loaded, every text escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from torch import fx

from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Registration, source_line


def dot(registrations: Sequence[Registration], captions: Sequence[str]) -> str:
    """`captions`: what the box of each registration says under its layer's name."""
    lines = ["digraph kfac_fx {", "  rankdir=TB;", '  node [fontname="Helvetica", fontsize=10];']
    drawn: dict[fx.Node, str] = {}
    for number, (registration, caption) in enumerate(zip(registrations, captions, strict=True)):
        label = quote(f"{number}  {registration.layer}\n{caption}")
        style = 'style="filled,rounded", fillcolor="#dbe9f6"' if not registration.generic else "style=dashed"
        lines.append(f"  r{number} [shape=box, {style}, label={label}];")
        for use in registration.uses:
            if use.output not in drawn:  # registrations that were split may share an output
                drawn[use.output] = f"u{len(drawn)}"
                line = source_line(use.output)
                text = f"{use.output.name}\n{line}" if line else use.output.name
                lines.append(f"  {drawn[use.output]} [label={quote(text)}];")
            lines.append(f"  r{number} -> {drawn[use.output]} [style=dashed, arrowhead=none];")
    if drawn:
        lines += flow(next(iter(drawn)).graph, registrations, drawn)
    return "\n".join([*lines, "}"]) + "\n"


def flow(graph: fx.Graph, registrations: Sequence[Registration], drawn: dict[fx.Node, str]) -> list[str]:
    """The arrows along the data, and the nodes where data meets."""
    uses = {use.output: use.nodes for registration in registrations for use in registration.uses}
    inside = {node for nodes in uses.values() for node in nodes}
    origin: dict[fx.Node, str | None] = {}  # of the data in a node: the last thing drawn on its way
    nodes: list[str] = []
    arrows: list[str] = []
    for node in graph.nodes:
        entered = sorted(uses.get(node, [node]))
        operands = [n for one in entered for n in one.all_input_nodes if n not in uses.get(node, ())]
        origins = list(dict.fromkeys(found for n in operands if (found := origin.get(n)) is not None))
        if node in drawn:
            name = drawn[node]
        elif len(origins) > 1 and node not in inside:
            name = f"n{len(nodes)}"
            nodes.append(f"  {name} [shape=plaintext, label={quote(op_name(node))}];")
        else:
            origin[node] = origins[0] if origins else None
            continue
        arrows += [f"  {found} -> {name};" for found in origins]
        origin[node] = name
    return nodes + arrows


def quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# --- html -------------------------------------------------------------------------------------------------------------


REGISTRATION_COLUMNS = ("#", "layer", "parameters", "uses", "Fisher block", "factors", "elements", "memory")
PASS_COLUMNS = ("pass", "nodes", "found", "seconds")
NUMBERS = {"#", "uses", "elements", "memory", "nodes", "seconds"}

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
    """`share`: elements by kind, the bar under the headline; the other arguments are rows of text."""
    numbered = [(str(number), *cells) for number, cells in enumerate(registrations)]
    body = [f"<h1>{escape(headline)}</h1>", bar(share), table(REGISTRATION_COLUMNS, numbered)]
    for title, lines in sections:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        body.append(f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>")
    body.append(f"<h2>passes</h2>\n{table(PASS_COLUMNS, passes)}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(headline)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def bar(share: Mapping[str, int]) -> str:
    present = {kind: count for kind, count in share.items() if count}
    parts = "".join(f'<div style="flex:{count};background:var(--{kind})"></div>' for kind, count in present.items())
    key = "".join(f'<span><i style="background:var(--{kind})"></i>{kind} {n:,}</span>' for kind, n in present.items())
    return f'<div class="bar">{parts}</div>\n<p class="key">{key}</p>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th class="{kind(column)}">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind(c)}">{escape(cell)}</td>' for c, cell in zip(columns, cells, strict=True))
        + "</tr>\n"
        for cells in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>'


def kind(column: str) -> str:
    """The class of a column's cells."""
    return "number" if column in NUMBERS else {"parameters": "name", "found": "found"}.get(column, "text")
