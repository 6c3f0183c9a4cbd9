"""Sources: the gradients that are sent back from the outputs, whose second moments make the wanted matrix.

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

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.arguments import choice
from kfac_fx.linalg.matrices import pulled
from kfac_fx.losses.distributions import LossFunction
from kfac_fx.passes.errors import TargetsMissing, table

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
        takes = "the outputs alone, because the batch has no targets" if targets is None else "the outputs and targets"
        raise ValueError(
            f"a measurement is called with {takes}, and this one does not take that: {error}. Write "
            f"measurement=lambda {'outputs' if targets is None else 'outputs, targets'}: ..., one number an example"
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
                yield from only_slots(losses, slots(), number, vector)
        return
    vectors = source_of_losses(mode, losses, generator)
    if not by_row:
        yield vectors
        return
    for number, vector in enumerate(vectors):
        yield from only_slots(losses, slots(), number, vector)


def only_slots(losses: LossPairs, slots: Sequence[Tensor], number: int, vector: Tensor) -> Iterator[list[Tensor]]:
    """The gradient of one loss, slot by slot, with zeros for the others."""
    for slot in range(int(slots[number].max()) + 1):
        vectors = [torch.zeros_like(loss.inputs) for _, loss in losses]
        vectors[number] = vector * (slots[number] == slot)
        yield vectors
