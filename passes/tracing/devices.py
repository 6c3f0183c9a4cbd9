"""Devices of a model: their random streams, and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


def kinds() -> tuple[str, ...]:
    """The kinds of devices that this machine has and that autocast supports."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of devices for which autocast is on, with its dtypes."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds() if torch.is_autocast_enabled(kind))


def accelerators(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The devices of these tensors that have random streams of their own."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return tuple(sorted(devices, key=str))


@dataclass(frozen=True)
class RandomState:
    """The states of torch's random streams: the CPU's, and others by the name of their device."""

    cpu: Tensor
    others: Mapping[str, Tensor]

    @staticmethod
    def now(devices: Iterable[torch.device]) -> RandomState:
        others = {str(device): torch.get_device_module(device).get_rng_state(device) for device in devices}
        return RandomState(torch.get_rng_state(), others)

    @staticmethod
    def seeded(seed: int, devices: Iterable[torch.device]) -> RandomState:
        """The states that `torch.manual_seed` sets, on these devices only."""
        others = {str(device): torch.Generator(device).manual_seed(seed).get_state() for device in devices}
        return RandomState(torch.Generator().manual_seed(seed).get_state(), others)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(map(torch.device, self.others))

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for name, state in self.others.items():
            device = torch.device(name)
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def same_random(devices: Iterable[torch.device], enabled: bool = True) -> Iterator[None]:
    """Restore the random streams at the end."""
    before = RandomState.now(devices) if enabled else None
    try:
        yield
    finally:
        if before is not None:
            before.restore()
