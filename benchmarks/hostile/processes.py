"""Two processes of which one does something else: both take the steps of one process, or both raise an error.

Every input forks two processes with a process group of their own. A process that waits for another one longer than
`PATIENCE` is graded as raw.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hostile.grading import RAW, Input, Outcome, Torchs, graded
from benchmarks.hostile.settings import CLASSES, INPUTS, RULES, Setting, Training, drawn

WORLD, CASES, STEPS = 2, 12, 4
HALF = CASES // WORLD
PATIENCE = timedelta(seconds=8)
LONGEST = 60.0  # seconds of an input
MODELS = (
    "two layers",
    "a weight that is used twice",
    "a scale and a spare",
    "weight norm",
    "a frozen base",
    "an embedding",
)


@dataclass
class Scenario:
    """A training of two processes, as steps and as what each process does otherwise.

    Attributes:
        options: of the optimizer, by process.
        ends: the number of cases of the first process, by step.
        broken: the steps in which a number of the last case is not finite.
        before: called before a step, with the number of the process: None for one process.
        begin: called with a new training.
        changed: the setting of the second process.
        alike: whether one process takes the same steps.
    """

    options: Callable[[int | None], dict[str, Any]] = lambda rank: {}
    ends: dict[int, int] = field(default_factory=dict)
    broken: tuple[int, ...] = ()
    before: Callable[[OfTwo, int], None] = lambda training, step: None
    begin: Callable[[OfTwo], None] = lambda training: None
    changed: Callable[[Setting], Setting] = lambda setting: setting
    alike: bool = True


class OfTwo(Training):
    """A training by one process, rank None, or by one of two."""

    def __init__(self, setting: Setting, scenario: Scenario, rank: int | None, wrapped: bool) -> None:
        self.rank, self.scenario = rank, scenario
        super().__init__(scenario.changed(setting) if rank else setting, **scenario.options(rank))
        self.wrapped = wrapped and rank is not None
        scenario.begin(self)
        if self.wrapped:
            self.called = nn.parallel.DistributedDataParallel(self.called)

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(CASES, INPUTS, generator=generator, dtype=torch.float64)
        y = torch.randint(CLASSES, (CASES,), generator=generator)
        if step in self.scenario.broken:
            x[-1] = torch.nan
        return x.to(self.dtype), y

    def step(self, number: int) -> None:
        self.scenario.before(self, number)
        x, y = self.data(number)
        end = self.scenario.ends.get(number, HALF)
        part = slice(None) if self.rank is None else slice(end, None) if self.rank else slice(end)
        self.opt.zero_grad()
        torch.manual_seed(number)
        loss = F.cross_entropy(self.called(x[part]), y[part], reduction="sum") / CASES
        (loss * (1 if self.rank is None else WORLD)).backward()
        if self.rank is not None and not self.wrapped:
            self.average()
        self.opt.step()

    def average(self) -> None:
        for parameter in self.net.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD


# --- scenarios --------------------------------------------------------------------------------------------------------


def only_second(**options: Any) -> Callable[[int | None], dict[str, Any]]:
    return lambda rank: options if rank else {}


def at(step: int, does: Callable[[OfTwo], object], ranks: tuple[int, ...] = (1,)) -> Callable[[OfTwo, int], None]:
    def before(training: OfTwo, number: int) -> None:
        if number == step and training.rank in ranks:
            does(training)

    return before


def more_forward(training: OfTwo) -> None:
    training.net(training.data(70)[0])


def given_up(training: OfTwo) -> None:
    F.cross_entropy(training.called(training.data(70)[0]), training.data(70)[1]).backward()
    training.opt.zero_grad()


def evaluated(training: OfTwo) -> None:
    training.net.eval()
    training.net(training.data(70)[0])
    training.net.train()


def saved(training: OfTwo) -> None:
    training.opt.state_dict()


def fails(training: OfTwo) -> None:
    raise ValueError("the data of this process end")


def killed(training: OfTwo) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def other_weights(training: OfTwo) -> None:
    if training.rank == 1:
        with torch.no_grad():
            for parameter in training.net.parameters():
                parameter.mul_(1.1)


def noted(training: OfTwo) -> None:
    str(training.net.report), training.opt.skipped.item(), training.opt.fallbacks()


def reloaded(training: OfTwo) -> None:
    training.opt.load_state_dict(training.opt.state_dict())


def smaller_lr(training: OfTwo) -> None:
    if training.rank != 1:
        return
    for group in training.opt.param_groups:
        group["lr"] = 0.5 * group["lr"]


def slow(training: OfTwo) -> None:
    time.sleep(1.0)


BOTH = (0, 1)
SCENARIOS: dict[str, Scenario] = {
    "even batches": Scenario(),
    "uneven batches": Scenario(ends={0: 9, 1: 2, 3: 11}),
    "no cases in the first process": Scenario(ends={2: 0}),
    "no cases in the second process": Scenario(ends={1: CASES}),
    "no cases in the second process at first": Scenario(ends={0: CASES}),
    "NaN in the second process": Scenario(broken=(2,)),
    "NaN in the second process at first": Scenario(broken=(0,)),
    "an accuracy in training mode in the second": Scenario(before=at(2, more_forward)),
    "an evaluation in the first": Scenario(before=at(1, evaluated, (0,))),
    "both give a batch up": Scenario(before=at(2, given_up, BOTH)),
    "the second looks at its report": Scenario(before=at(2, noted)),
    "the second is late": Scenario(before=at(2, slow)),
    "both load their own state": Scenario(before=at(2, reloaded, BOTH)),
    "the second loads its own state": Scenario(before=at(2, reloaded)),
    "the second asks for its state": Scenario(before=at(2, saved)),
    "another damping in the second": Scenario(options=only_second(damping=0.7), alike=False),
    "another weight decay in the second": Scenario(options=only_second(weight_decay=0.3), alike=False),
    "another invert_every in the second": Scenario(options=only_second(invert_every=2), alike=False),
    "another decay in the second": Scenario(options=only_second(cov_ema_decay=0.5), alike=False),
    "another mode in the second": Scenario(options=only_second(estimation_mode="gradients"), alike=False),
    "another seed in the second": Scenario(options=only_second(seed=9)),
    "another placement in the second": Scenario(options=only_second(placement="round_robin"), alike=False),
    "another rule in the second": Scenario(changed=lambda s: replace(s, rule="adam"), alike=False),
    "another model in the second": Scenario(changed=lambda s: replace(s, model="experts"), alike=False),
    "a frozen parameter in the second": Scenario(changed=lambda s: replace(s, frozen=True), alike=False),
    "parameters of the second in another order": Scenario(changed=lambda s: replace(s, groups="another order")),
    "two groups in the second": Scenario(changed=lambda s: replace(s, groups="two groups"), alike=False),
    "float32 in the second": Scenario(changed=lambda s: replace(s, dtype="float32"), alike=False),
    "other weights in the second": Scenario(begin=other_weights, alike=False),
    "half of the lr in the second": Scenario(begin=smaller_lr, alike=False),
    "an error in the second": Scenario(before=at(2, fails), alike=False),
    "an error in the first at first": Scenario(before=at(0, fails, (0,)), alike=False),
    "a kill of the second": Scenario(before=at(2, killed), alike=False),
    "a kill of the first at first": Scenario(before=at(0, killed, (0,)), alike=False),
}  # fmt: skip


# --- the processes ----------------------------------------------------------------------------------------------------


def work(rank: int, folder: str, setting: Setting, scenario: Scenario, wrapped: bool) -> None:
    parameters: list[Tensor] = []

    def train() -> Outcome:
        store = dist.FileStore(f"{folder}/store", WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)
        try:
            parameters.append(OfTwo(setting, scenario, rank, wrapped).steps(range(STEPS)).parameters)
        except (RuntimeError, ValueError) as error:
            frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
            if any(frame.f_globals.get("__name__", "").startswith("kfac_fx.") for frame in frames):
                raise
            raise Torchs(str(error)) from error
        return Outcome(True)

    grade, text = graded(train)
    torch.save((grade, text, parameters), f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")


def forked(rank: int, *args: Any) -> int:
    process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)  # threads do not survive a fork
            work(rank, *args)
        finally:
            os._exit(0)
    return process


def ended(processes: list[int]) -> list[int]:
    """Wait for the processes. Returns those that had to be killed."""
    start, waiting = time.monotonic(), list(processes)
    while waiting and time.monotonic() - start < LONGEST:
        waiting = [process for process in waiting if os.waitpid(process, os.WNOHANG)[0] == 0]
        time.sleep(0.02)
    for process in waiting:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return waiting


class Raw(Exception):
    """An error of a process that is not of the library."""


def run(setting: Setting, scenario: Scenario, wrapped: bool) -> Outcome:
    expected = OfTwo(setting, scenario, None, False).steps(range(STEPS)).parameters if scenario.alike else None
    with tempfile.TemporaryDirectory() as folder:
        hung = ended([forked(rank, folder, setting, scenario, wrapped) for rank in range(WORLD)])
        files = [Path(folder) / f"{rank}.pt" for rank in range(WORLD)]
        results = [torch.load(file) if file.exists() else None for file in files]
    return compared(results, expected, bool(hung))


def compared(results: list[Any], expected: Tensor | None, hung: bool) -> Outcome:
    """Raises the error of a process, as the library's or another one."""
    text = " | ".join("killed" if result is None else f"{result[0]} {result[1]}" for result in results)
    grades = [result[0] for result in results if result is not None]
    if hung:
        raise Raw(f"hangs: {text}")
    if RAW in grades:
        raise Raw(text)
    ends = [result is None or not result[2] for result in results]
    if any(ends):
        return Outcome(all(ends), text)
    first, second = (result[2][0] for result in results)
    if first.shape != second.shape or not torch.allclose(first, second, rtol=1e-9, atol=1e-12, equal_nan=True):
        return Outcome(False, f"the processes differ: {text}")
    if expected is None:
        return Outcome(True, "the processes are equal")
    distance = float((first - expected).abs().max())
    return Outcome(distance < 1e-6, f"differs by {distance:.2g} from one process")


def inputs() -> Iterator[Input]:
    rng, rules = random.Random(46), list(RULES)
    for number, name in enumerate([*SCENARIOS, *SCENARIOS]):
        setting = drawn(
            rng, model=rng.choice(MODELS), rule=rules[number % len(rules)], mode="exact", dtype="float64", scaler=False,
            micro_batches=1, closure=False, groups="one", burn_in=0, weight_decay=0.0,
        )  # fmt: skip
        wrapped = number % 2 == 0
        words = "DistributedDataParallel" if wrapped else "averages by hand"
        yield Input(
            "processes", f"{name}: {words}, {setting}", lambda s=setting, n=name, w=wrapped: run(s, SCENARIOS[n], w)
        )
