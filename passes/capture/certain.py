"""Branches on a random number whose outcome is certain, as on a rate of dropped modules that is 0.

    if torch.rand(1) > self.module_dropout: ...        # 0.0

No graph branches on values, but something is known of this one: a draw of torch.rand is in [0, 1). It stays in the
graph, so that the random stream goes on as the model's does; the rate is an attribute, and a capture holds for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = {"rand", "rand_like"}
NAMES = {
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
READS = {"__bool__", "item"}
FINE = (torch.float32, torch.float64)  # a draw of these is 0 once in 2^24 times, or more seldom: taken for never


class CertainDraws(TorchFunctionMode):
    """Inside, comparisons of draws with what none can be are Python's truth values where they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[int, Tensor] = {}  # by id, and held, so that no other tensor gets it
        self.known: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and args and id(args[0]) in self.known:
            return self.known[id(args[0])][1]
        result = func(*args, **(kwargs or {}))
        if name in DRAWS:
            self.draws[id(result)] = result
        elif name in NAMES and len(args) == 2 and not kwargs and id(args[0]) in self.draws:
            truth = outcome(NAMES[name], args[1], draw=self.draws[id(args[0])])
            if truth is not None:
                self.known[id(result)] = result, truth
        return result


def outcome(comparison: str, number: Any, draw: Tensor) -> bool | None:
    """Of a draw in [0, 1) with a number; None where it depends on the draw."""
    if not isinstance(number, (int, float)):
        return None
    if number >= 1:
        return comparison in ("lt", "le")
    if number < 0 or (number == 0 and (comparison in ("lt", "ge") or draw.dtype in FINE)):
        return comparison in ("gt", "ge")
    return None
