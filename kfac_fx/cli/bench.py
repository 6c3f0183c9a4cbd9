"""`kfac-fx bench MODEL`: the time and the memory of a step on the user's own model, beside SGD and AdamW."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import kfac_fx
from kfac_fx.cli.demo import clock
from kfac_fx.cli.problem import (
    DEVICE,
    PROBLEM,
    CommandError,
    Problem,
    Subcommand,
    argument,
    failure,
    part,
    read,
    step_count,
)
from kfac_fx.compiled.report import memory_text
from kfac_fx.passes.torch_private import pytree
from kfac_fx.recording.progress import tracked, working

NEVER = 1_000_000  # steps
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # steps
WARM = 4  # steps before the first round: they make factors, inverses and states, and the first three are checked
CHECKED_EVERY = 5  # steps: the longest interval of checks that the default chooses
LEARNING_RATE = 1e-6  # the learning rate: the models hardly change
PLAIN, STATISTICS, INVERSES = "K-FAC, plain", "K-FAC, with statistics", "K-FAC, with inverses"
CHECKS = "K-FAC, with a check"
PHASE_INTERVALS = {
    PLAIN: (NEVER, NEVER, NEVER),
    STATISTICS: (1, NEVER, NEVER),
    INVERSES: (NEVER, 1, NEVER),
    CHECKS: (NEVER, NEVER, 1),
}


@dataclass
class Contestant:
    """One optimizer on its own copy of the model."""

    call: nn.Module
    optimizer: Optimizer
    problem: Problem
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.optimizer.zero_grad()
        scalar_loss(self.call(*self.problem.args, **self.problem.kwargs)).backward()
        self.optimizer.step()

    def timed_step(self) -> None:
        start = clock(self.device)
        self.step()
        self.seconds.append(clock(self.device) - start)

    @property
    def device(self) -> torch.device:
        return next(self.problem.model.parameters()).device

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @cached_property
    def state(self) -> int:
        """The bytes of the tensors in the optimizer's state."""
        leaves, _ = pytree.tree_flatten(self.optimizer.state_dict())
        storages = {
            leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)
        }
        return sum(storage.nbytes() for storage in storages.values())


def scalar_loss(outputs: object) -> Tensor:
    """The scalar that forward returns, or the mean square of its outputs. The time of a step does not depend on it."""
    leaves = [leaf for leaf in pytree.tree_flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalars = [leaf for leaf in leaves if leaf.dim() == 0]
    if not leaves:
        raise CommandError("no output of the model has a gradient", status=1)
    return scalars[0] if scalars else torch.stack([leaf.abs().square().mean() for leaf in leaves]).sum()


def bench(problem: Problem, rounds: int) -> dict[str, Contestant]:
    """Time `rounds` steps of every method, one of each in a round, in random order. Seconds are those of `clock`.

    Raises:
        CommandError: the model cannot be compiled or trained, or no output has a gradient.
    """
    if not any(parameter.requires_grad for parameter in problem.model.parameters()):
        raise CommandError("the model has no trained parameters")
    problem.model.train()
    contestants = {"SGD": plain_contestant(problem, SGD), "AdamW": plain_contestant(problem, AdamW)}
    try:
        with working("kfac-fx bench: compiling the model", after=0.0):
            for name, intervals in PHASE_INTERVALS.items():
                contestants[name] = contestant_of(problem, *intervals)
    except (ValueError, RuntimeError) as error:
        raise failure(error) from error
    order, shuffle = list(contestants.values()), random.Random(0).shuffle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kfac_fx.LossScaleWarning)  # the loss here is not the one that is trained
        try:
            for contestant in tracked(((1, contestant) for contestant in order), len(order), "first steps", after=0.0):
                for _ in range(WARM):
                    contestant.step()
        except (ValueError, RuntimeError) as error:
            raise failure(error) from error
        for _ in tracked(((1, number) for number in range(rounds)), rounds, "rounds", after=0.0):
            shuffle(order)
            for contestant in order:
                contestant.timed_step()
    return contestants


def contestant_of(problem: Problem, statistics_every: int, inverses_every: int, checks_every: int) -> Contestant:
    """KFAC with these intervals."""
    net = dataclasses.replace(problem, model=copy.deepcopy(problem.model)).compiled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lr=.* is of the size of Adam's")
        optimizer = kfac_fx.KFAC(
            net,
            lr=LEARNING_RATE,
            cov_update_every=statistics_every,
            invert_every=inverses_every,
            damping_adaptation_interval=checks_every,
            estimation_mode="gradients",
        )
    return Contestant(net, optimizer, problem)


