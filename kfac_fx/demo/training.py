"""One training run: the same initial model, batches and measurements for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.demo.tasks import Settings, Task

TrainingStep = Callable[[Tensor, Tensor], None]  # of inputs and targets
LossListener = Callable[[int, float], None]  # of step and loss


@dataclass(frozen=True)
class Point:
    """The loss of the whole training set after `step` steps, which took `seconds`."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """The run of one method on one task. `points` has the initial loss and at least one more."""

    method: str
    settings: Settings
    points: tuple[Point, ...]

    @property
    def best(self) -> Point:
        return min(self.points, key=lambda point: point.loss if math.isfinite(point.loss) else math.inf)

    @property
    def final(self) -> Point:
        return self.points[-1]

    def reached(self, loss: float) -> Point | None:
        """The first point whose loss is at most `loss`; None: it was never reached."""
        return next((point for point in self.points if point.loss <= loss), None)


def train(
    method: str,
    task: Task,
    model: nn.Module,
    settings: Settings,
    *,
    steps: int,
    seed: int,
    net: kfac_fx.CompiledModule | None = None,
    listener: LossListener | None = None,
) -> Run:
    """Train `model` in place; stop early at a loss that is not finite. Only the training steps are timed.

    On the CPU these are seconds of the processor, which other programs do not change.

    Args:
        net: the compiled `model`, if K-FAC trains it and it is compiled already.
        listener: called after every measurement.
    """
    if method == "kfac":
        step = kfac_step(task, net or compile_task(task, model), settings)
    else:
        step = first_order_step(method, task, model, settings)
    device = task.inputs.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    torch.manual_seed(seed)  # of the targets that K-FAC samples
    points, seconds = [Point(0, 0.0, task.measure(model))], 0.0
    batches = task.batches(seed)
    for number in range(1, steps + 1):
        inputs, targets = next(batches)
        synchronize(device)
        started = clock()
        step(inputs, targets)
        synchronize(device)
        seconds += clock() - started
        if number % task.measure_every == 0 or number == steps:
            points.append(Point(number, seconds, task.measure(model)))
            if listener is not None:
                listener(number, points[-1].loss)
            if not math.isfinite(points[-1].loss):
                break
    return Run(method, settings, tuple(points))


def compile_task(task: Task, model: nn.Module) -> kfac_fx.CompiledModule:
    """Compile the model for the loss of the task."""
    return kfac_fx.compile(model, (task.inputs[: task.batch],), loss=task.distribution)


def first_order_step(method: str, task: Task, model: nn.Module, settings: Settings) -> TrainingStep:
    """A step of SGD or AdamW; `settings` are arguments of torch's optimizer."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[method](model.parameters(), **settings)

    def step(inputs: Tensor, targets: Tensor) -> None:
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kfac_step(task: Task, net: kfac_fx.CompiledModule, settings: Settings) -> TrainingStep:
    """A step of K-FAC; `settings` are arguments of `KFAC`, which needs none."""
    optimizer = kfac_fx.KFAC(net, **settings)

    def step(inputs: Tensor, targets: Tensor) -> None:
        task.loss(net(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that the clock sees all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the matrices are so small that more threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
