"""Sources: what is sent back from the Fisher's outputs so that second moments of it make the wanted matrix.

With B Bᵀ the Fisher of one case's loss and c its coefficient, the gradient with respect to the loss's inputs is

    gradients          √c times that of the loss of sampled targets: one source, right in expectation
    empirical          c times that of the loss of the true targets: one source, another matrix
    curvature_prop     √c B ε with random signs ε: one source, right in expectation (Martens et al. 2012)
    exact              √c B e_k for every coordinate k of a case, the same for all cases: as many sources as outputs

and `..._GGN` takes the factor of the generalized Gauss-Newton matrix in the place of B. Definitions of TF K-FAC.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.passes.errors import TargetsMissing, nearest, table

MODES = ("gradients", "empirical", "curvature_prop", "curvature_prop_GGN", "exact", "exact_GGN")
Losses = Sequence[tuple[float, LossFunction]]
Cotangents = list[Tensor | None]  # of every output of the Fisher; None where nothing is sent back


def check_mode(mode: str) -> None:
    """Raises ValueError for a mode that does not exist."""
    if mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"unknown estimation_mode {mode!r}; known are {known}.{nearest(mode, MODES)}")


def is_exact(mode: str) -> bool:
    return mode in ("exact", "exact_GGN")


def one_source(mode: str, losses: Losses, leaves: Sequence[Tensor], generator: torch.Generator | None) -> Cotangents:
    """The only source of all modes but the exact ones. leaves: the Fisher's outputs, which the losses are made of."""
    if mode.startswith("curvature_prop"):
        made = [
            (loss.inputs, math.sqrt(c) * factor(mode, loss, random_signs(inner_shape(mode, loss), loss, generator)))
            for c, loss in losses
        ]
        return pulled_back([inputs for inputs, _ in made], [vector for _, vector in made], leaves)
    if mode == "empirical":
        check_targets([loss for _, loss in losses])
    total = sum(
        c * loss.evaluate() if mode == "empirical" else math.sqrt(c) * loss.evaluate_on_sample(generator)
        for c, loss in losses
    )
    assert isinstance(total, Tensor), "bug in kfac_fx: a Fisher without losses"
    return pulled_back([total], [torch.ones_like(total)], leaves)


def check_targets(losses: Sequence[LossFunction]) -> None:
    """Raises TargetsMissing, with all losses that have none."""
    missing = [loss for loss in losses if loss.targets is None]
    if missing:
        rows = [(f"{type(one).__name__} of {list(one.inputs.shape)}", f"wants {one.targets_like}") for one in missing]
        raise TargetsMissing(
            f"estimation_mode='empirical' takes the true targets, and {len(missing)} of {len(losses)} losses have "
            f"none:\n{table(rows)}\n"
            "Hand them over, for several losses in a tuple, as in estimator.update_covariances(x, targets=y) or "
            "net.record((x,), {}, mode='empirical', targets=y); or let them be sampled, with 'gradients'."
        )


def number_of_sources(losses: Losses, mode: str, by_case: bool = False) -> int:
    return sum(math.prod(inner_shape(mode, loss)[0 if by_case else cases_axis(loss) :]) for _, loss in losses)


def exact_sources(
    mode: str, losses: Losses, leaves: Sequence[Tensor], chunk: int, by_case: bool = False
) -> Iterator[tuple[int, Cotangents]]:
    """(k, cotangents [k, ...] of k sources), at most `chunk` at once, until all coordinates of all losses were there.

    by_case: a source for every coordinate of every single case.
    """
    for c, loss in losses:
        shape = inner_shape(mode, loss)
        axis = 0 if by_case else cases_axis(loss)
        size = math.prod(shape[axis:])
        for start in range(0, size, chunk):
            stop = min(start + chunk, size)
            rows = torch.zeros(stop - start, size, dtype=loss.inputs.dtype, device=loss.inputs.device)
            rows.diagonal(start).fill_(1.0)
            one_hot = rows.view(stop - start, *[1] * axis, *shape[axis:]).expand(stop - start, *shape)
            vector = math.sqrt(c) * factor(mode, loss, one_hot)
            yield stop - start, pulled_back([loss.inputs], [vector], leaves, batched=True)


def cases_axis(loss: LossFunction) -> int:
    """How many dimensions in front are the cases': of logits without a batch none are."""
    return min(1, loss.case_axes)


def inner_shape(mode: str, loss: LossFunction) -> torch.Size:
    return loss.ggn_factor_inner_shape if mode.endswith("_GGN") else loss.fisher_factor_inner_shape


def factor(mode: str, loss: LossFunction, vector: Tensor) -> Tensor:
    """B v without a gradient of its own."""
    multiply = loss.multiply_ggn_factor if mode.endswith("_GGN") else loss.multiply_fisher_factor
    with torch.no_grad():
        return multiply(vector)


def random_signs(shape: torch.Size, loss: LossFunction, generator: torch.Generator | None) -> Tensor:
    if generator is None and loss.seed is not None:
        generator = torch.Generator(loss.inputs.device).manual_seed(loss.seed)
    half = torch.full(shape, 0.5, dtype=loss.inputs.dtype, device=loss.inputs.device)
    return 2 * torch.bernoulli(half, generator=generator) - 1


def pulled_back(
    made: Sequence[Tensor], vectors: Sequence[Tensor], leaves: Sequence[Tensor], batched: bool = False
) -> Cotangents:
    """From vectors on tensors made of `leaves` to vectors on the leaves."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    pairs = [(one, vector) for one, vector in zip(made, vectors, strict=True) if one.requires_grad]
    grads = torch.autograd.grad(
        [one for one, _ in pairs],
        wanted,
        [vector.to(one.dtype) for one, vector in pairs],
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=batched,
    )
    found = iter(grads)
    return [next(found) if leaf.requires_grad else None for leaf in leaves]
