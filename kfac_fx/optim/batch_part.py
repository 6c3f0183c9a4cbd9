"""The part of a step's batch that a check takes on an accelerator: the first eighth of the examples.

The norm of a step is a mean over cases, and so is the loss. A bound and a guard need neither to more than a few digits,
so an eighth of the cases tells them. On a CPU a check takes the whole batch.

A part is a batch of its own. It has the first examples of all inputs, and the gradients g that the user's backward sent
into their outputs. These are multiplied by (all examples) / (those of the part), because the user's loss is a mean over
all of them. Where forward returns the loss itself, that of a part is a mean over its own cases, and its gradient stays.
Noise is the same at all points of a check, but not that of the user's forward, which draws numbers for all examples.

Where the outputs of an example depend on the others, as behind a batch normalization, the outputs of a part are others,
and the whole batch stays. One comparison a capture finds that out; the host waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.optim.batch_loss import BatchLoss, ObservedForward
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.matrix import precise
from kfac_fx.recording.checks.outputs import differ, sampled_elements
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.recorder import Recorder

SHARE = 1 / 8


def share_of_checks(kinds: Iterable[str], processes: int) -> float:
    """The part of the examples that the checks of "eigen_moments" take.

    Args:
        kinds: of the devices that hold the parameters.
        processes: that take the same step. The parts of several would have to be parts for all of them.
    """
    return SHARE if processes == 1 and "cpu" not in set(kinds) else 1.0


def part_of_batch(batch: BatchLoss, share: float, parameters: Mapping[str, Tensor]) -> tuple[BatchLoss, str | None]:
    """(the loss of the first `share` of the examples of every forward, None), or (`batch`, why it is no measure).

    share: it is rounded up to whole examples. parameters: by name, of the forwards.
    """
    if share >= 1.0:
        return batch, None
    for forward in batch.forwards:
        reason = against_part(forward, share, parameters)
        if reason is not None:
            return batch, reason
    return replace(batch, forwards=[part_of_forward(forward, share) for forward in batch.forwards], share=share), None


def part_of_forward(forward: ObservedForward, share: float) -> ObservedForward:
    """The forward of the first examples, with the gradients of their mean loss."""
    recorder, gradients = forward.recorder, forward.gradients
    total, wanted = examples_of(forward, share)
    if wanted == total:
        return forward
    if forward.at_outputs:
        dims = dict(zip(forward.leaves, case_dims(recorder, len(forward.leaves)), strict=True))
        factor = total / wanted
        gradients = {
            leaf: precise(first_rows(gradient, dims[leaf], total, wanted)) * factor
            for leaf, gradient in gradients.items()
        }
    args, kwargs = recorder.part_of_call(forward.args, forward.kwargs, share)
    precision = replace(forward.precision, as_returned=False)
    return replace(forward, args=args, kwargs=kwargs, returned=None, gradients=gradients, precision=precision)


def examples_of(forward: ObservedForward, share: float) -> tuple[int, int]:
    """The numbers of examples in the batch of a forward and in a part of it."""
    recorder = forward.recorder
    values = recorder.capture.flatten(forward.args, forward.kwargs)
    return recorder.emitted.examples(values), recorder.emitted.examples(recorder.emitted.part(values, share))


def case_dims(recorder: Recorder, outputs: int) -> Sequence[int]:
    return recorder.emitted.case_dims or [0] * outputs


def first_rows(tensor: Tensor, dim: int, total: int, wanted: int) -> Tensor:
    """The rows of the first `wanted` of `total` examples, of which every one has equally many."""
    return tensor.narrow(dim, 0, wanted * (tensor.shape[dim] // total))


def against_part(forward: ObservedForward, share: float, parameters: Mapping[str, Tensor]) -> str | None:
    """Why a part of the batch of a forward is no measure of it; None if it is one."""
    recorder = forward.recorder
    if not isinstance(recorder.emitted, EmittedGraph):
        return "no single graph holds the model"
    if recorder.program.mask is not None:
        return "of padded positions a part may hold others than the batch"
    if recorder.losses.declared is None:
        if any(site.reduction == "sum" for site in recorder.emitted.loss_sites):
            return "forward computes a loss that is a sum over cases"
        if recorder.losses.ignoring:
            return "forward computes a loss that ignores some targets, and a part may have no others"
    total, wanted = examples_of(forward, share)
    if wanted == total:
        return None
    if recorder.parts_differ is None:
        with forward.precision.entered():
            recorder.parts_differ = difference_of_part(recorder, recorder.emitted, forward, wanted, parameters) or ""
    return recorder.parts_differ or None


@torch.no_grad()
def difference_of_part(
    recorder: Recorder, emitted: EmittedGraph, forward: ObservedForward, wanted: int, parameters: Mapping[str, Tensor]
) -> str | None:
    """In words, how the outputs of the first `wanted` examples differ from those in a batch with as many others; None
    if they do not. The host waits.

    Noise in a part is that of other numbers, so then the other examples are replaced by the first ones instead.
    """
    values = recorder.capture.flatten(forward.args, forward.kwargs)
    total = emitted.examples(values)
    more = emitted.part(values, (min(total, 2 * wanted) - 0.5) / total)
    number = emitted.examples(more)

    def outputs_on(inputs: Any) -> Sequence[Tensor]:
        return recorder.outputs(parameters, inputs)[1]

    try:
        with_others, alone = outputs_on(more), outputs_on(emitted.part(values, (wanted - 0.5) / total))
        dims = case_dims(recorder, len(alone))
        for output, part, dim in zip(with_others, alone, dims, strict=True):
            rows, left = divmod(output.shape[dim] if output.dim() else 1, number)
            shape = list(output.shape)
            if left or not output.dim() or [*shape[:dim], wanted * rows, *shape[dim + 1 :]] != list(part.shape):
                return f"outputs {shape} of {number} examples are {list(part.shape)} of {wanted}"
        if emitted.random:
            alone = outputs_on(with_repeated_examples(emitted, more, wanted))
            alone = [first_rows(output, dim, number, wanted) for output, dim in zip(alone, dims, strict=True)]
    except RuntimeError as error:  # a graph of one size of batches
        if fatal(error):
            raise
        return f"the graph does not run on it ({first_line(error)})"
    expected = [first_rows(output, dim, number, wanted) for output, dim in zip(with_others, dims, strict=True)]
    apart = differ(sampled_elements(list(expected)), sampled_elements(list(alone)), forward.precision.rounding)
    return "the outputs of an example depend on the others" if bool(apart) else None


def with_repeated_examples(emitted: EmittedGraph, values: Sequence[Any], wanted: int) -> tuple[Any, ...]:
    """The inputs with copies of the first `wanted` examples where the other ones were."""
    total = emitted.examples(values)

    def again(position: int, value: Any) -> Any:
        axis = emitted.case_axis(position, value)
        if axis is None or value.shape[axis] != total:
            return value
        return torch.cat([value.narrow(axis, 0, wanted)] * math.ceil(total / wanted), dim=axis).narrow(axis, 0, total)

    return tuple(again(position, value) for position, value in enumerate(values))
