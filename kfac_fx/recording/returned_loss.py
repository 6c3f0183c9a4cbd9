"""The loss that forward returns: which of the returned tensors it is, and whether it is a mean over cases or a sum.

A graph tells the first by its nodes (`passes.returned_loss`); the tensors of one run tell it where Python computes the
loss. Numbers tell the second: with every example twice, the gradient of a mean stays as large as it was, and that of a
sum is twice as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kfac_fx.losses.declared import DIVIDED_BY_CASES, constant_of, divisor_of
from kfac_fx.passes import results
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.ir import LossSite
from kfac_fx.passes.torch_private import pytree
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.emitted_submodules import LossWatch, among_returned
from kfac_fx.recording.output_losses import probably_mean
from kfac_fx.recording.recorder import Recorder


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
    if site is None or weight is None or abs(weight) == 1 or divisor_of(site) is not None:
        return False
    values = recorder.capture.flatten(args, kwargs)
    _, fisher = recorder.outputs({}, values)
    cases = recorder.losses.cases(recorder.losses.real(lambda outputs: None, fisher, values))
    least, most = DIVIDED_BY_CASES
    return least <= abs(weight) * int(cases) <= most


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
