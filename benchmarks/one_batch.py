"""One batch that repeats: 100 networks of two ordinary modules and a head, drawn by a seed, and 50 steps.

    python -m benchmarks.one_batch                  the losses, in results/one_batch.json
    python -m benchmarks.short_jobs --write-docs    the section of docs/short_jobs.md

To fit one batch is the first thing that a careful user tries with a new optimizer. `KFAC(net)` has no choice, and AdamW
the better of two rates. The rate decays linearly to zero. A loss is the mean of three forwards in training mode after
the last step, because networks with dropout or batch norm were trained in this mode.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from benchmarks.pairs import IMAGES, SEQUENCES, SIDE, STEPS, WIDTH, Chain
from benchmarks.program import console, versions

OUT = Path(__file__).parent / "results" / "one_batch.json"
FAMILIES = {"sequences": (SEQUENCES, (STEPS, WIDTH)), "images": (IMAGES, (WIDTH, SIDE, SIDE))}
BATCHES = (4, 64)
NETWORKS = 50  # of each family
RATES = (3e-3, 2e-2)  # of AdamW
LENGTH = 50  # steps
FORWARDS = 3


def drawn(family: str, number: int) -> list[tuple[str, str]]:
    generator = random.Random(f"one batch of {family}")
    names = list(FAMILIES[family][0])
    return [(generator.choice(names), generator.choice(names)) for _ in range(number)]


def trained(family: str, names: Sequence[str], seed: int, x: Tensor, y: Tensor, rate: float | None) -> float:
    """The loss after a training. rate: of AdamW; None trains with `KFAC(net)`."""
    modules, _ = FAMILIES[family]
    torch.manual_seed(seed)
    model = Chain(*(modules[name]() for name in names))
    optimizer: torch.optim.Optimizer
    if rate is None:
        net: nn.Module = kfac_fx.compile(model, (x,), loss="categorical")
        optimizer = kfac_fx.KFAC(net)  # type: ignore[arg-type]
    else:
        net, optimizer = model, torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / LENGTH)
    torch.manual_seed(seed)
    for _ in range(LENGTH):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return sum(float(F.cross_entropy(net(x), y)) for _ in range(FORWARDS)) / FORWARDS


def measure(number: int) -> list[dict[str, Any]]:
    rows = []
    for family, (_, shape) in FAMILIES.items():
        for batch in BATCHES:
            for seed, names in enumerate(drawn(family, number)):
                generator = torch.Generator().manual_seed(seed)
                x = torch.randn(batch, *shape, generator=generator)
                y = torch.randint(3, (batch,), generator=generator)
                kfac = trained(family, names, seed, x, y, None)
                adamw = min(trained(family, names, seed, x, y, rate) for rate in RATES)
                rows.append({"family": family, "batch": batch, "modules": names, "KFAC(net)": kfac, "AdamW": adamw})
                if not kfac < adamw:
                    console().print(f"{family}, batch of {batch}, {' and '.join(names)}: {kfac:.3g}, AdamW {adamw:.3g}")
    return rows


def section(results: dict[str, Any]) -> list[str]:
    """The lines of docs/short_jobs.md."""
    lines = [
        "## One batch that repeats",
        "",
        f"{2 * NETWORKS} networks of two ordinary modules and a head, drawn by a seed, fit one batch in {LENGTH} steps."
        f" AdamW has the better of the rates {' and '.join(f'{rate:g}' for rate in RATES)}.",
        "",
        "| networks | batch | `KFAC(net)` ends lower | at most half as high | twice as high or more |",
        "|---|--:|--:|--:|--:|",
    ]
    for family in FAMILIES:
        for batch in BATCHES:
            pairs = [
                (row["KFAC(net)"], row["AdamW"])
                for row in results["rows"]
                if (row["family"], row["batch"]) == (family, batch)
            ]
            counts = (
                sum(kfac < adamw for kfac, adamw in pairs),
                sum(2 * kfac <= adamw for kfac, adamw in pairs),
                sum(not kfac < 2 * adamw for kfac, adamw in pairs),
            )
            lines.append(f"| {family} | {batch} | {' | '.join(f'{count} of {len(pairs)}' for count in counts)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=NETWORKS, help="of each family")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that have no use in a network so small
        rows = measure(chosen.networks)
    results = {"command": "python -m benchmarks.one_batch", **versions(), "rows": rows}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
