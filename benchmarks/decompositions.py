"""Ways to invert and to diagonalize stacks of covariance matrices: `python -m benchmarks.decompositions --device cuda`.

C = X Xᵀ/d is a float32 matrix of mean eigenvalue 1. The squares of the columns of X decay as 1, 1/2, 1/3, ... Inverses
are of C + λ I with λ = 0.01. Cholesky is the library's and eigh is torch's: of a batch, of one matrix after another
(loop), and on the host with copies both ways. "Cholesky, torch" ends with `torch.cholesky_inverse`, as the library does
on a CPU. Newton-Schulz is X ← X (2 I - A X), from I/|A|. Its number of iterations is computed from the condition.
Orthogonal iteration is the library's, from the eigenvectors of another matrix: C is `MOVED` of the way from that one to
a third. *accepted* is the part of a stack that the library accepts. Where the library has no such function, the method
is left out.

A time is a median of three runs after a warm-up. No run follows when those of a cell have taken `LONG` seconds, so
that a run of more than a second is the only one. A stack of more than `ROOM` numbers is left out. So is a run that is
estimated to take more than `LONG` seconds: the estimate is the least that the smaller cells of its method say, if time
grows as stack times width³. After `--seconds` nothing more is measured.

The residual is the largest of a stack: |X (C + λ I) - I|/√d, or |Q Λ Qᵀ - C|/|C| for eigenvectors. A GPU is timed by
the clock, and the host has all its threads. With `--device cpu` a time is that of one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import program
from kfac_fx.cli.demo import clock
from kfac_fx.linalg import matrices
from kfac_fx.linalg.matrices import cholesky, damp, full_precision, invert_from_cholesky

OUT = Path(__file__).parent / "results" / "decompositions.json"
WIDTHS, STACKS = (64, 128, 256, 512, 1024, 2048, 4096), (1, 4, 16, 64)
DAMPING = 0.01
RESIDUAL = 1e-3  # of Newton-Schulz in exact arithmetic; rounding may leave more
ROOM = 2**28  # numbers of a stack, a GiB; the methods hold up to six of them
LONG = 1.0  # seconds: of one run, and of all runs of a cell
MOVED = 0.05  # of a moving average, by one update with a decay of 0.95
Decomposed = Tensor | Sequence[Tensor]  # the inverse; or eigenvalues, eigenvectors, and which of them are accepted


class Case(NamedTuple):
    covariance: Tensor  # [m, d, d]
    damped: Tensor
    iterations: int  # of Newton-Schulz
    basis: Tensor | None = None  # eigenvectors of a matrix nearby, by descending eigenvalues, [m, d, d]


def covariances(width: int, stack: int, device: torch.device) -> Tensor:
    """C, [m, d, d]."""
    columns = torch.randn(stack, width, width, device=device) * torch.arange(1, width + 1, device=device).rsqrt()
    covariance = columns @ columns.mT / width
    return covariance / covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]


def case(width: int, stack: int, device: torch.device, with_basis: bool = False) -> Case:
    covariance, basis = covariances(width, stack, device), None
    if with_basis:
        basis = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
        covariance = torch.lerp(covariance, covariances(width, stack, device), MOVED)
    damped = damp(covariance, torch.full((stack,), DAMPING, device=device), diagonal=False)
    count = iterations(float(torch.linalg.matrix_norm(damped).max()) / DAMPING)
    return Case(covariance, damped, count, basis)


def iterations(condition: float) -> int:
    """The least k with (1 - 1/condition)^(2^k) <= RESIDUAL: every iteration squares I - A X."""
    return max(0, math.ceil(math.log2(math.log(RESIDUAL) / math.log1p(-1 / condition))))


def newton_schulz(case: Case) -> Tensor:
    """(C + λ I)⁻¹. The Frobenius norm bounds the largest eigenvalue."""
    matrix, identity = case.damped, torch.eye(case.damped.shape[-1], device=case.damped.device)
    inverse: Tensor = identity / torch.linalg.matrix_norm(matrix)[:, None, None]
    for _ in range(case.iterations):
        inverse = torch.baddbmm(inverse, inverse, matrix @ inverse, beta=2, alpha=-1)
    return inverse


ITERATION = "orthogonal iteration"
FUNCTION = "iterated_basis"  # of `kfac_fx.linalg.matrices`, for it


def iterated(case: Case) -> Sequence[Tensor]:
    found: Sequence[Tensor] = getattr(matrices, FUNCTION)(case.covariance, case.basis)
    return found


METHODS: dict[str, Callable[[Case], Decomposed]] = {
    "Cholesky": lambda case: invert_from_cholesky(cholesky(case.damped)[0]),
    "Cholesky, loop": lambda case: invert_from_cholesky(cholesky(case.damped)[0]),
    "Cholesky, torch": lambda case: torch.cholesky_inverse(cholesky(case.damped)[0]),
    "linalg.inv": lambda case: torch.linalg.inv(case.damped),
    "Newton-Schulz": newton_schulz,
    "eigh": lambda case: torch.linalg.eigh(case.covariance),
    "eigh, loop": lambda case: torch.linalg.eigh(case.covariance),
    "eigh, host": lambda case: [part.to(case.covariance.device) for part in torch.linalg.eigh(case.covariance.cpu())],
    ITERATION: iterated,
}
LOOPS = {"Cholesky, loop": "Cholesky", "eigh, loop": "eigh"}  # and what does the same for a batch
NOT_ON_CPU = ("Cholesky, torch", "eigh, host")


def available(device: torch.device) -> list[str]:
    """The names of the methods that can be measured."""
    absent = [*(NOT_ON_CPU if device.type == "cpu" else ()), *(() if hasattr(matrices, FUNCTION) else (ITERATION,))]
    return [name for name in METHODS if name not in absent]


def residual(result: Decomposed, case: Case) -> float:
    if isinstance(result, Tensor):
        identity = torch.eye(result.shape[-1], device=result.device)
        return float(torch.linalg.matrix_norm(result @ case.damped - identity).max()) / math.sqrt(result.shape[-1])
    values, vectors = result[:2]
    difference = (vectors * values.unsqueeze(-2)) @ vectors.mT - case.covariance
    return float((torch.linalg.matrix_norm(difference) / torch.linalg.matrix_norm(case.covariance)).max())


def measure(name: str, case: Case, device: torch.device) -> tuple[float, float, float]:
    """Seconds of a run, the residual, and the part of the stack that is accepted."""
    stacks = zip(case.covariance.split(1), case.damped.split(1), strict=True)
    parts = [Case(*single, case.iterations) for single in stacks] if name in LOOPS else [case]
    times: list[float] = []
    results: list[Decomposed] = []
    while len(times) < 4 and sum(times) < LONG:
        results.clear()  # to make room for the next ones
        start = clock(device)
        results += [METHODS[name](part) for part in parts]
        times.append(clock(device) - start)
    accepted = float(results[0][2].float().mean()) if name == ITERATION else 1.0
    return statistics.median(times[1:] or times), max(map(residual, results, parts)), accepted


def estimate(times: Mapping[tuple[int, int], float], width: int, stack: int) -> float:
    """Seconds of a run: nothing for the first cell, infinite if no smaller cell has been measured."""
    smaller = [t * stack / s * (width / w) ** 3 for (w, s), t in times.items() if w <= width and s <= stack]
    return min(smaller, default=math.inf if times else 0.0)


def run(
    widths: Sequence[int],
    stacks: Sequence[int],
    device: torch.device,
    limit: float,
    methods: Sequence[str],
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for every width and stack, with the methods that were measured. keep: called with the rows so far."""
    end, rows = clock(device) + limit, list[dict[str, Any]]()
    times: dict[str, dict[tuple[int, int], float]] = {name: {} for name in methods}
    for width, stack in ((width, stack) for width in widths for stack in stacks if stack * width**2 <= ROOM):
        due = [name for name in times if estimate(times[name], width, stack) <= LONG]
        if not due or clock(device) > end:
            continue
        given = case(width, stack, device, with_basis=ITERATION in due)
        measured: dict[str, tuple[float, float, float]] = {}
        for name in due:
            if stack == 1 and LOOPS.get(name) in measured:  # a batch of one matrix is also its loop
                measured[name] = measured[LOOPS[name]]
            elif clock(device) <= end:
                measured[name] = measure(name, given, device)
        for name, (seconds, *_) in measured.items():
            times[name][width, stack] = seconds
        figures: dict[str, Any] = {"milliseconds": {name: 1e3 * seconds for name, (seconds, *_) in measured.items()}}
        figures["residuals"] = {name: left for name, (_, left, _) in measured.items()}
        if ITERATION in measured:
            figures["accepted"] = measured[ITERATION][2]
        rows.append({"width": width, "stack": stack, "iterations": given.iterations, **figures})
        keep(rows)
    return rows


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    names = [name for name in METHODS if any(name in row["milliseconds"] for row in results)]
    times, residuals = [], []
    for row in results:
        found, key = row["milliseconds"], {"width": str(row["width"]), "stack": str(row["stack"])}
        ratios = {f"{a} / batch": found[a] / found[b] if {a, b} <= found.keys() else "" for a, b in LOOPS.items()}
        times.append({**key, **{name: found.get(name, "") for name in names}, **ratios})
        left = {name: f"{row['residuals'][name]:.0e}" if name in found else "" for name in names}
        accepted = {"accepted": row.get("accepted", "")} if ITERATION in names else {}
        residuals.append({**key, "iterations": str(row["iterations"]), **left, **accepted})
    console.print(program.table("Milliseconds of the decompositions of a stack", times))
    console.print(program.table("Their residuals, and the iterations of Newton-Schulz", residuals))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--stacks", nargs="+", type=int, default=STACKS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all that can be measured")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--seconds", type=float, default=45.0, help="after which nothing more is measured")
    parser.add_argument("--out", type=Path, help="default: named after the device")
    parser.add_argument("--quick", action="store_true", help="tiny matrices; written only with --out")
    chosen = parser.parse_args(arguments)
    device = chosen.device
    if device.type == "cpu":
        torch.set_num_threads(1)
    widths, stacks = ((8, 16), (1, 4)) if chosen.quick else (sorted(chosen.widths), sorted(chosen.stacks))
    methods = [name for name in available(device) if chosen.methods is None or name in chosen.methods]
    options = f"--widths {' '.join(map(str, widths))} --seconds {chosen.seconds:g}"
    options += "" if tuple(stacks) == STACKS else f" --stacks {' '.join(map(str, stacks))}"
    options += "" if chosen.methods is None else "".join([" --methods", *(f' "{name}"' for name in chosen.methods)])
    origin = {
        "command": f"python -m benchmarks.decompositions --device {device} {options}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        **program.versions(),
        "threads": torch.get_num_threads(),
    }
    of_device = OUT if device.type == "cpu" else OUT.with_stem(f"{OUT.stem}_{device.type}")
    out = chosen.out or (None if chosen.quick else of_device)

    def keep(results: Sequence[Mapping[str, Any]]) -> None:
        if out is not None:
            out.write_text(json.dumps({**origin, "results": results}, indent=1) + "\n")

    torch.manual_seed(0)
    with full_precision():
        show(run(widths, stacks, device, chosen.seconds, methods, keep), program.console())


if __name__ == "__main__":
    main()
