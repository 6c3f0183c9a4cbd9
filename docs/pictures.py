"""The pictures of docs/registration.md: `python -m docs.pictures` writes docs/images/."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import fx, nn
from torch.nn import functional as F

from kfac_fx.compiled.report import HUE, ROW, Lanes, curve
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import PIPELINE, run
from kfac_fx.passes.trace import trace_model

IMAGES = Path(__file__).parent / "images"
LEFT = 90  # pixels from the nodes to the text
STYLE = (
    "text{font:12px ui-monospace,monospace;fill:#1c2430}path{fill:none;stroke:#9aa5b1;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#e3e8ee}}"
)


class Tied(nn.Module):
    """An autoencoder whose decoder has the transposed weight of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


def programs() -> dict[str, Program]:
    """The program after some passes, by the name of the picture."""
    torch.manual_seed(0)
    options = Options(loss_given=True)
    program = trace_model(Tied(), (torch.randn(5, 4),), options=options, layers=LAYERS).program
    names = [step.__name__ for step in PIPELINE]
    return {
        "captured": program,
        "normalized": run(program, PIPELINE[: names.index("normalize") + 1]),
        "matched": run(program, PIPELINE[: names.index("match") + 1]),
        "registered": run(program, PIPELINE),
    }


def colors(program: Program) -> Mapping[fx.Node, list[int]]:
    """The numbers of the matches, or of the registrations, that every node is in."""
    groups = [registration.uses for registration in program.registrations] or [(use,) for use in program.matches]
    inside: dict[fx.Node, list[int]] = {}
    for number, uses in enumerate(groups):
        for node in (node for use in uses for node in use.nodes):
            inside.setdefault(node, []).append(number)
    return inside


def picture(program: Program) -> str:
    """The graph as SVG: one row an operation, in the order of the computation; dots have the colors of their blocks."""
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    flow = nx.DiGraph()
    flow.add_nodes_from(nodes)
    flow.add_edges_from((operand, node) for node in nodes for operand in node.all_input_nodes)
    lanes, inside = Lanes(flow), colors(program)
    lanes.place(nodes)
    paths = "".join(f'<path d="{curve(*lanes.point(a), *lanes.point(b))}"/>' for a, b in flow.edges)
    rows = "".join(row(node, lanes.point(node), inside.get(node, [])) for node in nodes)
    height = ROW * len(nodes) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" role="img">'
        f"<style>{STYLE}</style>{paths}{rows}</svg>\n"
    )


def row(node: fx.Node, point: tuple[int, int], blocks: list[int]) -> str:
    x, y = point
    dots = "".join(
        f'<circle cx="{x + 9 * place}" cy="{y}" r="5" fill="hsl({HUE * number % 360:.0f} 60% 52%)"/>'
        for place, number in enumerate(blocks)
    )
    dots = dots or f'<circle cx="{x}" cy="{y}" r="3" fill="#9aa5b1"/>'
    return f'{dots}<text x="{LEFT}" y="{y + 4}">{escape(text(node))}</text>'


def text(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: input"
    if node.op == "get_attr":
        return f"{node.target}: parameter"
    operands: list[Any] = [argument if not isinstance(argument, fx.Node) else argument.name for argument in node.args]
    target = str(node.target) if "aten" in str(node.target) else op_name(node)
    return f"{node.name} = {target}({', '.join(map(str, operands))})"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, program in programs().items():
        (IMAGES / f"passes-{name}.svg").write_text(picture(program), encoding="utf-8")


if __name__ == "__main__":
    main()
