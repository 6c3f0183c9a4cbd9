"""Evaluations of a model at other parameters, without statistics and derivatives, as the checks of a step need them.

A recording runs the graph with the steps of recurrent layers written out (`passes.unroll`). An evaluation runs the same
capture with torch's kernels for these layers (`passes.kernels`), which takes a fraction of the operations. Both are one
function. The first evaluation of a capture compares their outputs, those of the Fisher included; the host waits. Where
they differ, or a kernel does not run, the steps stay written out, and the report says so.

torch draws the same dropout between recurrent layers from the same random stream, but cuDNN has a stream of its own. So
cuDNN is off where there is such dropout. Where the lengths of packed sequences are on an accelerator, the host would
have to read them, so the steps stay written out.

A product with the Jacobian needs forward-mode derivatives, which not all kernels have. So only `evaluated` runs
them, and `BagsByLookups` computes bags of embeddings by operations that have such derivatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kfac_fx.linalg.matrices import without_cudnn
from kfac_fx.passes import results
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.kernels import draws_noise, lengths_of, recurrent_stacks
from kfac_fx.passes.pipeline import EVALUATED, run
from kfac_fx.passes.torch_private import pytree
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
        return recorder.outputs(parameters, values, taps=False)
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
        return recorder.outputs(parameters, values, kernels, taps=False)


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


# --- bags of embeddings -----------------------------------------------------------------------------------------------

BAGS = "embedding_bag"  # in torch's words that it has no derivative
BAG = signature(F.embedding_bag)
MODES = ("sum", "mean", "max")  # by torch's number of the mode


class BagsByLookups(TorchFunctionMode):
    """Inside, bags of embeddings are lookups that are added up. torch's own have no forward-mode derivative, and their
    backward has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding_bag:
            call = BAG.bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            if given["max_norm"] is None:
                names = ("offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx")
                return bags(given["input"], given["weight"], *(given[name] for name in names))
        if func is torch.embedding_bag:
            others, named = pytree.tree_map_only(Tensor, Tensor.detach, (args, dict(kwargs)))
            return by_numbers(*args, **kwargs), *func(*others, **named)[1:]
        return func(*args, **kwargs)


def by_numbers(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`bags` with the arguments of `torch.embedding_bag`."""
    return bags(indices, weight, offsets, MODES[mode], per_sample_weights, include_last_offset, padding_idx)


def bags(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """The result [bags, dim] of `F.embedding_bag`. A bag without ids is zero.

    ids: [bags, ids], or flat with the `offsets` of the bags.
    """
    if offsets is None:
        number, size = ids.shape
        bag = torch.arange(number, device=ids.device).repeat_interleave(size)
    else:
        number = offsets.shape[0] - include_last_offset
        place = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets[:number].contiguous(), place, right=True) - 1
    ids = ids.reshape(-1)
    counted = torch.ones_like(ids, dtype=torch.bool)
    if padding_idx is not None:
        counted = ids != padding_idx % weight.shape[0]
    if mode == "max":
        rows = torch.where(counted.unsqueeze(1), weight.detach()[ids], -torch.inf)
        largest = rows.new_full((number, weight.shape[1]), -torch.inf)
        largest = largest.scatter_reduce(0, bag.unsqueeze(1).expand_as(rows), rows, "amax")
        place = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(rows)
        of_largest = torch.where(
            counted.unsqueeze(1) & (rows == largest[bag]), place, len(ids)
        )  # of several equal ones the first
        first = torch.full_like(largest, len(ids), dtype=torch.long)
        first = first.scatter_reduce(0, bag.unsqueeze(1).expand_as(rows), of_largest, "amin")
        there = first < len(ids)
        last = first.clamp(max=max(0, len(ids) - 1))
        return torch.where(there, weight.gather(0, ids[last]), 0) if len(ids) else torch.zeros_like(largest)
    share = counted.to(weight.dtype)
    if per_sample_weights is not None:
        share = share * per_sample_weights.reshape(-1)
    total = weight.new_zeros(number, weight.shape[1]).index_add(0, bag, weight[ids] * share.unsqueeze(1))
    if mode == "sum":
        return total
    sizes = counted.new_zeros(number, dtype=weight.dtype).index_add(0, bag, counted.to(weight.dtype))
    return total / sizes.clamp(min=1).unsqueeze(1)
