"""The page of what K-FAC costs, from the committed results: `python -m benchmarks --write-docs`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.step_time import rows_of

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs" / "cost.md"
INTRODUCTION = """# What it costs

Measured on a machine with two cores, one thread, without a GPU (torch {torch}, python {python}). This page is made by
`python -m benchmarks --write-docs` from `benchmarks/results`; the commands that measured are named with their tables.
"""
STEP_TIME = """\
## A step

CPU time of a step over that of the same model's SGD step, medians over interleaved rounds in one process, on the same
batch in float32, with untuned settings: what a step costs, and not how far it gets. *n, m* is statistics at every n-th
step, inverses at every m-th. "Sampled" statistics have a forward and a backward pass of their own, on all of the batch
or a quarter of it; "empirical" ones ride on the training backward. MB: tensors alive at the peak of a step with
everything due, the model's and the batch's among them. soap has statistics at every step, and m is its bases'; singd
has no inverses; curvlinops takes no averages over batches. The last two leave batch normalization's parameters to SGD.

The floor is the cost model's, with statistics that ride: 6 n i o flops of a layer's own, n (i² + o²) of its statistics
(twice that as plain products), 2 i o (i + o) of a preconditioned step, i³ + o³ of an inverse. Convolutions may be below
it: patches overlap, and their second moment is summed over the lines of the image instead.

    pip install "kfac_fx[peers]"
    {command}

Peers: {peers}.
"""
STEP_PARTS = """\
### Its parts

CPU milliseconds of every part of a step with empirical statistics and inverses, without those of parts inside of it;
the floor is what the part's flops take at the rate of the SGD step's. On a CPU without a routine for symmetric products
5/8 of the plain products are computed, so the statistics' own floor is 5/4 of what is named here. What has no floor
moves memory, and on the autoencoder takes longer than what asdl is ahead by.

    {command}
"""
HOST_TIME = """\
### Its host

CPU milliseconds of a step of many small parameters, and of `optimizer.step()` alone, which is Python and the dispatch
of operations more than their work. Parameters of equal matrices are stacked, so that a plain step has as many
operations as there are shapes, beside what reads and writes the parameters; recording has some for every layer.

    {command}
"""
COMPILE = """\
## Compiling

CPU seconds of one thread, of models with their real depth. The capture is torch.export's; likeness and proof run the
first batch through model and graph.

    {command}
"""
SCALE = """\
Graphs that torch.fx captured, in CPU seconds by pass. Everything grows with the graph and no faster; the emitted module
is what torch.fx prints and Python compiles.

    {command}
"""
PROOF = """\
## The proof of the first batch

MB of tensors alive at the peak, beside the model's own and the batch's, and what a process grew by. The proof keeps the
matrices of one registration at a time; `verify=False` leaves it out.

    {command}
"""
FILES = ("step_time", "step_parts", "host_time", "compile_time", "scale", "proof_memory")
Row = dict[str, Any]


def write() -> None:
    DOCS.write_text(page(), encoding="utf-8")


def page() -> str:
    step, parts, host, compiling, scale, proof = (json.loads((RESULTS / f"{name}.json").read_text()) for name in FILES)
    sections = [
        INTRODUCTION.format(**step),
        *step_time(step),
        *step_parts(parts),
        *host_time(host),
        COMPILE.format(**compiling),
        table(compiling["CPU seconds"], "{:.2f}"),
        SCALE.format(**scale),
        table(by_pass(scale["results"]), "{:.2f}"),
        PROOF.format(**proof),
        table(proof["MB"], "{:,.0f}"),
    ]
    return "\n".join(sections)


def step_time(record: dict[str, Any]) -> Iterable[str]:
    peers = ", ".join(f"{name} {version}" for name, version in record["peers"].items()) or "none was installed"
    yield STEP_TIME.format(**{**record, "peers": peers})
    for model, found in record["results"].items():
        yield f"{model}, whose SGD step takes {found['milliseconds']['sgd']['plain']:.0f} ms:\n"
        yield table(rows_of(found), "{:.2f}")


def step_parts(record: dict[str, Any]) -> Iterable[str]:
    yield STEP_PARTS.format(**record)
    for model, found in record["results"].items():
        yield f"{model}, whose SGD step takes {found['sgd milliseconds']:.0f} ms:\n"
        yield table(found["parts"], "{:.2f}")


def host_time(record: dict[str, Any]) -> Iterable[str]:
    yield HOST_TIME.format(**record)
    for model, found in record["results"].items():
        yield f"{model}, of {found['parameters']} parameters:\n"
        yield table(found["milliseconds"], "{:.1f}")


def by_pass(results: Sequence[Row]) -> list[Row]:
    """A column a graph, a row a pass."""
    names = [name for name in results[0] if name != "nodes"]
    return [{"nodes": name, **{f"{one['nodes']:,.0f}": one[name] for one in results}} for name in names]


def table(rows: Sequence[Row], form: str) -> str:
    """Whole numbers and words as they are, others in `form`."""
    cells = [[form.format(one) if isinstance(one, float) else str(one) for one in row.values()] for row in rows]
    lines = [list(rows[0]), ["---", *["--:"] * (len(rows[0]) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
