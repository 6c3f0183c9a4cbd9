"""Rows of the factors of a product, from those of the product; see `passes.parametrizations.product`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.parametrizations.product import KRON_LEFT, KRON_RIGHT, LEFT, RIGHT, TIMES
from kfac_fx.passes.registration import Factor

Rows = tuple[Tensor, Tensor]
Attrs = Mapping[str, Any]


def factored(factor: Factor) -> Callable[[Rows, Attrs], Rows]:
    """(rows, gradient rows) of W -> those of one of its factors V, [N, S, g, i] and [N, S, g, o].

    The gradient of W is Σ l rᵀ over positions. Of what V meets, from the outside in: C V gives Cᵀ l, V C gives C r; a
    Hadamard product waits for the next of these, which makes a group of every element of the other side. What is
    returned closes over literals only.
    """
    steps, turned = factor.steps, factor.turned

    def found(both: Rows, attrs: Attrs) -> Rows:
        rows, grad_rows = (without_group(one) for one in both)
        left, right = (rows, grad_rows) if turned else (grad_rows, rows)
        times: Tensor | None = None  # a Hadamard product that waits
        for n, (kind, shape, other_turned) in enumerate(steps):
            other = attrs[f"factor{n}"].reshape(shape).to(grad_rows)
            other = other.mT if other_turned else other
            if kind == TIMES:
                times = other if times is None else times * other
            elif kind == LEFT and times is not None:
                left, right, times = groups(left, other.mT, times.mT), right.unsqueeze(-1), None
            elif kind == RIGHT and times is not None:
                left, right, times = left.unsqueeze(-1), groups(right, other, times), None
            elif kind == LEFT:
                left = applied(left, other.mT)
            elif kind == RIGHT:
                right = applied(right, other)
            else:
                left, right = kronecker(left, right, other, kind)
        left, right = (one if one.dim() != 3 else one.unsqueeze(2) for one in (left, right))
        return (left, right) if turned else (right, left)

    return found


def without_group(rows: Tensor) -> Tensor:
    """[N, S, 1, d] -> [N, S, d]; ids as they are."""
    return rows.squeeze(2) if rows.dim() == 4 else rows


def applied(rows: Tensor, matrix: Tensor) -> Tensor:
    """matrix [m, d] times every row."""
    if rows.is_floating_point():
        return rows @ matrix.mT
    return torch.where((rows >= 0).unsqueeze(-1), F.embedding(rows.clamp(min=0), matrix.mT.contiguous()), 0)


def groups(rows: Tensor, matrix: Tensor, times: Tensor) -> Tensor:
    """rows [N, S, d], matrix [m, d], times [e, d] -> Σ_d times[e, d] matrix[m, d] rows[d], [N, S, e, m]."""
    return ((rows.unsqueeze(-2) * matrix) @ times.mT).mT


def kronecker(left: Tensor, right: Tensor, other: Tensor, kind: str) -> Rows:
    """Of a factor V of V ⊗ C, or C ⊗ V: a position for every row of C, or for every column if these are fewer."""
    outputs, inputs = other.shape
    if kind == KRON_LEFT:
        left, right = (one.unflatten(-1, (-1, size)).mT for one, size in ((left, outputs), (right, inputs)))
    else:
        assert kind == KRON_RIGHT, f"bug in kfac_fx: {kind} is no step of a product"
        left, right = (one.unflatten(-1, (size, -1)) for one, size in ((left, outputs), (right, inputs)))
    if outputs <= inputs:  # [N, S, rows of C, i]
        right = other @ right
    else:
        left = other.mT @ left
    return left.flatten(1, 2), right.flatten(1, 2)
