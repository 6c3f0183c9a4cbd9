"""The page on cost, made from the committed results by `python -m benchmarks --write-docs`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import device_step, device_training, gpt2_factors, launches, statistics
from benchmarks.step_time import rows_of
from kfac_fx.fisher import bases

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs" / "cost.md"
INTRODUCTION = """# What kfac_fx costs

Sections about a GPU say so in their titles. All other figures were measured on a machine with two cores, on one thread,
without a GPU (torch {torch}, python {python}).
`python -m benchmarks --write-docs` makes this page from `benchmarks/results`. Every table names the command that
measured it.
"""
STEP_TIME = """\
## A step

The tables give the CPU time of a step divided by that of an SGD step of the same model. Figures are medians over
interleaved rounds in one process, on the same batch, in float32. Settings are not tuned: the tables show what a step
costs, and not how far it gets.

- *n, m*: statistics at every n-th step, inverses at every m-th step.
- *sampled*: the statistics have their own forward and backward pass, on the whole batch or on a quarter of it.
- *empirical*: the statistics are recorded in the training backward.
- *MB*: memory of the tensors alive at the peak of a step in which everything is due, including the model and the batch.

soap has statistics at every step, and m is the interval of its bases. singd has no inverses. curvlinops takes no
averages over batches. singd and curvlinops leave the parameters of batch normalization to SGD.

The steps are the usual ones, after a warm-up. Two things make some steps longer, and few of a training. Inverses are
also computed early, after 1, 2, 5, 10, 20, 50, ... steps. The outputs of the recordings 1, 2, 4, 8, ... and of every
1000th are compared with the model's, which takes two forwards more, unless each recording comes with a forward. The
benchmark prints the time of such a comparison.

On the autoencoder a plain step of asdl is the shortest, because asdl multiplies the gradients of every module where
they are. kfac_fx copies them into one vector and back, as momentum, checks and sharded parameters need it. It also
takes more memory at the peak: the sums of a batch are as large as the factors, and stay apart from them until the step
knows that all gradients are finite.

The floor comes from a cost model of empirical statistics: a layer itself takes 6 n i o flops, its statistics
n (i² + o²) (twice that as plain products), a preconditioned step 2 i o (i + o), and an inverse i³ + o³. Convolutions
may be below the floor: patches overlap, and their second moment is summed over the lines of the image instead.

    pip install "kfac_fx[peers]"
    {command}

Peers: {peers}.
"""
DEFAULT_STEP = """\
### A step of the default

The table gives CPU milliseconds of a step of `KFAC(net)` and of AdamW, on the tasks of [the results](results.md), and
their ratio. Both train one network from the same start and take turns of 20 steps in one process. The first 60 steps
are left out, because checks, statistics and new bases are more frequent in them. *of plain steps* is the ratio of
median steps, which have none of these.

A plain step turns the gradient into both bases, and the step back. For a layer of i inputs and o outputs these products
take 4 i o (i + o) flops, where forward and backward of n cases take 6 n i o. So the ratio is largest where layers are
wide compared with the batch, as in the autoencoder. The batch of both equations is always the same, so most of their
steps, the median one among them, minimize the exact quadratic model (`kfac_fx/optim/rules/exact_steps.py`).

    {command}
"""
STEP_PARTS = """\
### Parts of a step

The tables give CPU milliseconds of every part of a step with empirical statistics and inverses. A part does not include
the parts inside it. The floor is the time that the flops of the part take at the rate of the SGD step. A CPU without a
routine for symmetric products computes 5/8 of the plain products, so the true floor of the statistics is 5/4 of the
figure given. Parts without a floor move memory. On the autoencoder they take longer than the whole lead of asdl.

    {command}
"""
HOST_TIME = """\
### Host time

The tables give CPU milliseconds of a step with many small parameters, and of `optimizer.step()` alone. On such models
Python and the dispatch of operations take longer than the operations. Parameters with equal matrices are stacked, so a
plain step has as many operations as there are shapes, plus those that read and write the parameters. Recording has a
few operations for every layer.

    {command}
"""
COMPILE = """\
## Compiling

The table gives CPU seconds on one thread, for models with their real depth. The capture is the time of torch.export.
Likeness compares model and graph on the first batch. The proof compares every registration with autograd.

    {command}
