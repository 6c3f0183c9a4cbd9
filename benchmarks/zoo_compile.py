"""The CPU time of `kfac_fx.compile` on every model of the zoo: `python -m benchmarks.zoo_compile`.

`python -m benchmarks.beside OLD NEW --benchmarks zoo_compile --rounds 1` compares two commits, model by model and in
sum. The models need the libraries of `benchmarks.zoo`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import kfac_fx
from benchmarks.program import console, versions
from benchmarks.zoo import LIBRARIES, entries
from benchmarks.zoo_measure import CAPTURED, DENSE_LIMIT
from benchmarks.zoo_models.entry import Entry

OUT = Path(__file__).parent / "results" / "zoo_compile.json"


def seconds(entry: Entry) -> float:
    """The CPU time of one compile, after a forward of the model."""
    torch.manual_seed(0)
    model, (args, kwargs) = entry.build().train(), entry.call(CAPTURED)
    model(*args, **kwargs)
    start = time.process_time()
    kfac_fx.compile(model, args, kwargs, loss=entry.loss, dense_limit=DENSE_LIMIT, approximations=entry.approximations)
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression that keys of models match")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kfac_fx.compile(nn.Linear(2, 2), (torch.randn(3, 2),), loss="normal")  # imports, and the layers' forms
    times, failed = {}, {}
    for entry in entries(chosen.libraries, chosen.pattern):
        try:
            times[entry.key] = seconds(entry)
        except Exception as error:  # a model that one of two commits refuses is left out of their comparison
            failed[entry.key] = f"{type(error).__name__}: {error}"[:200]
        gc.collect()
    console().print(f"{len(times)} models compile in {sum(times.values()):.1f} CPU seconds; {len(failed)} do not")
    results = {"command": "python -m benchmarks.zoo_compile", **versions(), "CPU seconds": times, "failed": failed}
    chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
