"""Rows of a use whose parameter is a vector of elements: the gradients of whole cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes.matrix import Layout
from kfac_fx.passes.words.uses import JACOBIAN
from kfac_fx.statistics.row_sums import named
from kfac_fx.taps.sloped import views

Rows = tuple[Tensor, Tensor]  # and gradient rows


def of_cases(layout: Layout) -> Callable[[Rows, Mapping[str, Any]], Rows]:
    """(rows, gradient rows) -> rows of ones and gradients, [N, 1, elements, 1] both.

    layout: from the tensor in the use to its matrix [g, o, i], or [g, o] of a bias. Among the attributes is the
    Jacobian [elements of that tensor, elements of the parameter], if the one is not the other.
    """
    result, back = layout.result, views(layout, Layout(layout.shape))
    bias, matrix = len(result) == 2, (result[0], result[1], (*result, 1)[2])

    def flat(both: Rows, attrs: Mapping[str, Any]) -> Rows:
        rows, grad_rows = both
        if bias:
            rows = (rows if rows.is_floating_point() else grad_rows)[..., :0]
        gradients = named("per_case").compute(rows, grad_rows, bias, matrix)
        cases = gradients.shape[0]
        gradients = gradients.view(cases, *result)
        for order, shape in back:
            front = (0, *(dim + 1 for dim in order))
            gradients = gradients.permute(front) if order else gradients.reshape(cases, *shape)
        gradients = gradients.reshape(cases, -1)
        if JACOBIAN in attrs:
            gradients = gradients @ attrs[JACOBIAN].to(gradients)
        gradients = gradients[:, None, :, None]
        return torch.ones_like(gradients), gradients

    return flat
