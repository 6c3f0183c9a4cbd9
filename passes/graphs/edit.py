"""Tools that write graphs: the module that holds what a graph reads, a writer of nodes, and numbers for literals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..torch_private import GraphAppendingTracer
from .operations import op_name


def attribute(module: nn.Module, target: str) -> Any:
    """The object of a dotted name in a module."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def holder(held: Mapping[str, Any]) -> nn.Module:
    """A module that holds these objects under their dotted names, and nothing else. Tensors become buffers."""
    root = nn.Module()
    for target, value in held.items():
        *path, last = target.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if getattr(owner, last, None) is value:
            continue  # it lies in a module that is held as a whole
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            owner.register_buffer(last, value)
        else:
            setattr(owner, last, value)
    return root


# --- a graph written by computing -------------------------------------------------------------------------------------

ORIGIN = ("stack_trace", "nn_module_stack")  # keys of meta that new nodes take over from the old one


class Writer(GraphAppendingTracer):
    """Writes a new graph that stands for an old one: operations on the writer's proxies become nodes.

    Nodes are named after the old node that they stand for and a place in it, such as a step. Their values
    (`meta["val"]`, tensors without data) are computed once for all nodes that apply the same operation to operands of
    one kind, so that a thousand equal steps cost one.

    Attributes:
        copies: old node -> new node.
        meta: the meta of the nodes that are written next.
    """

    def __init__(self) -> None:
        super().__init__(fx.Graph())
        self.copies: dict[fx.Node, fx.Node] = {}
        self.meta: dict[str, Any] = {}
        self.name = self.place = ""
        self.values: dict[str, Any] = {}  # an operation with the kinds of its operands -> value
        self.kinds: dict[Any, Any] = {}  # (type, device, sizes) -> the single value of this kind
        self.fixed: Any = None  # the value of all nodes inside of `valued`

    def copy(self, node: fx.Node) -> None:
        self.copies[node] = self.graph.node_copy(node, lambda old: self.copies[old])
        self.copies[node].meta = dict(node.meta)

    def begin(self, node: fx.Node, name: str = "") -> None:
        """The nodes written next stand for `node`, and are named after it."""
        self.meta = {key: node.meta[key] for key in ORIGIN if key in node.meta}
        self.name, self.place = name or node.name, ""

    def at(self, place: str) -> None:
        """The nodes written next are at this place of the node that `begin` named."""
        self.place = f"{place}_" if place else ""

    def __call__(self, argument: Any) -> Any:
        """An argument of an old node, with proxies for nodes."""
        if isinstance(argument, (list, tuple)):
            return [self(element) for element in argument]
        return fx.Proxy(self.copies[argument], self) if isinstance(argument, fx.Node) else argument

    @contextmanager
    def valued(self, value: Any) -> Iterator[None]:
        """Inside, nodes have this value, for operations whose sizes are data."""
        self.fixed = value
        try:
            yield
        finally:
            self.fixed = None

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        operation = target if isinstance(target, str) else target.__name__
        name = f"{self.name}_{self.place}{operation}"
        node: fx.Node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta = dict(self.meta)
        if all("val" in operand.meta for operand in node.all_input_nodes):
            node.meta["val"] = self.value(node) if self.fixed is None else self.fixed
        return node

    @torch.no_grad()
    def value(self, node: fx.Node) -> Any:
        operands = fx.map_arg((node.args, node.kwargs), lambda operand: id(operand.meta["val"]))
        key = f"{node.target} {operands}"
        if key not in self.values:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
            function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
            self.values[key] = self.representative(function(*args, **kwargs))
        return self.values[key]

    def representative(self, value: Any) -> Any:
        """The single value that stands for all of the same type, device and sizes."""
        if isinstance(value, (list, tuple)):
            return tuple(self.representative(element) for element in value)
        return self.kinds.setdefault((value.dtype, str(value.device), str(tuple(value.shape))), value)


# --- literals ---------------------------------------------------------------------------------------------------------

ARITHMETIC = {"mul", "div", "add", "sub"}
ALIASES = {"detach", "detach_", "alias"}


def numbers(graph: fx.Graph, root: nn.Module) -> None:
    """`x * torch.tensor(0.5)` -> `x * 0.5`, bit for bit: in sums and products with a tensor of the same type.

    The constant is one that the trace made. Attributes of the model stay, as they may be written into.
    """
    literals: dict[fx.Node, float] = {}
    for node in graph.nodes:
        operands = node.args
        if op_name(node) == "lift_fresh_copy" and operands[0].op == "get_attr":
            value = attribute(root, str(operands[0].target))
            if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
                literals[node] = float(value)
        elif op_name(node) in ALIASES and operands[0] in literals:
            literals[node] = literals[operands[0]]
        elif op_name(node) in ARITHMETIC and len(operands) == 2 and not node.kwargs and operands[1] in literals:
            x, literal = (operand.meta.get("val") if isinstance(operand, fx.Node) else None for operand in operands)
            if isinstance(x, Tensor) and isinstance(literal, Tensor) and x.dim() and x.dtype == literal.dtype:
                node.args = (operands[0], literals[operands[1]])
