"""The base of all loss functions: a negative log-likelihood, and the factors of its Fisher.

A loss holds the distribution's parameters as one tensor, `inputs`, whose last axis is the event: logits, a mean, or a
mean and a variance side by side. With B = `multiply_fisher_factor`, the Fisher of one case is B Bᵀ (Martens & Grosse
2015, section 2; the factors as in TF K-FAC). Losses are summed over cases; whoever wants a mean divides by `cases`.

Everything is computed in float32 at least; products have the dtype of the vector they multiply.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from kfac_fx.passes.errors import LossError, TargetsMissing


class LossFunction(ABC):
    """-log p(targets | inputs), summed over cases.

    Args of every subclass: the distribution's parameters, then `targets` (needed by `evaluate` alone) and `seed` (of
    the samples drawn without a generator). The targets must not depend on the parameters of the model.
    """

    targets_like: ClassVar[str]
    natural: ClassVar[bool] = True

    def __init__(self, inputs: Tensor, targets: Tensor | None = None, seed: int | None = None) -> None:
        self.inputs = inputs
        self.seed = seed
        self.targets = targets
        self.real_cases: int | None = None  # where some of them are padding

    @property
    def cases(self) -> int:
        """The number of independent distributions."""
        return math.prod(self.inputs.shape[: self.case_axes]) if self.real_cases is None else self.real_cases

    @property
    def case_axes(self) -> int:
        """How many axes in front count them."""
        return min(1, self.inputs.ndim)

    def with_targets(self, targets: Tensor | None) -> Self:
        """Give the true targets afterwards; returns the loss itself."""
        self.targets = targets
        return self

    def evaluate(self) -> Tensor:
        """The loss of the true targets; raises TargetsMissing without them, LossError if their shape does not fit."""
        if self.targets is None:
            name = type(self).__name__
            raise TargetsMissing(
                f"a {name} loss of inputs {list(self.inputs.shape)} is evaluated and has no targets: build it as "
                f"{name}(..., targets=y), or call loss.with_targets(y), with y {self.targets_like}; or draw them with "
                "loss.evaluate_on_sample()"
            )
        expected = self._target_shape()
        if self.targets.shape != expected:
            raise LossError(
                f"{type(self).__name__}: targets have shape {list(self.targets.shape)}, expected {list(expected)}, "
                f"{self.targets_like}"
            )
        return self._negative_log_likelihood(self.targets.detach())

    def evaluate_on_sample(self, generator: torch.Generator | None = None) -> Tensor:
        """The loss of targets drawn from the predictive distribution itself; the sample is a constant."""
        return self._negative_log_likelihood(self.sample(generator))

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets, one a case. Without a generator: one seeded with `seed`, or torch's own if that is None."""
        if generator is None and self.seed is not None:
            generator = torch.Generator(self.inputs.device).manual_seed(self.seed)
        with torch.no_grad():
            return self._sample(generator)

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        """Targets with which `gradient` may be a multiple of that of the loss; None if any could be.

        gradient: of the shape of `inputs`.
        """
        return None

    def multiply_fisher(self, vector: Tensor) -> Tensor:
        """F v, case by case; `vector` broadcasts against `inputs`."""
        return self.multiply_fisher_factor(self.multiply_fisher_factor_transpose(vector))

    @abstractmethod
    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        """B v: from the inner space of the factor to the space of `inputs`."""

    @abstractmethod
    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        """Bᵀ v: from the space of `inputs` to the inner space of the factor."""

    @property
    def fisher_factor_inner_shape(self) -> torch.Size:
        return self.inputs.shape

    def multiply_fisher_factor_replicated_one_hot(self, index: int | Sequence[int]) -> Tensor:
        """B e, where e is 1 at coordinate `index` of every case; one index for each axis behind the first."""
        return self.multiply_fisher_factor(self._replicated_one_hot(index, self.fisher_factor_inner_shape))

    # The parameters of these distributions are natural ones, so the generalized Gauss-Newton matrix is the Fisher
    # (Martens 2020, section 9.2). A distribution where that is not so sets `natural` to False.

    def multiply_ggn(self, vector: Tensor) -> Tensor:
        self._require_ggn()
        return self.multiply_fisher(vector)

    def multiply_ggn_factor(self, vector: Tensor) -> Tensor:
        self._require_ggn()
        return self.multiply_fisher_factor(vector)

    def multiply_ggn_factor_transpose(self, vector: Tensor) -> Tensor:
        self._require_ggn()
        return self.multiply_fisher_factor_transpose(vector)

    @property
    def ggn_factor_inner_shape(self) -> torch.Size:
        self._require_ggn()
        return self.fisher_factor_inner_shape

    def multiply_ggn_factor_replicated_one_hot(self, index: int | Sequence[int]) -> Tensor:
        self._require_ggn()
        return self.multiply_fisher_factor_replicated_one_hot(index)

    def _require_ggn(self) -> None:
        if not self.natural:
            raise LossError(
                f"{type(self).__name__} has no generalized Gauss-Newton factor, its parameters are not natural ones: "
                "use estimation_mode='gradients', 'curvature_prop' or 'exact'"
            )

    def _target_shape(self) -> torch.Size:
        return self.inputs.shape

    @abstractmethod
    def _negative_log_likelihood(self, targets: Tensor) -> Tensor: ...

    @abstractmethod
    def _sample(self, generator: torch.Generator | None) -> Tensor: ...

    def _replicated_one_hot(self, index: int | Sequence[int], shape: torch.Size) -> Tensor:
        place = (index,) if isinstance(index, int) else tuple(index)
        axes = shape[1:] if len(shape) > 1 else shape
        if len(place) != len(axes) or any(not 0 <= k < size for k, size in zip(place, axes, strict=False)):
            raise ValueError(f"index {place} names no coordinate of a case of shape {list(axes)}")
        one_hot = torch.zeros(shape, dtype=self.inputs.dtype, device=self.inputs.device)
        column = one_hot.view(-1, *axes)
        for k in place:
            column = column.select(1, k)
        column.fill_(1.0)
        return one_hot


def precise(tensor: Tensor) -> Tensor:
    """float32 at least, whatever autocast made of it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
