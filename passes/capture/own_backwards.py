"""A user's torch.autograd.Function as one operation of the graph, which keeps its own forward and backward.

    y = Clipped.apply(x, 0.5)                     clipped = own_backward(x)

Traced through, its forward would be in the graph and autograd would differentiate that, whatever its backward says. So
an operation that only knows shapes stands for it while torch.export traces; they come from its forward, run on tensors
without data. Then the graph calls `Clipped.apply` itself, with the arguments that are no tensors as they were.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ..errors import UntraceableError
from ..graphs.failures import first_line
from ..graphs.operations import op_name
from .function_calls import Call, Refused, bound, code_of, filled, separate, with_tensors
from .stand_ins import RUNNING, own_backward
from .watch import Function, custom_functions
from .writes import written_by

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
