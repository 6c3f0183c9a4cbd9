"""The page of the zoo's results: `python -m benchmarks.zoo --write-docs`."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs" / "zoo.md"
Result = dict[str, Any]
NUMBER = re.compile(r"[\d,.]*( %)?|\d+ of \d+|\d+ \([\d.]+ %\)")
MUST = (
    "LLaMA",
    "GPT-2",
    "BERT",
    "T5",
    "ViT",
    "Swin",
    "ConvNeXt",
    "EfficientNet",
    "Whisper",
    "Mixtral",
    "Mamba",
    "U-Net",
)
INTRODUCTION = """# The zoo

This page shows how `kfac_fx.compile` handles models that people use. Every model is the real code of its library with
random weights. The models of transformers, diffusers and peft have tiny configurations; those of timm and torchvision
have their full width, on small images (a few with fewer layers). The models of "papers" are of kinds that the libraries
do not have: graph networks with sparse matrices, neural operators, flows, generators, detectors, equilibrium, early
exits, a step inside of forward. They are written here, shorter than the public originals. Every model is in training
mode. It is captured with a batch of {captured} and checked with a batch of {other}.

- **works**: the model was captured, and four checks hold for the other batch size. The captured graph has the outputs
  and gradients of the original (relative differences of at most {relative:g}). The rows of every structured
  registration give the gradient of autograd. A parameter in no Fisher block has no gradient. All statistics are finite.
  Parameters that start at zero would hide the gradients of the layers in front of them, so they are set to small random
  numbers.
- **wrong**: a check fails without an error or a reason in the report. No model may be wrong.
- **refused**: an error names the operation that cannot be captured.
- **bug**: the model raises another exception.
- **too slow**: the model gives no result in time.

An element or a tensor is *structured* if its Fisher block knows the layer. The rest of the used parameters is
*generic*: a diagonal block, with its reason in the report. Models of full width dominate the count of elements. In the
count of tensors every tensor has the same weight.
"""


def write(results: Iterable[Result], measure: Any, command: str) -> None:
    """Write the page. measure: the module that measured, whose constants the page names."""
    found = sorted(results, key=lambda result: str(result["model"]))
    introduction = INTRODUCTION.format(captured=measure.CAPTURED, other=measure.OTHER, relative=measure.RELATIVE)
    parts = [
        introduction,
        origin(found, command),
        summary(found),
        famous(found),
        failures(found),
        reasons(found),
        models(found),
    ]
    DOCS.write_text("\n".join(parts), encoding="utf-8")


def origin(found: Sequence[Result], command: str) -> str:
    versions: dict[str, set[str]] = defaultdict(set)
    for result in found:
        for name, version in result.get("versions", {}).items():
            versions[name].add(version)
    commits = len(versions.pop("kfac_fx", ()))
    text = ", ".join(f"{name} {' and '.join(sorted(version))}" for name, version in versions.items())
    text += f"; kfac_fx at {commits} {'commit' if commits == 1 else 'commits, as the last column says'}"
    dates = sorted({str(result["date"]) for result in found if "date" in result})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "unknown"
    return (
        f"The results were measured with `{command}`, in parts, with one thread for each model, on a shared machine\n"
        f"with two cores, {when} ({text}).\n"
        "`python -m benchmarks.zoo --write-docs` makes this page from `benchmarks/results/zoo.jsonl`. Seconds are CPU\n"
        "time of the whole `compile`; torch.export takes most of it. On a busy machine they are up to twice those of\n"
        "an idle one.\n"
    )


def summary(found: Sequence[Result]) -> str:
    """One row a library, and result for all."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in found:
        groups[library(result)].append(result)
    head = (
        "library",
        "models",
        "work",
        "wrong",
        "elements structured",
        "tensors structured",
        "all structured",
        "seconds",
    )
    rows = [summary_row(name, group) for name, group in groups.items()]
    return "## Summary\n\n" + table(head, [*rows, summary_row("**all**", found)])


