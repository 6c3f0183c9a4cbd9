"""The loss that forward returns: which of the returned tensors it is, and whether it is a mean over cases or a sum.

A graph tells the first by its nodes (`passes.returned_loss`); the tensors of one run tell it where Python computes the
loss. Numbers tell the second: with every example twice, the gradient of a mean stays as large as it was, and that of a
sum is twice as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import with_gradient
from kfac_fx.losses.declared import (
    DIVIDED_BY_CASES,
    Division,
    FoundLoss,
    ObservedLoss,
    constant_of,
    divisor_of,
    elements_of_case,
)
from kfac_fx.passes import results
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import LossSite
from kfac_fx.passes.torch_losses import BY_NAME
from kfac_fx.passes.torch_private import pytree
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.emitted_submodules import LossWatch, among_returned
from kfac_fx.recording.output_losses import probably_mean
from kfac_fx.recording.recorder import Recorder

ELEMENTS_TOLERANCE = 0.01  # of a number that counts the elements of a batch


def is_mean(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool | None, str | None]:
    """(whether the returned loss is a mean over cases, None if forward computes no loss that is known; why that is a
    guess, None if it is none).

    It runs the model on the batch and on the batch with all examples twice, which leaves no trace.
    """
    sites, whole = recorder.emitted.loss_sites, isinstance(recorder.emitted, EmittedGraph)
    plain = whole and all(isinstance(s, LossSite) and s.way is not None and len(s.way.nodes) == 1 for s in sites)
    if recorder.loss is not None or plain:
        return probably_mean(sites), None
    try:
        once = size_of_gradient(recorder, args, kwargs)
        if math.isnan(once):
            return None, None
        twice = size_of_gradient(recorder, *with_all_twice(recorder, args, kwargs))
    except Exception as error:  # a model of one size of batches, in words of its own
        if fatal(error):
            raise
        return probably_mean(sites), f"the model does not run on a batch with all examples twice ({first_line(error)})"
    if not (0 < once < math.inf and 0 < twice < math.inf):
        return probably_mean(sites), "its gradient is zero, or not finite, on the first batch"
    return twice < math.sqrt(2.0) * once or is_weighed_as_mean(recorder, args, kwargs), None


def is_weighed_as_mean(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sum over cases is multiplied with a number of Python that is about 1 / their number in this batch."""
    site = next(iter(recorder.emitted.loss_sites), None)  # None: Python computes it, in the run to come
    weight = None if site is None or site.reduction != "sum" else constant_of(site)
    if site is None or weight is None or abs(weight) == 1 or is_divided(site):
        return False
    values = recorder.capture.flatten(args, kwargs)
    _, fisher = recorder.outputs({}, values)
    cases = recorder.losses.cases(recorder.losses.real(lambda outputs: None, fisher, values))
    least, most = DIVIDED_BY_CASES
    return least <= abs(weight) * int(cases) <= most


def is_divided(site: FoundLoss) -> bool:
    """Whether forward divides a loss by a number, and does not multiply it with an inverse."""
    if isinstance(site, ObservedLoss) or site.way is None:
        return divisor_of(site, Division()) is not None
    return any(exponent > 0 for _, exponent in site.way.divisors)


def division_of(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Division | None:
    """How the number is read that forward divides a sum over cases by; None if there is none, or no case.

    It may be that of a whole step of micro-batches. So a constant factor 1 / n is a division if n may be the cases of
    this batch, or of several; a smaller n makes a weight of the loss. The number counts elements only if it is that of
    the elements of this batch: a larger one may as well be the cases of several micro-batches.
    """
    if recorder.is_mean is not False or recorder.loss is not None:
        return None
    values = recorder.capture.flatten(args, kwargs)
    learned = {name: with_gradient(value.detach()) for name, value in recorder.live_parameters().items()}
    _, fisher = recorder.outputs(learned, values)  # losses that Python computes have weights where there are gradients
    sites = recorder.emitted.loss_sites
    if not sites:
        return None
    (_, loss), *_ = recorder.losses.real(lambda outputs: None, fisher, values)
    cases = int(loss.cases)
    division = Division(inverses_from=DIVIDED_BY_CASES[0] * cases)
    divisor = replace(recorder.losses, division=division).rows(fisher, values)[0].divisor
    if divisor is None or not cases:
        return None
    elements = elements_of_case(loss)
    counted = BY_NAME[sites[0].loss].averages_elements and elements > 1
    return replace(division, of_elements=counted and abs(float(divisor) / (elements * cases) - 1) < ELEMENTS_TOLERANCE)


def size_of_gradient(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The sum of the absolute values of the gradient of the returned loss with respect to the inputs of the losses; NaN
    if there are none."""
    from kfac_fx.recording.equivalence import copies, model_kept

    copied_args, copied_kwargs = copies(args, kwargs)
    with model_kept(recorder), LossWatch() as watch:
        returned = recorder.model(*copied_args, **copied_kwargs)
        inputs = [loss.inputs for loss in watch.losses if loss.inputs.requires_grad]
        if isinstance(recorder.emitted, EmittedGraph):
            leaves = results.tree_leaves(returned)
            losses = [leaves[place] for place in recorder.emitted.places_of_losses]
        else:
            losses = among_returned(returned, [loss.result for loss in watch.losses])
        roots = [loss.sum() for loss in losses if isinstance(loss, Tensor) and loss.requires_grad]
        if not roots or not inputs:
            return math.nan
        grads = torch.autograd.grad(torch.stack(roots).sum(), inputs, allow_unused=True)
    return float(sum(grad.abs().sum(dtype=torch.float64) for grad in grads if grad is not None))


def with_all_twice(
    recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of forward with every example twice."""
    emitted, values = recorder.emitted, recorder.capture.flatten(args, kwargs)
    total = emitted.examples(values)
    axes: dict[int, int] = {}
    if isinstance(emitted, EmittedGraph):
        places = ((value, emitted.case_axis(place, value)) for place, value in enumerate(values))
        axes = {id(value): axis for value, axis in places if axis is not None and value.shape[axis] == total}

    def twice(leaf: Any) -> Any:
        if isinstance(leaf, (list, tuple)):
            return type(leaf)([*leaf, *leaf])
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        axis = axes.get(id(leaf), 0)
        return torch.cat([leaf, leaf], dim=axis) if leaf.shape[axis] == total else leaf

    def lists(value: Any) -> bool:
        return type(value) in (list, tuple) and len(value) == total and not emitted.whole

    doubled: tuple[Any, ...] = tuple(pytree.tree_map(twice, value, is_leaf=lists) for value in args)
    return doubled, {name: pytree.tree_map(twice, value, is_leaf=lists) for name, value in kwargs.items()}
