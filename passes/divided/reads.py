"""Operations of Python that read parameters.

Tensors that Python computes from parameters alone are followed. The operation in which such a tensor meets another one,
or is expanded to the cases, is a *read*: a small function of tensors, which is captured like a submodule. Its graph
runs in the place of the operation.

    w = self.weight * self.gain     followed
    y = F.linear(x, w)              a read: x -> linear(x, mul(weight, gain))
    h[mask] = self.token            a read: (h, mask) -> index_put(h, mask, token), which is written into h
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.operations import name_of
from ..torch_private import pytree
from ..tracing.summary import PLAIN, plain


@dataclass(frozen=True)
class ParameterRef:
    """A parameter."""

    name: str


@dataclass(frozen=True)
class InputRef:
    """An input of a read."""

    number: int


@dataclass(frozen=True)
class InputSize:
    """The first size of an input that exists for this size only, so that one capture serves all sizes."""

    number: int


@dataclass(frozen=True, eq=False)
class Followed:
    """A tensor that was computed from parameters alone, by `function(*args, **kwargs)`.

    Attributes:
        under: the autocast of the operation.
        place: of the tensor among the results.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    under: Any
    place: int = 0


@dataclass(frozen=True, eq=False)
class Read:
    """An operation that reads parameters.

    Attributes:
        args, kwargs: with references in the place of tensors.
        names: of the parameters.
        inputs: the other tensors.
        written: the tensor that the operation writes into.
        key: equal for two reads that one capture may serve.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    written: Tensor | None
    key: Any = field(repr=False)

    def __str__(self) -> str:
        return f"{name_of(self.function)} of {', '.join(self.names)}"


def swapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of every leaf in lists, tuples, dictionaries and slices."""
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(swapped(function, branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: swapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, slice):
        return slice(*(swapped(function, bound) for bound in (tree.start, tree.stop, tree.step)))
    return function(tree)


def can_be_kept(leaf: Any) -> bool:
    """Whether a capture may hold an argument: a plain value, unlike an array or a generator."""
    return isinstance(leaf, (Tensor, torch.layout, torch.memory_format, type(...), *PLAIN))


def leaves_of(tree: Any) -> list[Any]:
    """The leaves that `swapped` finds."""
    leaves: list[Any] = []
    swapped(leaves.append, tree)
    return leaves


def frozen(tree: Any) -> Any:
    """Hashable, and equal for equal operations."""
    if isinstance(tree, (list, tuple)):
        return isinstance(tree, list), tuple(map(frozen, tree))
    if isinstance(tree, dict):
        return dict, tuple((key, frozen(branch)) for key, branch in sorted(tree.items()))
    if isinstance(tree, slice):
        return slice, frozen((tree.start, tree.stop, tree.step))
    if isinstance(tree, Followed):
        return tree.function, frozen(tree.args), frozen(tree.kwargs), tree.place
    return tree if isinstance(tree, (ParameterRef, InputRef, InputSize)) else plain(tree)


class Operation(nn.Module):
    """A read as a module: a function of its inputs, with parameters `p0`, `p1`, ... in the order of its names."""

    def __init__(self, read: Read, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.read_key, self.canonical = read.key, {f"p{n}": name for n, name in enumerate(read.names)}
        self.function, self.arguments, self.named_arguments = read.function, read.args, read.kwargs
        self.writes = read.written is not None
        for attribute, name in self.canonical.items():
            self.register_parameter(attribute, parameters[name])

    def forward(self, *inputs: Tensor) -> Any:
        parameters = {name: getattr(self, attribute) for attribute, name in self.canonical.items()}
        computed: dict[int, Any] = {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, ParameterRef):
                return parameters[leaf.name]
            if isinstance(leaf, InputRef):
                return inputs[leaf.number]
            if isinstance(leaf, InputSize):
                return inputs[leaf.number].shape[0]
            if not isinstance(leaf, Followed):
                return leaf
            if id(leaf) not in computed:
                result = leaf.function(*swapped(value, leaf.args), **swapped(value, leaf.kwargs))
                computed[id(leaf)] = pytree.tree_leaves(result)[leaf.place]
            return computed[id(leaf)]

        args = swapped(value, self.arguments)
        if not self.writes:
            return self.function(*args, **swapped(value, self.named_arguments))
        target, *rest = args
        if self.function is Tensor.__setitem__ and through_mask(target, *rest):
            mask, source = rest
            return torch.index_put(target, (mask,), source.to(target.dtype))
        target = target.clone()
        self.function(target, *rest, **swapped(value, self.named_arguments))
        return target


def through_mask(target: Tensor, index: Any, value: Any) -> bool:
    """Whether `target[index] = value` writes a tensor through a boolean mask."""
    mask = isinstance(index, Tensor) and index.dtype == torch.bool
    return mask and isinstance(value, Tensor) and value.dim() <= target.dim() - index.dim()


def names_of(template: Any) -> Iterator[str]:
    """The parameters in a tree of references."""
    for leaf in leaves_of(template):
        if isinstance(leaf, ParameterRef):
            yield leaf.name
        elif isinstance(leaf, Followed):
            yield from names_of((leaf.args, leaf.kwargs))


def autocasts_of(template: Any) -> Iterator[Any]:
    """The autocast of all operations in a tree of references."""
    for leaf in leaves_of(template):
        if isinstance(leaf, Followed):
            yield leaf.under
            yield from autocasts_of((leaf.args, leaf.kwargs))
