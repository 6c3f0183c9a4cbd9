"""The report's registrations as a graph in Graphviz' language.

A box is a registration, a node its use; a dashed arrow leads from a registration to each of its uses, a full one along
the data. Of the operations between uses only those are drawn where data of different origin meets.
"""

from __future__ import annotations

from collections.abc import Sequence

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
