"""One submodule of a divided model, captured for one kind of call; or one operation of its Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UntraceableError
from ..ir import Options, Submodule
from ..trace import Capture, capture
from ..tracing.attributes import settings
from ..tracing.calls import Call, called
from ..tracing.devices import kinds
from ..tracing.signature import call_key
from .following import Found
from .reads import Operation


@dataclass(frozen=True)
class Captured:
    """A submodule and its capture for one kind of call. key: what it is specialized to; None: to nothing."""

    submodule: Submodule
    module: nn.Module
    capture: Capture
    key: Any
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @property
    def effects(self) -> tuple[str, ...]:
        """What its forward does and the graph does not; what only its own hooks compute anew, nobody misses."""
        sets = {f"sets {name}" for name in self.capture.assigned}
        return tuple(f"{effect}, in {self.submodule.path}" for effect in self.capture.effects if effect not in sets)

    @property
    def names(self) -> Mapping[str, str]:
        """Of the parameters of an operation, in the model."""
        return dict(self.module.canonical) if isinstance(self.module, Operation) else {}

    @property
    def is_read(self) -> bool:
        return isinstance(self.module, Operation)

    def serves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> bool:
        return (self.key is None or self.key == key) and self.capture.holds(args, kwargs)


def key_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return (*settings(module).items(), *called(module, inside=True).items()), call_key(args, kwargs)


def key_of_read(key: Any, inputs: tuple[Any, ...]) -> Any:
    return key, call_key(inputs, {})


def under(call: Call, function: Callable[[], Any]) -> Any:
    """`function()` under the autocast of a call."""
    with ExitStack() as stack:
        for kind in kinds():
            dtype = dict(call.autocast).get(kind)
            if dtype is not None or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        return function()


def captured_reads(
    found: Iterable[Found],
    parameters: Mapping[str, nn.Parameter],
    options: Options,
    layers: Mapping[str, Any],
    earlier: Iterable[Captured],
) -> tuple[list[Captured], dict[str, str]]:
    """Captures of reads, those of `earlier` inputs included; and of the parameters whose reads have none, why."""
    made, refused = [one for one in earlier if one.is_read], dict[str, str]()
    calls: dict[Any, int] = {}
    for one in found:
        calls[one.read.key] = calls.get(one.read.key, 0) + one.calls
    for one in found:
        module, inputs = Operation(one.read, parameters), one.call.args
        key = under(one.call, lambda one=one: key_of_read(one.read.key, one.call.args))  # type: ignore[misc]
        if any(other.serves(inputs, {}, key) for other in made):
            continue
        try:
            traced = under(
                one.call,
                lambda module=module, inputs=inputs: capture(module, inputs, {}, options=options, layers=layers),  # type: ignore[misc]
            )
        except UntraceableError:
            refused = {**left_to_python([one]), **refused}
            continue
        submodule = Submodule(f"{one.read} ({one.where})", calls[one.read.key], read=True)
        made.append(Captured(submodule, module, traced, key, one.call.autocast))
    return made, refused


def left_to_python(found: Iterable[Found]) -> dict[str, str]:
    """Of the parameters of reads that are not captured, where they are."""
    said = [(name, f"read at {one.where}, in Python that is not captured") for one in found for name in one.read.names]
    return dict(reversed(said))  # the first of every parameter
