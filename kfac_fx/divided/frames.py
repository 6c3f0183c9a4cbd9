"""A model run as it is, but for its captured submodules, which run as their graphs; and what is watched meanwhile.

Operations of Python on parameters, run as their graphs; see `passes.divided.reads`.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from kfac_fx.passes.divided.captured import Captured, key_of_read
from kfac_fx.passes.divided.following import NOT_CAPTURED, Reads, differentiable
from kfac_fx.passes.divided.reads import Operation, Read
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.tracing.calls import BACKWARD_HOOKS, FORWARD_HOOKS, Lent, hooked_by_user, mapped

KINDS: dict[Any, str] = {
    F.cross_entropy: "categorical",
    F.mse_loss: "normal",
    F.binary_cross_entropy_with_logits: "multi_bernoulli",
}


class Unmet(BaseException):
    """A submodule is called in a way that is not captured, or not proved yet. No Exception, so that no model catches
    it; `Captures` does."""

    def __init__(self, path: str, captured: bool) -> None:
        super().__init__(path)
        self.path, self.captured = path, captured


@dataclass(frozen=True)
class Loss:
    """A loss that Python computed between the submodules."""

    kind: str
    reduction: str
    inputs: Tensor
    targets: Any


class LossWatch(TorchFunctionMode):
    """Notes the losses that are computed outside of the captured submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Loss] = []
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and func in KINDS and torch.is_grad_enabled():
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            inputs, targets, reduction = (given.arguments[name] for name in ("input", "target", "reduction"))
            self.found.append(Loss(KINDS[func], reduction, inputs, targets))
        return result


