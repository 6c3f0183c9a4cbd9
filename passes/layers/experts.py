"""Mixtures of experts: a fully connected layer for every expert, applied to the rows that are sorted by expert.

    y = grouped_mm(x, w, offs); f(y)   ->   y = grouped_product(x, w, offs, grouped_mm); f(counted(y, routed(x, offs)))

Every expert is a group, and every row belongs to one group. `counted` notes this in the graph: the mean over the inputs
of an expert is over its own rows, not over those of all experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..approximations import EVERY_LAYER
from ..graphs.labels import counted
from ..graphs.operations import op_name
from ..ir import Attrs
from ..torch_private import GROUPED_MM, OpOverload, OpOverloadPacket
from .declaration import layer

GROUPED_MM_NAMES = ("grouped_mm", GROUPED_MM, "grouped_mm_fallback")  # of torch.nn.functional, of ATen, of transformers


def route(graph: fx.Graph) -> None:
    """Bring products of experts to one spelling; see the module's docstring.

    Those with a bias, another type of result, or rows in more dimensions stay as they are.
    """
    for node in [node for node in graph.nodes if node.op == "call_function" and op_name(node) in GROUPED_MM_NAMES]:
        operands = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False)) | node.kwargs
        operands = {name: value for name, value in operands.items() if value is not None}
        if operands.keys() != {"x", "weight", "offs"} or len(node.args) < 2:
            continue
        if dimensions(node.args) not in ((2, 3), None):
            continue
        kernel = one_overload(node.target)
        node.target, node.kwargs = grouped_product, {}
        node.args = (operands["x"], operands["weight"], operands["offs"], kernel)
        with graph.inserting_before(node):  # a tap behind the product reads it
            membership = graph.call_function(routed, (operands["x"], operands["offs"]))
        with graph.inserting_after(node):
            output = graph.call_function(counted, (node, membership))
        output.meta = dict(node.meta)
        for reader in list(node.users):
            if reader is not output:
                reader.replace_input_with(node, output)


def dimensions(operands: Any) -> tuple[int, ...] | None:
    """The numbers of dimensions of x and weight; None if the graph has no sizes."""
    values = [operand.meta.get("val") for operand in operands[:2]]
    return tuple(value.dim() for value in values) if all(isinstance(value, Tensor) for value in values) else None


def one_overload(target: Any) -> Any:
    """The kernel as an object that fx can hold as an argument."""
    if isinstance(target, OpOverload):
        return target
    return target.default if isinstance(target, OpOverloadPacket) else getattr(torch.ops.aten, GROUPED_MM).default


@fx.wrap
def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor, kernel: Any) -> Tensor:
    """x [S, i], sorted by expert, times weight [g, i, o] -> [S, o].

    Args:
        offsets: [g], where the rows of each expert end.
        kernel: the operation of torch or of the user's library that computes the product.
    """
    product: Tensor = kernel(x, weight, offs=offsets)
    return product


def routed(rows: Tensor, offsets: Tensor) -> Tensor:
    """Which of the rows [S, ...] belong to which group: [S, 1, g]. Rows behind the last offset belong to none."""
    place = torch.arange(rows.shape[0], device=offsets.device).unsqueeze(-1)
    before = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return ((place >= before) & (place < offsets)).unsqueeze(1)


def by_expert(rows: Tensor, attrs: Attrs) -> Tensor:
    """[S, d] -> [S, 1, g, d], zero except in the group that a row belongs to."""
    return torch.where(routed(rows, attrs["offsets"]).unsqueeze(-1), rows[:, None, None], 0)


# --- an example in any precision; torch's own operation has bfloat16 only --------------------------------------------


@torch.library.custom_op("kfac_fx::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return torch.einsum("sgi,gio->so", by_expert(x, {"offsets": offs})[:, 0], weight)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, offs = ctx.saved_tensors
    rows, grad_rows = (by_expert(tensor, {"offsets": offs})[:, 0] for tensor in (x, grad))
    return torch.einsum("sgo,gio->si", grad_rows, weight), torch.einsum("sgi,sgo->gio", rows, grad_rows), None


grouped_mm.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Experts(nn.Module):
    """Two rows for the first expert, none for the second, three for the third, and one row for no expert."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.randn(3, 2, 4) if transposed else torch.randn(3, 4, 2))
        self.register_buffer("offsets", torch.tensor([2, 2, 5]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.mT if self.transposed else self.weight
        product: Tensor = torch.ops.kfac_fx.grouped_mm(x, weight, self.offsets)
        return product


@layer(
    rows=by_expert,
    grad_rows=by_expert,
    layouts={"weight": "g i o -> g o i"},
    approximations=EVERY_LAYER,
    example=(lambda: (Experts(False), torch.randn(6, 4)), lambda: (Experts(True), torch.randn(6, 4))),
)
def experts(x: Tensor, offsets: Tensor, kernel: Any, *, weight: Tensor) -> Tensor:
    return grouped_product(x, weight, offsets, kernel)
