"""Losses as they are declared: on what the model returns, on nodes of its graph, or by forward, which computes them.

`compile(..., loss=...)` gives a `kfac_fx.losses.spec.LossSpec`, a LayerCollection gives `RegisteredLosses`, and a
forward with losses inside gives `LossesInForward`. All make (coefficient, loss) pairs of the outputs of one run.

A loss on nodes has a name. A loss that is registered again under its name is another *tower*: the same loss of one more
mini-batch, computed by the same graph. The towers of a loss add up to one batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from kfac_fx.linalg.arguments import choice
from kfac_fx.losses.distributions import DISTRIBUTIONS, LossFunction
from kfac_fx.passes.errors import LossError, TargetsMissing
from kfac_fx.passes.ir import LossSite
from kfac_fx.passes.torch_losses import BY_NAME, TorchLoss

WeightedLosses = list[tuple[float, LossFunction]]
TARGET_MODES = ("data", "sample")
COEFFICIENTS: Mapping[str, Callable[[float], float]] = {
    "regular": float,
    "sqrt": math.sqrt,
    "off": lambda coefficient: 1.0,
}


class DeclaredLosses(ABC):
    """The losses whose Fisher is recorded.

    Attributes:
        of_outputs: whether they are functions of what the model returns, and not of single nodes.
        names: of every loss; losses of one name are towers of one batch. None: each is over a batch of its own.
        sites: where forward has the targets of every loss, if it has them; see `LossSite`.
    """

    of_outputs: ClassVar[bool] = False

    @property
    def names(self) -> Sequence[str] | None:
        return None

    @property
    def sites(self) -> Sequence[RegisteredLoss | FoundLoss]:
        return ()

    @property
    def ignoring(self) -> bool:
        """Whether forward computes losses that ignore some targets."""
        return False

    @abstractmethod
    def of_run(
        self,
        output: Any,
        fisher: Sequence[Tensor],
        case_dims: Sequence[int],
        targets: Any = None,
        kept: Sequence[Tensor | None] = (),
    ) -> WeightedLosses:
        """(coefficient, loss) of each output distribution.

        Args:
            output: what the model returned.
            fisher: the Fisher's outputs.
            case_dims: the dimension of the cases in each of these; empty: it is the first in all.
            targets: one a loss, in a list or tuple, or one for all; None: there are none.
            kept: of every loss in forward, the targets that are not ignored; None: all.
        """

    def tower_cases(self, fisher: Sequence[Tensor]) -> list[int]:
        """The first dimension of every tower's outputs; one entry if there are no towers."""
        return [0]

    def cases_by_loss(self, pairs: WeightedLosses) -> list[int | Tensor]:
        """The number of cases that each loss is averaged over. Towers of one name count together; without names, each
        loss counts alone."""
        total: dict[object, int | Tensor] = {}
        names = self.names or range(len(pairs))
        for name, (_, loss) in zip(names, pairs, strict=True):
            total[name] = total[name] + loss.cases if name in total else loss.cases
        return [total[name] for name in names]


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
class RegisteredLosses(DeclaredLosses):
    """All towers of all losses on nodes, in the order of their registration."""

    losses: tuple[RegisteredLoss, ...]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The Fisher's outputs: the inputs of all losses."""
        return tuple(node for loss in self.losses for node in loss.inputs)

    @property
    def by_name(self) -> dict[str, tuple[RegisteredLoss, ...]]:
        names = dict.fromkeys(loss.name for loss in self.losses)
        return {name: tuple(loss for loss in self.losses if loss.name == name) for name in names}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(loss.name for loss in self.losses)

    @property
    def sites(self) -> Sequence[RegisteredLoss]:
        return self.losses

    def on(self, fisher: Sequence[Tensor], targets: Any = None) -> WeightedLosses:
        """(coefficient, loss) of every tower, from the values of `nodes`.

        targets: one a tower, in a sequence, or a tensor if there is only one; None: those registered as tensors.
        """
        if targets is None:
            by_loss: Sequence[Any] = [
                registered.targets if isinstance(registered.targets, Tensor) else None for registered in self.losses
            ]
        else:
            by_loss = targets if isinstance(targets, (list, tuple)) else [targets]
        if len(by_loss) != len(self.losses):
            raise LossError(f"{len(self.losses)} losses are registered: pass as many targets, in a tuple")
        values, pairs = iter(fisher), []
        for registered, target in zip(self.losses, by_loss, strict=True):
            loss = registered.make(*(next(values) for _ in registered.inputs)).with_targets(target)
            loss.seed = registered.seed
            pairs.append((registered.coeff, loss))
        return pairs

    def of_run(
        self,
        output: Any,
        fisher: Sequence[Tensor],
        case_dims: Sequence[int],
        targets: Any = None,
        kept: Sequence[Tensor | None] = (),
    ) -> WeightedLosses:
        pairs, nodes = self.on(fisher, targets), 0
        for registered, (_, loss) in zip(self.losses, pairs, strict=True):
            loss.with_cases_at(case_dims[nodes] if case_dims else 0)
            nodes += len(registered.inputs)
        return without_ignored(pairs)

    def tower_cases(self, fisher: Sequence[Tensor]) -> list[int]:
        losses = zip(self.names, self.on(fisher), strict=True)
        return [loss.inputs.shape[0] for name, (_, loss) in losses if name == self.names[0]]


