"""The time and the traffic of K-FAC on many processes, by a model of their machine: `python -m benchmarks.placement`.

Four ways to share the work are computed for the layers of ResNet-50, of GPT-2 small and of a transformer of 7 billion
parameters. The program trains no model: every figure follows from the shapes of the layers and from the arguments.

    owners   kfac_fx: one process owns both factors of a block, longest processing time first. Statistics are reduced
             to the owner, which also multiplies the gradient; one message returns the updates.
    KAISA    kfac-pytorch: processes form groups of w gradient workers. The layer with the largest cost goes to the
             group with the smallest sum of loads, and there to the process with the smallest load, which sends the
             inverses to its group. Every gradient worker multiplies the gradient of its layers. Statistics are
             all-reduced. w = 1 is its MEM-OPT, w = all its COMM-OPT.
    none     statistics are all-reduced, and every process does everything.

A step with everything due takes the largest time of any process for every part; the figures are means over steps.
Statistics and inverses are sent as triangles. Messages of a kind go in one; a message to or from W processes has a
latency of log2(W) hops, and an all-reduce two messages. The training step, whose time and traffic no placement changes,
is in the seconds with its products only. Norms are left out, and checks, which take a few forwards each. Embeddings and
the output layers of the transformers are left out of KAISA, because kfac-pytorch registers none of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import Any

from benchmarks import messages
from benchmarks.cost_docs import table as markdown
from benchmarks.program import console, table
from kfac_fx.compiled.compiled_module import DENSE_LIMIT
from kfac_fx.fisher.placement import loads_of, makespan, round_robin, within_memory
from kfac_fx.passes.matrix import block_width
from kfac_fx.passes.resolve import cuts

OUT = Path(__file__).parent / "results" / "placement.json"
COUNTED = messages.OUT
DOCS = Path(__file__).parents[1] / "docs" / "placement.md"
RANKS = tuple(2**n for n in range(11))
SHOWN = (1, 8, 64, 256, 1024)  # processes, on the page
BYTES = 4  # of a number of the statistics, the gradients and the updates


@dataclass(frozen=True)
class Layer:
    """A matrix [outputs, inputs], with the bias as a column, and the number of its rows of one example."""

    name: str
    outputs: int
    inputs: int
    rows: int
    diagonal: int = 0  # the width of a side whose factor is diagonal, that of a vocabulary

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs

    @property
    def sides(self) -> tuple[int, ...]:
        """The widths of the dense blocks of both factors, as `dense_limit` cuts them."""
        dense = [side for side in (self.inputs, self.outputs) if side != self.diagonal]
        pairs = [(side, cuts(side, DENSE_LIMIT) or side) for side in dense]
        return tuple(block_width(side, blocks) for side, blocks in pairs for _ in range(blocks))

    @property
    def is_table(self) -> bool:
        """Whether this is an embedding or an output layer."""
        return self.name in ("tokens", "places", "head")

    @property
    def cost(self) -> int:
        """Σ n³ over the sides n, the operations of their decompositions up to a constant."""
        return sum(side**3 for side in self.sides)

    @property
    def triangles(self) -> int:
        return sum(side * (side + 1) // 2 for side in self.sides) + self.diagonal

    @property
    def squares(self) -> int:
        """The elements of the factors in memory."""
        return sum(side**2 for side in self.sides) + self.diagonal

    @property
    def state(self) -> int:
        """The elements that the default of kfac_fx keeps: factors and bases, averaged gradients and squares in these,
        the parameters of the last check, and the vector of the gradient."""
        return self.squares + sum(side**2 for side in self.sides) + 4 * self.parameters

    @property
    def product(self) -> int:
        """The operations of a gradient on its way into the eigenbasis and of the step on its way back."""
        dense = {side: block_width(side, cuts(side, DENSE_LIMIT) or side) for side in (self.inputs, self.outputs)}
        return 4 * self.parameters * sum(dense[side] for side in (self.inputs, self.outputs) if side != self.diagonal)


def resnet50() -> list[Layer]:
    """The layers of He et al. 2015, table 1, on images of 224 x 224; the stride is in the 3 x 3 convolution."""
    layers = [Layer("conv1", 64, 7 * 7 * 3, 112**2)]
    width, size = 64, 56
    for stage, (blocks, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name, before = f"layer{stage}.{block}", size
            size = size // 2 if stage > 1 and block == 0 else size
            layers += [
                Layer(f"{name}.conv1", inner, width, before**2),
                Layer(f"{name}.conv2", inner, 9 * inner, size**2),
                Layer(f"{name}.conv3", 4 * inner, inner, size**2),
            ]
            layers += [Layer(f"{name}.downsample", 4 * inner, width, size**2)] if block == 0 else []
            width = 4 * inner
    return [*layers, Layer("fc", 1000, 2048 + 1, 1)]


def gpt2(depth: int = 12, width: int = 768, length: int = 1024) -> list[Layer]:
    shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}  # in widths
    blocks = [
        Layer(f"h.{n}.{name}", outputs * width, inputs * width + 1, length)
        for n in range(depth)
        for name, (outputs, inputs) in shapes.items()
    ]
    return [*blocks, Layer("tokens", width, 50257, length, diagonal=50257), Layer("places", width, 1024, length)]


def transformer7b(depth: int = 32, width: int = 4096, hidden: int = 11008, length: int = 4096) -> list[Layer]:
    """The shapes of Llama 7B (Touvron et al. 2023, table 2)."""
    square = dict.fromkeys(("q", "k", "v", "o"), (width, width))
    shapes = {**square, "gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    layers = [Layer(f"layers.{n}.{name}", *shape, length) for n in range(depth) for name, shape in shapes.items()]
    vocabulary = 32000
    tokens = Layer("tokens", width, vocabulary, length, diagonal=vocabulary)
    return [*layers, tokens, Layer("head", vocabulary, width, length, diagonal=vocabulary)]


MODELS: Mapping[str, tuple[Callable[[], list[Layer]], int]] = {  # with the number of examples of a process
    "ResNet-50": (resnet50, 32),
    "GPT-2 small": (gpt2, 8),
    "transformer 7B": (transformer7b, 1),
}


@dataclass(frozen=True)
class Machine:
    """Effective rates of one process, and the intervals of K-FAC in steps."""

    products: float = 2e14  # operations a second, of matrix products in half precision
    float32: float = 5e13  # operations a second, of those in float32
    decompositions: float = 1e13  # operations a second; an inverse of a side d takes d³
    bandwidth: float = 2.5e10  # bytes a second, in each direction at once
    latency: float = 1e-5  # seconds of a hop
    statistics_every: int = 10
    inverses_every: int = 100

    def message(self, sent: float, ranks: int, number: int = 1) -> float:
        """Seconds of `number` messages, in which the busiest process sends or receives `sent` bytes."""
        return 0.0 if ranks == 1 else sent / self.bandwidth + number * self.latency * log2(ranks)


@dataclass(frozen=True)
class Share:
    """The work of the busiest process in one way to share the work. Bytes are those that it sends or receives."""

    statistics: float  # bytes, when they are due
    decompositions: float  # operations, when they are due
    inverses: float  # bytes, when they are due
    products: float  # operations of every step
    updates: float  # bytes of every step
    memory: float  # bytes of factors and inverses
    messages: tuple[int, int, int] = (1, 0, 1)  # of statistics, inverses and updates


def owned(layers: Sequence[Layer], owners: Sequence[int], ranks: int) -> Share:
    """Every block has one owner, which holds its factors and inverses alone."""
    sums = BYTES * sum(layer.triangles for layer in layers)
    updates = BYTES * sum(layer.parameters for layer in layers)
    held = loads_of([layer.state for layer in layers], owners, ranks)
    return Share(
        statistics=sums * (ranks - 1) / ranks,
        decompositions=makespan([layer.cost for layer in layers], owners, ranks),
        inverses=0,
        products=makespan([layer.product for layer in layers], owners, ranks),
        updates=updates * (ranks - 1) / ranks,
        memory=BYTES * max(held),
    )


def kaisa(costs: Sequence[float], ranks: int, workers: int) -> tuple[int, ...]:
    """The inverse worker of every layer, by the rule of kfac-pytorch for factors that stay together. `workers`, the
    number of gradient workers of a layer, divides `ranks`."""
    groups = ranks // workers  # group n has the processes n, n + groups, n + 2 groups, ...
    loads, of_groups, owners = [0.0] * ranks, [0.0] * groups, [0] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda layer: -costs[layer]):
        group = of_groups.index(min(of_groups))
        owner = min(range(group, ranks, groups), key=lambda rank: loads[rank])
        loads[owner] += costs[layer]
        of_groups[group] += costs[layer]
        owners[layer] = owner
    return tuple(owners)


def kaisa_share(layers: Sequence[Layer], ranks: int, workers: int) -> Share:
    groups = ranks // workers
    owners = kaisa([layer.cost for layer in layers], ranks, workers)
    of_groups = [owner % groups for owner in owners]
    sums = BYTES * sum(layer.triangles for layer in layers)
    updates = BYTES * sum(layer.parameters for layer in layers)
    in_group = BYTES * makespan([layer.triangles for layer in layers], of_groups, groups)
    squares = [layer.squares for layer in layers]
    return Share(
        statistics=2 * sums * (ranks - 1) / ranks,
        decompositions=makespan([layer.cost for layer in layers], owners, ranks),
        inverses=in_group * (workers - 1) / workers,
        products=makespan([layer.product for layer in layers], of_groups, groups),
        updates=updates * (groups - 1) / groups,
        memory=BYTES * (sum(squares) + makespan(squares, of_groups, groups)),  # all processes average all factors
        messages=(2, int(workers > 1), int(groups > 1)),
    )


def everyone(layers: Sequence[Layer], ranks: int) -> Share:
    sums = BYTES * sum(layer.triangles for layer in layers)
    return Share(
        statistics=2 * sums * (ranks - 1) / ranks,
        decompositions=sum(layer.cost for layer in layers),
        inverses=0,
        products=sum(layer.product for layer in layers),
        updates=0,
        memory=BYTES * sum(layer.state for layer in layers),
        messages=(2, 0, 0),
    )


def shares(layers: Sequence[Layer], ranks: int) -> Iterator[tuple[str, Share]]:
    costs, states = [layer.cost for layer in layers], [layer.state for layer in layers]
    of_both = [cost + state for cost, state in zip(costs, states, strict=True)]
    yield "owners", owned(layers, within_memory(of_both, states, ranks), ranks)
    yield "owners, round robin", owned(layers, round_robin(of_both, ranks), ranks)
    registered = [layer for layer in layers if not layer.is_table]
    for name, workers in (("MEM-OPT", 1), ("HYBRID-OPT", max(1, ranks // 2)), ("COMM-OPT", ranks)):
        yield f"KAISA {name}", kaisa_share(registered, ranks, workers)
    yield "none", everyone(layers, ranks)


def seconds(layers: Sequence[Layer], examples: int, share: Share, ranks: int, machine: Machine) -> dict[str, float]:
    """Seconds of a step by part, in the mean over steps."""
    rows = [(examples * layer.rows, layer) for layer in layers]
    training = sum(6 * n * layer.parameters for n, layer in rows)
    sums = sum(n * (layer.inputs**2 + layer.outputs**2) for n, layer in rows)
    of_statistics, of_inverses, of_updates = share.messages
    per_step = {
        "training": training / machine.products,
        "recording": (training + sums) / machine.products / machine.statistics_every,
        "sending statistics": machine.message(share.statistics, ranks, of_statistics) / machine.statistics_every,
        "inverses": share.decompositions / machine.decompositions / machine.inverses_every,
        "sending inverses": machine.message(share.inverses, ranks, of_inverses) / machine.inverses_every,
        "products": share.products / machine.float32,
        "sending updates": machine.message(share.updates, ranks, of_updates),
    }
    return {"step": sum(per_step.values()), **per_step}


def sent(share: Share, machine: Machine) -> float:
    """Bytes a step of the busiest process, without the gradients that data parallelism averages."""
    return share.statistics / machine.statistics_every + share.inverses / machine.inverses_every + share.updates


def run(machine: Machine, ranks: Sequence[int] = RANKS) -> list[dict[str, Any]]:
    rows = []
    for model, (make, examples) in MODELS.items():
        layers = make()
        for number in ranks:
            for name, share in shares(layers, number):
                times = seconds(layers, examples, share, number, machine)
                rows.append(
                    {
                        "model": model,
                        "ranks": number,
                        "placement": name,
                        "seconds": {part: float(f"{time:.4g}") for part, time in times.items()},
                        "bytes": round(sent(share, machine)),
                        "memory": round(share.memory),
                        "makespan": share.decompositions,
                    }
                )
    return rows


# --- the page and the program -----------------------------------------------------------------------------------------

PAGE = """\
# Many processes

