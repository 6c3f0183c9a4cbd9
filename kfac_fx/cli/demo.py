"""`kfac-fx demo`: K-FAC without settings beside tuned SGD and AdamW, on two small problems.

The problems are hard for first-order methods. One is a deep sigmoid autoencoder of the 1,797 digits of scikit-learn,
8 x 8 pixels (Hinton & Salakhutdinov 2006; Martens & Grosse 2015, section 13). The other is a deep network without skips
and norms. `benchmarks/sweep.py` chose the settings of SGD and AdamW; a test compares them with
`benchmarks/results/sweep.json`. K-FAC has none.

All methods have the same initial model, batches and measurements. The reports of the models are printed, and the
results as a table, as a sentence, as data, and as a picture of the training curves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.cli.problem import DEVICE, CommandError, Subcommand, argument, seed, step_count
from kfac_fx.optim.plot import INK, SOFT, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Settings = dict[str, Any]  # keyword arguments of an optimizer
SETTINGS: dict[str, dict[str, Settings]] = {
    "autoencoder": {
        "sgd": {"lr": 0.03, "momentum": 0.9},
        "adamw": {"lr": 0.01, "weight_decay": 0.01},
        "kfac": {},
    },
    "deep plain network": {
        "sgd": {"lr": 0.01, "momentum": 0.9},
        "adamw": {"lr": 0.001, "weight_decay": 0.0},
        "kfac": {},
    },
}
METHODS = {"sgd": "SGD", "adamw": "AdamW", "kfac": "K-FAC"}  # in the order in which they run; their names in print
FEWER = 5  # K-FAC takes this many times fewer steps than the first-order methods

INTENSITIES = 17  # a pixel counts the dark dots, 0 to 16, of a 4 x 4 patch of the scan
CODE = 16
WIDTHS = (64, 256, 128, 64, CODE)
POINTS, CLASSES = 40, 10  # of a shape
PLAIN_WIDTH, PLAIN_LAYERS = 64, 34

NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
QUICK = 20  # --quick divides the steps by this
LONGEST_REPORT = 12  # rows of a report that is printed whole
COLORS = {"sgd": "#8a8f98", "adamw": "#d9822b", "kfac": "#2f6db3"}
NONE = "-"  # in a table

TrainingStep = Callable[[Tensor, Tensor], None]  # of inputs and targets
LossListener = Callable[[int, float], None]  # of step and loss
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {  # of a model, and settings that are their arguments
    "sgd": lambda model, **settings: torch.optim.SGD(model.parameters(), **settings),
    "adamw": lambda model, **settings: torch.optim.AdamW(model.parameters(), **settings),
    "kfac": kfac_fx.KFAC,
}

# --- the problems -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A training set that is evaluated in one batch, and the model that is trained on it.

    Attributes:
        inputs, targets: all cases, on the device, along dimension 0.
        make: makes an initialized model, with random numbers of torch's global generator.
        loss: of `model(inputs)` and `targets`, a mean over the cases.
        distribution: the name of the loss in `kfac_fx.compile(loss=...)`.
        steps: of the first-order methods.
        batch: the number of cases of a training step.
        measure_every: the number of steps between two measurements of the loss of the whole training set.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    distribution: str
    steps: int
    batch: int = 512
    measure_every: int = 10

    def model(self, seed: int) -> nn.Module:
        """The initial model of all methods."""
        torch.manual_seed(seed)
        return self.make().to(self.inputs.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless shuffled epochs of full batches, the same for every method."""
        generator = torch.Generator().manual_seed(seed)
        cases = len(self.inputs)
        while True:
            order = torch.randperm(cases, generator=generator).to(self.inputs.device)
            for start in range(0, cases - self.batch + 1, self.batch):
                chosen = order[start : start + self.batch]
                yield self.inputs[chosen], self.targets[chosen]

    def measure(self, model: nn.Module) -> float:
        """The loss of the whole training set."""
        model.eval()
        with torch.no_grad():
            loss = self.loss(model(self.inputs), self.targets)
        model.train()
        return float(loss)


