"""torch.fx's symbolic tracing, for models that are plain Python.

It refuses what torch.fx would capture wrongly without an error: random numbers of no input, modes that change inside
forward, autograd.Functions, and buffers that are assigned.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from ..errors import UntraceableError, fatal
from ..graphs.edit import attribute, holder
from ..graphs.operations import op_name
from ..torch_private import ASSERT, ASSERT_IS_NONE, BatchNorm, InstanceNorm
from .attributes import untouched
from .devices import kinds
from .outside import Observer, Outside
from .signature import python_random, refuse_drawn
from .threads import ThreadTracer
from .watch import backward_hooks, cumulative_averages, custom_functions, forward_hooks, refuse_custom, untraceable

CHECKED_INPUTS = (  # their forward branches on the rank of its input, which a proxy does not have
    BatchNorm,
    InstanceNorm,
)


@dataclass(frozen=True)
class Traced:
    """A graph with its calling convention; `passes.trace.Capture` describes the attributes."""

    graph: fx.Graph
    root: nn.Module
    flatten: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]
    holds: Callable[[tuple[Any, ...], Mapping[str, Any]], bool]
    effects: tuple[str, ...]
    assigned: tuple[str, ...]
    outside: Outside


class _Tracer(ThreadTracer):
    """Traces into torch's own modules, so that each operation has one spelling. Buffers are nodes of the graph."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True  # for errors and the report, which name the user's line
        self.modes = modes()

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, CHECKED_INPUTS)

    @cached_property
    def names(self) -> dict[int, str]:
        """The first name of every parameter and buffer, by id."""
        named = (*self.root.named_parameters(), *self.root.named_buffers())
        return {id(tensor): name for name, tensor in reversed(named)}

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """As torch.fx, which searches all tensors of the model at every read and is quadratic in the model's depth."""
        if not self.traces_this_thread:
            return attr_val
        name = self.names.get(id(attr_val))
        if name is None:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        if modes() != self.modes:
            raise ValueError("torch.fx does not see no_grad, enable_grad and autocast inside forward")
        return super().create_proxy(*args, **kwargs)


def modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in kinds())


def symbolic_trace(model: nn.Module) -> Traced:
    """Trace a model without inputs. Arguments with defaults are constants.

    Raises:
        UntraceableError: torch.fx fails, or would capture something wrongly.
    """
    signature = inspect.signature(model.forward)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    observer = Observer()
    with untouched(model), custom_functions() as custom:
        averages = cumulative_averages(model)
        with untouched(model) as assigned:
            try:
                with torch.enable_grad(), no_random_numbers(), python_random() as drawn, warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="For backward hooks to be called")  # `effects` names them
                    with observer.observing():
                        graph = _Tracer().trace(model, concrete_args=defaults)
            except Exception as error:
                if fatal(error):
                    raise
                refuse_custom(model, custom, exported=False)
                raise UntraceableError(untraceable(model, error)) from error
            targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
            root = holder({target: attribute(model, target) for target in sorted(targets)})
    refuse_custom(model, custom, exported=False)
    refuse_drawn(type(model).__name__, drawn)
    if assigned_buffers := sorted({name for name, _ in model.named_buffers(remove_duplicate=False)} & set(assigned)):
        raise UntraceableError(
            f"{type(model).__name__} assigns a new tensor to its buffer {assigned_buffers[0]}, which torch.fx does not "
            "see.\nGive kfac_fx.compile example inputs."
        )
    drop_asserts(graph)

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def holds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        arguments = signature.bind(*args, **kwargs).arguments
        return all(value is defaults[name] for name, value in arguments.items() if name in defaults)

    outside, hooks = observer.outside(), (*forward_hooks(model), *backward_hooks(model))
    effects = (*(f"sets {name}" for name in assigned), *averages, *hooks, *outside.effects)
    return Traced(graph, root, bind, holds, effects, tuple(assigned), outside)


@contextmanager
def no_random_numbers() -> Iterator[None]:
    """Raises ValueError if random numbers are drawn inside: a graph of torch.fx would repeat them."""
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        yield
        if not torch.equal(before, torch.random.get_rng_state()):
            raise ValueError("torch.fx does not see random numbers that do not depend on an input, such as torch.rand")


def drop_asserts(graph: fx.Graph) -> None:
    """Remove the checks that arguments have their defaults; `Capture.holds` makes them."""
    for node in reversed(list(graph.nodes)):
        if op_name(node) in (ASSERT, ASSERT_IS_NONE):
            operands = node.all_input_nodes
            graph.erase_node(node)
            for operand in operands:
                if operand.op != "placeholder" and not operand.users:
                    graph.erase_node(operand)
