"""Short jobs: small networks and 20, 60 or 240 steps, with the default of KFAC and the best of several rates of rivals.

    python -m benchmarks.short_jobs                 the losses, in results/short_jobs.json
    python -m benchmarks.short_jobs --jobs text     those of some jobs; the others stay
    python -m benchmarks.short_jobs --only-kfac     those of KFAC; the rivals' stay
    python -m benchmarks.short_jobs --write-docs    the tables of docs/short_jobs.md, also of benchmarks.one_batch

`KFAC(net)` has no choice here. AdamW, SOAP and Muon have the best of their rates on the very job, though a job of a
minute is not tuned. A method starts from the same network and sees the same batches. The rate decays linearly to zero.
A loss is the mean over two seeds of the loss after the last step, in eval mode, on four batches.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kfac_fx
from benchmarks import one_batch
from benchmarks.convergence.methods import muon_and_adamw, not_installed
from benchmarks.jobs import Job, jobs
from benchmarks.program import console, versions

OUT = Path(__file__).parent / "results" / "short_jobs.json"
DOCS = Path(__file__).parents[1] / "docs" / "short_jobs.md"
BUDGETS = (20, 60, 240)
RATES = {  # that a rival may try
    "AdamW": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "SOAP": (3e-3, 1e-2, 3e-2, 1e-1),
    "Muon": (3e-3, 1e-2, 3e-2, 1e-1),
}
SEEDS = (0, 1)


# --- the runs ---------------------------------------------------------------------------------------------------------


def rival(name: str, model: nn.Module, rate: float) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    """Its optimizers, and what comes before their steps."""
    match name:
        case "AdamW":
            return [torch.optim.AdamW(model.parameters(), lr=rate)], lambda: None
        case "SOAP":
            from pytorch_optimizer import SOAP

            return [SOAP(model.parameters(), lr=rate, weight_decay=0.0)], lambda: None
    return muon_and_adamw(model, rate)


def trained(job: Job, steps: int, seed: int, method: str, rate: float) -> float:
    """The loss after a training with "KFAC(net)" or a rival. rate: of the rival."""
    torch.manual_seed(seed)
    model, first = job.model(), job.batch(0)[: job.inputs]
    if method == "KFAC(net)":
        net = kfac_fx.compile(model, first, loss=job.declared)
        optimizers, before = [kfac_fx.KFAC(net)], lambda: None
    else:
        net = model
        optimizers, before = rival(method, model, rate)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps) for optimizer in optimizers
    ]
    for step in range(steps):
        batch = job.batch(step)
        model.zero_grad()
        job.loss(net(*batch[: job.inputs]), batch).backward()
        before()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        batches = [job.batch(n) for n in range(4)]
        return sum(float(job.loss(model(*batch[: job.inputs]), batch)) for batch in batches) / len(batches)


def mean_loss(job: Job, steps: int, method: str, rate: float = math.nan) -> float:
    losses = [trained(job, steps, seed, method, rate) for seed in SEEDS]
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def with_kfac_anew(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the losses of KFAC measured again."""
    anew = []
    for row in rows:
        anew.append(row | {"KFAC(net)": mean_loss(jobs()[row["job"]], row["steps"], "KFAC(net)")})
        console().print(f"{row['steps']:4} {row['job']:14} {row['KFAC(net)']:.3g} -> {anew[-1]['KFAC(net)']:.3g}")
    return anew


def measure(names: Sequence[str], budgets: Sequence[int]) -> list[dict[str, Any]]:
    missing = not_installed("pytorch-optimizer")
    if missing:
        console().print(f"SOAP: {missing}")
    rivals = {name: rates for name, rates in RATES.items() if name != "SOAP" or missing is None}
    known, rows = jobs(), []
    for steps in budgets:
        for name in names:
            row: dict[str, Any] = {"job": name, "steps": steps, "KFAC(net)": mean_loss(known[name], steps, "KFAC(net)")}
            for method, rates in rivals.items():
                by_rate = {rate: mean_loss(known[name], steps, method, rate) for rate in rates}
                best = min(by_rate, key=by_rate.__getitem__)
                row |= {method: by_rate[best], f"rate of {method}": best}
            rows.append(row)
            losses = (f"{method} {row[method]:.3g}" for method in ("KFAC(net)", *rivals))
            console().print(f"{steps:4} {name:14} {', '.join(losses)}")
    return rows


def page(results: dict[str, Any], of_one_batch: dict[str, Any]) -> str:
    known, rows = jobs(), results["rows"]
    rivals = [method for method in RATES if method in rows[0]]
    rates = "; ".join(f"{name} {', '.join(f'{rate:g}' for rate in RATES[name])}" for name in rivals)
    lines = [
        "# Short jobs",
        "",
        "Small networks, 20 to 240 steps, and no choice of a number for K-FAC: `KFAC(net)`. Its rivals have the best "
        f"of several rates on the very job ({rates}). All rates decay linearly to zero. A loss is the mean over two "
        "seeds. The lowest one is bold.",
        "",
    ]
    for steps in dict.fromkeys(row["steps"] for row in rows):
        of_steps = [row for row in rows if row["steps"] == steps]
        ahead = [f"than {rival} on {sum(row['KFAC(net)'] < row[rival] for row in of_steps)}" for rival in rivals]
        lines += [
            f"## {steps} steps",
            "",
            f"`KFAC(net)` ends lower {', '.join(ahead)} of {len(of_steps)} jobs.",
            "",
            f"| job | | `KFAC(net)` | {' | '.join(rivals)} |",
            f"|---|---|{'---|' * (1 + len(rivals))}",
        ]
        for row in of_steps:
            losses = [row[method] for method in ("KFAC(net)", *rivals)]
            shown = [f"**{loss:.3g}**" if loss == min(losses) else f"{loss:.3g}" for loss in losses]
            lines.append(f"| {row['job']} | {known[row['job']].words} | {' | '.join(shown)} |")
        lines.append("")
    lines += [*one_batch.section(of_one_batch), ""]
    alone = "`KFAC(net)` was run again alone, later than its rivals"
    again = f" {alone}: `{results['kfac']}`." if "kfac" in results else ""
    lines += [f"`{results['command']}` and `{of_one_batch['command']}`; torch {results['torch']}.{again}", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=jobs(), default=list(jobs()))
    parser.add_argument("--steps", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--only-kfac", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write-docs", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.write_docs:
        DOCS.write_text(page(json.loads(chosen.out.read_text()), json.loads(one_batch.OUT.read_text())))
        return
    torch.set_num_threads(1)
    last = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    known = last.get("rows", [])
    again = [row for row in known if row["job"] in chosen.jobs and row["steps"] in chosen.steps]
    rest = [row for row in known if row not in again]
    rows = [*rest, *(with_kfac_anew(again) if chosen.only_kfac else measure(chosen.jobs, chosen.steps))]
    order = list(jobs())
    rows.sort(key=lambda row: (row["steps"], order.index(row["job"])))
    command = "python -m benchmarks.short_jobs"
    newer = {"kfac": f"{command} --only-kfac"} if chosen.only_kfac or (rest and "kfac" in last) else {}
    results = {"command": command, **newer, **versions(), "rows": rows}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
