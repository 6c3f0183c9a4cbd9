"""A forward watched for what it reads of parameters; see `reads`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..graphs import pytree
from ..graphs.operations import NO_GRADIENT, draws, name_of
from .calls import IN_TRANSFORM, transforms
from .devices import autocast
from .reads import Followed, Given, Named, Read, Size, autocasts_of, can_be_kept, frozen, in_tree, names_of, swapped
from .writes import written_by

EXPANSIONS = {"expand", "repeat", "broadcast_to"}  # whose first size may be the number of cases
SUMS = {"add", "radd", "iadd", "sub", "rsub", "isub"}  # with a table that is cut to the length of the batch
LIKE = {
    "type_as",
    "view_as",
    "expand_as",
    "reshape_as",
    "to",
}  # look at nothing but the sizes or the type of the second
NOT_CAPTURED = "in Python that is not captured"


class Reads(TorchFunctionMode):
    """Follows parameters through a forward, and hands every read to `met`.

    parameters: by name. cases: how many the batch has; None: no expansion is to the cases.
    """

    def __init__(self, parameters: Mapping[str, Tensor], cases: int | None) -> None:
        super().__init__()
        self.values: dict[int, tuple[Tensor, Named | Followed]] = {
            id(one): (one, Named(name)) for name, one in parameters.items()
        }
        self.cases: int | None = cases
        self.paused: int | bool = False
        self.around = transforms()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        """What the operation returns."""
        return operation()

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        """Parameters that are read in another way."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        leaves = list(in_tree((args, kwargs)))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        known = [one for one in tensors if id(one) in self.values]
        if not known or name_of(func) in NO_GRADIENT or (name_of(func) in LIKE and known[0] is not tensors[0]):
            return func(*args, **kwargs)
        writes = written_by(func, args, kwargs)
        again = [self.values[id(one)][1] for one in known]  # what a capture would compute once more
        lost = kwargs.get("out") is not None or any(id(one) in self.values for one in writes)
        inside = transforms() > self.around
        lost |= not all(map(can_be_kept, leaves)) or any(under != autocast() for under in autocasts_of(again))
        if lost or inside or (len(known) == len(tensors) and draws(name_of(func))):
            self.lost(names_of(again), IN_TRANSFORM if inside else NOT_CAPTURED)
            for one in writes:
                self.values.pop(id(one), None)
            return func(*args, **kwargs)
        if len(known) < len(tensors):
            return self.met(self.read(func, args, kwargs, tensors, writes), lambda: func(*args, **kwargs))
        if (to_cases := self.expansion(func, args, kwargs)) is not None:
            return self.met(to_cases, lambda: func(*args, **kwargs))
        return self.followed(func, args, kwargs)

    def followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for place, one in enumerate(pytree.leaves(result)):
            if isinstance(one, Tensor) and one.requires_grad and id(one) not in self.values:
                given, named = self.template(args, ()), self.template(kwargs, ())
                self.values[id(one)] = one, Followed(func, given, named, autocast(), place)
        return result

    def template(self, tree: Any, inputs: Sequence[Tensor]) -> Any:
        places = {id(one): n for n, one in enumerate(inputs)}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return Given(places[id(value)]) if id(value) in places else self.values[id(value)][1]

        return swapped(leaf, tree)

    def read(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], writes: Sequence[Tensor]) -> Read:
        inputs = tuple({id(one): one for one in tensors if id(one) not in self.values}.values())
        given, named = self.template(args, inputs), self.template(kwargs, inputs)
        if name_of(func).strip("_") in SUMS:
            sizes: list[int] = []
            given = with_free_lengths(given, sizes, len(inputs))
            inputs = (*inputs, *(torch.empty(size, device=inputs[0].device) for size in sizes))
        return self.made(func, given, named, inputs, writes[0] if writes else None)

    def made(self, func: Any, args: Any, kwargs: Any, inputs: tuple[Tensor, ...], written: Tensor | None) -> Read:
        names = tuple(dict.fromkeys(names_of((args, kwargs))))
        return Read(func, args, kwargs, names, inputs, written, (func, frozen(args), frozen(kwargs)))

    def expansion(self, func: Any, args: Any, kwargs: Any) -> Read | None:
        """`token.expand(n, -1, -1)`: of the number of cases, which a tensor of that size tells its capture."""
        if name_of(func) not in EXPANSIONS or kwargs or self.cases is None or len(args) < 2:
            return None
        tensor, sizes = args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        if not sizes or sizes[0] != self.cases or (tensor.dim() == len(sizes) and tensor.shape[0] != 1):
            return None
        template = self.template(tensor, ()), (Size(0), *sizes[1:])
        return self.made(func, template, {}, (torch.empty(self.cases, device=tensor.device),), None)

    def names_in(self, tree: Any) -> list[str]:
        """Of the parameters that tensors in a tree were computed from."""
        known = [self.values[id(one)][1] for one in pytree.leaves(tree) if id(one) in self.values]
        return list(dict.fromkeys(names_of(known)))


def with_free_lengths(tree: Any, sizes: list[int], before: int) -> Any:
    """`table[:7]` as `table[:size]`: as long as the batch is. sizes: filled with those that are taken out."""

    def length(bound: Any) -> Any:
        if not isinstance(bound, int) or bound < 2:
            return bound
        sizes.append(bound)
        return Size(before + len(sizes) - 1)

    def leaf(value: Any) -> Any:
        if not isinstance(value, Followed):
            return value
        args = with_free_lengths(value.args, sizes, before)
        if value.function is Tensor.__getitem__:
            table, index = args
            several = isinstance(index, tuple)
            index = tuple(
                slice(length(one.start), length(one.stop), one.step) if isinstance(one, slice) else one
                for one in (index if several else (index,))
            )
            args = table, index if several else index[0]
        return replace(value, args=args, kwargs=with_free_lengths(value.kwargs, sizes, before))

    return swapped(leaf, tree)


def differentiable(read: Read, result: Any) -> bool:
    """Whether a gradient of what the operation made would reach its parameters."""
    made = result if read.written is None else read.written
    return any(isinstance(one, Tensor) and one.requires_grad for one in pytree.leaves(made))