@dataclass(frozen=True)
class ObservedLoss:
    """A loss that Python computed in a run; see `LossSite`, which is one in a graph."""

    loss: str
    reduction: str
    inputs: Tensor
    targets: Any
    ignored: Any = None


FoundLoss = LossSite | ObservedLoss


@dataclass(frozen=True)
class LossesInForward(DeclaredLosses):
    """Losses of torch that forward computes: their inputs are the Fisher's outputs."""

    found: Sequence[FoundLoss]

    @property
    def sites(self) -> Sequence[FoundLoss]:
        return self.found

    @property
    def ignoring(self) -> bool:
        return any(site.ignored is not None for site in self.found)

    def of_run(
        self,
        output: Any,
        fisher: Sequence[Tensor],
        case_dims: Sequence[int],
        targets: Any = None,
        kept: Sequence[Tensor | None] = (),
    ) -> WeightedLosses:
        """Raises LossError if there is none."""
        if not self.found:
            first, *names = (f'"{name}"' for name in DISTRIBUTIONS)
            *others, last = BY_NAME
            raise LossError(
                "no loss is known: the Fisher is that of an output distribution.\n"
                f"Name it with compile(..., loss={first}), {', '.join(names)} or a function of the model's outputs, or "
                f"let forward compute {', '.join(others)} or {last}."
            )
        number = len(self.found)
        by_site = targets if isinstance(targets, (list, tuple)) else [targets] * len(fisher)
        every = zip(self.found, fisher, by_site, case_dims or [0] * number, kept or [None] * number, strict=True)
        return [
            likelihood(BY_NAME[site.loss], site.reduction, inputs, target, dim, its_kept)
            for site, inputs, target, dim, its_kept in every
        ]


def likelihood(
    of_torch: TorchLoss,
    reduction: str,
    inputs: Tensor,
    targets: Any = None,
    case_dim: int = 0,
    kept: Tensor | None = None,
) -> tuple[float, LossFunction]:
    """The distribution behind a loss of torch, and its weight in the mean over cases.

    case_dim: the dimension of the cases in the inputs of torch's function, which is moved to the front.
    kept: the targets that are not ignored; None: all.
    """
    if of_torch.classes_second and inputs.dim() > 2:
        inputs, case_dim = inputs.movedim(1, -1), max(0, case_dim - 1)
    distribution = DISTRIBUTIONS[of_torch.distribution]
    if kept is not None and targets is not None:
        assert distribution.ignored is not None, "bug in kfac_fx: ignored targets of a distribution that has none"
        targets = torch.where(kept, targets, distribution.ignored)
    loss = distribution(inputs, targets=targets)
    loss = (loss if kept is None else loss.keeping(kept)).with_cases_at(case_dim)
    averages = of_torch.averages_elements and reduction == "mean"
    return loss.all_cases / inputs.numel() if averages else 1.0, loss


def without_ignored(pairs: WeightedLosses) -> WeightedLosses:
    """The losses, of which ignored targets are no cases, as in the means of `F.cross_entropy`."""
    for _, loss in pairs:
        if (kept := loss.not_ignored()) is not None:
            loss.keeping(kept)
    return pairs


def evaluated(pairs: WeightedLosses, target_mode: str, coeff_mode: str) -> list[Tensor]:
    """Every loss, times its coefficient as `coeff_mode` says. Raises TargetsMissing, ValueError for unknown modes."""
    choice("target_mode", target_mode, TARGET_MODES)
    choice("coeff_mode", coeff_mode, COEFFICIENTS)
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
