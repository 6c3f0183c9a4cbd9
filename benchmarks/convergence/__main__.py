"""Training loss against steps and CPU seconds, ten tasks and every method: `python -m benchmarks.convergence`.

The runs are appended to `benchmarks/results/convergence.jsonl` as they come. A run that is there is skipped, so that
what was killed goes on where it was. `--again` runs the chosen ones anew. Seed 0 also tunes the learning rates; other
seeds wait for it. `--write-docs` makes docs/results.md and its figures of the results that are there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.convergence import docs
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.runs import Record, append, best_loss, key, origin, read, todo, train
from benchmarks.convergence.tasks import TASKS, Task, shortened
from kfac_fx.cli.demo import one_thread

QUICK = "poisson"  # the task that is compiled in the shortest time
OUT = Path(__file__).parents[1] / "results" / "convergence.jsonl"


def queue(
    records: list[Record], tasks: Sequence[Task], methods: Sequence[str], seeds: Sequence[int], lrs: Sequence[float]
) -> Iterator[tuple[Task, str, float | None, int]]:
    """The runs that are not in `records`, which the caller extends. lrs: instead of the search."""
    for seed in seeds:
        for method in methods:
            for task in tasks:
                if task.name not in METHODS[method].tasks:
                    continue
                if lrs:
                    known = {key(record) for record in records}
                    missing = [lr for lr in lrs if (task.name, method, lr, seed, task.steps) not in known]
                    yield from ((task, method, lr, seed) for lr in missing)
                else:
                    yield from ((task, method, lr, seed) for lr in todo(records, task, method, seed))


def quick() -> None:
    """Two steps of every task with AdamW, and of one task with every method. No file is written."""
    for name, method in METHODS.items():
        for task in TASKS.values() if name == "AdamW" else [TASKS[QUICK if QUICK in method.tasks else method.tasks[0]]]:
            reason = method.missing()
            if reason is None:
                record = train(shortened(task, 2), method, method.start or method.lrs[0], 0)
                print(f"{task.name:<12} {name:<15} {record['points'][-1][2]:.5g}", flush=True)
            else:
                print(f"{name}: {reason}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, action="append", help="only this one; may be repeated")
    parser.add_argument("--method", choices=METHODS, action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, action="append", help="only this one; may be repeated")
    parser.add_argument("--lr", type=float, action="append", help="this one instead of the search; may be repeated")
    parser.add_argument("--again", action="store_true", help="run the chosen ones anew")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="two steps a run; nothing is written")
    parser.add_argument("--write-docs", action="store_true", help="write the page of results; nothing is run")
    chosen = parser.parse_args(arguments)
    with one_thread():
        if chosen.quick:
            quick()
            return
        if chosen.write_docs:
            docs.write(read(chosen.out))
            return
        command = shlex.join(
            ["python", "-m", "benchmarks.convergence", *(sys.argv[1:] if arguments is None else arguments)]
        )
        run(chosen, command)


def run(chosen: argparse.Namespace, command: str) -> None:
    tasks = [task for name, task in TASKS.items() if name in (chosen.task or TASKS)]
    seeds, methods = chosen.seed or docs.SEEDS, []
    for name in METHODS:
        if name in (chosen.method or METHODS):
            reason = METHODS[name].missing()
            if reason is None:
                methods.append(name)
            else:
                print(f"{name}: {reason}", flush=True)
    records = read(chosen.out)
    if chosen.again:
        names = [task.name for task in tasks]
        records = [
            record
            for record in records
            if not (record["task"] in names and record["method"] in methods and record["seed"] in seeds)
        ]
        chosen.out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    source = origin(command)
    for task, method, lr, seed in queue(records, tasks, methods, seeds, chosen.lr or ()):
        labels = {"task": task.name, "method": method, "lr": lr, "seed": seed, "steps": task.steps}
        record = labels | train(task, METHODS[method], lr, seed) | source
        append(record, chosen.out)
        records.append(record)
        step, seconds, _ = record["points"][-1]
        validation = f"{task.validation} {record['validation']}"
        print(
            f"{task.name:<12} {method:<15} lr {lr} seed {seed}: best loss {best_loss(record):.5g}, {validation}, "
            f"{step} steps in {seconds:.1f} s, {record['ended']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
