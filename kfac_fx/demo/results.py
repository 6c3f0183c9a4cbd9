"""What the runs of one task came to: as data and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kfac_fx.demo.settings import METHODS, Settings
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
