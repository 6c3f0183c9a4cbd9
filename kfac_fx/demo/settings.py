"""What `benchmarks/sweep.py` found: a test compares this table with `benchmarks/results/sweep.json`."""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]
"""Keyword arguments of an optimizer."""

SETTINGS: dict[str, dict[str, Settings]] = {
    "autoencoder": {
        "sgd": {"lr": 0.03, "momentum": 0.9},
        "adamw": {"lr": 0.01, "weight_decay": 0.01},
        "kfac": {"damping": 10.0, "min_damping": 1e-05, "invert_every": 5},
    },
    "classifier": {
        "sgd": {"lr": 0.3, "momentum": 0.9},
        "adamw": {"lr": 0.03, "weight_decay": 0.0},
        "kfac": {"damping": 0.01, "min_damping": 1e-05, "invert_every": 5},
    },
}
METHODS = {"sgd": "SGD", "adamw": "AdamW", "kfac": "K-FAC"}
"""The methods in the order in which they run, and their names in print."""

FEWER = 5
"""K-FAC takes this many times fewer steps than the first-order methods, in the sweep and in the demo."""


def steps_of(method: str, steps: int) -> int:
    """The steps of `method` where the first-order methods take `steps`."""
    return max(1, steps // FEWER) if method == "kfac" else steps
