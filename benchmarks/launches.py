"""Launches of a step on a GPU, counted without one: `python -m benchmarks.launches`.

The models are those of `benchmarks.device_step`, at their full sizes and batches. Everything is counted by shapes
(`benchmarks.launch_counter`): forward and backward, a step of fused AdamW, and the kinds of steps of `KFAC(net)`. No
figure is extrapolated from smaller models.

Milliseconds are predicted and not measured. An operation takes the longest of three times: its bytes, its flops, and
the time from one kernel to the next. A step takes the sum over its operations, or the time in which the host issues
them if that is longer. The mean step has the intervals that the library chooses on an accelerator, without early steps
and comparisons of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor, nn

import kfac_fx
from benchmarks import program
from benchmarks.device_models import MODELS, QUICK, Subject
from benchmarks.launch_counter import Counting, Counts, fake_accelerator
from benchmarks.methods import LR
from benchmarks.step_models import Problem
from kfac_fx.optim.rule import StepIntervals
from kfac_fx.optim.schedule import Schedule, StepCosts

OUT = Path(__file__).parent / "results" / "launches.json"
GRADIENT, ADAMW = "forward and backward", "AdamW, fused"
PLAIN, STATISTICS, BASES, CHECK = "plain", "statistics", "new bases", "check"
APART = StepIntervals(statistics=7, inverses=11, checks=13)  # so that some step has one of them alone
STEPS = 14
SHARES = {STATISTICS: "statistics", BASES: "inverses", CHECK: "checks"}
Sections = dict[str, Counts]


def rows_of(problem: Problem) -> dict[str, float]:
    """The number of rows in one forward of the batch, by parameter."""
    rows: dict[str, float] = {}

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        features = output.shape[-1 if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding) else 1]
        for name, parameter in problem.model.named_parameters(remove_duplicate=False):
            if any(parameter is direct for direct in module.parameters(recurse=False)):
                rows[name] = output.numel() / features

    handles = [
        module.register_forward_hook(hook)
        for module in problem.model.modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    with problem.autocast(), torch.no_grad():
        problem.model(problem.x)
    for handle in handles:
        handle.remove()
    return rows


@contextmanager
def true_rows(problem: Problem) -> Iterator[None]:
    """The library reads the numbers of rows from tensors, which have no numbers here."""
    rows, costs = rows_of(problem), StepCosts.of

    def of(program: Any, groups: Any, read: Mapping[Any, float], *args: Any, **kwargs: Any) -> StepCosts:
        return costs(program, groups, {key: rows[key[0]] for key in read}, *args, **kwargs)

    with mock.patch.object(StepCosts, "of", of):
        yield


def kind_of(schedule: Schedule) -> str:
    """The parts that are due in the next step, joined."""
    due = {STATISTICS: schedule.recording, BASES: schedule.inverting, CHECK: schedule.checking}
    return ", ".join(kind for kind, is_due in due.items() if is_due) or PLAIN


def adamw(problem: Problem) -> Sections:
    """Counts of the second step. The first one makes the state."""
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=LR, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        with Counting(with_autograd=True) as gradient:
            problem.backward()
        with Counting() as step:
            optimizer.step()
    return {GRADIENT: gradient.counts, ADAMW: step.counts}


def ours(problem: Problem) -> tuple[dict[str, Sections], StepIntervals, float]:
    """By the kind of step: both of its sections. With the chosen intervals, and what they cost by the cost model."""
    with problem.autocast():  # the proof needs numbers
        net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind, verify=False)
    optimizer = kfac_fx.KFAC(net)
    schedule = optimizer._step_state.schedule
    kinds: dict[str, Sections] = {}
    for number in range(STEPS):
        if number == 1:
            chosen, overhead, schedule.intervals = schedule.intervals, schedule.overhead, APART
        kind = kind_of(schedule)
        optimizer.zero_grad()
        with Counting(with_autograd=True) as gradient:
            problem.backward(net)
        with Counting() as step:
            optimizer.step()
        kinds.setdefault(kind, {GRADIENT: gradient.counts, "step()": step.counts})
    return {kind: kinds[kind] for kind in (PLAIN, *SHARES)}, chosen, overhead


def measure(subject: Subject) -> dict[str, Any]:
    with fake_accelerator(replace(subject.make(), cast=subject.cast)) as problem:
        parameters = list(problem.model.parameters())
        size = sum(parameter.numel() for parameter in parameters)
        first = adamw(problem)
        problem.model.zero_grad()
        with true_rows(problem):
            kinds, intervals, overhead = ours(problem)
    milliseconds = {ADAMW: 1e3 * (first[GRADIENT] + first[ADAMW]).seconds}
    milliseconds |= {kind: 1e3 * sum(sections.values(), Counts()).seconds for kind, sections in kinds.items()}
    plain = milliseconds[PLAIN]
    each = ((milliseconds[kind] - plain) / getattr(intervals, name) for kind, name in SHARES.items())
    sections = {
        GRADIENT: first[GRADIENT],
        f"{ADAMW}: step()": first[ADAMW],
        f"{PLAIN}: step()": kinds[PLAIN]["step()"],
        f"{STATISTICS}: {GRADIENT}": kinds[STATISTICS][GRADIENT],
        **{f"{kind}: step()": kinds[kind]["step()"] for kind in SHARES},
    }
    return {
        "title": subject.title,
        "parameters": size,
        "tensors": len(parameters),
        "intervals": intervals._asdict(),
        "overhead": overhead,
        "sections": {name: counts.record() for name, counts in sections.items()},
        "milliseconds": {**milliseconds, "mean": plain + sum(each)},
    }


def run(models: Mapping[str, Subject], rounds: int) -> dict[str, Any]:
    """rounds: not needed, since counts do not vary."""
    return {name: measure(subject) for name, subject in models.items()}


# --- showing ----------------------------------------------------------------------------------------------------------


def count_rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row a section. Elements and operands are multiples of the number of parameters."""
    rows = []
    for name, counts in result["sections"].items():
        flops = {precision: f"{count / 1e12:.2f}" for precision, count in counts["flops"].items() if count}
        rows.append(
            {
                "part": name,
                "kernels": f"{counts['kernels']:,}",
                "waits": f"{counts['waits']:,}",
                "elements / P": f"{counts['elements'] / result['parameters']:.1f}",
                "operands / P": f"{counts['operands'] / result['parameters']:.1f}",
                "Tflop of products": ", ".join(f"{tera} {precision}" for precision, tera in flops.items()),
                "decompositions": ", ".join(
                    f"{number} {name}" for name, number in by_kind(counts["decompositions"]).items()
                ),
                "Tflop of decompositions": f"{counts['decomposition_flops'] / 1e12:.2f}"
                if counts["decompositions"]
                else "",
                "device ms": f"{1e3 * counts['device']:.2f}",
                "host ms": f"{1e3 * counts['host']:.2f}",
            }
        )
    return rows


