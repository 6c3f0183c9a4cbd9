"""Products of gradients and bases in every precision: `python -m benchmarks.basis_products --device cuda`.

A step of K-FAC turns the gradients of equal layers into their bases, and the step back: [L, o, i] times [L, i, i], and
[L, o, o] times [L, o, i]. The shapes are those of the layers of GPT-2 small. Their inputs have 768 entries and a bias,
so i = 769. i = 784 is the next multiple of 16, at which every row begins where the device reads fastest.

*float32* is IEEE's. *TF32* has factors of 10 bits, as with `torch.set_float32_matmul_precision("high")`. *bfloat16* has
factors and results of bfloat16. A time is the median of `TURNS` turns of `TURN` products, from an idle device to an
idle device, divided by `TURN`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import program
from kfac_fx.cli.demo import clock

OUT = Path(__file__).parent / "results" / "basis_products.json"
LAYERS, INPUTS, OUTPUTS = 12, (769, 784), (768, 2304, 3072)
PRECISIONS: Mapping[str, tuple[str, torch.dtype]] = {  # what `set_float32_matmul_precision` is told, and the dtype
    "float32": ("highest", torch.float32),
    "TF32": ("high", torch.float32),
    "bfloat16": ("highest", torch.bfloat16),
}
TURNS, TURN = 3, 10


def shapes(layers: int, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    for i in inputs:
        for o in outputs:
            yield [layers, o, i], [layers, i, i]
            yield [layers, o, o], [layers, o, i]


def milliseconds(left: Tensor, right: Tensor, turn: int) -> float:
    """The time of one product."""
    device, times = left.device, []
    torch.bmm(left, right)  # the library chooses its kernel
    for _ in range(TURNS):
        start = clock(device)
        for _ in range(turn):
            torch.bmm(left, right)
        times.append((clock(device) - start) / turn)
    return 1e3 * statistics.median(times)


def row(left: Sequence[int], right: Sequence[int], device: torch.device, turn: int) -> dict[str, Any]:
    """Milliseconds and Tflop/s by precision."""
    flops, before = 2 * left[0] * left[1] * left[2] * right[2], torch.get_float32_matmul_precision()
    a, b = (torch.randn(*shape, device=device) for shape in (left, right))
    times = {}
    try:
        for name, (precision, dtype) in PRECISIONS.items():
            torch.set_float32_matmul_precision(precision)
            times[name] = milliseconds(a.to(dtype), b.to(dtype), turn)
    finally:
        torch.set_float32_matmul_precision(before)
    rates = {name: flops / time / 1e9 if time else 0.0 for name, time in times.items()}
    return {"left": list(left), "right": list(right), "milliseconds": times, "Tflop/s": rates}


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    rows = [
        {"product": f"{result['left']} {result['right']}"}
        | {f"{name}, {unit}": result[unit][name] for unit in ("milliseconds", "Tflop/s") for name in PRECISIONS}
        for result in results
    ]
    console.print(program.table("Products of gradients and bases", rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, help=f"default: {OUT.name} in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="tiny matrices; written only with --out")
    chosen = parser.parse_args(arguments)
    device, out = chosen.device, chosen.out or (None if chosen.quick else OUT)
    sizes, turn = ((2, (9, 16), (8,)), 1) if chosen.quick else ((LAYERS, INPUTS, OUTPUTS), TURN)
    record: dict[str, Any] = {
        "command": f"python -m benchmarks.basis_products --device {device}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        **program.versions(),
        "results": [],
    }
    torch.manual_seed(0)
    for left, right in shapes(*sizes):
        record["results"].append(row(left, right, device, turn))
        if out is not None:
            out.write_text(json.dumps(record, indent=1) + "\n")
    show(record["results"], program.console())


if __name__ == "__main__":
    main()
