"""A forward of the model in which captured submodules, and operations of Python on parameters, run as their graphs.

A `Frames` replaces the forward of every captured submodule for the time of one forward of the model. `ServedReads` does
the same for operations between the submodules that read parameters; see `passes.divided.reads`. `LossWatch` notes the
losses that Python computes there.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from kfac_fx.passes.divided.divide import CapturedSubmodule, key_of_read
from kfac_fx.passes.divided.following import NOT_CAPTURED, Operation, Read, Reads, differentiable
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.torch_losses import TORCH_LOSSES
from kfac_fx.passes.torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, class_of
from kfac_fx.passes.tracing.calls import Lent, hooked_by_user, map_tensors
from kfac_fx.passes.tracing.signature import call_key
from kfac_fx.recording.emitted import ObservedLoss
from kfac_fx.recording.taps.tap import is_tapped

DISTRIBUTION_OF = {loss.function: loss.distribution for loss in TORCH_LOSSES}


class UncapturedCall(BaseException):
    """A submodule is called in a way that is not captured, or not proved yet; `CaptureCache` catches it.

    It is no Exception, so that no model catches it.

    Attributes:
        path: of the submodule.
        captured: whether the call is captured, and only to be proved.
        asks: whether the submodule asks which tensors need gradients.
    """

    def __init__(self, path: str, captured: bool, asks: bool = False) -> None:
        super().__init__(path)
        self.path, self.captured, self.asks = path, captured, asks


class LossWatch(TorchFunctionMode):
    """Notes the losses that are computed outside of the captured submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[ObservedLoss] = []
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and func in DISTRIBUTION_OF and torch.is_grad_enabled():
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            inputs, targets, reduction = (bound.arguments[name] for name in ("input", "target", "reduction"))
            ignored = bound.arguments.get("ignore_index")
            self.losses.append(ObservedLoss(DISTRIBUTION_OF[func], reduction, inputs, targets, ignored))
        return result


@dataclass
class Frames:
    """The captured submodules of one forward, with the tensors that their graphs run on.

    Attributes:
        checked: the numbers of the captures that may run; None: all.
        ran: receives the numbers of the captures that run.
        functions: one a capture; runs its graph.
        held: one a capture; the parameters and buffers that its graph runs on.
        inputs: from (number of the capture, its flat inputs) to what its graph runs on.
        lent: tells which modules run on parameters that are not the model's; these stay Python.
        tolerant: whether a call that no capture serves runs as it is; it is then kept as `uncaptured`.
        watchers: modes that look at what is done outside of the graphs, and pause inside of them.
    """

    captured: Sequence[CapturedSubmodule]
    checked: Collection[int] | None
    ran: set[int]
    functions: Sequence[Callable[..., Any]]
    held: Sequence[Mapping[str, Tensor]]
    probes: Any
    inputs: Callable[[int, tuple[Any, ...]], tuple[Any, ...]]
    lent: Lent
    tolerant: bool
    watchers: list[Any] = field(default_factory=list)
    uncaptured: UncapturedCall | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The submodules call their graphs. Backward hooks of a captured submodule are effects."""
        submodules = [captured.module for captured in self.captured if not captured.is_read]
        modules = list({id(module): module for module in submodules}.values())
        names = ("forward", *FORWARD_HOOKS, *BACKWARD_HOOKS)
        before = [{name: module.__dict__[name] for name in names if name in module.__dict__} for module in modules]
        try:
            for module in modules:
                self.enter(module)
            yield
        finally:
            for module, attributes in zip(modules, before, strict=True):
                module.__dict__.pop("forward", None)
                module.__dict__.update(attributes)

    def enter(self, module: nn.Module) -> None:
        """`module` calls its graph. A user's hooks are Python around it; torch's own hooks are in the graph."""
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
        """The number of the capture that serves a call; None if the call runs as it is."""
        if not torch.is_grad_enabled() or self.lent.others(module):
            return None
        numbers = [number for number, captured in enumerate(self.captured) if captured.module is module]
        try:
            return self.find(numbers, args, kwargs, call_key(args, kwargs))
        except UncapturedCall as uncaptured:
            self.miss(uncaptured)
            return None

    def find(self, numbers: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> int:
        """Which of these captures serves a call. Raises UncapturedCall if none does."""
        number = next((n for n in numbers if self.captured[n].serves(args, kwargs, key)), None)
        if number is None or (self.checked is not None and number not in self.checked):
            captured = [self.captured[n] for n in numbers]
            path = captured[0].submodule.path if captured else ""
            asks = any(submodule.capture.outside.reads_trained for submodule in captured)
            raise UncapturedCall(path, number is not None, asks)
        self.ran.add(number)
        return number

    def miss(self, uncaptured: UncapturedCall) -> None:
        if not self.tolerant:
            raise uncaptured
        self.uncaptured = uncaptured

    def graph(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph of a capture."""
        capture = self.captured[number].capture
        values = self.inputs(number, capture.flatten(args, kwargs))
        for watcher in self.watchers:
            watcher.paused = True
        try:
            output, _ = self.functions[number](self.held[number], values, self.probes)
        finally:
            for watcher in self.watchers:
                watcher.paused = False
        return map_tensors(writable, capture.unflatten(output))