def tasks(device: torch.device) -> list[Task]:
    """Both tasks, their data on `device`. Needs scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.as_tensor(digits.data, dtype=torch.float32).to(device) / (INTENSITIES - 1)  # [1797, 64], 0 to 1
    shapes, labels = (tensor.to(device) for tensor in shifted_shapes())
    return [
        Task("autoencoder", pixels, pixels, autoencoder, summed_cross_entropy, "multi_bernoulli", steps=3000),
        Task("deep plain network", shapes, labels, plain_network, F.cross_entropy, "categorical", steps=1000),
    ]


def shifted_shapes(cases: int = 4096) -> tuple[Tensor, Tensor]:
    """Noisy shapes [N, 40] of ten classes and their labels [N], in the manner of MNIST-1D (Greydanus 2020).

    A class is a smooth random shape of 12 points. A case is its shape at a random place of a circle, scaled, and
    disturbed by smooth noise.
    """
    random = partial(torch.randn, generator=(generator := torch.Generator().manual_seed(0)))

    def smooth(rows: int, points: int) -> Tensor:
        return F.avg_pool1d(random(rows, points + 4), 5, stride=1) * 5**0.5

    labels = torch.randint(CLASSES, (cases,), generator=generator)
    shapes = F.pad(smooth(CLASSES, 12)[labels], (0, POINTS - 12))
    starts = torch.randint(POINTS, (cases, 1), generator=generator)
    placed = shapes.gather(1, (torch.arange(POINTS) - starts) % POINTS)
    waves = placed * (1 + 0.4 * random(cases, 1)) + 0.25 * smooth(cases, POINTS)
    return waves / waves.std(), labels


def summed_cross_entropy(logits: Tensor, pixels: Tensor) -> Tensor:
    """Sigmoid cross-entropy, summed over the pixels of an image and averaged over the images."""
    return F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum") / len(logits)


def autoencoder() -> nn.Sequential:
    """64-256-128-64-16 and back, sigmoids between the layers but not on the code."""
    widths = (*WIDTHS, *reversed(WIDTHS[:-1]))
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        linear = nn.Linear(inputs, outputs)
        # Four times Glorot's width, because the slope of a sigmoid at 0 is 1/4. With less, every method first spends
        # hundreds of steps on a plateau where the code carries no information.
        nn.init.xavier_uniform_(linear.weight, gain=4.0)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if outputs != CODE:
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers[:-1])


def plain_network() -> nn.Sequential:
    """34 tanh layers of width 64 without skips and norms, from Glorot's start: [N, 40] -> [N, 10] logits."""
    widths = (POINTS, *(PLAIN_LAYERS - 1) * (PLAIN_WIDTH,), CLASSES)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# --- training ---------------------------------------------------------------------------------------------------------


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


def method_steps(method: str, steps: int) -> int:
    """The steps of a method if the first-order methods take `steps`."""
    return max(1, steps // FEWER) if method == "kfac" else steps


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


def missing_packages() -> list[str]:
    """The packages that the demo needs and that are not installed, by their names for pip."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def run_demo(options: argparse.Namespace) -> None:
    """Train, print the results and write the files. Raises CommandError before it trains, if it could not end."""
    if missing := missing_packages():
        raise CommandError(f"needs {' and '.join(missing)}: pip install 'kfac_fx[demo]'", status=1)
    for path in (options.png, options.json):
        if path is not None:
            refuse_unwritable(path)
    console, by_task = Console(), dict[str, Runs]()
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
    draw(by_task, options.png)
    console.print(f"wrote {options.png}", highlight=False)


def compare(task: Task, options: argparse.Namespace, console: Console) -> Runs:
    """Print the report of the task's model and train it with every method from the same start."""
    model = task.model(options.seed)
    net = compile_task(task, model)
    console.print(net.report if len(net.report.rows) <= LONGEST_REPORT else net.report.headline)
    console.print()
    budget = options.steps or max(1, task.steps // (QUICK if options.quick else 1))
    runs = {}
    with bars(console, not options.no_progress) as shown_bars:
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


def refuse_unwritable(path: Path) -> None:
    """Raises CommandError for a path that no file can be written to, before a program has run for minutes."""
    if path.is_dir():
        raise CommandError(f"{str(path)!r} is a folder: name a file in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"{str(path)!r} may not be written to")


DEMO = Subcommand(
    "demo",
    run_demo,
    "K-FAC beside SGD and AdamW on two small problems, in minutes",
    "Train a deep autoencoder and a deep network without skips and norms with SGD and AdamW, whose learning rates are "
    "tuned, and with K-FAC, which has no settings.",
    [
        [
            argument("--steps", type=step_count, help="training steps of SGD and AdamW; K-FAC takes a fifth of them"),
            argument("--quick", action="store_true", help=f"take 1/{QUICK} of the steps, to see whether it runs"),
        ],
        argument("--seed", type=seed, default=0, help="of the initial models and batches; default: %(default)s"),
        DEVICE,
        argument(
            "--png",
            type=Path,
            metavar="FILE",
            default=Path("kfac-fx-demo.png"),
            help="the figure; default: %(default)s",
        ),
        argument("--json", type=Path, metavar="FILE", help="write the numbers of the tables to this file"),
        argument("--no-progress", action="store_true", help="do not show progress bars"),
    ],
)
