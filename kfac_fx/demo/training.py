"""One training run: the same start, the same batches and the same looks at the loss for every method."""

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

Step = Callable[[Tensor, Tensor], None]
Listener = Callable[[int, float], None]


@dataclass(frozen=True)
class Point:
    """The loss of the whole training set after `step` steps, which took `seconds`."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """What one method did with one task. `points` begins with the start and has at least one more."""

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
        """The first look at a loss as low as `loss`."""
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
    listener: Listener | None = None,
) -> Run:
    """Train `model` in place.

    Args:
        net: the compiled `model`, where K-FAC trains it and it is compiled already.
        listener: told (step, loss) at every look at the loss.

    The clock runs in the training steps only. Stops early at a loss that is not finite.
    """
    if method == "kfac":
        step = kfac_step(task, net or compiled(task, model), settings)
    else:
        step = first_order_step(method, task, model, settings)
    device = task.inputs.device
    torch.manual_seed(seed)  # what K-FAC samples
    points, seconds = [Point(0, 0.0, task.measure(model))], 0.0
    batches = task.batches(seed)
    for number in range(1, steps + 1):
        inputs, targets = next(batches)
        synchronize(device)
        started = time.perf_counter()
        step(inputs, targets)
        synchronize(device)
        seconds += time.perf_counter() - started
        if number % task.measure_every == 0 or number == steps:
            points.append(Point(number, seconds, task.measure(model)))
            if listener is not None:
                listener(number, points[-1].loss)
            if not math.isfinite(points[-1].loss):
                break
    return Run(method, settings, tuple(points))


def compiled(task: Task, model: nn.Module) -> kfac_fx.CompiledModule:
    """The model as K-FAC trains it."""
    return kfac_fx.compile(model, (task.inputs[: task.batch],), loss=task.distribution)


def first_order_step(method: str, task: Task, model: nn.Module, settings: Settings) -> Step:
    """`settings` are keyword arguments of torch's optimizer."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[method](model.parameters(), **settings)

    def step(inputs: Tensor, targets: Tensor) -> None:
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kfac_step(task: Task, net: kfac_fx.CompiledModule, settings: Settings) -> Step:
    """K-FAC as Martens & Grosse 2015 run it: the exact quadratic model of each batch gives step size and momentum,
    Levenberg-Marquardt adapts the damping."""
    optimizer = kfac_fx.KFAC(
        net, lr=None, momentum=None, momentum_type="qmodel", adapt_damping=True, cov_update_every=1, **settings
    )

    def step(inputs: Tensor, targets: Tensor) -> None:
        loss = task.loss(net(inputs), targets)
        loss.backward()
        optimizer.step(lambda: task.loss(net(inputs), targets), loss=loss)  # asked again at the new parameters
        optimizer.zero_grad()

    return step


def synchronize(device: torch.device) -> None:
    """Let the clock see the end of what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """The matrices are small: on a processor, more threads wait for each other longer than they work, and much longer
    on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
