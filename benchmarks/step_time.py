"""What a K-FAC step costs: `python -m benchmarks.step_time`.

CPU time of one thread, medians over interleaved rounds, as multiples of the same model's SGD step (under the same
compiler), beside the floor of the cost model: a layer with n rows costs 6 n i o flops forward and backward, its
statistics n (i² + o²) with symmetric products and twice that as plain products, preconditioning 2 i o (i + o) a step,
an inverse about d³ a refresh.

With `--device cuda` a time is the clock's, from an idle device to an idle device. The results of the CPU are kept in
step_time.json, those of another device or backend beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import kfac_fx
from kfac_fx.recording.backends import compiled_model

OUT = Path(__file__).parent / "results" / "step_time.json"
NEVER = 1_000_000
WARMUP = 3
SCHEDULES = ((1, 10), (10, 100))  # (statistics every, inverses every)
Batch = tuple[Tensor, Tensor]
Make = Callable[[], tuple[nn.Module, Batch, str]]  # the model, its batch, its distribution


def autoencoder(batch: int = 512, half: Sequence[int] = (784, 1000, 500, 250, 30)) -> tuple[nn.Module, Batch, str]:
    """half: the widths down to the code; the way back has them, too."""
    sizes = (*half, *reversed(half[:-1]))
    layers: list[nn.Module] = []
    for i, o in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(i, o), nn.Sigmoid()]
    x = torch.rand(batch, half[0])
    return nn.Sequential(*layers[:-1]), (x, x), "multi_bernoulli"


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = short if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def resnet8(batch: int = 128) -> tuple[nn.Module, Batch, str]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))), "categorical"


MODELS: dict[str, Make] = {"autoencoder": autoencoder, "resnet8": resnet8}
QUICK = {"quick": partial(autoencoder, 8, (12, 8, 4))}  # shows that everything runs, and measures nothing


def loss_of(kind: str, output: Tensor, target: Tensor) -> Tensor:
    if kind == "categorical":
        return F.cross_entropy(output, target)
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / len(output)


def on(device: torch.device, make: Make) -> tuple[nn.Module, Batch, str]:
    """The same numbers on every device."""
    torch.manual_seed(0)
    model, (x, y), kind = make()
    return model.to(device), (x.to(device), y.to(device)), kind


def stepper(make: Make, optimizer: str, backend: str, device: torch.device, **options: Any) -> Callable[[], None]:
    """One training step of a fresh model, from the same start."""
    model, (x, y), kind = on(device, make)
    run: Callable[..., Any] = model if backend == "eager" else compiled_model(model, backend)
    opt: torch.optim.Optimizer
    if optimizer == "sgd":
        opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    elif optimizer == "adamw":
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        run = net = kfac_fx.compile(model, (x,), loss=kind, backend=backend)
        opt = kfac_fx.KFAC(net, **{"lr": 1e-4, "damping": 1.0, **options})

    def step() -> None:
        opt.zero_grad()
        loss_of(kind, run(x), y).backward()
        opt.step()

    return step


def phases(make: Make, backend: str, device: torch.device) -> dict[str, Callable[[], None]]:
    """Steps that differ by one kind of work each."""
    step = partial(stepper, make, backend=backend, device=device)
    plain = {"cov_update_every": NEVER, "invert_every": NEVER}
    recording = {**plain, "cov_update_every": 1}
    return {
        "sgd": step("sgd"),
        "adamw": step("adamw"),
        "plain": step("kfac", **plain),
        "inverse": step("kfac", **{**plain, "invert_every": 1}),
        "sampled": step("kfac", **recording),
        "sampled 1/4": step("kfac", fraction=0.25, **recording),
        "empirical": step("kfac", estimation_mode="empirical", **recording),
        "qmodel": step("kfac", lr=None, momentum=None, momentum_type="qmodel", **plain),
    }


def clock(device: torch.device) -> float:
    """Seconds: of the CPU's work or, where another device works, of the world when it has done all it was given."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def measure(steps: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each step; one of each in every round, so that the machine's moods hit all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # compilation, first factors and inverses, a CUDA graph's warming up and capture
        for _ in range(WARMUP):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = clock(device)
            step()
            times[name].append(clock(device) - start)
    return {name: statistics.median(each) for name, each in times.items()}


def floor(make: Make, every: tuple[int, int], symmetric: bool) -> float:
    """The cost model's ratio to the SGD step, with statistics that ride on the training backward."""
    torch.manual_seed(0)
    model, (x, _), kind = make()
    net = kfac_fx.compile(model, (x,), loss=kind)
    counts = net.record((x,), {}).statistics
    train = extra = 0.0
    for one in net.registrations:
        if one.matrix is None or "count" not in counts[one.parameters]:
            continue
        g, o, i = one.matrix.shape
        n = float(counts[one.parameters]["count"])
        train += 6 * n * g * i * o
        extra += (1 if symmetric else 2) * n * g * (i * i + o * o) / every[0]
        extra += 2 * g * i * o * (i + o) + g * (i**3 + o**3) / every[1]
    return 1 + extra / train


def ratios(times: dict[str, float], every: tuple[int, int]) -> dict[str, float]:
    """Mean step over a cycle as a multiple of SGD's: AdamW, and K-FAC by kind of statistics."""
    inverse = (times["inverse"] - times["plain"]) / every[1]
    return {"sgd": 1.0, "adamw": times["adamw"] / times["sgd"]} | {
        kind: (times["plain"] + (times[kind] - times["plain"]) / every[0] + inverse) / times["sgd"]
        for kind in ("sampled", "sampled 1/4", "empirical")
    }


def run(models: Mapping[str, Make], rounds: int, backend: str, device: torch.device) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, make in models.items():
        torch.compiler.reset()  # torch.compile takes eight models of a class, and leaves the ninth as it is
        times = measure(phases(make, backend, device), rounds, device)
        cycles = {
            f"{a},{b}": {
                **ratios(times, (a, b)),
                "floor, plain products": floor(make, (a, b), symmetric=False),
                "floor, symmetric products": floor(make, (a, b), symmetric=True),
            }
            for a, b in SCHEDULES
        }
        results[name] = {"milliseconds": {k: 1e3 * v for k, v in times.items()}, "ratios": cycles}
    return results


def show(results: dict[str, Any], console: Console) -> None:
    for name, found in results.items():
        times = found["milliseconds"]
        table = Table(title=f"{name}: step time as a multiple of SGD's ({times['sgd']:.1f} ms)")
        table.add_column("statistics every, inverses every")
        for kind in next(iter(found["ratios"].values())):
            table.add_column(kind, justify="right")
        for every, row in found["ratios"].items():
            table.add_row(every, *(f"{value:.2f}" for value in row.values()))
        console.print(table)
        console.print("ms a step: " + ", ".join(f"{kind} {value:.1f}" for kind, value in times.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, help="default: named after the device and the backend")
    parser.add_argument("--quick", action="store_true", help="a toy, once; nothing is written")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    backend, device = chosen.backend, chosen.device
    if chosen.quick:
        show(run(QUICK, 1, backend, device), Console())
        return
    results = run({name: MODELS[name] for name in chosen.models}, chosen.rounds, backend, device)
    show(results, Console())
    record = {
        "command": f"python -m benchmarks.step_time --rounds {chosen.rounds} --backend {backend} --device {device}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "results": results,
    }
    others = [name for name, usual in ((device.type, "cpu"), (backend, "eager")) if name != usual]
    out = chosen.out or OUT.with_stem("_".join([OUT.stem, *others]))
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
