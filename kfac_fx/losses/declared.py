"""Losses as they are declared: on what the model returns, on nodes of its graph, or by forward, which computes them.

`compile(..., loss=...)` gives a `LossSpec`, a function from what the model returns to its losses (`loss_from`). A
LayerCollection gives `RegisteredLosses`, and a forward with losses inside gives `LossesInForward`. All make
(coefficient, loss) pairs of the outputs of one run.

A loss on nodes has a name. A loss that is registered again under its name is another *tower*: the same loss of one more
mini-batch, computed by the same graph. The towers of a loss add up to one batch.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from kfac_fx.linalg.arguments import choice
from kfac_fx.losses.distributions import DISTRIBUTIONS, LossFunction, OnehotCategorical
from kfac_fx.passes import results
from kfac_fx.passes.errors import LossError, TargetsMissing, nearest
from kfac_fx.passes.ir import LossSite
from kfac_fx.passes.torch_losses import BY_NAME, SHORT, TORCH_LOSSES, TorchLoss

WeightedLosses = list[tuple[float, LossFunction]]
TARGET_MODES = ("data", "sample")
DIVIDED_BY_CASES = (2 / 3, 3 / 2)  # a sum of so many means is divided by a number of cases, though by another one
COEFFICIENTS: Mapping[str, Callable[[float], float]] = {
    "regular": float,
    "sqrt": math.sqrt,
    "off": lambda coefficient: 1.0,
}
KINDS = [kind.__name__ for kind in DISTRIBUTIONS.values()]
OF_TORCH = {name: loss.short for loss in TORCH_LOSSES for name in (loss.name, loss.module.__name__)}
NAMES = (*DISTRIBUTIONS, *(loss.short for loss in TORCH_LOSSES))
MEANT = {synonym: loss.short for loss in TORCH_LOSSES for synonym in loss.synonyms} | {
    synonym: name for name, kind in DISTRIBUTIONS.items() for synonym in kind.synonyms
}


def check_tables(losses: Iterable[TorchLoss], distributions: Mapping[str, type[LossFunction]]) -> None:
    """Raises AssertionError, at the import of kfac_fx, for rows of the tables of losses that do not fit together."""
    table, wrong = "DISTRIBUTIONS in kfac_fx/losses/distributions.py", list[str]()
    for loss in losses:
        row = f"the row of F.{loss.name} in passes/torch_losses.py"
        if loss.distribution not in distributions:
            wrong.append(
                f"{row} names the distribution {loss.distribution!r}, and {table} has {', '.join(distributions)}: add "
                f"its class there, with name = {loss.distribution!r}, or correct the row."
                f"{nearest(loss.distribution, distributions)}"
            )
        for argument in (*loss.outside, *loss.by_default):
            if argument not in loss.arguments:
                wrong.append(
                    f"{row} names the argument {argument!r}, and the function has {', '.join(loss.arguments)}."
                    f"{nearest(argument, loss.arguments)}"
                )
    for name, kind in distributions.items():
        lacks = sorted(getattr(kind, "__abstractmethods__", ()))
        lacks += [attribute for attribute in ("name", "targets_like") if not getattr(kind, attribute, "")]
        if lacks:
            wrong.append(f"the class {kind.__name__} of {name!r} in {table} lacks {', '.join(lacks)}: write it there")
    assert not wrong, "bug in kfac_fx: " + "\n".join(wrong)


check_tables(TORCH_LOSSES, DISTRIBUTIONS)

NLL = ("nll", "neg_log_likelihood", "negative_log_likelihood")
UNNAMED = (
    " For another loss leave loss= out, and the factors are those of the gradients that training sends back; or pass "
    "the class of a distribution that is near it, see the page on losses of your own."
)
SEVERAL = (
    "For several outputs write loss=lambda outputs: [kfac_fx.losses.{}({}), (0.5, kfac_fx.losses.Normal({}))]\n"
    "A number in front of a loss is its coefficient. Normal is a sum over the k elements of a case, so the mean over "
    "them has the coefficient 1 / k"
)
OF_VARIANCES = ("gaussian_nll", "gaussiannll", "heteroscedastic")
WITH_VARIANCES = (
    "the loss of a mean and a variance is of two outputs: write loss=lambda outputs: "
    "kfac_fx.losses.NormalMeanVariance(outputs[0], outputs[1]), with the variance second"
)


@dataclass(frozen=True)
class RowsOfLoss:
    """The rows of a loss that forward computes.

    Attributes:
        kept: those that count, of the shape of the targets of classes; None: all, or `weights` tells.
        weights: the gradient of the returned loss with respect to this one, of its shape; None: it is not known from
            the inputs.
        divisor: the number that the returned loss is divided by, which does not grow with the batch; None: there is
            none.
    """

    kept: Tensor | None = None
    weights: Tensor | float | None = None
    divisor: Tensor | float | None = None

    def first(self, cases: int | None, part: float, of_mean: bool) -> RowsOfLoss:
        """The rows of the first cases, which are this part of all, so that they stand for all; None: of all.

        of_mean: the loss of torch is a sum, and the returned one a mean.
        """
        if cases is None:
            return self
        kept, weights = None if self.kept is None else self.kept[:cases], self.weights
        weights = weights[:cases] if isinstance(weights, Tensor) and weights.dim() else weights
        return RowsOfLoss(kept, weights / part if of_mean and weights is not None else weights, self.divisor)


ALL_ROWS = RowsOfLoss()


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
    def of_inputs(self) -> bool:
        """Whether inputs tell which rows of the losses that forward computes count, and with which weights."""
        return False

    @abstractmethod
    def of_run(
        self,
        output: Any,
        fisher: Sequence[Tensor],
        case_dims: Sequence[int],
        targets: Any = None,
        rows: Sequence[RowsOfLoss] = (),
    ) -> WeightedLosses:
        """(coefficient, loss) of each output distribution.

        Args:
            output: what the model returned.
            fisher: the Fisher's outputs.
            case_dims: the dimension of the cases in each of these; empty: it is the first in all.
            targets: one a loss, in a list or tuple, or one for all; None: there are none.
            rows: of every loss in forward, which count, and with which weight; empty: all alike.
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


