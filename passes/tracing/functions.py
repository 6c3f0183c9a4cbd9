"""One call of a user's torch.autograd.Function: its arguments apart into what a graph computes and what it holds.

A user's torch.autograd.Function as one operation of the graph, which keeps its own forward and backward.

    y = Clipped.apply(x, 0.5)                     clipped = own_backward(x)

Traced through, its forward would be in the graph and autograd would differentiate that, whatever its backward says. So
an operation that only knows shapes stands for it while torch.export traces; they come from its forward, run on tensors
without data. Then the graph calls `Clipped.apply` itself, with the arguments that are no tensors as they were.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from ..errors import UntraceableError, first_line
from ..graphs.operations import OWN_BACKWARD, op_name
from ..torch_private import StorageWeakRef, function_apply
from .attributes import SYMBOLS
from .signature import holds_tensor
from .substitutes import RUNNING, own_backward, written_by
from .watch import Function, custom_functions

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
    return function_apply().__get__(None, function)(*arguments)


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


# --- own backwards ----------------------------------------------------------------------------------------------------


PLAIN = {  # by module and name, or declared by the user
    "peft.tuners.loha.layer.HadaWeight",
    "peft.tuners.loha.layer.HadaWeightCP",
}
Declared = TypeVar("Declared", bound=Function)
NUMBERS = itertools.count()  # of calls, one after the other in a process, so that two captures have none in common
CONSTANTS = (type(None), bool, int, float, complex, str)


def plain_backward(function: Declared) -> Declared:
    """Declare that the backward of a torch.autograd.Function is the derivative of its forward, up to rounding.

    So is one that saves memory or time: it is traced through, and parameters that enter it are structured. Returns the
    Function, as a decorator does.

    Only what is captured from now on knows of it. The first batch compares the gradients; where they differ, the graph
    is refused, and the model divided around it.
    """
    PLAIN.add(name_of(function))
    return function


def name_of(function: Function) -> str:
    return f"{function.__module__}.{function.__qualname__}"


class Context(FunctionCtx):
    """What forward is told, and tells, where nothing is differentiated."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(one, Tensor) and one.requires_grad for one in arguments)
        self.dirty: tuple[Any, ...] = ()
        self.without_gradient: tuple[Any, ...] = ()

    def mark_dirty(self, *args: Any) -> None:
        self.dirty = args

    def mark_non_differentiable(self, *args: Any) -> None:
        self.without_gradient = args


class Looks(TorchFunctionMode):
    """What a forward does beside computing from its arguments. held: the model's tensors, by id, and their names."""

    def __init__(self, arguments: Sequence[Tensor], held: Mapping[int, str]) -> None:
        super().__init__()
        own = {id(one) for one in arguments}
        self.memory = {StorageWeakRef(one.untyped_storage()) for one in arguments}
        self.held = {number: name for number, name in held.items() if number not in own}
        self.read: dict[str, None] = {}
        self.writes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for one in (*args, *kwargs.values()):
            for tensor in one if isinstance(one, (list, tuple)) else (one,):
                if id(tensor) in self.held:
                    self.read[self.held[id(tensor)]] = None
        self.writes |= any(
            StorageWeakRef(one.untyped_storage()) in self.memory for one in written_by(func, args, kwargs)
        )
        return func(*args, **kwargs)


