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

What `kfac_fx.compile` makes of models that people use. Every model is real code of its library, randomly initialized;
those of transformers, diffusers and peft have tiny configurations, those of timm and torchvision their full width on
small images (a few with fewer layers). Every model is in training mode, captured with a batch of {captured} and checked
with a batch of {other}:

- **works**: it was captured, and on the other batch size the captured graph has the original's outputs and gradients
  (relative differences of at most {relative:g}), every structured registration's rows give autograd's gradient, what is
  in no Fisher block has no gradient, and all statistics are finite. Parameters that start at zero, which would hide the
  gradients of what is in front of them, are small random numbers there.
- **wrong**: one of these fails, and nobody was told. There must be none.
- **refused**: an error names what cannot be captured. **Bug**: another exception. **Too slow**: no result in time.

An element (a tensor) is *structured* if it is in a Fisher block that knows its layer; the rest of what is used is
*generic*, a diagonal block, with its reason. Full-width models dominate the elements; tensors count all alike.
"""


def write(results: Iterable[Result], measure: Any, command: str) -> None:
    """Write the page. measure: the module that measured, whose constants the page names."""
    found = sorted(results, key=lambda one: str(one["model"]))
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
    for one in found:
        for name, version in one.get("versions", {}).items():
            versions[name].add(version)
    commits = len(versions.pop("kfac_fx", ()))
    text = ", ".join(f"{name} {' and '.join(sorted(each))}" for name, each in versions.items())
    text += f"; kfac_fx at {commits} {'commit' if commits == 1 else 'commits, as the last column says'}"
    dates = sorted({str(one["date"]) for one in found if "date" in one})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "unknown"
    return (
        f"Measured with `{command}`, in parts, one thread a model, on a shared machine with two cores, {when}\n"
        f"({text}).\n"
        "This page is made by `python -m benchmarks.zoo --write-docs` from `benchmarks/results/zoo.jsonl`. Seconds\n"
        "are CPU time of the whole `compile`, most of it torch.export's; where the machine was busy they are up to\n"
        "twice those of an idle one.\n"
    )


def summary(found: Sequence[Result]) -> str:
    """One row a library, and one for all."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for one in found:
        groups[library(one)].append(one)
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
    known = [one for one in group if "elements" in one]
    works = sum(one["status"] == "works" for one in group)
    whole = sum(one["elements"]["used"] == one["elements"]["structured"] for one in known)
    seconds = [float(one["seconds"]) for one in known if "seconds" in one]
    return (
        name,
        f"{len(group)}",
        f"{works} ({percent(works, len(group))})",
        f"{sum(one['status'] == 'wrong' for one in group)}",
        share(known, "elements"),
        share(known, "tensors"),
        f"{whole}",
        f"{statistics.median(seconds):.1f}" if seconds else "",
    )


def share(known: Sequence[Result], what: str) -> str:
    return percent(sum(one[what]["structured"] for one in known), sum(one[what]["used"] for one in known))


def famous(found: Sequence[Result]) -> str:
    rows = []
    for name in MUST:
        mine = [one for one in found if one.get("like") == name]
        rows.append((name, ", ".join(f"{one['model']} ({one['status']})" for one in mine) or "missing"))
    return "## The architectures that must be among them\n\n" + table(("architecture", "models"), rows)


def failures(found: Sequence[Result]) -> str:
    rows = [(one["model"], one["status"], code(first_lines(one))) for one in found if one["status"] != "works"]
    if not rows:
        return "## What does not work\n\nNothing.\n"
    return "## What does not work\n\n" + table(("model", "status", "what is said"), rows)


def first_lines(one: Result) -> str:
    return " ".join((one.get("error") or "; ".join(one.get("wrong", []))).split())[:400]


def reasons(found: Sequence[Result]) -> str:
    """Why parameters are generic, the most elements first; numbers of nodes and lines are left out."""
    groups: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for one in found:
        for names, elements, reason in one.get("generic", []):
            groups[general(reason)].append((one["model"], names, elements))
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
    return "## Why parameters are generic\n\n" + (table(head, rows) if rows else "None is.\n")


def general(reason: str) -> str:
    """A reason without what differs from model to model: nodes' numbers, lines, counts."""
    text = re.sub(r" ?\([\w/.-]+\.py:\d+\)", "", reason)
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
    return "## All models\n\n" + table(head, [model_row(one) for one in found])


def model_row(one: Result) -> tuple[str, ...]:
    seconds = f"{one['seconds']:.1f}" if "seconds" in one else ""
    commit = one.get("versions", {}).get("kfac_fx", "")
    if "elements" not in one:
        return (one["model"], one["status"], *[""] * 7, seconds, commit)
    elements, tensors = one["elements"], one["tensors"]
    return (
        one["model"],
        one["status"],
        one["captured"],
        f"{one['nodes']:,}",
        f"{elements['used']:,}",
        percent(elements["structured"], elements["used"]),
        f"{tensors['structured']} of {tensors['used']}",
        f"{len(one['generic'])}",
        f"{one['proven']}" if "proven" in one else "",
        seconds,
        commit,
    )


# --- words ----------------------------------------------------------------------------------------------------------


def library(one: Result) -> str:
    return str(one["model"]).partition("/")[0]


def percent(part: int, whole: int) -> str:
    """Rounded down, so that "100 %" means all."""
    return f"{part * 100_000 // whole / 1000:g} %" if whole else ""


def code(text: str) -> str:
    return f"`{text.replace('`', '').replace('|', '/')}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    right = [bool(rows) and all(NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(head))]
    ruler = ["--:" if one else "---" for one in right]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ruler, *rows))
