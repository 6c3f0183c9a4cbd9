"""Calls and hooks of modules, as forwards of the model show them.

Models that no single graph holds are captured in submodules. `watched` runs the model and notes with which inputs each
submodule is called, and what forward sets. It restores attributes, buffers, parameters and random streams afterwards.

PyTorch's own forward hooks (weight_norm) are traced into the graph. User hooks are not traced; they run in Python
around the captured module. Hooks that are added after a capture are not in its graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import UntraceableError
from ..torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, buffers_of, parameters_of, pytree, transforms
from .effects import OfOneRun, Trace, accelerators, model_restored, python_random, same_random, seed_all
from .settings import FEW, TORCHS, is_torchs
from .signature import autocast


def made_by_torch(module: nn.Module) -> list[bool]:
    """For every forward hook of the module, whether torch defines it."""
    return [is_torchs(hook) for name in FORWARD_HOOKS for hook in module.__dict__[name].values()]


def hooked_by_user(module: nn.Module) -> bool:
    return not all(made_by_torch(module))


def backward_hooks(model: nn.Module) -> list[str]:
    """The effects of backward hooks, which an emitted module would not call."""
    return [
        OfOneRun(f"calls the backward hooks of {path or type(model).__name__}")
        for path, module in model.named_modules()
        if any(module.__dict__[name] for name in BACKWARD_HOOKS)
    ]


@contextmanager
def without_backward_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, no module has backward hooks: where outputs are no tensors, torch looks for one in them without end."""
    before = [(module.__dict__, {name: module.__dict__[name] for name in BACKWARD_HOOKS}) for module in model.modules()]
    for attributes, hooks in before:
        attributes.update({name: OrderedDict() for name in hooks})
    try:
        yield
    finally:
        for attributes, hooks in before:
            attributes.update(hooks)


def forward_hooks(model: nn.Module) -> list[str]:
    """The effects of the user's forward hooks. Their computations are in the graph; their other effects are not."""
    return [
        f"calls the forward hooks of {path or type(model).__name__}"
        for path, module in model.named_modules()
        if hooked_by_user(module)
    ]


@contextmanager
def without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, a forward runs none of the hooks that fully_shard or parallelize_module has registered, which put other
    parameters in the place of those that torch.func.functional_call has put there."""
    every = [module.__dict__[name] for module in model.modules() for name in FORWARD_HOOKS]
    before = [(hooks, OrderedDict(hooks)) for hooks in every if any(map(is_of_sharding, hooks.values()))]
    for hooks, all_of_them in before:
        for key in [key for key, hook in all_of_them.items() if is_of_sharding(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, all_of_them in before:
            hooks.clear()
            hooks.update(all_of_them)


def is_of_sharding(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.fsdp.", "torch.distributed.tensor."))


@contextmanager
def without_users_hooks(module: nn.Module) -> Iterator[None]:
    """Inside, a module with a user's forward hooks has none."""
    before = {name: module.__dict__[name] for name in FORWARD_HOOKS}
    if hooked_by_user(module):
        module.__dict__.update({name: OrderedDict() for name in FORWARD_HOOKS})
    try:
        yield
    finally:
        module.__dict__.update(before)


def refuse_users_hooks(module: nn.Module) -> None:
    """Raises UntraceableError for hooks of the user's that would have to be in the module's graph."""
    hooked = [path for path, inner in module.named_modules() if path and hooked_by_user(inner)]
    if hooked:
        raise UntraceableError(
            f"it contains forward hooks of the user, on {', '.join(hooked)}, which a graph would not call"
        )
    if len(set(made_by_torch(module))) > 1:
        raise UntraceableError(
            "it has forward hooks of torch and of the user, whose order a captured graph would change"
        )


# --- calls ------------------------------------------------------------------------------------------------------------

FORWARDS = 12  # the most forwards that are run to reach submodules that are drawn at random
IN_TRANSFORM = "inside of torch.func or torch.autograd.forward_ad, which differentiate no tap"
IN_VAIN = 4  # stop after this many forwards in a row that reach no new submodule


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        args, kwargs: the arguments, detached.
        autocast: the kinds of devices for which autocast was on, with its dtypes.
        transformed: whether torch.func was transforming the call. Its tensors do not outlive the call, so that args and
            kwargs are empty.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[tuple[str, torch.dtype], ...]
    transformed: bool = False


@contextmanager
def without_trace(model: nn.Module) -> Iterator[Trace]:
    """Undo all that forwards inside change, except in their inputs. Yields a Trace, which is filled at the end."""
    devices = accelerators(model.parameters())
    with torch.enable_grad(), same_random(devices), python_random(), model_restored(model) as trace:
        yield trace


