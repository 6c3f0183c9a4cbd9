"""A step of K-FAC next to other methods: `python -m benchmarks.device_step --device cuda`, or `--device cpu`.

On a CPU the models are those of `ON_CPU`, in float32 on one thread, and times are CPU time. On a GPU a training loop
does not wait for the device. So the clock is read at both ends of a turn of `TURN` steps, and the host
waits only there. Every method trains a model of its own from the same start. Each round begins with a turn of fused
AdamW under the same backend, on a CPU of AdamW with lists of tensors, and ratios are to AdamW's median step.

*plain* is the median step of turns in which nothing else is due. *statistics*, *bases*, *inverses* and *check* are what
one such step costs more: the difference of a turn with exactly one of them and a plain turn. Turns of the default
`KFAC(net)` are made to hold what they should (`due_only`). Its mean step follows from the intervals that it chose:
*amortised* has a check in every interval, *calm* in every fourth one, as after checks that found nothing to do.
*stated* is what the report says that statistics, bases and checks cost, as a part of a training step, and *measured* is
what they cost as a part of AdamW's. K-FAC with given intervals knows by the number of a turn what it holds (`KINDS`),
and its mean step follows for any intervals (`SCHEDULES`).

The first steps are longer, because statistics, bases and checks come early in them. So the table also has the seconds
that pass before the first step, those of the first one, and those of the first `FIRST` ones. TF32 is allowed for the
products of all methods on a GPU. K-FAC's factors do without it.

*gradient* is one forward and backward, and *factors* are the empirical ones of one batch, from their own forward and
backward. *GB* is the peak of the device's memory after the first step. A model has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import kfac_fx
from benchmarks import program
from benchmarks.device_models import MODELS, ON_CPU, QUICK, Subject
from benchmarks.methods import LR, PEERS, SECOND_ORDER, Method, Step, adamw, installed, ours, sgd
from benchmarks.step_models import Problem
from benchmarks.step_time import INVERSES, NEVER, PLAIN, STATISTICS
from kfac_fx.cli.demo import clock
from kfac_fx.optim.rule import ANY, StepIntervals
from kfac_fx.optim.schedule import MOST_INTERVALS, Schedule
from kfac_fx.recording.emitted import CompiledForward

OUT = Path(__file__).parent / "results" / "device_step.json"
OUT_ON_CPU = OUT.with_name("cpu_step.json")
TURN, FIRST = 8, 20  # steps
EVERY = (2 * TURN, 6 * TURN)  # statistics, inverses: see `KINDS`
SCHEDULES = ((1, 1), (1, 10), (10, 100))
BASES, CHECK = "bases", "check"
# The kinds of turns of a method with given intervals. Statistics without inverses are in two of six, so that the
# comparisons of outputs, which come with the recordings 4, 8, 16, ..., are in fewer than half of them.
KINDS = (INVERSES, PLAIN, STATISTICS, PLAIN, STATISTICS, PLAIN)
WARM = TURN * len(KINDS) - 1  # steps before the first round: what is due falls into its turn, counted from 0 or from 1
OF_DEFAULT = (PLAIN, STATISTICS, BASES, CHECK)
ADAMW, KFAC, GRADIENT, FACTORS, SOAP, MUON = "adamw, fused", "KFAC(net)", "gradient", "factors", "soap", "muon"
USUAL = (SOAP, MUON, KFAC, GRADIENT)  # methods beside AdamW, of those that the model has


# --- the methods that `benchmarks.methods` does not have --------------------------------------------------------------


def muon_optimizers(model: nn.Module, lr: float, others_lr: float, fused: bool) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices of hidden layers, and AdamW for the other parameters. No weight decays."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        embedded = name.startswith(("tokens", "positions"))
        (hidden if parameter.dim() == 2 and not embedded else others).append(parameter)
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=others_lr, weight_decay=0.0, fused=fused),
    ]


def muon(problem: Problem, n: int, m: int, backend: str) -> Step:
    optimizers = muon_optimizers(problem.model, LR, LR, fused=True)
    run = forward_of(problem, backend)

    def step() -> None:
        problem.model.zero_grad()
        problem.backward(run)
        for optimizer in optimizers:
            optimizer.step()

    return step


class Default:
    """Steps of `KFAC(net)`."""

    def __init__(self, problem: Problem, n: int, m: int, backend: str) -> None:
        self.problem = problem
        with problem.autocast():
            self.net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind, backend=backend)
        self.optimizer = kfac_fx.KFAC(self.net)
        self.optimizer.param_groups[0]["lr"] = 1e-3  # short steps, which cost as much

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.problem.backward(self.net)
        self.optimizer.step()

    @property
    def schedule(self) -> Schedule:
        """No public name says or decides what is due in a step."""
        return self.optimizer._step_state.schedule


NO_ROUND_NUMBER = 600_001  # of a step, so that nothing is due early behind it
SINCE_CHECK = 10  # steps; by their number a check changes the damping


def due_only(schedule: Schedule, kind: str) -> None:
    """Let the next step hold what `kind` names, and nothing be due in the `TURN - 1` steps behind it."""
    schedule.counter = now = NO_ROUND_NUMBER
    schedule.last_check, schedule.intervals_apart, schedule.calm = now - SINCE_CHECK, 1, None
    schedule.intervals = StepIntervals(*(now if kind == part else ANY for part in (STATISTICS, BASES, CHECK)))


def gradient(problem: Problem, n: int, m: int, backend: str) -> Step:
    run = forward_of(problem, backend)

    def step() -> None:
        problem.model.zero_grad()
        problem.backward(run)

    return step


def factors(problem: Problem, n: int, m: int, backend: str) -> Step:
    with problem.autocast():
        net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind, backend=backend)

    def step() -> None:
        with problem.autocast():
            net.record((problem.x,), {}, mode="empirical", targets=problem.y)

    return step


def forward_of(problem: Problem, backend: str) -> Callable[..., Any]:
    return problem.model if backend == "eager" else CompiledForward(problem.model, backend, problem.model)


def methods_of(subject: Subject, backend: str, device: torch.device) -> dict[str, Method]:
    """The methods under one backend. Peers run as they are."""
    peers = PEERS if subject.peers else {SOAP: PEERS[SOAP]}
    others = {MUON: Method(partial(muon, backend=backend))} if subject.muon else {}
    others |= installed(peers)[0] if backend == "eager" else {}
    return {
        "sgd": Method(partial(sgd, backend=backend)),
        **others,
        GRADIENT: Method(partial(gradient, backend=backend)),
        FACTORS: Method(partial(factors, backend=backend)),
        "kfac_fx, empirical": Method(partial(ours, backend=backend, estimation_mode="empirical"), parts=SECOND_ORDER),
        "kfac_fx, sampled": Method(partial(ours, backend=backend), parts=SECOND_ORDER),
        KFAC: Method(partial(Default, backend=backend)),
    }


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """A method on its own model, and the seconds of its turns by kind."""

    method: Method
    step: Step
    device: torch.device
    turns: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    GB: float = 0.0  # the peak of all turns

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of the turns of a round, in their order."""
        if isinstance(self.step, Default):
            return OF_DEFAULT
        return KINDS if self.method.parts else (PLAIN,)

    def steps(self, number: int) -> float:
        """Take steps. Returns seconds, from an idle device to an idle device."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = clock(self.device)
        for _ in range(number):
            self.step()
        seconds = clock(self.device) - start
        self.GB = max(self.GB, peak(self.device))
        return seconds

    def take_round(self, measured: bool = True) -> None:
        for kind in self.kinds:
            if isinstance(self.step, Default):
                due_only(self.step.schedule, kind)
            seconds = self.steps(TURN)
            if measured:
                self.seconds.setdefault(kind, []).append(seconds)

    def milliseconds(self) -> dict[str, float]:
        """Medians: of a plain step, and of what one step of another kind costs more."""
        turns = {kind: 1e3 * statistics.median(seconds) for kind, seconds in self.seconds.items()}
        plain = turns[PLAIN]
        costs = {kind: seconds - plain for kind, seconds in turns.items()}
        if INVERSES in costs and STATISTICS in self.method.parts:  # their turns also have statistics
            costs[INVERSES] -= costs[STATISTICS]
        parts = {
            part: cost for part, cost in costs.items() if isinstance(self.step, Default) or part in self.method.parts
        }
        return {**parts, PLAIN: plain / TURN}

    def mean_steps(self, chosen: StepIntervals | None) -> dict[str, float]:
        """Milliseconds of a mean step, by its intervals. chosen: by the default; None for other methods."""
        costs = self.milliseconds()
        if chosen is None:
            by_name = {f"{n},{m}": {STATISTICS: n, INVERSES: m} for n, m in SCHEDULES}
        else:
            calm = chosen._replace(checks=MOST_INTERVALS * chosen.checks)
            each = {"amortised": chosen, "calm": calm}
            by_name = {name: dict(zip((STATISTICS, BASES, CHECK), every, strict=True)) for name, every in each.items()}
        return {
            name: costs[PLAIN] + sum(costs[part] / steps for part, steps in every.items() if part in costs)
            for name, every in by_name.items()
        }


def allocated(device: torch.device) -> float:
    """GB of the tensors on a GPU."""
    return torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


def peak(device: torch.device) -> float:
    """GB at most since the last reset."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


