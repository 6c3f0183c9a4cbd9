"""Tools that write graphs: the module that holds what a graph reads, a writer of nodes, numbers for literals, and pure
operations instead of those that write into memory.

    x.view(x.size(0), x.size(1))         ->   x.view(x.size(0), 6)
    F.relu(x, inplace=True)              ->   torch.relu(x), and later readers of x read the result
    w = y[:, 0].copy_(a); f(y)           ->   w = y[:, 0].copy_(a); f(overwritten(y, w))

Writes without a pure twin stay in place, and later reads depend on them explicitly. The emitted module runs in the
order of the model and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..torch_private import UNSAFE_VIEW, GraphAppendingTracer, transforms
from .labels import Label, known_number, labels
from .operations import (
    CASTS,
    KINDS_OF_CALLS,
    MAKES_COMPLEX,
    OF_REAL_NUMBERS,
    OWN_BACKWARD,
    RENAMED,
    changes_memory,
    op_name,
    returns_view,
)


def attribute(module: nn.Module, target: str) -> Any:
    """The object of a dotted name in a module."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def is_complex(node: fx.Node, root: nn.Module) -> bool:
    """Whether the value of a node is of complex numbers, as far as the graph tells. root: the module of the graph."""
    behind, seen = [node], set[fx.Node]()
    while behind:
        node = behind.pop()
        if node in seen:
            continue
        seen.add(node)
        name, arguments = op_name(node), (*node.args, *node.kwargs.values())
        value = attribute(root, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, Tensor):
            if value.is_complex():
                return True
        elif name in MAKES_COMPLEX or any(isinstance(argument, complex) for argument in arguments):
            return True
        elif name not in OF_REAL_NUMBERS:
            behind += node.all_input_nodes
    return False


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


def known_sizes(graph: fx.Graph) -> None:
    """`x.view(x.size(0), x.size(1))` -> `x.view(x.size(0), 6)`: sizes that are symbols in the trace, and that the model
    fixes, as an operation with a parameter does."""
    for node in graph.nodes:
        if node.op in KINDS_OF_CALLS and any(known_size(operand) is not None for operand in node.all_input_nodes):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), size_or_node)


def known_size(node: fx.Node) -> int | None:
    """The number that a node computes, if the trace knows it."""
    value = node.meta.get("val") if node.op in KINDS_OF_CALLS else None
    return known_number(value) if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) else None


def size_or_node(node: fx.Node) -> fx.Node | int:
    size = known_size(node)
    return node if size is None else size


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


SHARES_MEMORY = CASTS | {  # operations that may return a view, beside those that ATen declares; dropout in evaluation
    "T", "H", "data", "cpu", "cuda", "type_as", "getitem", "atleast_1d", "atleast_2d", "atleast_3d", UNSAFE_VIEW,
    "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "overwritten", "asks_gradient", OWN_BACKWARD,
}  # fmt: skip
INPLACE = {
    "add_", "sub_", "mul_", "div_", "relu_", "relu6_", "leaky_relu_", "elu_", "selu_", "celu_", "silu_", "hardswish_",
    "hardtanh_", "hardsigmoid_", "sigmoid_", "tanh_", "dropout_", "masked_fill_", "clamp_", "exp_", "neg_", "sqrt_",
    "softplus_", "mish_", "rrelu_", "threshold_",
}  # fmt: skip


def functional(graph: fx.Graph) -> None:
    """Replace in-place operations on activations by their pure twins; later readers of the operand read the result.

    Operations on buffers stay, and so do those whose write is seen later through another view of the same memory.
    """
    in_place = [node for node in graph.nodes if has_twin(node)]
    if not in_place:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    label = labels(graph, ())
    for node in in_place:
        operand = node.args[0]
        assert isinstance(operand, fx.Node), "bug in kfac_fx: a write into something else than a tensor"
        if label[operand] is not Label.ACT or seen_elsewhere(node, operand, order):
            continue
        if node.kwargs.get("inplace") is True:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        else:
            name = RENAMED.get(op_name(node), op_name(node))
            node.op, node.target = "call_function", pure_twin(name.removesuffix("_"))
        for user in list(operand.users):
            if user is not node and order[user] > order[node]:
                user.replace_input_with(operand, node)