A model of a machine, without a run: how long a step of K-FAC takes on 1 to 1,024 processes, by the process that owns a
block. `benchmarks/placement.py` states the model and makes this page from `benchmarks/results`:

    {command}
    python -m benchmarks.placement --write-docs

One process computes {products:g} operations a second in matrix products, {float32:g} in those of K-FAC's step, which
are in float32, and {decompositions:g} in decompositions (d³ for a side d). It sends {bandwidth:g} bytes a second with
{latency:g} seconds a hop. Statistics are recorded every {statistics_every} steps, and inverses computed every
{inverses_every}. A process has 32 images, 8 texts of 1,024 tokens, or 1 text of 4,096.

- *owners*: one process owns a block, by longest processing time first or in turn. `kfac_fx.fisher.placement`
  computes this.
- *KAISA*: the rule of kfac-pytorch, with one gradient worker for a layer (MEM-OPT), half of all processes (HYBRID-OPT)
  or all (COMM-OPT).
- *none*: data parallelism; every process computes every inverse.

*ms* is a step with training, *inverses* the part of it that computes inverses, and *sent* the bytes that the busiest
process sends for K-FAC, without the gradients that data parallelism averages in any case: all in the mean over steps.
*memory* is what K-FAC keeps on the process that has most: with kfac_fx factors, bases, averaged gradients and squares
in these, the parameters of the last check and the vector of the gradient; with KAISA factors and inverses. The momentum
of KAISA's own optimizer and the sums of a batch are not in it.

