"""A forward watched for what it reads of parameters; see `reads`.

What reads parameters outside of given modules, in one forward of a model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..graphs import pytree
from ..graphs.operations import NO_GRADIENT, draws, name_of
from ..registration import OWN_FOLDER
from ..tracing.calls import IN_TRANSFORM, Call, Lent, hooked_by_user, mapped, transforms
from ..tracing.devices import autocast
from ..tracing.substitutes import written_by
from ..tracing.watch import Apply, Function, functions_applied
from .reads import (
    Followed,
    Given,
    Named,
    Read,
    Size,
    autocasts_of,
    can_be_kept,
    frozen,
    in_tree,
    names_of,
    swapped,
)

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


# --- readers ----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """A read, with what it was called with, detached, and how often. where: "model.py:12"."""

    read: Read
    call: Call
    where: str
    calls: int = 0


class Readers(Reads):
    """Outside of given modules. found: the reads, one of a kind and of a place; places: the parameters that are read in
    another way, "read at model.py:12, ..."."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], cases: int | None) -> None:
        super().__init__(parameters, cases)
        self.lent, self.places, self.found = Lent(model), dict[str, str](), dict[Any, Found]()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        given = tuple(one.detach().clone() if one is read.written else one.detach() for one in read.inputs)
        result = operation()
        if differentiable(read, result):
            kind = read.key, tuple((one.shape, one.dtype) for one in given)
            found = self.found.setdefault(kind, Found(read, Call(given, {}, autocast()), users_line()))
            found.calls += 1
        return result

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        self.note(names, f"read at {users_line()}, {why}")

    def note(self, names: Iterable[str], said: str) -> None:
        for name in names:
            self.places.setdefault(name, said)

    @contextmanager
    def outside_of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """What a module is handed counts as read outside of it, and so does all that it does on other parameters."""
        inside: list[bool] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.paused and torch.is_grad_enabled():
                self.lost(self.names_in((args, kwargs)))
            inside.append(not self.lent.others(module))
            self.paused += inside[-1]

        def leave(*rest: Any) -> None:
            self.paused -= inside.pop()

        handles: list[Any] = []
        for module in modules:
            hooked = hooked_by_user(module)  # what the user hooks is Python outside of it, what torch does is inside
            handles.append(module.register_forward_pre_hook(enter, prepend=not hooked, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, prepend=hooked, always_call=True))
        try:
            with functions_applied(self.applied):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def applied(self, apply: Apply, _: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Notes what a user's autograd.Function is given, which no TorchFunctionMode sees."""
        if not self.paused and torch.is_grad_enabled():
            self.lost(self.names_in((args, kwargs)))
        return apply(*args, **kwargs)


def users_line() -> str:
    """`"model.py:12"`: the innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("/torch/", OWN_FOLDER)):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "an unknown line"


def read_outside(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modules: Iterable[nn.Module],
    parameters: Mapping[str, Tensor],
    cases: int | None,
) -> Readers:
    """One forward: what is read outside of `modules`, and where."""
    readers = Readers(model, parameters, cases)
    with readers.outside_of(modules), readers:
        output = model(*mapped(Tensor.clone, args), **mapped(Tensor.clone, dict(kwargs)))
    readers.note(readers.names_in(output), "returned by the model, as no layer's output")
    return readers
