"""Fully connected layers that sum over named indices, and those of experts.

    y = torch.einsum("bti,oi->bto", x, w)     cases b, positions t, inputs i, outputs o

The equation says which index is a group, an input, an output or a position.

    y = grouped_mm(x, w, offs); f(y)   ->   y = grouped_product(x, w, offs, grouped_mm); f(counted(y, routed(x, offs)))

In a mixture of experts every expert is a group, and every row, sorted by expert, belongs to one group. `counted` notes
this in the graph: the mean over the inputs of an expert is over its own rows, not over those of all experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..approximations import EVERY_LAYER
from ..graphs.labels import counted
from ..graphs.operations import op_name
from ..ir import Attrs
from ..matrix import Layout, Shape
from ..torch_private import GROUPED_MM, OpOverload, OpOverloadPacket
from .declaration import layer, written
from .linear import linear


@dataclass(frozen=True)
class Contraction:
    """`y = einsum("x,weight->y", ...)`: the indices of the three, and the sizes of the weight's.

    An index of the weight is a group if x and y have it, an input if only x has it, and an output if only y has it. The
    other indices of y are positions; the first of them counts the cases. An index along which the weight has size 1,
    and which x has too, is not counted as the weight's.
    """

    x: str
    weight: str
    y: str
    sizes: Shape

    @property
    def size(self) -> dict[str, int]:
        return {k: n for k, n in zip(self.weight, self.sizes, strict=True) if n != 1 or k not in self.x}

    @property
    def groups(self) -> list[str]:
        return [k for k in self.size if k in self.x and k in self.y]

    @property
    def inputs(self) -> list[str]:
        return [k for k in self.size if k not in self.y]

    @property
    def outputs(self) -> list[str]:
        return [k for k in self.size if k not in self.x]

    def linear(self) -> bool:
        """Whether y is a linear map of x by a matrix that holds every element of the weight once."""
        sides = [side.replace("...", "") for side in (self.x, self.weight, self.y)]
        repeated = any(len(set(side)) < len(side) for side in sides)
        summed = set(self.weight) - set(self.x + self.y)
        return not repeated and not summed and "..." not in self.weight

    def rows(self, x: Tensor) -> Tensor:
        """[N, S, g, i]"""
        return self.split(x, self.x, self.inputs)

    def grad_rows(self, y: Tensor) -> Tensor:
        """[N, S, g, o]"""
        return self.split(y, self.y, self.outputs)

    def split(self, tensor: Tensor, indices: str, columns: Sequence[str]) -> Tensor:
        last = [*self.groups, *columns]
        first = "".join(k for k in self.y if k not in self.size)
        tensor = torch.einsum(f"{indices}->{first}{''.join(last)}", tensor)
        positions = tensor.shape[: tensor.dim() - len(last)] or (1,)
        groups, width = math.prod([self.size[k] for k in self.groups]), math.prod([self.size[k] for k in columns])
        tensor = tensor.expand(*positions, *(self.size[k] for k in last))  # x may be broadcast against the weight
        return tensor.reshape(positions[0], math.prod(positions[1:]), groups, width)

    def weight_layout(self, weight: Layout) -> Layout:
        return weight.rearrange(f"{spaced(k if k in self.size else '1' for k in self.weight)} -> {self.matrix(True)}")

    def bias_layout(self, bias: Layout) -> Layout:
        indices = [k for k in self.y if k in self.groups + self.outputs]
        sizes = tuple(self.size[k] for k in indices)
        return bias.reshape(sizes).rearrange(f"{spaced(indices)} -> {self.matrix(False)}")

    def matrix(self, inputs: bool) -> str:
        parts = [self.groups, self.outputs, self.inputs] if inputs else [self.groups, self.outputs]
        return " ".join(f"({spaced(part)})" for part in parts)

    def takes(self, bias: Shape) -> bool:
        """Whether y + bias is one layer: the bias varies along all groups and outputs, and along no positions."""
        last = self.y.rpartition("...")[2]
        varying = self.groups + self.outputs
        shape = tuple(self.size[k] if k in varying else 1 for k in last)
        return set(varying) <= set(last) and len(bias) <= len(last) and (1,) * (len(last) - len(bias)) + bias == shape


def spaced(names: Any) -> str:
    return " ".join(names)


def contraction(attrs: Attrs, weight_first: bool) -> Contraction:
    """The contraction of the attribute `equation`. Without an arrow, y has the indices that occur once, in order."""
    terms, arrow, y = attrs["equation"].replace(" ", "").partition("->")
    first, second = terms.split(",")
    if not arrow:
        y = "..." * ("..." in terms) + "".join(sorted(k for k in terms if k.isalpha() and terms.count(k) == 1))
    x, weight = (second, first) if weight_first else (first, second)
    return Contraction(x, weight, y, attrs["weight"])


def as_einsum(weight_first: bool) -> dict[str, Any]:
    """The arguments of `layer` for a form with an attribute `equation`."""

    def parts(attrs: Attrs) -> Contraction:
        return contraction(attrs, weight_first)

    def where(attrs: Attrs) -> bool:
        terms = parts(attrs)
        return terms.linear() and ("bias" not in attrs or terms.takes(attrs["bias"]))

    return {
        "rows": lambda x, attrs: parts(attrs).rows(x),
        "grad_rows": lambda dy, attrs: parts(attrs).grad_rows(dy),
        "layouts": {
            "weight": lambda weight, attrs: parts(attrs).weight_layout(weight),
            "bias": lambda bias, attrs: parts(attrs).bias_layout(bias),
        },
        "where": where,
        "leading": False,
    }


@linear.form(
    **as_einsum(weight_first=False),
    example=(
        written(lambda x, w: torch.einsum("bti,oi->bto", x, w), (4, 7, 5), w=(3, 5)),
        written(lambda x, w: torch.einsum("b t d, d h k -> b h t k", x, w), (4, 7, 5), w=(5, 2, 3)),
        written(lambda x, w: torch.einsum("...hi,hio->...ho", x, w), (4, 7, 2, 5), w=(2, 5, 3)),
        written(lambda x, w: torch.einsum("bnhk,khd->bnd", x, w), (4, 7, 2, 3), w=(3, 2, 5)),
        written(lambda x, w: torch.einsum("bi,io", x, w), (4, 5), w=(5, 3)),
        written(lambda x, w: torch.einsum("bsi,io->bo", x, w), (4, 7, 5), w=(5, 3)),
        written(lambda x, w: torch.einsum("btd,d->btd", x, w), (4, 7, 5), w=(5,)),
        written(lambda x, w: torch.einsum("bhi,hio->bho", x, w), (4, 2, 5), w=(1, 5, 3)),
        written(lambda x, w: torch.einsum("bhi,hio->bho", x, w), (4, 1, 5), w=(2, 5, 3)),
    ),
)
def einsum(x: Tensor, equation: str, *, weight: Tensor) -> Tensor:
    return torch.einsum(equation, x, weight)


@linear.form(
    **as_einsum(weight_first=False),
    example=(
        written(lambda x, w, b: torch.einsum("btd,dhk->bhtk", x, w) + b, (4, 7, 5), w=(5, 2, 3), b=(2, 1, 3)),
        written(lambda x, w, b: torch.einsum("...i,oi->...o", x, w) + b, (4, 7, 5), w=(3, 5), b=(3,)),
    ),
)
def einsum_and_bias(x: Tensor, equation: str, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum(equation, x, weight) + bias


@linear.form(
    **as_einsum(weight_first=True),
    example=(
        written(lambda x, w: torch.einsum("oi,nij->noj", w, x), (4, 5, 7), w=(3, 5)),
        written(lambda x, w: torch.einsum("hdk,nthk->ntd", w, x), (4, 7, 2, 5), w=(2, 3, 5)),
    ),
)
def einsum_from_left(x: Tensor, equation: str, *, weight: Tensor) -> Tensor:
    return torch.einsum(equation, weight, x)


@linear.form(
    **as_einsum(weight_first=True),
    example=written(lambda x, w, b: torch.einsum("oi,nij->noj", w, x) + b, (4, 5, 7), w=(3, 5), b=(3, 1)),
)
def einsum_from_left_and_bias(x: Tensor, equation: str, *, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum(equation, weight, x) + bias


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
