"""Trainings with hostile numbers: every rule in situations where a step can hardly be right, alone and in pairs.

A training is right if the loss fell.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from benchmarks.hostile.grading import Input, Outcome, graded

STEPS = 40
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Change = Callable[["Job"], None]


@dataclass
class Job:
    """A training: y from x by a network of two layers, with the squared error or as classes."""

    dtype: torch.dtype
    classes: bool = False
    model: nn.Sequential = field(init=False)
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)
    scale: float = 1.0  # of the loss that is sent back
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        self.x = torch.randn(48, 6)
        target = self.x[:, :3] * self.x[:, 3:] + self.x[:, :3]
        self.y = target.argmax(-1) if self.classes else target

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) if self.classes else (outputs - y).square().sum(-1).mean()

    @property
    def last(self) -> nn.Linear:
        layer = self.model[-1]
        assert isinstance(layer, nn.Linear)
        return layer


def classes(job: Job) -> None:
    Job.__init__(job, job.dtype, classes=True)


def targets(size: float) -> Change:
    def change(job: Job) -> None:
        job.y = job.y * size

    return change


def inputs(size: float) -> Change:
    def change(job: Job) -> None:
        job.x = job.x * size

    return change


def last_layer(size: float) -> Change:
    def change(job: Job) -> None:
        with torch.no_grad():
            job.last.weight.mul_(size)

    return change


def saturated(job: Job) -> None:
    classes(job)
    last_layer(1e4)(job)


def loss_times(scale: float) -> Change:
    def change(job: Job) -> None:
        job.scale = scale

    return change


def option(name: str, value: float) -> Change:
    def change(job: Job) -> None:
        job.options[name] = value

    return change


def bad_entry(value: float) -> Change:
    def change(job: Job) -> None:
        job.x[0, 0] = value

    return change


def dead(job: Job) -> None:
    job.model[1] = nn.ReLU()
    layer = job.model[0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.bias.fill_(-1e3)
        job.last.weight.zero_()


def zero_weights(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()


def one_case(job: Job) -> None:
    job.x, job.y = job.x[:1], job.y[:1]


def equal_cases(job: Job) -> None:
    job.x, job.y = job.x[:1].expand(48, 6).clone(), job.y[:1].expand(48, 3).clone()


def weight_of_nan(job: Job) -> None:
    with torch.no_grad():
        job.last.weight[0, 0] = math.nan


SITUATIONS: dict[str, Change] = {
    "usual": lambda job: None,
    "classes": classes,
    "targets of 1e6": targets(1e6),
    "targets of 1e20": targets(1e20),
    "targets of 1e-20": targets(1e-20),
    "inputs of 1e10": inputs(1e10),
    "inputs of 1e20": inputs(1e20),
    "inputs of 1e-20": inputs(1e-20),
    "a last layer of 1e8": last_layer(1e8),
    "a last layer of 1e15": last_layer(1e15),
    "a saturated softmax": saturated,
    "a loss times 1e30": loss_times(1e30),
    "a loss times 1e-8": loss_times(1e-8),
    "a loss times 1e-30": loss_times(1e-30),
    "damping of 1e-30": option("damping", 1e-30),
    "damping of 1e30": option("damping", 1e30),
    "lr of 1e30": option("lr", 1e30),
    "lr of 1e-30": option("lr", 1e-30),
    "weight decay of 1e30": option("weight_decay", 1e30),
    "an input of infinity": bad_entry(math.inf),
    "an input of NaN": bad_entry(math.nan),
    "a weight of NaN": weight_of_nan,
    "dead units": dead,
    "weights of zero": zero_weights,
    "a single case": one_case,
    "equal cases": equal_cases,
}
RULES: dict[str, dict[str, Any]] = {
    "eigen_moments": {"lr": 1.0},
    "adaptive": {"lr": 1.0},
    "regular": {"lr": 0.1, "damping": 0.1},
    "regular, norm_constraint": {"lr": 1.0, "damping": 0.1, "norm_constraint": 0.01},
    "adam": {"lr": 0.02, "damping": 0.1},
    "qmodel": {"lr": None, "damping": 0.1},
    "qmodel_fixedmu": {"lr": None, "damping": 0.1},
}


def options_of(rule: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """The options of the optimizer; None if the rule does not have those of the situation."""
    options = {**RULES[rule], "momentum_type": rule.partition(",")[0], "seed": 0}
    if (rule == "eigen_moments" and "damping" in given) or (options["lr"] is None and "lr" in given):
        return None
    return {**options, **given}


def trained(job: Job, options: dict[str, Any]) -> tuple[float, float]:
    """The loss before and after the training."""
    model, x, y = job.model.to(job.dtype), job.x.to(job.dtype), job.y if job.classes else job.y.to(job.dtype)
    first = value(job)
    net = kfac_fx.compile(model, (x,), loss="categorical" if job.classes else "normal")
    optimizer = kfac_fx.KFAC(net, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (job.loss(net(x), y) * job.scale).backward()
        optimizer.step()
    return first, value(job)


@torch.no_grad()
def value(job: Job) -> float:
    """The loss in float64, of the data as the training has them."""
    targets = job.y if job.classes else job.y.to(job.dtype).double()
    return float(job.loss(copy.deepcopy(job.model).double()(job.x.to(job.dtype).double()), targets))


def of(situations: Sequence[str], dtype: torch.dtype) -> Job:
    job = Job(dtype)
    for situation in situations:
        SITUATIONS[situation](job)
    return job


def run(rule: str, situations: Sequence[str], dtype: str) -> Outcome:
    job = of(situations, DTYPES[dtype])
    options = options_of(rule, job.options)
    assert options is not None, f"{rule} does not have what {situations} change"
    first, last = trained(job, options)
    return Outcome(last < first, f"{first:.3g} -> {last:.3g}")


def has(rule: str, situations: Sequence[str]) -> bool:
    """Whether the rule has what the situations change."""
    return options_of(rule, of(situations, torch.float32).options) is not None


def grade(rule: str, situation: str, dtype: str) -> tuple[str, str] | None:
    """(the grade, what happened); None if the rule does not have what the situation changes."""
    return graded(lambda: run(rule, [situation], dtype)) if has(rule, [situation]) else None


def inputs() -> Iterator[Input]:
    """A part of all, and pairs of situations."""
    rng = random.Random(45)
    singles = [((name,), rule, dtype) for rule in RULES for name in SITUATIONS for dtype in DTYPES if has(rule, [name])]
    chosen: list[tuple[tuple[str, ...], str, str]] = rng.sample(singles, 70)
    names = [name for name in SITUATIONS if name != "usual"]
    while len(chosen) < 100:
        pair, rule, dtype = tuple(rng.sample(names, 2)), rng.choice(list(RULES)), rng.choice(list(DTYPES))
        if has(rule, pair) and (pair, rule, dtype) not in chosen:
            chosen.append((pair, rule, dtype))
    for situations, rule, dtype in chosen:
        yield Input(
            "numbers",
            f"{' and '.join(situations)}: {rule}, {dtype}",
            lambda s=situations, r=rule, d=dtype: run(r, s, d),
        )
