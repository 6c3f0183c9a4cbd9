"""Rows of a use whose parameter is a vector of elements: the gradients of whole cases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kfac_fx.passes.words.matrix import Layout
from kfac_fx.statistics.row_sums import named
from kfac_fx.taps.sloped import views

Flat = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def of_cases(layout: Layout) -> Flat:
    """(rows, gradient rows, Jacobian) -> rows of ones and gradients, [N, 1, elements, 1] both.

    layout: from the tensor in the use to its matrix [g, o, i], or [g, o] of a bias. The Jacobian, [elements of that
    tensor, elements of the parameter], is of the one by the other, if they are not the same.
    """
    result, back = layout.result, views(layout, Layout(layout.shape))
    bias, matrix = len(result) == 2, (result[0], result[1], (*result, 1)[2])

    def flat(rows: Tensor, grad_rows: Tensor, jacobian: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias:
            rows = (rows if rows.is_floating_point() else grad_rows)[..., :0]
        gradients = named("per_case").compute(rows, grad_rows, bias, matrix)
        cases = gradients.shape[0]
        gradients = gradients.view(cases, *result)
        for order, shape in back:
            front = (0, *(dim + 1 for dim in order))
            gradients = gradients.permute(front) if order else gradients.reshape(cases, *shape)
        gradients = gradients.reshape(cases, -1)
        if jacobian is not None:
            gradients = gradients @ jacobian.to(gradients)
        gradients = gradients[:, None, :, None]
        return torch.ones_like(gradients), gradients

    return flat
