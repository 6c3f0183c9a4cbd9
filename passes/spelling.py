"""The one spelling of every operation, and how others are brought to it. Shared by the model's graph and the forms.

Operations that layers and losses are made of get all their arguments, by position; others lose arguments that equal
their defaults. Values never change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .labels import CASTS, Label, changes_memory, labels, op_name

REQUIRED = object()
SPELLED_OUT: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    # canonical name: (function, {parameter: default}) in the function's own order
    "linear": (F.linear, {"input": REQUIRED, "weight": REQUIRED, "bias": None}),
    "embedding": (
        F.embedding,
        {
            "input": REQUIRED, "weight": REQUIRED, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
            "scale_grad_by_freq": False, "sparse": False,
        },
    ),
    "embedding_bag": (
        torch.embedding_bag,
        {
            "weight": REQUIRED, "indices": REQUIRED, "offsets": REQUIRED, "scale_grad_by_freq": False, "mode": 0,
            "sparse": False, "per_sample_weights": None, "include_last_offset": False, "padding_idx": None,
        },
    ),
    "layer_norm": (
        F.layer_norm,
        {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "rms_norm": (F.rms_norm, {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "eps": None}),
    "group_norm": (
        F.group_norm,
        {"input": REQUIRED, "num_groups": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "batch_norm": (
        F.batch_norm,
        {
            "input": REQUIRED, "running_mean": REQUIRED, "running_var": REQUIRED, "weight": None, "bias": None,
            "training": False, "momentum": 0.1, "eps": 1e-5,
        },
    ),
    "instance_norm": (
        F.instance_norm,
        {
            "input": REQUIRED, "running_mean": None, "running_var": None, "weight": None, "bias": None,
            "use_input_stats": True, "momentum": 0.1, "eps": 1e-5,
        },
    ),
    "addmm": (torch.addmm, {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED}),
    "matmul": (torch.matmul, {"input": REQUIRED, "other": REQUIRED}),
    "cross_entropy": (
        F.cross_entropy,
        {
            "input": REQUIRED, "target": REQUIRED, "weight": None, "size_average": None, "ignore_index": -100,
            "reduce": None, "reduction": "mean", "label_smoothing": 0.0,
        },
    ),
    "mse_loss": (
        F.mse_loss,
        {
            "input": REQUIRED, "target": REQUIRED, "size_average": None, "reduce": None, "reduction": "mean",
            "weight": None,
        },
    ),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        {
            "input": REQUIRED, "target": REQUIRED, "weight": None, "size_average": None, "reduce": None,
            "reduction": "mean", "pos_weight": None,
        },
    ),
}  # fmt: skip
for _kind in ("conv1d", "conv2d", "conv3d"):
    _rest = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    SPELLED_OUT[_kind] = (getattr(F, _kind), {"input": REQUIRED, "weight": REQUIRED, **_rest})
    _rest = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    _name = _kind.replace("conv", "conv_transpose")
    SPELLED_OUT[_name] = (getattr(F, _name), {"input": REQUIRED, "weight": REQUIRED, **_rest})

# ATen's own order of arguments, where it is another than the function's
ATEN_ORDER: dict[str, tuple[str, ...]] = {
    "embedding": ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"),
    "batch_norm": (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled",
    ),
    "instance_norm": (
        "input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps", "cudnn_enabled",
    ),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    "cross_entropy": ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing"),
    "mse_loss": ("input", "target", "reduction"),
    "binary_cross_entropy_with_logits": ("input", "target", "weight", "pos_weight", "reduction"),
}  # fmt: skip
RENAMED = {
    "cross_entropy_loss": "cross_entropy", "mm": "matmul", "bmm": "matmul", "mv": "matmul", "__matmul__": "matmul",
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "truediv": "div",
}  # fmt: skip
REDUCTIONS = ("none", "mean", "sum")
COMMUTATIVE = {"add", "mul"}
SHARES_MEMORY = {
    "view", "reshape", "transpose", "permute", "t", "T", "mT", "select", "slice", "narrow", "getitem", "squeeze",
    "unsqueeze", "expand", "chunk", "split", "unbind", "flatten", "alias", "detach", "diagonal", "unflatten", "view_as",
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
    order = {node: i for i, node in enumerate(graph.nodes)}
    label = labels(graph, ())
    for node in list(graph.nodes):
        name = RENAMED.get(op_name(node), op_name(node))
        wants = name in INPLACE or node.kwargs.get("inplace") is True
        if not wants or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        operand = node.args[0]
        if label[operand] is not Label.ACT or seen_elsewhere(node, operand, order):
            continue
        if node.kwargs.get("inplace") is True:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        else:
            node.op, node.target = "call_function", pure_twin(name.removesuffix("_"))
        for user in list(operand.users):
            if user is not node and order[user] > order[node]:
                user.replace_input_with(operand, node)


def seen_elsewhere(node: fx.Node, operand: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether what `node` does to the memory of `operand` is seen later through another view of it."""
    others = [base := memory(operand)]
    for other in others:
        views = [user for user in other.users if shares_memory(user) and user.args[0] is other and user not in others]
        others += [view for view in views if other is not operand or order[view] < order[node]]
    later = [user for other in others if other is not operand for user in other.users if order[user] > order[node]]
    return base.op == "get_attr" or any(user is not node for user in later)


