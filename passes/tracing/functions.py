"""A user's torch.autograd.Function as one operation of the graph, which keeps its own forward and backward.

    y = Clipped.apply(x, 0.5)                     clipped = own_backward(x)

If its forward were traced, autograd would differentiate the traced operations, whatever its backward says. While
torch.export traces, an operation without values stands for the call: its shapes come from the Function's forward
on tensors without data. Afterwards the graph calls `Clipped.apply` itself, with the arguments that are no tensors as
they were. Parameters that enter such a call are generic, unless `plain_backward` or `plain_function` declares the
Function.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from ..errors import UntraceableError, file_line, kind_and_line
from ..graphs.operations import OWN_BACKWARD, op_name
from ..torch_private import StorageWeakRef, function_apply
from .effects import written_by
from .settings import SYMBOLS
from .signature import holds_tensor
from .substitutes import SHAPES, Function, custom_functions, functions_applied, own_backward

Source = tuple[str, Any]  # where an argument comes from: ("tensor", 0), ("size", 1), ("value", 0.5), ("list", (...))


class Refused(Exception):
    """The reason why a Function cannot be one operation."""


@dataclass
class FunctionCall:
    """One call of a Function, with its arguments sorted into those that the graph computes and constants.

    Attributes:
        function: the Function.
        arguments: the source of each argument, in order.
        tensors: the arguments that are tensors themselves; gradients flow to these.
        inside: the tensors inside of lists, tuples and dictionaries; no gradients flow to these.
        sizes: the symbolic sizes.
        returned: the values that it returns, with None for tensors; None for a single tensor.
        places: the positions of tensors among the returned values.
        constant: the positions of returned tensors that have no gradient.
    """

    function: Function
    arguments: list[Source] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    returned: Any = None
    places: list[int] = field(default_factory=list)
    constant: set[int] = field(default_factory=set)

    def take(self, arguments: Sequence[Any]) -> None:
        """Sort the arguments. Raises Refused for those that are neither constants nor made of tensors and sizes."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                self.arguments.append(("tensor", len(self.tensors)))
                self.tensors.append(argument)
            else:
                self.arguments.append(self.source(argument))

    def source(self, value: Any) -> Source:
        if isinstance(value, Tensor):
            self.inside.append(value)
            return "inside", len(self.inside) - 1
        if isinstance(value, torch.SymInt):
            self.sizes.append(value)
            return "size", len(self.sizes) - 1
        if type(value) in (list, tuple):
            return type(value).__name__, tuple(self.source(element) for element in value)
        if type(value) is dict:
            return "dict", tuple((key, self.source(element)) for key, element in value.items())
        if isinstance(value, SYMBOLS):
            raise Refused("takes a number that is computed from sizes")
        if holds_tensor(value):
            raise Refused(f"takes a {type(value).__name__}, an object that holds tensors")
        return "value", value

    def target(self) -> Callable[..., Any]:
        """The function that the graph calls. torch.compile can trace through it, as it closes over plain values."""
        function, arguments = self.function, tuple(self.arguments)
        apply: Callable[..., Any] = partial(applied, function) if overridden(function) else function.apply

        def target(*tensors: Any, inside: Sequence[Any] = (), sizes: Sequence[Any] = ()) -> Any:
            return apply(*[argument_of(source, tensors, inside, sizes) for source in arguments])

        target.__name__ = target.__qualname__ = OWN_BACKWARD
        target.function = function  # type: ignore[attr-defined]
        return target


