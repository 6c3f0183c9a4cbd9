"""The ten tasks: networks, data, losses and budgets, the same for every method.

A run starts from the network of its seed, sees the batches of its seed, and ends after `steps` steps or `seconds` CPU
seconds. The training loss is measured on a fixed part of the training set, in eval mode.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.convergence import data, networks
from benchmarks.convergence.data import Cases
from benchmarks.convergence.equations import Burgers, Equation, Poisson
from kfac_fx.cli import demo
from kfac_fx.losses import Normal

Batch = tuple[tuple[Tensor, ...], Tensor]
"""The arguments of the network, and the target of the loss."""

CACHE = Path(__file__).parents[2] / "out"  # ignored by git
SMOOTHING = 0.1
SMOOTHED = -(1 - 0.9 * SMOOTHING) * math.log(1 - 0.9 * SMOOTHING) - 9 * SMOOTHING / 10 * math.log(SMOOTHING / 10)
"""The entropy of a smoothed label of ten, which no network's loss is below."""


@dataclass(frozen=True)
class Task(ABC):
    """A problem and its budget.

    Attributes:
        title: a line for the table of tasks.
        steps: the budget of every method. For L-BFGS, the number of evaluations of loss and gradient.
        seconds: a run stops after as many CPU seconds of steps.
        measure_every: the number of steps between two measurements.
        distribution: the `loss` of kfac_fx.compile.
        validation: the name of the number that `validate` returns.
        lr_scale: multiplies the learning rates at which the searches begin.
    """

    name: str
    title: str
    steps: int
    seconds: float
    measure_every: int
    distribution: Any
    validation: str
    lr_scale: float = field(default=1.0, kw_only=True)

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The initial network of all methods."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Endless batches, the same for every method."""

    @abstractmethod
    def loss(self, output: Any, target: Tensor) -> Tensor:
        """A mean over the cases."""

    @abstractmethod
    def measure(self, model: nn.Module, seed: int) -> float:
        """The training loss, above its lower bound if that is not 0."""

    @abstractmethod
    def validate(self, model: nn.Module) -> float:
        """A number about cases that training does not see."""


@dataclass(frozen=True)
class Learning(Task):
    """A training set, whose batches are drawn in shuffled epochs.

    Attributes:
        make: makes an initialized network with torch's global generator.
        cases: the data; read when they are first needed.
        objective: of outputs and targets, a mean over cases.
        measured: the number of training cases that are measured, spread over the set. Validation takes at most twice
            as many.
        floor: a lower bound of the objective, which is subtracted from the measured loss.
    """

    make: Callable[[], nn.Module]
    cases: Callable[[], Cases]
    objective: Callable[[Tensor, Tensor], Tensor]
    batch: int
    measured: int = 1000
    floor: float = 0.0

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.make()

    def batches(self, seed: int) -> Iterator[Batch]:
        generator, cases = torch.Generator().manual_seed(seed), self.cases()
        while True:
            order = torch.randperm(len(cases.inputs), generator=generator)
            for chosen in order.split(self.batch):
                if len(chosen) == self.batch:
                    inputs, targets = cases.of(chosen)
                    yield (inputs,), targets

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return self.objective(output, target)

    def measure(self, model: nn.Module, seed: int) -> float:
        cases = self.cases()
        chosen = torch.linspace(0, len(cases.inputs) - 1, min(self.measured, len(cases.inputs))).long()
        inputs, targets = cases.of(chosen)
        return float(self.objective(evaluated(model, inputs), targets)) - self.floor

    def validate(self, model: nn.Module) -> float:
        cases = self.cases()
        inputs, targets = cases.held_inputs[: 2 * self.measured], cases.held_targets[: 2 * self.measured]
        output = evaluated(model, inputs)
        if self.validation == "accuracy":
            return float((output.argmax(-1) == targets).float().mean())
        return float(self.objective(output, targets)) - self.floor


