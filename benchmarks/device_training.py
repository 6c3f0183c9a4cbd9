"""A training of a small GPT on a GPU, by the clock: `python -m benchmarks.device_training --device cuda`.

Every method trains the same GPT from the same start on the same batches, in bfloat16 autocast, with TF32 for products
of float32, at a few learning rates. The learning rate of every method rises linearly in the first `WARMUP` steps, and
falls as a cosine to `LAST` of itself. No weight decays. Muon is torch's. It moves the matrices of hidden layers, and
AdamW at `MUON_OTHERS` moves the other parameters. SOAP is pytorch-optimizer's, and is left out where that is not
installed.

The program makes the language (`Language`), so its entropy is known: behind the first two tokens of a text no model has
a smaller mean loss. Every batch is new, so the loss of a batch before the step is that of unseen text.

*loss* is the mean over the last `SHOWN` steps. Seconds begin after the first step. The seconds before it, and its own,
are figures apart, because they hold the compilation. The host waits for the device only at every `SHOWN`-th step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import kfac_fx
from benchmarks import program
from benchmarks.device_step import muon_optimizers
from benchmarks.gpt2_factors import GPT2
from benchmarks.methods import PEERS
from kfac_fx.cli.demo import clock

OUT = Path(__file__).parent / "results" / "device_training.json"
WARMUP, LAST = 20, 0.1
SHOWN = 25  # steps
MUON_OTHERS = 1e-3


# --- the data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Language:
    """A chain of second order over a vocabulary whose frequencies follow Zipf's law.

    The next token is one of 8 successors of the last token (half of the time), one of 4 successors of the last token
    and the class of the token before it (in 3 of 10), or any token (in 2 of 10). All of these fall as 1/rank. The model
    learns the frequencies first, then the successors, and last what the class decides.

    Attributes:
        after: the successors of a token, [V, 8].
        after_two: the successors of a class and a token, [CLASSES, V, 4].
        frequencies: of any token, [V].
    """

    after: Tensor
    after_two: Tensor
    frequencies: Tensor

    CLASSES, SHARES = 16, (0.5, 0.3, 0.2)

    @staticmethod
    def of(vocabulary: int, device: torch.device, generator: torch.Generator) -> Language:
        frequencies = zipf(vocabulary, device)

        def table(*shape: int) -> Tensor:
            return torch.multinomial(frequencies, math.prod(shape), True, generator=generator).view(shape)

        return Language(table(vocabulary, 8), table(Language.CLASSES, vocabulary, 4), frequencies)

    def texts(self, number: int, length: int, generator: torch.Generator) -> Tensor:
        """Tokens, [number, length]."""
        device, count = self.frequencies.device, number * length
        ways = torch.multinomial(torch.tensor(self.SHARES, device=device), count, True, generator=generator)
        free = torch.multinomial(self.frequencies, count, True, generator=generator)
        ranks = [
            torch.multinomial(zipf(table.shape[-1], device), count, True, generator=generator)
            for table in (self.after, self.after_two)
        ]
        way, other, first, second = (choice.view(length, number) for choice in (ways, free, *ranks))
        tokens = [other[0], other[1]]
        for n in range(2, length):
            by_one = self.after[tokens[-1], first[n]]
            by_two = self.after_two[tokens[-2] % self.CLASSES, tokens[-1], second[n]]
            tokens.append(torch.where(way[n] == 0, by_one, torch.where(way[n] == 1, by_two, other[n])))
        return torch.stack(tokens[:length], 1)

    def loss(self, texts: Tensor) -> float:
        """The mean loss of one who knows the language, over all tokens but the first two."""
        before, last, target = texts[:, :-2], texts[:, 1:-1], texts[:, 2:]
        successors = self.after[last], self.after_two[before % self.CLASSES, last]
        probability = self.SHARES[2] * self.frequencies[target]
        for share, tokens in zip(self.SHARES, successors, strict=False):
            hit = (tokens == target.unsqueeze(-1)) * zipf(tokens.shape[-1], texts.device)
            probability = probability + share * hit.sum(-1)
        return float(-probability.log().mean())


def zipf(number: int, device: torch.device) -> Tensor:
    """Probabilities in proportion to 1/rank, [number]."""
    falling = 1 / torch.arange(1, number + 1, device=device)
    return falling / falling.sum()


# --- the methods ------------------------------------------------------------------------------------------------------

Run = Callable[[Tensor], Tensor]  # what stands for the model


def adamw(model: nn.Module, x: Tensor, lr: float) -> tuple[Run, list[Optimizer]]:
    return model, [torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)]


def soap(model: nn.Module, x: Tensor, lr: float) -> tuple[Run, list[Optimizer]]:
    from pytorch_optimizer import SOAP

    return model, [SOAP(model.parameters(), lr=lr, weight_decay=0.0)]


def muon(model: nn.Module, x: Tensor, lr: float) -> tuple[Run, list[Optimizer]]:
    return model, muon_optimizers(model, lr, MUON_OTHERS, fused=True)


def kfac(model: nn.Module, x: Tensor, lr: float) -> tuple[Run, list[Optimizer]]:
    with torch.autocast(x.device.type, torch.bfloat16):
        net = kfac_fx.compile(model, (x,), loss="categorical")
    return net, [kfac_fx.KFAC(net, lr=lr)]


class Contender(NamedTuple):
    """start: from a model, an example of its input and a learning rate."""

    start: Callable[[nn.Module, Tensor, float], tuple[Run, list[Optimizer]]]
    rates: Sequence[float]


METHODS: Mapping[str, Contender] = {
    "KFAC(net)": Contender(kfac, (1.0, 0.3)),
    "AdamW": Contender(adamw, (1e-3, 3e-3, 3e-4)),
    "Muon": Contender(muon, (2e-2, 5e-3)),
    "SOAP": Contender(soap, (3e-3, 1e-3)),
}


# --- measuring --------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    layers: int = 4
    width: int = 512
    vocabulary: int = 1024
    length: int = 256
    batch: int = 32


def rate(step: int, steps: int) -> float:
    """The part of the learning rate in a step, counted from 0."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def train(contender: Contender, lr: float, size: Size, texts: Tensor) -> dict[str, Any]:
    """texts: [steps, batch, length + 1]."""
    device, steps, begin = texts.device, len(texts), clock(texts.device)
    torch.manual_seed(0)
    with device:
        model = GPT2(size.layers, size.width, size.vocabulary, size.length)
    run, optimizers = contender.start(model, texts[0, :, :-1], lr)
    schedulers = [LambdaLR(optimizer, lambda step: rate(step, steps)) for optimizer in optimizers]
    before, losses = clock(device) - begin, list[Tensor]()
    curve: list[dict[str, float]] = []
    start = clock(device)
    first = 0.0
    for step, batch in enumerate(texts, 1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(run(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        losses.append(loss.detach())
        if step == 1:
            first, start = clock(device) - start, clock(device)
        if step % SHOWN == 0 or step == steps:
            seconds = clock(device) - start
            curve.append({"step": step, "seconds": seconds, "loss": float(torch.stack(losses[-SHOWN:]).mean())})
    return {
        "loss": curve[-1]["loss"],
        "milliseconds": 1e3 * curve[-1]["seconds"] / max(1, steps - 1),
        "seconds": {"before": before, "first step": first, "others": curve[-1]["seconds"]},
        "curve": curve,
        "losses": torch.stack(losses).tolist(),
    }


def until(curve: Sequence[Mapping[str, float]], loss: float) -> Mapping[str, float] | None:
    """The first point of a curve at which the loss is that or less."""
    return next((point for point in curve if point["loss"] <= loss), None)


def rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row a method and learning rate, with the steps and seconds to the best last loss of AdamW."""
    best = min((run["loss"] for run in results.get("AdamW", {}).values() if math.isfinite(run["loss"])), default=0.0)
    shown = []
    for name, by_rate in results.items():
        for lr, run in by_rate.items():
            reached, seconds = until(run["curve"], best), run["seconds"]
            shown.append(
                {
                    "method": name,
                    "lr": lr,
                    "loss": f"{run['loss']:.3f}",
                    "milliseconds a step": f"{run['milliseconds']:.1f}",
                    "before, s": f"{seconds['before']:.1f}",
                    "first step, s": f"{seconds['first step']:.1f}",
                    "others, s": f"{seconds['others']:.1f}",
                    "steps to AdamW's loss": "" if reached is None else f"{reached['step']:.0f}",
                    "seconds to it": "" if reached is None else f"{reached['seconds']:.1f}",
                }
            )
    return shown


def show(record: Mapping[str, Any], console: Console) -> None:
    title = f"{record['title']}; the language has {record['entropy']:.3f}"
    if record["results"]:
        console.print(program.table(title, rows(record["results"])))
    for name, why in record["failures"].items():
        console.print(f"{name}: {why}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, help=f"default: {OUT.name} in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a toy, a few steps; written only with --out")
    chosen = parser.parse_args(arguments)
    device, out = chosen.device, chosen.out or (None if chosen.quick else OUT)
    size, steps = (Size(1, 64, 64, 8, 4), 4) if chosen.quick else (Size(), chosen.steps)
    generator = torch.Generator(device).manual_seed(0)
    language = Language.of(size.vocabulary, device, generator)
    texts = language.texts(steps * size.batch, size.length + 1, generator).view(steps, size.batch, -1)
    record: dict[str, Any] = {
        "command": f"python -m benchmarks.device_training --device {device} --steps {steps}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        **program.versions(),
        "title": f"GPT, {size.layers} layers, width {size.width}, batch {size.batch} x {size.length}, {steps} steps",
        "entropy": language.loss(texts.flatten(0, 1)),
        "results": {},
        "failures": {},
    }
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        # The first learning rate of every method comes first, so that a run that is cut off has all methods.
        most = max(len(METHODS[name].rates) for name in chosen.methods)
        for place in range(1 if chosen.quick else most):
            for name in chosen.methods:
                if name == "SOAP" and (peer := PEERS["soap"]).version() is None:
                    record["failures"][name] = f"not installed: pip install {peer.package}"
                    continue
                if place >= len(METHODS[name].rates):
                    continue
                lr = METHODS[name].rates[place]
                try:
                    record["results"].setdefault(name, {})[f"{lr:g}"] = train(METHODS[name], lr, size, texts)
                except Exception as error:  # the others go on
                    record["failures"][f"{name}, {lr:g}"] = f"{type(error).__name__}: {error}".splitlines()[0]
                gc.collect()
                if out is not None:
                    out.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        torch.set_float32_matmul_precision(precision)
    show(record, program.console())


if __name__ == "__main__":
    main()
