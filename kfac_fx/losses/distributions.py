"""Predictive distributions: negative log-likelihoods, each with a factor of its Fisher and all that messages say of it.

A distribution holds its parameters in one tensor, `inputs`, whose last axis is the event: logits, a mean, or a mean and
a variance side by side. The Fisher of one case is B Bᵀ with B = `multiply_fisher_factor` (Martens & Grosse 2015,
section 2; the factors are those of TF K-FAC). Losses are summed over cases; divide by `cases` for the mean.

Everything is computed in float32 at least. Products have the dtype of the vector.

To add a distribution, write its class, and name it in `__all__` and in `DISTRIBUTIONS` at the end.

**Losses without a name**, of which only the gradient g at its outputs z is known, as a user's backward sends it there.

    h(z') - h(z) = <g, z' - z> + ½ N Σ_n <g_n, z'_n - z_n>²

N g_n is the gradient of case n in a mean over N cases, so the last term is ½ <d, F d> with the empirical Fisher F of
the outputs. A case is a row of them.

A number that forward returns is the loss itself, so its change is <g, z' - z> alone. Its cases are not known, and
<d, F d> is the square of its change: for all cases whose mean has this gradient, the empirical Fisher is at least that.

**Sources**: the gradients that are sent back from the outputs, whose second moments make the wanted matrix.

Let B Bᵀ be the Fisher of the loss of one case, and c the coefficient of the loss. A source sends back to the inputs of
the loss

    gradients          √c times the gradient of the loss of sampled targets: one source, right in expectation
    empirical          c times the gradient of the loss of the true targets: one source, another matrix
    curvature_prop     √c B ε with random signs ε: one source, right in expectation (Martens et al. 2012)
    exact              √c B e_k for every coordinate k of a case, the same for all cases: as many sources as outputs

`..._GGN` replaces B by the factor of the generalized Gauss-Newton matrix. The definitions are those of TF K-FAC.

For single cases, gradients are sent back from all examples, from one of them, or from one slot. The number of a row of
a loss within its example is its *slot*. A source of one slot sends back one row of every example, so that the gradients
of the rows of an example do not add up.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kfac_fx.linalg.arguments import choice, is_of_the_call, misfit
from kfac_fx.linalg.matrices import pulled
from kfac_fx.passes.errors import LossError, TargetsMissing, table
from kfac_fx.passes.matrix import precise

__all__ = [
    "Categorical", "LossFunction", "MultiBernoulli", "Normal", "NormalMeanVariance", "OnehotCategorical", "Poisson",
]  # fmt: skip


IGNORE_INDEX = -100  # the class number of a target that is left out, as in `F.cross_entropy`
ROUNDING = 1e-6  # of the difference of two probabilities
SMALL = 1e-5  # the logarithm of a sum of probabilities that may be one


def takes_outputs(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate the constructor of a loss: a call without outputs, and any other that does not fit, says what to
    write."""

    @functools.wraps(init)
    def called(self: LossFunction, /, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            if not is_of_the_call(error):
                raise
            told = misfit(init, (self, *args), kwargs) if args else without_outputs(type(self), kwargs)
            raise TypeError(told or str(error)) from None

    return called


def without_outputs(kind: type[LossFunction], options: Mapping[str, Any]) -> str:
    """The error of a loss that is made of no outputs. options: its other arguments."""
    name = f"kfac_fx.losses.{kind.__name__}" if kind.__module__.startswith("kfac_fx.") else kind.__name__
    arguments = ", ".join(["outputs", *(f"{option}={value!r}" for option, value in options.items())])
    whole = f"loss={kind.name!r}" if kind.name else f"loss={kind.__name__}"
    return (
        f"{kind.__name__} is a loss of outputs, and got none: write "
        f"{f'{whole}, or ' if not options and not kind.written else ''}"
        f"loss=lambda outputs: {kind.written or f'{name}({arguments})'}"
    )


class LossFunction(ABC):
    """-log p(targets | inputs), summed over cases.

    The first arguments of every subclass are the parameters of the distribution.

    Args:
        targets: the true targets; only `evaluate` needs them. They must not depend on the parameters of the model.
        seed: of the samples that are drawn without a generator; None: torch's own generator.

    Attributes:
        name: as in `compile(..., loss="categorical")`; empty: it has no name there.
        synonyms: names that users try, in small letters and without "loss" at their end.
        targets_like: the form of the targets, for messages.
        written: the code that makes it of a model's outputs, for messages; empty: it is made of one output.
        natural: whether the inputs are natural parameters, so that the generalized Gauss-Newton matrix is the Fisher.
        of_classes: whether the event is one of several classes, so that a single number is no event.
        ignored: the target of a case that is left out; None: every case has a target.
        kept: [cases...], the cases that have a target that is not ignored; None: all.
        real: [cases...], those of them that are no padding; None: nothing is padding.
        real_elements: of the shape of the inputs, those that are no padding; None: nothing is padding.
        weights: of the cases, or of their elements, relative to the coefficient of the loss; None: all are 1.
        real_cases: the number of cases that are neither padding nor ignored, a tensor if only the device knows it;
            None: all.
    """

    name: ClassVar[str] = ""
    synonyms: ClassVar[Sequence[str]] = ()
    targets_like: ClassVar[str]
    written: ClassVar[str] = ""
    natural: ClassVar[bool] = True
    of_classes: ClassVar[bool] = False
    ignored: ClassVar[int | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            type.__setattr__(cls, "__init__", takes_outputs(vars(cls)["__init__"]))

    @takes_outputs
    def __init__(self, inputs: Tensor, targets: Tensor | None = None, seed: int | None = None) -> None:
        self.check_outputs(inputs)
        self.inputs = inputs
        self.seed = seed
        self.targets = targets
        self.kept: Tensor | None = None
        self.real: Tensor | None = None
        self.real_elements: Tensor | None = None
        self.weights: Tensor | None = None
        self.real_cases: int | Tensor | None = None

    @classmethod
    def check_outputs(cls, *outputs: object) -> None:
        """Raises LossError for outputs that are no tensors, or complex."""
        if others := [type(output).__name__ for output in outputs if not isinstance(output, Tensor)]:
            raise LossError(f"{cls.__name__} takes tensors that forward returns, and got a {others[0]}")
        if empty := [
            output for output in outputs if isinstance(output, Tensor) and output.dim() > 1 and not output.shape[-1]
        ]:
            raise LossError(
                f"{cls.__name__} takes outputs that have numbers, and got one of shape {list(empty[0].shape)}: give "
                "the last layer features, or name the outputs that the loss is of, as in "
                f"loss=lambda outputs: kfac_fx.losses.{cls.__name__}(outputs[0])"
            )
        if any(isinstance(output, Tensor) and output.is_complex() for output in outputs):
            raise LossError(
                f"{cls.__name__} takes real tensors, and got a complex one: write what the loss is of, as in "
                f"loss=lambda outputs: kfac_fx.losses.{cls.__name__}(torch.view_as_real(outputs).flatten(1))"
            )

    def out_of_range(self) -> str:
        """A sentence about inputs for which there is no such distribution; empty if there are none. The host waits."""
        return ""

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

    def not_ignored(self) -> Tensor | None:
        """[cases...], whether a case has a target; None: all have, or the targets do not tell."""
        targets = self.targets
        if self.ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
            return None
        if targets.shape != self._target_shape() or targets.device != self.inputs.device:  # `evaluate` raises
            return None
        return targets.ne(self.ignored)

    def keeping(self, kept: Tensor) -> Self:
        """Leave out the cases whose target is ignored: constants, and none of `cases`; returns the loss itself."""
        self.kept, self.real_cases = kept, kept.sum()
        wide = kept.view(*kept.shape, *[1] * (self.inputs.dim() - kept.dim()))
        self.inputs = torch.where(wide, self.inputs, self.inputs.detach())
        return self

    def with_cases_at(self, axis: int) -> Self:
        """Move the cases from `axis` of the inputs, and of the targets, to the front; returns the loss itself."""
        if axis:
            self.inputs = self.inputs.movedim(axis, 0)
            self.targets = None if self.targets is None else self.targets.movedim(axis, 0)
            self.kept = None if self.kept is None else self.kept.movedim(axis, 0)
        return self

    def scaled(self, factor: object) -> NoReturn:
        """Raises LossError: a loss is no number, so it is not multiplied."""
        weight = f"{factor:g}" if isinstance(factor, int | float) else "weight"
        kind = type(self).__name__
        raise LossError(
            f"a {kind} was multiplied or divided, and a loss is no number: its coefficient is in front of it, in a "
            f"pair, as in loss=lambda outputs: ({weight}, kfac_fx.losses.{kind}(...))"
        )

    def divided(self, divisor: object) -> NoReturn:
        """Raises LossError: a loss is no number, so it is not divided."""
        self.scaled(1 / divisor if isinstance(divisor, int | float) and divisor else None)

    def added(self, other: object) -> NoReturn:
        """Raises LossError: a loss is no number, so it is not added."""
        kinds = [type(of).__name__ for of in (self, other if isinstance(other, LossFunction) else self)]
        raise LossError(
            f"a {kinds[0]} was added to something, and a loss is no number: several losses are a list, each with its "
            f"coefficient in front, as in loss=lambda outputs: [kfac_fx.losses.{kinds[0]}(...), "
            f"(0.5, kfac_fx.losses.{kinds[1]}(...))]"
        )

    __mul__ = __rmul__ = scaled
    __truediv__ = divided
    __add__ = __radd__ = __sub__ = __rsub__ = added

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
        if (shape := self.targets.shape) != expected:
            same = [size for size in shape if size != 1] == [size for size in expected if size != 1]
            remedy = f": write targets.reshape({list(expected)}), or every case is compared with the targets of all"
            raise LossError(
                f"{type(self).__name__}: targets have shape {list(shape)}, expected {list(expected)}, "
                f"{self.targets_like}{remedy * same}"
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

    def value_behind(self, gradient: Tensor) -> Tensor | None:
        """The loss whose gradient is `gradient`, of the shape of `inputs`, summed over cases and up to a constant, [].
        None: the gradient does not tell it."""
        entropy = self.entropy()
        return None if entropy is None else entropy + (gradient * precise(self.inputs)).sum()

    def constant(self) -> Tensor | float:
        """The difference of -log p of the targets and the loss of torch, summed over cases, []."""
        return 0.0

    def change_behind(self, gradient: Tensor, new: LossFunction) -> Tensor:
        """By how much the loss whose gradient is `gradient` changes from `inputs` to those of `new`, a loss of the same
        kind, summed over cases, []."""
        slope = (gradient * precise(new.inputs - self.inputs)).sum()
        return new.divergence_from(self.inputs) + slope

    def squared_norm(self, vector: Tensor, ggn: bool = False) -> Tensor:
        """<v, F v>, or that of the generalized Gauss-Newton matrix, summed over the cases that count, as they weigh."""
        counted = self.kept if self.real is None else self.real
        if counted is not None:
            wide = counted.view(*counted.shape, *[1] * (vector.dim() - counted.dim()))
            vector = torch.where(wide, vector, 0)
        product = self.multiply_ggn_factor_transpose(vector) if ggn else self.multiply_fisher_factor_transpose(vector)
        return (product.square() if self.weights is None else product.square() * self.weights.abs()).sum()

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


class Categorical(LossFunction):
    """A categorical distribution with logits on the last axis; every element of the other axes is a case.

    Targets are class numbers. The loss leaves out the target -100, as `F.cross_entropy` does.

    Raises:
        LossError: there is only one class.
    """

    name = "categorical"
    synonyms = ("softmax", "focal", "kl_div", "label_smoothing")
    targets_like = "class numbers, one for each distribution"
    of_classes = True
    ignored: ClassVar[int | None] = IGNORE_INDEX

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

    def value_behind(self, gradient: Tensor) -> Tensor | None:
        """The gradient is p - t, so the loss is - Σ t log p. <g, z> and the entropy would cancel: with logits of 30, a
        loss of 1e-7 has an error of 1e-5."""
        logarithms, p, normalizer = log_probabilities(self.inputs)
        along_ones = sum_of_rows(gradient) * normalizer
        return along_ones.sum() - inner_product(p.sub_(gradient), logarithms)

    def change_behind(self, gradient: Tensor, new: LossFunction) -> Tensor:
        before, p, normalizer = log_probabilities(self.inputs)
        now, _, new_normalizer = log_probabilities(new.inputs)
        along_ones = sum_of_rows(gradient) * (new_normalizer - normalizer)
        return along_ones.sum() + inner_product(p.sub_(gradient), before.sub_(now))

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


def log_probabilities(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(`log_softmax` over the last axis, the probabilities, their `logsumexp`, [...]).

    The logarithm of a probability near 1 keeps its relative precision: log p of the largest is -log1p of the others'
    sum. `log_softmax` rounds it to a multiple of 6e-8.
    """
    logits = precise(logits)
    logarithms = logits.log_softmax(-1)
    p = logarithms.exp()
    largest, place = p.max(-1, keepdim=True)
    normalizer = logits.gather(-1, place) - logarithms.gather(-1, place)
    others = p.scatter_(-1, place, 0.0).sum(-1, keepdim=True)
    logarithms.scatter_(-1, place, -(others / largest).log1p())
    return logarithms, p.scatter_(-1, place, largest), normalizer.squeeze(-1)


def inner_product(targets: Tensor, logarithms: Tensor) -> Tensor:
    """Σ t l, []. A target of zero counts nothing, also where the logarithm is infinite."""
    return (targets * logarithms).masked_fill_(targets == 0, 0).sum()


def sum_of_rows(gradient: Tensor) -> Tensor:
    """The sum over classes of a gradient at logits, [...]. A cross-entropy has a sum of zero, up to rounding; other
    terms of a loss, as the square of logsumexp, have another one."""
    total = gradient.sum(-1)
    return torch.where(total.abs() < ROUNDING, 0, total)


def axis_of_log_probabilities(outputs: Tensor) -> int | None:
    """The axis along which all probabilities of these logarithms add up to one, up to rounding and the small numbers
    that keep a logarithm finite; None if there is none. The host waits for the outputs."""
    axes = [axis for axis in reversed(range(1, outputs.dim())) if outputs.shape[axis] > 1]
    if not axes or not outputs.numel() or not outputs.is_floating_point():
        return None
    limit = max(SMALL, 8 * torch.finfo(outputs.dtype).eps)
    values = precise(outputs.detach())
    apart = torch.stack([(~(values.logsumexp(axis).abs() <= limit)).any() for axis in axes]).tolist()  # also if NaN
    return next((axis for axis, is_apart in zip(axes, apart, strict=True) if not is_apart), None)


class OnehotCategorical(Categorical):
    """`Categorical` with one-hot targets, or probabilities of the classes."""

    name = ""
    targets_like = "one-hot vectors or probabilities, of the shape of the logits"
    ignored = None

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

    name = "normal"
    synonyms = ("gaussian", "huber", "smooth_l1")
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

    def constant(self) -> Tensor | float:
        return 0.5 * math.log(2 * math.pi * self.var) * self.inputs.numel()

    def value_behind(self, gradient: Tensor) -> Tensor | None:
        """The gradient is (m - t) / var."""
        return 0.5 * self.var * gradient.square().sum()

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        error = precise(self.inputs) - targets
        return error.square().sum() / (2 * self.var) + self.constant()

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
    written = "kfac_fx.losses.NormalMeanVariance(outputs[0], outputs[1].exp())"
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

    def out_of_range(self) -> str:
        wrong = self.inputs <= 0  # false for what is not a number
        _, variances = (wrong if self.real_elements is None else wrong & self.real_elements).chunk(2, dim=-1)
        if not (number := int(variances.sum())):
            return ""
        return (
            f"{number:,} of the {variances.numel():,} variances of the NormalMeanVariance loss are not positive, and a "
            "normal distribution has none like these: hand it a positive function of the outputs, as in loss=lambda "
            f"outputs: {self.written}, and train that function, too."
        )

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

    name = "multi_bernoulli"
    synonyms = ("bernoulli", "sigmoid")
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

    def value_behind(self, gradient: Tensor) -> Tensor | None:
        """The gradient is p - t; of a t near 0 or 1 its difference to them is rounding."""
        logits, targets = precise(self.inputs), self.event_behind(gradient)
        return -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)).sum()

    def change_behind(self, gradient: Tensor, new: LossFunction) -> Tensor:
        before, now, targets = precise(self.inputs), precise(new.inputs), self.event_behind(gradient)
        of_one = F.logsigmoid(before) - F.logsigmoid(now)
        of_zero = F.logsigmoid(-before) - F.logsigmoid(-now)
        return (targets * of_one + (1 - targets) * of_zero).sum()

    def event_behind(self, gradient: Tensor) -> Tensor:
        """t, where the gradient is p - t."""
        targets = precise(self.inputs).sigmoid() - gradient
        nearest = targets.round()
        return torch.where((targets - nearest).abs() < ROUNDING, nearest, targets)

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        """The gradient is s (p - t) with t zero or one: t was one where the logit should grow."""
        return (gradient < 0).to(self.inputs.dtype)

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        logits = precise(self.inputs)
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum")

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        p = precise(self.inputs).sigmoid()
        return (torch.empty_like(p).uniform_(generator=generator) < p).to(p.dtype)


class Poisson(LossFunction):
    """Independent counts, of which the outputs are the logarithms of the expected ones; targets are counts."""

    name = "poisson"
    synonyms = ("count", "counts", "poisson_regression")
    targets_like = "counts, of the shape of the logarithms of the expected counts"

    def __init__(self, log_rates: Tensor, targets: Tensor | None = None, seed: int | None = None) -> None:
        super().__init__(log_rates, targets, seed)

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return ((precise(self.inputs) / 2).exp() * vector).to(vector.dtype)

    multiply_fisher_factor_transpose = multiply_fisher_factor

    def divergence_from(self, inputs: Tensor) -> Tensor:
        step = precise(self.inputs - inputs)
        return (precise(inputs).exp() * (step.expm1() - step)).sum()

    def constant(self) -> Tensor | float:
        return 0.0 if self.targets is None else log_factorial(precise(self.targets)).sum()

    def value_behind(self, gradient: Tensor) -> Tensor | None:
        """The gradient is r - t with the rate r = exp z."""
        log_rates = precise(self.inputs)
        rates = log_rates.exp()
        return (rates - (rates - gradient) * log_rates).sum()

    def targets_behind(self, gradient: Tensor) -> Tensor | None:
        """The gradient is s (r - t), and s r where the count is zero: if none is, other targets are returned."""
        rates = precise(self.inputs.detach()).exp()
        scale = (precise(gradient) / rates).max()
        return None if not scale > 0 else (rates - gradient / scale).round().clamp(min=0)

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        log_rates, counts = precise(self.inputs), precise(targets)
        return (log_rates.exp() - counts * log_rates + log_factorial(counts)).sum()

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        return torch.poisson(precise(self.inputs).exp(), generator=generator)


def log_factorial(counts: Tensor) -> Tensor:
    return torch.lgamma(counts + 1)


DISTRIBUTIONS: Mapping[str, type[LossFunction]] = {
    kind.name: kind for kind in (Categorical, Normal, MultiBernoulli, Poisson)
}


class Unnamed(LossFunction):
    """The loss of one output of a forward.

    Args:
        inputs: the output, [cases, ...], or a number.
        rows: N g, of the shape of `inputs`.
    """

    targets_like = "unknown"

    def __init__(self, inputs: Tensor, rows: Tensor) -> None:
        super().__init__(inputs)
        self.rows = rows

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return self.rows * vector.view(*vector.shape, *[1] * (self.rows.dim() - self.case_axes))

    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        products = precise(self.rows) * vector
        return products.sum(tuple(range(self.case_axes - self.rows.dim(), 0))) if self.rows.dim() > 1 else products

    @property
    def fisher_factor_inner_shape(self) -> torch.Size:
        return self.inputs.shape[: self.case_axes]

    def divergence_from(self, inputs: Tensor) -> Tensor:
        return super().divergence_from(inputs) if self.case_axes else torch.zeros_like(precise(inputs))

    def squared_unit(self) -> Tensor:
        """The sum over cases of |N g_n|²; of a number, <g, z>². 0-dim."""
        return precise(self.rows if self.case_axes else self.rows * self.inputs).square().sum()

    def entropy(self) -> Tensor | None:
        return None if self.case_axes else torch.zeros_like(precise(self.inputs))

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        raise AssertionError("bug in kfac_fx: the value of a loss without a name")

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        raise AssertionError("bug in kfac_fx: a sample of a loss without a name")


MODES = ("gradients", "empirical", "curvature_prop", "curvature_prop_GGN", "exact", "exact_GGN")
LossPairs = Sequence[tuple[Any, LossFunction]]  # (coefficient, a number or one for every case, loss)
Cotangents = list[Tensor | None]  # of every input of a loss; None: nothing is sent back


def check_mode(mode: object, name: str = "mode") -> None:
    """Raises ValueError for a mode that does not exist. name: of the argument that it was given as."""
    choice(name, mode, MODES)


def is_exact(mode: str) -> bool:
    return mode in ("exact", "exact_GGN")


def one_source(mode: str, losses: LossPairs, leaves: Sequence[Tensor], generator: torch.Generator | None) -> Cotangents:
    """The only source of a mode that is not exact; leaves: the outputs of the model. Raises TargetsMissing."""
    return pulled([loss.inputs for _, loss in losses], source_of_losses(mode, losses, generator), leaves, keep=True)


def source_of_losses(mode: str, losses: LossPairs, generator: torch.Generator | None) -> list[Tensor]:
    """The gradients of the inputs of the losses that a mode with one source sends back.

    Each is that of its own loss. Losses may have the same inputs, or inputs that are computed from those of another;
    gradients of their sum would count such a path once for every loss.

    Raises TargetsMissing.
    """
    if mode.startswith("curvature_prop"):
        return [
            root(c) * multiply_factor(mode, loss, random_signs(inner_shape(mode, loss), loss, generator))
            for c, loss in losses
        ]
    if mode == "empirical":
        check_targets([loss for _, loss in losses])
    assert losses, "bug in kfac_fx: a Fisher without losses"
    vectors: list[Tensor] = []
    for c, loss in losses:
        value = loss.evaluate() if mode == "empirical" else loss.evaluate_on_sample(generator)
        if loss.inputs.requires_grad:
            (vector,) = torch.autograd.grad(value, loss.inputs, retain_graph=True)
            vectors.append(vector * (c if mode == "empirical" else root(c)))
        else:
            vectors.append(torch.zeros_like(loss.inputs))
    return vectors


def check_targets(losses: Sequence[LossFunction]) -> None:
    """Raises TargetsMissing with all losses that have no targets."""
    missing = [loss for loss in losses if loss.targets is None]
    if missing:
        rows = [
            (f"{type(loss).__name__} of {list(loss.inputs.shape)}", f"wants {loss.targets_like}") for loss in missing
        ]
        raise TargetsMissing(
            f"the mode 'empirical' needs the true targets, and {len(missing)} of {len(losses)} losses have "
            f"none:\n{table(rows)}\n"
            "Pass them, as a tuple if there are several losses, as in estimator.update_covariances(x, targets=y), "
            "net.record((x,), {}, mode='empirical', targets=y) or spectrum.precondition((x, y)); or sample them with "
            "the mode 'gradients'."
        )


def number_of_sources(losses: LossPairs, mode: str, by_case: bool = False) -> int:
    return sum(prod(inner_shape(mode, loss)[0 if by_case else cases_axis(loss) :]) for _, loss in losses)


def exact_sources(
    mode: str, losses: LossPairs, leaves: Sequence[Tensor], chunk: int, by_case: bool = False
) -> Iterator[tuple[int, Cotangents]]:
    """Yields (k, cotangents [k, ...] of k sources), with k at most `chunk`, for all coordinates of all losses.

    by_case: with one source for every coordinate of every single case, instead of one for all cases together.
    """
    for c, loss in losses:
        shape = inner_shape(mode, loss)
        axis = 0 if by_case else cases_axis(loss)
        size = prod(shape[axis:])
        for start in range(0, size, chunk):
            stop = min(start + chunk, size)
            rows = torch.zeros(stop - start, size, dtype=loss.inputs.dtype, device=loss.inputs.device)
            rows.diagonal(start).fill_(1.0)
            one_hot = rows.view(stop - start, *[1] * axis, *shape[axis:]).expand(stop - start, *shape)
            vector = root(c) * multiply_factor(mode, loss, one_hot)
            yield stop - start, pulled([loss.inputs], [vector], leaves, keep=True, batched=True)


def root(coefficient: float | Tensor) -> Any:
    """√|c|: a loss that is to grow has the Fisher of its negative. A coefficient is a tensor where only the batch knows
    it: the number of its cases, or the weight of every case."""
    return coefficient.abs().sqrt() if isinstance(coefficient, Tensor) else sqrt(abs(coefficient))


def cases_axis(loss: LossFunction) -> int:
    """The first axis behind the cases; 0 for logits without a batch."""
    return min(1, loss.case_axes)


def inner_shape(mode: str, loss: LossFunction) -> torch.Size:
    return loss.ggn_factor_inner_shape if mode.endswith("_GGN") else loss.fisher_factor_inner_shape


def multiply_factor(mode: str, loss: LossFunction, vector: Tensor) -> Tensor:
    """B v as a constant of autograd."""
    multiply = loss.multiply_ggn_factor if mode.endswith("_GGN") else loss.multiply_fisher_factor
    with torch.no_grad():
        return multiply(vector)


def random_signs(shape: torch.Size, loss: LossFunction, generator: torch.Generator | None) -> Tensor:
    if generator is None and loss.seed is not None:
        generator = torch.Generator(loss.inputs.device).manual_seed(loss.seed)
    half = torch.full(shape, 0.5, dtype=loss.inputs.dtype, device=loss.inputs.device)
    return 2 * torch.bernoulli(half, generator=generator) - 1


# --- the sources of single cases --------------------------------------------------------------------------------------


Measurement = Callable[..., Tensor]  # of what the model returns, and the targets if there are any: [N]


@dataclass(frozen=True)
class CaseSource:
    """Gradients that are sent back from tensors which depend on the outputs.

    tensors, vectors: the inputs of the losses, and their gradients. leaves: the outputs as constants.
    owners: the example that every row of the tensors belongs to.
    """

    tensors: Sequence[Tensor]
    vectors: Sequence[Tensor]
    leaves: Sequence[Tensor]
    owners: Callable[[], Sequence[Tensor]]

    def cotangents(self, example: int | None = None) -> Cotangents:
        """The cotangents of the outputs, for all examples or for one."""
        vectors = self.vectors
        if example is not None:
            vectors = [v * (owner == example) for v, owner in zip(vectors, self.owners(), strict=True)]
        return pulled(self.tensors, vectors, self.leaves, keep=True)


def measurement_source(
    measurement: Measurement, outputs: Any, targets: Any, leaves: Sequence[Tensor], examples: int
) -> CaseSource:
    """The source of a function of (what the model returns, the targets), or of the outputs if there are no targets."""
    given = (outputs,) if targets is None else (outputs, targets)
    try:
        inspect.signature(measurement).bind(*given)
    except TypeError as error:
        takes = "the outputs alone, because the batch has no targets=" if targets is None else "the outputs and targets"
        labels = ". If it needs labels that forward takes, pass them twice: Batch(x, labels=y, targets=y)"
        raise ValueError(
            f"a measurement is called with {takes}, and this one does not take that: {error}. Write "
            f"measurement=lambda {'outputs' if targets is None else 'outputs, targets'}: ..., one number an example"
            f"{labels if targets is None else ''}"
        ) from error
    except ValueError:  # a function without a signature
        pass
    values = measurement(*given)
    if not isinstance(values, Tensor) or values.shape != (examples,):
        what = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ValueError(f"a measurement is one number for every example, [{examples}], and this one returned {what}.")
    refuse_without_gradient("the measurement", values, leaves, "lambda outputs: outputs.log_softmax(1)[:, 3]")
    return CaseSource(
        [values], [torch.ones_like(values)], leaves, lambda: [torch.arange(examples, device=values.device)]
    )


def code_of(function: Callable[..., Any]) -> Hashable:
    """The code of a function, which functions that differ in values from outside share; a class for other objects."""
    while isinstance(function, partial):
        function = function.func
    kind: Any = type(function)
    code: Hashable = getattr(function, "__code__", kind)
    return code


def refuse_without_gradient(what: str, values: Tensor, leaves: Sequence[Tensor], instead: str) -> None:
    """Raises ValueError if what a function of the user returned has no gradient for any output of the model.

    Args:
        what: the function, as in "the measurement".
        values: what it returned.
        leaves: the outputs as constants, of which it is a function.
        instead: a function that has one.
    """
    if values.is_complex():
        why = "complex numbers have no derivative, and need abs(), real or imag behind them"
    elif not values.is_floating_point():
        why = f"it returned {str(values.dtype).removeprefix('torch.')}, which has none, as argmax and comparisons do"
    elif not values.requires_grad:
        why = "it cuts it off, as detach(), torch.no_grad(), .item() and a cast of argmax or of a comparison do"
    elif all(grad is None for grad in pulled([values], [torch.ones_like(values)], leaves, keep=True)):
        why = "it is computed from other tensors"
    else:
        return
    raise ValueError(
        f"{what} has no gradient by the outputs of the model: {why}. Write a differentiable function of what the model "
        f"returns, such as {instead} of logits."
    )


def source_vectors(
    mode: str, losses: LossPairs, slots: Callable[[], Sequence[Tensor]], by_row: bool, generator: torch.Generator | None
) -> Iterator[list[Tensor]]:
    """Gradients of the inputs of all losses, source by source. slots: of every loss, asked for where they matter."""
    if is_exact(mode):
        for number, (c, loss) in enumerate(losses):
            shape, rows = inner_shape(mode, loss), loss.case_axes
            for coordinate in range(prod(shape[rows:])):
                one_hot = torch.zeros(prod(shape[rows:]), dtype=loss.inputs.dtype, device=loss.inputs.device)
                one_hot[coordinate] = 1
                vector = root(c) * multiply_factor(mode, loss, one_hot.view(shape[rows:]).expand(shape))
                yield from only_slots(losses, slots(), {number: vector})
        return
    vectors = source_of_losses(mode, losses, generator)
    if not by_row:
        yield vectors
        return
    yield from row_by_row(losses, slots(), vectors)


def row_by_row(losses: LossPairs, slots: Sequence[Tensor], vectors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The gradients of all losses, slot by slot. The rows of losses that are laid out alike, as those of two heads, are
    the same rows."""
    left = list(range(len(losses)))
    while left:
        together = [number for number in left if same_slots(slots[number], slots[left[0]])]
        yield from only_slots(losses, slots, {number: vectors[number] for number in together})
        left = [number for number in left if number not in together]


def same_slots(slots: Tensor, others: Tensor) -> bool:
    """Whether two losses have the same rows. slots: with dimensions of size 1 for those of a row."""
    return slots.numel() == others.numel() and torch.equal(slots.flatten(), others.flatten())


def only_slots(losses: LossPairs, slots: Sequence[Tensor], of: Mapping[int, Tensor]) -> Iterator[list[Tensor]]:
    """The gradients of some losses, slot by slot, with zeros for the others. of: by the number of the loss."""
    for slot in range(max(int(slots[number].max()) for number in of) + 1):
        vectors = [torch.zeros_like(loss.inputs) for _, loss in losses]
        for number, vector in of.items():
            vectors[number] = vector * (slots[number] == slot)
        yield vectors