"""
SCALE = """\
The next table gives CPU seconds by pass for graphs that torch.fx captured. Every row grows linearly with the graph. The
emitted module is the time in which torch.fx prints the graph and Python compiles it.

    {command}
"""
PROOF = """\
## The proof on the first batch

The table gives MB of the tensors alive at the peak, without those of the model and the batch, and the growth of the
process. The proof keeps the matrices of one registration at a time. `verify=False` skips the proof.

    {command}
"""
SOLVE = """\
## Conjugate gradients

The table gives the iterations of `ModelSpectrum.solve` for (H + δ I) x = v, to a residual of 1e-6 in float64. H is the
Gauss-Newton matrix of a mean of squared errors over 500 cases, and v is the gradient. The networks have width 10 and
tanh. *none* is plain conjugate gradients, *factors* has the Kronecker factors as the preconditioner, *root* their
square root, *blocks* the exact blocks of H, one a layer.

The preconditioner helps where the condition within blocks is bad. Exact blocks do not help four layers either: the
directions along which H is close to zero change several layers, and no preconditioner of single layers knows them.

    {command}
"""
STATISTICS = """\
## Factors and scores

The table gives CPU seconds on one thread, the least of three interleaved rounds, and MB of the tensors alive at the
peak. All libraries have the empirical Fisher of the same linear modules in float32 and squares of the gradients of
sequences. kfac_fx and kronfluence decompose in float64, and score with a damping of a tenth of the mean eigenvalue.
*Positions* is a network of three layers at 32 positions, width 64; *wide positions* has width 256.

kfac_fx keeps the sums of a batch next to the factors, so its factors take twice the memory. kronfluence reads a
DataLoader and writes every result to files, which is in its time. curvlinops has plain hooks on modules, which take
less time than taps on small models. It has no scores, and no corrected eigenvalues for sequences.

    {command}

Peers: {peers}.
"""
LARGE = """\
## A model of 124 million parameters

The table is for the shapes of GPT-2 small with random weights, in float32: {batches} batches of 2 x 128 tokens,
eigenvalues corrected by sequences, queries of one batch, scores of all batches. It gives CPU seconds on one thread, and
GB of resident memory at the peak, with Python, torch and the model. *Fit* records, decomposes and corrects all factors;
with more parts it records more often and takes less memory. The spectrum has the same bits with every number of parts,
so the later phases differ by noise only.

    {command}
"""
LAUNCHES = """\
## What a step launches on a GPU

The tables are counted and predicted, and not measured. A count needs shapes alone, so it is made of the whole models
without a GPU and without numbers (torch {torch}). `KFAC(net)` does what it does on a GPU, with TF32 allowed. P is
the number of parameters.

- *kernels*: operations that are no views and no allocations. *waits*: where the host waits for the device.
- *elements*: those that operations read and write, in P, without products. *operands*: the same of products,
  convolutions and attention.
- *Tflop*: of these, by precision. *decompositions*: matrices that are decomposed.
- *device*, *host*: milliseconds of an H100 by the counts. An operation takes as long as its bytes or its flops, and at
  least 4.5 µs. The host takes 30 µs for an operation with autograd, and 10 µs without. `benchmarks/launch_counter.py`
  has the rates, which were measured.

A step takes the longer of both times. The mean step has the intervals that the library chooses on a GPU, without the
early steps, in which more is due. Its checks are not yet rarer, as they become after calm ones. Real kernels reach
fewer bytes and flops than the rates, and hosts differ, so ratios say more than milliseconds.

    {command}
"""
DECOMPOSITIONS = """\
## Decompositions on a GPU

The table gives milliseconds on one {device} (torch {torch}), for stacks of float32
matrices of one width. *Inverse* is the library's: a Cholesky decomposition, a triangular inverse and a product. *Loop*
takes one matrix after another. *Host* copies the matrices to the host, decomposes them there on {threads} threads, and
copies the results back. The residual is |Q Λ Qᵀ - C| / |C|.

torch decomposes the matrices of a stack one by one in `eigh`, so a stack gains nothing. Up to a width of 512 the host
takes no longer, and its residuals are a thirtieth or less. Thus kfac_fx decomposes these on the host, and wider ones on
the device. An inverse by Newton-Schulz takes longer than Cholesky's in nearly all stacks and has ten times its residual
or more, so kfac_fx does not use it. `benchmarks/results/decompositions_cuda.json` has its times.

    {command}
