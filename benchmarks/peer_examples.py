"""The examples of kronfluence, laplace-torch and dattri, run by them and by kfac_fx: the same weights and data.

    python -m benchmarks.peer_examples                  the figures of what is installed, in results/peer_examples.json
    python -m benchmarks.peer_examples --examples ...   those of some examples; the others stay as they are
    python -m benchmarks.peer_examples --write-docs     docs/peer_examples.md, from these figures

    pip install kronfluence laplace-torch dattri

The networks, options and numbers of cases are those of the examples in the repositories of these libraries, as
`Example.words` says. Their data are downloads, so data that come with scikit-learn and with Python stand for them.

The agreement is that of a run in float64. Where a small network has a dense answer by `torch.func`, both are compared
with it. Seconds are those of float32: the median of interleaved rounds of CPU time on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_runs import (
    Found,
    Posterior,
    Problem,
    Run,
    calibration,
    cifar,
    dense_ekfac,
    dense_influence,
    dense_posterior,
    ekfac_of_dattri,
    ekfac_of_ours,
    influence_of_dattri,
    influence_of_ours,
    noisy_labels,
    perceptron,
    posterior_of_laplace,
    posterior_of_ours,
    scores_of_kronfluence,
    scores_of_ours,
    sinusoid,
    uci,
    wikitext,
)
from benchmarks.program import console, table, versions

OUT = Path(__file__).parent / "results" / "peer_examples.json"
DOCS = Path(__file__).parents[1] / "docs" / "peer_examples.md"
ROUNDS = 5
PEERS = {"kronfluence": "kronfluence", "laplace-torch": "laplace", "dattri": "dattri"}  # what one imports

# --- the examples -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """words: lines for the page. dense: the right numbers, where there is a direct way."""

    words: str
    library: str
    make: Callable[[], Problem]
    ours: Callable[[Problem], Run]
    peer: Callable[[Problem], Run]
    dense: Callable[[Problem], Found] | None = None


def laplace_example(words: str, make: Callable[[], Problem], options: Posterior) -> Example:
    def bound(run: Callable[[Posterior, Problem], Any]) -> Callable[[Problem], Any]:
        return lambda problem: run(options, problem)

    ours, peer, dense = bound(posterior_of_ours), bound(posterior_of_laplace), bound(dense_posterior)
    return Example(words, "laplace-torch", make, ours, peer, dense)


EXAMPLES = {
    "kronfluence, uci": Example(
        "`kronfluence/examples/uci`: a regression by a network 10-128-128-128-1 on one batch of 398 cases, 44 "
        "queries. Diabetes data stand for the concrete data.",
        "kronfluence", uci, scores_of_ours, scores_of_kronfluence, lambda problem: dense_ekfac(True, problem),
    ),
    "kronfluence, cifar": Example(
        "`kronfluence/examples/cifar`: the ResNet-9 at a quarter of the width on 128 images, 16 queries with "
        "margins. Digits of 32 by 32 pixels stand for CIFAR-10.",
        "kronfluence", cifar, scores_of_ours, scores_of_kronfluence,
    ),
    "kronfluence, wikitext": Example(
        "`kronfluence/examples/wikitext`: a GPT of two layers of width 8 on 128 windows of six characters, 16 "
        "queries. Python's manual stands for WikiText-2, and the network for GPT-2.",
        "kronfluence", wikitext, scores_of_ours, scores_of_kronfluence,
    ),
    "laplace-torch, regression, diag": laplace_example(
        "`laplace/examples/regression_example.py`: a network 1-50-1, 150 points of a sine, 500 tests, with "
        "the structure diag.",
        sinusoid, Posterior("diag", last=False, steps=1000),
    ),
    "laplace-torch, regression, kron": laplace_example(
        "The same with the structure kron.", sinusoid, Posterior("kron", last=False, steps=1000)
    ),
    "laplace-torch, calibration, full": laplace_example(
        "`laplace/examples/calibration_example.py`: the last layer of a CNN, 1000 images of digits, 797 "
        "tests, with the structure full. The CNN stands for a WideResNet, the digits for CIFAR-10.",
        calibration, Posterior("full", last=True),
    ),
    "laplace-torch, calibration, kron": laplace_example(
        "The same with the structure kron, as the example has it.", calibration, Posterior("kron", last=True)
    ),
    "dattri, noisy labels, explicit": Example(
        "`dattri/examples/noisy_label_detection`: the scores of 1000 images for themselves, by a softmax "
        "regression with 100 wrong labels; the method inverts the Hessian. Digits of 8 by 8 pixels stand for MNIST.",
        "dattri", noisy_labels, influence_of_ours, lambda problem: influence_of_dattri("explicit", problem),
        dense_influence,
    ),
    "dattri, noisy labels, cg": Example(
        "The same with ten conjugate gradients.",
        "dattri", noisy_labels, influence_of_ours, lambda problem: influence_of_dattri("cg", problem),
        dense_influence,
    ),
    "dattri, MLP with EK-FAC": Example(
        "The network of `dattri/benchmark/models/mlp` with 64 inputs, 1000 digits, 100 queries, `IFAttributorEKFAC`.",
        "dattri", lambda: perceptron(True), ekfac_of_ours, ekfac_of_dattri, lambda problem: dense_ekfac(False, problem),
    ),
    "dattri, MLP without biases": Example(
        "The same without biases.",
        "dattri", lambda: perceptron(False), ekfac_of_ours, ekfac_of_dattri,
        lambda problem: dense_ekfac(False, problem),
    ),
}  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def agreement(example: Example, problem: Problem) -> dict[str, dict[str, float]]:
    """By number the distances, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        exact = problem.to(torch.float64)
        runs = {who: kind(exact) for who, kind in (("ours", example.ours), ("peer", example.peer))}
        for run in runs.values():
            for phase in run.phases.values():
                phase()
        dense = {} if example.dense is None else example.dense(exact)
    finally:
        torch.set_default_dtype(before)
    rows = {}
    for number, ours in runs["ours"].found.items():
        if (peer := runs["peer"].found.get(number)) is None:
            continue
        rows[number] = {"peer from ours": distance(peer, ours)}
        if ours.numel() > 2:
            rows[number]["correlation"] = correlation(peer, ours)
        if number in dense:
            rows[number] |= {
                "peer from dense": distance(peer, dense[number]),
                "ours from dense": distance(ours, dense[number]),
            }
    return rows


