"""Checks of the default with and without TF32: `python -m benchmarks.check_precision --device cuda`.

A check of `KFAC(net)` measures <d, F d> along a step by a difference quotient of the outputs, which has no digits to
lose: under `torch.set_float32_matmul_precision("high")` products of float32 round their factors to 10 bits. Two copies
of a small GPT take the same steps in float32, one under "highest" and one under "high", with a check in every step. The
second copy has the parameters and the optimizer's state of the first one before every step. So the changes of the loss
that the two predict, -<d, g> + <d, F d>/2, should differ by no more than rounding in the step itself, and so should ρ,
the quotient of the measured and the predicted change.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import kfac_fx
from benchmarks import program
from benchmarks.device_training import Language
from benchmarks.gpt2_factors import GPT2

OUT = Path(__file__).parent / "results" / "check_precision.json"
LAYERS, WIDTH, VOCABULARY, LENGTH, BATCH, STEPS = 2, 256, 256, 64, 32, 40
FIGURES = ("predicted_change", "rho")


class Training:
    """A net and its optimizer, under a precision of the products."""

    def __init__(self, model: GPT2, x: Tensor, precision: str) -> None:
        self.precision = precision
        self.net = kfac_fx.compile(model, (x,), loss="categorical")
        self.optimizer = kfac_fx.KFAC(self.net, damping_adaptation_interval=1, seed=0)

    def step(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """The figures of the check in this step, and its loss."""
        torch.set_float32_matmul_precision(self.precision)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())
        loss.backward()
        self.optimizer.step()
        return {"loss": float(loss.detach())} | {name: float(getattr(self.optimizer, name)) for name in FIGURES}

    def follow(self, other: Training) -> None:
        """Take over the parameters and the optimizer's state."""
        self.net.model.load_state_dict(other.net.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))


def measure(model: GPT2, texts: Tensor) -> list[dict[str, Any]]:
    """A row a step: the figures under both precisions. texts: [steps, batch, length + 1]."""
    before, results = torch.get_float32_matmul_precision(), list[dict[str, Any]]()
    x, y = texts[..., :-1], texts[..., 1:]
    models = model, copy.deepcopy(model)
    both = [Training(model, x[0], name) for model, name in zip(models, ("highest", "high"), strict=True)]
    try:
        for n in range(len(texts)):
            if n:
                both[1].follow(both[0])
            # The first training moves on in its step, so the second one takes its own step beforehand.
            high, highest = (training.step(x[n], y[n]) for training in reversed(both))
            results.append({"step": n, "highest": highest, "high": high})
    finally:
        torch.set_float32_matmul_precision(before)
    return results


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    rows = [
        {"step": str(result["step"])}
        | {f"{name}, {way}": f"{result[way][name]:.4e}" for name in FIGURES for way in ("highest", "high")}
        | {f"high / highest of {name}": result["high"][name] / result["highest"][name] for name in FIGURES}
        for result in results
    ]
    console.print(program.table("Checks under both precisions of products", rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, help=f"default: {OUT.name} in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a toy, a few steps; written only with --out")
    chosen = parser.parse_args(arguments)
    device, out = chosen.device, chosen.out or (None if chosen.quick else OUT)
    layers, width, vocabulary, length, batch, steps = (
        (1, 64, 32, 8, 4, 3) if chosen.quick else (LAYERS, WIDTH, VOCABULARY, LENGTH, BATCH, chosen.steps)
    )
    generator = torch.Generator(device).manual_seed(0)
    language = Language.of(vocabulary, device, generator)
    texts = language.texts(steps * batch, length + 1, generator).view(steps, batch, -1)
    torch.manual_seed(0)
    with device:
        model = GPT2(layers, width, vocabulary, length)
    results = measure(model, texts)
    show(results, program.console())
    if out is not None:
        record = {
            "command": f"python -m benchmarks.check_precision --device {device} --steps {steps}",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            **program.versions(),
            "results": results,
        }
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
