"""A step of K-FAC on a GPU, beside other methods: `python -m benchmarks.device_step --device cuda`.

Milliseconds of the clock from an idle device to an idle device. Every method trains a model of its own from the same
start, and takes turns of `TURN` steps with fused AdamW, which shares its backend. A ratio is that of two neighbors.
K-FAC with given intervals takes statistics at every second step of a turn and inverses at the first. So the steps tell
what each costs, and a mean step follows for any intervals (`SCHEDULES`). The default `KFAC(net)` has its own intervals;
its mean is over turns of `DEFAULT_TURN` steps. TF32 is allowed for the products of all methods. K-FAC's factors do
without it.

*gradient* is one forward and backward, and *factors* are the empirical ones of one batch, from their own forward and
backward. *GB* is the peak of the device's memory in a turn, with everything due. A model has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import kfac_fx
from benchmarks import program
from benchmarks.device_models import MODELS, QUICK, Subject
from benchmarks.methods import LR, PEERS, SECOND_ORDER, Method, Step, adamw, installed, ours, sgd
from benchmarks.step_models import Problem
from benchmarks.step_time import INVERSES, NEVER, PLAIN, STATISTICS, seeded
from kfac_fx.demo import clock
from kfac_fx.recording.backends import compiled_model

OUT = Path(__file__).parent / "results" / "device_step.json"
TURN, DEFAULT_TURN = 4, 20
WARM_TURNS = 3
EVERY = (2, TURN)  # statistics, inverses: see `kind_of`
SCHEDULES = ((1, 1), (1, 10), (10, 100))
ADAMW, KFAC, GRADIENT, FACTORS = "adamw, fused", "KFAC(net)", "gradient", "factors"


# --- the methods that `benchmarks.methods` does not have --------------------------------------------------------------


def muon(problem: Problem, n: int, m: int, backend: str) -> Step:
    """torch's own for the matrices of hidden layers, and AdamW for the other parameters."""
    hidden, others = [], []
    for name, parameter in problem.model.named_parameters():
        embedded = name.startswith(("tokens", "positions"))
        (hidden if parameter.dim() == 2 and not embedded else others).append(parameter)
    optimizers = [torch.optim.Muon(hidden, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True)]
    run = forward_of(problem, backend)

    def step() -> None:
        problem.model.zero_grad()
        problem.backward(run)
        for optimizer in optimizers:
            optimizer.step()

    return step


