"""The base class of loss functions: a negative log-likelihood, and a factor of its Fisher.

A loss holds the parameters of the distribution in one tensor, `inputs`, whose last axis is the event: logits, a mean,
or a mean and a variance side by side. The Fisher of one case is B Bᵀ with B = `multiply_fisher_factor` (Martens &
Grosse 2015, section 2; the factors are those of TF K-FAC). Losses are summed over cases; divide by `cases` for the
mean.

Everything is computed in float32 at least. Products have the dtype of the vector.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from kfac_fx.passes.errors import LossError, TargetsMissing
from kfac_fx.passes.matrix import precise


class LossFunction(ABC):
    """-log p(targets | inputs), summed over cases.

    The first arguments of every subclass are the parameters of the distribution.

    Args:
        targets: the true targets; only `evaluate` needs them. They must not depend on the parameters of the model.
        seed: of the samples that are drawn without a generator; None: torch's own generator.

    Attributes:
        targets_like: the form of the targets, for messages.
        natural: whether the inputs are natural parameters, so that the generalized Gauss-Newton matrix is the Fisher.
        kept: [cases...], the cases that have a target that is not ignored; None: all.
        real_cases: the number of cases that are neither padding nor ignored, a tensor if only the device knows it;
            None: all.
    """

    targets_like: ClassVar[str]
    natural: ClassVar[bool] = True

    def __init__(self, inputs: Tensor, targets: Tensor | None = None, seed: int | None = None) -> None:
        self.check_outputs(inputs)
        self.inputs = inputs
        self.seed = seed
        self.targets = targets
        self.kept: Tensor | None = None
        self.real_cases: int | Tensor | None = None

    @classmethod
    def check_outputs(cls, *outputs: object) -> None:
        """Raises LossError for outputs that are no tensors, or complex."""
        if others := [type(output).__name__ for output in outputs if not isinstance(output, Tensor)]:
            raise LossError(f"{cls.__name__} takes tensors that forward returns, and got a {others[0]}")
        if any(isinstance(output, Tensor) and output.is_complex() for output in outputs):
            raise LossError(
                f"{cls.__name__} takes real tensors, and got a complex one: write what the loss is of, as in "
                f"loss=lambda outputs: kfac_fx.losses.{cls.__name__}(torch.view_as_real(outputs).flatten(1))"
            )

    @property
    def cases(self) -> int | Tensor:
        """The number of cases: independent distributions, without padding and without ignored targets."""
        return self.all_cases if self.real_cases is None else self.real_cases

    @property
    def all_cases(self) -> int:
        """The number of cases, with padding and ignored targets."""
        return math.prod(self.inputs.shape[: self.case_axes])

    @property
    def case_axes(self) -> int:
        """The number of leading axes of `inputs` that count cases."""
        return min(1, self.inputs.ndim)

    def with_targets(self, targets: Tensor | None) -> Self:
        """Set the true targets; returns the loss itself."""
        self.targets = targets
        return self

    def keeping(self, kept: Tensor) -> Self:
        """Leave out the cases whose target is ignored: constants, and none of `cases`; returns the loss itself."""
        self.kept, self.real_cases = kept, kept.sum()
        self.inputs = torch.where(kept.unsqueeze(-1), self.inputs, self.inputs.detach())
        return self

    def with_cases_at(self, axis: int) -> Self:
        """Move the cases from `axis` of the inputs, and of the targets, to the front; returns the loss itself."""
        if axis:
            self.inputs = self.inputs.movedim(axis, 0)
            self.targets = None if self.targets is None else self.targets.movedim(axis, 0)
            self.kept = None if self.kept is None else self.kept.movedim(axis, 0)
        return self

    def at(self, inputs: Tensor) -> Self:
        """The same loss at other inputs."""
        other = copy.copy(self)
        other.inputs = inputs
        return other

    def evaluate(self) -> Tensor:
        """The loss of the true targets, [].

        Raises:
            TargetsMissing: there are no targets.
            LossError: the targets have another shape than expected.
        """
        if self.targets is None:
            name = type(self).__name__
            raise TargetsMissing(
                f"a {name} loss of inputs {list(self.inputs.shape)} is evaluated and has no targets: build it as "
                f"{name}(..., targets=y), or call loss.with_targets(y), with y {self.targets_like}; or draw them with "
                "loss.evaluate_on_sample()"
            )
        if not isinstance(self.targets, Tensor):
            kind = type(self.targets).__name__
            raise LossError(f"{type(self).__name__}: targets are a {kind}; write torch.as_tensor(targets)")
        expected = self._target_shape()
        if self.targets.shape != expected:
            raise LossError(
                f"{type(self).__name__}: targets have shape {list(self.targets.shape)}, expected {list(expected)}, "
                f"{self.targets_like}"
            )
        if self.targets.device != self.inputs.device:
            there = "the meta device and have no values" if self.targets.is_meta else str(self.targets.device)
            raise LossError(
                f"{type(self).__name__}: targets are on {there}, the outputs on {self.inputs.device}: write "
                f"targets on {self.inputs.device}"
            )
        self.check_targets(self.targets)
        return self._negative_log_likelihood(self.targets.detach())

    def check_targets(self, targets: Tensor) -> None:
        """Raises LossError for complex targets; a loss over classes also for numbers that are not whole."""
        if targets.is_complex():
            raise LossError(f"{type(self).__name__}: targets are of {targets.dtype}, expected {self.targets_like}")

    def evaluate_on_sample(self, generator: torch.Generator | None = None) -> Tensor:
        """The loss of targets drawn from the predictive distribution, []. No gradient passes through the sample."""
        return self._negative_log_likelihood(self.sample(generator))

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets for all cases, from the generator, or else from one seeded with `seed`, or else from torch's."""
        if generator is None and self.seed is not None:
            generator = torch.Generator(self.inputs.device).manual_seed(self.seed)
        with torch.no_grad():
            return self._sample(generator)

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        """Targets for which `gradient`, of the shape of `inputs`, may be a multiple of the gradient of the loss.

        None: for every gradient there are such targets.
        """
        return None

    def divergence_from(self, inputs: Tensor) -> Tensor:
        """The Kullback-Leibler divergence KL(p(inputs) || p(self.inputs)), summed over cases, [].

        In the base class to second order: ½ <d, F d> with d = self.inputs - inputs and F at self.inputs. For natural
        parameters it is the Bregman divergence of the log-partition function: a loss h whose gradient at `inputs` is g
        changes by <g, d> plus this divergence (Wainwright & Jordan 2008, section 5.2.2).
        """
        return 0.5 * self.multiply_fisher_factor_transpose(precise(self.inputs - inputs)).square().sum()

    def entropy(self) -> Tensor | None:
        """The entropy of the predictive distribution, summed over cases, []; None if it is not discrete.

        A loss of natural parameters z with the gradient g has the value <g, z> + entropy.
        """
        return None

    def multiply_fisher(self, vector: Tensor) -> Tensor:
        """F v of every case; `vector` broadcasts with `inputs`."""
        return self.multiply_fisher_factor(self.multiply_fisher_factor_transpose(vector))

    @abstractmethod
    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        """B v: from the inner space of the factor to the space of `inputs`."""

    @abstractmethod
    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        """Bᵀ v: from the space of `inputs` to the inner space of the factor."""

    @property
    def fisher_factor_inner_shape(self) -> torch.Size:
        """The shape of the vectors that B multiplies."""
        return self.inputs.shape

    def multiply_fisher_factor_replicated_one_hot(self, index: int | Sequence[int]) -> Tensor:
        """B e, with e equal to 1 at coordinate `index` of every case, and to 0 elsewhere.

        Args:
            index: one number for each axis of `fisher_factor_inner_shape` behind the first.

        Raises:
            ValueError: a case has no such coordinate.
        """
        return self.multiply_fisher_factor(self._replicated_one_hot(index, self.fisher_factor_inner_shape))

    def multiply_ggn(self, vector: Tensor) -> Tensor:
        """C Cᵀ v; see `multiply_ggn_factor`."""
        self._require_ggn()
        return self.multiply_fisher(vector)

    def multiply_ggn_factor(self, vector: Tensor) -> Tensor:
        """C v, with C Cᵀ the generalized Gauss-Newton matrix of one case.

        With natural parameters this matrix is the Fisher (Martens 2020, section 9.2).

        Raises:
            LossError: the parameters of the distribution are not natural parameters.
        """
        self._require_ggn()
        return self.multiply_fisher_factor(vector)

    def multiply_ggn_factor_transpose(self, vector: Tensor) -> Tensor:
        """Cᵀ v; see `multiply_ggn_factor`."""
        self._require_ggn()
        return self.multiply_fisher_factor_transpose(vector)

    @property
    def ggn_factor_inner_shape(self) -> torch.Size:
        """The shape of the vectors that C multiplies; see `multiply_ggn_factor`."""
        self._require_ggn()
        return self.fisher_factor_inner_shape

    def multiply_ggn_factor_replicated_one_hot(self, index: int | Sequence[int]) -> Tensor:
        """C e; see `multiply_fisher_factor_replicated_one_hot` and `multiply_ggn_factor`."""
        self._require_ggn()
        return self.multiply_fisher_factor_replicated_one_hot(index)

    def _require_ggn(self) -> None:
        if not self.natural:
            raise LossError(
                f"{type(self).__name__} has no generalized Gauss-Newton factor, since its parameters are not natural: "
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
