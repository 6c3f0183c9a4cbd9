"""The host seconds that the phases of a step take, measured only while somebody reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("record", "statistics", "inverses", "update")


class PhaseSeconds:
    """Seconds by phase. The phases do not overlap.

    "record" is the forwards of the net that record statistics, "statistics" the averages of the factors, "inverses"
    their decompositions, and "update" the rest of a step, with the checks and the closures that measure the loss. On an
    accelerator these are the seconds in which the host issued the work, not those in which the device did it.

    Attributes:
        readers: how many read the seconds; without any, no clock is read.
        totals: the seconds of every phase since the first reader came.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.totals = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the seconds that the block takes, also if it raises."""
        if not self.readers:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.totals[phase] += time.perf_counter() - start