def by_kind(decompositions: Mapping[str, int]) -> dict[str, int]:
    """Numbers of matrices of all widths."""
    totals: dict[str, int] = {}
    for key, number in decompositions.items():
        kind = key.split()[0]
        totals[kind] = totals.get(kind, 0) + number
    return totals


def step_rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row a kind of step, with its interval and its time as a multiple of that with AdamW."""
    times, every = result["milliseconds"], result["intervals"]
    return [
        {
            "step": kind,
            "every": f"{every[SHARES[kind]]}" if kind in SHARES else "",
            "ms": f"{time:.1f}",
            "of AdamW's": f"{time / times[ADAMW]:.2f}",
        }
        for kind, time in times.items()
    ]


def show(results: Mapping[str, Any], console: Console) -> None:
    for result in results.values():
        title = f"{result['title']}: P = {result['parameters']:,} in {result['tensors']} tensors"
        console.print(program.table(f"{title}; counted", count_rows(result)))
        console.print(program.table(f"{title}; predicted for an H100", step_rows(result)))


def main(arguments: list[str] | None = None) -> None:
    models = {name: MODELS[name] for name in ("gpt2", "resnet50")}
    quick = {"gpt2": QUICK["gpt2"]}
    program.main(arguments, doc=__doc__, models=models, quick=quick, rounds=1, out=OUT, run=run, show=show)


if __name__ == "__main__":
    main()