def likelihood(
    of_torch: TorchLoss,
    reduction: str,
    inputs: Tensor,
    targets: Any = None,
    case_dim: int = 0,
    rows: RowsOfLoss = ALL_ROWS,
) -> tuple[float, LossFunction]:
    """The distribution behind a loss of torch, and its weight in the mean over cases.

    targets: as torch's function takes them: for classes also their probabilities, of the shape of the inputs.
    case_dim: the dimension of the cases in the inputs of torch's function, which is moved to the front.
    """
    case_dim = moved_dim(of_torch, inputs, case_dim)
    distribution, kept = DISTRIBUTIONS[of_torch.distribution], rows.kept
    soft = of_torch.classes_second and are_probabilities_of_classes(targets, inputs)
    if of_torch.classes_second and inputs.dim() > 2:
        inputs, targets = inputs.movedim(1, -1), targets.movedim(1, -1) if soft else targets
    if soft:
        distribution, targets = OnehotCategorical, targets if kept is None else targets * kept.unsqueeze(-1)
    elif kept is not None and targets is not None:
        assert distribution.ignored is not None, "bug in kfac_fx: ignored targets of a distribution that has none"
        whole = isinstance(targets, Tensor) and targets.shape == kept.shape  # else `evaluate` raises
        targets = torch.where(kept, targets, distribution.ignored) if whole else targets
    loss = distribution(inputs, targets=targets)
    loss = (loss if kept is None else loss.keeping(kept)).with_cases_at(case_dim)
    weights = by_case(rows.weights, case_dim)
    if isinstance(weights, Tensor) and not of_torch.classes_second:
        not_masked = (weights != 0).reshape(*loss.inputs.shape[: loss.case_axes], -1).any(-1)
        loss = loss.keeping(not_masked)
    averages = of_torch.averages_elements and reduction == "mean"
    return loss.all_cases / max(1, inputs.numel()) if averages else 1.0, loss


def are_probabilities_of_classes(targets: Any, inputs: Tensor) -> bool:
    """Whether `F.cross_entropy` takes these targets for probabilities of the classes, as of mixup and distillation."""
    return isinstance(targets, Tensor) and targets.is_floating_point() and targets.shape == inputs.shape


def moved_dim(of_torch: TorchLoss, inputs: Tensor, case_dim: int) -> int:
    """The dimension of the cases in the inputs of a loss, with its classes last."""
    return max(0, case_dim - 1) if of_torch.classes_second and inputs.dim() > 2 else case_dim


def by_case(weights: Tensor | float | None, case_dim: int) -> Tensor | None:
    """Weights of single rows with the cases in front; None for those that all rows share."""
    if not isinstance(weights, Tensor) or not weights.dim():
        return None
    return weights.movedim(case_dim, 0)