def argument_of(source: Source, tensors: Sequence[Any], inside: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """The argument that `FunctionCall.source` described."""
    kind, content = source
    if kind == "tensor":
        return tensors[content]
    if kind == "inside":
        return inside[content]
    if kind == "size":
        return sizes[content]
    if kind == "list":
        return [argument_of(element, tensors, inside, sizes) for element in content]
    if kind == "tuple":
        return tuple([argument_of(element, tensors, inside, sizes) for element in content])
    if kind == "dict":
        return {key: argument_of(element, tensors, inside, sizes) for key, element in content}
    return content


def overridden(function: Function) -> bool:
    """Whether the Function has its own `apply`, which has already made these arguments of the user's."""
    return any("apply" in kind.__dict__ for kind in function.__mro__[: function.__mro__.index(torch.autograd.Function)])


def applied(function: Function, *arguments: Any) -> Any:
    """torch's `apply` of the Function."""
    return function_apply().__get__(None, function)(*arguments)


def with_tensors(call: FunctionCall, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The values that the call returns, with these tensors in their places."""
    values = list(call.returned)
    for place, tensor in zip(call.places, tensors, strict=True):
        values[place] = tensor
    return tuple(values)


def separate(function: Any) -> bool:
    """Whether the Function has a `setup_context`, so that its forward takes no context."""
    return function.setup_context is not torch.autograd.Function.setup_context


def bound(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments by position. torch accepts keywords only if forward takes no context."""
    if not separate(function):
        return args
    arguments = inspect.signature(function.forward).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.args


def code_of(function: Any) -> str:
    """The place of its forward, as "layers.py:12"."""
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    return "" if code is None else file_line(code.co_filename, code.co_firstlineno)


# --- Functions whose backward is the derivative of their forward ------------------------------------------------------

PLAIN_BACKWARDS = {  # by module and name; `plain_backward` adds those of the user
    "peft.tuners.loha.layer.HadaWeight",
    "peft.tuners.loha.layer.HadaWeightCP",
}
AnyFunction = TypeVar("AnyFunction", bound=Function)


def plain_backward(function: AnyFunction) -> AnyFunction:
    """Decorator: declare that the backward of a torch.autograd.Function is the derivative of its forward.

    Use it for Functions that save memory or time. Captures from now on trace through the Function, so that parameters
    that enter it are structured. The first batch compares the gradients with the model's; if they differ by more than
    rounding, the graph is refused and the model is divided around the Function.

    Args:
        function: a subclass of torch.autograd.Function.

    Returns:
        The Function itself.
    """
    PLAIN_BACKWARDS.add(qualified_name(function))
    return function


PLAIN_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by module and name of the Function


def plain_function(function: AnyFunction, plain: Callable[..., Any]) -> AnyFunction:
    """Declare which operations of torch compute the same as a torch.autograd.Function.

    kfac_fx.plain_function(FusedCrossEntropy, lambda x, weight, y: F.cross_entropy(x @ weight.T, y))

    Captures from now on have these operations instead of the Function, so that layers and losses inside of it are
    found: a head that is fused with its loss has a block, and every way to estimate its Fisher. The model itself runs
    the Function. The first batch compares outputs and gradients of the two; if they differ by more than rounding, the
    graph is refused and the model is divided around the Function.

    Args:
        function: a subclass of torch.autograd.Function.
        plain: takes the arguments of `function.apply`, and returns what it returns.

    Returns:
        The Function itself.

    Raises TypeError for anything else.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        kind = function.__name__ if isinstance(function, type) else type(function).__name__
        raise TypeError(f"plain_function takes a subclass of torch.autograd.Function, and got {kind}")
    if not callable(plain):
        raise TypeError(
            f"plain_function takes a function of the arguments of {function.__name__}.apply that computes the same, "
            f"and got a {type(plain).__name__}"
        )
    PLAIN_FUNCTIONS[qualified_name(function)] = plain
    return function


def qualified_name(function: Function) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@contextmanager
def plain_functions() -> Iterator[None]:
    """Inside, the Functions that `plain_function` declares run the plain operations."""

    def apply(
        original: Callable[..., Any], function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return PLAIN_FUNCTIONS.get(qualified_name(function), original)(*args, **kwargs)

    with functions_applied(apply):
        yield


# --- while torch.export traces ----------------------------------------------------------------------------------------

NUMBERS = itertools.count()  # of calls in this process, so that two captures share no number
CONSTANTS = (type(None), bool, int, float, complex, str)


class Context(FunctionCtx):
    """The context that a forward gets while nothing is differentiated."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(value, Tensor) and value.requires_grad for value in arguments)
        self.dirty: tuple[Any, ...] = ()
        self.without_gradient: tuple[Any, ...] = ()

    def mark_dirty(self, *args: Any) -> None:
        self.dirty = args

    def mark_non_differentiable(self, *args: Any) -> None:
        self.without_gradient = args


class SideEffects(TorchFunctionMode):
    """Watches a forward for writes into its arguments and for reads of the model's tensors.

    Attributes:
        names: of the model's tensors that are no arguments, by id.
        read: the names of those that the forward reads.
        writes: whether it writes into an argument.
    """

    def __init__(self, arguments: Sequence[Tensor], names: Mapping[int, str]) -> None:
        super().__init__()
        ids = {id(tensor) for tensor in arguments}
        self.memory = {StorageWeakRef(tensor.untyped_storage()) for tensor in arguments}
        self.names = {number: name for number, name in names.items() if number not in ids}
        self.read: dict[str, None] = {}
        self.writes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if id(tensor) in self.names:
                    self.read[self.names[id(tensor)]] = None
        written = written_by(func, args, kwargs)
        self.writes |= any(StorageWeakRef(tensor.untyped_storage()) in self.memory for tensor in written)
        return func(*args, **kwargs)


class OwnBackwards:
    """The Functions that a forward applies while torch.export traces it.

    Attributes:
        calls: by the number that their operation has in the graph.
        refused: pairs of a Function and the reason why it cannot be one operation, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: dict[int, FunctionCall] = {}
        self.refused: dict[tuple[str, str], None] = {}

    def apply(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands for a Function's `apply`."""
        arguments = bound(function, args, kwargs)
        call = FunctionCall(function)
        name = qualified_name(function)
        if name in PLAIN_FUNCTIONS:
            return PLAIN_FUNCTIONS[name](*args, **kwargs)
        if name in PLAIN_BACKWARDS:
            return self.traced(call, arguments)
        try:
            call.take(arguments)
        except Refused as why:
            self.refuse(function, str(why))
            return self.traced(call, arguments)
        number = next(NUMBERS)
        self.calls[number] = call
        named = (*self.model.named_buffers(), *self.model.named_parameters())
        names = {id(tensor): name for name, tensor in named}
        SHAPES[number] = lambda tensors, sizes: self.shapes(call, tensors, sizes, names)
        results = own_backward(number, [*call.tensors, *call.inside], call.sizes)
        results = [
            result.detach() if place in call.constant else result
            for place, result in zip(call.places, results, strict=True)
        ]
        return results[0] if call.returned is None else with_tensors(call, results)

    def traced(self, call: FunctionCall, arguments: Sequence[Any]) -> Any:
        """The result of its forward, with the operations of the forward in the graph."""
        result = self.forward(call, arguments)
        if isinstance(result, tuple):
            return tuple(value.detach() if place in call.constant else value for place, value in enumerate(result))
        return result

    def shapes(
        self, call: FunctionCall, tensors: Sequence[Tensor], sizes: Sequence[Any], names: Mapping[int, str]
    ) -> list[Tensor]:
        """Run the forward on tensors without data. Returns empty tensors like its results, and completes `call`."""
        count = len(call.tensors)
        arguments = [argument_of(source, tensors[:count], tensors[count:], sizes) for source in call.arguments]
        effects = SideEffects(tensors, names)
        with effects, torch.no_grad():
            result = self.forward(call, arguments)
        if effects.writes:
            self.refuse(call.function, "writes into its arguments")
        if effects.read:
            self.refuse(call.function, f"reads {', '.join(effects.read)}, beside its arguments")
        values = result if isinstance(result, tuple) else (result,)
        call.places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        constants = [None if isinstance(value, Tensor) else value for value in values]
        if strange := [type(value).__name__ for value in constants if not isinstance(value, CONSTANTS)]:
            self.refuse(call.function, f"returns a {strange[0]} beside tensors")
        call.returned = tuple(constants) if isinstance(result, tuple) else None
        if not call.places:
            self.refuse(call.function, "returns no tensor")
        results = [values[place] for place in call.places]
        return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in results]

    def forward(self, call: FunctionCall, arguments: Sequence[Any]) -> Any:
        """Run the forward, and note in `call` which results have no gradient."""
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
            why = kind_and_line(error).rstrip(".")
            self.refuse(function, f"does not run on tensors without numbers: {why}")
            raise
        if context.dirty:
            self.refuse(function, "writes into its arguments")
        values = result if isinstance(result, tuple) else (result,)
        ids = {id(tensor) for tensor in context.without_gradient}
        call.constant = {place for place, value in enumerate(values) if id(value) in ids and value.is_floating_point()}
        return result

    def refuse(self, function: Function, why: str) -> None:
        place = code_of(function)
        self.refused[f"{function.__name__} ({place})" if place else function.__name__, why] = None

    def check(self) -> None:
        """Raises UntraceableError that names every Function that cannot be one operation, with the reason."""
        if self.refused:
            reasons = ", and ".join(f"{name}, an autograd.Function that {why}" for name, why in self.refused)
            function = next(iter(self.refused))[0].partition(" ")[0]
            raise UntraceableError(
                f"{type(self.model).__name__} applies {reasons}. A graph cannot call it as one operation.\n"
                "Let it compute new tensors from its arguments alone, with operations of torch. Or declare what it "
                f"computes, with kfac_fx.plain_function({function}, lambda *arguments: ...). Or register it with "
                "torch.library.custom_op, register_fake and register_autograd."
            )

    def restore(self, module: fx.GraphModule) -> None:
        """Call the Functions themselves in the graph, and in the regions that are graphs of their own."""
        for region in list(module.modules()):
            if not isinstance(region, fx.GraphModule):
                continue
            nodes = [node for node in region.graph.nodes if node.target is torch.ops.kfac_fx.own_backward.default]
            for node in nodes:
                self.restore_node(region.graph, node)
            if nodes:
                region.recompile()

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
    """Inside, torch.export sees one operation for every autograd.Function of the user."""
    functions = OwnBackwards(model)
    try:
        with custom_functions(functions.apply):
            yield functions
    finally:
        for number in functions.calls:
            SHAPES.pop(number, None)
