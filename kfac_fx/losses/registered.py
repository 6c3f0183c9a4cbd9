"""Losses as they are declared: on nodes of a graph, or by the `loss=` argument of `compile`.

A loss on nodes has a name. A loss that is registered again under its name is another *tower*: the same loss of one more
mini-batch, computed by the same graph. The towers of a loss add up to one batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from kfac_fx.losses.distributions import DISTRIBUTIONS, IGNORE_INDEX, Categorical, LossFunction, NormalMeanVariance
from kfac_fx.passes.errors import LossError, TargetsMissing, nearest
from kfac_fx.passes.torch_losses import SHORT, TORCH_LOSSES, TorchLoss

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
        return tuple(node for loss in self.losses for node in loss.inputs)

    @property
    def by_name(self) -> dict[str, tuple[RegisteredLoss, ...]]:
        names = dict.fromkeys(loss.name for loss in self.losses)
        return {name: tuple(loss for loss in self.losses if loss.name == name) for name in names}

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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(loss.name for loss in self.losses)


def cases_by_loss(
    pairs: Sequence[tuple[float, LossFunction]], names: Sequence[object] | None = None
) -> list[int | Tensor]:
    """For every loss how many cases its mean is over: those of all towers of one name; None: no two of one name."""
    total: dict[object, int | Tensor] = {}
    names = names or range(len(pairs))
    for name, (_, loss) in zip(names, pairs, strict=True):
        total[name] = total[name] + loss.cases if name in total else loss.cases
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
    if kept is not None and targets is not None:
        targets = torch.where(kept, targets, IGNORE_INDEX)
    loss = DISTRIBUTIONS[of_torch.distribution](inputs, targets=targets)
    loss = (loss if kept is None else loss.keeping(kept)).with_cases_at(case_dim)
    averages = of_torch.averages_elements and reduction == "mean"
    return loss.all_cases / inputs.numel() if averages else 1.0, loss


# --- loss spec --------------------------------------------------------------------------------------------------------


OF_TORCH = {name: loss.short for loss in TORCH_LOSSES for name in (loss.name, loss.module.__name__)}
NAMES = (*DISTRIBUTIONS, *(loss.short for loss in TORCH_LOSSES))
SYNONYMS = {  # names that users try, by what they are here
    "bce": "bce_with_logits", "ce": "cross_entropy", "nll": "cross_entropy", "softmax": "categorical", "l2": "mse",
    "squared_error": "mse", "gaussian": "normal", "bernoulli": "multi_bernoulli", "sigmoid": "multi_bernoulli",
}  # fmt: skip


@dataclass(frozen=True)
class LossSpec:
    """From the outputs of a forward (and the true targets, where there are any) to (coefficient, loss) pairs."""

    make: Callable[[Any], Any]
    name: str
    named: bool = False  # made of one output tensor
    of_torch: TorchLoss | None = None  # torch's loss of this name, with its mean

    @property
    def places_cases(self) -> bool:
        """Whether a call moves the cases to the front itself."""
        return self.of_torch is not None

    def __call__(self, outputs: Any, targets: Any = None, case_dim: int = 0) -> WeightedLosses:
        """
        Args:
            targets: one tensor, or a sequence of one a loss where there are several losses.
            case_dim: the dimension of the cases in the output, for a loss that `places_cases`.
        """
        if self.of_torch is not None:
            (targets,) = targets if isinstance(targets, (list, tuple)) and len(targets) == 1 else (targets,)
            output = one_tensor(outputs, self.name, of_torch_on(self.of_torch), self.of_torch.classes_second)
            return [likelihood(self.of_torch, "mean", output, targets, case_dim)]
        try:
            result = self.make(outputs)
        except Exception as error:
            if not self.named:
                kind = type(outputs).__name__ + (f" {list(outputs.shape)}" if isinstance(outputs, Tensor) else "")
                error.add_note(f"{self.name} raised this, called with what the model returned: a {kind}")
            raise
        if isinstance(result, list | tuple) and not result:
            raise LossError(f"{self.name} returned no loss; return at least one loss of kfac_fx.losses")
        single = not isinstance(result, list | tuple) or _is_pair(result)
        losses = [_pair(loss, self.name) for loss in ([result] if single else result)]
        if targets is None:
            return losses
        each_targets = targets if isinstance(targets, (list, tuple)) or len(losses) > 1 else [targets]
        if not isinstance(each_targets, Sequence) or len(each_targets) != len(losses):
            raise LossError(f"{self.name} gives {len(losses)} losses: pass as many targets, in a tuple")
        for (_, loss), target in zip(losses, each_targets, strict=True):
            loss.with_targets(target)
        return losses


def loss_from(spec: str | type[LossFunction] | Callable[[Any], Any]) -> LossSpec:
    """Read `compile(..., loss=spec)`.

    Args:
        spec: "categorical", "normal" (variance 0.5) or "multi_bernoulli", where the model returns one tensor with the
            event on its last axis; "cross_entropy", "mse" or "bce_with_logits", which are torch's functions with their
            means: over all elements for the last two, with the classes on dimension 1 for the first; a class of
            `kfac_fx.losses`; or a function of the model's outputs that returns a loss, several losses, or (coefficient,
            loss) pairs. The coefficient multiplies the loss and its Fisher.

    Raises LossError for an unknown name, for something else than a name or a function, and when called for outputs
    that a named loss cannot read or a function that returns no loss.
    """
    if isinstance(spec, str):
        if spec in SHORT:
            of_torch = SHORT[spec]
            fixed = not of_torch.averages_elements  # else the coefficient depends on the sizes of the output
            return LossSpec(lambda out: likelihood(of_torch, "mean", out)[1], f"loss={spec!r}", fixed, of_torch)
        if spec not in DISTRIBUTIONS:
            known = ", ".join(map(repr, NAMES))
            meant = SYNONYMS.get(spec.lower().removesuffix("_loss").removesuffix("loss"))
            hint = f" Did you mean {meant!r}?" if meant else nearest(spec, NAMES)
            raise LossError(f"loss {spec!r} is none of {known}.{hint}")
        return LossSpec(_of_one_tensor(DISTRIBUTIONS[spec], spec), f"loss={spec!r}", named=True)
    if spec is NormalMeanVariance:
        raise LossError(
            "loss=NormalMeanVariance needs a mean and a variance: write which outputs they are, as in loss=lambda "
            "outputs: kfac_fx.losses.NormalMeanVariance(outputs[0], outputs[1].exp())"
        )
    if isinstance(spec, type) and issubclass(spec, LossFunction):
        return LossSpec(_of_one_tensor(spec, spec.__name__), f"loss={spec.__name__}", named=True)
    if isinstance(spec, (type, LossFunction)) and not name_in_torch(spec) or not callable(spec):
        raise LossError(
            f"loss is a {type(spec).__name__}; pass a name, a class of kfac_fx.losses, or a function of the outputs "
            "such as lambda logits: kfac_fx.losses.Categorical(logits)"
        )
    if trained := name_in_torch(spec):
        known = OF_TORCH.get(trained, "")
        raise LossError(
            f"loss={trained} needs targets, and K-FAC draws its own: write its name, "
            + (f"loss={known!r}" if known else f"one of {', '.join(map(repr, NAMES))}")
        )
    try:
        inspect.signature(spec).bind(None)
    except TypeError as error:
        raise LossError(
            f"the function given as loss is called with what the model returns, and does not take that: {error}. Write "
            "loss=lambda outputs: kfac_fx.losses.Categorical(outputs)"
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


def _of_one_tensor(kind: Callable[[Tensor], LossFunction], name: str) -> Callable[[Any], LossFunction]:
    function = f"kfac_fx.losses.{getattr(kind, '__name__', 'Normal')}({{0}})"

    def make(outputs: Any) -> LossFunction:
        return kind(one_tensor(outputs, f"loss={name!r}", function, kind is Categorical))

    return make


def of_torch_on(loss: TorchLoss) -> str:
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
        key = next(iter(outputs), "logits") if isinstance(outputs, Mapping) else 0
        raise LossError(
            f"{name} needs one output tensor, and the model returns a {type(outputs).__name__}: say which, "
            f"as in loss=lambda outputs: {function.format(f'outputs[{key!r}]')}"
        )
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


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int | float)


def _pair(value: Any, name: str) -> tuple[float, LossFunction]:
    coefficient, loss = value if _is_pair(value) else (1.0, value)
    if isinstance(loss, Tensor) and not loss.ndim:
        raise LossError(f"{name} returned a tensor; a coefficient is a number, as in (0.5, kfac_fx.losses.Normal(out))")
    if not isinstance(loss, LossFunction):
        raise LossError(f"{name} returned a {type(loss).__name__}, not a loss of kfac_fx.losses")
    if not 0 < coefficient < math.inf:
        raise LossError(f"{name} returned the coefficient {coefficient}; it must be positive and finite")
    return float(coefficient), loss
