"""What forward writes into parameters: teachers that follow a student, clamped or renormalized weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ASSIGNMENTS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "set_data"}

NO_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}  # for all the underscore


class Writes(TorchFunctionMode):
    """Keeps what is in a parameter before anything is written into it. before: by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.owners = {memory(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        self.before: dict[str, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            owner = self.owners.get(memory(tensor))
            if owner is not None and memory(owner[1]) and owner[0] not in self.before:
                self.before[owner[0]] = owner[1], owner[1].detach().clone()
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a function of torch writes into, by its name."""
    name = getattr(func, "__name__", "").split(".")[0]
    in_place = name in ASSIGNMENTS or (name.endswith("_") and not name.endswith("__") and name not in NO_WRITES)
    targets = [*(args[:1] if in_place else ()), kwargs.get("out")]
    flat = [one for target in targets for one in (target if isinstance(target, (list, tuple)) else (target,))]
    return [one for one in flat if isinstance(one, Tensor)]


def memory(tensor: Tensor) -> int:
    """Where its values are; 0 for what has none, as the stand-ins of a trace."""
    own = torch.func.debug_unwrap(tensor)
    if own.layout != torch.strided or own.device.type == "meta":
        return 0
    try:
        return own.untyped_storage().data_ptr()
    except RuntimeError:  # of a stand-in
        return 0


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """The parameters as they were at the end; yields those that were written into, as they are found.

    Costs memory only for what is written into.
    """
    writes = Writes(model)
    try:
        with writes:
            yield writes.before
    finally:
        with torch.no_grad():
            for parameter, before in writes.before.values():
                parameter.data.copy_(before)