def memory(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is a view of: itself if it has its own."""
    while shares_memory(node):
        node = node.args[0]  # type: ignore[assignment]  # shares_memory says that it is a node
    return node


def shares_memory(node: fx.Node) -> bool:
    """Whether the node may be a view of its first argument; the result of an in-place operation is one."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return op_name(node) in SHARES_MEMORY | CASTS or changes_memory(node)


def pure_twin(name: str) -> Callable[..., Any]:
    found = getattr(torch, name, None) or getattr(F, name, None)
    assert callable(found), f"bug in kfac_fx: {name}_ has no pure twin"
    return found  # type: ignore[no-any-return]


def respell(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = RENAMED.get(op_name(node), op_name(node))
        if name in SPELLED_OUT and node.target is not F.embedding_bag:  # whose arguments are not torch.embedding_bag's
            spell_out(node, name)
        elif name == "einsum":
            spell_einsum(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            respell_aten(node, node.target, name)
        elif node.op == "call_method" or node.target is not getattr:
            respell_python(node, name)


IGNORED = {"inplace": False, "_stacklevel": 3}  # arguments of functions of torch.nn.functional that say nothing


def respell_python(node: fx.Node, name: str) -> None:
    """`x.mean(1)`, `operator.add(x, y)`, `F.softmax(x, dim=1)` -> the function of `torch` that ATen's name gives."""
    function = public(name)
    kwargs = {key: value for key, value in node.kwargs.items() if (key, value) not in IGNORED.items()}
    if function is None or function is node.target:
        return
    accepted = {argument.name for one in overloads(name) for argument in one._schema.arguments}
    if kwargs.keys() <= accepted:
        node.op, node.target, node.kwargs = "call_function", function, kwargs


def public(name: str) -> Callable[..., Any] | None:
    """The built-in function with the very arguments of the ATen operation `name`: `torch.relu`, `torch.fft.rfft`."""
    if not hasattr(torch.ops.aten, name):
        return None
    space, _, rest = name.partition("_")
    homes = [(torch, name), (getattr(torch, space, None), rest), (F, name)]
    found = (getattr(home, inner, None) for home, inner in homes if home is not None and inner)
    return next((one for one in found if inspect.isbuiltin(one)), None)


def overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def respell_aten(node: fx.Node, overload: torch._ops.OpOverload, name: str) -> None:
    """`aten.mean.dim(x, [1], False)` -> `torch.mean(x, [1])`; operations without such a function stay."""
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    args = list(node.args)
    while args and len(args) <= len(positional) and has_default(positional[len(args) - 1], args[-1]):
        args.pop()
    function = public(name)
    if function is not None:
        node.target, node.args = function, tuple(args)


def has_default(argument: Any, value: Any) -> bool:
    return bool(argument.has_default_value()) and not isinstance(value, fx.Node) and value == argument.default_value


def spell_einsum(node: fx.Node) -> None:
    """`einsum(equation, x, w)`, whichever way the operands were handed over."""
    equation, *operands = node.args
    flat = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    node.op, node.target, node.args, node.kwargs = "call_function", torch.einsum, (equation, *flat), {}


def spell_out(node: fx.Node, name: str) -> None:
    function, defaults = SPELLED_OUT[name]
    aten = isinstance(node.target, torch._ops.OpOverload)
    order = ATEN_ORDER.get(name, tuple(defaults)) if aten else tuple(defaults)
    given: dict[str, Any] = dict(zip(order, node.args, strict=False))
    for key, value in node.kwargs.items():
        given["input" if key == "self" else key] = value
    unknown = {key for key in given if key not in defaults and key not in ("cudnn_enabled", "cudnn_enable")}
    if unknown or any(key not in given for key, value in defaults.items() if value is REQUIRED):
        return  # addmm with beta or alpha, and the like: not the operation that the layers declare
    if isinstance(given.get("reduction"), int):
        given["reduction"] = REDUCTIONS[given["reduction"]]
    if name == "embedding" and given.get("padding_idx") == -1 and aten:
        given["padding_idx"] = None  # ATen writes "none" as -1
    node.op, node.target = "call_function", function
    node.args = tuple(given.get(key, value) for key, value in defaults.items())
    node.kwargs = {}


def order_operands(graph: fx.Graph, parameters: Iterable[str], pure: Iterable[fx.Node] = ()) -> None:
    """In sums and products: what depends on the batch, then what depends on parameters, then constants, numbers."""
    label = labels(graph, parameters, pure)
    order = (Label.ACT, Label.PURE, Label.CONST)

    def rank(operand: Any) -> int:
        return order.index(label[operand]) if isinstance(operand, fx.Node) else len(order)

    for node in graph.nodes:
        if op_name(node) in COMMUTATIVE and len(node.args) == 2 and not node.kwargs:
            node.args = tuple(sorted(node.args, key=rank))
