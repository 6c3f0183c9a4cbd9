"""Parameters that a forward reads in Python, followed to the operations that read them.

Tensors that Python computes from parameters alone are followed. The operation in which such a tensor meets another one,
or is expanded to the cases, is a *read*: a small function of tensors, which is captured like a submodule. Its graph
runs in the place of the operation.

    w = self.weight * self.gain     followed
    y = F.linear(x, w)              a read: x -> linear(x, mul(weight, gain))
    h[mask] = self.token            a read: (h, mask) -> index_put(h, mask, token), which is written into h

`Reads` is the mode that follows parameters. `Readers` collects the reads outside of the captured submodules on the
examples; `kfac_fx.recording.emitted_submodules.ServedReads` runs their graphs in a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .graphs.operations import NO_GRADIENT, draws, name_of
from .torch_private import pytree, transforms
from .tracing.calls import IN_TRANSFORM, Call, Lent, around_calls, hooked_by_user, map_tensors
from .tracing.effects import written_by
from .tracing.signature import autocast
from .tracing.substitutes import Apply, Function, functions_applied
from .tracing.summary import PLAIN, plain
from .users_code import running_line


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


# --- following parameters through Python ------------------------------------------------------------------------------

EXPANSIONS = {"expand", "repeat", "broadcast_to"}  # whose first size may be the number of cases
SUMS = {"add", "radd", "iadd", "sub", "rsub", "isub"}  # with a table that is cut to the length of the batch
LIKE = {"type_as", "view_as", "expand_as", "reshape_as", "to"}  # read only the sizes or the dtype of the second
NOT_CAPTURED = "in Python that is not captured"


class Reads(TorchFunctionMode):
    """Follows parameters through a forward and passes every read to `met`.

    parameters: by name. cases: of the batch; None: no expansion is taken for one to the cases.
    """

    def __init__(self, parameters: Mapping[str, Tensor], cases: int | None) -> None:
        super().__init__()
        self.values: dict[int, tuple[Tensor, ParameterRef | Followed]] = {
            id(value): (value, ParameterRef(name)) for name, value in parameters.items()
        }
        self.cases: int | None = cases
        self.paused: int | bool = False
        self.around = transforms()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        """Called with every read, in the place of the operation."""
        return operation()

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        """Called with the parameters that are read in a way that cannot be captured."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        leaves = leaves_of((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        followed = [tensor for tensor in tensors if id(tensor) in self.values]
        if not followed or name_of(func) in NO_GRADIENT or (name_of(func) in LIKE and followed[0] is not tensors[0]):
            return func(*args, **kwargs)
        writes = written_by(func, args, kwargs)
        recomputed = [self.values[id(tensor)][1] for tensor in followed]  # by a capture of the operation
        lost = kwargs.get("out") is not None or any(id(tensor) in self.values for tensor in writes)
        inside = transforms() > self.around
        lost |= not all(map(can_be_kept, leaves)) or any(under != autocast() for under in autocasts_of(recomputed))
        if lost or inside or (len(followed) == len(tensors) and draws(name_of(func))):
            self.lost(names_of(recomputed), IN_TRANSFORM if inside else NOT_CAPTURED)
            for tensor in writes:
                self.values.pop(id(tensor), None)
            return func(*args, **kwargs)
        if len(followed) < len(tensors):
            return self.met(self.read(func, args, kwargs, tensors, writes), lambda: func(*args, **kwargs))
        if (to_cases := self.expansion(func, args, kwargs)) is not None:
            return self.met(to_cases, lambda: func(*args, **kwargs))
        return self.follow(func, args, kwargs)

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on parameters alone, and follow its results."""
        result = func(*args, **kwargs)
        for place, tensor in enumerate(pytree.tree_leaves(result)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in self.values:
                operands = self.template(args, ()), self.template(kwargs, ())
                self.values[id(tensor)] = tensor, Followed(func, *operands, autocast(), place)
        return result

    def template(self, tree: Any, inputs: Sequence[Tensor]) -> Any:
        """A tree with references in the place of tensors."""
        places = {id(tensor): n for n, tensor in enumerate(inputs)}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return InputRef(places[id(value)]) if id(value) in places else self.values[id(value)][1]

        return swapped(leaf, tree)

    def read(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], writes: Sequence[Tensor]) -> Read:
        inputs = tuple({id(tensor): tensor for tensor in tensors if id(tensor) not in self.values}.values())
        templates = self.template(args, inputs), self.template(kwargs, inputs)
        if name_of(func).strip("_") in SUMS:
            sizes: list[int] = []
            templates = with_free_lengths(templates[0], sizes, len(inputs)), templates[1]
            inputs = (*inputs, *(torch.empty(size, device=inputs[0].device) for size in sizes))
        return read_of(func, *templates, inputs, writes[0] if writes else None)

    def expansion(self, func: Any, args: Any, kwargs: Any) -> Read | None:
        """`token.expand(n, -1, -1)` to n cases, as a read; its capture has one more input, whose size is n."""
        if name_of(func) not in EXPANSIONS or kwargs or self.cases is None or len(args) < 2:
            return None
        tensor, sizes = args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        if not sizes or sizes[0] != self.cases or (tensor.dim() == len(sizes) and tensor.shape[0] != 1):
            return None
        template = self.template(tensor, ()), (InputSize(0), *sizes[1:])
        return read_of(func, template, {}, (torch.empty(self.cases, device=tensor.device),), None)

    def names_in(self, tree: Any) -> list[str]:
        """The parameters that tensors in a tree were computed from."""
        followed = [self.values[id(leaf)][1] for leaf in pytree.tree_leaves(tree) if id(leaf) in self.values]
        return list(dict.fromkeys(names_of(followed)))


def read_of(func: Any, args: Any, kwargs: Any, inputs: tuple[Tensor, ...], written: Tensor | None) -> Read:
    names = tuple(dict.fromkeys(names_of((args, kwargs))))
    return Read(func, args, kwargs, names, inputs, written, (func, frozen(args), frozen(kwargs)))


def with_free_lengths(tree: Any, sizes: list[int], before: int) -> Any:
    """`table[:7]` as `table[:size]`, of any length; `sizes` receives the 7. before: the number of other inputs."""

    def length(bound: Any) -> Any:
        if not isinstance(bound, int) or bound < 2:
            return bound
        sizes.append(bound)
        return InputSize(before + len(sizes) - 1)

    def leaf(value: Any) -> Any:
        if not isinstance(value, Followed):
            return value
        args = with_free_lengths(value.args, sizes, before)
        if value.function is Tensor.__getitem__:
            table, index = args
            several = isinstance(index, tuple)
            index = tuple(
                slice(length(entry.start), length(entry.stop), entry.step) if isinstance(entry, slice) else entry
                for entry in (index if several else (index,))
            )
            args = table, index if several else index[0]
        return replace(value, args=args, kwargs=with_free_lengths(value.kwargs, sizes, before))

    return swapped(leaf, tree)


def differentiable(read: Read, result: Any) -> bool:
    """Whether a gradient of the result would reach the parameters."""
    tensors = pytree.tree_leaves(result if read.written is None else read.written)
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


# --- the reads outside of submodules ----------------------------------------------------------------------------------


@dataclass
class ObservedRead:
    """A read on the examples.

    Attributes:
        call: its inputs, detached.
        where: "model.py:12".
        calls: the number of times.
    """

    read: Read
    call: Call
    where: str
    calls: int = 0


class Readers(Reads):
    """Collects the reads outside of given modules.

    Attributes:
        observed: the reads, by their key and the shapes of their inputs.
        places: by parameter that is read in a way that cannot be captured, "read at model.py:12, ...".
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], cases: int | None) -> None:
        super().__init__(parameters, cases)
        self.lent, self.places, self.observed = Lent(model), dict[str, str](), dict[Any, ObservedRead]()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        inputs = tuple(x.detach().clone() if x is read.written else x.detach() for x in read.inputs)
        result = operation()
        if differentiable(read, result):
            kind = read.key, tuple((tensor.shape, tensor.dtype) for tensor in inputs)
            observed = ObservedRead(read, Call(inputs, {}, autocast()), running_line())
            self.observed.setdefault(kind, observed).calls += 1
        return result

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        self.note(names, f"read at {running_line()}, {why}")

    def note(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.places.setdefault(name, reason)

    @contextmanager
    def outside_of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within the modules nothing is collected. Their arguments count as read outside of them, and so do reads by a
        module that runs on other parameters than the model's."""
        inside: list[bool] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.paused and torch.is_grad_enabled():
                self.lost(self.names_in((args, kwargs)))
            inside.append(not self.lent.others(module))
            self.paused += inside[-1]

        def leave(*rest: Any) -> None:
            self.paused -= inside.pop()

        # A user's hooks are Python outside of a module, torch's own are inside.
        with around_calls(modules, enter, leave, hooked_by_user), functions_applied(self.applied):
            yield

    def applied(self, apply: Apply, _: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Notes the arguments of a user's autograd.Function, which no TorchFunctionMode sees."""
        if not self.paused and torch.is_grad_enabled():
            self.lost(self.names_in((args, kwargs)))
        return apply(*args, **kwargs)


def read_outside(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modules: Iterable[nn.Module],
    parameters: Mapping[str, Tensor],
    cases: int | None,
) -> Readers:
    """Run one forward, and collect the reads outside of `modules`."""
    readers = Readers(model, parameters, cases)
    with readers.outside_of(modules), readers:
        output = model(*map_tensors(Tensor.clone, args), **map_tensors(Tensor.clone, dict(kwargs)))
    readers.note(readers.names_in(output), "returned by the model, as no layer's output")
    return readers