class OwnBackwards:
    """The Functions that a forward applies while torch.export traces it. refused: (Function, why) in their order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: dict[int, Call] = {}
        self.refused: dict[tuple[str, str], None] = {}

    def apply(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a Function's `apply` is while torch.export traces."""
        arguments = bound(function, args, kwargs)
        call = Call(function)
        if name_of(function) in PLAIN:
            return self.traced(call, arguments)
        try:
            call.take(arguments)
        except Refused as why:
            self.refuse(function, str(why))
            return self.traced(call, arguments)
        number = next(NUMBERS)
        self.calls[number] = call
        held = {id(one): name for name, one in (*self.model.named_buffers(), *self.model.named_parameters())}
        RUNNING[number] = lambda tensors, sizes: self.run(call, tensors, sizes, held)
        made = own_backward(number, [*call.tensors, *call.inside], call.sizes)
        made = [one.detach() if place in call.constant else one for place, one in zip(call.places, made, strict=True)]
        return made[0] if call.returned is None else with_tensors(call, made)

    def traced(self, call: Call, arguments: Sequence[Any]) -> Any:
        """What its forward computes, with the operations in the graph."""
        result = self.forward(call, arguments)
        if isinstance(result, tuple):
            return tuple(one.detach() if place in call.constant else one for place, one in enumerate(result))
        return result

    def run(self, call: Call, tensors: Sequence[Tensor], sizes: Sequence[Any], held: Mapping[int, str]) -> list[Tensor]:
        """The shapes of what it returns, of tensors without data."""
        count = len(call.tensors)
        arguments = [filled(one, tensors[:count], tensors[count:], sizes) for one in call.arguments]
        looks = Looks(tensors, held)
        with looks, torch.no_grad():
            result = self.forward(call, arguments)
        if looks.writes:
            self.refuse(call.function, "writes into its arguments")
        if looks.read:
            self.refuse(call.function, f"reads {', '.join(looks.read)}, beside its arguments")
        several = result if isinstance(result, tuple) else (result,)
        call.places = [place for place, one in enumerate(several) if isinstance(one, Tensor)]
        kept = [None if isinstance(one, Tensor) else one for one in several]
        if strange := [type(one).__name__ for one in kept if not isinstance(one, CONSTANTS)]:
            self.refuse(call.function, f"returns a {strange[0]} beside tensors")
        call.returned = tuple(kept) if isinstance(result, tuple) else None
        found = [several[place] for place in call.places]
        if not found:
            self.refuse(call.function, "returns no tensor")
        return [torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=one.device) for one in found]

    def forward(self, call: Call, arguments: Sequence[Any]) -> Any:
        """What its forward returns; `call` is told of what has no gradient."""
        function: Any = call.function
        context: Any = Context(arguments)
        try:
            with custom_functions(self.apply if torch.is_grad_enabled() else None):
                if separate(function):
                    result = function.forward(*arguments)
                    function.setup_context(context, tuple(arguments), result)
                else:
                    result = function.forward(context, *arguments)
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            self.refuse(function, f"does not run on tensors without numbers: {said}")
            raise
        if context.dirty:
            self.refuse(function, "writes into its arguments")
        several = result if isinstance(result, tuple) else (result,)
        ids = {id(one) for one in context.without_gradient}
        call.constant = {place for place, one in enumerate(several) if id(one) in ids and one.is_floating_point()}
        return result

    def refuse(self, function: Function, why: str) -> None:
        place = code_of(function)
        self.refused[f"{function.__name__} ({place})" if place else function.__name__, why] = None

    def check(self) -> None:
        """Raises UntraceableError with every Function that cannot be one operation, and why."""
        if self.refused:
            said = ", and ".join(f"{name}, an autograd.Function that {why}" for name, why in self.refused)
            raise UntraceableError(
                f"{type(self.model).__name__} applies {said}; so it is no operation of a graph.\n"
                "Let it compute new tensors from its arguments alone, with operations of torch, or register it with "
                "torch.library.custom_op, register_fake and register_autograd."
            )

    def restore(self, module: fx.GraphModule) -> None:
        """The Functions in the place of what stood for them, also in the regions that are graphs of their own."""
        for part in list(module.modules()):
            if not isinstance(part, fx.GraphModule):
                continue
            found = [node for node in part.graph.nodes if node.target is torch.ops.kfac_fx.own_backward.default]
            for node in found:
                self.restore_node(part.graph, node)
            if found:
                part.recompile()

    def restore_node(self, graph: fx.Graph, node: fx.Node) -> None:
        number, tensors, sizes = cast(Any, node.args)
        call = self.calls[number]
        count = len(call.tensors)
        kwargs = {"inside": list(tensors[count:]), "sizes": list(sizes)}
        with graph.inserting_before(node):
            new = graph.create_node(
                "call_function",
                call.target(),
                tuple(tensors[:count]),
                {key: value for key, value in kwargs.items() if value},
                name=re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", call.function.__name__).lower(),
            )
        new.meta = dict(node.meta)
        values = node.meta["val"]
        new.meta["val"] = values[0] if call.returned is None else with_tensors(call, values)
        for reader in list(node.users):
            assert op_name(reader) == "getitem", "bug in kfac_fx: a list of tensors is read as a whole"
            if call.returned is None:
                reader.replace_all_uses_with(new)
                graph.erase_node(reader)
            else:
                reader.args = (new, call.places[reader.args[1]])  # type: ignore[index]
        graph.erase_node(node)


@contextmanager
def own_backwards(model: nn.Module) -> Iterator[OwnBackwards]:
    """Inside, torch.export sees one operation for every autograd.Function of a user's."""
    found = OwnBackwards(model)
    try:
        with custom_functions(found.apply):
            yield found
    finally:
        for number in found.calls:
            RUNNING.pop(number, None)
