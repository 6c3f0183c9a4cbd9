"""Find the settings of SGD and AdamW in the demo: `python -m benchmarks.sweep`. K-FAC has none.

Every method has as many settings to try, trains from the same start on the same batches, and is judged by the lowest
loss of the whole training set that it saw. The start is another than the demo's, so that the demo is no rerun.

Writes `benchmarks/results/sweep.json`; `kfac_fx/cli/demo.py` repeats what it chose, and a test compares the two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import kfac_fx
from kfac_fx.cli.demo import METHODS, Settings, Task, method_steps, one_thread, results_of, tasks, train

OUT = Path(__file__).parent / "results" / "sweep.json"
SEED = 1
Grid = Mapping[str, Sequence[Any]]

# No weight decay is what the training loss asks for; AdamW's own default is there to be beaten.
GRIDS: dict[str, dict[str, Grid]] = {
    "autoencoder": {
        "sgd": {"lr": [0.01, 0.03, 0.1], "momentum": [0.9, 0.95]},
        "adamw": {"lr": [0.003, 0.01, 0.03], "weight_decay": [0.0, 0.01]},
    },
    "deep plain network": {
        "sgd": {"lr": [0.003, 0.01, 0.03], "momentum": [0.9, 0.95]},
        "adamw": {"lr": [0.0003, 0.001, 0.003], "weight_decay": [0.0, 0.01]},
    },
}


def settings(grid: Grid) -> Iterator[Settings]:
    """Every combination of the values of a grid."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def trials(task: Task, method: str, grid: Grid, steps: int, seed: int) -> dict[str, Any]:
    """Train once for every setting; the one with the lowest loss is chosen."""
    tried = []
    for setting in settings(grid):
        run = train(method, task, task.model(seed), setting, steps=steps, seed=seed)
        tried.append(results_of(run))
        print(f"{task.name:<12} {method:<6} {setting} {run.best.loss:.5g} in {run.final.seconds:.1f} s", flush=True)
    best = min(tried, key=lambda trial: float(trial["best_loss"]))
    return {"steps": steps, "seed": seed, "grid": grid, "chosen": best["settings"], "trials": tried}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=GRIDS, action="append", help="only this one; keeps the results of the other")
    parser.add_argument(
        "--method", choices=["sgd", "adamw"], action="append", help="only this one; keeps the others' results"
    )
    parser.add_argument("--steps", type=int, help="of the first-order methods; default: the demo's")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "kfac_fx": kfac_fx.__version__}
    command = shlex.join(["python", "-m", "benchmarks.sweep", *(sys.argv[1:] if arguments is None else arguments)])
    origin = {"command": command, "versions": versions, "device": str(options.device)}
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for task in tasks(options.device):
        for method, grid in GRIDS[task.name].items():
            if task.name in (options.task or GRIDS) and method in (options.method or METHODS):
                steps = method_steps(method, options.steps or task.steps)
                with one_thread():
                    tried = trials(task, method, grid, steps, options.seed)
                found.setdefault(task.name, {})[method] = origin | tried
                options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
