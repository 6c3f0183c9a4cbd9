"""A loss without a name, of which only the gradient g at its outputs z is known, as a user's backward sends it there.

    h(z') - h(z) = <g, z' - z> + ½ N Σ_n <g_n, z'_n - z_n>²

N g_n is the gradient of case n in a mean over N cases, so the last term is ½ <d, F d> with the empirical Fisher F of
the outputs. A case is a row of them.

A number that forward returns is the loss itself, so its change is <g, z' - z> alone. Its cases are not known, and
<d, F d> is the square of its change: for all cases whose mean has this gradient, the empirical Fisher is at least that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_fx.losses.distributions import LossFunction
from kfac_fx.passes.matrix import precise


class Unnamed(LossFunction):
    """The loss of one output of a forward.

    Args:
        inputs: the output, [cases, ...], or a number.
        rows: N g, of the shape of `inputs`.
    """

    targets_like = "unknown"

    def __init__(self, inputs: Tensor, rows: Tensor) -> None:
        super().__init__(inputs)
        self.rows = rows

    def multiply_fisher_factor(self, vector: Tensor) -> Tensor:
        return self.rows * vector.view(*vector.shape, *[1] * (self.rows.dim() - self.case_axes))

    def multiply_fisher_factor_transpose(self, vector: Tensor) -> Tensor:
        products = precise(self.rows) * vector
        return products.sum(tuple(range(self.case_axes - self.rows.dim(), 0))) if self.rows.dim() > 1 else products

    @property
    def fisher_factor_inner_shape(self) -> torch.Size:
        return self.inputs.shape[: self.case_axes]

    def divergence_from(self, inputs: Tensor) -> Tensor:
        return super().divergence_from(inputs) if self.case_axes else torch.zeros_like(precise(inputs))

    def squared_unit(self) -> Tensor:
        """The sum over cases of |N g_n|²; of a number, <g, z>². 0-dim."""
        return precise(self.rows if self.case_axes else self.rows * self.inputs).square().sum()

    def entropy(self) -> Tensor | None:
        return None if self.case_axes else torch.zeros_like(precise(self.inputs))

    def _negative_log_likelihood(self, targets: Tensor) -> Tensor:
        raise AssertionError("bug in kfac_fx: the value of a loss without a name")

    def _sample(self, generator: torch.Generator | None) -> Tensor:
        raise AssertionError("bug in kfac_fx: a sample of a loss without a name")
