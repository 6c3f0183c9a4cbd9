"""One call of a user's torch.autograd.Function: its arguments apart into what a graph computes and what it holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..graphs.operations import OWN_BACKWARD
from .attributes import SYMBOLS
from .border import holds_tensor
from .watch import Function

Source = tuple[str, Any]  # where an argument comes from: ("tensor", 0), ("size", 1), ("value", 0.5), ("list", (...))


class Refused(Exception):
    """Why a Function cannot be one operation."""


@dataclass
class Call:
    """One call of a Function. arguments: where each comes from; tensors: those that are arguments themselves, to which
    gradients flow, and `inside` those in lists; returned: as they were, with None for tensors."""

    function: Function
    arguments: list[Source] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    returned: Any = None
    places: list[int] = field(default_factory=list)  # of the tensors among what is returned
    constant: set[int] = field(default_factory=set)  # of these, which have no gradient

    def take(self, arguments: Sequence[Any]) -> None:
        for one in arguments:
            if isinstance(one, Tensor):
                self.arguments.append(("tensor", len(self.tensors)))
                self.tensors.append(one)
            else:
                self.arguments.append(self.source(one))

    def source(self, one: Any) -> Source:
        if isinstance(one, Tensor):
            self.inside.append(one)
            return "inside", len(self.inside) - 1
        if isinstance(one, torch.SymInt):
            self.sizes.append(one)
            return "size", len(self.sizes) - 1
        if type(one) in (list, tuple):
            return type(one).__name__, tuple(self.source(inner) for inner in one)
        if type(one) is dict:
            return "dict", tuple((key, self.source(inner)) for key, inner in one.items())
        if isinstance(one, SYMBOLS):
            raise Refused("takes a number that is computed from sizes")
        if holds_tensor(one):
            raise Refused(f"takes a {type(one).__name__}, an object that holds tensors")
        return "value", one

    def target(self) -> Callable[..., Any]:
        """What the graph calls; a plain function of its own, which torch.compile can look through."""
        function, arguments = self.function, tuple(self.arguments)
        apply: Callable[..., Any] = partial(applied, function) if overridden(function) else function.apply

        def target(*tensors: Any, inside: Sequence[Any] = (), sizes: Sequence[Any] = ()) -> Any:
            return apply(*[filled(one, tensors, inside, sizes) for one in arguments])

        target.__name__ = target.__qualname__ = OWN_BACKWARD
        target.function = function  # type: ignore[attr-defined]
        return target


def filled(source: Source, tensors: Sequence[Any], inside: Sequence[Any], sizes: Sequence[Any]) -> Any:
    kind, what = source
    if kind == "tensor":
        return tensors[what]
    if kind == "inside":
        return inside[what]
    if kind == "size":
        return sizes[what]
    if kind == "list":
        return [filled(one, tensors, inside, sizes) for one in what]
    if kind == "tuple":
        return tuple([filled(one, tensors, inside, sizes) for one in what])
    if kind == "dict":
        return {key: filled(one, tensors, inside, sizes) for key, one in what}
    return what


def overridden(function: Function) -> bool:
    """Whether its `apply` is one of its own, which has made these arguments of others already."""
    return any("apply" in one.__dict__ for one in function.__mro__[: function.__mro__.index(torch.autograd.Function)])


def applied(function: Function, *arguments: Any) -> Any:
    return torch.autograd.Function.__dict__["apply"].__get__(None, function)(*arguments)


def with_tensors(call: Call, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    values = list(call.returned)
    for place, one in zip(call.places, tensors, strict=True):
        values[place] = one
    return tuple(values)


def separate(function: Any) -> bool:
    """Whether its forward takes no context, which is set up behind it."""
    return function.setup_context is not torch.autograd.Function.setup_context


def bound(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments by position. Torch knows names of those only where forward takes no context."""
    if not separate(function):
        return args
    given = inspect.signature(function.forward).bind(*args, **kwargs)
    given.apply_defaults()
    return given.args


def code_of(function: Any) -> str:
    """`"layers.py:12"`, where its forward is."""
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"
