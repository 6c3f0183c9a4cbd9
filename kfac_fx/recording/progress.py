"""Progress of work that takes longer than somebody waits: a bar on a terminal, and one line in the log.

    tracked(items, total, "scores of 3 queries")    a loop: a bar with its share
    with working("capturing Net"):                  a block: its present phase, and a clock
        phase("proof")

The log is that of `logging.getLogger("kfac_fx")`, at the level INFO. Bars are on stderr. One is shown at a time: work
inside of other work shows its phase there, or nothing. rich is imported where there is a terminal, because its import
takes time.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PATIENCE = 2.0  # seconds before anything is shown
LOG = logging.getLogger("kfac_fx")
SHOWN = threading.Lock()  # held by the work whose bar is shown
Item = TypeVar("Item")


def terminal(console: Console | None) -> Console | None:
    """The console, if it is a terminal. console: None stands for stderr."""
    if console is None and sys.stderr.isatty():
        from rich.console import Console

        console = Console(file=sys.stderr)
    return console if console is not None and console.is_terminal else None


def tracked(
    items: Iterable[tuple[int, Item]], total: int, what: str, console: Console | None = None, after: float = PATIENCE
) -> Iterator[Item]:
    """Yield the item of every (amount, item), with a progress bar if there is more to do `after` some seconds.

    total: the sum of the amounts; 0 if it is not known. console: where the bar is shown, if it is a terminal; None:
    stderr.
    """
    start, done = time.monotonic(), 0
    bar: Progress | None = None
    try:
        for amount, item in items:
            yield item
            done += amount
            late = bar is None and done != total and time.monotonic() - start >= after
            if late and (screen := terminal(console)) is not None and SHOWN.acquire(blocking=False):
                from rich.progress import Progress

                bar = Progress(console=screen, transient=True)
                bar.start()
                task = bar.add_task(what, total=total or None)
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()
            SHOWN.release()
        log(f"{what}: {done:,} of {total or done:,}", start, after)


def log(text: str, start: float, after: float) -> None:
    if (seconds := time.monotonic() - start) >= after:
        LOG.info("%s, %.0f s", text, seconds)


class Working:
    """A block of work whose end is not known. The bar is started by a timer, because a block cannot look at a clock."""

    def __init__(self, what: str, screen: Console | None) -> None:
        self.what, self.bar, self.shown = what, None, False
        if screen is not None:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            # The bar leaves stdout and stderr alone, which a capture replaces for a while.
            self.bar = Progress(*columns, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False)
            self.bar.add_task(what, total=None)

    def show(self) -> None:
        if self.bar is not None and SHOWN.acquire(blocking=False):
            self.shown = True
            self.bar.start()

    def phase(self, name: str) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], description=f"{self.what}: {name}")

    def end(self) -> None:
        if self.bar is not None and self.shown:
            self.bar.stop()
            SHOWN.release()


WORKING: ContextVar[Working | None] = ContextVar("WORKING", default=None)  # the outermost block


@contextmanager
def working(what: str, console: Console | None = None, after: float = PATIENCE) -> Iterator[None]:
    """Show on a terminal that a block runs, if it takes longer than `after` seconds. console: as of `tracked`."""
    if WORKING.get() is not None:
        yield
        return
    screen = terminal(console)
    start, block = time.monotonic(), Working(what, screen)
    timer = threading.Timer(after, block.show)
    timer.daemon = True
    token = WORKING.set(block)
    if screen is not None:
        timer.start()
    try:
        yield
    finally:
        WORKING.reset(token)
        timer.cancel()
        if screen is not None:
            timer.join()
        block.end()
        log(what, start, after)


def phase(name: str) -> None:
    """The present phase of the block of `working`, if there is one."""
    if (block := WORKING.get()) is not None:
        block.phase(name)