class TangentsCut(TorchFunctionMode):
    """Python in forward-mode differentiation: torch.no_grad leaves that on, and here its results have no tangents."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or any(result is argument for argument in args):
            return result
        return map_tensors(Tensor.detach, result)


def writable(output: Tensor) -> Tensor:
    """A tensor into which Python may write, as it may into what a submodule returns."""
    return output.clone() if is_tapped(output) else output


def one_call(module: fx.GraphModule) -> Callable[..., Any]:
    def call(held: dict[str, Tensor], values: tuple[Any, ...], probes: Any) -> Any:
        return functional_call(module, held, (*values, probes))

    return call


# --- reads of parameters by Python ------------------------------------------------------------------------------------


class ServedReads(Reads):
    """Runs the graphs of captured reads in one forward.

    parameters: by name, the tensors that Python sees. structured: the names of those with a block of their own.
    """

    def __init__(
        self, frames: Frames, parameters: Mapping[str, Tensor], structured: Collection[str], cases: int
    ) -> None:
        self.by_key: dict[Any, list[int]] = {}  # the numbers of captured reads
        for number, captured in enumerate(frames.captured):
            if isinstance(captured.module, Operation):
                self.by_key.setdefault(captured.module.read_key, []).append(number)
        names = {name for captured in frames.captured if captured.is_read for name in captured.names.values()}
        self.read_names = names & set(structured)
        super().__init__(parameters if self.read_names else {}, cases)
        self.frames, self.lost_names = frames, set[str]()
        frames.watchers.append(self)

    def served(self) -> AbstractContextManager[Any]:
        """While Python runs, if there is anything to serve."""
        return self if self.read_names else nullcontext()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        if self.read_names.isdisjoint(read.names) or not self.lost_names.isdisjoint(read.names):
            return operation()
        try:
            key = key_of_read(read.key, read.inputs)
            number = self.frames.find(self.by_key.get(read.key, ()), read.inputs, {}, key)
        except UncapturedCall as uncaptured:
            result = operation()
            if differentiable(read, result):
                self.frames.miss(UncapturedCall(str(read), uncaptured.captured))
            return result
        output = self.frames.graph(number, read.inputs, {})
        if read.written is None:
            return output
        read.written.copy_(output)
        return None if read.function is Tensor.__setitem__ else read.written

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        """Stop serving these parameters: what was computed from them may be stale. `refuse_read` finds their uses."""
        self.lost_names |= set(names)


def refuse_read(model: nn.Module, stand_ins: Mapping[str, Tensor], fisher: tuple[Tensor, ...]) -> None:
    """Raises ModelChangedError for structured parameters that Python read: nothing recorded such a use."""
    if stand_ins and (names := sorted(reached(fisher, stand_ins))):
        raise ModelChangedError(
            f"on these inputs {class_of(model).__name__} reads {', '.join(names)} outside of its captured "
            "submodules, as it did not on the first inputs.\n"
            "Compile with inputs on which it does, or make these parameters generic: "
            f'compile(..., approximations={{"{names[0]}": "generic"}}).'
        )


def reached(roots: tuple[Tensor, ...], tensors: Mapping[str, Tensor]) -> list[str]:
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
    return [
        name for name, tensor in tensors.items()
        if (tensor.grad_fn in seen if tensor.grad_fn is not None else id(tensor) in leaves)
    ]  # fmt: skip