Owners divide the inverses and, above all, the memory: every other way keeps all factors on every process, and all but
MEM-OPT most inverses, too. They pay with one message of updates at every step. COMM-OPT and data parallelism send none,
and multiply all gradients on every process instead, which takes longer than the message at the rates above. The largest
block bounds how far inverses can be divided: on {many} processes there are more processes than blocks.

By longest processing time first the makespan of decompositions is at most that of KAISA, and a test computes it for all
rows and more. `owners` bound the memory, too, and may lose a little of that. kfac-pytorch can also put A and G of a
layer on two processes, which can lower the makespan further where all processes multiply gradients; these rows keep
both together, as it does by default.
"""


MESSAGES = """\
## Messages

Counted, and not modeled: the messages of one process of 8 and of 64 in a step of a small GPT, with the bytes in units
of P, those of all parameters. Factors take 4.2 P. An all-reduce counts twice. "Of numbers" are messages of less than a
hundredth of P. *memory* is the most that the tensors of a step take at once besides parameters and state.
`benchmarks/messages.py` counts them with torch's fake process group:

    {command}
"""


def page() -> str:
    record = json.loads(OUT.read_text())
    sections = [PAGE.format(command=record["command"], many=f"{max(RANKS):,}", **record["machine"])]
    sections.append(MESSAGES.format(command=json.loads(COUNTED.read_text())["command"]))
    sections.append(markdown([messages.shown(row) for row in json.loads(COUNTED.read_text())["results"]], "{:.2f}"))
    for model in MODELS:
        sections.append(f"## {model}\n")
        shown = [row for row in record["results"] if row["model"] == model and row["ranks"] in SHOWN]
        sections.append(markdown([shown_row(row) for row in shown], "{:.2f}"))
    return "\n".join(sections)


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "processes": f"{row['ranks']:,}",
        "placement": row["placement"],
        "ms": f"{1e3 * row['seconds']['step']:,.1f}",
        "inverses, ms": f"{1e3 * row['seconds']['inverses']:,.2f}",
        "sent, MB": f"{row['bytes'] / 1e6:,.1f}",
        "memory, MB": f"{row['memory'] / 1e6:,.0f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Machine()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--out", type=Path, help=f"write the results there; the page takes them from {OUT.name}")
    parser.add_argument("--write-docs", action="store_true", help="make docs/placement.md of the results")
    chosen = vars(parser.parse_args(arguments))
    ranks, out, docs = chosen.pop("ranks"), chosen.pop("out"), chosen.pop("write_docs")
    if docs:
        DOCS.write_text(page(), encoding="utf-8")
        return
    machine = Machine(**chosen)
    results = run(machine, ranks)
    for model in MODELS:
        console().print(table(model, [shown_row(row) for row in results if row["model"] == model]))
    if out is not None:
        command = f"python -m benchmarks.placement --out benchmarks/results/{out.name}"
        record = {"command": command, "machine": asdict(machine), "results": results}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
