"""Grade all hostile inputs, or those of some kinds.

    python -m benchmarks.hostile                       all that the results do not have yet
    python -m benchmarks.hostile --kind states         those of one kind, again
    python -m benchmarks.hostile --find "two groups"   those of which the name has these words; nothing is written
    python -m benchmarks.hostile --write-docs          docs/hostile.md of the results

Results are written to benchmarks/results/hostile.json after each input, so a run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch tells of processes that end

import torch

from benchmarks.hostile import folders, given_up, names, numbers, processes, states
from benchmarks.hostile.grading import GRADES, Input, graded
from benchmarks.program import versions

OUT = Path(__file__).parents[1] / "results" / "hostile.json"
KINDS = {
    "given-up batches": given_up,
    "states": states,
    "folders": folders,
    "names and shapes": names,
    "numbers": numbers,
    "processes": processes,
}


def inputs(kinds: Sequence[str]) -> Iterator[Input]:
    for kind in kinds:
        yield from KINDS[kind].inputs()


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"inputs": []}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = json.dumps(versions())[:-1] + f', "inputs": [\n{lines}\n]}}\n'
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def run(kinds: Sequence[str], find: str, again: bool, out: Path) -> None:
    rows: list[dict[str, Any]] = read(out)["inputs"]
    if again:
        rows = [row for row in rows if row["kind"] not in kinds]
    known = {(row["kind"], row["name"]) for row in rows}
    tally: Counter[str] = Counter()
    for given in inputs(kinds):
        if find not in given.name or ((given.kind, given.name) in known and not find):
            continue
        start = time.process_time()
        grade, text = graded(given.run)
        seconds = round(time.process_time() - start, 2)
        tally[grade] += 1
        print(f"{grade:8} {seconds:6.2f} s  {given.kind}: {given.name}: {text}", flush=True)
        if not find:
            rows.append({"kind": given.kind, "name": given.name, "grade": grade, "text": text, "seconds": seconds})
            write(out, rows)
    print(", ".join(f"{number} {name}" for name, number in tally.most_common()))


def counted(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row a kind: its inputs and its grades."""
    table = []
    for kind in KINDS:
        of_kind = Counter(row["grade"] for row in rows if row["kind"] == kind)
        table.append([kind, str(of_kind.total()), *(str(of_kind[grade]) for grade in GRADES)])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--find", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write-docs", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.write_docs:
        print(counted(read(arguments.out)["inputs"]))
        return
    run(arguments.kind or list(KINDS), arguments.find, bool(arguments.kind), arguments.out)


if __name__ == "__main__":
    main()