def made(method: Method, make: Callable[[], Problem], device: torch.device) -> Contestant:
    """A method on a model that is made on the device, from the same start for all methods."""
    torch.manual_seed(0)
    with device:
        problem = make()
    return Contestant(method, method.make(problem, *(EVERY if method.parts else (NEVER, NEVER))), device)


def row(method: Method, make: Callable[[], Problem], reference: Contestant, rounds: int) -> dict[str, Any]:
    """Measure a method in rounds with the reference."""
    device = reference.device
    gc.collect()
    before, start = allocated(device), clock(device)
    contestant = made(method, make, device)
    seconds = {"before": clock(device) - start, "first step": contestant.steps(1)}
    contestant.GB = 0.0  # the first step compiles and proves
    seconds[f"first {FIRST} steps"] = seconds["first step"] + contestant.steps(FIRST - 1)
    schedule = contestant.step.schedule if isinstance(contestant.step, Default) else None
    chosen, stated = (None, 0.0) if schedule is None else (schedule.intervals, schedule.overhead)
    if contestant.method.parts:
        contestant.steps(WARM - FIRST)
    reference.seconds.clear()
    for _ in range(rounds):
        reference.take_round()
        contestant.take_round()
    intervals = {} if chosen is None else {"intervals": chosen._asdict(), "stated": stated}
    return {
        "milliseconds": contestant.milliseconds(),
        "adamw milliseconds": reference.milliseconds()[PLAIN],
        **intervals,
        "mean steps": contestant.mean_steps(chosen),
        "GB": contestant.GB - before,
        "seconds": seconds,
    }