@contextmanager
def around_calls(
    modules: Iterable[nn.Module],
    enter: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    leave: Callable[..., None],
    inside: Callable[[nn.Module], bool] = lambda _: True,
) -> Iterator[None]:
    """`enter` is called before every call of these modules, and `leave` behind it, also if it fails.

    inside: whether the module's other hooks run before `enter` and behind `leave`.
    """
    handles: list[Any] = []
    for module in modules:
        within = inside(module)
        handles.append(module.register_forward_pre_hook(enter, prepend=not within, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, prepend=within, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def calls_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[int, list[Call]], set[int]]:
    """Run one forward. Modules are told by their ids.

    Returns:
        The calls of every submodule with gradients on and with its own parameters, as its forward gets them; and the
        submodules that are called themselves, and whose children are also called from outside of them.
    """
    calls: dict[int, list[Call]] = {}
    lent, above, active, around = Lent(model), modules_around(model), list[int](), transforms()
    idle: set[tuple[frozenset[int], ...]] = set()  # for every call and path, the ancestors that are not running

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not lent.others(module):
            inside = transforms() > around
            detached_args, detached_kwargs = ((), {}) if inside else map_tensors(Tensor.detach, (args, kwargs))
            calls.setdefault(id(module), []).append(Call(detached_args, detached_kwargs, autocast(), inside))
            idle.add(tuple(path.difference(active) for path in above[id(module)]))
        active.append(id(module))

    def leave(*rest: Any) -> None:
        active.pop()

    with around_calls((module for module in model.modules() if module is not model), enter, leave):
        model(*map_tensors(Tensor.clone, args), **map_tensors(Tensor.clone, dict(kwargs)))
    passed = [[path & calls.keys() for path in paths] for paths in idle]
    return calls, {module for paths in passed if all(paths) for path in paths[:1] for module in path}


def modules_around(model: nn.Module) -> dict[int, list[frozenset[int]]]:
    """For every submodule and each of its paths, the submodules that it is in."""
    named = dict(model.named_modules(remove_duplicate=False))
    above: dict[int, list[frozenset[int]]] = {}
    for path, module in named.items():
        parts = path.split(".")
        around = {id(named[".".join(parts[:n])]) for n in range(1, len(parts))}
        above.setdefault(id(module), []).append(frozenset(around - {id(model), id(module)}))
    return above


def call_with(
    model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The call of a model with other tensors instead of those of these names, wherever it holds them.

    Every place gets its tensor once. `functional_call` itself ties weights by their names, and gives a place in a
    module that has two names its tensor twice; in the end it puts the first tensor of the call there, and not the
    model's.
    """
    present = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    instead = {id(tensor): tensors[name] for name, tensor in present if name in tensors}
    places = {
        f"{path}.{key}" if path else key: instead[id(tensor)]
        for path, module in model.named_modules()
        for key, tensor in (*parameters_of(module).items(), *buffers_of(module).items())
        if id(tensor) in instead
    }
    with in_containers(model, instead):
        return functional_call(model, places, args, dict(kwargs or {}), tie_weights=False)


@contextmanager
def in_containers(model: nn.Module, instead: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, attributes of modules that are no parameters or buffers have these tensors instead of those of these ids:
    `self.weights = {"w": w}` of a wrapper that registers `w`, too."""
    held: list[tuple[Any, Any, Tensor]] = []
    few = max(FEW, len(instead))

    def put(container: Any, depth: int) -> None:
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if key in TORCHS:
                continue
            if id(value) in instead:
                held.append((container, key, value))
                container[key] = instead[id(value)]
            elif depth and type(value) in (dict, list, OrderedDict) and 0 < len(value) <= few:
                put(value, depth - 1)

    try:
        for module in model.modules():
            put(module.__dict__, 2)
        yield
    finally:
        for container, key, value in held:
            container[key] = value


class Lent:
    """Tells which modules run on other parameters than their own, because torch.func.functional_call replaced them.

    stand_ins: tensors that count as the model's own parameters, by name.
    """

    def __init__(self, model: nn.Module, stand_ins: Mapping[str, Tensor] | None = None) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        stand_ins = stand_ins or {}
        self.parameters: dict[int, list[Tensor]] = {
            id(module): [stand_ins.get(names[id(p)], p) for p in module.parameters()] for module in model.modules()
        }

    def others(self, module: nn.Module) -> bool:
        """Whether the module has other parameters now."""
        before, now = self.parameters[id(module)], list(module.parameters())
        return len(before) != len(now) or any(old is not new for old, new in zip(before, now, strict=True))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with `function` applied to every tensor in it."""
    return pytree.tree_map_only(Tensor, function, tree)


@dataclass(frozen=True)
class WatchedForwards:
    """Several forwards of a model. Modules are told by their ids.

    Attributes:
        calls: the calls of each module in all forwards.
        first: the calls of each module in the first forward.
        assigned: the names of the attributes that forward sets.
        written: the names of the parameters that forward writes into.
        opened: modules whose children are also called from outside of them.
    """

    calls: Mapping[int, list[Call]]
    first: Mapping[int, list[Call]]
    assigned: frozenset[str]
    written: frozenset[str]
    opened: frozenset[int] = frozenset()


def watched(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WatchedForwards:
    """Run forwards with other random numbers each, until all modules with parameters are called or `IN_VAIN` tells."""
    with without_trace(model) as trace:
        first, opened = calls_of(model, args, kwargs)
    assigned, written = set(trace.assigned), set(trace.written)
    calls = {module: list(its_calls) for module, its_calls in first.items()}
    owners = {id(m) for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))}
    in_vain = 0
    for seed in range(1, FORWARDS):
        if owners <= calls.keys() | {id(model)} or in_vain == IN_VAIN:
            break
        with without_trace(model) as trace:
            seed_all(seed, accelerators(model.parameters()))
            more, also = calls_of(model, args, kwargs)
        opened |= also
        assigned |= set(trace.assigned)
        written |= set(trace.written)
        in_vain = 0 if more.keys() - calls.keys() else in_vain + 1
        for module, its_calls in more.items():
            calls.setdefault(module, []).extend(its_calls)
    return WatchedForwards(calls, first, frozenset(assigned), frozenset(written), frozenset(opened))
