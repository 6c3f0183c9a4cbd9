"""Fully connected layers that `einsum` writes.

    y = torch.einsum("bti,oi->bto", x, w)     cases b, positions t, inputs i, outputs o

The equation says which index is a group, an input, an output or a position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ir import Attrs
from ..matrix import Layout, Shape
from .declaration import written
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
