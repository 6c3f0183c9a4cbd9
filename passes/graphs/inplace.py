"""Operations that write into memory: pure operations replace them, or else later reads depend on them explicitly.

    F.relu(x, inplace=True)              ->   torch.relu(x), and later readers of x read the result
    w = y[:, 0].copy_(a); f(y)           ->   w = y[:, 0].copy_(a); f(overwritten(y, w))

Writes without a pure twin stay in place. The emitted module runs in the order of the model and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..torch_private import UNSAFE_VIEW
from .labels import Label, labels
from .operations import CASTS, OWN_BACKWARD, RENAMED, changes_memory, op_name, returns_view

SHARES_MEMORY = CASTS | {  # operations that may return a view, beside those that ATen declares; dropout in evaluation
    "T", "data", "cpu", "cuda", "type_as", "getitem", "atleast_1d", "atleast_2d", "atleast_3d", UNSAFE_VIEW,
    "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "overwritten", OWN_BACKWARD,
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
    owner: dict[fx.Node, fx.Node] = {}  # node -> the node whose memory it is a view of
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
                current[operand], owner[later] = later, owner[operand]
            node.replace_input_with(operand, current[operand])
        owner[node] = owner[node.args[0]] if shares_memory(node) else node
        if changes_memory(node) and owner[node] is not node:
            last[owner[node]] = node


def overwritten(tensor: torch.Tensor, write: Any) -> torch.Tensor:
    """The tensor after the write into its memory."""
    return tensor


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
