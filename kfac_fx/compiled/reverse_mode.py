"""Products with a Jacobian in reverse mode, twice, of functions that have no derivative in forward mode.

Jᵀ u is linear in u, and its derivative in the direction d is J d. It is right where the backward of a function is the
derivative of it, and has a derivative itself, so a product is compared with the backward once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RELATIVE = 1e-3  # of what the terms of an inner product sum to without their signs
COTANGENTS = 4  # of a check: one alone fits a wrong backward by chance, for one batch in sixty of a small model
Total = Callable[[Tensor], Tensor]  # a sum over processes


def local(values: Tensor) -> Tensor:
    """The sum over one process."""
    return values


def in_reverse_mode_twice(
    function: Callable[..., tuple[Tensor, ...]],
    point: tuple[Tensor, ...],
    tangents: tuple[Tensor, ...],
    check: Total | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """check: run `check_linear` with this sum over processes; the host waits for it."""
    with torch.enable_grad():
        leaves = [value.clone().requires_grad_() for value in point]
        values = function(*leaves)
        dummies = [torch.ones_like(value, requires_grad=True) for value in values]
        live = [n for n, value in enumerate(values) if value.requires_grad]
        pulled = torch.autograd.grad(
            [values[n] for n in live], leaves, [dummies[n] for n in live], create_graph=True, materialize_grads=True
        )
    pushed = [
        # Reading all k directions off one graph: a vmapped second pass would need the very rules that were missing.
        torch.autograd.grad(
            [p for p in pulled if p.requires_grad],
            dummies,
            [t[n] for t, p in zip(tangents, pulled, strict=True) if p.requires_grad],
            retain_graph=True,
            materialize_grads=True,
        )
        for n in range(tangents[0].shape[0])
    ]
    if check is not None:
        check_backward([values[n] for n in live], leaves, live, tangents, pushed, check)
    return tuple(v.detach() for v in values), tuple(torch.stack(products) for products in zip(*pushed, strict=True))


def check_backward(
    values: Sequence[Tensor],
    leaves: Sequence[Tensor],
    live: Sequence[int],
    tangents: Sequence[Tensor],
    pushed: Sequence[Sequence[Tensor]],
    total: Total,
    said: str = "the backward of an autograd.Function is not linear in the gradient, or hides it",
) -> None:
    """`check_linear` for some cotangents of the values. live: their places among all."""
    for number in range(COTANGENTS):
        cotangents = [normal_like(value, number) for value in values]
        pulled = torch.autograd.grad(values, leaves, cotangents, retain_graph=True, materialize_grads=True)
        of_values = [[products[n] for n in live] for products in pushed]
        check_linear(cotangents, pulled, tangents, of_values, total, said)


def normal_like(value: Tensor, seed: int) -> Tensor:
    """Standard normal numbers that are the same at every call. The random state of the training stays as it is."""
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value)


def check_linear(
    cotangents: Sequence[Tensor],
    pulled: Sequence[Tensor],
    tangents: Sequence[Tensor],
    pushed: Sequence[Sequence[Tensor]],
    total: Total,
    said: str,
) -> None:
    """Raises RuntimeError if <u, J d> is not <Jᵀ u, d>.

    A user's backward may detach its gradient, or clip it. Its derivative is then not J.

    Args:
        cotangents: u, in the form of the outputs.
        pulled: Jᵀ u by the backward itself, in the form of the parameters.
        tangents: the directions d, k in front.
        pushed: J d of every direction, by the derivative of the backward.
        total: the sum over processes.
        said: the words of the error.
    """
    tolerance = max(RELATIVE, *(16 * torch.finfo(tensor.dtype).eps for tensor in (*pulled, *pushed[0])))
    for n, products in enumerate(pushed):
        right = torch.cat([(p * t[n]).double().flatten() for p, t in zip(pulled, tangents, strict=True)])
        left = torch.cat([(u * p).double().flatten() for u, p in zip(cotangents, products, strict=True)])
        sums = total(torch.stack([left.sum() - right.sum(), left.abs().sum() + right.abs().sum()]))
        if bool(sums[0].abs() > tolerance * sums[1]):
            raise RuntimeError(said)