def without_ignored(pairs: WeightedLosses) -> WeightedLosses:
    """The losses, of which ignored targets are no cases, as in the means of `F.cross_entropy`."""
    for _, loss in pairs:
        if (kept := loss.not_ignored()) is not None:
            loss.keeping(kept)
    return pairs


# --- losses on nodes of the graph -------------------------------------------------------------------------------------


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
        rows: Sequence[RowsOfLoss] = (),
    ) -> WeightedLosses:
        pairs, nodes = self.on(fisher, targets), 0
        for registered, (_, loss) in zip(self.losses, pairs, strict=True):
            loss.with_cases_at(case_dims[nodes] if case_dims else 0)
            nodes += len(registered.inputs)
        return without_ignored(pairs)

    def tower_cases(self, fisher: Sequence[Tensor]) -> list[int]:
        losses = zip(self.names, self.on(fisher), strict=True)
        return [loss.inputs.shape[0] for name, (_, loss) in losses if name == self.names[0]]


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


# --- losses that forward computes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObservedLoss:
    """A loss that Python computed in a run; see `LossSite`, which is one in a graph.

    Attributes:
        result: its value.
        weights: the gradient of the returned loss with respect to the result; None: there is no gradient.
        linear, elementwise: see `passes.ir.Way`.
        divisor: the number that the returned loss divides it by; None: there is no way between.
        divided: whether that is a division, and no factor 1 / n.
        number: of the loss among those that Python computed in the run.
        counts_left_out, averages_cases: see `passes.losses`.
    """

    loss: str
    reduction: str
    inputs: Tensor
    targets: Any
    result: Tensor
    ignored: Any = None
    class_weights: Any = None
    chunk_of: int = 0
    weights: Tensor | float | None = None
    linear: bool = True
    elementwise: bool = True
    divisor: Tensor | None = None
    divided: bool = True
    number: int = 0
    counts_left_out: bool = False
    averages_cases: bool = False


FoundLoss = LossSite | ObservedLoss


@dataclass(frozen=True)
class Division:
    """How the number is read that forward divides a sum over cases by, as the first batch tells.

    Attributes:
        of_elements: whether it counts the elements of the cases.
        inverses_from: the least whole n of which a factor 1 / n that forward writes is a division by n, and no weight
            of the loss.
    """

    of_elements: bool = False
    inverses_from: float = math.inf

    def divides(self, number: Any, exponent: int) -> bool:
        """Whether one of the numbers of `passes.ir.Way` is such a divisor."""
        return not isinstance(number, (int, float)) or exponent > 0 or 1 / number >= self.inverses_from


