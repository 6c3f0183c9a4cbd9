"""Whether a recording computed what the model computes, told on the device.

The graph of a capture is the model as it was traced. Should the model compute something else now, because forward reads
what nothing watches (a file, a clock, the state of a library), its statistics are those of another function. So the
outputs of a recording are compared with those of the model's own forward on the same inputs, parameters, buffers and
random numbers. Where recordings have no such forward beside them, `OutputWatch.due` says which of them are compared.

Both compute the same operations, so they are equal bit for bit but for recurrent layers, whose graph is one of steps.
Outputs agree if no difference is above √ε of the largest element, with the ε of the coarsest precision that takes part:
half of the digits. Rounding in a forward stays far below, and a function that is as close has statistics that are as
close. A change that is smaller is found once it has grown. Fillings such as masked logits are no largest elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.checks.equivalence import as_unrolled, coarsest_rounding, copies, detached, model_kept
from kfac_fx.linalg.matrices import HostCopy, dense, full_precision, is_differentiable
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.torch_private import pytree
from kfac_fx.passes.tracing.settings import ForwardSettings
from kfac_fx.passes.tracing.signature import objects_kept
from kfac_fx.recording.recorder import Recorder

COMPARISON_INTERVAL = 1000  # recordings between two comparisons, after those with numbers 1, 2, 4, 8, ...
MOST_ELEMENTS = 1 << 18  # the most elements of an output that are compared, evenly spread
EXTREME = 1e3  # elements that are so many times larger than the median are fillings, such as masked logits


def sampled_elements(leaves: Sequence[Any]) -> list[Tensor]:
    """Elements of the outputs of a forward, which take little memory. Outputs that are no numbers are left out.

    A single number beside others is left out, too: a sum may cancel, and its relative error says little then.
    """
    tensors = [dense(leaf.detach()) for leaf in leaves if is_differentiable(leaf) and not leaf.is_nested]
    several = [tensor for tensor in tensors if tensor.numel() > 1]
    return [taken(tensor) for tensor in several or tensors]


def taken(tensor: Tensor) -> Tensor:
    step = math.ceil(tensor.numel() / MOST_ELEMENTS) | 1  # odd, so that it is in step with few sizes
    return tensor.reshape(-1)[::step].clone()


def differ(outputs: Sequence[Tensor], others: Sequence[Tensor], rounding: float) -> Tensor:
    """Whether two samples are of different functions; a 0-dim bool on their device."""
    device = next((tensor.device for tensor in (*outputs, *others)), torch.device("cpu"))
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in others]:
        return torch.ones((), dtype=torch.bool, device=device)
    result = torch.zeros((), dtype=torch.bool, device=device)
    for output, other in zip(outputs, others, strict=True):
        if not output.numel():
            continue
        dtype = torch.promote_types(torch.promote_types(output.dtype, other.dtype), torch.float32)
        one, two = output.to(dtype), other.to(dtype)
        coarsest = max(rounding, torch.finfo(output.dtype).eps, torch.finfo(other.dtype).eps)
        finite = one.isfinite() & two.isfinite()
        size = torch.where(finite, two, 0).abs()
        difference = torch.where(finite, one - two, 0).abs()
        usual = EXTREME * size.median()
        largest = torch.where((size <= usual) | (usual == 0), size, 0).max()
        apart = difference > math.sqrt(coarsest) * torch.maximum(size, largest)
        result = result | (apart | (one.isfinite() != two.isfinite())).any()
    return result.to(device)


def differs_from_model(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Any) -> Tensor:
    """Whether the graph and the model compute different outputs now, in forwards that leave no trace.

    values: the inputs, as `capture.flatten` returns them.
    """
    model = recorder.model
    copied_args, copied_kwargs = copies(args, kwargs)
    outside = ForwardSettings(model, recorder.capture.outside)
    with full_precision(everything=True), as_unrolled(recorder.program):
        with objects_kept({"": (args, kwargs)}), model_kept(recorder):
            of_model = sampled_elements(detached(pytree.tree_leaves(model(*copied_args, **copied_kwargs))))
        outside.put_back()
        output, _ = recorder.outputs({}, values)
    return differ(sampled_elements(detached(pytree.tree_leaves(output))), of_model, coarsest_rounding(recorder, values))


class OutputWatch:
    """The comparisons of one estimator.

    Attributes:
        recordings: the number of those that were asked about, see `due`.
        pending: whether one since the last step differed, 0-dim on the device; None if there was none.
    """

    def __init__(self) -> None:
        self.recordings = 0
        self.pending: Tensor | None = None
        self.failed: Tensor | None = None  # whether any differed that the host does not know of, on the device
        self.told: HostCopy | None = None

    def due(self) -> bool:
        """Whether this recording is compared: those with the numbers 1, 2, 4, 8, ..., and every 1000th."""
        self.recordings += 1
        return self.recordings & (self.recordings - 1) == 0 or self.recordings % COMPARISON_INTERVAL == 0

    def add(self, differs: Tensor) -> None:
        self.pending = differs if self.pending is None else self.pending | differs

    def check(self, model: str) -> None:
        """Raises ModelChangedError if an earlier comparison is known to have failed. The host does not wait."""
        if self.told is not None and self.told.arrived:
            failed, self.told = self.told.value, None
            self.failed = None if failed else self.failed
            refuse_changed_model(failed, model)

    def take(self, model: str, differs: Tensor) -> Tensor:
        """Whether what was recorded since the last step may be used, 0-dim on the device.

        On a CPU, which needs not wait, raises ModelChangedError if it may not. An accelerator tells it to `check`.
        """
        self.pending = None
        if differs.device.type == "cpu":
            refuse_changed_model(differs, model)
            return ~differs
        self.failed = differs if self.failed is None else self.failed | differs
        if self.told is None:
            self.told = HostCopy(self.failed)
        return ~differs


def refuse_changed_model(differs: Tensor, model: str) -> None:
    """Raises ModelChangedError if a 0-dim tensor on the host is true."""
    if differs:
        raise ModelChangedError(
            f"{model} computes other outputs now than its captured graph, on the same inputs and random numbers. "
            "Nothing of this batch was used.\nForward reads something that changed and that cannot be watched, such as "
            "a file, a clock, another process or the state of a library. Pass it to forward as an argument, or keep it "
            "in a buffer or an attribute of the model; or compile the model again after every change."
        )
