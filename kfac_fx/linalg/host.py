"""Reads of numbers on a device by the host.

A CPU is its own host: it reads a condition at once, and saves what is not needed. Other devices compute both cases, so
that the host does not wait for them, or send a copy (`HostCopy`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def zero_unless_(condition: Tensor, tensor: Tensor) -> Tensor:
    """`torch.where(condition, tensor, 0)` in place. On a CPU the host reads the condition, which saves a pass."""
    return tensor if on_host(condition) and condition.all() else tensor.masked_fill_(~condition, 0)


def copy_if_(condition: Tensor, target: Tensor, source: Tensor) -> None:
    """Overwrite the target where the condition is true. On a CPU the host reads the condition, because `where` takes
    several times as long as a copy."""
    if on_host(condition) and condition.all():
        target.copy_(source)
    elif not on_host(condition) or condition.any():
        torch.where(condition, source, target, out=target)


def on_host(condition: Tensor) -> bool:
    """Whether the host may read a condition without waiting for a device or interrupting a compiled function."""
    return condition.device.type == "cpu" and not torch.compiler.is_compiling()


class HostCopy:
    """A copy of a tensor on the host. The host does not wait for the device that computes the tensor.

    Attributes:
        value: the copy; its numbers are there once `arrived` is true.
    """

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        self.event: Any = None
        if device.type == "cpu":
            self.value = tensor.clone()
        else:
            self.value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.value.copy_(tensor, non_blocking=True)
            self.event = torch.accelerator.current_stream(device).record_event()

    @property
    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> Tensor:
        """The copy. The host waits until it has arrived, and for nothing that came after it."""
        if self.event is not None:
            self.event.synchronize()
        return self.value