@dataclass(frozen=True)
class LossesInForward(DeclaredLosses):
    """Losses of torch that forward computes: their inputs are the Fisher's outputs.

    Attributes:
        is_mean: whether what forward returns is a mean over cases, and not a sum. A sum may be divided by a number that
            is given, such as that of the cases in all micro-batches of a step. The division is no part of the
            coefficients, as it is none where the user divides what forward returns.
        division: how that number is read.
    """

    found: Sequence[FoundLoss]
    is_mean: bool = True
    division: Division = Division()

    @property
    def names(self) -> Sequence[str]:
        return [str(site.chunk_of) for site in self.found]

    @property
    def sites(self) -> Sequence[FoundLoss]:
        return self.found

    @property
    def of_inputs(self) -> bool:
        return any(
            site.ignored is not None or site.class_weights is not None or constant_of(site) is None
            for site in self.found
        )

    def of_run(
        self,
        output: Any,
        fisher: Sequence[Tensor],
        case_dims: Sequence[int],
        targets: Any = None,
        rows: Sequence[RowsOfLoss] = (),
    ) -> WeightedLosses:
        """Raises LossError if there is none."""
        if not self.found:
            raise no_loss_known()
        number = len(self.found)
        by_site = targets if isinstance(targets, (list, tuple)) else [targets] * len(fisher)
        rows = rows or [self.rows_of(site) for site in self.found]
        every = list(zip(self.found, fisher, by_site, case_dims or [0] * number, rows, strict=True))
        pairs = [
            likelihood(BY_NAME[site.loss], site.reduction, inputs, target, dim, its_rows)
            for site, inputs, target, dim, its_rows in every
        ]
        cases, undivided = self.cases_by_loss(pairs), self.undivided(pairs[0][1], rows)
        return [
            (self.coefficient(site, weight, loss, its_rows.weights, dim, its_cases, cases[0], undivided), loss)
            for (site, _, _, dim, its_rows), (weight, loss), its_cases in zip(every, pairs, cases, strict=True)
        ]

    def rows_of(self, site: FoundLoss) -> RowsOfLoss:
        """The rows of a loss as far as forward alone tells."""
        return RowsOfLoss(weights=constant_of(site), divisor=divisor_of(site, self.division))

    def undivided(self, loss: LossFunction, rows: Sequence[RowsOfLoss]) -> Tensor | float:
        """The multiple of the returned loss that is a sum over cases, if the returned loss is no mean over them.

        loss: the first one.
        """
        divisor = None if self.is_mean else next((of_loss.divisor for of_loss in rows), None)
        return 1.0 if divisor is None else divisor / elements_of_case(loss) if self.division.of_elements else divisor

    def coefficient(
        self,
        site: FoundLoss,
        weight: float,
        loss: LossFunction,
        weights: Tensor | float | None,
        case_dim: int,
        cases: int | Tensor,
        first: int | Tensor,
        undivided: float | Tensor,
    ) -> Any:
        """The weight of a loss in the mean over its cases; of several numbers, one a case or an element, they broadcast
        with the inputs.

        The sum over the cases of the first loss is that many times the returned loss if that is a mean over them, and
        the returned loss itself if that is a sum.

        Args:
            weight: of its mean over cases in its own value.
            weights: see `RowsOfLoss`; None: the loss stands for itself.
            cases: the number that the loss is averaged over, with those of its other chunks. first: that of the first.
            undivided: see the method.
        """
        if weights is None:
            return weight
        of_torch = BY_NAME[site.loss]
        each = by_case(weights, moved_dim(of_torch, loss.inputs, case_dim))
        row: Any = weights
        if each is not None:
            row = each.unsqueeze(-1) if of_torch.classes_second else each
        elif site.reduction == "mean":
            if self.is_mean and [other.chunk_of for other in self.found].count(site.chunk_of) == 1:
                return weights * weight
            row = weights * weight / in_precision(loss.cases, loss.inputs)
        if self.is_mean:
            return row * cases
        row = row * undivided
        return row if site.chunk_of == self.found[0].chunk_of else row * cases / first


def in_precision(cases: int | Tensor, of: Tensor) -> int | Tensor:
    """A number that divides in the precision of a tensor: whole numbers on the device divide in float32."""
    return cases.to(torch.promote_types(of.dtype, torch.float32)) if isinstance(cases, Tensor) else cases


def elements_of_case(loss: LossFunction) -> float:
    return loss.inputs.numel() / max(1, loss.all_cases)


def constant_of(site: FoundLoss) -> float | None:
    """The weight of a loss in what forward returns, where it is the same for all inputs."""
    if isinstance(site, ObservedLoss):
        return site.weights if isinstance(site.weights, float) else None
    return None if site.way is None else site.way.constant


def divisor_of(site: FoundLoss, division: Division) -> Tensor | float | None:
    """The number that the returned loss divides a loss by, where it is the same for all inputs; None if there is none,
    or if the inputs tell it."""
    if isinstance(site, ObservedLoss):
        if site.divisor is None or site.divided:
            return site.divisor
        return torch.where(site.divisor >= division.inverses_from, site.divisor, 1.0)
    divisors = [pair for pair in (() if site.way is None else site.way.divisors) if division.divides(*pair)]
    constants = [divisor**exponent for divisor, exponent in divisors if isinstance(divisor, (int, float))]
    return math.prod(constants) if constants and len(constants) == len(divisors) else None


def no_loss_known() -> LossError:
    first, *names = (f'"{name}"' for name in DISTRIBUTIONS)
    *others, last = BY_NAME
    return LossError(
        "no loss is known: the Fisher is that of an output distribution.\n"
        f"Name it with compile(..., loss={first}), {', '.join(names)} or a function of the model's outputs, or let "
        f"forward compute {', '.join(others)} or {last}. For another loss write KFAC(net) without an estimation_mode, "
        "which then takes its gradients, and no rule that computes with the Fisher of every batch."
    )


