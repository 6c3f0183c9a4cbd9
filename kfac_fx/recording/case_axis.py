"""Which dimension of the inputs is not that of the cases: one along which the outputs mix.

    x [T, N, C] -> attention over T -> y [T, N, V]      y[0] changes with x[1], and y[:, 0] does not change with x[:, 1]

A batch of sequences with the time first looks like one with the cases first. If no layer and no user says which it is,
the model is run with one place of a dimension changed. If the outputs mix along the conventional dimension and not
along another, the cases would be a guess, which is refused. Batch normalization mixes along all, and is no evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.cases import ANSWER, CONVENTION, free_sizes
from kfac_fx.passes.errors import RegistrationError, UntraceableError
from kfac_fx.passes.graphs.labels import sizes_of, symbolic_sizes
from kfac_fx.recording.recorder import Recorder

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
