"""A progress bar for work that takes longer than somebody waits without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

PATIENCE = 2.0  # seconds before a progress bar is shown
Item = TypeVar("Item")


def tracked(
    items: Iterable[tuple[int, Item]], total: int, what: str, console: Console | None = None, after: float = PATIENCE
) -> Iterator[Item]:
    """Yield the item of every (amount, item), with a progress bar if there is more to do `after` some seconds.

    total: the sum of the amounts. console: where the bar is shown, if it is a terminal; None: stderr.
    """
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
