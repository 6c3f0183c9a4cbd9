"""The cost of a K-FAC step, beside other methods: `python -m benchmarks.step_time`.

CPU time of one thread, medians over interleaved rounds in one process, as multiples of the same model's SGD step (under
the same compiler), beside the floor of the cost model (`benchmarks.flops`) and the peers that are installed
(`benchmarks.methods`), as they are: not compiled.

Times are those of the usual steps, after a warm-up. Early steps also compute inverses, see `kfac_fx.optim.schedule`,
and recordings without a forward beside them are compared with the model, more and more rarely, see
`kfac_fx.recording.equivalence`. The time of such a comparison is printed apart.

With `--device cuda` a time is the clock's, from an idle device to an idle device. The results of the CPU are kept in
step_time.json, those of another device or backend beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.alive import AliveBytes
from benchmarks.flops import flops_of
from benchmarks.methods import OURS, PEERS, Method, Step, comparison, first_order, installed, our_methods
from benchmarks.program import console, versions
from benchmarks.step_models import MODELS, QUICK, Make
from kfac_fx.cli.demo import clock

OUT = Path(__file__).parent / "results" / "step_time.json"
NEVER = 1_000_000
WARMUP = 11  # so that inverses are early, or recordings compared, in few of the timed steps: in the 16th, the 21st, ...
CPU = torch.device("cpu")
SCHEDULES = ((1, 10), (10, 100))  # (statistics every, inverses every)
PLAIN, STATISTICS, INVERSES, COMPARISON = "plain", "statistics", "inverses", "comparison of outputs"
EVERY = {PLAIN: (NEVER, NEVER), STATISTICS: (1, NEVER), INVERSES: (NEVER, 1)}
Times = Mapping[tuple[str, str], float]  # by method and kind of step


def steps_of(make: Make, methods: Mapping[str, Method], device: torch.device) -> dict[tuple[str, str], Step]:
    """Steps that differ by one kind of work each, every one of a fresh model from the same start."""
    return {
        (name, kind): seeded(make, method, EVERY[kind], device)
        for name, method in methods.items()
        for kind in ((PLAIN, *method.parts) if method.like is None else (STATISTICS,))
    }


def seeded(make: Make, method: Method, every: tuple[int, int], device: torch.device = CPU) -> Step:
    torch.manual_seed(0)
    return method.make(make().to(device), *every)


def measure(steps: Mapping[Any, Step], rounds: int, device: torch.device) -> dict[Any, float]:
    """Median seconds of each step; one of each in every round, in another order, so that the machine's moods and the
    caches hit all alike."""
    times: dict[Any, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # compilation, first factors and inverses, a CUDA graph's warming up and capture
        for _ in range(WARMUP):
            step()
    order, shuffle = list(steps), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start = clock(device)
            steps[name]()
            times[name].append(clock(device) - start)
    return {name: statistics.median(milliseconds) for name, milliseconds in times.items()}


def mean_step(times: Times, name: str, method: Method, every: tuple[int, int]) -> float:
    """Seconds of a step of a cycle: what is plain, and the parts that are due every so many steps."""
    base = method.like or name
    plain = times[base, PLAIN]
    where = {STATISTICS: name, INVERSES: base}
    due = dict(zip((STATISTICS, INVERSES), every, strict=True))
    return plain + sum((times[where[part], part] - plain) / due[part] for part in method.parts)


def ratios(times: Times, methods: Mapping[str, Method], every: tuple[int, int]) -> dict[str, float]:
    """The mean step of every method as a multiple of SGD's."""
    return {name: mean_step(times, name, run, every) / times["sgd", PLAIN] for name, run in methods.items()}


def peak(make: Make, method: Method) -> float:
    """MB of tensors alive at the peak of a second step with everything due, the model's and the batch's among them."""
    with AliveBytes() as alive:
        step = seeded(make, method, (1, 1))
        step()
        alive.peak = alive.now
        step()
    return alive.peak / 1e6


def run(
    models: Mapping[str, Make], rounds: int, methods: Mapping[str, Method], device: torch.device, memory: bool
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, make in models.items():
        torch.compiler.reset()  # torch.compile takes eight models of a class, and leaves the ninth as it is
        peaks = {method: peak(make, run) for method, run in methods.items()} if memory else {}
        compared = {(OURS, COMPARISON): seeded(make, Method(comparison), EVERY[PLAIN], device)}
        times = measure(steps_of(make, methods, device) | compared, rounds, device)
        flops = flops_of(make)
        floors = {"floor, plain products": False, "floor, symmetric products": True}
        cycles = {
            f"{a},{b}": ratios(times, methods, (a, b)) | {text: flops.floor((a, b), s) for text, s in floors.items()}
            for a, b in SCHEDULES
        }
        milliseconds: dict[str, dict[str, float]] = {method: {} for method in methods}
        for (method, kind), seconds in times.items():
            milliseconds[method][kind] = 1e3 * seconds
        results[name] = {"milliseconds": milliseconds, "MB": peaks, "ratios": cycles}
    return results


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a method: what its steps take, and its memory."""
    return [
        {"method": method, **{every: row[method] for every, row in found["ratios"].items()}}
        | {"MB": f"{found['MB'][method]:,.0f}" if method in found["MB"] else ""}
        for method in next(iter(found["ratios"].values()))
    ]


def show(results: Mapping[str, Any], absent: Mapping[str, str], console: Console) -> None:
    for name, result in results.items():
        table = Table(title=f"{name}: step time as a multiple of SGD's ({result['milliseconds']['sgd'][PLAIN]:.1f} ms)")
        rows = rows_of(result)
        for column in rows[0]:
            table.add_column(column, justify="left" if column == "method" else "right")
        for row in rows:
            table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row.values()))
        console.print(table)
        for method, times in result["milliseconds"].items():
            console.print(
                f"ms a step: {method}: "
                + ", ".join(f"{kind} {milliseconds:.1f}" for kind, milliseconds in times.items())
            )
    for method, why in absent.items():
        console.print(f"{method}: {why}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--device", type=torch.device, default=CPU)
    parser.add_argument("--no-peers", action="store_true", help="as if none was installed")
    parser.add_argument("--out", type=Path, help="default: named after the device and the backend")
    parser.add_argument("--quick", action="store_true", help="a toy, once; nothing is written")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    backend, device = chosen.backend, chosen.device
    others = [name for name, usual in ((device.type, "cpu"), (backend, "eager")) if name != usual]
    peers, absent = ({}, {}) if chosen.no_peers else installed(PEERS)
    methods = {**first_order(backend), **peers, **our_methods(backend)}
    models = QUICK if chosen.quick else {name: MODELS[name] for name in chosen.models}
    results = run(models, 1 if chosen.quick else chosen.rounds, methods, device, memory=not others)
    show(results, absent, console())
    if chosen.quick:
        return
    record = {
        "command": f"python -m benchmarks.step_time --rounds {chosen.rounds} --backend {backend} --device {device}"
        + " --no-peers" * chosen.no_peers,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        **versions(),
        "peers": {str(peer.package): peer.version() for peer in peers.values()},
        "results": results,
    }
    out = chosen.out or OUT.with_stem("_".join([OUT.stem, *others]))
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
