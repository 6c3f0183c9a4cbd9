"""What each node depends on, and which parameter, through which views, stands behind it.

    ACT     depends on the values of the model's inputs, or has a row for every case
    FREE    an activation that is free of the batch: computed by a layer, from parameters and constants only
    PURE    depends on parameters and constants only
    CONST   depends on neither (sizes, masks, buffers, anything detached)

An edge from PURE to ACT or FREE is a place where a parameter enters the computation: a use to be explained by a layer.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from .matrix import Layout, Shape, Step

Edge = tuple[fx.Node, fx.Node]  # (PURE node, activation that reads it)


class Label(Enum):
    ACT = "act"
    FREE = "free"
    PURE = "pure"
    CONST = "const"

    @property
    def activation(self) -> bool:
        return self in (Label.ACT, Label.FREE)


SHAPE_ONLY = {  # read the size, the dtype or the device of their operands, never the values
    "size", "dim", "numel", "shape", "ndim", "dtype", "device", "sym_size", "sym_numel", "sym_stride",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "_assert_tensor_metadata", "_assert", "numbered",
}  # fmt: skip
STOPS_GRADIENT = {
    "detach", "detach_", "data", "argmax", "argmin", "argsort", "item", "long", "int", "bool", "sign", "round",
    "floor", "ceil", "gt", "lt", "ge", "le", "eq", "ne", "isnan", "isfinite", "isinf", "logical_not", "logical_and",
    "logical_or",
}  # fmt: skip
RANDOM = {  # beside the ATen operations, which say so themselves
    "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax", "multi_head_attention_forward",
    "fractional_max_pool2d", "fractional_max_pool3d", "wrap_with_set_grad_enabled", "wrap_with_autocast",
    "tag_activation_checkpoint",
}  # fmt: skip
IN_PLACE = {  # Python's operators, whose names do not say it
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem",
}  # fmt: skip
DATA_FIRST = {  # what their first argument is to a layer no parameter can be
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "layer_norm", "rms_norm", "group_norm",
}  # fmt: skip
EXPANDS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
CASTS = {"to", "float", "double", "half", "bfloat16", "type", "_to_copy", "contiguous", "clone", "alias"}
PERMUTES = {"t", "T", "mT", "transpose", "swapaxes", "permute", "numpy_T", "movedim"}
VIEWS = CASTS | PERMUTES | {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"}


def op_name(node: fx.Node) -> str:
    """The operation without its spelling: `aten.add.Tensor`, `torch.add`, `operator.add`, `x.add` are all "add"."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    if node.op == "call_function":
        if target is getattr:
            return str(node.args[1])
        return getattr(target, "__name__", str(target))
    return str(target)


def is_random(node: fx.Node) -> bool:
    """Whether running the node may draw from the global random stream."""
    name = op_name(node)
    known = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, name.rstrip("_"), None)
    overloads = [getattr(known, each) for each in known.overloads()] if known is not None else []
    return name.rstrip("_") in RANDOM or any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def changes_memory(node: fx.Node) -> bool:
    """Whether the node writes into its first argument."""
    name = op_name(node)
    return name in IN_PLACE or name.endswith("_") and not name.endswith("__") or node.kwargs.get("inplace") is True


def has_effect(node: fx.Node) -> bool:
    """Whether a node does more than compute its value: inputs, outputs, updates of buffers, random numbers that nothing
    reads but that move the stream."""
    known = node.op in ("placeholder", "output") or op_name(node).startswith("wrap_with")
    return known or changes_memory(node) or is_random(node)


def no_grad_region(node: fx.Node) -> bool:
    return op_name(node) == "wrap_with_set_grad_enabled" and not node.args[0]


def labels(
    graph: fx.Graph, parameters: Iterable[str], pure: Iterable[fx.Node] = (), cases: str | None = None
) -> dict[fx.Node, Label]:
    """Label every node.

    Args:
        pure: placeholders that stand for parameters, as in the form of a layer.
        cases: the symbolic size of the cases; what has one row a case, such as the zeros that a recurrent net starts
            from or a class token in front of every sequence, is an activation as any other. Where no sizes are known,
            an expansion to a size of an activation is taken for such.
    """
    names, forced = set(parameters), set(pure)
    label: dict[fx.Node, Label] = {}
    for node in graph.nodes:
        if node in forced:
            label[node] = Label.PURE
        elif node.op == "placeholder":
            label[node] = Label.ACT
        elif node.op == "get_attr":
            label[node] = Label.PURE if node.target in names else Label.CONST
        elif op_name(node) in SHAPE_ONLY | STOPS_GRADIENT or no_grad_region(node):
            acts = any(label[n] is Label.ACT for n in node.all_input_nodes)
            label[node] = Label.ACT if acts and op_name(node) not in SHAPE_ONLY else Label.CONST
        else:
            behind = {label[n] for n in node.all_input_nodes}
            label[node] = next((one for one in Label if one in behind), Label.CONST)
            if label[node] is Label.PURE and is_layer_of_data(node, label):
                label[node] = Label.FREE
        if label[node] is not Label.ACT and node.op != "get_attr" and has_row_a_case(node, label[node], cases):
            label[node] = Label.ACT
    return label


def is_layer_of_data(node: fx.Node, label: Mapping[fx.Node, Label]) -> bool:
    """Whether a PURE node applies a layer with parameters to something else: coordinates, a learned table."""
    if op_name(node) == "learned":
        return True
    data = node.args[0] if op_name(node) in DATA_FIRST and node.args else None
    others = [operand for operand in node.all_input_nodes if operand is not data]
    return isinstance(data, fx.Node) and any(label[operand] is Label.PURE for operand in others)