def measure(
    subject: Subject,
    rounds: int,
    device: torch.device,
    only: Sequence[str],
    keep: Callable[[Any], None] = lambda _: None,
) -> Any:
    """The rows of AdamW and of these methods by backend. keep: called with what is known after each of them."""

    def make() -> Problem:
        return replace(subject.make(), cast=subject.cast)

    result: dict[str, Any] = {"title": subject.title, "backends": {}, "failures": {}}
    for backend in subject.backends:
        rows = result["backends"][backend] = {}
        fused = Method(partial(adamw, backend=backend, fused=device.type == "cuda"))
        reference = made(fused, make, device)
        reference.steps(FIRST)
        rows[ADAMW if device.type == "cuda" else "adamw"] = row(fused, make, reference, rounds)
        keep(result)
        for name, method in methods_of(subject, backend, device).items():
            if name not in only:
                continue
            try:
                rows[name] = row(method, make, reference, rounds)
            except Exception as error:  # the others go on
                result["failures"][f"{name}, {backend}"] = f"{type(error).__name__}: {error}".splitlines()[0]
            keep(result)
        if SOAP in only and backend == "eager" and (absent := installed({SOAP: PEERS[SOAP]})[1]):
            result["failures"] |= absent
            keep(result)
    return result


# --- showing ----------------------------------------------------------------------------------------------------------