"""
CPU_STEP = """\
### A step at real widths

The tables give CPU milliseconds of one thread, medians over rounds of turns of {turn} steps, each with a turn of AdamW,
which takes lists of tensors. Wide layers are where K-FAC costs most: to turn a gradient [o, i] into both bases and a
step back takes 4 o i (o + i) flops, and training with n rows 6 n o i. Three things make it cheaper. On processors with
AVX512-BF16 or AMX the products are in bfloat16, which takes half of the time. A side that is wider than {widest:,} has
its basis in blocks. And numbers are taken part by part, so that the ten operations on each of them stay in the cache.
`print(net.report)` names the precision and the blocks.

- *plain*: a step in which nothing else is due.
- *statistics*, *bases*, *check*: what one such step costs more.
- *intervals*: of statistics, bases and checks, as `KFAC(net)` chose them.
- *amortised*: the mean step with these intervals, as a multiple of AdamW's step. *calm*: with a check at every fourth
  interval, as after checks that found nothing to do.
- *stated*: what statistics, bases and checks add to a training step by the report. *measured*: what they add to AdamW's
  step here.
- *before*, *first*, *first {first}*: CPU seconds before the first step, of it, and of the first {first} steps.
  Statistics, bases and checks are more frequent in them.
"""
DEVICE_STEP = """\
## A step on a GPU

The tables give milliseconds of the clock, medians over rounds. The clock is read at both ends of turns of {turn} steps,
and the host waits for the device only there, as in a training loop. Every round also has a turn of AdamW, fused and
under the same backend, and ratios are to its step. TF32 is allowed for products of float32.

- *plain*: a step in which nothing else is due.
- *statistics*, *bases*, *check*, *inverses*: what one such step costs more.
- *intervals*: of statistics, bases and checks, as `KFAC(net)` chose them.
- *amortised*: the mean step with these intervals, as a multiple of AdamW's step. *calm*: with a check at every fourth
  interval, as after checks that found nothing to do.
- *before*, *first*, *first {first}*: seconds before the first step, of it, and of the first {first} steps. Statistics,
  bases and checks are more frequent in them.
- *GB*: the peak of the device's memory after the first step.

*gradient* is one forward and backward without an optimizer.
"""
DEVICE_TRAINING = """\
## A training on a GPU

A GPT is trained on one {device} (torch {torch}) in bfloat16 autocast: {title}. All methods have the same start and the
same batches of a language that the program makes. The learning rate of every method rises in the first {warmup} steps
and falls as a cosine. No model has a smaller mean loss than the language's entropy, {entropy:.3f}. *loss* is the mean
over the last {shown} steps. The last columns give the steps and the seconds after the first step until such a mean is
at most the best last one of AdamW. The first step and what comes before it hold the compilation, so they are apart.

    {command}
