"""Short jobs: small networks and 20, 60 or 240 steps, with the default of KFAC and the best of several rates of rivals.

    python -m benchmarks.short_jobs                 the losses, in results/short_jobs.json
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from benchmarks import one_batch
from benchmarks.convergence.methods import muon_and_adamw, not_installed
from benchmarks.program import console, versions
from kfac_fx.losses import Categorical, Normal

OUT = Path(__file__).parent / "results" / "short_jobs.json"
DOCS = Path(__file__).parents[1] / "docs" / "short_jobs.md"
BUDGETS = (20, 60, 240)
RATES = {  # that a rival may try
    "AdamW": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "SOAP": (3e-3, 1e-2, 3e-2, 1e-1),
    "Muon": (3e-3, 1e-2, 3e-2, 1e-1),
}
SEEDS = (0, 1)
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
    """A network and its batches.

    Attributes:
        words: a line for the table.
        model: made under the seed.
        batch: the batch of a step; the first `inputs` tensors are the network's.
        loss: of the network's outputs and the batch.
        declared: the `loss` of kfac_fx.compile.
    """

    words: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    declared: Any
    inputs: int = 1


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fixed(*tensors: Tensor) -> Callable[[int], Batch]:
    """The same batch in every step."""
    return lambda step: tensors


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch[-1])


def square(outputs: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(outputs, batch[-1])


# --- the networks -----------------------------------------------------------------------------------------------------


class Siamese(nn.Module):
    """One network on both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)), nn.Linear(8, 2)

    def forward(self, pair: Tensor) -> Tensor:
        left, right = self.tower(pair[:, 0]), self.tower(pair[:, 1])
        out: Tensor = self.head((left - right).square())
        return out


class Encoder(nn.Module):
    """Two layers of a transformer over tokens, with one class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 16), nn.Parameter(0.1 * torch.randn(8, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 12)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.tokens(ids) + self.places))
        return out.movedim(-1, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0][:, -1])
        return out


class Sine(nn.Module):
    """A layer of a coordinate network."""

    def __init__(self, inputs: int, outputs: int, bound: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(20 * self.linear(x))


class PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.policy(hidden), self.value(hidden)


class Graph(nn.Module):
    """Two rounds of messages along the edges of a graph, and a class for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(10, 16), nn.Linear(32, 16), nn.Linear(32, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = torch.relu(layer(x))
            x = torch.cat([x, torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])], 1)
        out: Tensor = self.head(x)
        return out


def jobs() -> dict[str, Job]:
    g = generator(0)
    pairs, ids = torch.randn(96, 2, 8, generator=g), torch.randint(12, (32, 8), generator=g)
    series, images = torch.randn(48, 10, 3, generator=g), torch.randn(32, 1, 12, 12, generator=g)
    states, rows = torch.randn(128, 6, generator=g), torch.randn(512, 12, generator=g)
    line = torch.linspace(-1, 1, 20)
    plane = torch.cartesian_prod(line, line)
    wave = torch.sin(6 * plane[:, :1]) * torch.cos(4 * plane[:, 1:])
    nodes, edges = torch.randn(120, 10, generator=g), torch.randint(120, (2, 480), generator=g)
    digits = (torch.rand(128, 24, generator=g) < torch.rand(128, 1, generator=g)).float()
    noisy = rows @ torch.randn(12, 1, generator=g) / 4 + 0.1 * torch.randn(512, 1, generator=g)
    kinds = (images.mean((1, 2, 3)) > 0).long() + 2 * (images[:, 0, :6].mean((1, 2)) > 0).long()

    def part(step: int) -> Batch:
        chosen = torch.randint(512, (64,), generator=generator(step))
        return rows[chosen], noisy[chosen]

    def actor_critic(outputs: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs[0], batch[1]) + 0.5 * F.mse_loss(outputs[1], batch[2])

    return {
        "siamese": Job(
            "one tower on two inputs", Siamese, fixed(pairs, (pairs[:, 0, 0] > pairs[:, 1, 0]).long()),
            cross_entropy, "categorical",
        ),
        "encoder": Job(
            "a transformer that rolls tokens", Encoder, fixed(ids, torch.roll(ids, 1, 1)), cross_entropy,
            lambda outputs: Categorical(outputs.movedim(1, -1)),
        ),
        "recurrent": Job(
            "a GRU that adds up", Recurrent, fixed(series, series[..., :1].sum(1) / 3), square, "mse",
        ),
        "images": Job(
            "convolutions with group norm",
            lambda: nn.Sequential(
                nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
                nn.Flatten(), nn.Linear(128, 4),
            ),
            fixed(images, kinds), cross_entropy, "categorical",
        ),
        "coordinates": Job(
            "sines of coordinates",
            lambda: nn.Sequential(Sine(2, 32, 0.5), Sine(32, 32, 0.02), nn.Linear(32, 1)),
            fixed(plane, wave), square, "mse",
        ),
        "actor-critic": Job(
            "a policy and a value, two losses", PolicyAndValue,
            fixed(states, states[:, :3].argmax(1), states[:, 3:4] * states[:, 4:5]), actor_critic,
            lambda outputs: [Categorical(outputs[0]), Normal(outputs[1])],
        ),
        "graph": Job(
            "messages along edges", Graph, fixed(nodes, edges, nodes[edges[0], :4].argmax(1)[:120]), cross_entropy,
            "categorical", inputs=2,
        ),
        "autoencoder": Job(
            "an autoencoder of bits",
            lambda: nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 16), nn.Tanh(),
                                  nn.Linear(16, 24)),
            fixed(digits, digits), lambda outputs, batch: F.binary_cross_entropy_with_logits(outputs, batch[-1]),
            "bce_with_logits",
        ),
        "table": Job(
            "rows of a table in batches of 64, with batch norm and dropout",
            lambda: nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)),
            part, square, "mse",
        ),
    }  # fmt: skip


# --- the runs ---------------------------------------------------------------------------------------------------------


def rival(name: str, model: nn.Module, rate: float) -> tuple[list[torch.optim.Optimizer], Callable[[], None]]:
    """Its optimizers, and what comes before their steps."""
    match name:
        case "AdamW":
            return [torch.optim.AdamW(model.parameters(), lr=rate)], lambda: None
        case "SOAP":
            from pytorch_optimizer import SOAP

            return [SOAP(model.parameters(), lr=rate, weight_decay=0.0)], lambda: None
    *optimizers, before = muon_and_adamw(model, rate)
    return list(optimizers), before


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
    lines += [f"`{results['command']}` and `{of_one_batch['command']}`; torch {results['torch']}.", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=jobs(), default=list(jobs()))
    parser.add_argument("--steps", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write-docs", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.write_docs:
        DOCS.write_text(page(json.loads(chosen.out.read_text()), json.loads(one_batch.OUT.read_text())))
        return
    torch.set_num_threads(1)
    rows = measure(chosen.jobs, chosen.steps)
    results = {"command": "python -m benchmarks.short_jobs", **versions(), "rows": rows}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