def shown_rows(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a method: milliseconds by kind, steps as multiples of AdamW's, seconds of the first ones, memory.

    A column that is empty in all rows is left out.
    """
    shown = []
    for name, figures in rows.items():
        times, reference = figures["milliseconds"], figures["adamw milliseconds"]
        cells = {kind: f"{times[kind]:.2f}" for kind in (PLAIN, STATISTICS, BASES, INVERSES, CHECK) if kind in times}
        every = figures.get("intervals")
        cells["intervals"] = "" if every is None else ", ".join(map(str, every.values()))
        if name not in (GRADIENT, FACTORS):
            cells["plain / AdamW"] = f"{times[PLAIN] / reference:.2f}"
            if len(times) > 1:
                cells |= {means: f"{mean / reference:.2f}" for means, mean in figures["mean steps"].items()}
        if every is not None and "stated" in figures:
            cells["stated"] = f"{figures['stated']:.2f}"
            cells["measured"] = f"{(figures['mean steps']['amortised'] - times[PLAIN]) / reference:.2f}"
        cells |= {
            f"{phase.removesuffix(' steps')}, s": f"{seconds:.1f}" for phase, seconds in figures["seconds"].items()
        }
        shown.append({"method": name, **cells, "GB": f"{figures['GB']:.2f}" if figures["GB"] else ""})
    means = ("amortised", "calm", *(f"{n},{m}" for n, m in SCHEDULES))
    phases = [phase for phase in shown[0] if phase.endswith(", s")]
    order = (
        "method",
        PLAIN,
        STATISTICS,
        BASES,
        INVERSES,
        CHECK,
        "intervals",
        "plain / AdamW",
        *means,
        "stated",
        "measured",
    )
    order = (*order, *phases, "GB")
    used = [column for column in order if any(cells.get(column) for cells in shown)]
    return [{column: cells.get(column, "") for column in used} for cells in shown]


def factors_over_gradient(rows: Mapping[str, Any]) -> float | None:
    """The time of one batch's factors as a multiple of its gradient's; both beside AdamW."""
    if not {GRADIENT, FACTORS} <= rows.keys():
        return None
    of_factors, of_gradient = (rows[name]["milliseconds"][PLAIN] for name in (FACTORS, GRADIENT))
    return float(of_factors / of_gradient)


def show(results: Mapping[str, Any], console: Console) -> None:
    for result in results.values():
        for backend, rows in result["backends"].items():
            title = f"{result['title']}, {backend}: milliseconds, and multiples of AdamW's step"
            console.print(program.table(title, shown_rows(rows)))
            if (ratio := factors_over_gradient(rows)) is not None:
                console.print(f"factors of one batch take {ratio:.2f} gradients")
        for name, why in result["failures"].items():
            console.print(f"{name}: {why}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted({*MODELS, *ON_CPU}), help="default: the large ones")
    parser.add_argument("--backends", nargs="+", help="default: those of the model")
    parser.add_argument("--methods", nargs="+", default=USUAL, help="beside AdamW")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, help=f"default: {OUT.name} in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="toys, once; written only with --out")
    parser.add_argument("--here", action="store_true", help="measure in this process, and not in one a model")
    chosen = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else list(arguments)
    on_cpu = chosen.device.type == "cpu"
    models, default = (ON_CPU, list(ON_CPU)) if on_cpu else (MODELS, ["gpt2", "resnet50"])
    if not (chosen.quick or chosen.here):
        command = [sys.executable, "-m", "benchmarks.device_step", *given, "--here", "--models"]
        failed = [model for model in chosen.models or default if subprocess.run([*command, model]).returncode]
        if failed:
            sys.exit(f"no complete results of {', '.join(failed)}")
        return
    out = chosen.out or (None if chosen.quick else OUT_ON_CPU if on_cpu else OUT)
    subjects = QUICK if chosen.quick else {name: models[name] for name in chosen.models or default}
    device = torch.cuda.get_device_name(chosen.device) if chosen.device.type == "cuda" else str(chosen.device)
    command = f"python -m benchmarks.device_step --device {chosen.device} --rounds {chosen.rounds}"
    origin = {"command": command, "device": device, **program.versions()}
    before = torch.get_float32_matmul_precision()
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high")
    try:
        for model, subject in subjects.items():
            if chosen.backends is not None:
                subject = replace(subject, backends=tuple(chosen.backends))

            def keep(result: Any, model: str = model) -> None:
                if out is None:
                    return
                record = json.loads(out.read_text()) if out.exists() else {"results": {}}
                earlier = record["results"].get(model, {"backends": {}})["backends"]
                rows = {name: {**earlier.get(name, {}), **new} for name, new in result["backends"].items()}
                record["results"][model] = {**origin, **result, "backends": {**earlier, **rows}}
                out.write_text(json.dumps(record, indent=1) + "\n")

            rounds = 1 if chosen.quick else chosen.rounds
            show({model: measure(subject, rounds, chosen.device, chosen.methods, keep)}, program.console())
    finally:
        torch.set_float32_matmul_precision(before)


if __name__ == "__main__":
    main()
