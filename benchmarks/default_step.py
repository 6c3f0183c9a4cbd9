"""A step of the default beside AdamW's: `python -m benchmarks.default_step`.

CPU time of one thread, on the tasks of `benchmarks.convergence`. Both methods train a network from the same start. They
take turns of `TURN` steps. A round is a turn of each, so that a noisy machine slows both. The first rounds, in which
checks, statistics and bases are more frequent, are left out. The ratio of a whole step is a median over rounds. That of
a plain step is a quotient of medians over steps, few of which have a check, statistics or new bases.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import program
from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.tasks import TASKS, Task

OUT = Path(__file__).parent / "results" / "default_step.json"
TURN = 20  # steps
WARMUP = 3  # rounds
LRS = {"AdamW": 1e-3, "KFAC": 1.0}
Times = dict[str, list[list[float]]]  # milliseconds of the steps of every turn, by method


def turns(task: Task, method: str, rounds: int) -> Iterator[list[float]]:
    """Milliseconds of the steps of every turn."""
    torch.manual_seed(0)
    training = METHODS[method].make(task, task.model(0), LRS[method], 0)
    schedules, batches = training.schedules(TURN * rounds), task.batches(0)
    for _ in range(rounds):
        of_turn, times = [next(batches) for _ in range(TURN)], []
        for batch in of_turn:
            start = time.process_time()
            training.step(batch)
            for schedule in schedules:
                schedule.step()
            times.append(1e3 * (time.process_time() - start))
        yield times


def measure(task: Task, rounds: int) -> Times:
    running = {method: turns(task, method, rounds + WARMUP) for method in LRS}
    times: Times = {method: [] for method in LRS}
    for number in range(rounds + WARMUP):
        for method, of_method in running.items():
            turn = next(of_method)
            if number >= WARMUP:
                times[method].append(turn)
    return times


def row(name: str, times: Times) -> dict[str, Any]:
    adamw, ours = (times[method] for method in LRS)
    rounds = [sum(mine) / sum(theirs) for mine, theirs in zip(ours, adamw, strict=True)]
    plain = [statistics.median(step for turn in turns for step in turn) for turns in (ours, adamw)]
    return {
        "task": name,
        "adamw": statistics.mean(map(statistics.mean, adamw)),
        "kfac_fx": statistics.mean(map(statistics.mean, ours)),
        "ratio": statistics.median(rounds),
        "of plain steps": plain[0] / plain[1],
    }


def run(tasks: Mapping[str, Task], rounds: int) -> list[dict[str, Any]]:
    return [row(name, measure(task, rounds)) for name, task in tasks.items()]


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    console.print(program.table("CPU milliseconds of a step of the default and of AdamW, and their ratio", results))


def main(arguments: Sequence[str] | None = None) -> None:
    quick = {"poisson": TASKS["poisson"]}
    program.main(arguments, doc=__doc__, models=TASKS, quick=quick, rounds=20, out=OUT, run=run, show=show)


if __name__ == "__main__":
    main()
