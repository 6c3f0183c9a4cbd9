"""Operations that write into memory: their pure twins where there are any, else what depends on them is said.

What cannot be pure stays in place; the emitted module runs in the order of the model and computes the same.
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

SHARES_MEMORY = CASTS | {  # beside what ATen says is a view; some of these only now and then, as dropout in evaluation
    "T", "data", "cpu", "cuda", "type_as", "getitem", "atleast_1d", "atleast_2d", "atleast_3d", UNSAFE_VIEW,
    "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "written", OWN_BACKWARD,
}  # fmt: skip
INPLACE = {
    "add_", "sub_", "mul_", "div_", "relu_", "relu6_", "leaky_relu_", "elu_", "selu_", "celu_", "silu_", "hardswish_",
    "hardtanh_", "hardsigmoid_", "sigmoid_", "tanh_", "dropout_", "masked_fill_", "clamp_", "exp_", "neg_", "sqrt_",
    "softplus_", "mish_", "rrelu_", "threshold_",
}  # fmt: skip


def functional(graph: fx.Graph) -> None:
    """In-place operations on activations become their pure twins; whoever reads the operand later reads the result.

    Left alone where another view of the same memory is read later, on buffers, and without a pure twin.
    """
    found = [node for node in graph.nodes if has_twin(node)]
    if not found:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    label = labels(graph, ())
    for node in found:
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
    """Whether the node writes into its first argument what a pure operation returns."""
    name = op_name(node)
    named = RENAMED.get(name, name) in INPLACE or node.kwargs.get("inplace") is True
    return named and bool(node.args) and isinstance(node.args[0], fx.Node)


def seen_elsewhere(node: fx.Node, operand: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether what `node` does to the memory of `operand` is seen later through another view of it."""
    stack = [base := memory(operand)]
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
    """What is read after a write into its memory depends on the write, in so many words.

    y[:, 0].copy_(a); f(y)   ->   w = y[:, 0].copy_(a); f(written(y, w))
    """
    place = {node: n for n, node in enumerate(graph.nodes)}
    owner: dict[fx.Node, fx.Node] = {}  # node -> the node whose memory it is a view of
    last: dict[fx.Node, fx.Node] = {}  # owner -> the last write so far
    current: dict[fx.Node, fx.Node] = {}  # node -> what stands for it now
    for node in list(graph.nodes):
        for operand in node.all_input_nodes:
            write = last.get(owner[operand])
            if write is None or place[operand] >= place[write]:
                continue
            if operand not in current or current[operand].args[1] is not write:
                with graph.inserting_after(write):
                    later = graph.call_function(written, (current.get(operand, operand), write))
                later.meta = dict(operand.meta)
                current[operand], owner[later] = later, owner[operand]
            node.replace_input_with(operand, current[operand])
        owner[node] = owner[node.args[0]] if shares_memory(node) else node
        if changes_memory(node) and owner[node] is not node:
            last[owner[node]] = node


def written(tensor: torch.Tensor, write: Any) -> torch.Tensor:
    """`tensor`, whose memory `write` has changed."""
    return tensor


def memories(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """`memory` of every node."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        owner[node] = owner[node.args[0]] if shares_memory(node) else node
    return owner


def memory(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of: itself if it has its own."""
    while shares_memory(node):
        node = node.args[0]  # type: ignore[assignment]  # shares_memory says that it is a node
    return node


def shares_memory(node: fx.Node) -> bool:
    """Whether the node may be a view of its first argument; the result of an in-place operation is one."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return op_name(node) in SHARES_MEMORY or returns_view(op_name(node)) or changes_memory(node)


def pure_twin(name: str) -> Callable[..., Any]:
    found = getattr(torch, name, None) or getattr(F, name, None)
    assert callable(found), f"bug in kfac_fx: {name}_ has no pure twin"
    return found  # type: ignore[no-any-return]
