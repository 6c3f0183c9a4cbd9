"""Products of rows that are sorted by expert with a weight for every expert, in one spelling.

y = grouped_mm(x, w, offs);  f(y)    ->    y = grouped_product(x, w, offs, grouped_mm);  f(counted(y, routed(x, offs)))

Mixtures of experts: a fully connected layer for every expert, each for rows of its own.

Every expert is a group, and every row is in one group only: as `counted` says in the graph, for the number of rows of a
group, and not of all groups, is what its mean input is a mean over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..approximations import EVERY_LAYER
from ..graphs.operations import op_name
from ..graphs.sizes import counted
from ..ir import Attrs
from ..torch_private import GROUPED_MM, OpOverload, OpOverloadPacket
from .declaration import layer

NAMES = ("grouped_mm", GROUPED_MM, "grouped_mm_fallback")  # of torch.nn.functional, of ATen, of transformers


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
    if isinstance(target, OpOverload):
        return target
    return target.default if isinstance(target, OpOverloadPacket) else getattr(torch.ops.aten, GROUPED_MM).default


# --- experts ----------------------------------------------------------------------------------------------------------


@fx.wrap
def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor, kernel: Any) -> Tensor:
    """x [S, i], sorted by expert, times weight [g, i, o] -> [S, o]; offsets [g]: where the rows of an expert end.

    kernel: the operation of torch, or of the user's library, that does it.
    """
    product: Tensor = kernel(x, weight, offs=offsets)
    return product


def routed(rows: Tensor, offsets: Tensor) -> Tensor:
    """Which of `rows` [S, ...] belong to which group: [S, 1, g]. What is behind the last offset belongs to none."""
    place = torch.arange(rows.shape[0], device=offsets.device).unsqueeze(-1)
    before = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return ((place >= before) & (place < offsets)).unsqueeze(1)


def by_expert(rows: Tensor, attrs: Attrs) -> Tensor:
    """[S, d] -> [S, 1, g, d], zero but in the group that a row belongs to."""
    return torch.where(routed(rows, attrs["offsets"]).unsqueeze(-1), rows[:, None, None], 0)


# --- an example in any precision, which torch's own operation is not -------------------------------------------------


@torch.library.custom_op("kfac_fx::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return torch.einsum("sgi,gio->so", by_expert(x, {"offsets": offs})[:, 0], weight)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, offs = ctx.saved_tensors
    rows, grad_rows = (by_expert(one, {"offsets": offs})[:, 0] for one in (x, grad))
    return torch.einsum("sgo,gio->si", grad_rows, weight), torch.einsum("sgi,sgo->gio", rows, grad_rows), None


grouped_mm.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Experts(nn.Module):
    """Two rows of the first expert, none of the second, three of the third, and the last of no expert."""

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
