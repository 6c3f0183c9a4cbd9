"""Products of rows that are sorted by expert with a weight for every expert, in one spelling.

y = grouped_mm(x, w, offs);  f(y)    ->    y = grouped_product(x, w, offs, grouped_mm);  f(counted(y, routed(x, offs)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..layers.experts import grouped_product, routed
from .masks import counted
from .operations import op_name

NAMES = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")  # of torch.nn.functional, of ATen, of transformers


def route(graph: fx.Graph) -> None:
    """See the module's docstring. Left alone with a bias, another type of result, or rows in more dimensions."""
    for node in [one for one in graph.nodes if one.op == "call_function" and op_name(one) in NAMES]:
        given = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs
        given = {name: value for name, value in given.items() if value is not None}
        if set(given) != {"x", "weight", "offs"} or len(node.args) < 2 or dimensions(node.args) not in ((2, 3), None):
            continue
        kernel = one_overload(node.target)
        node.target, node.kwargs = grouped_product, {}
        node.args = (given["x"], given["weight"], given["offs"], kernel)
        with graph.inserting_before(node):  # a tap behind the product reads it
            kept = graph.call_function(routed, (given["x"], given["offs"]))
        with graph.inserting_after(node):
            output = graph.call_function(counted, (node, kept))
        output.meta = dict(node.meta)
        for reader in list(node.users):
            if reader is not output:
                reader.replace_input_with(node, output)


def dimensions(operands: Any) -> tuple[int, ...] | None:
    """Of the tensors; None where the graph does not know."""
    values = [one.meta.get("val") for one in operands[:2]]
    return tuple(one.dim() for one in values) if all(isinstance(one, torch.Tensor) for one in values) else None


def one_overload(target: Any) -> Any:
    """What fx can hold as an argument."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else torch.ops.aten._grouped_mm.default