class Frames:
    """The captured submodules of one forward, with what their graphs are run on.

    number_of: which capture serves a call of a module. functions, held: of every capture, how to run it and on which
    parameters and buffers. lent: which module runs on parameters that are not the model's; it stays Python.
    inputs: what a graph is run on, from its number and what its submodule was called with.
    tolerant: a call that no capture serves runs as it is, too, and is kept as `unmet`.
    """

    def __init__(
        self,
        captured: Sequence[Captured],
        number_of: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], int],
        functions: list[Callable[..., Any]],
        held: list[dict[str, Tensor]],
        lent: Lent,
        probes: Any,
        watch: LossWatch,
    ) -> None:
        self.captured, self.number_of = captured, number_of
        self.functions, self.held, self.lent, self.probes, self.watch = functions, held, lent, probes, watch
        self.tolerant = False
        self.watchers: list[Any] = [watch]  # of what is done outside of the graphs
        self.inputs: Callable[[int, tuple[Any, ...]], tuple[Any, ...]] = lambda number, values: values
        self.unmet: Unmet | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The submodules call their graphs. Backward hooks of a captured submodule are effects."""
        modules = list({id(one.module): one.module for one in self.captured if not one.is_read}.values())
        names = ("forward", *FORWARD_HOOKS, *BACKWARD_HOOKS)
        before = [{name: one.__dict__[name] for name in names if name in one.__dict__} for one in modules]
        try:
            for module in modules:
                self.enter(module)
            yield
        finally:
            for module, own in zip(modules, before, strict=True):
                module.__dict__.pop("forward", None)
                module.__dict__.update(own)

    def enter(self, module: nn.Module) -> None:
        """`module` calls its graph. What a user hooks is Python around it; torch's own hooks are in the graph."""
        names = BACKWARD_HOOKS if hooked_by_user(module) else (*FORWARD_HOOKS, *BACKWARD_HOOKS)
        original, hooks = module.forward, {name: module.__dict__[name] for name in names}

        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self.serving(module, args, kwargs)
            if number is not None:
                return self.graph(number, args, kwargs)
            if hooked_by_user(module):
                return original(*args, **kwargs)
            module.__dict__.update(hooks, forward=original)  # as the model would: nothing of it reaches the losses
            try:
                return module(*args, **kwargs)
            finally:
                module.__dict__.update({name: OrderedDict() for name in names}, forward=forward)

        module.__dict__.update({name: OrderedDict() for name in names}, forward=forward)

    def serving(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Which capture serves a call; None if it runs as it is."""
        if not torch.is_grad_enabled() or self.lent.others(module):
            return None
        try:
            return self.number_of(module, args, kwargs)
        except Unmet as unmet:
            if not self.tolerant:
                raise
            self.unmet = unmet
            return None

    def graph(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        capture = self.captured[number].capture
        values = self.inputs(number, capture.flatten(args, kwargs))
        for watcher in self.watchers:
            watcher.paused = True
        try:
            output, _ = self.functions[number](self.held[number], values, self.probes)
        finally:
            for watcher in self.watchers:
                watcher.paused = False
        return mapped(writable, capture.unflatten(output))


def writable(output: Tensor) -> Tensor:
    """Python may write into what a submodule returns, which autograd forbids for the output of a tap."""
    tapped = output.grad_fn is not None and "TapFunction" in output.grad_fn.name()
    return output.clone() if tapped else output


def one_call(module: fx.GraphModule) -> Callable[..., Any]:
    def call(held: dict[str, Tensor], values: tuple[Any, ...], probes: Any) -> Any:
        return functional_call(module, held, (*values, probes))

    return call


def behind(roots: tuple[Tensor, ...], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that a gradient of the roots would reach."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves = {id(root) for root in roots if root.grad_fn is None}
    seen = set(stack)
    while stack:
        node = stack.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        stack += new
    reached = {
        name: one.grad_fn in seen if one.grad_fn is not None else id(one) in leaves for name, one in tensors.items()
    }
    return [name for name, found in reached.items() if found]


# --- served reads -----------------------------------------------------------------------------------------------------


Serving = Callable[[Sequence[int], tuple[Any, ...], Mapping[str, Any], Any], int]


class ServedReads(Reads):
    """Of one forward. parameters: what Python sees of them. serving: see `DividedRecorder.serving`."""

    def __init__(
        self,
        frames: Frames,
        parameters: Mapping[str, Tensor],
        structured: Collection[str],
        cases: int,
        serving: Serving,
    ) -> None:
        self.by_key = numbers(frames.captured)
        self.readers = {name for one in frames.captured if one.is_read for name in one.names.values()} & set(structured)
        super().__init__({name: one for name, one in parameters.items() if self.readers}, cases)
        self.frames, self.serving, self.unfollowed = frames, serving, set[str]()
        frames.watchers.append(self)

    def served(self) -> AbstractContextManager[Any]:
        """While Python runs, if there is anything to serve."""
        return self if self.readers else nullcontext()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        if self.readers.isdisjoint(read.names) or not self.unfollowed.isdisjoint(read.names):
            return operation()
        try:
            number = self.serving(self.by_key.get(read.key, ()), read.inputs, {}, key_of_read(read.key, read.inputs))
        except Unmet as unmet:
            result = operation()
            if not differentiable(read, result):
                return result
            if not self.frames.tolerant:
                raise Unmet(str(read), unmet.captured) from None
            self.frames.unmet = Unmet(str(read), unmet.captured)
            return result
        output = self.frames.graph(number, read.inputs, {})
        if read.written is None:
            return output
        read.written.copy_(output)
        return None if read.function is Tensor.__setitem__ else read.written

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        """What was followed may be another value by now: nothing of it is served, so that `refuse_read` finds it."""
        self.unfollowed |= set(names)


def numbers(captured: Sequence[Captured]) -> dict[Any, list[int]]:
    """Of the captures of reads, by what they read."""
    found: dict[Any, list[int]] = {}
    for number, one in enumerate(captured):
        if isinstance(one.module, Operation):
            found.setdefault(one.module.read_key, []).append(number)
    return found


def refuse_read(model: nn.Module, stand_ins: Mapping[str, Tensor], fisher: tuple[Tensor, ...]) -> None:
    """Raises ModelChangedError for structured parameters that Python read: a use that nothing recorded."""
    if not stand_ins:
        return
    if read := sorted(behind(fisher, stand_ins)):
        raise ModelChangedError(
            f"on these inputs {type(model).__name__} reads {', '.join(read)} outside of its captured "
            "submodules, as it did not on the first.\n"
            "Compile with inputs on which it does, or let these be generic: "
            f'compile(..., approximations={{"{read[0]}": "generic"}}).'
        )
