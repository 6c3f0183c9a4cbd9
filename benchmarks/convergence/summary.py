"""Numbers of the runs of a method on a task: medians and ranges over seeds, and comparisons with another method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.runs import TUNED_ON, Record, best_loss, losses
from benchmarks.convergence.tasks import Task


@dataclass(frozen=True)
class Entry:
    """The runs of a method on a task with its chosen learning rate, one for each seed.

    Attributes:
        trials: the losses of the learning rates that the search has tried.
        finished: whether the search is.
    """

    task: Task
    method: str
    lr: float | None
    runs: Sequence[Record]
    trials: Mapping[float | None, float]
    finished: bool

    @property
    def loss(self) -> float:
        """The median of the lowest training losses."""
        return self.median(best_loss)

    @property
    def range(self) -> tuple[float, float]:
        best = [best_loss(run) for run in self.runs]
        return min(best), max(best)

    @property
    def last(self) -> float:
        """The median of the losses at the end."""
        return self.median(lambda run: math.inf if run["points"][-1][2] is None else float(run["points"][-1][2]))

    @property
    def seconds(self) -> float:
        """CPU seconds of a whole run."""
        return self.median(lambda run: float(run["points"][-1][1]))

    @property
    def commits(self) -> set[str]:
        """Those that the runs were made at. Runs of one commit were made on one machine, so their times compare."""
        return {str(run["commit"]) for run in self.runs}

    @property
    def validation(self) -> float:
        return self.median(lambda run: math.inf if run["validation"] is None else float(run["validation"]))

    @property
    def diverged(self) -> int:
        """The number of runs that ended above their first loss, or not finite."""
        return sum(run["points"][-1][2] is None or run["points"][-1][2] > run["points"][0][2] for run in self.runs)

    @property
    def at_edge(self) -> bool:
        """Whether the search has ended with the best learning rate at an end of what it tried."""
        rates = sorted(lr for lr in self.trials if lr is not None)
        return METHODS[self.method].start is not None and self.lr in (rates[0], rates[-1])

    def median(self, number: Callable[[Record], float]) -> float:
        return statistics.median(map(number, self.runs))

    def reached(self, loss: float) -> tuple[float, float]:
        """The medians of steps and CPU seconds until the training loss was at most `loss`; infinite for never."""
        steps, seconds = zip(*(first_reach(run, loss) for run in self.runs), strict=True)
        return statistics.median(steps), statistics.median(seconds)

    def loss_at(self, seconds: float) -> float:
        """The median of the lowest losses within so many CPU seconds."""

        def lowest(run: Record) -> float:
            known = [loss for _, when, loss in run["points"] if loss is not None and when <= seconds]
            return min(known, default=math.inf)

        return self.median(lowest)


def first_reach(run: Record, loss: float) -> tuple[float, float]:
    points = ((step, seconds) for step, seconds, value in run["points"] if value is not None and value <= loss)
    return next(points, (math.inf, math.inf))


def entry(records: Sequence[Record], task: Task, method: str) -> Entry | None:
    """None without a run on the seed of the search."""
    trials, finished, _ = METHODS[method].next_lr(losses(records, task, method, TUNED_ON), task.lr_scale)
    if not trials:
        return None
    lr = min(trials, key=lambda rate: trials[rate])
    same = (task.name, method, lr, task.steps)
    runs = [run for run in records if (run["task"], run["method"], run["lr"], run["steps"]) == same]
    return Entry(task, method, lr, sorted(runs, key=lambda run: int(run["seed"])), trials, finished)


def entries(records: Sequence[Record], task: Task) -> dict[str, Entry]:
    """By method, those that have runs."""
    return {name: found for name in METHODS if (found := entry(records, task, name)) is not None}


def beats(entry: Entry, other: Entry) -> tuple[bool, bool | None]:
    """Whether `entry` reaches the loss of `other` in fewer steps, and in less CPU time, than `other` does; None for
    times of two commits."""
    mine, its = entry.reached(other.loss), other.reached(other.loss)
    return mine[0] < its[0], mine[1] < its[1] if entry.commits == other.commits else None
