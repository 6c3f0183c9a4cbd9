"""Checks of the outputs of a graph: are they those of the model, and do those of one case depend on other cases?

The graph of a capture is the model as it was traced. Should the model compute something else now, because forward reads
what nothing watches (a file, a clock, the state of a library), its statistics are those of another function. So the
outputs of a recording are compared with those of the model's own forward on the same inputs, parameters, buffers and
random numbers, on the device. Where recordings have no such forward beside them, `OutputWatch.due` says which of them
are compared.

Both compute the same operations, so they are equal bit for bit but for recurrent layers, whose graph is one of steps.
Outputs agree if no difference is above √ε of the largest element, with the ε of the coarsest precision that takes part:
half of the digits. Rounding in a forward stays far below, and a function that is as close has statistics that are as
close. A change that is smaller is found once it has grown. Fillings such as masked logits are no largest elements.

The dimension that is taken for the cases cannot be it if outputs mix along it.

    x [T, N, C] -> attention over T -> y [T, N, V]      y[0] changes with x[1], and y[:, 0] does not change with x[:, 1]

A batch of sequences with the time first looks like one with the cases first. If no layer and no user says which it is,
the model is run with one place of a dimension changed. If the outputs mix along the conventional dimension and not
along another, the cases would be a guess, which is refused. Batch normalization mixes along all, and is no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.host import HostCopy
from kfac_fx.linalg.matrices import dense, full_precision, is_differentiable
from kfac_fx.passes.errors import ModelChangedError, RegistrationError, UntraceableError
from kfac_fx.passes.graphs.labels import sizes_of, symbolic_sizes
from kfac_fx.passes.losses import ANSWER, CONVENTION, free_sizes
from kfac_fx.passes.torch_private import pytree
from kfac_fx.passes.tracing.settings import ForwardSettings
from kfac_fx.passes.tracing.signature import objects_kept
from kfac_fx.recording.checks.equivalence import as_unrolled, coarsest_rounding, copies, detached, model_kept
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
        left, right = output.to(dtype), other.to(dtype)
        coarsest = max(rounding, torch.finfo(output.dtype).eps, torch.finfo(other.dtype).eps)
        finite = left.isfinite() & right.isfinite()
        size = torch.where(finite, right, 0).abs()
        difference = torch.where(finite, left - right, 0).abs()
        usual = EXTREME * size.median()
        largest = torch.where((size <= usual) | (usual == 0), size, 0).max()
        apart = difference > math.sqrt(coarsest) * torch.maximum(size, largest)
        result = result | (apart | (left.isfinite() != right.isfinite())).any()
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


AXIS_TOLERANCE = 1e-4  # of the largest output: rounding is below, another input above
TensorDimensions = list[tuple[int, int]]  # (number of the tensor, dimension)


@dataclass(frozen=True)
class Axis:
    """One size of a batch: the dimensions that have it, of the inputs and of the Fisher's outputs."""

    inputs: TensorDimensions
    outputs: TensorDimensions


def refuse_guess(recorder: Recorder, values: Sequence[Any]) -> None:
    """Run the model on changed inputs, if its cases are those of the convention and another dimension may be it.

    Raises RegistrationError if the model mixes along the first dimension and not along another; UntraceableError
    instead for a graph without sizes, in which the other dimension cannot be followed.
    """
    program = recorder.program
    if not recorder.whole or (program.cases is not None and program.cases_reason != CONVENTION):
        return
    _, outputs = recorder.outputs({}, values)
    axes = with_sizes(recorder) if program.cases is not None else without_sizes(values, outputs)
    if axes is None or not mixes_cases(recorder, values, outputs, axes[0]):
        return
    for other in axes[1:]:
        if not mixes_cases(recorder, values, outputs, other):
            number, dim = other.inputs[0]
            name = program.graph.find_nodes(op="placeholder")[number].target
            if program.cases is None:
                raise UntraceableError(f"dimension {dim} of {name} may count the cases, and the graph has no sizes")
            raise RegistrationError(
                f"which dimension of {name} counts the cases would be a guess: the outputs mix its values along the "
                f"first dimension, as they do with positions, and not along dimension {dim}.\n{ANSWER}"
            )


def with_sizes(recorder: Recorder) -> list[Axis] | None:
    """The axis of the cases and those that may be it instead, by their symbolic sizes."""
    program = recorder.program
    inputs = program.graph.find_nodes(op="placeholder")
    axes = []
    for size in dict.fromkeys((program.cases, *free_sizes(inputs))):
        its_inputs = [
            (n, symbolic_sizes(node).index(size)) for n, node in enumerate(inputs) if size in symbolic_sizes(node)
        ]
        shapes = [sizes_of(node) for node in program.outputs]  # where a size that was met as a number is one
        its_outputs = [(n, sizes.index(size)) for n, sizes in enumerate(shapes) if size in sizes]
        if size is not None and its_inputs and its_outputs:
            axes.append(Axis(its_inputs, its_outputs))
    return axes if len(axes) > 1 and axes[0].inputs[0][1] == 0 else None


def without_sizes(values: Sequence[Any], outputs: Sequence[Tensor]) -> list[Axis] | None:
    """The first two dimensions of the first input, if an output has two of these sizes."""
    first = next((n for n, value in enumerate(values) if isinstance(value, Tensor) and value.dim() > 1), None)
    if first is None:
        return None
    shape = values[first].shape
    both = [n for n, out in enumerate(outputs) if out.shape[:2] == shape[:2]]
    return [Axis([(first, dim)], [(n, dim) for n in both]) for dim in (0, 1)] if both else None


@torch.no_grad()
def mixes_cases(recorder: Recorder, values: Sequence[Any], before: Sequence[Tensor], axis: Axis) -> bool:
    """Whether outputs at other places of the axis change with the first or with the last place of the inputs."""
    number, dim = axis.inputs[0]
    size = values[number].shape[dim]
    if size < 2:
        return False
    for place, other in ((0, 1), (size - 1, size - 2)):
        changed = list(values)
        for number, dim in axis.inputs:
            changed[number] = changed[number].clone()
            changed[number].select(dim, place).copy_(values[number].select(dim, other))
        _, after = recorder.outputs({}, tuple(changed))
        for number, dim in axis.outputs:
            apart = (after[number] - before[number]).abs()
            apart.select(dim, place).zero_()
            if bool(apart.max() > AXIS_TOLERANCE * before[number].abs().max()):
                return True
    return False
