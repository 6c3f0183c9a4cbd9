"""Numbers that forward writes as tensors: `x * torch.tensor(0.5)` is `x * 0.5`, bit for bit."""

from __future__ import annotations

from torch import Tensor, fx, nn

from .holder import attribute
from .operations import op_name

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