"""
FILES = (
    "step_time",
    "default_step",
    "step_parts",
    "host_time",
    "compile_time",
    "scale",
    "proof_memory",
    "conjugate_gradients",
    "statistics",
    "gpt2_factors",
    "launches",
    "decompositions_cuda",
)
Row = dict[str, Any]


def write() -> None:
    DOCS.write_text(page(), encoding="utf-8")


def page() -> str:
    step, default, parts, host, compiling, scale, proof, solve, spectra, large, launched, decomposed = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in FILES
    )
    sections = [
        INTRODUCTION.format(**step),
        *step_time(step),
        DEFAULT_STEP.format(**default),
        table(default["results"], "{:.2f}"),
        *device_steps(RESULTS / device_step.OUT_ON_CPU.name, CPU_STEP),
        *step_parts(parts),
        *host_time(host),
        COMPILE.format(**compiling),
        table(compiling["CPU seconds"], "{:.2f}"),
        SCALE.format(**scale),
        table(by_pass(scale["results"]), "{:.2f}"),
        PROOF.format(**proof),
        table(proof["MB"], "{:,.0f}"),
        STATISTICS.format(**{**spectra, "peers": peers_of(spectra)}),
        table(statistics.rows(spectra["results"]), "{}"),
        LARGE.format(**large, batches=large["results"][0]["batches"]),
        table(gpt2_factors.rows(large["results"]), "{}"),
        SOLVE.format(**solve),
        table(solve["iterations"], "{}"),
        *launched_by_steps(launched),
        DECOMPOSITIONS.format(**decomposed),
        table(decompositions(decomposed["results"]), "{:.2f}"),
        *device_steps(RESULTS / device_step.OUT.name, DEVICE_STEP),
        *device_trainings(RESULTS / device_training.OUT.name),
    ]
    return "\n".join(sections)


def step_time(record: dict[str, Any]) -> Iterable[str]:
    yield STEP_TIME.format(**{**record, "peers": peers_of(record)})
    for model, result in record["results"].items():
        yield f"{model}; an SGD step takes {result['milliseconds']['sgd']['plain']:.0f} ms:\n"
        yield table(rows_of(result), "{:.2f}")


def peers_of(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["peers"].items()) or "none was installed"


def step_parts(record: dict[str, Any]) -> Iterable[str]:
    yield STEP_PARTS.format(**record)
    for model, result in record["results"].items():
        yield f"{model}; an SGD step takes {result['sgd milliseconds']:.0f} ms:\n"
        yield table(result["parts"], "{:.2f}")


def host_time(record: dict[str, Any]) -> Iterable[str]:
    yield HOST_TIME.format(**record)
    for model, result in record["results"].items():
        yield f"{model}, with {result['parameters']} parameters:\n"
        yield table(result["milliseconds"], "{:.1f}")


def launched_by_steps(record: dict[str, Any]) -> Iterable[str]:
    yield LAUNCHES.format(**record)
    for result in record["results"].values():
        yield f"{result['title']}; P = {result['parameters']:,} in {result['tensors']} tensors:\n"
        yield table(launches.count_rows(result), "{}")
        yield table(launches.step_rows(result), "{}")


def decompositions(results: Sequence[Row]) -> list[Row]:
    """A row for every width and stack: milliseconds, and the residuals of both ways to eigenvectors."""
    columns = {
        "inverse": "Cholesky",
        "inverse, loop": "Cholesky, loop",
        "eigh": "eigh",
        "eigh, loop": "eigh, loop",
        "eigh, host": "eigh, host",
    }
    rows = []
    for result in results:
        times = {title: result["milliseconds"].get(name, "") for title, name in columns.items()}
        left = {f"residual of {name}": residual_text(result, name) for name in ("eigh", "eigh, host")}
        rows.append({"width": str(result["width"]), "stack": str(result["stack"]), **times, **left})
    return rows


def device_steps(path: Path, introduction: str) -> Iterable[str]:
    """No lines until there is a file."""
    if not path.exists():
        return
    yield introduction.format(turn=device_step.TURN, first=device_step.FIRST, widest=bases.WIDEST["cpu"])
    for result in json.loads(path.read_text())["results"].values():
        for backend, rows in result["backends"].items():
            where = "" if result["device"] == "cpu" else f", {backend}, on one {result['device']}"
            yield f"{result['title']}{where} (torch {result['torch']}):\n"
            yield f"    {result['command']}\n"
            yield table(device_step.shown_rows(rows), "{}")


def device_trainings(path: Path) -> Iterable[str]:
    """No lines until there is a file with the rows of a method."""
    record = json.loads(path.read_text()) if path.exists() else {"results": {}}
    if record["results"]:
        constants = {"warmup": device_training.WARMUP, "shown": device_training.SHOWN}
        yield DEVICE_TRAINING.format(**{**record, **constants})
        yield table(device_training.rows(record["results"]), "{}")
        lowest = {name: min(run["loss"] for run in of.values()) for name, of in record["results"].items()}
        order = [f"{name} with {lowest[name]:.2f}" for name in sorted(lowest, key=lowest.__getitem__)]
        yield f"From the lowest loss to the highest, each at its best rate: {', '.join(order)}.\n"


def residual_text(result: Row, name: str) -> str:
    return f"{result['residuals'][name]:.0e}" if name in result["residuals"] else ""


def by_pass(results: Sequence[Row]) -> list[Row]:
    """One column per graph, one row per pass."""
    names = [name for name in results[0] if name != "nodes"]
    return [{"nodes": name, **{f"{result['nodes']:,.0f}": result[name] for result in results}} for name in names]


def table(rows: Sequence[Row], form: str) -> str:
    """A Markdown table; floats are printed with `form`."""
    cells = [[form.format(value) if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    lines = [list(rows[0]), ["---", *["--:"] * (len(rows[0]) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
