"""One run, and the runs that are still to be made: every run is a line of a JSON file."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.methods import METHODS, Method
from benchmarks.convergence.tasks import Task

Record = dict[str, Any]
TUNED_ON = 0  # the seed of the search for a learning rate


def train(task: Task, method: Method, lr: float | None, seed: int) -> Record:
    """Train once. Only the steps are timed, in CPU seconds, and not the compilation.

    Returns:
        points: [step, seconds, training loss], null for a loss that is not finite; the first one is the start.
        ended: the part of the budget that was spent, "steps" or "seconds", or "not finite".
    """
    model = task.model(seed)
    begun = time.process_time()
    training = method.make(task, model, lr, seed)
    setup = time.process_time() - begun
    schedules, batches = training.schedules(task.steps), task.batches(seed)
    torch.manual_seed(seed)
    step, seconds, ended = 0, 0.0, ""
    points = [(step, seconds, task.measure(model, seed))]
    while not ended:
        due = points[-1][0] + task.measure_every
        while step < min(due, task.steps):
            batch = next(batches)
            begun = time.process_time()
            step += training.step(batch)
            for schedule in schedules:
                schedule.step()
            seconds += time.process_time() - begun
        points.append((step, seconds, task.measure(model, seed)))
        if not math.isfinite(points[-1][2]):
            ended = "not finite"
        elif step >= task.steps:
            ended = "steps"
        elif seconds >= task.seconds:
            ended = "seconds"
    return {
        "points": [[step, round(seconds, 3), significant(loss)] for step, seconds, loss in points],
        "validation": significant(task.validate(model)),
        "ended": ended,
        "setup": round(setup, 2),
    }


def significant(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def best_loss(record: Record) -> float:
    """The lowest training loss that was measured."""
    return min((loss for _, _, loss in record["points"] if loss is not None), default=math.inf)


def key(record: Record) -> tuple[Any, ...]:
    """Runs with the same key are the same run."""
    return tuple(record[name] for name in ("task", "method", "lr", "seed", "steps"))


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append(record: Record, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def losses(records: Iterable[Record], task: Task, method: str, seed: int) -> dict[float | None, float]:
    """The best loss of every learning rate that was run with the present budget."""
    same = (task.name, method, seed, task.steps)
    return {
        record["lr"]: best_loss(record)
        for record in records
        if (record["task"], record["method"], record["seed"], record["steps"]) == same
    }


def chosen_lr(records: Sequence[Record], task: Task, method: str) -> tuple[bool, float | None]:
    """Whether the search is finished, and the learning rate with the lowest loss so far."""
    used, finished, _ = METHODS[method].next_lr(losses(records, task, method, TUNED_ON), task.lr_scale)
    return finished, min(used, key=lambda lr: used[lr]) if used else None


def todo(records: Sequence[Record], task: Task, method: str, seed: int) -> Iterator[float | None]:
    """The learning rates that are still to be run with a seed, while `records` grows by each of them.

    Ours with a grid of two learning rates runs both with every seed.
    """
    known = METHODS[method]
    if seed == TUNED_ON or known.start is None:
        while True:
            _, finished, lr = known.next_lr(losses(records, task, method, seed), task.lr_scale)
            if finished:
                return
            yield lr
    finished, lr = chosen_lr(records, task, method)
    if finished and lr not in losses(records, task, method, seed):
        yield lr


def origin(command: str) -> Record:
    """The fields of a record that say where it comes from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": command,
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
