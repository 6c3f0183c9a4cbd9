"""`kfac-fx demo`: the reports of two models, and K-FAC without settings beside tuned SGD and AdamW on them.

All methods have the same initial model, batches and measurements. Their results are shown as data, as a table, as a
sentence, and as a picture of the training curves.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import kfac_fx
from kfac_fx.cli.demo_tasks import METHODS, SETTINGS, Settings, Task, method_steps, tasks
from kfac_fx.optim.plot import INK, SOFT, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
QUICK = 20  # --quick divides the steps by this
LONGEST_REPORT = 12  # rows of a report that is printed whole

TrainingStep = Callable[[Tensor, Tensor], None]  # of inputs and targets
LossListener = Callable[[int, float], None]  # of step and loss
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {  # of a model, and settings that are their arguments
    "sgd": lambda model, **settings: torch.optim.SGD(model.parameters(), **settings),
    "adamw": lambda model, **settings: torch.optim.AdamW(model.parameters(), **settings),
    "kfac": kfac_fx.KFAC,
}


@dataclass(frozen=True)
class Point:
    """The loss of the whole training set after `step` steps, which took `seconds`."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """The run of one method on one task. `points` has the initial loss and at least one more."""

    method: str
    settings: Settings
    points: tuple[Point, ...]

    @property
    def best(self) -> Point:
        return min(self.points, key=lambda point: point.loss if math.isfinite(point.loss) else math.inf)

    @property
    def final(self) -> Point:
        return self.points[-1]

    def reached(self, loss: float) -> Point | None:
        """The first point whose loss is at most `loss`; None: it was never reached."""
        return next((point for point in self.points if point.loss <= loss), None)


def train(
    method: str,
    task: Task,
    model: nn.Module,
    settings: Settings,
    *,
    steps: int,
    seed: int,
    net: kfac_fx.CompiledModule | None = None,
    listener: LossListener | None = None,
) -> Run:
    """Train `model` in place; stop early at a loss that is not finite. Only the training steps are timed.

    On the CPU these are seconds of the processor, which other programs do not change.

    Args:
        net: the compiled `model`, if K-FAC trains it and it is compiled already.
        listener: called after every measurement.
    """
    trained = model if method != "kfac" else net or compile_task(task, model)
    step = training_step(task, trained, OPTIMIZERS[method](trained, **settings))
    device = task.inputs.device
    torch.manual_seed(seed)  # of the targets that K-FAC samples
    points, seconds = [Point(0, 0.0, task.measure(model))], 0.0
    batches = task.batches(seed)
    for number in range(1, steps + 1):
        inputs, targets = next(batches)
        started = clock(device)
        step(inputs, targets)
        seconds += clock(device) - started
        if number % task.measure_every == 0 or number == steps:
            points.append(Point(number, seconds, task.measure(model)))
            if listener is not None:
                listener(number, points[-1].loss)
            if not math.isfinite(points[-1].loss):
                break
    return Run(method, settings, tuple(points))


def compile_task(task: Task, model: nn.Module) -> kfac_fx.CompiledModule:
    """Compile the model for the loss of the task."""
    return kfac_fx.compile(model, (task.inputs[: task.batch],), loss=task.distribution)


def training_step(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingStep:
    def step(inputs: Tensor, targets: Tensor) -> None:
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clock(device: torch.device) -> float:
    """CPU seconds of this process; or those of the clock, when another device has done all that it was given."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the matrices are so small that more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- results ----------------------------------------------------------------------------------------------------------


Runs = Mapping[str, Run]  # by method
NONE = "-"


def mark(runs: Runs) -> tuple[str, Point]:
    """The mark: (the first-order method with the best loss, the point of that loss)."""
    method = min((name for name in runs if name != "kfac"), key=lambda name: runs[name].best.loss)
    return method, runs[method].best


def results_of(run: Run) -> dict[str, Any]:
    """The `best_loss`, the `steps` and training `seconds` until then, the `final_loss` and the `settings` of a run."""
    best = run.best
    return {
        "best_loss": best.loss,
        "steps": best.step,
        "seconds": best.seconds,
        "final_loss": run.final.loss,
        "settings": run.settings,
    }


def results(runs: Runs) -> dict[str, dict[str, Any]]:
    """`results_of` by method. K-FAC also has `steps_to_adamw_best` and `seconds_to_adamw_best`; None: never reached."""
    by_method = {method: results_of(run) for method, run in runs.items()}
    reached = runs["kfac"].reached(runs["adamw"].best.loss)
    by_method["kfac"]["steps_to_adamw_best"] = reached.step if reached else None
    by_method["kfac"]["seconds_to_adamw_best"] = reached.seconds if reached else None
    return by_method


def results_table(name: str, runs: Runs) -> Table:
    """A table with one line a method, and the settings below. It fits in 80 columns."""
    best_method, best = mark(runs)
    title = Text(f"{name}: the mark is {METHODS[best_method]}'s best loss, {best.loss:#.4g}")
    settings = Text("\n".join(f"{METHODS[method]}: {settings_text(run.settings)}" for method, run in runs.items()))
    shown = Table(title=title, caption=settings, title_justify="left", caption_justify="left", box=box.SIMPLE)
    shown.title_style, shown.caption_style = "bold", "dim"
    shown.add_column("method")
    for column in ("final loss", "best loss", "steps\nto the mark", "seconds\nto the mark", "ms\na step"):
        shown.add_column(column, justify="right")
    for method, run in runs.items():
        reached, final = run.reached(best.loss), run.final
        shown.add_row(
            METHODS[method],
            f"{final.loss:#.4g}",
            f"{run.best.loss:#.4g}",
            f"{reached.step:,}" if reached else NONE,
            f"{reached.seconds:.1f}" if reached else NONE,
            f"{1000 * final.seconds / final.step:.1f}",
            style="bold green" if method == "kfac" else "",
        )
    return shown


