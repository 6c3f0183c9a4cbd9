"""Values that a use needs while a batch is recorded, and that no node of the model's graph computes.

    linear(x, w[:, chosen])          the indices of the gathered inputs, from the numbers of w's elements
    softmax(w)[i] * x                the Jacobian of the function, from w
    pos = linear(constant, w)        the number of cases, from the first input

A pass describes such a value and writes no node, because other Programs share the graph that it was given. `rewrite`
adds the node to the module that it emits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import fx

from .matrix import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Computed:
    """`function(*arguments)`.

    function: a function of a module, or an `nn.Module`, which the emitted module then holds.
    arguments: nodes of the graph, one at least, and literals.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        return [argument for argument in self.arguments if isinstance(argument, fx.Node)]


Value = fx.Node | Computed


def nodes_of(value: Value) -> list[fx.Node]:
    """The nodes that a value is, or is computed from."""
    return value.nodes if isinstance(value, Computed) else [value]


def with_nodes(value: T, nodes: Mapping[fx.Node, fx.Node]) -> T:
    """Plain data with other nodes in the place of its own, as in a copy of the graph. Data without nodes is returned
    as it is."""
    result: Any = value
    if isinstance(value, fx.Node):
        result = nodes[value]
    elif isinstance(value, (tuple, frozenset)):
        items = [with_nodes(item, nodes) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            result = type(value)(items)
    elif isinstance(value, Mapping):
        result = {with_nodes(key, nodes): with_nodes(item, nodes) for key, item in value.items()}
    elif is_dataclass(value) and not isinstance(value, (type, Layout)):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: with_nodes(item, nodes) for name, item in old.items()}
        if any(new[name] is not old[name] for name in old):
            result = replace(value, **new)
    return result  # type: ignore[no-any-return]
