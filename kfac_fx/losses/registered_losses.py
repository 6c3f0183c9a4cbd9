"""Losses registered on nodes of the graph, and what they are on one batch.

A loss has a name; registered again under it, it is another *tower*: the same loss of one more mini-batch, computed by
the same graph. Towers of one loss add up to one batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.passes.errors import LossError, TargetsMissing

WeightedLosses = list[tuple[float, LossFunction]]
TARGET_MODES = ("data", "sample")
COEFFICIENTS: Mapping[str, Callable[[float], float]] = {
    "regular": float,
    "sqrt": math.sqrt,
    "off": lambda coefficient: 1.0,
}


@dataclass(frozen=True, eq=False)
class RegisteredLoss:
    """One tower of one loss.

    make: from the values of the nodes `inputs` to a loss function; kind: its name in messages.
    targets: a node, a tensor, or None. coeff multiplies the loss, and the Fisher.
    """

    name: str
    kind: str
    inputs: tuple[fx.Node, ...]
    make: Callable[..., LossFunction]
    targets: fx.Node | Tensor | None
    coeff: float
    seed: int | None

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(node.name for node in self.inputs)}, name={self.name!r}, coeff={self.coeff:g})"


@dataclass(frozen=True)
class RegisteredLosses:
    """All towers of all losses, in the order of their registration."""

    losses: tuple[RegisteredLoss, ...]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The Fisher's outputs: the inputs of all losses."""
        return tuple(node for one in self.losses for node in one.inputs)

    @property
    def by_name(self) -> dict[str, tuple[RegisteredLoss, ...]]:
        names = dict.fromkeys(one.name for one in self.losses)
        return {name: tuple(one for one in self.losses if one.name == name) for name in names}

    def on(self, fisher: Sequence[Tensor], targets: Any = None) -> WeightedLosses:
        """(coefficient, loss) of every tower, from the values of `nodes`.

        targets: one a tower, in a sequence, or a tensor if there is only one; None: those registered as tensors.
        """
        if targets is None:
            given: Sequence[Any] = [one.targets if isinstance(one.targets, Tensor) else None for one in self.losses]
        else:
            given = targets if isinstance(targets, (list, tuple)) else [targets]
        if len(given) != len(self.losses):
            raise LossError(f"{len(self.losses)} losses are registered: pass as many targets, in a tuple")
        values, pairs = iter(fisher), []
        for one, target in zip(self.losses, given, strict=True):
            loss = one.make(*(next(values) for _ in one.inputs)).with_targets(target)
            loss.seed = one.seed
            pairs.append((one.coeff, loss))
        return pairs

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.losses)


def cases_by_loss(pairs: Sequence[tuple[float, LossFunction]], names: Sequence[object] | None = None) -> list[int]:
    """For every loss how many cases its mean is over: those of all towers of one name; None: no two of one name."""
    names = names or range(len(pairs))
    total: Counter[object] = Counter()
    for name, (_, loss) in zip(names, pairs, strict=True):
        total[name] += loss.cases
    return [total[name] for name in names]


def evaluated(pairs: WeightedLosses, target_mode: str, coeff_mode: str) -> list[Tensor]:
    """Every loss, times its coefficient as `coeff_mode` says. Raises TargetsMissing, ValueError for unknown modes."""
    if target_mode not in TARGET_MODES:
        raise ValueError(f"target_mode={target_mode!r} is none of {', '.join(TARGET_MODES)}")
    if coeff_mode not in COEFFICIENTS:
        raise ValueError(f"coeff_mode={coeff_mode!r} is none of {', '.join(COEFFICIENTS)}")
    missing = [type(loss).__name__ for _, loss in pairs if target_mode == "data" and loss.targets is None]
    if missing:
        raise TargetsMissing(
            f"{len(missing)} of {len(pairs)} losses were registered without targets: {', '.join(missing)}.\n"
            "Register them with targets=, hand targets= to this call, or evaluate on samples."
        )
    scale = COEFFICIENTS[coeff_mode]
    return [
        scale(coefficient) * (loss.evaluate() if target_mode == "data" else loss.evaluate_on_sample())
        for coefficient, loss in pairs
    ]
