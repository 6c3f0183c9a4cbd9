"""One submodule of a divided model, captured for one kind of call; or one operation of its Python code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import UntraceableError
from ..ir import Options, Submodule
from ..trace import Capture, trace_model
from ..tracing.calls import Call
from ..tracing.devices import kinds
from ..tracing.settings import ForwardSettings
from ..tracing.signature import call_key
from .following import ObservedRead
from .reads import Operation


@dataclass(frozen=True)
class CapturedSubmodule:
    """A submodule and its capture for one kind of call.

    Attributes:
        module: the submodule; an `Operation` if it is a read.
        key: of the calls that it serves; None: of all.
        autocast: (device type, dtype) pairs of the call.
        settings: what the capture is specialized to beside its inputs; None: nothing.
    """

    submodule: Submodule
    module: nn.Module
    capture: Capture
    key: Any
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    settings: ForwardSettings | None = None

    @property
    def effects(self) -> tuple[str, ...]:
        """The effects of its forward that the graph does not have, except for attributes that its own hooks set."""
        sets = {f"sets {name}" for name in self.capture.assigned}
        return tuple(f"{effect}, in {self.submodule.path}" for effect in self.capture.effects if effect not in sets)

    @property
    def names(self) -> Mapping[str, str]:
        """The parameters of an operation: their names in it, and in the model."""
        return dict(self.module.canonical) if isinstance(self.module, Operation) else {}

    @property
    def is_read(self) -> bool:
        return isinstance(self.module, Operation)

    def serves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> bool:
        if (self.key is not None and self.key != key) or not self.capture.holds(args, kwargs):
            return False
        return self.settings is None or self.settings.hold()


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
    reads: Sequence[ObservedRead],
    parameters: Mapping[str, nn.Parameter],
    options: Options,
    layers: Mapping[str, Any],
    earlier: Iterable[CapturedSubmodule],
) -> tuple[list[CapturedSubmodule], dict[str, str]]:
    """Captures of reads, those from `earlier` inputs included; and of each parameter whose reads cannot be captured,
    the reason."""
    captured, reasons = [captured for captured in earlier if captured.is_read], dict[str, str]()
    calls: Counter[Any] = Counter()
    for observed in reads:
        calls[observed.read.key] += observed.calls
    for observed in reads:
        module, inputs = Operation(observed.read, parameters), observed.call.args
        key = under(observed.call, partial(key_of_read, observed.read.key, inputs))
        if any(other.serves(inputs, {}, key) for other in captured):
            continue
        try:
            traced = under(observed.call, partial(trace_model, module, inputs, {}, options=options, layers=layers))
        except UntraceableError:
            reasons = {**left_to_python([observed]), **reasons}
            continue
        submodule = Submodule(f"{observed.read} ({observed.where})", calls[observed.read.key], read=True)
        captured.append(CapturedSubmodule(submodule, module, traced, key, observed.call.autocast))
    return captured, reasons


def left_to_python(reads: Iterable[ObservedRead]) -> dict[str, str]:
    """The place of the first read that is not captured, for each parameter."""
    places = [
        (name, f"read at {observed.where}, in Python that is not captured")
        for observed in reads
        for name in observed.read.names
    ]
    return dict(reversed(places))