def seconds(run: Run) -> dict[str, float]:
    found = {}
    for name, phase in run.phases.items():
        before = time.process_time()
        phase()
        found[name] = time.process_time() - before
    return {name: spent for name, spent in found.items() if name}


def times(example: Example, problem: Problem, rounds: int) -> dict[str, dict[str, float]]:
    """By phase the medians of "peer" and "ours"."""
    kinds = {"peer": example.peer, "ours": example.ours}
    found: dict[str, list[dict[str, float]]] = {who: [] for who in kinds}
    for _ in range(rounds):
        for who, kind in kinds.items():
            found[who].append(seconds(kind(problem)))
    return {
        phase: {who: statistics.median(spent[phase] for spent in found[who]) for who in kinds}
        for phase in found["ours"][0]
    }


def measure(example: Example, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    problem = example.make()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # of the peers, and progress bars
        warnings.simplefilter("ignore")
        return {"agreement": agreement(example, problem), "seconds": times(example, problem, rounds)}


def rows(name: str, found: Mapping[str, Any]) -> list[dict[str, str]]:
    columns = "peer from ours", "correlation", "peer from dense", "ours from dense"
    digits_of = {"correlation": ".4f"}
    return [
        {"example": name, "number": number}
        | {column: format(of[column], digits_of.get(column, ".0e")) if column in of else "" for column in columns}
        for number, of in found["agreement"].items()
    ]


def phases(name: str, found: Mapping[str, Any]) -> list[dict[str, str]]:
    listed = found["seconds"] | {
        "all": {who: sum(of[who] for of in found["seconds"].values()) for who in ("peer", "ours")}
    }
    return [
        {
            "example": name,
            "phase": phase,
            "peer": f"{of['peer']:.4f}",
            "ours": f"{of['ours']:.4f}",
            "peer / ours": f"{of['peer'] / of['ours']:.1f}",
        }
        for phase, of in listed.items()
    ]


# --- the page ---------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table; a name is written in the first of its rows alone."""
    lines, before = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"], ""
    for row in rows:
        first, *others = row.values()
        lines.append(f"| {' | '.join([first if first != before else '', *others])} |")
        before = first
    return lines


def slower(found: Mapping[str, Any]) -> list[str]:
    """The phases but "prepare" that take us longer."""
    return [
        f"*{name}*, {phase} ({of['ours']:.4f} s, {of['peer']:.4f} s there)"
        for name, example in found.items()
        for phase, of in example["seconds"].items()
        if phase != "prepare" and of["ours"] > of["peer"]
    ]


def days(found: Mapping[str, Any]) -> str:
    """A sentence if the examples were not measured on one day."""
    names: dict[str, list[str]] = {}
    for name, example in found.items():
        names.setdefault(example["day"], []).append(f"*{name}*")
    each = "; ".join(f"{day}: {', '.join(of_day)}" for day, of_day in sorted(names.items()))
    return f" Not all were measured on one day, and so with one state of kfac_fx: {each}." if len(names) > 1 else ""


def page(results: Mapping[str, Any]) -> str:
    found = results["results"]
    peers = ", ".join(f"{name} {version}" for name, version in results["peers"].items())
    words = [f"- *{name}*: {EXAMPLES[name].words}" for name in found]
    distances = [row for name in found for row in rows(name, found[name])]
    spent = [row for name in found for row in phases(name, found[name])]
    ratios = [
        of["peer"] / of["ours"]
        for example in found.values() for phase, of in example["seconds"].items() if phase != "prepare"
    ]  # fmt: skip
    faster = sum(ratio > 1 for ratio in ratios)
    late = slower(found)
    return "\n".join(
        [
            "# The examples of other libraries",
            "",
            "kronfluence, laplace-torch and dattri have examples of their own. Here they run these, and kfac_fx runs "
            "the same on the same weights and data. Networks, options and numbers of cases are theirs, but "
            "for what the list says. Their data are downloads, so data that come with scikit-learn and with Python "
            "stand for them.",
            "",
            f"Versions: torch {results['torch']}, {peers}. None of them is a dependency.",
            "",
            *words,
            "",
            "## The numbers",
            "",
            "The columns are relative distances in float64: the norm of the difference, divided by the norm of the "
            "second. *Dense* is the same number from the gradients, Jacobians or the Hessian of `torch.func`, without "
            "either library; for laplace-torch it is the posterior with one matrix over all parameters.",
            "",
            *markdown(distances),
            "",
            "- **laplace-torch, kron** has a block for the weight and another one for the bias of a layer. kfac_fx has "
            "one for both, with their covariance, so the two differ. Both differ from the dense posterior, which is "
            "what Kronecker products and blocks of layers leave out.",
            "- **laplace-torch, diag** is by its BackPACK backend, because its default samples targets.",
            "- **dattri, cg** stops after ten iterations, as its example does.",
            "- **dattri, EK-FAC** multiplies with the transposes of the matrices of eigenvectors, see "
            "[agreement](agreement.md). The dense scores have another value.",
            "",
            "## The time",
            "",
            "CPU seconds on one thread in float32, medians of interleaved rounds. *Prepare* is all that comes before "
            "the data: kfac_fx captures the model and proves the capture on a batch, once for a model; the others wrap "
            f"the model. kfac_fx takes less time in {faster} of the {len(ratios)} phases that are not *prepare*."
            f"{days(found)}",
            "",
            *markdown(spent),
            "",
            *(
                [
                    f"- Longer: {'; '.join(late)}. " + WHY_SLOWER
                ] if late else []
            ),
            "- *Fit* has the decompositions of kfac_fx. laplace-torch decomposes Kronecker products there, and takes a "
            "determinant of a dense matrix in every step of *evidence*.",
            "- kronfluence reads a DataLoader and writes every result to files, which is in its time.",
            "",
            f"`{results['command']}`",
            "",
        ]
    )  # fmt: skip


WHY_SLOWER = (
    "Those of the regression take milliseconds on a network of 151 parameters. The choice of the capture, the "
    "comparison of the weights with those of the spectrum, and the code of a recording cost about as much on a network "
    "of any size."
)


def write(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write-docs", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.write_docs:
        DOCS.write_text(page(json.loads(chosen.out.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    torch.set_num_threads(1)
    there = {name: importlib.util.find_spec(package) is not None for name, package in PEERS.items()}
    peers = {name: metadata.version(name) for name in PEERS if there[name]}
    record = {"command": "python -m benchmarks.peer_examples", **versions(), "peers": peers}
    before = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {}
    results = before["results"] if before.items() >= record.items() else {}
    write(chosen.out, {**record, "results": results})
    for name in chosen.examples:
        if not there[EXAMPLES[name].library]:
            print(f"{name}: {EXAMPLES[name].library} is not installed")
            continue
        results[name] = {"day": str(date.today()), **measure(EXAMPLES[name], chosen.rounds)}
        write(chosen.out, {**record, "results": results})
        console().print(table(f"{name}: relative distances in float64", rows(name, results[name])))
        console().print(table(f"{name}: CPU seconds", phases(name, results[name])))


if __name__ == "__main__":
    main()
