"""The user's closure: asked for gradients as torch asks, or for nothing but the loss, without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kfac_fx.passes.tracing.devices import RandomState

Closure = Callable[[], Tensor | float]


@contextmanager
def without_a_trace(
    buffers: Iterable[Tensor], parameters: Iterable[Tensor], devices: Iterable[torch.device], start: RandomState | None
) -> Iterator[None]:
    """Buffers, gradients and random streams are afterwards what they were before.

    devices: that have random streams beside the CPU's. start: where the streams begin inside, so that noise is that of
    the step's forward.
    """
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    before = RandomState.now(devices)
    try:
        for parameter, _ in gradients:
            parameter.grad = None  # set aside: a closure that zeroes gradients in place must not reach them
        if start is not None:
            start.restore()
        yield
    finally:
        before.restore()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def checked(loss: Tensor | float | None) -> Tensor | float:
    if loss is None:
        raise ValueError("the closure returned None: it must return the loss of the batch")
    return loss


def evaluate(closure: Closure, *, with_backward: bool, graph: bool = False) -> Tensor | float:
    """The loss alone. with_backward: the closure is known to call backward; graph: it needs gradients to be on, as a
    forward that takes derivatives by its inputs does. Both run with gradients on, all others without."""
    with torch.set_grad_enabled(with_backward or graph):
        return checked(closure())


def lacks_graph(error: RuntimeError) -> bool:
    """Whether this is what torch says where something is differentiated, and gradients are off."""
    return "does not require grad" in str(error)


UNEXPECTED_BACKWARD = (
    "the closure calls backward, but this step had its gradients already, so it was asked for the loss alone. "
    "Either call backward before step() and return the loss without backward in the closure, or do "
    "everything in the closure: zero_grad(), forward, backward, return the loss"
)
