"""Where the time of `kfac_fx.compile` goes: `python -m benchmarks.compile_time`.

CPU seconds of one thread, of models that people use: one forward of the model for comparison, the capture by
torch.export, the passes, the emitted module, the comparison of graph and model, and the proof with its own emission.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import kfac_fx
from benchmarks.program import console, versions
from benchmarks.zoo_models.torchvision import load
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.equivalence import check_equivalence
from kfac_fx.recording.proof import proof_gradients, with_proof_taps
from kfac_fx.recording.recorder import Recorder

OUT = Path(__file__).parent / "results" / "compile_time.json"
Example = tuple[nn.Module, tuple[Tensor, ...]]


def timm(name: str) -> Example:
    load()  # torchvision, that both libraries import
    import timm as library

    size = 224 if "vit" in name else 96
    return library.create_model(name), (torch.randn(2, 3, size, size),)


def transformers(name: str, **config: Any) -> Example:
    """Small, but as deep as the original."""
    load()
    import transformers as library

    settings = getattr(library, name.split("For")[0].replace("LMHeadModel", "") + "Config")(vocab_size=1000, **config)
    return getattr(library, name)(settings), (torch.randint(1000, (2, 16)),)


MODELS: dict[str, Callable[[], Example]] = {
    "timm/resnet50": lambda: timm("resnet50"),
    "timm/convnext_tiny": lambda: timm("convnext_tiny"),
    "timm/vit_tiny_patch16_224": lambda: timm("vit_tiny_patch16_224"),
    "timm/efficientnet_b3": lambda: timm("efficientnet_b3"),
    "transformers/GPT2LMHeadModel": lambda: transformers("GPT2LMHeadModel", n_embd=96, n_head=4, use_cache=False),
    "transformers/BertForMaskedLM": lambda: transformers(
        "BertForMaskedLM", hidden_size=64, intermediate_size=128, num_attention_heads=4
    ),
    "transformers/LlamaForCausalLM": lambda: transformers(
        "LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        use_cache=False,
    ),
}


def measure(name: str) -> dict[str, Any]:
    model, inputs = MODELS[name]()
    model(*inputs)
    seconds: dict[str, float] = {}

    def timed(step: str, function: Callable[[], Any]) -> Any:
        gc.collect()  # the garbage of the steps before it is none of its own
        start = time.process_time()
        result = function()
        seconds[step] = round(time.process_time() - start, 3)
        return result

    timed("forward", lambda: model(*inputs))
    captured = timed("capture", lambda: trace_model(model, inputs, layers=LAYERS, every_size=False))
    program = timed("passes", lambda: run(captured.program))
    recorder = timed("emission", lambda: Recorder(EmittedGraph(captured, program, model)))
    timed("likeness", lambda: check_equivalence(recorder, inputs, {}))
    values = captured.flatten(inputs, {})
    timed("proof", lambda: list(proof_gradients(with_proof_taps(recorder), values).pairs))
    return {"model": name, "nodes": len(program.graph.nodes), **seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kfac_fx.compile(nn.Linear(2, 2), (torch.randn(3, 2),), loss="normal")  # imports, and the layers' forms
    rows = [measure(name) for name in chosen.models]
    table = Table(*rows[0], title="CPU seconds of compile")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console().print(table)
    command = f"python -m benchmarks.compile_time --models {' '.join(chosen.models)}"
    chosen.out.write_text(json.dumps({"command": command, **versions(), "CPU seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