# --- losses of what the model returns ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossSpec(DeclaredLosses):
    """From the outputs of a forward (and the true targets, where there are any) to (coefficient, loss) pairs."""

    make: Callable[[Any], Any]
    name: str
    named: bool = False  # made of one output tensor
    of_torch: TorchLoss | None = None  # torch's loss of this name, with its mean
    of_outputs: ClassVar[bool] = True

    def of_run(
        self,
        output: Any,
        fisher: Sequence[Tensor],
        case_dims: Sequence[int],
        targets: Any = None,
        rows: Sequence[RowsOfLoss] = (),
    ) -> WeightedLosses:
        pairs = self(output, targets, next(iter(case_dims), 0))
        if case_dims and self.of_torch is None:  # a loss of torch moves the cases to the front itself
            for number, (_, loss) in enumerate(pairs):
                loss.with_cases_at(self.axis_of_cases(number, loss, output, list(zip(fisher, case_dims, strict=True))))
        return without_ignored(pairs)

    def axis_of_cases(self, number: int, loss: LossFunction, output: Any, placed: Sequence[tuple[Tensor, int]]) -> int:
        """The axis of the cases in the inputs of a loss, where they are not the first in all outputs.

        It is that of the output that the inputs are; or, of inputs that are computed from outputs, the one along which
        only the first place changes if the first case does. A function that gives an output to a loss of classes has
        put the classes last: the rows of x.T are cases, too, where x compares every case with every other.

        placed: every one of the Fisher's outputs, and the dimension of its cases.

        Raises LossError if there is none.
        """
        for value, dim in placed:
            if loss.inputs is value:
                return 0 if loss.of_classes and dim == value.ndim - 1 and not self.named else dim
        with torch.no_grad():
            changed = [value.clone() for value, _ in placed]
            for value, (_, dim) in zip(changed, placed, strict=True):
                value.select(dim, 0).copy_(perturbed(value.select(dim, 0)))
            other = self(replaced(output, [value for value, _ in placed], changed))[number][1]
            differs = (
                (loss.inputs != other.inputs).movedim(-1, 0).any(0)
                if loss.inputs.ndim > 1
                else loss.inputs != other.inputs
            )
            axes = [axis for axis in range(differs.ndim) if not differs.movedim(axis, 0)[1:].any()]
        if len(axes) == 1 or (axes and differs.shape[axes[0]] > 1):
            return axes[0]
        raise LossError(
            f"{self.name} gives a {type(loss).__name__} of inputs {list(loss.inputs.shape)}, and no axis of "
            "it has one place for every case. The cases of the model are on another dimension than the first "
            "(net.report): keep them apart, as in loss=lambda outputs: "
            f"kfac_fx.losses.{type(loss).__name__}(outputs.movedim(1, 0))."
        )

    def __call__(self, outputs: Any, targets: Any = None, case_dim: int = 0) -> WeightedLosses:
        """(coefficient, loss) of what the model returned.

        Args:
            targets: one tensor, or a sequence of one a loss where there are several losses.
            case_dim: the dimension of the cases in the output of a loss of torch.
        """
        if self.of_torch is not None:
            (targets,) = targets if isinstance(targets, (list, tuple)) and len(targets) == 1 else (targets,)
            output = one_tensor(outputs, self.name, expression_of(self.of_torch), self.of_torch.classes_second)
            return [likelihood(self.of_torch, "mean", output, targets, case_dim)]
        try:
            result = self.make(outputs)
        except Exception as error:
            if not self.named:
                error.add_note(f"{self.name} raised this, called with what the model returned: {structure(outputs)}")
            raise
        if isinstance(result, list | tuple) and not result:
            raise LossError(f"{self.name} returned no loss; return at least one loss of kfac_fx.losses")
        refuse_other_pair(result, self.name)
        single = not isinstance(result, list | tuple) or _is_pair(result)
        losses = [_pair(loss, self.name, outputs) for loss in ([result] if single else result)]
        for _, loss in losses:
            if not loss.inputs.ndim:
                raise loss_of_number(self.name, loss, outputs)
        if targets is None:
            return losses
        each_targets = targets if isinstance(targets, (list, tuple)) or len(losses) > 1 else [targets]
        if not isinstance(each_targets, Sequence) or len(each_targets) != len(losses):
            raise LossError(f"{self.name} gives {len(losses)} losses: pass as many targets, in a tuple")
        for (_, loss), target in zip(losses, each_targets, strict=True):
            loss.with_targets(target)
        return losses


def loss_of_number(name: str, loss: LossFunction, outputs: Any) -> LossError:
    """The error for a distribution of a single number, such as the loss that a model returns next to its logits."""
    kind = type(loss).__name__
    others = any(isinstance(leaf, Tensor) and leaf.ndim for leaf in results.tree_leaves(outputs))
    output = place_of_tensor(outputs) if others else "outputs"
    return LossError(
        f"{name} gives a {kind} of one number, as a loss is, and a distribution is that of outputs with a dimension of "
        f"cases: write loss=lambda outputs: kfac_fx.losses.{kind}({output}), or leave loss= out if forward computes a "
        "loss of torch"
    )


