"""A figure for every task: the training loss against steps and against CPU seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.convergence.summary import Entry
from benchmarks.convergence.tasks import Task
from kfac_fx.optim.plot import INK, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "AdamW": "#d9822b",
    "SOAP": "#7a9a3a",
    "Muon": "#b0508f",
    "L-BFGS": "#8a5a3c",
    "KFAC": "#1d4f91",
    "KFAC adaptive": "#4fa3d9",
    "KFAC qmodel": "#5b5bd6",
    "Shampoo": "#3fa58f",
    "asdl": "#c04848",
    "singd": "#e08fa8",
    "SGD": "#8a8f98",
}
SLOWEST = 3  # the axis of CPU seconds ends at this multiple of AdamW's


def draw(task: Task, entries: Mapping[str, Entry], path: Path) -> None:
    """Write a PNG. Needs matplotlib. Lines are medians over seeds, and bands reach from the lowest to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for axes, column, label in ((by_step, 0, "steps"), (by_second, 1, "CPU seconds")):
        for entry in entries.values():
            curve(axes, entry, column)
        axes.set_xlabel(label, color=SOFT)
        style(axes)
    by_step.set_ylabel("training loss", color=SOFT)
    by_step.set_title(task.name, loc="left", color=INK, fontweight="bold")
    limits(by_step, entries)
    if "AdamW" in entries:  # slow methods go on beyond the axis
        longest = max(entry.seconds for entry in entries.values())
        by_second.set_xlim(right=min(longest, SLOWEST * entries["AdamW"].seconds))
    lines, names = by_step.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside right upper", frameon=False, labelcolor=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def curve(axes: Axes, entry: Entry, column: int) -> None:
    """column: 0 for steps, 1 for seconds."""
    measured = list(zip(*(run["points"] for run in entry.runs), strict=False))  # until the first of the runs ends
    along = [statistics.median(point[column] for point in points) for points in measured]
    losses = [[math.nan if point[2] is None else point[2] for point in points] for points in measured]
    color, ours = COLORS[entry.method], entry.method.startswith("KFAC")
    axes.plot(along, [statistics.median(loss) for loss in losses], color, lw=2.2 if ours else 1.3, label=entry.method)
    if len(entry.runs) > 1:
        axes.fill_between(along, list(map(min, losses)), list(map(max, losses)), color=color, alpha=0.15, lw=0)


def limits(axes: Axes, entries: Mapping[str, Entry]) -> None:
    """Show where the methods differ: a logarithmic axis from the lowest loss to the start."""
    from matplotlib.ticker import LogLocator, NullFormatter

    lowest = min(entry.range[0] for entry in entries.values())
    start = statistics.median(run["points"][0][2] for entry in entries.values() for run in entry.runs)
    axes.set_yscale("log")
    axes.set_ylim(lowest * 0.9, start * 1.2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if start > 10 * lowest else (1, 1.5, 2, 3, 4, 5, 6, 8)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def style(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.tick_params(colors=SOFT, labelsize=9, which="both")
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bfc8")
