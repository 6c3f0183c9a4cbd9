"""`kfac-fx demo`: the reports of two models, and K-FAC without settings beside tuned SGD and AdamW on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kfac_fx.demo.tasks import METHODS, SETTINGS, method_steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from kfac_fx.demo.tasks import Task
    from kfac_fx.demo.training import Runs

NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
QUICK = 20  # --quick divides the steps by this
LONGEST_REPORT = 12  # rows of a report that is printed whole


@dataclass(frozen=True)
class DemoOptions:
    """The command line. steps: of the first-order methods; None: those of each task. png, json: files to write."""

    steps: int | None = None
    quick: bool = False
    seed: int = 0
    device: torch.device = torch.device("cpu")
    png: Path | None = None
    json: Path | None = None
    progress: bool = True


def missing_packages() -> list[str]:
    """The packages that the demo needs and that are not installed, by their names for pip."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def run_demo(options: DemoOptions, console: Console) -> dict[str, Runs]:
    """Train, print the results and write the files. Returns the runs by task and method."""
    from kfac_fx.demo.tasks import tasks
    from kfac_fx.demo.training import draw, one_thread, results, results_table, verdict

    by_task: dict[str, Runs] = {}
    for task in tasks(options.device):
        console.rule(f"[bold]{task.name}")
        with one_thread():
            by_task[task.name] = compare(task, options, console)
    for name, runs in by_task.items():
        console.print(results_table(name, runs))
    if options.quick:
        console.print(f"All methods ran, 1/{QUICK} of their steps: too few to compare them. `kfac-fx demo` takes all.")
    else:
        for name, runs in by_task.items():
            console.print(verdict(name, runs), highlight=False)
    if options.json is not None:
        data = {name: results(runs) for name, runs in by_task.items()}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        console.print(f"wrote {options.json}", highlight=False)
    if options.png is not None:
        draw(by_task, options.png)
        console.print(f"wrote {options.png}", highlight=False)
    return by_task


def compare(task: Task, options: DemoOptions, console: Console) -> Runs:
    """Print the report of the task's model and train it with every method from the same start."""
    from kfac_fx.demo.training import compile_task, train

    model = task.model(options.seed)
    net = compile_task(task, model)
    console.print(net.report if len(net.report.rows) <= LONGEST_REPORT else net.report.headline)
    console.print()
    budget = options.steps or max(1, task.steps // (QUICK if options.quick else 1))
    runs = {}
    with bars(console, options.progress) as progress:
        for method, title in METHODS.items():
            steps = method_steps(method, budget)
            bar = progress.add_task(title, total=steps, loss=float("nan"))
            runs[method] = train(
                method,
                task,
                model if method == "kfac" else task.model(options.seed),
                SETTINGS[task.name][method],
                steps=steps,
                seed=options.seed,
                net=net if method == "kfac" else None,
                listener=lambda step, loss, bar=bar: progress.update(bar, completed=step, loss=loss),  # type: ignore[misc]
            )
    return runs


@contextmanager
def bars(console: Console, shown: bool) -> Iterator[Progress]:
    from rich import progress as rich

    with rich.Progress(
        rich.TextColumn("{task.description:<6}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("loss {task.fields[loss]:#.4g}"),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
        console=console,
        disable=not shown,
    ) as progress:
        yield progress
