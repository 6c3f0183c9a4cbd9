"""The sources of single cases: gradients that are sent back from all examples, from one of them, or from one slot.

The number of a row of a loss within its example is its *slot*. A source of one slot sends back one row of every
example, so that the gradients of the rows of an example do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from kfac_fx.losses.sources import (
    Cotangents,
    LossPairs,
    check_targets,
    inner_shape,
    is_exact,
    multiply_factor,
    pulled_back,
    random_signs,
)

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
        return pulled_back(self.tensors, vectors, self.leaves)


def measurement_source(
    measurement: Measurement, outputs: Any, targets: Any, leaves: Sequence[Tensor], examples: int
) -> CaseSource:
    """The source of a function of (what the model returns, the targets), or of the outputs if there are no targets."""
    values = measurement(outputs) if targets is None else measurement(outputs, targets)
    if not isinstance(values, Tensor) or values.shape != (examples,):
        what = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ValueError(f"a measurement is one number for every example, [{examples}], and this one returned {what}.")
    return CaseSource(
        [values], [torch.ones_like(values)], leaves, lambda: [torch.arange(examples, device=values.device)]
    )


def source_vectors(
    mode: str,
    losses: LossPairs,
    slots: Callable[[], Sequence[Tensor]],
    by_row: bool,
    generator: torch.Generator | None,
) -> Iterator[list[Tensor]]:
    """Gradients of the inputs of all losses, source by source. slots: of every loss, asked for where they matter."""
    if is_exact(mode):
        for number, (c, loss) in enumerate(losses):
            shape, rows = inner_shape(mode, loss), loss.case_axes
            for coordinate in range(prod(shape[rows:])):
                one_hot = torch.zeros(prod(shape[rows:]), dtype=loss.inputs.dtype, device=loss.inputs.device)
                one_hot[coordinate] = 1
                vector = sqrt(c) * multiply_factor(mode, loss, one_hot.view(shape[rows:]).expand(shape))
                yield from only_slots(losses, slots(), number, vector)
        return
    vectors = one_source_vectors(mode, losses, generator)
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


def one_source_vectors(mode: str, losses: LossPairs, generator: torch.Generator | None) -> list[Tensor]:
    """The gradients of the inputs of the losses that a mode with one source sends back."""
    if mode.startswith("curvature_prop"):
        return [
            sqrt(c) * multiply_factor(mode, loss, random_signs(inner_shape(mode, loss), loss, generator))
            for c, loss in losses
        ]
    if mode == "empirical":
        check_targets([loss for _, loss in losses])
    total = sum(
        c * loss.evaluate() if mode == "empirical" else sqrt(c) * loss.evaluate_on_sample(generator)
        for c, loss in losses
    )
    assert isinstance(total, Tensor), "bug in kfac_fx: a Fisher without losses"
    inputs = [loss.inputs for _, loss in losses]
    return list(torch.autograd.grad(total, inputs, retain_graph=True))
