"""The command line, tables and files that the benchmarks of several models share."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

Subject = TypeVar("Subject")  # what is measured, such as a model
Rows = Sequence[Mapping[str, Any]]
WIDTH = 160  # characters of a line in a file or a pipe, where rich would cut cells off at 80


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version()}


def console() -> Console:
    """The terminal; or lines that are wide enough for every table, if the output goes elsewhere."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=WIDTH)


def table(title: str, rows: Rows) -> Table:
    """A column for every key; the first one names the row."""
    shown = Table(title=title)
    for n, column in enumerate(rows[0]):
        shown.add_column(column, justify="right" if n else "left", no_wrap=not n)
    for row in rows:
        shown.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row.values()))
    return shown


def main(
    arguments: Sequence[str] | None,
    *,
    doc: str | None,
    models: Mapping[str, Subject],
    quick: Mapping[str, Subject],
    rounds: int,
    out: Path,
    run: Callable[[Mapping[str, Subject], int], Any],
    show: Callable[[Any, Console], None],
) -> None:
    """Run, show and write to `out`, whose name is the module's."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=list(models))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--quick", action="store_true", help="a toy, once; nothing is written")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.quick:
        show(run(quick, 1), console())
        return
    results = run({name: models[name] for name in chosen.models}, chosen.rounds)
    show(results, console())
    command = f"python -m benchmarks.{out.stem} --rounds {chosen.rounds}"
    chosen.out.write_text(json.dumps({"command": command, **versions(), "results": results}, indent=1) + "\n")
