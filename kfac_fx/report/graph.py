"""The report as a graph of networkx, and the same in Graphviz' language.

The graph leads from parameters, or pieces of them, to uses and on to Fisher blocks:

    "stem.weight" --parameter--> "use conv2d" --block--> ("stem.weight", "stem.bias")

Uses are also connected along the data of the model. Operations between uses are nodes only if data of different origin
meets there, or if they read a parameter with a generic block, which has no uses; they lead to this block.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Program, source_line
from kfac_fx.report.rows import ReportRow

if TYPE_CHECKING:
    import networkx


def block_graph(program: Program, rows: Sequence[ReportRow]) -> networkx.DiGraph:
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
    generic = {name: block.parameters for block in program.registrations if block.generic for name in block.owners}
    origin: dict[fx.Node, str | None] = {}  # of the data in a node: the last node of `graph` on its way
    for node in program.graph.nodes:
        entered = sorted(uses.get(node, [node]))
        operands = [
            operand for inner in entered for operand in inner.all_input_nodes if operand not in uses.get(node, ())
        ]
        origins = list(dict.fromkeys(key for operand in operands if (key := origin.get(operand)) is not None))
        read = [str(operand.target) for operand in operands if operand.op == "get_attr" and operand.target in generic]
        if node in uses:
            key = f"use {node.name}"
        elif (len(origins) > 1 or read) and node not in inside and node.op != "output":
            key = f"operation {node.name}"
            graph.add_node(key, kind="operation", label=op_name(node), line=source_line(node))
            graph.add_edges_from([(name, key) for name in read], kind="parameter")
            graph.add_edges_from([(key, generic[name]) for name in read], kind="block")
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
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def printable(text: str) -> str:
    """The text with control characters written out, so that a name with escapes changes no terminal."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