def settings_text(settings: Settings) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in settings.items()) or "no settings"


def verdict(name: str, runs: Runs) -> str:
    """When K-FAC reached AdamW's best loss, and its share of AdamW's steps and time; or when AdamW reached K-FAC's."""
    kfac, adamw = runs["kfac"], runs["adamw"]
    if reached := kfac.reached(adamw.best.loss):
        took = f"{name}: K-FAC reached AdamW's best loss in {amount(reached)}; AdamW took {amount(adamw.best)}."
        if not adamw.best.step:
            return took
        steps, seconds = reached.step / adamw.best.step, reached.seconds / adamw.best.seconds
        return f"{took} These are {steps:.2f} of its steps and {seconds:.2f} of its time."
    passed = adamw.reached(kfac.best.loss) or adamw.best
    missed = f"{name}: K-FAC did not reach AdamW's best loss in {amount(kfac.final)}"
    return f"{missed}; AdamW reached K-FAC's in {amount(passed)}."


def amount(point: Point) -> str:
    return f"{point.step:,} steps and {point.seconds:.1f} s"


# --- plot -----------------------------------------------------------------------------------------------------------

COLORS = {"sgd": "#8a8f98", "adamw": "#d9822b", "kfac": "#2f6db3"}


def draw(by_task: Mapping[str, Runs], path: Path) -> None:
    """Write a PNG: a row for every task, with the loss against steps and against seconds. Needs matplotlib."""
    figure = new_figure(3.6 * len(by_task) + 0.4, width=11)
    rows = figure.subplots(len(by_task), 2, squeeze=False, sharey="row")
    for (name, runs), (by_step, by_second) in zip(by_task.items(), rows, strict=True):
        panel(by_step, runs, lambda point: float(point.step), "steps")
        panel(by_second, runs, lambda point: point.seconds, "seconds of training")
        by_step.set_ylabel("loss of the training set", color=SOFT)
        by_step.set_title(name, loc="left", color=INK, fontweight="bold")
        method, best = mark(runs)
        text, above = f"{METHODS[method]}'s best, {best.loss:#.4g}", {"xytext": (2, 4), "textcoords": "offset points"}
        by_step.annotate(text, (0, best.loss), xycoords=("axes fraction", "data"), color=SOFT, fontsize=8, **above)
    figure.align_ylabels(rows[:, 0])
    lines, names = rows[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper right", ncols=len(lines), frameon=False, labelcolor=INK)
    figure.savefig(path, format="png")


def panel(axes: Axes, runs: Runs, along: Callable[[Point], float], label: str) -> None:
    """A curve for every method, a dashed line at the mark, and points where the methods reach it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    method, best = mark(runs)
    for name, run in runs.items():
        points = [point for point in run.points if point.step and math.isfinite(point.loss)]
        width = 2.2 if name == "kfac" else 1.4
        axes.plot([*map(along, points)], [point.loss for point in points], COLORS[name], lw=width, label=METHODS[name])
    axes.axhline(best.loss, color=SOFT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    for name in (method, "kfac"):
        reached = runs[name].reached(best.loss)
        if reached is not None:
            axes.plot(along(reached), reached.loss, "o", color=COLORS[name], markersize=5, clip_on=False)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label, color=SOFT)
    limit(axes, runs, along)
    style(axes)


def limit(axes: Axes, runs: Runs, along: Callable[[Point], float]) -> None:
    """Show where the methods differ: a logarithmic axis if losses fall far; otherwise, without the first descent."""
    lows = [run.best.loss for run in runs.values()]
    starts = [run.points[0].loss for run in runs.values()]
    if max(starts) > 10 * min(lows) > 0:
        axes.set_yscale("log")
        return
    room = max(lows) - min(lows) or 1.0
    top = min(max(starts), max(lows) + 2 * room)
    axes.set_ylim(min(lows) - 0.1 * room, top)
    entries = [along(point) for run in runs.values() for point in run.points if point.step and point.loss <= top]
    axes.set_xlim(left=min(entries) / 1.5)


# --- the command ------------------------------------------------------------------------------------------------------


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
    model = task.model(options.seed)
    net = compile_task(task, model)
    console.print(net.report if len(net.report.rows) <= LONGEST_REPORT else net.report.headline)
    console.print()
    budget = options.steps or max(1, task.steps // (QUICK if options.quick else 1))
    runs = {}
    with bars(console, options.progress) as shown_bars:
        for method, title in METHODS.items():
            steps = method_steps(method, budget)
            bar = shown_bars.add_task(title, total=steps, loss=float("nan"))
            runs[method] = train(
                method,
                task,
                model if method == "kfac" else task.model(options.seed),
                SETTINGS[task.name][method],
                steps=steps,
                seed=options.seed,
                net=net if method == "kfac" else None,
                listener=lambda step, loss, bar=bar: shown_bars.update(bar, completed=step, loss=loss),  # type: ignore[misc]
            )
    return runs


@contextmanager
def bars(console: Console, shown: bool) -> Iterator[progress.Progress]:
    with progress.Progress(
        progress.TextColumn("{task.description:<6}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("loss {task.fields[loss]:#.4g}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=console,
        disable=not shown,
    ) as shown_bars:
        yield shown_bars