@dataclass(frozen=True)
class Solving(Task):
    """An equation: all points in every step, and other points for every seed."""

    equation: type[Equation]
    inside: int = 400
    border: int = 100

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.equation()

    def points(self, seed: int) -> tuple[Tensor, Tensor]:
        return self.equation.points(self.inside, self.border, torch.Generator().manual_seed(seed))

    def batches(self, seed: int) -> Iterator[Batch]:
        points, nothing = self.points(seed), torch.zeros(())
        while True:
            yield points, nothing

    def loss(self, output: Any, target: Tensor) -> Tensor:
        inside, border = output
        total: Tensor = inside.square().mean() + border.square().mean()
        return total

    def measure(self, model: nn.Module, seed: int) -> float:
        with torch.no_grad():
            return float(self.loss(model(*self.points(seed)), torch.zeros(())))

    def validate(self, model: nn.Module) -> float:
        assert isinstance(model, Equation)
        return model.error()


@torch.no_grad()
def evaluated(model: nn.Module, inputs: Tensor) -> Tensor:
    model.eval()
    output = torch.cat([model(part) for part in inputs.split(500)])
    model.train()
    return output


# --- losses -----------------------------------------------------------------------------------------------------------


def squared(output: Tensor, target: Tensor) -> Tensor:
    """|target - output|², summed over the outputs of a case."""
    return (output - target).square().sum(-1).mean()


