"""Functions between a parameter and its use, by how much the tensor in the use changes with the parameter.

    exp(s) * x                          every element on its own: a diagonal Jacobian, exact
    conv2d(x, standardized(v))          W = γ (v - mean v) / √(var v + ε), filter by filter (Qiao et al. 2019)
    conv2d(x, (v - mean v) / σ(v))      the same without batch_norm: whatever σ is, and whether it divides or multiplies
    conv1d(x, g v / |v|)                weight normalization (Salimans and Kingma 2016)
    linear(x, v / σ(v))                 spectral normalization (Miyato et al. 2018), cosine classifiers: a number for
                                        all of v, or one for every slice, however it is computed
    linear(x, a * e), linear(x, a / e)  a number of another parameter for every slice (AdaLoRA, Zhang et al. 2023)

With D the gradient of W, the gradient of v in a normalized layer is P (s C D): s = γ / √(var v + ε) or g / |v|
multiplies a filter, C takes its mean off (standardization only), and P = I - u uᵀ projects every filter on what is
orthogonal to u, itself. s and C belong to outputs and inputs, so a Kronecker product has them; it leaves out P, which
takes one of a filter's dimensions. The proof has P. The gain itself, γ or g, scales what the filters compute without
it: a layer of one input and one output a filter, exact. Where a gain belongs to inputs (to places in a kernel, to the
channels that a transposed convolution reads) its own gradient at every position stands for gradient rows, beside rows
of ones; see `passes.claiming.gains`.

Of W = v / σ(v) the gradient of v is D / σ - ⟨D, v⟩ / σ² · ∂σ/∂v, slice by slice; D / σ is Kronecker, and what the
change of σ takes off is left out. It is of rank one: one dimension of all of v, or of every slice. The proof has it.

Of W = a e the gradient of a is e D, and nothing is left out; e is a gain, with what the filters compute with a alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ELEMENTWISE: Mapping[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.exp,
    "log": torch.reciprocal,
    "log1p": lambda x: 1 / (1 + x),
    "sqrt": lambda x: 0.5 * x.rsqrt(),
    "rsqrt": lambda x: -0.5 * x.rsqrt() / x,
    "reciprocal": lambda x: -1 / x**2,
    "square": lambda x: 2 * x,
    "pow": lambda x, exponent: exponent * x ** (exponent - 1),
    "sin": torch.cos,
    "cos": lambda x: -torch.sin(x),
    "abs": torch.sign,
    "tanh": lambda x: 1 - torch.tanh(x) ** 2,
    "sigmoid": lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    "softplus": torch.sigmoid,
    "relu": lambda x: (x > 0).to(x),
    "clamp": lambda x, low=None, high=None: between(x, low, high),
}
STANDARDIZED, UNIT = "standardized", "unit"
NORMALIZED = (STANDARDIZED, UNIT)
CENTERED = "centered"  # without the mean of every slice
DIVIDED, MULTIPLIED = "divided", "multiplied"  # by a number that it determines itself, or by one for every slice
OWN = (DIVIDED, MULTIPLIED)
TIMES, OVER = "times", "over"  # a number that it does not determine, or one for every slice
PRODUCTS = (TIMES, OVER)
SLICED = (*NORMALIZED, CENTERED, *OWN, *PRODUCTS)
JACOBIAN = "jacobian"  # any function of small tensors; see `passes.matching.jacobians`


def between(x: Tensor, low: float | None, high: float | None) -> Tensor:
    inside = torch.ones_like(x, dtype=torch.bool)
    inside = inside if low is None else inside & (x >= low)
    inside = inside if high is None else inside & (x <= high)
    return inside.to(x)


def slope(name: str, value: Tensor, factor: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
    """What multiplies the gradient on its way through a function of `value`; shaped as `value`.

    factor: γ or g, one a slice; of quotients and products the other operand, of a shape to broadcast. settings:
    (dim, ε) of a normalization or of a product, (dim,) of what is a weight's own, else the further arguments.
    """
    if name == CENTERED:  # the tap takes the mean off rows
        return torch.ones_like(value)
    if name in (*OWN, *PRODUCTS):
        assert factor is not None, "bug in kfac_fx: a product with nothing"
        return (factor if name in (TIMES, MULTIPLIED) else 1 / factor).expand_as(value)
    if name not in NORMALIZED:
        return ELEMENTWISE[name](value, *settings)
    by = 1 / spread_of(name, value, *settings)
    return (by if factor is None else by * factor.reshape(by.shape)).expand_as(value)


def filters(name: str, value: Tensor, dim: int, eps: float) -> Tensor:
    """What a gain multiplies: v / |v|, (v - mean v) / √(var v + ε), or v itself in a product."""
    if name in PRODUCTS:
        return value
    others = [other for other in range(value.dim()) if other != dim]
    centered = value - value.mean(others, keepdim=True) if name == STANDARDIZED else value
    return centered / spread_of(name, value, dim, eps)


def spread_of(name: str, value: Tensor, dim: int, eps: float) -> Tensor:
    """√(var v + ε) or |v|, of every slice along `dim`."""
    others = [other for other in range(value.dim()) if other != dim]
    if name == STANDARDIZED:
        return (value.var(others, unbiased=False, keepdim=True) + eps).sqrt()
    length: Tensor = torch.linalg.vector_norm(value, dim=others, keepdim=True)
    return length


def projected(name: str, gradient: Tensor, value: Tensor, dim: int, eps: float) -> Tensor:
    """P of a gradient, slice by slice along `dim`; both in the shape of the parameter."""
    others = [other for other in range(value.dim()) if other != dim]
    u = filters(name, value, dim, eps)
    along = (u * gradient).mean if name == STANDARDIZED else (u * gradient).sum
    return gradient - u * along(others, keepdim=True)
