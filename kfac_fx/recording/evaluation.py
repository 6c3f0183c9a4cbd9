"""Evaluations of a model at other parameters, without statistics and derivatives, as the checks of a step need them.

A recording runs the graph with the steps of recurrent layers written out (`passes.unroll`). An evaluation runs the same
capture with torch's kernels for these layers (`passes.kernels`), which takes a fraction of the operations. Both are one
function. The first evaluation of a capture compares their outputs, those of the Fisher included; the host waits. Where
they differ, or a kernel does not run, the steps stay written out, and the report says so.

torch draws the same dropout between recurrent layers from the same random stream, but cuDNN has a stream of its own. So
cuDNN is off where there is such dropout. Where the lengths of packed sequences are on an accelerator, the host would
have to read them, so the steps stay written out.

A product with the Jacobian needs forward-mode derivatives, which not all kernels have. So only `evaluated` runs
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from kfac_fx.linalg.matrices import without_cudnn
from kfac_fx.passes import results
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.kernels import draws_noise, lengths_of, recurrent_stacks
from kfac_fx.passes.pipeline import EVALUATED, run
from kfac_fx.recording.emitted import EmittedGraph, RunOutputs
from kfac_fx.recording.equivalence import coarsest_rounding, differ, sampled_elements
from kfac_fx.recording.recorder import Recorder


def evaluated(recorder: Recorder, parameters: Mapping[str, Tensor], values: Any) -> RunOutputs:
    """As `recorder.outputs`, for values that nothing differentiates.

    values: the inputs, as `capture.flatten` returns them.
    """
    if not recorder.looked_for_kernels:
        recorder.looked_for_kernels = True
        if (kernels := emitted_with_kernels(recorder)) is not None:
            recorder.kernels_reason = against(kernels, recorder, parameters, values)
            recorder.kernels = kernels if recorder.kernels_reason is None else None
    if recorder.kernels is None:
        return recorder.outputs(parameters, values)
    return by_kernels(recorder.kernels, recorder, parameters, values)


def emitted_with_kernels(recorder: Recorder) -> EmittedGraph | None:
    """The capture with torch's kernels; None if it has no stack of recurrent layers."""
    captured = recorder.capture.program
    stacks = recurrent_stacks(captured.graph) if recorder.whole else []
    if not stacks or recorder.by_hand or any(is_on_accelerator(lengths_of(stack)) for stack in stacks):
        return None
    return EmittedGraph(recorder.capture, run(captured, EVALUATED), recorder.model)


def is_on_accelerator(node: fx.Node | None) -> bool:
    return node is not None and node.meta["val"].device.type != "cpu"


def by_kernels(kernels: EmittedGraph, recorder: Recorder, parameters: Mapping[str, Tensor], values: Any) -> RunOutputs:
    noise = any(map(draws_noise, recurrent_stacks(kernels.program.graph)))
    with warnings.catch_warnings(), without_cudnn() if noise else nullcontext():
        # Other parameters than the module's lie apart, as the user cannot change.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        return recorder.outputs(parameters, values, kernels)


def against(kernels: EmittedGraph, recorder: Recorder, parameters: Mapping[str, Tensor], values: Any) -> str | None:
    """Why the kernels are no measure of the graph; None if they compute the same."""
    try:
        outputs, fisher = by_kernels(kernels, recorder, parameters, values)
    except (RuntimeError, NotImplementedError) as error:  # a kernel that this device does not have
        if fatal(error):
            raise
        return f"torch's kernel does not run: {first_line(error)}"
    written_out = recorder.outputs(parameters, values)
    samples = [
        sampled_elements([leaf for leaf in results.tree_leaves(values) if isinstance(leaf, torch.Tensor)])
        for values in ((outputs, list(fisher)), (written_out[0], list(written_out[1])))
    ]
    apart = differ(samples[0], samples[1], coarsest_rounding(recorder, values))
    return "torch's kernel has other outputs" if bool(apart) else None
