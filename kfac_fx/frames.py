"""A model run as it is, but for its captured submodules, which run as their graphs; and what is watched meanwhile."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from kfac_fx.passes.calls import Lent, mapped
from kfac_fx.passes.divide import Captured
from kfac_fx.passes.hooks import FORWARD_HOOKS, hooked_by_user

KINDS: dict[Any, str] = {
    F.cross_entropy: "categorical",
    F.mse_loss: "normal",
    F.binary_cross_entropy_with_logits: "multi_bernoulli",
}
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")  # of a captured submodule: effects


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
    """

    def __init__(
        self,
        captured: Sequence[Captured],
        number_of: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], int],
        functions: list[Callable[..., Any]],
        held: list[dict[str, Tensor]],
        lent: Lent,
        probes: Any,
        watch: LossWatch | None,
    ) -> None:
        self.captured, self.number_of = captured, number_of
        self.functions, self.held, self.lent, self.probes, self.watch = functions, held, lent, probes, watch

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The submodules call their graphs; what is set here, `untouched` puts back."""
        for module in {id(one.module): one.module for one in self.captured}.values():
            self.enter(module)
        yield

    def enter(self, module: nn.Module) -> None:
        """`module` calls its graph. What a user hooks is Python around it; torch's own hooks are in the graph."""
        names = BACKWARD_HOOKS if hooked_by_user(module) else (*FORWARD_HOOKS, *BACKWARD_HOOKS)
        original, hooks = module.forward, {name: module.__dict__[name] for name in names}

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not self.lent.others(module):
                return self.graph(module, args, kwargs)
            if hooked_by_user(module):
                return original(*args, **kwargs)
            module.__dict__.update(hooks, forward=original)  # as the model would: nothing of it reaches the losses
            try:
                return module(*args, **kwargs)
            finally:
                module.__dict__.update({name: OrderedDict() for name in names}, forward=forward)

        module.__dict__.update({name: OrderedDict() for name in names}, forward=forward)

    def graph(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        number = self.number_of(module, args, kwargs)
        capture = self.captured[number].capture
        values = capture.flatten(args, kwargs)
        if self.watch is not None:
            self.watch.paused = True
        try:
            output, _ = self.functions[number](self.held[number], values, self.probes)
        finally:
            if self.watch is not None:
                self.watch.paused = False
        return mapped(writable, capture.unflatten(output))


def writable(output: Tensor) -> Tensor:
    """Python may write into what a submodule returns, which autograd forbids for the output of a tap."""
    tapped = output.grad_fn is not None and "TapFunction" in output.grad_fn.name()
    return output.clone() if tapped else output


def one_call(module: fx.GraphModule) -> Callable[..., Any]:
    def call(held: dict[str, Tensor], values: tuple[Any, ...], probes: Any) -> Any:
        return functional_call(module, held, (*values, probes))

    return call


def leaves_behind(roots: tuple[Tensor, ...]) -> list[Tensor]:
    """The leaves of autograd's graph that a gradient of the roots would reach."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    found = [root for root in roots if root.grad_fn is None and root.requires_grad]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        stack += new
    return found
