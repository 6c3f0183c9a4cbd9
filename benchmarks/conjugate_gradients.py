"""Iterations of conjugate gradients, plain and preconditioned: `python -m benchmarks.conjugate_gradients`.

(H + δ I) x = v, with H the Gauss-Newton matrix of a mean of squared errors over 500 cases and v a gradient, to a
residual of 1e-6 in float64. The preconditioners are the Kronecker factors, their square root, and the exact diagonal
blocks of H, one a layer.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

import kfac_fx
from benchmarks.program import console

OUT = Path(__file__).parent / "results" / "conjugate_gradients.json"
CASES, WIDTH, OUTPUTS = 500, 10, 3
PROBLEMS = {  # (layers, whether the inputs have scales from 0.03 to 30)
    "one layer, inputs of different scales": (1, True),
    "two layers": (2, False),
    "two layers, inputs of different scales": (2, True),
    "four layers": (4, False),
    "four layers, inputs of different scales": (4, True),
}
DAMPINGS = 1e-2, 1e-4


def network(layers: int) -> nn.Sequential:
    hidden = [layer for _ in range(layers - 1) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, OUTPUTS))


def iterations(
    layers: int, scaled: bool, dampings: Sequence[float] = DAMPINGS, most: int = 5000
) -> list[dict[str, int]]:
    """One row a damping."""
    torch.manual_seed(0)
    model, x = network(layers).double(), torch.randn(CASES, WIDTH, dtype=torch.float64)
    if scaled:
        x = x * torch.logspace(-1.5, 1.5, WIDTH, dtype=torch.float64)
    theta = {name: p.detach() for name, p in model.named_parameters()}
    apply = lambda parameters: functional_call(model, parameters, (x,))  # noqa: E731
    outputs, pull = vjp(apply, theta)
    (gradient,) = pull((outputs - torch.randn_like(outputs)) * 2 / CASES)

    def product(vector: dict[str, Tensor]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = pull(jvp(apply, (theta,), (vector,))[1] * 2 / CASES)[0]
        return result

    def spectrum(approximation: str | None) -> kfac_fx.ModelSpectrum:
        chosen = None if approximation is None else {"*": approximation}
        net = kfac_fx.compile(model, (x,), loss="normal", approximations=chosen)
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
        estimator.update_covariances(x)
        return estimator.spectrum()

    kronecker, blocks = spectrum(None), spectrum("full")
    columns = {"none": (kronecker, 0.0), "factors": (kronecker, 1.0), "root": (kronecker, 0.5), "blocks": (blocks, 1.0)}
    return [
        {
            name: of.at(damping=damping).solve(
                gradient, product, tolerance=1e-6, iterations=most, exponent=exponent
            ).iterations
            for name, (of, exponent) in columns.items()
        }
        for damping in dampings
    ]  # fmt: skip


def rows() -> list[dict[str, Any]]:
    return [
        {"problem": name, "damping": f"{damping:g}", **row}
        for name, problem in PROBLEMS.items()
        for damping, row in zip(DAMPINGS, iterations(*problem), strict=True)
    ]


def main() -> None:
    torch.set_num_threads(1)
    found = rows()
    shown = Table(*found[0])
    for row in found:
        shown.add_row(*map(str, row.values()))
    console().print(shown)
    record = {
        "command": "python -m benchmarks.conjugate_gradients",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "iterations": found,
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
