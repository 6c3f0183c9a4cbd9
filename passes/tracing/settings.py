"""The settings of a capture beside its inputs: attributes of the model, its code, and values from outside of it.

A graph keeps the values that these had while it was traced. `ForwardSettings.hold` tells whether they are the same. It
compares identities of what is held (see `summary`), which costs microseconds for a module. Only if one of them differs
are the summaries computed and compared.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from ..torch_private import BACKWARD_HOOKS, CALL, FLAT_WEIGHTS, FORWARD_HOOKS, SHARDING, class_of, parameters_of
from .holders import Entries
from .outside import Outside
from .summary import ATOMS, CONTAINERS, Walk, has_fields

HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
TORCHS = frozenset(nn.Module().__dict__) - {"training"} | FLAT_WEIGHTS | {CALL}  # attributes that torch itself sets
WEIGHT_NORMS = ("_g", "_orig")  # suffixes of parameters from which hooks of torch.nn.utils compute a weight


NOTHING_OUTSIDE = Outside()


class ForwardSettings:
    """The values of everything that a capture of `model` is valid for.

    Attributes:
        values: the summaries, by name.
        without: the names of what forward itself changes, whose values count for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        outside: Outside = NOTHING_OUTSIDE,
        without: Iterable[str] = (),
        live: Iterable[Tensor] = (),
        inside: bool = False,
    ) -> None:
        """
        Args:
            outside: what forward reads from outside.
            live: the tensors that the graph reads.
            inside: leave out the `forward` of the instance and the hooks of `model` itself, which run around its graph.
        """
        self.model, self.outside, self.inside = model, outside, inside
        self.without, self.live = frozenset(without), frozenset(map(id, live))
        self.take()

    def take(self) -> None:
        self.values, self.walk = self.taken()

    def hold(self) -> bool:
        """Whether everything still has the values that it had."""
        if self.walk.same():
            return True
        values, walk = self.taken()
        if values != self.values:
            return False
        self.walk = walk
        return True

    def changed(self) -> list[str]:
        """The names of all that has another value now."""
        now, _ = self.taken()
        return [name for name in dict.fromkeys((*self.values, *now)) if now.get(name) != self.values.get(name)]

    def put_back(self) -> None:
        """Let everything hold what it held."""
        self.walk.put_back()

    def anew(self) -> ForwardSettings:
        """The same, with the values of now."""
        new = copy.copy(self)
        new.take()
        return new

    def leave_out(self, names: Iterable[str]) -> None:
        """Take the values anew, without these names."""
        self.without |= frozenset(names)
        self.take()

    def taken(self) -> tuple[dict[str, Any], Walk]:
        walk = Walk(self.outside.names, self.live)
        values = of_modules(self.model, self.without, self.inside, walk) | of_classes(self.model, self.without, walk)
        for point in self.outside.points:
            if point.label not in self.without:
                values[point.label] = *values.get(point.label, ()), point.summary(walk)  # files may have one name
        return values, walk


def of_modules(model: nn.Module, without: Collection[str], inside: bool, walk: Walk) -> dict[str, Any]:
    """The attributes of all modules, their modes included, their classes, their own `forward` and the user's hooks."""
    values: dict[str, Any] = {}
    changing: set[int] = set()  # objects that forward changes, under every name, as a configuration that modules share
    for path, module in model.named_modules():
        prefix, held, around = f"{path}." if path else "", module.__dict__, inside and not path
        values[f"the class of {path or 'the model'}"] = class_of(module)
        walk.classes.add(module)
        changing |= {id(held[name]) for name in held if f"{prefix}{name}" in without and has_content(held[name])}
        names = [
            name for name in held
            if id(held[name]) not in changing and is_setting(module, prefix, name, without)
        ]  # fmt: skip
        for name in names:
            values[f"{prefix}{name}"] = walk.of(held[name], named=walk.is_named(name))
        if not around:
            names.append("forward")
            values[f"{prefix}forward"] = held.get("forward")
        walk.holders.append(Entries(held, names, len(held), without="forward" if around else None))
        for name in () if around else HOOKS:
            if not held[name]:
                walk.empty.append(held[name])
                continue
            walk.holders.append(Entries(held[name], held[name], len(held[name])))
            if hooks := tuple(hook for hook in held[name].values() if not is_torchs(hook)):
                values[f"{prefix}{name}"] = walk.of(hooks, named=True)
    return values


def is_setting(module: nn.Module, prefix: str, name: str, without: Collection[str]) -> bool:
    if name in TORCHS or name == "forward" or name.startswith(SHARDING) or f"{prefix}{name}" in without:
        return False
    return not (isinstance(module.__dict__[name], Tensor) and computed_weight(module, name))


def of_classes(model: nn.Module, without: Collection[str], walk: Walk) -> dict[str, Any]:
    """The functions and values of the modules' classes; of torch's classes, their `forward`.

    Not of the subclasses that fully_shard makes: the `__init_subclass__` of a user's class may give them a `forward`.
    """
    values: dict[str, Any] = {}
    kinds = dict.fromkeys(class_of(module) for module in model.modules())
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base is not object):
        held = vars(base)
        of_torch = base.__module__.startswith("torch.")
        if of_torch:
            names = [name for name in ("forward", "__call__") if name in held]
        else:
            names = [name for name in held if not name.startswith("__") or type(held[name]) in ATOMS]
            names = [name for name in names if f"{path_of(base)}.{name}" not in without]
        for name in names:
            values[f"{path_of(base)}.{name}"] = walk.of(held[name], walk.is_named(name))
        walk.holders.append(Entries(held, names, None if of_torch else len(held), owner=base))
    return values


def has_content(value: Any) -> bool:
    return isinstance(value, CONTAINERS) or has_fields(value)


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_torchs(called: Any) -> bool:
    return bool((getattr(called, "__module__", None) or type(called).__module__).startswith("torch."))


def computed_weight(module: nn.Module, name: str) -> bool:
    """Whether a hook of torch.nn.utils computes the attribute from parameters in every forward."""
    return any(f"{name}{suffix}" in parameters_of(module) for suffix in WEIGHT_NORMS)
