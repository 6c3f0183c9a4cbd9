"""Operations by their names, whichever way they are spelled, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import fx

SHAPE_ONLY = {  # read the size, the dtype or the device of their operands, never the values
    "size", "dim", "numel", "shape", "ndim", "dtype", "device", "sym_size", "sym_numel", "sym_stride",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "_assert_tensor_metadata", "_assert", "numbered",
}  # fmt: skip
STOPS_GRADIENT = {
    "detach", "detach_", "data", "argmax", "argmin", "argsort", "item", "long", "int", "bool", "sign", "round",
    "floor", "ceil", "gt", "lt", "ge", "le", "eq", "ne", "isnan", "isfinite", "isinf", "logical_not", "logical_and",
    "logical_or", "jacobian",
}  # fmt: skip
NO_GRADIENT = SHAPE_ONLY | STOPS_GRADIENT
RANDOM = {  # beside the ATen operations, which say so themselves
    "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax", "multi_head_attention_forward",
    "fractional_max_pool2d", "fractional_max_pool3d", "wrap_with_set_grad_enabled", "wrap_with_autocast",
    "tag_activation_checkpoint", "own_backward",
}  # fmt: skip
OWN_BACKWARD = "own_backward"  # a user's autograd.Function; the operands that are no arguments have no gradient
AUTOCAST = "wrap_with_autocast"  # a region that torch.export keeps as a graph of its own
IN_PLACE = {  # Python's operators, whose names do not say it
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem",
}  # fmt: skip
DATA_FIRST = {  # what their first argument is to a layer no parameter can be
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "layer_norm", "rms_norm", "group_norm",
}  # fmt: skip
EXPANDS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
CASTS = {"to", "float", "double", "half", "bfloat16", "type", "_to_copy", "contiguous", "clone", "alias"}
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
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
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
    schemas = [each._schema for each in overloads(name)]
    ends = [
        (one.arguments[0].alias_info, one.returns[0].alias_info) for one in schemas if one.arguments and one.returns
    ]
    return any(given is not None and made is not None and not given.is_write for given, made in ends)


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """Of ATen's operation of this name; none if there is no such operation."""
    packet = getattr(torch.ops.aten, name, None)
    known = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return [getattr(packet, each) for each in known]


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