def summary_row(name: str, group: Sequence[Result]) -> tuple[str, ...]:
    known = [result for result in group if "elements" in result]
    works = sum(result["status"] == "works" for result in group)
    whole = sum(result["elements"]["used"] == result["elements"]["structured"] for result in known)
    seconds = [float(result["seconds"]) for result in known if "seconds" in result]
    return (
        name,
        f"{len(group)}",
        f"{works} ({percent(works, len(group))})",
        f"{sum(result['status'] == 'wrong' for result in group)}",
        share(known, "elements"),
        share(known, "tensors"),
        f"{whole}",
        f"{statistics.median(seconds):.1f}" if seconds else "",
    )


def share(known: Sequence[Result], what: str) -> str:
    return percent(sum(result[what]["structured"] for result in known), sum(result[what]["used"] for result in known))


def famous(found: Sequence[Result]) -> str:
    rows = []
    for name in MUST:
        mine = [result for result in found if result.get("like") == name]
        rows.append((name, ", ".join(f"{result['model']} ({result['status']})" for result in mine) or "missing"))
    return "## Well-known architectures\n\n" + table(("architecture", "models"), rows)


def failures(found: Sequence[Result]) -> str:
    rows = [
        (result["model"], result["status"], code(first_lines(result)))
        for result in found
        if result["status"] != "works"
    ]
    if not rows:
        return "## Failures\n\nEvery model works.\n"
    return "## Failures\n\n" + table(("model", "status", "message"), rows)


def first_lines(result: Result) -> str:
    return " ".join((result.get("error") or "; ".join(result.get("wrong", []))).split())[:400]


def reasons(found: Sequence[Result]) -> str:
    """The reasons of generic parameters, those with most elements first, without numbers of nodes and lines."""
    groups: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for result in found:
        for names, elements, reason in result.get("generic", []):
            groups[general(reason)].append((result["model"], names, elements))
    ordered = sorted(groups.items(), key=lambda item: -sum(elements for _, _, elements in item[1]))
    rows = [
        (
            code(reason),
            f"{len(cases)}",
            f"{sum(elements for _, _, elements in cases):,}",
            f"{len({model for model, _, _ in cases})}",
            f"{cases[0][0]}: `{cases[0][1]}`",
        )
        for reason, cases in ordered
    ]
    head = ("reason", "blocks", "elements", "models", "for example")
    return "## Why parameters are generic\n\n" + (table(head, rows) if rows else "Every parameter is structured.\n")


def general(reason: str) -> str:
    """A reason without the numbers that differ from model to model: of nodes, lines, counts."""
    text = re.sub(r" ?\([\w/.-]+\.py:\d+\)", "", reason)
    text = re.sub(r"(\.py):\d+", r"\1", text)
    text = re.sub(r"_\d+\b", "", text)
    text = re.sub(r"\band \d+ more\b", "and more", text)
    return re.sub(r"\d[\d,.]*", "#", text)


def models(found: Sequence[Result]) -> str:
    head = (
        "model",
        "status",
        "captured",
        "nodes",
        "used elements",
        "structured",
        "tensors",
        "generic",
        "proved",
        "seconds",
        "commit",
    )
    return "## All models\n\n" + table(head, [model_row(result) for result in found])


def model_row(result: Result) -> tuple[str, ...]:
    seconds = f"{result['seconds']:.1f}" if "seconds" in result else ""
    commit = result.get("versions", {}).get("kfac_fx", "")
    if "elements" not in result:
        return (result["model"], result["status"], *[""] * 7, seconds, commit)
    elements, tensors = result["elements"], result["tensors"]
    return (
        result["model"],
        result["status"],
        result["captured"],
        f"{result['nodes']:,}",
        f"{elements['used']:,}",
        percent(elements["structured"], elements["used"]),
        f"{tensors['structured']} of {tensors['used']}",
        f"{len(result['generic'])}",
        f"{result['proven']}" if "proven" in result else "",
        seconds,
        commit,
    )


# --- words ----------------------------------------------------------------------------------------------------------


def library(result: Result) -> str:
    return str(result["model"]).partition("/")[0]


def percent(part: int, whole: int) -> str:
    """A percentage, rounded down, so that "100 %" means all."""
    return f"{part * 100_000 // whole / 1000:g} %" if whole else ""


def code(text: str) -> str:
    return f"`{text.replace('`', '').replace('|', '/')}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    right = [bool(rows) and all(NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(head))]
    ruler = ["--:" if number else "---" for number in right]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ruler, *rows))
