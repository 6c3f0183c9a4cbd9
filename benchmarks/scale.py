"""How the passes grow with the graph: `python -m benchmarks.scale`.

CPU seconds of one thread, after capture, of every pass on a chain of residual blocks with norms, convolutions and one
linear layer that all blocks share. Linear passes take a constant time a node, and 20,000 nodes under five seconds. The
emitted module is printed and compiled by torch.fx and Python, so it has a row of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.program import console, versions
from kfac_fx.passes.ir import Options
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import PIPELINE, run
from kfac_fx.passes.rewrite import rewrite
from kfac_fx.passes.trace import trace_model

OUT = Path(__file__).parent / "results" / "scale.json"
NODES_A_BLOCK = 24


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.mix = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor, shared: nn.Module) -> Tensor:
        y = torch.relu(self.up(self.norm(x)))
        y = 0.5 * self.down(y.reshape(-1, 2).view(x.shape)) + shared(x)
        y = y + self.mix(y.unsqueeze(1)).squeeze(1)
        return x + torch.tanh(y)


class Chain(nn.Module):
    def __init__(self, blocks: int, width: int = 4) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.shared)
        return x


class Nothing(nn.Module):
    """In the place of a tap."""

    def forward(self, output: Tensor, *rest: Any) -> Tensor:
        return output


def measure(nodes: int) -> dict[str, float]:
    """CPU seconds by pass."""
    model = Chain(max(1, nodes // NODES_A_BLOCK))
    seconds: dict[str, float] = {}

    def timed(name: str, function: Any) -> Any:
        start = time.process_time()
        result = function()
        seconds[name] = time.process_time() - start
        return result

    options = Options(loss_given=True)
    program = timed("capture", lambda: trace_model(model, None, options=options, layers=LAYERS)).program
    seconds["nodes"] = len(program.graph.nodes)
    for step in PIPELINE:
        program = timed(step.__name__, partial(run, program, [step]))
    seconds["all passes"] = sum(seconds[step.__name__] for step in PIPELINE)
    timed("emitted module", lambda: rewrite(program, lambda registration, use: Nothing()))
    return seconds


def show(results: Sequence[dict[str, float]], console: Console) -> None:
    table = Table("nodes", *(f"{row['nodes']:,.0f}" for row in results), title="CPU seconds after capture, by pass")
    for name in results[0]:
        if name != "nodes":
            table.add_row(name, *(f"{row[name]:.2f}" for row in results))
    table.add_row("µs a node", *(f"{1e6 * row['all passes'] / row['nodes']:.0f}" for row in results))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[2_500, 5_000, 10_000, 20_000])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="two small graphs; nothing is written")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measure(100)  # imports, and the layers' forms
    if chosen.quick:
        show([measure(nodes) for nodes in (50, 100)], console())
        return
    results = [measure(nodes) for nodes in chosen.nodes]
    show(results, console())
    command = f"python -m benchmarks.scale --nodes {' '.join(map(str, chosen.nodes))}"
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps({"command": command, **versions(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
