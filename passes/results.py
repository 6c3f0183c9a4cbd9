"""The results of a forward as a tree: that of torch, in which objects that hold the tensors are branches, too.

    @dataclass
    class Outputs:                            tree_leaves(Outputs(logits, "a", cache))  ->  [logits, "a", cache]
        logits: Tensor
        ...

An object is a branch if there is no tensor next to it: a dataclass, a subclass of a container, or anything with
attributes. Next to tensors it is a leaf, as the cache of past keys here, which no graph computes. A distribution of
torch is a branch next to tensors, too: policies return one with a value. A nested tensor stands for its values. The
functions have the names of those of torch's pytree.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.nested import nested_tensor_from_jagged

from .torch_private import pytree

NO_BRANCHES = (nn.Module, type, FunctionType, MethodType, ModuleType)
DEPTH = 3  # objects in objects are searched for tensors down to this depth


@dataclass(frozen=True)
class ObjectSpec:
    """An object.

    items: whether it is a container, whose items stand next to its attributes.
    shared: the items of a dictionary that are attributes, too; each is one leaf.
    factory: of the missing items of a defaultdict.
    """

    kind: type
    items: bool
    inside: TreeSpec
    shared: tuple[str, ...] = ()
    factory: Callable[[], Any] | None = None


@dataclass(frozen=True)
class TreeSpec:
    """A tree without its leaves. objects: what stands for each leaf of torch's tree; None: a leaf. (): only leaves."""

    spec: pytree.TreeSpec
    objects: tuple[ObjectSpec | None, ...] = ()

    @property
    def num_leaves(self) -> int:
        if not self.objects:
            return self.spec.num_leaves
        return sum(1 if branch is None else branch.inside.num_leaves for branch in self.objects)


def tree_flatten(tree: Any, plain: bool = True) -> tuple[list[Any], TreeSpec]:
    """plain: give the values of nested tensors instead of them."""
    leaves, spec = pytree.tree_flatten(tree)
    leaves = [leaf.values() if plain and isinstance(leaf, Tensor) and leaf.is_nested else leaf for leaf in leaves]
    among_tensors = any(map(is_value, leaves))
    branches = [holds_value(leaf) and (not among_tensors or isinstance(leaf, Distribution)) for leaf in leaves]
    if not any(branches):
        return leaves, TreeSpec(spec)
    objects: list[ObjectSpec | None] = []
    inside: list[Any] = []
    for leaf, is_branch in zip(leaves, branches, strict=True):
        branch, values = branch_of(leaf, plain) if is_branch else (None, [leaf])
        objects.append(branch)
        inside += values
    return inside, TreeSpec(spec, tuple(objects))


def branch_of(value: Any, plain: bool) -> tuple[ObjectSpec, list[Any]]:
    items, attributes, shared = items_of(value), attributes_of(value), shared_of(value)
    leaves, inside = tree_flatten((items, {n: of for n, of in attributes.items() if n not in shared}), plain)
    return ObjectSpec(type(value), items is not None, inside, shared, factory_of(value)), leaves


def shared_of(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, dict) else {}
    return tuple(name for name, inside in attributes_of(value).items() if name in items and items[name] is inside)


def factory_of(value: Any) -> Callable[[], Any] | None:
    return value.default_factory if isinstance(value, defaultdict) else None


def subclasses_in(like: Any) -> Callable[[Any], Any]:
    """A function of plain containers that gives them the classes of those in `like`; torch.fx has replaced these."""
    items = items_of(like)
    if items is None or isinstance(like, torch.Size):
        return lambda value: value
    nothing = TreeSpec(pytree.tree_flatten(())[1])
    branch = ObjectSpec(type(like), True, nothing, shared_of(like), factory_of(like))
    if isinstance(items, dict):
        of_items = {key: subclasses_in(item) for key, item in items.items()}
        return lambda value: made(branch, ({key: its(value[key]) for key, its in of_items.items()}, {}))
    of_parts = [subclasses_in(item) for item in items]
    return lambda value: made(branch, ([its(part) for its, part in zip(of_parts, value, strict=True)], {}))


def tree_unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    if not spec.objects:
        return pytree.tree_unflatten(leaves, spec.spec)
    rest, values = list(leaves), []
    for branch in spec.objects:
        number = 1 if branch is None else branch.inside.num_leaves
        its, rest = rest[:number], rest[number:]
        values.append(its[0] if branch is None else made(branch, tree_unflatten(its, branch.inside)))
    return pytree.tree_unflatten(values, spec.spec)


def made(branch: ObjectSpec, parts: tuple[dict[Any, Any] | list[Any] | None, dict[str, Any]]) -> Any:
    """An object with these items and attributes; its own `__init__` does not run."""
    items, attributes = parts
    kind: Any = branch.kind
    held: Any = items if branch.items else None  # a tree of marks may have a mark for None
    if issubclass(kind, tuple):
        result: Any = tuple.__new__(kind, held)
    else:
        result = kind.__new__(kind)
    if issubclass(kind, dict):
        setter: Any = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
        for key, item in held.items():
            setter(result, key, item)
        attributes = attributes | {name: held[name] for name in branch.shared}
    elif issubclass(kind, list):
        list.extend(result, held)
    elif issubclass(kind, deque):
        deque.extend(result, held)
    if issubclass(kind, defaultdict):
        result.default_factory = branch.factory
    for name, value in attributes.items():
        object.__setattr__(result, name, value)  # also of a frozen dataclass
    return result


def of_values(tree: Any) -> tuple[Any, Any]:
    """(the tree with nested tensors that are made of their values, the same tree of these values): a gradient that
    reaches a nested tensor reaches its values, too."""
    leaves, spec = pytree.tree_flatten(tree)
    if not any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        return tree, tree
    plain = [leaf.values() if isinstance(leaf, Tensor) and leaf.is_nested else leaf for leaf in leaves]
    nested = [
        value if value is leaf else nested_tensor_from_jagged(value, leaf.offsets())
        for value, leaf in zip(plain, leaves, strict=True)
    ]
    return pytree.tree_unflatten(nested, spec), pytree.tree_unflatten(plain, spec)


def tree_leaves(tree: Any) -> list[Any]:
    return tree_flatten(tree)[0]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([function(leaf) for leaf in leaves], spec)


def is_value(value: Any) -> bool:
    """Whether it is a tensor, or the node of one."""
    return isinstance(value, (Tensor, fx.Node))


def holds_value(value: Any, depth: int = DEPTH) -> bool:
    """Whether it is an object with a tensor in it."""
    if depth == 0 or value is None or isinstance(value, NO_BRANCHES) or is_value(value):
        return False
    items = items_of(value)
    inside = [*attributes_of(value).values(), *(items.values() if isinstance(items, dict) else items or ())]
    return any(is_value(leaf) or holds_value(leaf, depth - 1) for part in inside for leaf in pytree.tree_leaves(part))


def items_of(value: Any) -> dict[Any, Any] | list[Any] | None:
    """The items of a container; None of another object."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, tuple | list | deque) else None


def attributes_of(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", {}))
    return attributes | {name: getattr(value, name) for name in slots(value) if hasattr(value, name)}


def slots(value: Any) -> list[str]:
    """The names in `__slots__` of the value's class and its bases, under which they are attributes."""
    names = []
    for kind in type(value).__mro__:
        declared = kind.__dict__.get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{kind.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
