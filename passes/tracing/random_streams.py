"""Random streams: torch's on every device, those of Python and numpy, and the generators that a model holds."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .settings import CONTAINERS


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
    """Restore torch's random streams at the end."""
    before = RandomState.now(devices) if enabled else None
    try:
        yield
    finally:
        if before is not None:
            before.restore()


def seed_all(seed: int, devices: Iterable[torch.device]) -> None:
    """Seed the random streams of torch, Python and numpy."""
    RandomState.seeded(seed, devices).restore()
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


@contextmanager
def python_random() -> Iterator[list[str]]:
    """Restore the random streams of Python and numpy at the end.

    Yields a list, which is filled with the names of the streams that were drawn from.
    """
    before = {name: (generator, stream(generator)) for name, generator in of_python().items()}
    drawn: list[str] = []
    try:
        yield drawn
    finally:
        for name, (generator, state) in before.items():
            if not same_stream(stream(generator), state):
                drawn.append(name)
                set_stream(generator, state)


def of_python() -> dict[str, Any]:
    """The generators behind the functions of `random` and, where it is imported, of `numpy.random`."""
    generators = {"random": random.getstate.__self__}  # type: ignore[attr-defined]
    if numpy := sys.modules.get("numpy"):
        generators["numpy.random"] = numpy.random.get_state.__self__
    return generators


def stream(value: Any) -> Any:
    """The state of a random generator; None for other values."""
    if isinstance(value, (*CONTAINERS, nn.Module, Tensor)):
        return None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return None


def same_stream(state: Any, other: Any) -> bool:
    """Whether two states are equal: tensors, tuples of Python's, or dictionaries of numpy's."""
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same_stream(state[key], other[key]) for key in state)
    return bool(state.tobytes() == other.tobytes() if hasattr(state, "tobytes") else state == other)


def set_stream(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