def loss_from(spec: str | type[LossFunction] | Callable[[Any], Any]) -> LossSpec:
    """Read `compile(..., loss=spec)`.

    Args:
        spec: a name of a distribution, such as "categorical" or "normal" (variance 0.5), where the model returns one
            tensor with the event on its last axis; or of a loss of torch, such as "cross_entropy" or "mse", with its
            mean and, for classes, its dimension 1; a class of `kfac_fx.losses`; or a function of the model's outputs
            that returns a loss, several losses, or (coefficient, loss) pairs. The coefficient multiplies the loss and
            its Fisher. `NAMES` has all names.

    Raises LossError for an unknown name, for something else than a name or a function, and when called for outputs
    that a named loss cannot read or a function that returns no loss.
    """
    if isinstance(spec, str):
        if spec in SHORT:
            of_torch = SHORT[spec]
            fixed = not of_torch.averages_elements  # else the coefficient depends on the sizes of the output
            return LossSpec(lambda out: likelihood(of_torch, "mean", out)[1], f"loss={spec!r}", fixed, of_torch)
        if without_loss_in_name(spec) in NLL:
            raise LossError(
                f"loss {spec!r} is none of {', '.join(map(repr, NAMES))}. F.nll_loss takes logarithms of "
                'probabilities, and these are logits, too: write loss="cross_entropy" if forward ends with log_softmax '
                "and you train F.nll_loss(net(x), y), and also if forward returns logits for F.cross_entropy."
            )
        if without_loss_in_name(spec) in OF_VARIANCES:
            raise LossError(f"loss {spec!r} is none of {', '.join(map(repr, NAMES))}: {WITH_VARIANCES}")
        meant = MEANT.get(without_loss_in_name(spec))
        choice("loss", spec, NAMES, LossError, meant, otherwise=UNNAMED)
        return LossSpec(_of_one_tensor(DISTRIBUTIONS[spec], spec), f"loss={spec!r}", named=True)
    if isinstance(spec, type) and issubclass(spec, LossFunction):
        if lacking := sorted(getattr(spec, "__abstractmethods__", ())):
            raise LossError(
                f"loss={spec.__name__} is no whole distribution: it lacks {', '.join(lacking)}. A class of your own "
                "says how targets are sampled, their loss, and a factor B of the Fisher with its transpose, see the "
                "page on losses of your own."
            )
        if spec.written:
            arguments = inspect.signature(spec).parameters.items()
            wanted = " and a ".join(name for name, argument in arguments if argument.default is argument.empty)
            raise LossError(
                f"loss={spec.__name__} needs a {wanted}: write which outputs they are, as in loss=lambda outputs: "
                f"{spec.written}"
            )
        return LossSpec(_of_one_tensor(spec, spec.__name__), f"loss={spec.__name__}", named=True)
    if isinstance(spec, (type, LossFunction)) and not name_in_torch(spec) or not callable(spec):
        raise LossError(
            f"loss is a {type(spec).__name__}; pass a name, a class of kfac_fx.losses, or a function of the outputs "
            f"such as lambda logits: kfac_fx.losses.Categorical(logits). {several()}"
        )
    if trained := name_in_torch(spec):
        if without_loss_in_name(trained) in OF_VARIANCES:
            raise LossError(f"loss={trained} needs targets, and K-FAC draws its own; {WITH_VARIANCES}")
        known = OF_TORCH.get(trained, "")
        raise LossError(
            f"loss={trained} needs targets, and K-FAC draws its own: write its name, "
            + (f"loss={known!r}" if known else f"one of {', '.join(map(repr, NAMES))}")
        )
    try:
        inspect.signature(spec).bind(None)
    except TypeError as error:
        raise LossError(
            "the function given as loss is called with one argument, which is what the model returns, and does not "
            f"take that: {error}. K-FAC draws targets from the distribution that it names: write "
            f"loss=lambda outputs: kfac_fx.losses.Categorical(outputs). {several()}"
        ) from error
    except ValueError:  # a function without a signature
        pass
    return LossSpec(spec, "the function given as loss")


def name_in_torch(spec: Any) -> str:
    """The name of a loss of torch: a function, a module or its class; empty for anything else."""
    if isinstance(spec, nn.Module):
        return type(spec).__name__
    if isinstance(spec, type) and issubclass(spec, nn.Module):
        return spec.__name__
    name: str = getattr(spec, "__name__", "")
    return name if name and spec is getattr(F, name, None) else ""


