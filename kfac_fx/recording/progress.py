"""A progress bar for what takes long, on terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds before anything is shown


def tracked(
    items: Iterable[tuple[int, Item]], total: int, what: str, console: Console | None = None, after: float = PATIENCE
) -> Iterator[Item]:
    """Yield the second of every (amount, item); what is done of `total` is shown if there is more to do `after` some
    seconds and the console, stderr if None, is a terminal."""
    console = console or Console(file=sys.stderr)
    start, done = time.monotonic(), 0
    bar: Progress | None = None
    try:
        for amount, item in items:
            yield item
            done += amount
            if bar is None and console.is_terminal and done < total and time.monotonic() - start >= after:
                bar = Progress(console=console, transient=True)
                bar.start()
                task = bar.add_task(what, total=total)
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()
