"""A module that holds given objects under their dotted names, and nothing else.

A graph written by computing: what is done to the writer's proxies becomes nodes that know their sizes.

Numbers that forward writes as tensors: `x * torch.tensor(0.5)` is `x * 0.5`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..torch_private import GraphAppendingTracer
from .operations import op_name


def attribute(module: nn.Module, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def holder(held: Mapping[str, Any]) -> nn.Module:
    """Parameters and modules stay what they are; other tensors become buffers. The objects are the same ones."""
    root = nn.Module()
    for target, value in held.items():
        *path, last = target.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if getattr(owner, last, None) is value:
            continue  # in a module that is held whole
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            owner.register_buffer(last, value)
        else:
            setattr(owner, last, value)
    return root


# --- writer -----------------------------------------------------------------------------------------------------------


KEPT = ("stack_trace", "nn_module_stack")  # of the operation that the nodes stand for


class Writer(GraphAppendingTracer):
    """Writes a new graph that stands for an old one.

    Nodes are named after the operation of the old graph that they stand for and a place in it, such as a step. Their
    values (`meta["val"]`: sizes without data) are computed once for all nodes that do the same to operands of one kind,
    so that a thousand equal steps cost one.
    """

    def __init__(self) -> None:
        super().__init__(fx.Graph())
        self.copies: dict[fx.Node, fx.Node] = {}  # old -> new
        self.kept: dict[str, Any] = {}
        self.name = self.place = ""
        self.known: dict[str, Any] = {}  # an operation with the kinds of its operands -> value
        self.kinds: dict[Any, Any] = {}  # (type, device, sizes) -> the one value of this kind
        self.given: Any = None

    def copy(self, node: fx.Node) -> None:
        self.copies[node] = self.graph.node_copy(node, lambda one: self.copies[one])
        self.copies[node].meta = dict(node.meta)

    def begin(self, node: fx.Node, name: str = "") -> None:
        """What follows stands for `node`, and is named after it."""
        self.kept = {key: node.meta[key] for key in KEPT if key in node.meta}
        self.name, self.place = name or node.name, ""

    def at(self, place: str) -> None:
        """What follows is at this place of what `begin` named."""
        self.place = f"{place}_" if place else ""

    def __call__(self, argument: Any) -> Any:
        """An argument of an old node, with proxies for nodes."""
        if isinstance(argument, (list, tuple)):
            return [self(one) for one in argument]
        return fx.Proxy(self.copies[argument], self) if isinstance(argument, fx.Node) else argument

    @contextmanager
    def valued(self, value: Any) -> Iterator[None]:
        """Inside, nodes have this value: their sizes are data."""
        self.given = value
        try:
            yield
        finally:
            self.given = None

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        said = target if isinstance(target, str) else target.__name__
        node: fx.Node = super().create_node(kind, target, args, kwargs, f"{self.name}_{self.place}{said}", type_expr)
        node.meta = dict(self.kept)
        if all("val" in operand.meta for operand in node.all_input_nodes):
            node.meta["val"] = self.value(node) if self.given is None else self.given
        return node

    @torch.no_grad()
    def value(self, node: fx.Node) -> Any:
        operands = fx.map_arg((node.args, node.kwargs), lambda one: id(one.meta["val"]))
        key = f"{node.target} {operands}"
        if key not in self.known:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
            function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
            self.known[key] = self.one_of_its_kind(function(*args, **kwargs))
        return self.known[key]

    def one_of_its_kind(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(self.one_of_its_kind(one) for one in value)
        return self.kinds.setdefault((value.dtype, str(value.device), str(tuple(value.shape))), value)


# --- literals ---------------------------------------------------------------------------------------------------------


TAKEN = {"mul", "div", "add", "sub"}
SAME = {"detach", "detach_", "alias"}


def numbers(graph: fx.Graph, root: nn.Module) -> None:
    """In sums and products with a tensor of the same type; the constant is one that the trace made, no attribute."""
    literals: dict[fx.Node, float] = {}
    for node in graph.nodes:
        operands = node.args
        if op_name(node) == "lift_fresh_copy" and operands[0].op == "get_attr":
            value = attribute(root, str(operands[0].target))
            if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
                literals[node] = float(value)
        elif op_name(node) in SAME and operands[0] in literals:
            literals[node] = literals[operands[0]]
        elif op_name(node) in TAKEN and len(operands) == 2 and not node.kwargs and operands[1] in literals:
            one, other = (operand.meta.get("val") if isinstance(operand, fx.Node) else None for operand in operands)
            if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dim() and one.dtype == other.dtype:
                node.args = (operands[0], literals[operands[1]])
