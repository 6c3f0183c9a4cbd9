"""Factors, corrected eigenvalues and scores of a model with GPT-2 small's shapes: `python -m benchmarks.gpt2_factors`.

124 million random parameters, batches of 2 x 128 tokens, float32, corrected by sequences. Every number of parts has a
process of its own. Peaks are those of its resident memory, as the system counts it, with Python, torch and the model.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import kfac_fx
from benchmarks.decoder import Decoder
from benchmarks.program import console

OUT = Path(__file__).parent / "results" / "gpt2_factors.json"
GB = 1e9


class GPT2(nn.Module):
    """Radford et al. 2019, "Language models are unsupervised multitask learners", the model with 12 layers."""

    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 50257, length: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Decoder(width, heads=width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.norm(self.layers(x)) @ self.tokens.weight.T
        return logits


def batches(number: int, vocabulary: int, examples: int = 2, length: int = 128) -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(vocabulary, (number, examples, length + 1))
    return [(part[:, :-1], part[:, 1:]) for part in ids]


def memory(field: str) -> float:
    """GB of resident memory: "VmRSS" now, "VmHWM" at the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024 / GB


def measured(phase: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of a phase, its CPU seconds, and the peak of memory while it ran."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    start = time.process_time()
    result = phase()
    return result, {"CPU seconds": time.process_time() - start, "peak GB": memory("VmHWM")}


def run(layers: int, parts: int, number: int) -> dict[str, Any]:
    """Fit a spectrum part by part, and score all batches for the examples of the first."""
    torch.manual_seed(0)
    model = GPT2(layers).eval()
    data = batches(number, model.tokens.num_embeddings)
    phases: dict[str, dict[str, float]] = {}

    def compiled() -> kfac_fx.CompiledModule:
        net = kfac_fx.compile(model, (data[0][0],), loss="categorical")
        net.recorder((data[0][0],), {})  # the proof
        return net

    net, phases["compile and prove"] = measured(compiled)
    spectrum, phases["fit"] = measured(lambda: kfac_fx.fit_spectrum(net, data, case="sequence", parts=parts))
    damped = spectrum.at(damping=kfac_fx.Relative(0.1))
    queries, phases["precondition"] = measured(lambda: damped.precondition(data[0]))
    scores, phases["scores"] = measured(lambda: queries.scores_of_all(data))
    own, phases["self-scores"] = measured(lambda: torch.cat([damped.self_scores(batch) for batch in data]))
    torch.testing.assert_close(scores.diagonal()[: len(queries)], own[: len(queries)], rtol=1e-4, atol=0)
    return {
        "parts": parts,
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "eigenvalues": sum(values.numel() for values in spectrum.eigenvalues().values()),
        "batches": number,
        "phases": phases,
        "self-scores": own.tolist(),
    }


def in_own_process(layers: int, parts: int, number: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpt2_factors", "--layers", str(layers), "--batches", str(number)]
    done = subprocess.run([*command, "--parts", str(parts), "--here"], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows(results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """One row a number of parts: CPU seconds and GB by phase."""
    return [
        {
            "parts": str(result["parts"]),
            **{
                phase: f"{figures['CPU seconds']:,.0f} s, {figures['peak GB']:.1f} GB"
                for phase, figures in result["phases"].items()
            },
        }
        for result in results
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", type=int, default=[4, 1])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--here", action="store_true", help="measure in this process, and print JSON")
    chosen = parser.parse_args(arguments)
    if chosen.here:
        torch.set_num_threads(1)
        print(json.dumps([run(chosen.layers, parts, chosen.batches) for parts in chosen.parts][-1]))
        return
    command = f"python -m benchmarks.gpt2_factors --layers {chosen.layers} --batches {chosen.batches} --parts"
    record = {
        "command": " ".join([command, *map(str, chosen.parts)]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "results": [],
    }
    for parts in chosen.parts:
        record["results"].append(in_own_process(chosen.layers, parts, chosen.batches))
        chosen.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # a row may take an hour
    shown = Table(*rows(record["results"])[0])
    for row in rows(record["results"]):
        shown.add_row(*row.values())
    console().print(shown)


if __name__ == "__main__":
    main()