def plain_contestant(problem: Problem, kind: type[SGD] | type[AdamW]) -> Contestant:
    model = copy.deepcopy(problem.model)
    return Contestant(model, kind(model.parameters(), lr=LEARNING_RATE), problem)


# --- what the times mean ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Intervals:
    """Intervals of statistics and inverses, and the time of their mean step as a multiple of AdamW's."""

    statistics: int
    inverses: int
    ratio: float

    def __str__(self) -> str:
        intervals = f"cov_update_every={self.statistics}, invert_every={self.inverses}"
        return f"KFAC(net, {intervals}, damping_adaptation_interval={CHECKED_EVERY})"


def schedule(seconds: Mapping[str, float], overhead: float) -> Intervals | None:
    """The shortest intervals whose mean step takes at most 1 + overhead steps of AdamW; None if no interval does.

    The mean step takes B + (S - P) / s + (I - P) / i: P is a plain step, S one with statistics and I one with inverses,
    s and i are the intervals, and B is `checked_step`. Inverses are at most as frequent as statistics. The pair that
    fits and has the smallest product s i is taken.
    """
    base = checked_step(seconds)
    more = {kind: max(seconds[kind] - seconds[PLAIN], 0.0) for kind in (STATISTICS, INVERSES)}
    fitting = [
        Intervals(s, i, ratio)
        for s in INTERVALS
        for i in INTERVALS
        if i >= s and (ratio := (base + more[STATISTICS] / s + more[INVERSES] / i) / seconds["AdamW"]) <= 1 + overhead
    ]
    return min(fitting, key=lambda each: (each.statistics * each.inverses, each.inverses), default=None)


def checked_step(seconds: Mapping[str, float]) -> float:
    """The mean step without statistics and inverses: P + (C - P) / 5 for a plain step P and one with a check C."""
    return seconds[PLAIN] + max(seconds[CHECKS] - seconds[PLAIN], 0.0) / CHECKED_EVERY


def table_of_times(contestants: Mapping[str, Contestant]) -> Table:
    """A row a method: milliseconds, the multiple of AdamW's, and the memory of the optimizer's state."""
    shown = Table(title="one training step", title_justify="left")
    milliseconds = "CPU ms" if contestants["AdamW"].device.type == "cpu" else "ms"
    for column in ("method", milliseconds, "of AdamW", "optimizer state"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    adamw = contestants["AdamW"].median
    for name, contestant in contestants.items():
        ratio = f"{contestant.median / adamw:.2f}"
        shown.add_row(name, f"{1e3 * contestant.median:.1f}", ratio, memory_text(contestant.state))
    return shown


def fitting_schedule(contestants: Mapping[str, Contestant], overhead: float) -> str:
    """The schedule that fits the overhead, as a sentence."""
    seconds = {name: contestant.median for name, contestant in contestants.items()}
    fitting = schedule(seconds, overhead)
    if fitting is None:
        least = checked_step(seconds) / seconds["AdamW"] - 1
        return (
            f"no schedule stays within {overhead:.0%} of AdamW's step: without statistics and inverses, and with a "
            f"check every {CHECKED_EVERY} steps, K-FAC takes {least:.0%} more. "
            "A larger batch makes this share smaller, and --overhead allows more"
        )
    return f"within {overhead:.0%} of AdamW's step: {fitting}, whose mean step takes {fitting.ratio:.2f} of AdamW's"


# --- the command ------------------------------------------------------------------------------------------------------


def print_times(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with working("kfac-fx bench: reading the model", after=0.0):
        problem = read(options).on(options.device)
    contestants = bench(problem, options.rounds)
    console = Console()
    console.print(table_of_times(contestants))
    console.print(fitting_schedule(contestants, options.overhead), soft_wrap=True)


BENCH = Subcommand(
    "bench",
    print_times,
    "the time and memory of a training step of a model, beside SGD and AdamW",
    "Time training steps of a model with SGD, AdamW and K-FAC, on a CPU thread or a GPU, and print a schedule of "
    "statistics and inverses that stays within an overhead.",
    [
        *PROBLEM,
        argument("--rounds", type=step_count, default=10, help="steps of every method; default: %(default)s"),
        argument(
            "--overhead", type=part, default=0.5, help="over a step of AdamW, as 0.5 or 50%%; default: %(default)s"
        ),
        DEVICE,
    ],
    "example: kfac-fx bench timm/resnet18 --input 8,3,96,96 --loss categorical --overhead 0.5",
)
