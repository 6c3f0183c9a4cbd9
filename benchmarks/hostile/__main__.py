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

from benchmarks import killed
from benchmarks.hostile import corrupted, folders, further, given_up, names, numbers, processes, states
from benchmarks.hostile.grading import GRADES, RAW, SILENT, Input, graded
from benchmarks.program import versions

OUT = Path(__file__).parents[1] / "results" / "hostile.json"
DOCS = Path(__file__).parents[2] / "docs" / "hostile.md"
BAD = (SILENT, RAW)
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
        yield from further.inputs(kind)


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
    present = {(given.kind, given.name) for given in inputs(list(KINDS))}
    rows = [row for row in rows if (row["kind"], row["name"]) in present]
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


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = """# Hostile inputs

Users do legal but odd things to optimizers. Here are {number:,} of them, drawn by code in six kinds, with what a user
sees of each:

- *right*: the result is that of an independent way to it (a training without the batch, an uninterrupted training, one
  process, plain names), mostly to the last bit; or the loss fell, where there is no other way; or both of two
  processes ended with an error of the library. There was no other message.
- *warned*: a warning named what happened.
- *refused*: an error of the library said what is wrong, and left everything as it was.
- *silent*: another result without a message.
- *raw*: an error of something else.

An error that plain torch raises for the same input is right.

{grades}

{silent}

| Kind | Inputs |
|---|---|
| given-up batches | every model with every rule, and two of {ways} ways to give a batch up in between; {give_ups} \
further ways, such as errors in hooks and in closures |
| states | entries that are corrupted in {corruptions} ways; states that go into {changes} other trainings, \
are carried in {carried} ways, or are loaded at {moments} moments; states of other optimizers, of other types, with \
other keys, or kept without a copy; {exact} wrong numbers of exact steps, {complex} states of a complex model, and \
{turns} of a model of several paths |
| folders | spectra, fits, queries and scores: {damages} damages, {places} places, other nets, and several writers; \
manifests that were edited, and names of the model in files |
| names and shapes | names that code cannot have or that torch uses itself; {shapes} shapes and layouts of parameters |
| numbers | {situations} situations, alone and in pairs, with every rule in four dtypes; options that cannot be; odd \
losses, gradients, targets and batches for one step |
| processes | two processes, of which one does something else in {scenarios} ways, or is killed |

`python -m benchmarks.hostile` grades them, `--find WORDS` some of them again, and `--write-docs` makes this page of
`benchmarks/results/hostile.json`, which has a line for each.

## Kills

`python -m benchmarks.killed` ends processes with kill -9 at random moments: trainings that write a
[checkpoint](trainers.md#checkpoints) after every step, and writers of folders. *Lost* are states that are older than
one that was there before, or cannot be read; *mixed* are those with other bits than an uninterrupted process has.

{kills}
"""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def page(results: dict[str, Any], kills: dict[str, Any]) -> str:
    """docs/hostile.md."""
    rows, counts = results["inputs"], []
    for kind in KINDS:
        of_kind = Counter(row["grade"] for row in rows if row["kind"] == kind)
        counts.append([kind, of_kind.total(), *(of_kind[grade] for grade in GRADES)])
    counts.append(["all", *(sum(row[n] for row in counts) for n in range(1, len(GRADES) + 2))])
    of_kills = [
        [name, *(of[key] for key in ("kills", "in a save", "lost", "other bits"))] for name, of in kills.items()
    ]
    return PAGE.format(
        number=len(rows),
        grades=table(["Kind", "Inputs", *GRADES], counts),
        silent="\n".join(f"- {row['grade']}: {row['name']}: {row['text']}" for row in rows if row["grade"] in BAD)
        or "None is silent or raw.",
        ways=len(given_up.WAYS),
        give_ups=len(further.GIVE_UPS),
        corruptions=len(corrupted.WAYS),
        changes=len(states.CHANGES),
        carried=len(states.CARRIED),
        moments=len(states.MOMENTS) + len(further.MOMENTS),
        exact=len(further.EXACT_STATES),
        complex=len(further.COMPLEX_STATES),
        turns=len(further.TURNS),
        damages=len(folders.DAMAGES),
        places=len(folders.PLACES) + len(further.WHERE),
        shapes=len(names.SHAPES) + len(further.MODELS),
        situations=len(numbers.SITUATIONS),
        scenarios=len(processes.SCENARIOS) + len(further.SCENARIOS) + len(further.EXACT_SCENARIOS),
        kills=table(["Process", "kills", "of these while it wrote a file", "lost", "mixed"], of_kills),
    )


def written_page() -> str:
    """The page of the results that are there."""
    return page(read(OUT), json.loads(killed.OUT.read_text())["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--find", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write-docs", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.write_docs:
        DOCS.write_text(written_page())
        return
    run(arguments.kind or list(KINDS), arguments.find, bool(arguments.kind), arguments.out)


if __name__ == "__main__":
    main()
