"""What is called beside a module's forward. Forward hooks that torch makes, as for a weight norm, are in the graph of
their module; what a user's do, no graph does, so they stay Python around it. What is hooked or replaced after a capture
is no part of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import UntraceableError
from .attributes import ATOMS

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)


def made_by_torch(module: nn.Module) -> list[bool]:
    """Of every forward hook of the module."""
    return [is_torchs(hook) for name in FORWARD_HOOKS for hook in module.__dict__[name].values()]


def is_torchs(called: Any) -> bool:
    return bool((getattr(called, "__module__", None) or type(called).__module__).startswith("torch."))


def hooked_by_user(module: nn.Module) -> bool:
    return not all(made_by_torch(module))


@contextmanager
def without_users_hooks(module: nn.Module) -> Iterator[None]:
    kept = {name: module.__dict__[name] for name in FORWARD_HOOKS}
    if hooked_by_user(module):
        module.__dict__.update({name: OrderedDict() for name in FORWARD_HOOKS})
    try:
        yield
    finally:
        module.__dict__.update(kept)


def refuse_users_hooks(module: nn.Module) -> None:
    """Raises UntraceableError for hooks that would be inside of the module's graph."""
    hooked = [path for path, inner in module.named_modules() if path and hooked_by_user(inner)]
    if hooked:
        raise UntraceableError(f"{', '.join(hooked)} in it has forward hooks, which no graph calls")
    if len(set(made_by_torch(module))) > 1:
        raise UntraceableError("it has forward hooks of torch and of others, which belong in one order")


def called(model: nn.Module, inside: bool = False) -> dict[str, Any]:
    """What runs when the modules of a model are called, to be compared: their classes with the functions and plain
    values of these, a forward of their own, hooks that are not torch's.

    inside: without forwards, and without the hooks of `model` itself, which are Python around its graph.
    """
    found: dict[str, Any] = {}
    kinds: dict[type, None] = {}
    for path, module in model.named_modules():
        found[path] = type(module)
        kinds[type(module)] = None
        held = module.__dict__
        if "forward" in held and not inside:
            found[f"{path}.forward"] = held["forward"]
        for name in HOOKS if path or not inside else ():
            if held[name] and (hooks := tuple(hook for hook in held[name].values() if not is_torchs(hook))):
                found[f"{path}.{name}"] = hooks
    for base in {base: None for kind in kinds for base in kind.__mro__}:
        if base is not object and not base.__module__.startswith("torch."):
            found |= {f"{base}.{name}": value for name, value in vars(base).items() if type(value) in ATOMS}
    return found