def has_row_a_case(node: fx.Node, label: Label, cases: str | None) -> bool:
    """Of what depends on parameters, only an expansion is taken for it: a slice may be as long as there are cases."""
    of_cases = cases is not None and any(size and re.search(rf"\b{cases}\b", size) for size in symbolic_sizes(node))
    if label is Label.CONST or op_name(node) not in EXPANDS:
        return of_cases and label is Label.CONST
    if cases is not None:
        return of_cases
    if "val" in node.meta:  # captured with a single case
        sizes = node.args[1] if len(node.args) > 1 else ()
        return isinstance(sizes, (list, tuple)) and sizes[:1] in ([1], (1,))
    return any(is_size(operand) for operand in node.all_input_nodes[1:])


def is_size(node: fx.Node) -> bool:
    """In a graph without sizes: a size of a tensor."""
    while op_name(node) == "getitem":
        node = node.all_input_nodes[0]
    return op_name(node) in ("size", "shape", "sym_size")


def symbolic_sizes(node: fx.Node) -> list[str | None]:
    """One entry a dimension of the node's tensor, None where the size is a number."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else ()
    return [str(size) if isinstance(size, torch.SymInt) else None for size in sizes]


def has_gradient(node: fx.Node) -> bool:
    """Whether the node's value can have one: not integers and truth values."""
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def reads_values(node: fx.Node, operand: fx.Node) -> bool:
    """Whether a gradient can flow from `node` to `operand`."""
    name = op_name(node)
    if name in SHAPE_ONLY | STOPS_GRADIENT or no_grad_region(node) or not has_gradient(node):
        return False
    return not (name in ("expand_as", "view_as", "type_as") and operand is not node.args[0])


def ancestors(roots: Iterable[fx.Node], last: Container[fx.Node] = ()) -> set[fx.Node]:
    """`roots` and every node that a gradient of them reaches, no further than `last`: the graph behind the losses."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in last:
            stack += [operand for operand in node.all_input_nodes if reads_values(node, operand)]
    return seen


def use_edges(graph: fx.Graph, label: Mapping[fx.Node, Label], outputs: Iterable[fx.Node]) -> list[Edge]:
    """Every edge from PURE to an activation behind the outputs, in graph order; an output that is PURE itself is an
    edge to itself."""
    outputs = list(outputs)
    behind = ancestors(outputs)
    return [(node, node) for node in outputs if label[node] is Label.PURE] + [
        (operand, node)
        for node in graph.nodes
        if label[node].activation and node in behind
        for operand in node.all_input_nodes
        if label[operand] is Label.PURE and reads_values(node, operand)
    ]


def parameters_behind(
    node: fx.Node, label: Mapping[fx.Node, Label], pieces: Mapping[fx.Node, Iterable[str]] = MappingProxyType({})
) -> set[str]:
    """Canonical names of all parameters a PURE node is computed from; of nodes that are made of pieces, the pieces."""
    reached = ancestors([node], pieces)
    names = {str(n.target) for n in reached if n.op == "get_attr" and label[n] is Label.PURE and n not in pieces}
    return names.union(*(pieces[n] for n in reached if n in pieces))


def bound_parameter(node: fx.Node, shapes: Mapping[str, Shape]) -> tuple[str, Layout] | None:
    """The parameter behind `node` if only invertible views lie between, and the layout they make; else None."""
    chain: list[fx.Node] = []
    while node.op != "get_attr":
        operands = node.all_input_nodes
        if op_name(node) not in VIEWS or not operands or operands[0] is not node.args[0]:
            return None
        chain.append(node)
        node = operands[0]
    if node.target not in shapes:
        return None
    layout = Layout(shapes[str(node.target)])
    for view in reversed(chain):
        step = view_step(view, layout.result)
        if step is None:
            return None
        layout = Layout(layout.shape, (*layout.steps, step)) if step.before != step.after or step.order else layout
    return str(node.target), layout


def view_step(node: fx.Node, before: Shape) -> Step | None:
    """`node` as a Step on a tensor of shape `before`, found by running it without data; None if it does not keep every
    element or needs sizes that only the batch knows."""
    name = op_name(node)
    if name in CASTS:
        return Step(before, before)
    if len(node.all_input_nodes) > 1 or any(isinstance(arg, torch.dtype) for arg in node.args):
        return None
    probe = torch.empty(before, device="meta")
    try:
        result = run(node, probe)
    except (RuntimeError, TypeError, IndexError):
        return None
    if not isinstance(result, Tensor) or result.numel() != probe.numel():
        return None
    if name not in PERMUTES:
        return Step(before, tuple(result.shape))
    distinct = torch.empty(tuple(range(2, len(before) + 2)), device="meta")  # every dimension has its own size
    order = tuple(int(size) - 2 for size in run(node, distinct).shape)
    return Step(before, tuple(result.shape), order)


def run(node: fx.Node, operand: Tensor) -> Any:
    """Apply `node` to `operand` in the place of its first argument."""
    args = (operand, *node.args[1:])
    if node.op == "call_method":
        return getattr(operand, str(node.target))(*args[1:], **node.kwargs)
    assert callable(node.target), "bug in kfac_fx: a view that is neither a function nor a method"
    return node.target(*args, **node.kwargs)
