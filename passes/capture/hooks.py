"""Forward hooks: those that torch makes, as for a weight norm, are in the graph of their module; what a user's do, no
graph does, so they stay Python around it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import UntraceableError

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def made_by_torch(module: nn.Module) -> list[bool]:
    """Of every forward hook of the module."""
    hooks = [hook for name in FORWARD_HOOKS for hook in module.__dict__[name].values()]
    return [(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.") for hook in hooks]


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