def _of_one_tensor(kind: type[LossFunction], name: str) -> Callable[[Any], LossFunction]:
    def make(outputs: Any) -> LossFunction:
        return kind(one_tensor(outputs, f"loss={name!r}", f"kfac_fx.losses.{kind.__name__}({{0}})", kind.of_classes))

    return make


def without_loss_in_name(name: str) -> str:
    """A name that somebody may write for a loss, in small letters and without "loss" at its end."""
    return name.lower().removesuffix("loss").strip("_")


def expression_of(loss: TorchLoss) -> str:
    """The expression of torch's loss on the output {0}, for messages."""
    expression = f"kfac_fx.losses.{DISTRIBUTIONS[loss.distribution].__name__}({{0}})"
    return f"(len({{0}}) / {{0}}.numel(), {expression})" if loss.averages_elements else expression


def one_tensor(outputs: Any, name: str, function: str, classes: bool) -> Tensor:
    """The one tensor that a model returns. Raises LossError, which writes `function` on one of several outputs.

    classes: the loss is over classes, so the tensor has an axis for them.
    """
    if isinstance(outputs, list | tuple) and len(outputs) == 1:
        (outputs,) = outputs
    if not isinstance(outputs, Tensor):
        dimensions = [leaf.ndim for leaf in results.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        kind = next((kind for kind in KINDS if f".{kind}(" in function), KINDS[0])
        lines = [f"{name} needs one output tensor, and the model returns {structure(outputs)}."]
        if 0 in dimensions:
            lines.append("If you train the number among them, leave loss= out: losses of torch are found in forward.")
        elif isinstance(outputs, Mapping) or attributes_of_object(outputs):
            lines.append("If forward returns a loss where it gets labels, compile with labels, and leave loss= out.")
        lines.append(
            f"For the loss of an output write loss=lambda outputs: {function.format(place_of_tensor(outputs))}"
        )
        if sum(map(bool, dimensions)) > 1:
            lines.append(several(outputs, kind))
        raise LossError("\n".join(lines))
    if not outputs.ndim:
        raise LossError(
            f"{name} is that of outputs with a dimension of cases, and the model returns one number, as a loss is: let "
            "the model return what its loss is computed from, too, and say which output that is, as in "
            f"loss=lambda outputs: {function.format('outputs[1]')}"
        )
    if classes and outputs.ndim < 2:
        shape = list(outputs.shape)
        raise LossError(f"{name} needs logits of shape [cases, ..., classes], and the model returns {shape}")
    return outputs


def place_of_tensor(outputs: Any) -> str:
    """The expression of an output that a loss may be of, as the model returns it."""
    if isinstance(outputs, Tensor):
        return "outputs"
    attributes = attributes_of_object(outputs)
    key = key_of_tensor(attributes or outputs)
    return f"outputs.{key}" if attributes else f"outputs[{key!r}]"


def place_of_leaf(outputs: Any, leaf: Tensor) -> str | None:
    """The expression of one tensor that a model returns; None if it is deeper than in one list or dictionary."""
    if outputs is leaf:
        return "outputs"
    if attributes := attributes_of_object(outputs):
        return next((f"outputs.{name}" for name, value in attributes.items() if value is leaf), None)
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(outputs, (Mapping, list, tuple)):
        pairs = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    return next((f"outputs[{key!r}]" for key, value in pairs if value is leaf), None)


def key_of_tensor(outputs: Any) -> Any:
    """The key of an output that a loss may be of: logits, or the first tensor that is more than one number."""
    if isinstance(outputs, Mapping):
        pairs = list(outputs.items())
    else:
        pairs = list(enumerate(outputs)) if isinstance(outputs, (list, tuple)) else []
    tensors = [key for key, value in pairs if isinstance(value, Tensor) and value.ndim]
    first = next((key for key, _ in pairs), "logits" if isinstance(outputs, Mapping) else 0)
    return "logits" if "logits" in tensors else next(iter(tensors), first)


def attributes_of_object(outputs: Any) -> dict[str, Tensor]:
    """The tensors of an object by the names of its attributes; none of a dictionary, which has keys."""
    named = {} if outputs is None or isinstance(outputs, Mapping | Tensor) else results.attributes_of(outputs)
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def several(outputs: Any = None, kind: str = "Categorical") -> str:
    """How the losses of several outputs are written, for messages: of the first two that a model returned, if known.

    kind: the name of the class of the first.
    """
    if attributes := attributes_of_object(outputs):
        names = [f"outputs.{name}" for name, value in attributes.items() if value.ndim]
    else:
        places = range(len(outputs)) if isinstance(outputs, list | tuple) else ()
        keys = outputs if isinstance(outputs, Mapping) else places
        names = [f"outputs[{key!r}]" for key in keys if isinstance(outputs[key], Tensor) and outputs[key].ndim]
    return SEVERAL.format(kind, *(names[:2] if len(names) > 1 else ("outputs[0]", "outputs[1]")))


def structure(outputs: Any) -> str:
    """The kind of what a model returned, and the shapes in it by key, for messages."""
    kind = type(outputs).__name__
    if isinstance(outputs, Tensor):
        return f"a {kind} {list(outputs.shape)}"
    if isinstance(outputs, Mapping):
        return f"a {kind} of " + (
            ", ".join(f"{key!r}: {shape_of(value)}" for key, value in outputs.items()) or "nothing"
        )
    if isinstance(outputs, (list, tuple)):
        return f"a {kind} of " + (", ".join(map(shape_of, outputs)) or "nothing")
    return f"a {kind}"


def shape_of(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def perturbed(value: Tensor) -> Tensor:
    """Another value everywhere. The difference is not constant, because a softmax ignores a constant."""
    steps = torch.linspace(1, 2, value.shape[-1] if value.dim() else 1, dtype=value.dtype, device=value.device)
    return value + steps.view(value.shape[-1:])


def replaced(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    """A tree with `new` tensors for `old` ones."""
    by_id = {id(before): after for before, after in zip(old, new, strict=True)}
    return results.tree_map(lambda value: by_id.get(id(value), value), tree)


def _is_pair(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2 or isinstance(value[0], LossFunction):
        return False
    return isinstance(value[0], int | float) or (isinstance(value[0], Tensor) and value[0].numel() == 1)


def refuse_other_pair(value: Any, name: str) -> None:
    """Raises LossError for a pair whose order is the other one, and for one with a tensor of weights."""
    if not isinstance(value, tuple) or len(value) != 2:
        return
    first, second = value
    if isinstance(first, LossFunction) and isinstance(second, int | float | Tensor):
        kind = type(first).__name__
        number = f"{second:g}" if isinstance(second, int | float) else "weight"
        raise LossError(
            f"{name} returned a pair whose coefficient is behind the loss, and a number in front of a loss is its "
            f"coefficient: write ({number}, kfac_fx.losses.{kind}(...))"
        )
    if isinstance(first, Tensor) and first.numel() != 1 and isinstance(second, LossFunction):
        raise LossError(
            f"{name} returned a coefficient of shape {list(first.shape)}, and a coefficient is one number for all "
            "cases. To weigh the cases of a squared error, multiply the outputs by the roots of the weights: "
            "kfac_fx.losses.Normal(weights.sqrt() * residuals). For other losses leave loss= out, and let forward "
            'return (weights * F.cross_entropy(logits, targets, reduction="none")).mean()'
        )


def _pair(value: Any, name: str, outputs: Any) -> tuple[float, LossFunction]:
    refuse_other_pair(value, name)
    coefficient, loss = value if _is_pair(value) else (1.0, value)
    coefficient = float(coefficient.detach() if isinstance(coefficient, Tensor) else coefficient)
    if isinstance(loss, Tensor) and not loss.ndim:
        raise LossError(
            f"{name} returned a tensor, as the loss of a training is. loss= names the distribution of the outputs, "
            "without targets, as in loss=lambda outputs: kfac_fx.losses.Categorical(outputs), and you train a loss of "
            "net(x). A coefficient is a number, as in (0.5, kfac_fx.losses.Normal(outputs))"
        )
    if not isinstance(loss, LossFunction):
        raise LossError(f"{name} returned a {type(loss).__name__}, not a loss of kfac_fx.losses. {several(outputs)}")
    if isinstance(loss.targets, int | float):
        kind = type(loss).__name__
        raise LossError(
            f"{name} returned a {kind} whose targets are the number {loss.targets}. If it is a coefficient, write it "
            f"in front of the loss, as in ({loss.targets}, kfac_fx.losses.{kind}(outputs))"
        )
    if coefficient == 0:
        raise LossError(
            f"{name} returned the coefficient 0; it must be positive. Leave the term out of the list while its "
            "coefficient is 0, as in [first] + [(weight, second)] * (weight > 0): the function is called at every "
            "recording, and the list may have another length each time"
        )
    if not 0 < coefficient < math.inf:
        raise LossError(f"{name} returned the coefficient {coefficient:g}; it must be positive and finite")
    return coefficient, loss
