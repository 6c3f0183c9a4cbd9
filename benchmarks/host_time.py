"""The cost of a step for the host, in a model of many small parameters: `python -m benchmarks.host_time`.

CPU time of one thread, medians over interleaved rounds: of a whole training step, and of `optimizer.step()` alone,
after the warm-up of `benchmarks.step_time`.
The matrices are so small that most of it is Python and torch's dispatch of operations, once each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import kfac_fx
from benchmarks import program
from benchmarks.decoder import Decoder
from benchmarks.methods import LR
from benchmarks.step_models import Loss, Make, Problem
from benchmarks.step_time import EVERY, WARMUP

OUT = Path(__file__).parent / "results" / "host_time.json"


class Skip(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def chain(layers: int = 100, width: int = 64, cases: int = 8) -> Problem:
    """Two parameters a layer."""
    model = nn.Sequential(*(Skip(width) for _ in range(layers)))
    return Problem(model, torch.rand(cases, width), torch.randint(width, (cases,)), Loss("categorical"))


class GPT(nn.Module):
    """Predicts the token after the last one."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Decoder(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(hidden))[:, -1])  # type: ignore[no-any-return]


def gpt(blocks: int = 12, width: int = 32, cases: int = 4, length: int = 8, tokens: int = 64) -> Problem:
    """Twelve parameters a block."""
    model = GPT(tokens, length, width, 4, blocks)
    return Problem(model, torch.randint(tokens, (cases, length)), torch.randint(tokens, (cases,)), Loss("categorical"))


MODELS = {"chain": chain, "gpt": gpt}
QUICK = {"quick": partial(gpt, 1)}


def ours(
    problem: Problem, every: tuple[int, int], mode: str
) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    net = kfac_fx.compile(problem.model, (problem.x,), loss=problem.loss.kind)
    intervals = {"cov_update_every": every[0], "invert_every": every[1]}
    return net, kfac_fx.KFAC(net, lr=LR, damping=1.0, momentum_type="regular", estimation_mode=mode, **intervals)


def adamw(problem: Problem) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    return problem.model, torch.optim.AdamW(problem.model.parameters(), lr=LR, foreach=True)


METHODS: Mapping[str, Callable[[Problem], Any]] = {
    "adamw, foreach": adamw,
    "kfac_fx, plain": partial(ours, every=EVERY["plain"], mode="gradients"),
    "kfac_fx, with sampled statistics": partial(ours, every=EVERY["statistics"], mode="gradients"),
    "kfac_fx, with empirical statistics": partial(ours, every=EVERY["statistics"], mode="empirical"),
    "kfac_fx, with inverses": partial(ours, every=EVERY["inverses"], mode="gradients"),
}


def measure(make: Make, rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds by method: of a step, and of `optimizer.step()`."""
    ready = {}
    for name, method in METHODS.items():
        torch.manual_seed(0)
        ready[name] = (problem := make(), *method(problem))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    order, shuffle = list(METHODS), random.Random(0).shuffle
    for turn in range(rounds + WARMUP):
        shuffle(order)
        for name in order:
            problem, run, optimizer = ready[name]
            start = time.process_time()
            optimizer.zero_grad()
            problem.backward(run)
            between = time.process_time()
            optimizer.step()
            end = time.process_time()
            if turn >= WARMUP:
                times[name].append((end - start, end - between))
    return {
        name: tuple(1e3 * statistics.median(times) for times in zip(*milliseconds, strict=True))
        for name, milliseconds in times.items()
    }


def run(models: Mapping[str, Make], rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, make in models.items():
        parameters = sum(1 for _ in make().model.parameters())
        rows = [
            {"method": method, "step": a, "optimizer.step()": b} for method, (a, b) in measure(make, rounds).items()
        ]
        results[name] = {"parameters": parameters, "milliseconds": rows}
    return results


def show(results: Mapping[str, Any], console: Console) -> None:
    for name, result in results.items():
        title = f"{name}: CPU milliseconds of a step of {result['parameters']} small parameters"
        console.print(program.table(title, result["milliseconds"]))


def main(arguments: Sequence[str] | None = None) -> None:
    program.main(arguments, doc=__doc__, models=MODELS, quick=QUICK, rounds=40, out=OUT, run=run, show=show)


if __name__ == "__main__":
    main()
