"""Checks of a distribution that the user declares, on the outputs of the first batch.

The Fisher of a distribution is the mean of g gᵀ over its own samples, for the gradient g of their loss by the outputs,
and also B Bᵀ. So a class that contradicts itself is told: by the shapes that its methods return, by its two products
with B, and by the squares of sampled gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.losses.declared import structure
from kfac_fx.losses.distributions import LossFunction
from kfac_fx.passes.errors import LossError, fatal
from kfac_fx.passes.matrix import precise
from kfac_fx.passes.tracing.random_streams import accelerators, same_random

DRAWS, NUMBERS = 64, 2**24  # of samples for one comparison, and of numbers in all of them
CERTAIN = 10.0  # standard errors of a difference
FACTOR = 2.0  # between the squares of sampled gradients and those of B, above which they are told
TRANSPOSED = 1e-2  # relative; right products agree to the rounding of their dtype


def misfits_of_own(losses: Sequence[LossFunction]) -> list[str]:
    """A sentence about every distribution of the user whose B is not that of its samples.

    losses: on the outputs of one batch. Outputs that are not finite tell nothing.

    Raises LossError for a method that returns something else than its kind of numbers, in its shape.
    """
    sentences = []
    for loss in losses:
        if type(loss).__module__.startswith("kfac_fx.") or not loss.inputs.numel():
            continue
        if not bool(loss.inputs.isfinite().all()):
            continue
        with same_random(accelerators([loss.inputs])):
            check_samples(loss)
            check_factor(loss)
            if loss.inputs.requires_grad and loss.weights is None and loss.kept is None and loss.real is None:
                sentences += other_factor(loss)
    return list(dict.fromkeys(sentences))


def check_samples(loss: LossFunction) -> None:
    """Raises LossError for samples, or a loss of them, that are not those of all cases."""
    name, wanted = type(loss).__name__, list(loss._target_shape())
    drawn = called(loss, "_sample", generator_for(loss))
    if not isinstance(drawn, Tensor) or list(drawn.shape) != wanted:
        raise LossError(
            f"{name}._sample returned {structure(drawn)}, and targets of all cases are of shape {wanted}, as the "
            "outputs. Draw one target for each of them; for targets of another shape define _target_shape(self), too."
        )
    if drawn.is_floating_point() and not bool(drawn.isfinite().all()):
        raise LossError(f"{name}._sample drew targets that are not finite, for outputs that are.")
    value = called(loss, "_negative_log_likelihood", drawn)
    if not isinstance(value, Tensor) or value.dim():
        raise LossError(
            f"{name}._negative_log_likelihood returned {structure(value)}, and the loss is one number, the sum over "
            "all cases and elements: end it with .sum(), without a mean."
        )
    if loss.inputs.requires_grad and not value.requires_grad:
        raise LossError(
            f"{name}._negative_log_likelihood has no gradient by self.inputs: compute it from self.inputs, without "
            "detach() and torch.no_grad()."
        )


def check_factor(loss: LossFunction) -> None:
    """Raises LossError for products with B and Bᵀ of other shapes, or of another matrix each."""
    name, outputs, inner = type(loss).__name__, loss.inputs.shape, loss.fisher_factor_inner_shape
    hint = "" if inner != outputs else "; for a B that is not square define the property fisher_factor_inner_shape, too"
    v, w = (torch.randn(shape, dtype=loss.inputs.dtype, device=loss.inputs.device) for shape in (inner, outputs))
    with torch.no_grad():
        for vector, wanted in ((v, outputs), (v.expand(2, *inner), torch.Size([2, *outputs]))):
            product = called(loss, "multiply_fisher_factor", vector)
            if not isinstance(product, Tensor) or product.shape != wanted:
                raise LossError(
                    f"{name}.multiply_fisher_factor returned {structure(product)} for a vector {list(vector.shape)}, "
                    f"and B v is of shape {list(wanted)}: that of the outputs, behind the dimensions that the vector "
                    f"has in front{hint}."
                )
        transposed = called(loss, "multiply_fisher_factor_transpose", w)
        if not isinstance(transposed, Tensor) or transposed.shape != inner:
            raise LossError(
                f"{name}.multiply_fisher_factor_transpose returned {structure(transposed)} for a vector "
                f"{list(outputs)} of the shape of the outputs, and Bᵀ v is of shape {list(inner)}{hint}."
            )
        left = precise(called(loss, "multiply_fisher_factor", v)) * precise(w)
        right = precise(v) * precise(transposed)
        size = float(left.square().sum().sqrt() + right.square().sum().sqrt())
        if float((left.sum() - right.sum()).abs()) > TRANSPOSED * size:
            raise LossError(
                f"{name}.multiply_fisher_factor_transpose is not the transpose of {name}.multiply_fisher_factor: "
                "(B v) · w and v · (Bᵀ w) differ. If B is diagonal or symmetric, write "
                "multiply_fisher_factor_transpose = multiply_fisher_factor."
            )


def other_factor(loss: LossFunction) -> list[str]:
    """The sentence about a B whose B Bᵀ is not the second moment of sampled gradients, if it is none.

    For random signs z, (zᵀ g)² has the mean |Bᵀ z|² over samples.
    """
    generator = generator_for(loss)
    draws = max(8, min(DRAWS, NUMBERS // loss.inputs.numel()))
    of_samples, of_factor = [], []
    for _ in range(draws):
        z = torch.randint(2, loss.inputs.shape, device=loss.inputs.device).to(loss.inputs.dtype) * 2 - 1
        value = loss._negative_log_likelihood(loss.sample(generator))
        (gradient,) = torch.autograd.grad(value, loss.inputs, retain_graph=True)
        by_case = precise(z * gradient).reshape(loss.all_cases, -1).sum(1)
        of_samples.append(by_case.square().sum())
        with torch.no_grad():
            of_factor.append(precise(loss.multiply_fisher_factor_transpose(z)).square().sum())
    sampled, of_b = torch.stack(of_samples).double(), torch.stack(of_factor).double()
    difference = sampled - of_b
    error = float(difference.std()) / draws**0.5
    one, other = float(sampled.mean()), float(of_b.mean())
    if not (abs(one - other) > CERTAIN * error and max(one, other) > FACTOR * min(one, other)):
        return []
    name, times = type(loss).__name__, f"{one / other:.2g} times" if other else "no multiple of"
    return [
        f"the B of {name} is not that of its samples: the squares of the gradients of sampled targets are {times} "
        "those of B Bᵀ, on average over cases and samples, and should be the same. The modes with samples and those "
        f"with B have other Fishers. Look at the factors in {name}._negative_log_likelihood, {name}._sample and "
        f"{name}.multiply_fisher_factor. Nothing is wrong if B is meant to be another matrix"
    ]


def called(loss: LossFunction, method: str, *args: Any) -> Any:
    """A method of the user's. Raises LossError if it does not take the arguments; its own errors get a note."""
    name, function = type(loss).__name__, getattr(loss, method)
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise LossError(
            f"{name}.{method} does not take what it is called with: {error}. Write {signature_of(method)}."
        ) from error
    try:
        with torch.set_grad_enabled(method == "_negative_log_likelihood"):
            return function(*args)
    except Exception as error:
        if not fatal(error):
            given = ", ".join(structure(argument) for argument in args)
            error.add_note(
                f"{name}.{method} raised this, called with {given}, for outputs {list(loss.inputs.shape)}. "
                "kfac_fx calls the methods of a distribution once on the first batch, to check them."
            )
        raise


def signature_of(method: str) -> str:
    """The first line of a method as it is to be written."""
    parameters = list(inspect.signature(getattr(LossFunction, method)).parameters)
    return f"def {method}({', '.join(parameters)})"


def generator_for(loss: LossFunction) -> torch.Generator:
    return torch.Generator(loss.inputs.device).manual_seed(0)
