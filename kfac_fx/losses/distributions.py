"""The predictive distributions of the library.

All formulas are per case. The Fisher factors are those of TF K-FAC; see `LossFunction` for the common interface.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.passes.errors import LossError
from kfac_fx.passes.matrix import precise

__all__ = ["Categorical", "LossFunction", "MultiBernoulli", "Normal", "NormalMeanVariance", "OnehotCategorical"]


IGNORE_INDEX = -100  # the class number of a target that is left out, as in `F.cross_entropy`


class Categorical(LossFunction):
    """A categorical distribution with logits on the last axis; every element of the other axes is a case.

    Targets are class numbers. The loss leaves out the target -100, as `F.cross_entropy` does.

    Raises:
        LossError: there is only one class.
    """

    targets_like = "class numbers, one for each distribution"

    def __init__(self, logits: Tensor, targets: Tensor | None = None, seed: int | None = None) -> None:
        self.check_outputs(logits)
        if logits.ndim and logits.shape[-1] == 1:
            raise LossError(
                f"logits of shape {list(logits.shape)} have one class, whose probability is always 1; one logit for "
                "two classes is a MultiBernoulli, and another axis of classes goes to the end: "
                "Categorical(x.movedim(1, -1))"
            )
        super().__init__(logits, targets, seed)

    @property
    def case_axes(self) -> int:
        return self.inputs.ndim - 1

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        p = precise(self.inputs).softmax(-1)
        scaled = p.sqrt() * vector
        return (scaled - p * scaled.sum(-1, keepdim=True)).to(vector.dtype)

    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        p = precise(self.inputs).softmax(-1)
        return (p.sqrt() * (vector - (p * vector).sum(-1, keepdim=True))).to(vector.dtype)

    def divergence_from(self, inputs: Tensor) -> Tensor:
        before, now = precise(inputs).log_softmax(-1), precise(self.inputs).log_softmax(-1)
        return (before.exp() * (before - now)).sum()

    def entropy(self) -> Tensor | None:
        logarithms = precise(self.inputs).log_softmax(-1)
        return -(logarithms.exp() * logarithms).sum()

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        """The only class whose logit should grow, since the gradient is s (p - e); -100 where the gradient is zero."""
        return torch.where(gradient.any(-1), gradient.argmin(-1), IGNORE_INDEX)

    def _target_shape(self) -> torch.Size:
        return self.inputs.shape[:-1]

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        logits = precise(self.inputs).reshape(-1, self.inputs.shape[-1])
        try:
            return F.cross_entropy(logits, targets.reshape(-1), reduction="sum")
        except IndexError as error:  # on a CPU; other devices assert
            raise LossError(
                f"Categorical: {error} There are {logits.shape[-1]} classes, counted from 0; -100 leaves a case out"
            ) from error

    def check_targets(self, targets: Tensor) -> None:
        if targets.dtype not in (torch.int64, torch.uint8):  # those that F.cross_entropy takes
            raise LossError(
                f"Categorical: targets are of {targets.dtype}, expected {self.targets_like}: write targets.long()"
            )

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        # If independent exponential clocks have rates p, clock k rings first with probability p_k. torch.multinomial
        # would make the host wait for the device.
        logits = precise(self.inputs)
        clocks = torch.empty_like(logits).exponential_(generator=generator)
        return (logits - clocks.log()).argmax(-1)


class OnehotCategorical(Categorical):
    """`Categorical` with one-hot targets."""

    targets_like = "one-hot vectors, of the shape of the logits"

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        classes = F.one_hot(gradient.argmin(-1), self.inputs.shape[-1]).to(self.inputs.dtype)
        return classes * gradient.any(-1, keepdim=True)

    def check_targets(self, targets: Tensor) -> None:
        LossFunction.check_targets(self, targets)  # they may be numbers of floating point

    def _target_shape(self) -> torch.Size:
        return self.inputs.shape

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        return -(precise(self.inputs).log_softmax(-1) * targets).sum()

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        return F.one_hot(super()._sample(generator), self.inputs.shape[-1]).to(self.inputs.dtype)


class Normal(LossFunction):
    """An isotropic normal distribution with a fixed variance.

    Args:
        var: the variance; with the default 0.5 the loss is |target - mean|² plus a constant.

    Raises:
        LossError: `var` is not a positive float.
    """

    targets_like = "values, of the shape of the mean"

    def __init__(self, mean: Tensor, var: float = 0.5, targets: Tensor | None = None, seed: int | None = None) -> None:
        check_variance(var)
        super().__init__(mean, targets, seed)
        self.var = float(var)

    def multiply_fisher(self, vector: Tensor) -> Tensor:
        return vector / self.var

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return vector / math.sqrt(self.var)

    multiply_fisher_factor_transpose = multiply_fisher_factor

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        error = precise(self.inputs) - targets
        return error.square().sum() / (2 * self.var) + 0.5 * math.log(2 * math.pi * self.var) * error.numel()

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        mean = precise(self.inputs)
        return mean + math.sqrt(self.var) * torch.empty_like(mean).normal_(generator=generator)


def check_variance(var: float) -> None:
    """Raises LossError."""
    if not isinstance(var, (int, float)) or not 0 < var < math.inf:
        raise LossError(f"Normal: var is {var!r}; it must be a positive float")


class NormalMeanVariance(LossFunction):
    """Independent normal distributions with a mean and a variance each.

    `inputs` is [mean, variance] along the last axis, or along a new one if the mean has only the axis of the cases. The
    variance is not a natural parameter, so there is a Fisher, but no generalized Gauss-Newton factor.

    Raises:
        LossError: the mean and the variance have different shapes.
    """

    targets_like = "values, of the shape of the mean"
    natural = False

    def __init__(self, mean: Tensor, variance: Tensor, targets: Tensor | None = None, seed: int | None = None) -> None:
        self.check_outputs(mean, variance)
        if mean.shape != variance.shape:
            raise LossError(
                f"NormalMeanVariance: the mean has shape {list(mean.shape)}, the variance {list(variance.shape)}"
            )
        join = torch.cat if mean.ndim > 1 else torch.stack
        super().__init__(join([mean, variance], dim=-1), targets, seed)
        self.shape = mean.shape

    def with_cases_at(self, axis: int) -> Self:
        self.shape = torch.Size([self.shape[axis], *self.shape[:axis], *self.shape[axis + 1 :]])
        return super().with_cases_at(axis)

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        _, variance = precise(self.inputs).chunk(2, dim=-1)
        scale = torch.cat([variance.rsqrt(), 1 / (math.sqrt(2.0) * variance)], dim=-1)
        return (scale * vector).to(vector.dtype)

    multiply_fisher_factor_transpose = multiply_fisher_factor

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        """With u = m - t the gradient is (s u / v, s / 2v - s u² / 2v²), which is a quadratic equation for s."""
        mean, v = precise(self.inputs).chunk(2, dim=-1)
        first, second = precise(gradient).chunk(2, dim=-1)
        s = v * (second + (second.square() + first.square() / v).sqrt())
        return (mean - torch.where(s > 0, first * v / s, 0)).view(self.shape)

    def _target_shape(self) -> torch.Size:
        return self.shape

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        mean, variance = (half.view(self.shape) for half in precise(self.inputs).chunk(2, dim=-1))
        return 0.5 * ((2 * math.pi * variance).log() + (targets - mean).square() / variance).sum()

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        mean, variance = (half.view(self.shape) for half in precise(self.inputs).chunk(2, dim=-1))
        return mean + variance.sqrt() * torch.empty_like(mean).normal_(generator=generator)


class MultiBernoulli(LossFunction):
    """Independent binary events with logits; targets are 0, 1 or probabilities."""

    targets_like = "zeros and ones, of the shape of the logits"

    def __init__(self, logits: Tensor, targets: Tensor | None = None, seed: int | None = None) -> None:
        super().__init__(logits, targets, seed)

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        p = precise(self.inputs).sigmoid()
        return ((p * (1 - p)).sqrt() * vector).to(vector.dtype)

    multiply_fisher_factor_transpose = multiply_fisher_factor

    def divergence_from(self, inputs: Tensor) -> Tensor:
        before, now = precise(inputs), precise(self.inputs)
        return (F.softplus(now) - F.softplus(before) - before.sigmoid() * (now - before)).sum()

    def entropy(self) -> Tensor | None:
        logits = precise(self.inputs)
        return (F.softplus(logits) - logits.sigmoid() * logits).sum()

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        """The gradient is s (p - t) with t zero or one: t was one where the logit should grow."""
        return (gradient < 0).to(self.inputs.dtype)

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        logits = precise(self.inputs)
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum")

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        p = precise(self.inputs).sigmoid()
        return (torch.empty_like(p).uniform_(generator=generator) < p).to(p.dtype)


# The names that users write, as in `compile(..., loss="categorical")`.
DISTRIBUTIONS: Mapping[str, type[LossFunction]] = {
    "categorical": Categorical,
    "normal": Normal,
    "multi_bernoulli": MultiBernoulli,
}
