"""Operations by their names, whichever way they are spelled, and what is known of them.

The arguments of the operations that layers and losses are made of, in the functions' order and in ATen's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..torch_private import (
    ASSERT,
    ASSERT_METADATA,
    AUTOCAST_REGION,
    CHECKPOINT_REGION,
    NO_GRAD_REGION,
    REGION,
    TO_COPY,
    OpOverload,
    OpOverloadPacket,
    schema,
)

SHAPE_ONLY = {  # read the size, the dtype or the device of their operands, never the values
    "size", "dim", "numel", "shape", "ndim", "dtype", "device", "sym_size", "sym_numel", "sym_stride",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full", ASSERT_METADATA, ASSERT, "numbered",
}  # fmt: skip
STOPS_GRADIENT = {
    "detach", "detach_", "data", "argmax", "argmin", "argsort", "item", "long", "int", "bool", "sign", "round",
    "floor", "ceil", "gt", "lt", "ge", "le", "eq", "ne", "isnan", "isfinite", "isinf", "logical_not", "logical_and",
    "logical_or",
}  # fmt: skip
NO_GRADIENT = SHAPE_ONLY | STOPS_GRADIENT
RANDOM = {  # beside the ATen operations, which say so themselves
    "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax", "multi_head_attention_forward",
    "fractional_max_pool2d", "fractional_max_pool3d", NO_GRAD_REGION, AUTOCAST_REGION,
    CHECKPOINT_REGION, "own_backward",
}  # fmt: skip
OWN_BACKWARD = "own_backward"  # a user's autograd.Function; the operands that are no arguments have no gradient
IN_PLACE = {  # Python's operators, whose names do not say it
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem",
}  # fmt: skip
DATA_FIRST = {  # what their first argument is to a layer no parameter can be
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "layer_norm", "rms_norm", "group_norm",
}  # fmt: skip
EXPANDS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
CASTS = {"to", "float", "double", "half", "bfloat16", "type", TO_COPY, "contiguous", "clone", "alias"}
PARTS = {"select", "slice", "narrow", "getitem", "split", "split_with_sizes", "chunk", "unbind"}
PERMUTES = {"t", "T", "mT", "transpose", "swapaxes", "permute", "numpy_T", "movedim"}
SIZED_BY_CASES = (
    "sized by cases"  # in the meta of a node of a graph that knows no sizes: whether its own goes with them
)
LOOKUPS = {"embedding", "index", "index_select"}
LOOKED_UP = "looked up"  # in the meta of a node: it is an embedding's whatever becomes of it, as a layer's of data
VIEWS = CASTS | PERMUTES | {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"}


def op_name(node: fx.Node) -> str:
    """The operation without its spelling: `aten.add.Tensor`, `torch.add`, `operator.add`, `x.add` are all "add"."""
    return str(node.args[1]) if node.target is getattr else name_of(node.target)


def computed(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the node's operation makes of these arguments in the place of its own."""
    method = node.op == "call_method"
    function: Any = getattr(args[0], str(node.target)) if method else node.target
    return function(*args[method:], **kwargs)


@lru_cache(maxsize=10_000)
def name_of(target: Any) -> str:
    """Of the target of a node."""
    if isinstance(target, OpOverload):
        return str(schema(target).name).split("::")[-1]
    return str(getattr(target, "__name__", target))


def is_random(node: fx.Node) -> bool:
    """Whether running the node may draw from the global random stream."""
    return draws(op_name(node))


@cache
def draws(name: str) -> bool:
    known = overloads(name) or overloads(name.rstrip("_"))
    return name.rstrip("_") in RANDOM or any(torch.Tag.nondeterministic_seeded in each.tags for each in known)


@cache
def returns_view(name: str) -> bool:
    """Whether ATen says of an operation that it returns what is in the memory of its first argument."""
    schemas = [schema(each) for each in overloads(name)]
    ends = [
        (one.arguments[0].alias_info, one.returns[0].alias_info) for one in schemas if one.arguments and one.returns
    ]
    return any(given is not None and made is not None and not given.is_write for given, made in ends)


def overloads(name: str) -> list[OpOverload]:
    """Of ATen's operation of this name; none if there is no such operation."""
    packet = getattr(torch.ops.aten, name, None)
    known = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    return [getattr(packet, each) for each in known]


def changes_memory(node: fx.Node) -> bool:
    """Whether the node writes into its first argument."""
    name = op_name(node)
    return name in IN_PLACE or name.endswith("_") and not name.endswith("__") or node.kwargs.get("inplace") is True


def has_effect(node: fx.Node) -> bool:
    """Whether a node does more than compute its value: inputs, outputs, updates of buffers, random numbers that nothing
    reads but that move the stream."""
    known = node.op in ("placeholder", "output") or op_name(node).startswith(REGION)
    return known or changes_memory(node) or is_random(node)


def no_grad_region(node: fx.Node) -> bool:
    return op_name(node) == NO_GRAD_REGION and not node.args[0]


# --- signatures -------------------------------------------------------------------------------------------------------


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
    "bilinear": (F.bilinear, {"input1": REQUIRED, "input2": REQUIRED, "weight": REQUIRED, "bias": None}),
    "addmm": (torch.addmm, {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED}),
    "addbmm": (torch.addbmm, {"input": REQUIRED, "batch1": REQUIRED, "batch2": REQUIRED}),
    "baddbmm": (torch.baddbmm, {"input": REQUIRED, "batch1": REQUIRED, "batch2": REQUIRED}),
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