def smoothed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of smoothed labels. With hard labels the cases are separable and the loss has no minimum, so a
    comparison would measure how fast the weights grow."""
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


def of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats a token."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def residuals(outputs: tuple[Tensor, Tensor]) -> list[Normal]:
    """The distributions behind `Solving.loss`."""
    return [Normal(output) for output in outputs]


# --- data and networks ------------------------------------------------------------------------------------------------


@functools.cache
def pixels() -> Cases:
    """Digits as their own targets, [N, 64] from 0 to 1."""
    images, _ = data.digits()
    flat = images.flatten(1).float() / (demo.INTENSITIES - 1)
    return data.divided(flat, flat)


@functools.cache
def images() -> Cases:
    """[N, 8, 8], mean 0 and variance 1."""
    intensities, labels = data.digits()
    x = intensities.float()
    return data.divided((x - x.mean()) / x.std(), labels)


@functools.cache
def intensities() -> Cases:
    """[N, 8, 8] whole numbers from 0 to 16."""
    return data.divided(*data.digits())


LENGTH = 48  # of the texts that the GPTs read


def gpt() -> networks.GPT:
    return networks.GPT(len(data.CHARACTERS), LENGTH, width=48, layers=3, heads=4)


def code() -> Cases:
    return data.windows(data.code(), LENGTH)


def prose() -> Cases:
    return data.windows(data.prose(), LENGTH)


def tuned_gpt(steps: int) -> networks.GPT:
    """The GPT of the task "gpt" after `steps` steps of AdamW; its last block, norm and output layer are to be trained.

    It is trained once and kept in a file, whose name has a digest of everything that the training begins with.
    """
    model, digest = gpt(), hashlib.sha256(repr((steps, torch.__version__)).encode())
    for tensor in (*TASKS["gpt"].model(0).parameters(), code().inputs):
        digest.update(tensor.detach().numpy().tobytes())
    path = CACHE / f"convergence-gpt-{digest.hexdigest()[:12]}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        model.load_state_dict(trained(steps).state_dict())
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), part)
        part.replace(path)  # at once, for another process that reads it
    for module in (model.token, model.position, *model.blocks[:-1]):
        module.requires_grad_(False)
    return model


def trained(steps: int) -> nn.Module:
    """The network of the task "gpt" after AdamW with a linear decay of its learning rate."""
    task = TASKS["gpt"]
    model, lr = task.model(0), 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step, ((inputs,), targets) in zip(range(steps), task.batches(0), strict=False):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return model


# --- the ten ----------------------------------------------------------------------------------------------------------

ALL: tuple[Task, ...] = (
    Learning(
        "autoencoder",
        "64-256-128-64-16 and back with sigmoids, digits, cross-entropy of an image",
        steps=800,
        seconds=90,
        measure_every=20,
        distribution="multi_bernoulli",
        validation="loss",
        make=demo.autoencoder,
        cases=pixels,
        objective=demo.summed_cross_entropy,
        batch=256,
    ),
    Learning(
        "deep",
        "34 tanh layers of 64 without skips and norms, waves",
        steps=600,
        seconds=90,
        measure_every=20,
        distribution="categorical",
        validation="accuracy",
        make=functools.partial(networks.plain, 40, 64, 34, 10),
        cases=data.waves,
        objective=F.cross_entropy,
        batch=256,
        lr_scale=1 / 3,
    ),
    Learning(
        "lstm",
        "LSTM of width 32, the sum of the two marked numbers of 24",
        steps=1500,
        seconds=90,
        measure_every=50,
        distribution="normal",
        validation="loss",
        make=functools.partial(networks.Adder, 32),
        cases=data.sums,
        objective=squared,
        batch=128,
        lr_scale=3.0,
    ),
    Learning(
        "resnet1d",
        "ResNet-8 of 1-D convolutions with batch normalization, waves, smoothed labels",
        steps=400,
        seconds=90,
        measure_every=20,
        distribution="categorical",
        validation="accuracy",
        make=networks.resnet8_1d,
        cases=data.waves,
        objective=smoothed_cross_entropy,
        batch=128,
        floor=SMOOTHED,
    ),
    Learning(
        "gpt",
        "GPT of 3 blocks of width 48, 48 characters of Python's standard library",
        steps=800,
        seconds=150,
        measure_every=40,
        distribution="categorical",
        validation="loss",
        make=gpt,
        cases=code,
        objective=of_tokens,
        batch=16,
        measured=200,
    ),
    Solving(
        "poisson",
        "Poisson's equation in a square, tanh network 3 x 32, 400 points inside and 100 on the border",
        steps=1500,
        seconds=60,
        measure_every=50,
        distribution=residuals,
        validation="error of u",
        equation=Poisson,
    ),
    Solving(
        "burgers",
        "Burgers' equation, viscosity 0.04 / π, tanh network 3 x 32, 400 points inside and 100 on the border",
        steps=1500,
        seconds=60,
        measure_every=50,
        distribution=residuals,
        validation="error of u",
        equation=Burgers,
    ),
    Learning(
        "resnet2d",
        "ResNet-8 of 2-D convolutions with batch normalization, digits, smoothed labels",
        steps=200,
        seconds=60,
        measure_every=10,
        distribution="categorical",
        validation="accuracy",
        make=networks.resnet8_2d,
        cases=images,
        objective=smoothed_cross_entropy,
        batch=128,
        floor=SMOOTHED,
    ),
    Learning(
        "finetune",
        "the last block, norm and output layer of the trained GPT, 48 characters of Python's manual",
        steps=400,
        seconds=60,
        measure_every=20,
        distribution="categorical",
        validation="loss",
        make=functools.partial(tuned_gpt, 500),
        cases=prose,
        objective=of_tokens,
        batch=16,
        measured=200,
    ),
    Learning(
        "classifier",
        "classifier with an embedding, convolutions, group norm and a layer with two uses, digits, smoothed labels",
        steps=400,
        seconds=60,
        measure_every=20,
        distribution="categorical",
        validation="accuracy",
        make=networks.Classifier,
        cases=intensities,
        objective=smoothed_cross_entropy,
        batch=256,
        floor=SMOOTHED,
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in ALL}


def shortened(task: Task, steps: int) -> Task:
    """The task with another budget, also for what is trained before it."""
    short = replace(task, steps=steps, measure_every=1)
    return replace(short, make=functools.partial(tuned_gpt, steps)) if task.name == "finetune" else short  # type: ignore[call-arg]