def has_twin(node: fx.Node) -> bool:
    """Whether a pure operation returns what the node writes into its first argument."""
    name = op_name(node)
    named = RENAMED.get(name, name) in INPLACE or node.kwargs.get("inplace") is True
    return named and bool(node.args) and isinstance(node.args[0], fx.Node)


def seen_elsewhere(node: fx.Node, operand: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether the write of `node` into `operand` is seen later through another view of the memory."""
    stack = [base := memory_owner(operand)]
    others = {base}
    while stack:
        other = stack.pop()
        views = {user for user in other.users if shares_memory(user) and user.args[0] is other} - others
        fresh = {view for view in views if other is not operand or order[view] < order[node]}
        others |= fresh
        stack += fresh
    later = [user for other in others if other is not operand for user in other.users if order[user] > order[node]]
    return base.op == "get_attr" or any(user is not node for user in later)


def sequence(graph: fx.Graph) -> None:
    """Let the readers of a memory depend on the last write into it; see `overwritten` in the module's docstring."""
    place = {node: n for n, node in enumerate(graph.nodes)}
    owner = memories(graph)
    last: dict[fx.Node, fx.Node] = {}  # owner -> the last write so far
    current: dict[fx.Node, fx.Node] = {}  # node -> the node that now stands for it
    for node in list(graph.nodes):
        for operand in node.all_input_nodes:
            write = last.get(owner[operand])
            if write is None or place[operand] >= place[write]:
                continue
            if operand not in current or current[operand].args[1] is not write:
                with graph.inserting_after(write):
                    later = graph.call_function(overwritten, (current.get(operand, operand), write))
                later.meta = dict(operand.meta)
                current[operand] = later
            node.replace_input_with(operand, current[operand])
        if changes_memory(node) and owner[node] is not node:
            last[owner[node]] = node


def overwritten(tensor: torch.Tensor, write: Any) -> torch.Tensor:
    """The tensor after the write into its memory."""
    return tensor


def asks_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor that requires a gradient, as forward asked for; a transformation of torch.func has none."""
    leaf = tensor.detach()
    return leaf if transforms() else leaf.requires_grad_()


def ask_for_gradients(graph: fx.Graph, returned: Sequence[fx.Node]) -> None:
    """Let these nodes require a gradient, and all that is computed from them: what forward returns may be
    differentiated by them."""
    for node in returned:
        if node.op in KINDS_OF_CALLS:  # and no parameter or argument, which is a leaf in every run
            with graph.inserting_after(node):
                leaf = graph.call_function(asks_gradient, (node,))
            leaf.meta = dict(node.meta)
            node.replace_all_uses_with(leaf, lambda user, leaf=leaf: user is not leaf)  # type: ignore[misc]


def memories(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Every node -> the node whose memory it is a view of."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        owner[node] = owner[node.args[0]] if shares_memory(node) else node
    return owner


def memory_owner(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of, or the node itself."""
    while shares_memory(node):
        node = node.args[0]  # type: ignore[assignment]  # shares_memory says that it is a node
    return node


def shares_memory(node: fx.Node) -> bool:
    """Whether the node may be a view of its first argument; the result of an in-place operation is one."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return op_name(node) in SHARES_MEMORY or returns_view(op_name(node)) or changes_memory(node)


def pure_twin(name: str) -> Callable[..., Any]:
    twin = getattr(torch, name, None) or getattr(F, name, None)
    assert callable(twin), f"bug in kfac_fx: {name}_ has no pure twin"
    return twin  # type: ignore[no-any-return]
