"""The devices beside the CPU that a model is on: their random streams, and the autocast that is on for their kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


def kinds() -> tuple[str, ...]:
    """Of the devices that a tensor may be on here and that autocast knows."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of devices that autocast is on for, and to what."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds() if torch.is_autocast_enabled(kind))


def accelerators(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The devices that have random streams beside the CPU's."""
    found = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return tuple(sorted(found, key=str))


@dataclass(frozen=True)
class RandomState:
    """torch's random streams at one moment. others: by the name of the device."""

    cpu: Tensor
    others: Mapping[str, Tensor]

    @staticmethod
    def now(devices: Iterable[torch.device]) -> RandomState:
        others = {str(device): torch.get_device_module(device).get_rng_state(device) for device in devices}
        return RandomState(torch.get_rng_state(), others)

    @staticmethod
    def seeded(seed: int, devices: Iterable[torch.device]) -> RandomState:
        """The streams as `torch.manual_seed` starts them, which does so on all devices there are."""
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
    """Random streams are afterwards what they were before."""
    before = RandomState.now(devices) if enabled else None
    try:
        yield
    finally:
        if before is not None:
            before.restore()
