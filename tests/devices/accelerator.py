"""An accelerator that is none: tensors with a device and a shape and no numbers, in a process of its own.

torch lets a backend be written in Python ("privateuseone"), and `FakeTensorMode` computes shapes, types and devices of
everything without numbers. So a CPU can show what a GPU would: an operation on tensors of two devices raises, and
whatever the host would have to wait for is seen here, as a read of numbers that are not there, or as a copy between
the devices. The inside of a kernel, such as a check of its own, is not seen.

The private names of torch that tests use are all here: FakeTensorMode and the setup of a backend in Python. A
backend is for a whole process, and must come before its first backward.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_fx.passes.torch_private import pytree

NAME = "gpu"


class Stream:
    def record_event(self) -> Event:
        return Event()


class Event:
    """An event of work that is not done yet."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        torch.empty((), device=NAME).item()  # seen as a wait


class Generator(torch.Generator):
    """The CPU's, that says it is of another device."""

    said: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls)
        made.said = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.said

    def get_state(self) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        assert state.device.type == "cpu"


class Backend(backend_registration._DummyBackendModule):
    """The answers to torch's questions to the module of a device, `torch.gpu`."""

    def is_available(self) -> bool:
        return False  # so that FakeTensorMode makes no tensor there, not even for torch.tensor

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        assert state.device.type == "cpu"


LIBRARY, ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")


def cast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The one operation that autocast knows here."""
    dtype = torch.get_autocast_dtype(NAME)
    with torch.autocast(NAME, enabled=False):
        return torch.nn.functional.linear(
            *(None if tensor is None else tensor.to(dtype) for tensor in (x, weight, bias))
        )


def install() -> None:
    """Before anything else in the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    ATEN.impl("linear", cast_linear, "AutocastPrivateUse1")
    torch.Generator = Generator
    torch.accelerator.current_stream = lambda device=None: Stream()


READS = {
    torch.ops.aten._local_scalar_dense.default: lambda tensor: 0.0 if tensor.is_floating_point() else 1,
    torch.ops.aten.is_nonzero.default: lambda tensor: True,
    torch.ops.aten.equal.default: lambda one, other: True,
    torch.ops.aten.allclose.default: lambda one, other, *rest, **options: True,
    torch.ops.aten.nonzero.default: lambda tensor: tensor.new_zeros(0, tensor.dim(), dtype=torch.int64),
}
WRITES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class Waits(TorchDispatchMode):
    """places: where the host waited for the device, "module.py:function", by what it did. Numbers are made up."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, str] = {}

    def clear(self) -> None:
        self.places.clear()

    def only(self, places: set[str]) -> None:
        """Raises AssertionError for waits elsewhere, and forgets all."""
        found, self.places = self.places, {}
        elsewhere = {place: error for place, error in found.items() if place not in places}
        assert not elsewhere, f"the host waits: {elsewhere}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in READS:
            if any(isinstance(argument, Tensor) and argument.device.type == NAME for argument in args):
                self.note(f"reads {func.overloadpacket.__name__}")
            return READS[func](*args, **kwargs)
        kwargs |= {"generator": None} if "generator" in kwargs else {}  # shapes do without
        result = func(*args, **kwargs)
        if func in WRITES:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            pinned = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if isinstance(source, Tensor) and source.device.type != result.device.type and not pinned:
                self.note(f"copies from {source.device.type} to {result.device.type}")
        return result

    def note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack()[:-2] if "/torch/" not in f.filename]
        frames = [f for f in frames if not f.name.startswith(("<", "__torch")) and f.filename != __file__]
        last = frames[-1]
        ours = "/kfac_fx/" in last.filename or "/passes/" in last.filename
        self.places[f"{last.filename.rsplit('/', 1)[-1]}:{last.name}" if ours else "the model"] = what


class Generators(TorchFunctionMode):
    """Raises for a generator of another device than the numbers that it makes, as CUDA does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        if generator is not None and generator.device.type != result.device.type:
            raise RuntimeError(f"a generator of {generator.device} for a tensor of {result.device}")
        return result


class Shapes(FakeTensorMode):
    """One for the process: what is traced once, such as the forms of layers, keeps its shapes; nor is it copied.
    torch.export has another, for the shapes in a graph; what the passes ask about these is answered there."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        other = next(
            (leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.fake_mode is not self), None
        )
        return (
            super().dispatch(func, types, args, kwargs or {})
            if other is None
            else other.dispatch(func, types, args, kwargs or {})
        )

    def __deepcopy__(self, memo: Any) -> Shapes:
        return self


@functools.cache
def mode() -> Shapes:
    return Shapes(allow_non_fake_inputs=False, shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False))


@contextmanager
def accelerator() -> Iterator[Waits]:
    """Inside, tensors have no numbers, and "gpu" is a device."""
    waits = Waits()
    with mode(), waits, Generators():
        yield waits
