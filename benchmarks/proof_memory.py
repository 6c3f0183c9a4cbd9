"""The memory that the proof takes: `python -m benchmarks.proof_memory`.

Bytes of tensors at the peak, beside the model's own and the batch, of one training step (forward, backward, gradients)
and of the first batch with the proof and without; beside it what a process of its own grew by, as the system saw it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import kfac_fx
from benchmarks.alive import AliveBytes
from benchmarks.decoder import Decoder
from benchmarks.program import console, versions

OUT = Path(__file__).parent / "results" / "proof_memory.json"
MB = 2**20


def autoencoder() -> tuple[nn.Module, Tensor]:
    sizes = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    layers = [layer for i, o in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1]), torch.rand(256, 784)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inputs, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, outputs, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(conv.out_channels) for conv in (*self.convs,))  # type: ignore[arg-type]
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Identity() if inputs == outputs else short

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.convs[0](x)))
        y = torch.relu(self.norms[1](self.convs[1](y)))
        return torch.relu(self.norms[2](self.convs[2](y)) + self.short(x))


def resnet50() -> tuple[nn.Module, Tensor]:
    """He et al. 2016."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, inputs = [], 64
    for stage, number in enumerate((3, 4, 6, 3)):
        for n in range(number):
            blocks.append(Bottleneck(inputs, 64 * 2**stage, 2 if stage and not n else 1))
            inputs = 256 * 2**stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(8, 3, 96, 96)


class GPT(nn.Module):
    """Radford et al. 2019, six blocks of width 384, with a vocabulary of 16,384 and tied embeddings."""

    def __init__(self, length: int = 128, width: int = 384) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16384, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Decoder(width, heads=6) for _ in range(6)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.tokens(ids) + self.positions)), self.tokens.weight)


def gpt() -> tuple[nn.Module, Tensor]:
    return GPT(), torch.randint(16384, (4, 128))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "autoencoder": autoencoder,
    "resnet50": resnet50,
    "gpt": gpt,
}
Work = Callable[[], object]


def training(model: nn.Module, x: Tensor) -> Work:
    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return step


def proof(model: nn.Module, x: Tensor) -> Work:
    """Captured by torch.fx, so that the first batch does nothing else."""
    net = kfac_fx.compile(model, loss="normal")
    return lambda: net.captures.recorder((x,), {})


def without(model: nn.Module, x: Tensor) -> Work:
    net = kfac_fx.compile(model, loss="normal", verify=False)
    return lambda: net.captures.recorder((x,), {})


WORK: dict[str, Callable[[nn.Module, Tensor], Work]] = {"step": training, "proof": proof, "verify=False": without}


def tensors(work: Work) -> float:
    """MB at the peak, of tensors made by `work`."""
    with AliveBytes() as alive:
        work()
    return alive.peak / MB


def grown(work: Work) -> float:
    """MB that the process's peak grows by."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def alone(model: str, work: str, how: str) -> float:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.proof_memory", "--one", model, work, how]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def one(model: str, work: str, how: str) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    proof(nn.Sequential(nn.Linear(2, 2)), torch.randn(3, 2))()  # what is imported at the first use
    return (tensors if how == "tensors" else grown)(WORK[work](*MODELS[model]()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "WORK", "HOW"), help="print one measurement, in MB")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    if chosen.one:
        print(one(*chosen.one))
        return
    rows = []
    for name in chosen.models:
        parameters = sum(p.numel() * p.element_size() for p in MODELS[name]()[0].parameters()) / MB
        row = {"model": name, "parameters": round(parameters, 1)}
        for how in ("tensors", "process"):
            row |= {f"{how} {work}": round(alone(name, work, how), 1) for work in WORK}
        rows.append(row)
    table = Table(*rows[0], title="MB at the peak")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console().print(table)
    command = f"python -m benchmarks.proof_memory --models {' '.join(chosen.models)}"
    chosen.out.write_text(json.dumps({"command": command, **versions(), "MB": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
