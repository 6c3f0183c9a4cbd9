"""Weight decay and losses on new data: three small tasks with few training cases, with `KFAC(net)` and AdamW.

    python -m benchmarks.weight_decay    the losses, in results/weight_decay.json

AdamW has every pair of a rate and a weight decay, and KFAC every weight decay at lr=1. Rates decay linearly to zero. A
loss is that of the test set after the last step, a mean over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from benchmarks.convergence import data
from benchmarks.convergence.data import Cases
from benchmarks.convergence.networks import resnet8_1d
from benchmarks.convergence.tasks import images
from benchmarks.program import console, versions

OUT = Path(__file__).parent / "results" / "weight_decay.json"
STEPS, BATCH, SEEDS = 300, 64, (0, 1, 2, 3)
RATES = (1e-3, 3e-3, 1e-2)
DECAYS = {"AdamW": (0.0, 0.01, 0.1, 1.0, 3.0), "KFAC(net)": (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)}


@dataclass(frozen=True)
class Task:
    """A network, training cases and test cases.

    Attributes:
        words: a line for the table.
        cases: for training, and held out for the test.
        kind: the `loss` of kfac_fx.compile.
    """

    words: str
    make: Callable[[], nn.Module]
    cases: Callable[[], Cases]
    loss: Callable[[Tensor, Tensor], Tensor]
    kind: str


def few(cases: Cases, number: int) -> Cases:
    """With the first training cases only."""
    return Cases(cases.inputs[:number], cases.targets[:number], cases.held_inputs, cases.held_targets)


def table() -> Cases:
    """Rows of 20 columns, of which five matter, and targets with noise."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2256, 20, generator=g)
    signal = (x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + x[:, 3] * (x[:, 4] > 0)) / 1.5
    y = signal.unsqueeze(1) + 0.6 * torch.randn(len(x), 1, generator=g)
    return Cases(x[:256], y[:256], x[256:], y[256:])


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


TASKS = {
    "digits": Task(
        "300 digits, a perceptron",
        lambda: nn.Sequential(nn.Flatten(), perceptron(64, 10)),
        lambda: few(images(), 300),
        F.cross_entropy,
        "categorical",
    ),
    "waves": Task(
        "500 waves, a residual network with batch normalization",
        resnet8_1d,
        lambda: few(data.waves(), 500),
        F.cross_entropy,
        "categorical",
    ),
    "table": Task("256 noisy rows, a perceptron", lambda: perceptron(20, 1), table, F.mse_loss, "mse"),
}


def trained(task: Task, method: str, rate: float, decay: float, seed: int) -> float:
    """The loss of the test set after a training."""
    torch.manual_seed(seed)
    model, cases = task.make(), task.cases()
    net: nn.Module = model
    optimizer: torch.optim.Optimizer
    if method == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    else:
        net = compiled = kfac_fx.compile(model, (cases.inputs[:BATCH],), loss=task.kind)
        optimizer = kfac_fx.KFAC(compiled, lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        x, y = cases.of(torch.randint(len(cases.inputs), (BATCH,), generator=generator))
        optimizer.zero_grad()
        task.loss(net(x), y).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return float(task.loss(model(cases.held_inputs), cases.held_targets))


def measure(names: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        for method, decays in DECAYS.items():
            for decay in decays:
                for rate in RATES if method == "AdamW" else (1.0,):
                    loss = sum(trained(TASKS[name], method, rate, decay, seed) for seed in SEEDS) / len(SEEDS)
                    rows.append({"task": name, "method": method, "rate": rate, "decay": decay, "loss": loss})
                    console().print(f"{name:8} {method:10} rate {rate:g} decay {decay:g}: {loss:.4g}")
    return rows


def section(results: dict[str, Any]) -> list[str]:
    """The lines of docs/results.md."""
    tried = " and of ".join(f"{', '.join(f'{decay:g}' for decay in DECAYS[method])} ({method})" for method in DECAYS)
    table, lower = [], []
    for name, task in TASKS.items():
        cells, losses = [], []
        for method in DECAYS:
            rows = [row for row in results["rows"] if (row["task"], row["method"]) == (name, method)]
            best = min(rows, key=lambda row: row["loss"])
            losses.append(best["loss"])
            without = min(row["loss"] for row in rows if not row["decay"])
            cells += [f"{without:.3g}", f"{best['loss']:.3g}", f"{best['decay']:g}"]
        table.append(f"| {name} | {task.words} | {' | '.join(cells)} |")
        adamw, kfac = losses
        lower += [name] if kfac < adamw else []
    where = f" ({', '.join(lower)})" if lower else ""
    return [
        "## Weight decay",
        "",
        f"Losses of the test set after {STEPS} steps on few training cases, as means over {len(SEEDS)} seeds. AdamW "
        f"has the best of the rates {', '.join(f'{rate:g}' for rate in RATES)}, and KFAC has lr=1. The weight decay of "
        f"a method is the best of {tried}. AdamW multiplies a weight by 1 - lr times the decay in "
        "every step, and KFAC by 1 - 0.02 lr m / r times the decay, with m and r of its step. KFAC ends "
        f"lower on {len(lower)} of {len(TASKS)} tasks{where}.",
        "",
        "| task | | AdamW, no decay | AdamW | its decay | KFAC, no decay | KFAC | its decay |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
        *table,
        "",
        f"`{results['command']}`; torch {results['torch']}.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {"command": "python -m benchmarks.weight_decay", **versions(), "rows": measure(chosen.tasks)}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
