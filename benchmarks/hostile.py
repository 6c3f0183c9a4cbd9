"""Trainings with hostile numbers: every rule in situations where a step can hardly be right, graded.

    python -m benchmarks.hostile                 all, as a table
    python -m benchmarks.hostile --rule regular  one rule

A training is graded by what its user sees:

    right      the loss fell, and no message said anything
    warned     a warning named what happened
    refused    an error of the library
    silent     the loss did not fall, and no message said so
    raw        an error of something else
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
import kfac_fx.passes.errors

STEPS = 40
RIGHT, WARNED, REFUSED, SILENT, RAW = "right", "warned", "refused", "silent", "raw"
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
    "grafted": {"lr": 0.02, "damping": 0.1},
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


def grade(rule: str, situation: str, dtype: str) -> tuple[str, str] | None:
    """(the grade, what happened); None if the rule does not have what the situation changes."""
    job = Job(DTYPES[dtype])
    SITUATIONS[situation](job)
    options = options_of(rule, job.options)
    if options is None:
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            first, last = trained(job, options)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return (REFUSED if isinstance(error, (*kfac_fx.passes.errors.PUBLIC, ValueError)) else RAW), text
    change = f"{first:.3g} -> {last:.3g}"
    told = [str(entry.message).splitlines()[0] for entry in caught if issubclass(entry.category, UserWarning)]
    if told:
        return WARNED, f"{change}; {told[0]}"
    return (RIGHT if last < first else SILENT), change


def all_grades(rules: Iterable[str], dtypes: Iterable[str]) -> Iterator[tuple[str, str, str, str, str]]:
    for rule in rules:
        for dtype in dtypes:
            for situation in SITUATIONS:
                graded = grade(rule, situation, dtype)
                if graded is not None:
                    yield rule, dtype, situation, *graded


def main() -> None:
    parser = argparse.ArgumentParser(description="Grade trainings with hostile numbers.")
    parser.add_argument("--rule", choices=RULES, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    arguments = parser.parse_args()
    tally: Counter[str] = Counter()
    for rule, dtype, situation, of_training, happened in all_grades(arguments.rule or RULES, arguments.dtype or DTYPES):
        tally[of_training] += 1
        print(f"{rule:26}{dtype:10}{situation:24}{of_training:9}{happened[:150]}", flush=True)
    print(", ".join(f"{number} {name}" for name, number in tally.most_common()))


if __name__ == "__main__":
    main()
