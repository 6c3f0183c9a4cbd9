"""What the runs of one task came to: as data and as a table.

The training curves as a picture: a row a task, the loss against steps and against seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from kfac_fx.demo.tasks import METHODS, Settings
from kfac_fx.demo.training import Point, Run

Runs = Mapping[str, Run]  # by method
NONE = "-"


def mark(runs: Runs) -> tuple[str, Point]:
    """The best loss of a first-order method: (method, where it was seen)."""
    method = min((name for name in runs if name != "kfac"), key=lambda name: runs[name].best.loss)
    return method, runs[method].best


def results_of(run: Run) -> dict[str, Any]:
    """`best_loss` with the `steps` and training `seconds` to it, `final_loss`, `settings`."""
    best = run.best
    return {
        "best_loss": best.loss,
        "steps": best.step,
        "seconds": best.seconds,
        "final_loss": run.final.loss,
        "settings": run.settings,
    }


def results(runs: Runs) -> dict[str, dict[str, Any]]:
    """`results_of` by method. K-FAC's also has `steps_to_adamw_best` and `seconds_to_adamw_best`, None where it did
    not get there."""
    found = {method: results_of(run) for method, run in runs.items()}
    reached = runs["kfac"].reached(runs["adamw"].best.loss)
    found["kfac"]["steps_to_adamw_best"] = reached.step if reached else None
    found["kfac"]["seconds_to_adamw_best"] = reached.seconds if reached else None
    return found


def table(name: str, runs: Runs) -> Table:
    """One line a method, the settings below it; the mark is the best first-order loss. Fits in 80 columns."""
    best_method, best = mark(runs)
    title = Text(f"{name}: the mark is {METHODS[best_method]}'s best loss, {best.loss:#.4g}")
    settings = Text("\n".join(f"{METHODS[method]}: {written(run.settings)}" for method, run in runs.items()))
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


def written(settings: Settings) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in settings.items())


def verdict(name: str, runs: Runs) -> str:
    """One sentence: how far K-FAC needed to get where AdamW got, or else AdamW to get where K-FAC got."""
    kfac, adamw = runs["kfac"], runs["adamw"]
    if reached := kfac.reached(adamw.best.loss):
        return f"{name}: K-FAC reached AdamW's best loss in {amount(reached)}; AdamW took {amount(adamw.best)}."
    passed = adamw.reached(kfac.best.loss) or adamw.best
    missed = f"{name}: K-FAC did not reach AdamW's best loss in {amount(kfac.final)}"
    return f"{missed}; AdamW reached K-FAC's in {amount(passed)}."


def amount(point: Point) -> str:
    return f"{point.step:,} steps and {point.seconds:.1f} s"


# --- plot -------------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"sgd": "#8a8f98", "adamw": "#d9822b", "kfac": "#2f6db3"}
INK, SOFT = "#1c2430", "#5c6675"


def draw(every: Mapping[str, Runs], path: Path) -> None:
    """Write a PNG of the runs of every task. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6 * len(every) + 0.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(every), 2, squeeze=False, sharey="row")
    for (name, runs), (by_step, by_second) in zip(every.items(), rows, strict=True):
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
    """One line a method, a dashed line at the best first-order loss and where K-FAC crosses it."""
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
    scale(axes, runs, along)
    axes.tick_params(colors=SOFT, labelsize=9)
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bfc8")


def scale(axes: Axes, runs: Runs, along: Callable[[Point], float]) -> None:
    """Show where the methods differ: a logarithmic axis for losses that go to zero, else cut off the first descent."""
    lows = [run.best.loss for run in runs.values()]
    starts = [run.points[0].loss for run in runs.values()]
    if max(starts) > 100 * min(lows) > 0:
        axes.set_yscale("log")
        return
    room = max(lows) - min(lows) or 1.0
    top = min(max(starts), max(lows) + 2 * room)
    axes.set_ylim(min(lows) - 0.1 * room, top)
    entries = [along(point) for run in runs.values() for point in run.points if point.step and point.loss <= top]
    axes.set_xlim(left=min(entries) / 1.5)
