"""Effects of a forward on all but its outputs, and how they are undone: attributes, tensors and random streams.

Attributes that forward itself sets are restored after every trace (`untouched`). Those that are changed from outside,
such as a temperature or a rate of dropout, are part of what a capture is valid for; see `settings`.

A forward that the user did not ask for leaves no trace in the model (`model_restored`): in attributes, parameters
(`parameters_kept`) and buffers (`buffers_kept`). The user's own graph may have saved these tensors, so their versions
are kept, too: autograd compares them in its backward. A closure that only measures leaves no trace in any tensor,
gradient or random stream (`closure_undone`).

**Random streams**: torch's on every device, those of Python and numpy, and the generators that a model holds.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from numbers import Number
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ..errors import fatal
from ..graphs.operations import IN_PLACE
from ..torch_private import NormBase, buffers_of, debug_unwrap, pytree, versions_kept
from .settings import ATOMS, CONTAINERS, FEW, SYMBOLS, TORCHS, fields, plain
from .substitutes import custom_functions


class OfOneRun(str):
    """An effect of the very forward whose outputs the loss is computed from: a second forward does not make up for it
    where a graph runs instead of the first."""

    __slots__ = ()


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of every attribute of every module."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            yield (f"{path}.{name}" if path else name), value


def counts(value: Any, depth: int = 2) -> Any:
    """The numbers in an attribute, with which forward may count."""
    if isinstance(value, Number):
        return value
    inner = content(value) if depth else None
    if inner is None or len(inner) > FEW:
        return None
    numbers = [counts(element, depth - 1) for element in items(inner)]
    return tuple(number for number in numbers if number not in (None, ()))


# --- restoring --------------------------------------------------------------------------------------------------------

SHARED = object()  # stands for the summary of an object that another module holds, too


@dataclass(frozen=True)
class Held:
    """The attributes of a module at one moment.

    Attributes:
        prefix: the module's path and a dot.
        attributes: by name.
        contents: name -> (container, copy of its content), for attributes that are containers or objects.
        streams: name -> (generator, its state).
        plain: summaries of the attributes that are the user's.
    """

    prefix: str
    module: nn.Module
    attributes: dict[str, Any]
    contents: dict[str, tuple[Any, Any]]
    streams: dict[str, tuple[Any, Any]]
    plain: dict[str, Any]

    @classmethod
    def of(cls, path: str, module: nn.Module, seen: set[int]) -> Held:
        """seen: ids of objects that modules share, such as a configuration; each is summarized once."""
        held = cls(f"{path}." if path else "", module, dict(module.__dict__), {}, {}, {})
        for name, value in module.__dict__.items():
            if type(value) in ATOMS:
                held.plain[name] = type(value), value
                continue
            first, inner = id(value) not in seen, content(value)
            if inner is not None and first:
                held.contents[name] = inner, copied(inner)
            if name in TORCHS:
                continue
            if inner is not None and not isinstance(value, CONTAINERS):
                seen.add(id(value))
            if (state := stream(value)) is not None:
                held.streams[name] = value, state
            held.plain[name] = plain(value) if first else SHARED
        return held

    def changed(self) -> list[str]:
        """Names of attributes that differ from before, and of buffers that are another tensor."""
        before = {id(buffer) for buffer in items(self.contents["_buffers"][1])}
        buffers = buffers_of(self.module).items()
        names = [name for name, buffer in buffers if is_tensor(buffer) and id(buffer) not in before]
        for name, value in self.module.__dict__.items():
            if name not in TORCHS and (name not in self.plain or self.is_new(name, value)):
                names.append(name)
        gone = [name for name in self.plain if name not in self.module.__dict__ and name not in TORCHS]
        return [self.prefix + name for name in (*names, *gone)]

    def is_new(self, name: str, value: Any) -> bool:
        if self.plain[name] is SHARED:
            return value is not self.attributes[name]
        if name in self.streams and not same_stream(stream(value), self.streams[name][1]):
            return True
        return holds_symbol(value) or bool(plain(value) != self.plain[name])

    def put_back(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for container, before in self.contents.values():
            if same_content(container, before):
                continue  # a frozen configuration cannot be changed
            container.clear()
            container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
        for generator, before in self.streams.values():
            if not same_stream(stream(generator), before):
                set_stream(generator, before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[list[str]]:
    """Restore the attributes of all modules, and the content of their containers, at the end.

    Yields a list, which is filled at the end with the names of the attributes that changed.
    """
    seen: set[int] = set()
    held = [Held.of(path, module, seen) for path, module in model.named_modules()]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for before in held:
            changed += before.changed()
        for before in held:
            before.put_back()


def content(value: Any) -> Any:
    """The container that a value is, or the dictionary of its attributes; None if it is neither."""
    return value if isinstance(value, CONTAINERS) else fields(value)


def copied(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return next(kind for kind in CONTAINERS if isinstance(container, kind))(container)


def same_content(container: Any, before: Any) -> bool:
    """Whether both hold the same objects in the same places."""
    if not container and not before:  # most dictionaries of hooks are empty
        return True
    keys = isinstance(container, dict) and list(container) != list(before)
    return not keys and list(map(id, items(container))) == list(map(id, items(before)))


def items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def holds_symbol(value: Any) -> bool:
    """Whether a trace left a proxy or a symbol in the value."""
    if type(value) in ATOMS:
        return False
    inner = content(value)
    return any(isinstance(element, (fx.Proxy, *SYMBOLS)) for element in ((value,) if inner is None else items(inner)))


def is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, fx.Proxy))


# --- writes into parameters and buffers -------------------------------------------------------------------------------

Before = tuple[Tensor, Tensor, Tensor]  # a tensor, its `.data`, and a copy of its values
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a property, which torch's types do not say
NO_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}  # they leave the values as they are


class Writes(TorchFunctionMode):
    """Keeps the values of parameters before they are written into.

    Attributes:
        before: name -> (parameter, its `.data` and a copy of its values before the first write).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.owners = {address(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        self.before: dict[str, Before] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in (*written_by(func, args, kwargs or {}), *running_statistics(func, args, kwargs or {})):
            owner = self.owners.get(address(tensor))
            if owner is not None and address(owner[1]) and owner[0] not in self.before:
                self.before[owner[0]] = owner[1], owner[1].data, owner[1].detach().clone()
        return func(*args, **(kwargs or {}))


def running_statistics(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The averages that a norm of batches or instances writes into. Those of modules are buffers; functions are given
    frozen parameters, too."""
    if func not in (F.batch_norm, F.instance_norm):
        return []
    call = signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    of = call.arguments
    trains = of["training"] if func is F.batch_norm else of["use_input_stats"]
    return [of[name] for name in ("running_mean", "running_var") if trains and of[name] is not None]


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a function of torch writes into. Its name tells, as do the arguments `inplace` and `out`."""
    if func == SET_DATA and is_same_memory(*args):
        return []  # as `module.to(dtype)` does with parameters that have this dtype
    name = getattr(func, "__name__", "").split(".")[0]
    in_place = name.strip("_") in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    in_place = (in_place and name not in NO_WRITES) or kwargs.get("inplace") is True or func == SET_DATA
    first = args[:1] or tuple(kwargs.values())[:1]  # the functions of torch.nn.init are given their tensor by name
    targets = [*(first if in_place else ()), kwargs.get("out")]
    flat = [value for target in targets for value in (target if isinstance(target, (list, tuple)) else (target,))]
    return [value for value in flat if isinstance(value, Tensor)]


def is_same_memory(tensor: Tensor, data: Tensor) -> bool:
    """Whether `data` is the tensor itself, or all of its memory in the same layout."""
    if data is tensor:
        return True
    if not (isinstance(data, Tensor) and address(tensor) and address(tensor) == address(data)):
        return False
    layouts = ((of.dtype, of.shape, of.stride(), of.storage_offset()) for of in (tensor, data))
    return next(layouts) == next(layouts)


def address(tensor: Tensor) -> int:
    """The address of the tensor's values; 0 if it has none, as the tensors of a trace."""
    inner = debug_unwrap(tensor)
    if inner.layout != torch.strided or inner.device.type == "meta":
        return 0
    try:
        return inner.untyped_storage().data_ptr()
    except RuntimeError as error:
        if fatal(error):
            raise
        return 0  # a stand-in of a trace


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[dict[str, Before]]:
    """Restore the parameters at the end. Yields those that are written into, as `Writes.before`.

    It costs memory for parameters that are written into only.
    """
    writes = Writes(model)
    with versions_kept(versioned(model.parameters())):
        try:
            with writes:
                yield writes.before
        finally:
            for before in writes.before.values():
                put_back(*before)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and their values at the end."""
    by_module = [(buffers, dict(buffers)) for buffers in map(buffers_of, model.modules())]
    with values_kept(model.buffers()):
        try:
            yield
        finally:
            for buffers, before in by_module:
                buffers.update(before)


@dataclass
class Trace:
    """The names of the attributes that forwards set, and of the parameters that they write into."""

    assigned: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)


@contextmanager
def model_restored(model: nn.Module) -> Iterator[Trace]:
    """Undo all that forwards inside change in the model. Yields a Trace, which is filled at the end.

    Checkpoints run the functions that they wrap: reentrant ones have no torch.autograd.grad.
    """
    trace = Trace()
    with buffers_kept(model), untouched(model) as assigned, parameters_kept(model) as written, custom_functions():
        yield trace
    trace.assigned += assigned
    trace.written += written


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values and the versions of tensors at the end."""
    kept = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]
    with versions_kept(versioned(tensor for tensor, *_ in kept)):
        try:
            yield
        finally:
            for before in kept:
                put_back(*before)


def put_back(tensor: Tensor, data: Tensor, values: Tensor) -> None:
    """Give a tensor its memory and its values back. data: its `.data` of before, as another may be set now."""
    if (address(tensor), tensor.shape) != (address(data), data.shape):
        tensor.data = data
    tensor.data.copy_(values)


def versioned(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Without tensors that were made in inference mode: autograd saves none of them."""
    return tuple(tensor for tensor in tensors if not tensor.is_inference())


class WritesUndone(TorchFunctionMode):
    """Restores at the end the tensors that were there before and that functions of torch write into.

    A closure may average the parameters or count its batches; a second call would do so twice. Copies are made where a
    write comes first. Numbers of Python and arrays of other libraries are not restored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: set[int] = set()  # the addresses of what was made inside
        # By place in memory: the tensor, its values and the size of its memory.
        self.before: dict[tuple[Any, ...], tuple[Tensor, Tensor, int]] = {}
        self.replaced: list[tuple[Tensor, Tensor]] = []  # a tensor whose `.data` is set, with the one of before

    @torch.compiler.disable(reason="it remembers tensors")  # type: ignore[untyped-decorator]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            place = address(tensor)
            if place and place not in self.inside:
                part = place, tensor.storage_offset(), tensor.shape, tensor.stride()
                if part not in self.before:
                    size = tensor.untyped_storage().nbytes()
                    self.before[part] = tensor.detach(), tensor.detach().clone(), size
                self.replaced += [(tensor, tensor.data)] * (func == SET_DATA)
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__":  # attributes were there before
            given = {address(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            returned = {address(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)}
            self.inside |= returned - given
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for tensor, data in reversed(self.replaced):
            tensor.data = data
        for tensor, values, size in reversed(self.before.values()):  # parts that overlap: the first copies are oldest
            if tensor.untyped_storage().nbytes() == size:  # FSDP2 frees the memory of the parameters that it gathered
                tensor.data.copy_(values)


@contextmanager
def closure_undone(
    buffers: Iterable[Tensor], parameters: Iterable[Tensor], devices: Iterable[torch.device], start: RandomState | None
) -> Iterator[None]:
    """Buffers, gradients, random streams and all other tensors are afterwards what they were before.

    Args:
        devices: the devices that have random streams beside the CPU's.
        start: the state in which the streams begin inside, so that noise is that of the step's forward.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    with same_random(devices), values_kept(buffers), WritesUndone():
        try:
            for parameter, _ in gradients:
                parameter.grad = None  # set aside: a closure that zeroes gradients in place must not reach them
            if start is not None:
                start.restore()
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def cumulative_averages(model: nn.Module) -> list[str]:
    """Set the momentum of norms that average over all batches (momentum=None), as no graph can change it each batch.

    Returns the effects that the graph therefore lacks.
    """
    norms = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, NormBase) and module.momentum is None
    ]
    for _, module in norms:
        module.momentum = 0.0
    return [f"averages over all batches in {path}" for path, module in norms if module.track_running_stats]


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
