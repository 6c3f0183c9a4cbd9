"""Layers as ATen itself writes them, in graphs of `run_decompositions` and of traces below autograd: one function for
all dimensions, statistics of a norm beside its result.

native_layer_norm(x, [8], w, b, 1e-05)[0]                          ->   F.layer_norm(x, [8], w, b, 1e-05)
convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)     ->   F.conv2d(x, w, b, [1, 1], [0, 0], [1, 1], 1)

Where a backward reads the statistics, which then depend on what the norm is applied to, it is left as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import fx

from .operations import op_name

Spelled = tuple[Callable[..., Any], tuple[Any, ...]]
NEW_STATISTICS = (3, 4)  # among the results of a batch norm that returns what its buffers become


def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Spelled:
    return F.layer_norm, (x, shape, weight, bias, eps)


def group_norm(x: Any, weight: Any, bias: Any, cases: Any, channels: Any, pixels: Any, groups: int, eps: float) -> Any:
    return F.group_norm, (x, groups, weight, bias, eps)


def batch_norm(x: Any, weight: Any, bias: Any, *rest: Any) -> Spelled:
    mean, var, training, momentum, eps = rest if len(rest) == 5 else (None, None, *rest)
    return F.batch_norm, (x, mean, var, weight, bias, training, momentum, eps)


def by_running(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Spelled:
    return F.batch_norm, (x, mean, var, weight, bias, False, momentum, eps)


def by_batch(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    """What of the functional form is no statistic."""
    kept = (None, None) if training else (mean, var)
    return F.batch_norm, (x, *kept, weight, bias, training, momentum, eps)


NORMS: dict[str, Callable[..., Spelled]] = {
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    "native_batch_norm": batch_norm,
    "_native_batch_norm_legit": batch_norm,
    "_native_batch_norm_legit_no_training": by_running,
    "_native_batch_norm_legit_functional": by_batch,
}
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def spell_native(graph: fx.Graph) -> None:
    """See the module's docstring; values never change."""
    for node in list(graph.nodes):
        name = op_name(node)
        if node.kwargs or node.op != "call_function":
            continue
        if name == "convolution" and len(node.args) == 9:
            spell_convolution(node, *node.args)
        elif name in NORMS:
            spell_norm(graph, node, NORMS[name])


def spell_convolution(
    node: fx.Node, x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, more: Any, g: Any
) -> None:
    dims = len(stride)
    if not 1 <= dims <= 3 or (any(more) and not transposed):
        return
    node.target = (TRANSPOSED if transposed else CONVOLUTIONS)[dims - 1]
    node.args = (x, w, b, stride, padding, more, g, dilation) if transposed else (x, w, b, stride, padding, dilation, g)


def spell_norm(graph: fx.Graph, node: fx.Node, spelled: Callable[..., Spelled]) -> None:
    reads = [user for user in node.users if user.target is operator.getitem]
    functional = spelled is by_batch
    known = (0, *NEW_STATISTICS) if functional else (0,)
    if len(reads) < len(node.users) or any(user.args[1] not in known for user in reads):
        return
    first = [user for user in reads if user.args[1] == 0]
    if not first:
        return
    with graph.inserting_before(node):
        function, args = spelled(*node.args)
        made = graph.call_function(function, args)
    made.meta = {**node.meta, "val": first[0].meta["val"]} if "val" in first[0].meta else dict(node.meta)
    for user in first:
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    if len(first) == len(reads):
        graph.erase_node(node)
    else:  # the running statistics do not depend on gain and shift
        node.args = (node.args[0], None, None, *node.args[3:])
