"""What is called beside a module's forward. Forward hooks that torch makes, as for a weight norm, are in the graph of
their module; what a user's do, no graph does, so they stay Python around it. What is hooked or replaced after a capture
is no part of it.

Forwards of a model, watched from outside: how its submodules are called, what they set.

For models that no single graph can hold: their parts are captured one by one, and this is where the parts' inputs come
from. All that forward assigns is put back, and so are the buffers and all random streams.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UntraceableError
from ..graphs import pytree
from ..torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, transforms
from .attributes import ATOMS, untouched
from .devices import RandomState, accelerators, autocast, same_random
from .signature import python_random
from .substitutes import parameters_kept
from .watch import custom_functions

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


# --- calls ------------------------------------------------------------------------------------------------------------


FORWARDS = 12  # at most, to reach modules that are drawn at random
IN_TRANSFORM = "inside of torch.func or torch.autograd.forward_ad, which differentiate no tap"
IN_VAIN = 4  # of them in a row that reached nothing new: the rest is not reached at random


@dataclass(frozen=True)
class Call:
    """What a module was called with, detached, and under which autocast.

    transformed: inside of `transforms`, whose tensors do not live longer than the call; then nothing is kept of them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[tuple[str, torch.dtype], ...]
    transformed: bool = False


@dataclass
class Trace:
    """What forwards would have left behind: attributes and parameters that they set, by name."""

    assigned: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)


@contextmanager
def without_trace(model: nn.Module) -> Iterator[Trace]:
    """A forward inside leaves no trace but in its inputs; yields one, which is filled at the end. Reentrant checkpoints
    are run as what they wrap."""
    trace = Trace()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.enable_grad(), same_random(accelerators(model.parameters())), python_random():
        try:
            with untouched(model) as assigned, parameters_kept(model) as written, custom_functions():
                yield trace
            trace.assigned += assigned
            trace.written += written
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def seed_all(seed: int, model: nn.Module) -> None:
    RandomState.seeded(seed, accelerators(model.parameters())).restore()
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def calls_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[int, list[Call]], set[int]]:
    """One forward: (the calls of every submodule with gradients on and its own parameters, as its forward gets them;
    the submodules that are called, but whose children are also called from outside of them). Modules by their ids."""
    calls: dict[int, list[Call]] = {}
    lent, above, active, around = Lent(model), ancestors(model), list[int](), transforms()
    idle: set[tuple[frozenset[int], ...]] = set()  # of every call, by path: the ancestors that are not running

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not lent.others(module):
            inside = transforms() > around
            given, named = ((), {}) if inside else (mapped(Tensor.detach, args), mapped(Tensor.detach, kwargs))
            calls.setdefault(id(module), []).append(Call(given, named, autocast(), inside))
            idle.add(tuple(path.difference(active) for path in above[id(module)]))
        active.append(id(module))

    def leave(*rest: Any) -> None:
        active.pop()

    handles: list[Any] = []
    for module in (one for one in model.modules() if one is not model):
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
    try:
        model(*mapped(Tensor.clone, args), **mapped(Tensor.clone, dict(kwargs)))
    finally:
        for handle in handles:
            handle.remove()
    passed = [[path & calls.keys() for path in paths] for paths in idle]
    return calls, {module for paths in passed if all(paths) for path in paths[:1] for module in path}


def ancestors(model: nn.Module) -> dict[int, list[frozenset[int]]]:
    """Of every submodule, by path: the submodules that it is in."""
    named = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, list[frozenset[int]]] = {}
    for path, module in named.items():
        parts = path.split(".")
        found.setdefault(id(module), []).append(
            frozenset(id(named[".".join(parts[:n])]) for n in range(1, len(parts))) - {id(model), id(module)}
        )
    return found


class Lent:
    """Tells a module that runs on its own parameters from one that torch.func.functional_call has given others.

    given: what stands for the model's parameters, by name; None: they themselves.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor] | None = None) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = {id(module): list(module.parameters()) for module in model.modules()}
        self.own = (
            own
            if given is None
            else {module: [given.get(names[id(one)], one) for one in parameters] for module, parameters in own.items()}
        )

    def others(self, module: nn.Module) -> bool:
        own, now = self.own[id(module)], list(module.parameters())
        return len(own) != len(now) or any(one is not other for one, other in zip(own, now, strict=True))


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`function` of every tensor in `tree`."""
    return pytree.mapped(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


@dataclass(frozen=True)
class Watched:
    """What forwards did. calls, first: of all of them and of the first, by module. assigned: the attributes, written:
    the parameters that they set. opened: modules whose children are called from outside of them, too."""

    calls: Mapping[int, list[Call]]
    first: Mapping[int, list[Call]]
    assigned: frozenset[str]
    written: frozenset[str]
    opened: frozenset[int] = frozenset()


def watched(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Watched:
    with without_trace(model) as trace:
        first, opened = calls_of(model, args, kwargs)
    assigned, written = set(trace.assigned), set(trace.written)
    calls = {module: list(found) for module, found in first.items()}
    owners = {
        id(module) for module in model.modules() if any(p.requires_grad for p in module.parameters(recurse=False))
    }
    in_vain = 0
    for seed in range(1, FORWARDS):
        if owners <= calls.keys() | {id(model)} or in_vain == IN_VAIN:
            break
        with without_trace(model) as trace:
            seed_all(seed, model)
            more, also = calls_of(model, args, kwargs)
        opened |= also
        assigned |= set(trace.assigned)
        written |= set(trace.written)
        in_vain = 0 if more.keys() - calls.keys() else in_vain + 1
        for module, found in more.items():
            calls.setdefault(module, []).extend(found)
    return Watched(calls, first, frozenset(assigned), frozenset(written), frozenset(opened))