def default(problem: Problem, n: int, m: int, backend: str) -> Step:
    with problem.autocast():
        net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind, backend=backend)
    optimizer = kfac_fx.KFAC(net, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        problem.backward(net)
        optimizer.step()

    return step


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
    return problem.model if backend == "eager" else compiled_model(problem.model, backend)


def methods_of(subject: Subject, backend: str, device: torch.device) -> dict[str, Method]:
    """The methods under one backend. Peers run as they are."""
    peers = PEERS if subject.peers else {"soap": PEERS["soap"]}
    others = {"muon": Method(partial(muon, backend=backend))} if subject.muon else {}
    others |= installed(peers)[0] if backend == "eager" else {}
    return {
        "sgd": Method(partial(sgd, backend=backend)),
        **others,
        GRADIENT: Method(partial(gradient, backend=backend)),
        FACTORS: Method(partial(factors, backend=backend)),
        "kfac_fx, empirical": Method(partial(ours, backend=backend, estimation_mode="empirical"), parts=SECOND_ORDER),
        "kfac_fx, sampled": Method(partial(ours, backend=backend), parts=SECOND_ORDER),
        KFAC: Method(partial(default, backend=backend)),
    }


# --- measuring --------------------------------------------------------------------------------------------------------


def kind_of(number: int) -> str:
    """The kind of a step by its place in a turn."""
    return (INVERSES, PLAIN, STATISTICS, PLAIN)[number % TURN]


@dataclass
class Contestant:
    """A method on its own model, and the seconds of its steps by kind."""

    step: Step
    method: Method
    device: torch.device
    turn: int = TURN
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def take_turn(self, measured: bool) -> None:
        for number in range(self.turn):
            start = clock(self.device)
            self.step()
            kind = kind_of(number) if self.method.parts else PLAIN
            if measured:
                self.seconds.setdefault(kind, []).append(clock(self.device) - start)

    def milliseconds(self) -> dict[str, float]:
        """By kind: a median, or a mean if steps differ without a pattern."""
        average: Callable[[Sequence[float]], float] = statistics.median if self.turn == TURN else statistics.mean
        return {kind: 1e3 * average(seconds) for kind, seconds in self.seconds.items()}

    def mean_step(self, every: tuple[int, int]) -> float:
        """Milliseconds of a step with statistics and inverses at every so many steps."""
        times = self.milliseconds()
        total = before = times[PLAIN]
        for part, interval in zip(SECOND_ORDER, every, strict=True):
            if part in self.method.parts:
                kind = STATISTICS if part == STATISTICS and INVERSES in self.method.parts else INVERSES
                total, before = total + (times[kind] - before) / interval, times[kind]
        return total


def allocated(device: torch.device) -> float:
    """GB of the tensors on a GPU."""
    return torch.cuda.memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


def peak(device: torch.device) -> float:
    """GB at most since the last reset."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


def warmed(name: str, method: Method, make: Callable[[], Problem], device: torch.device) -> Contestant:
    step = seeded(make, method, EVERY if method.parts else (NEVER, NEVER), device)
    contestant = Contestant(step, method, device, DEFAULT_TURN if name == KFAC else TURN)
    for _ in range(WARM_TURNS):
        contestant.take_turn(measured=False)
    return contestant


def row(name: str, method: Method, make: Callable[[], Problem], reference: Contestant, rounds: int) -> dict[str, Any]:
    """Measure a method in turns with the reference."""
    device, start = reference.device, time.perf_counter()
    gc.collect()
    before = allocated(device)
    contestant = warmed(name, method, make, device)
    warm = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    contestant.take_turn(measured=False)
    more = peak(device) - before
    reference.seconds.clear()
    for _ in range(rounds):
        reference.take_turn(measured=True)
        contestant.take_turn(measured=True)
    means = {f"{n},{m}": contestant.mean_step((n, m)) for n, m in SCHEDULES}
    return {
        "milliseconds": contestant.milliseconds(),
        "adamw milliseconds": reference.milliseconds()[PLAIN],
        "mean steps": means,
        "GB": more,
        "seconds until warm": warm,
    }


def measure(
    subject: Subject,
    rounds: int,
    device: torch.device,
    only: Sequence[str] | None = None,
    keep: Callable[[Any], None] = lambda _: None,
) -> Any:
    """The rows of all methods, or of some only, by backend. keep: called with what is known after each of them."""

    def make() -> Problem:
        return replace(subject.make(), cast=subject.cast)

    result: dict[str, Any] = {"title": subject.title, "backends": {}, "failures": {}}
    for backend in subject.backends:
        rows = result["backends"][backend] = {}
        fused = Method(partial(adamw, backend=backend, fused=device.type == "cuda"))
        reference = warmed(ADAMW, fused, make, device)
        rows[ADAMW] = row(ADAMW, fused, make, reference, rounds)
        for name, method in methods_of(subject, backend, device).items():
            if only is not None and name not in only:
                continue
            try:
                rows[name] = row(name, method, make, reference, rounds)
            except Exception as error:  # the others go on
                result["failures"][f"{name}, {backend}"] = f"{type(error).__name__}: {error}".splitlines()[0]
            keep(result)
    return result


# --- showing ----------------------------------------------------------------------------------------------------------


def shown_rows(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a method: milliseconds by kind, mean steps as multiples of fused AdamW's, memory."""
    shown = []
    for name, figures in rows.items():
        times, reference = figures["milliseconds"], figures["adamw milliseconds"]
        each = {kind: f"{times[kind]:.2f}" if kind in times else "" for kind in (PLAIN, STATISTICS, INVERSES)}
        ratios = {every: f"{mean / reference:.2f}" for every, mean in figures["mean steps"].items()}
        if name in (GRADIENT, FACTORS):
            ratios = dict.fromkeys(ratios, "")
        shown.append({"method": name, **each, **ratios, "GB": f"{figures['GB']:.2f}"})
    return shown


def factors_over_gradient(rows: Mapping[str, Any]) -> float | None:
    """The time of one batch's factors as a multiple of its gradient's; both beside AdamW."""
    if not {GRADIENT, FACTORS} <= rows.keys():
        return None
    of_factors, of_gradient = (rows[name]["milliseconds"][PLAIN] for name in (FACTORS, GRADIENT))
    return float(of_factors / of_gradient)


def show(results: Mapping[str, Any], console: Console) -> None:
    for result in results.values():
        for backend, rows in result["backends"].items():
            title = f"{result['title']}, {backend}: milliseconds, and multiples of fused AdamW's"
            console.print(program.table(title, shown_rows(rows)))
            if (ratio := factors_over_gradient(rows)) is not None:
                console.print(f"factors of one batch take {ratio:.2f} gradients")
        for name, why in result["failures"].items():
            console.print(f"{name}: {why}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="+", help="default: those of the model")
    parser.add_argument("--methods", nargs="+", help="beside AdamW; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="toys, once; nothing is written")
    parser.add_argument("--here", action="store_true", help="measure in this process, and not in one a model")
    chosen = parser.parse_args(arguments)
    if not (chosen.quick or chosen.here):
        for model in chosen.models:
            given = sys.argv[1:] if arguments is None else list(arguments)
            subprocess.run([sys.executable, "-m", "benchmarks.device_step", *given, "--here", "--models", model])
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        if chosen.quick:
            show({name: measure(subject, 1, chosen.device) for name, subject in QUICK.items()}, program.console())
            return
        device = torch.cuda.get_device_name(chosen.device) if chosen.device.type == "cuda" else str(chosen.device)
        command = f"python -m benchmarks.device_step --device {chosen.device} --rounds {chosen.rounds}"
        origin = {"command": command, "device": device, **program.versions()}
        for model in chosen.models:
            subject = MODELS[model]
            if chosen.backends is not None:
                subject = replace(subject, backends=tuple(chosen.backends))

            def keep(result: Any, model: str = model) -> None:
                record = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"results": {}}
                earlier = record["results"].get(model, {"backends": {}})["backends"]
                rows = {name: {**earlier.get(name, {}), **new} for name, new in result["backends"].items()}
                record["results"][model] = {**origin, **result, "backends": {**earlier, **rows}}
                chosen.out.write_text(json.dumps(record, indent=1) + "\n")

            show({model: measure(subject, chosen.rounds, chosen.device, chosen.methods, keep)}, program.console())
    finally:
        torch.set_float32_matmul_precision(before)


if __name__ == "__main__":
    main()
