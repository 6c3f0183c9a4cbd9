"""Pure functions on batches of matrices; the leading dimension counts matrices (groups, or layers of one shape).

Float32 products in float32, whatever the user allowed for the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """Sparse gradients, as those of `nn.Embedding(sparse=True)`, as ordinary tensors."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


# --- products -------------------------------------------------------------------------------------------------------

ALIGNED = 16  # numbers, that fill a line of a CPU's cache, or two
WORTH_ALIGNING = 256  # columns


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, [..., a, b] and [..., b, c] with the same leading dimensions -> [..., a, c].

    A CPU takes 2/3 of the time where every row of the result begins a line of its cache, and a bias makes sides of odd
    width; where the rows of the operands begin does not matter. Compilers and autograd know no such results.
    """
    columns = right.shape[-1]
    width = aligned(columns)
    plain = left.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_grad_enabled()
    if plain or columns < WORTH_ALIGNING or width == columns:
        return left @ right
    result = left.new_empty(*left.shape[:-1], width)[..., :columns]
    for one, other, place in zip(*(tensor.flatten(0, -3) for tensor in (left, right, result)), strict=True):
        torch.mm(one, other, out=place)
    return result


def aligned(size: int) -> int:
    """The next size at which a row is whole lines."""
    return -(-size // ALIGNED) * ALIGNED


def gram(rows: Tensor) -> Tensor:
    """Sum of rows rowsᵀ in every group: [..., g, d] -> [g, d, d]."""
    if rows.shape[-1] == 1:  # as many products of one number as groups are slow
        return rows.square().flatten(0, -3).sum(0).unsqueeze(-1)
    columns = rows.movedim((-2, -1), (0, 1)).flatten(2)  # a view where rows lie one behind the other
    if columns.device.type == "cpu" and columns.shape[1] >= STRIPED:
        return by_strips(columns)
    if len(columns) == 1:  # `mm` is as fast as can be; `bmm` with one matrix is not everywhere
        return (columns[0] @ columns[0].mT).unsqueeze(0)
    return columns @ columns.mT


STRIPED = 256  # columns from which on it pays


def by_strips(columns: Tensor, strips: int = 4) -> Tensor:
    """X Xᵀ of X [g, d, n], with what lies below the diagonal copied from above: 5/8 of the products with 4 strips.

    On a CPU that takes 3/4 of the time; CUDA has more to gain from one large product.
    """
    width = aligned(-(-columns.shape[1] // strips))
    starts = range(0, columns.shape[1], width)
    above = [columns[:, start : start + width] @ columns[:, start:].mT for start in starts]
    strip = [
        torch.cat([*(one[..., (k - j) * width :][..., :width].mT for j, one in enumerate(above[:k])), above[k]], dim=-1)
        for k in range(len(above))
    ]
    return torch.cat(strip, dim=-2)


def bordered(body: Tensor, border: Tensor, corner: Tensor) -> Tensor:
    """[[body, border], [borderᵀ, corner]] in every group: [g, d, d], [g, d] and [g] -> [g, d + 1, d + 1]."""
    above = torch.cat([body, border.unsqueeze(-1)], dim=-1)
    below = torch.cat([border, corner.unsqueeze(-1)], dim=-1)
    return torch.cat([above, below.unsqueeze(-2)], dim=-2)


# --- sides: [..., d, d], or [..., d] if diagonal --------------------------------------------------------------------


def spread(scalars: Tensor, like: Tensor) -> Tensor:
    """Trailing dimensions of size 1, so that the scalars of a stack broadcast with `like`."""
    return scalars.reshape(*scalars.shape, *[1] * (like.dim() - scalars.dim()))


def mean_eigenvalue(side: Tensor, diagonal: bool) -> Tensor:
    """tr C / dim C: [...]."""
    return (side if diagonal else side.diagonal(dim1=-2, dim2=-1)).mean(-1)


def damp(side: Tensor, damping: Tensor, diagonal: bool) -> Tensor:
    """C + λ I, with a λ for every matrix: damping [...]."""
    damped = side.clone()
    values = damped if diagonal else damped.diagonal(dim1=-2, dim2=-1)
    values.add_(damping.unsqueeze(-1))
    return damped


def multiply_left(side: Tensor, matrix: Tensor, diagonal: bool) -> Tensor:
    return side.unsqueeze(-1) * matrix if diagonal else product(side, matrix)


def multiply_right(matrix: Tensor, side: Tensor, diagonal: bool) -> Tensor:
    return matrix * side.unsqueeze(-2) if diagonal else product(matrix, side)


def pi_correction(inputs: Tensor, outputs: Tensor) -> Tensor:
    """π of factored Tikhonov damping (Martens & Grosse 2015, §6.3) from the sides' mean eigenvalues, elementwise.

    √λ is split into π√λ for the input side and √λ/π for the output side, so that it weighs alike on both.
    1 where a side is zero.
    """
    ratio = (inputs / outputs).sqrt()
    return torch.where((inputs == 0) | (outputs == 0), 1, ratio)


# --- roots: the powers and triangular factors of C + λ I ------------------------------------------------------------

Root = float | str  # an exponent, "cholesky" or "cholesky_inverse"
RESCUES = ((None, 10.0), (None, 100.0), (torch.float64, 1.0), (torch.float64, 100.0))  # precision, times the damping


def exponent(root: Root) -> float:
    """X with X Xᵀ = (C + λ I)^2p, or X = (C + λ I)^p."""
    return {"cholesky": 0.5, "cholesky_inverse": -0.5}[root] if isinstance(root, str) else root


def diagonal_root(side: Tensor, damping: Tensor, root: Root) -> Tensor:
    """(C + λ I)^p of a diagonal C [..., d]; the triangular factors are square roots."""
    return damp(side.clamp(min=0), damping, diagonal=True) ** exponent(root)


def dense_roots(side: Tensor, damping: Tensor, roots: Sequence[Root]) -> tuple[dict[Root, Tensor], Tensor]:
    """All the wanted roots of C + λ I for a batch of C [m, d, d] and λ [m], and which matrices came out right [m].

    One Cholesky decomposition serves -1 and the triangular factors; any other exponent needs eigenvalues, which then
    serve -1 too. Does not wait for the device to learn of failures (but `eigh` itself does).
    """
    exponents = [root for root in roots if not isinstance(root, str)]
    found: dict[Root, Tensor] = {}
    right = torch.ones(side.shape[0], dtype=torch.bool, device=side.device)
    if any(p != -1 for p in exponents):
        values, vectors = eigh(side)
        for p in exponents:
            powers = diagonal_root(values, damping, p)
            found[p] = (vectors * powers.unsqueeze(-2)) @ vectors.mT
    if len(found) < len(roots):
        lower, right = cholesky(damp(side, damping, diagonal=False))
        if "cholesky" in roots:
            found["cholesky"] = lower
        if "cholesky_inverse" in roots:
            found["cholesky_inverse"] = invert_triangular(lower)
        if -1.0 in roots and -1.0 not in found:
            found[-1.0] = invert_from_cholesky(lower)
    for matrix in found.values():
        right = right & is_finite(matrix)
    return found, right


def is_finite(stack: Tensor) -> Tensor:
    """Of every entry of a stack, [m, ...] -> [m], in one pass: a sum is finite only if all its terms are."""
    return stack.reshape(stack.shape[0], -1).sum(1).isfinite()


def cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors [m, d, d] and which of them are right; the others have a diagonal of ones, so that no routine
    stumbles over a zero there."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    diagonal = lower.diagonal(dim1=-2, dim2=-1)
    right = (info == 0) & is_finite(diagonal)
    diagonal.copy_(torch.where(spread(right, diagonal), diagonal, 1))
    return lower, right


def invert_triangular(lower: Tensor) -> Tensor:
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return inverse


def invert_from_cholesky(lower: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹. LAPACK does it in place at a third of the operations; CUDA has no such routine, but fast products."""
    if lower.device.type == "cpu":
        return torch.cholesky_inverse(lower)
    inverse = invert_triangular(lower)
    return inverse.mT @ inverse


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [m, d] and eigenvectors [m, d, d]; NaN for matrices that are not finite or do not converge."""
    finite = is_finite(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    try:
        values, vectors = torch.linalg.eigh(torch.where(spread(finite, matrix), matrix, identity))
        return torch.where(spread(finite, values), values, torch.nan), vectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not in torch's stubs
        if len(matrix) == 1:  # who fails is known only one by one
            return torch.full_like(matrix[:, 0], torch.nan), torch.full_like(matrix, torch.nan)
        values, vectors = zip(*(eigh(one) for one in torch.split(matrix, 1)), strict=True)
        return torch.cat(values), torch.cat(vectors)


def rescued_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`eigh`, again in float64 if it does not come out right; in the matrix's own precision. Waits for the device."""
    values, vectors = eigh(matrix)
    if not values.isfinite().all():
        values, vectors = eigh(matrix.double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def rescued_roots(side: Tensor, damping: Tensor, roots: Sequence[Root]) -> tuple[dict[Root, Tensor], Tensor]:
    """`dense_roots` for matrices that failed in it: with more damping, then in float64. Waits for the device."""
    found = {root: torch.full_like(side, torch.nan) for root in roots}
    right = torch.zeros(side.shape[0], dtype=torch.bool, device=side.device)
    for dtype, more in RESCUES:
        left = (~right).nonzero().squeeze(-1)
        if not len(left):
            break
        precision = dtype or side.dtype
        again, right[left] = dense_roots(side[left].to(precision), damping[left].to(precision) * more, roots)
        for root, matrices in again.items():
            found[root][left] = matrices.to(side.dtype)
    return found, right


# --- precision --------------------------------------------------------------------------------------------------------


BACKENDS: Any = torch.backends  # not all of it is in torch's type stubs


@contextmanager
def full_precision(everything: bool = False) -> Iterator[None]:
    """Float32 matrix products in float32; all settings are put back.

    A factor is decomposed later: ten bits of mantissa in it are not enough. Inside a compiled region the setting counts
    while the region runs, and for inductor's own kernels while it compiles: enter outside of it.

    everything: convolutions and recurrent layers, too, which cuDNN computes in TF32 unless it is told otherwise.
    """
    backends = [BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul]
    if everything:
        backends += [BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn]
    before = [backend.fp32_precision for backend in backends]
    older = older_settings(everything)
    try:
        for write, _, full in older:
            write(full)
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for write, chosen, _ in older:
            write(chosen)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def older_settings(everything: bool) -> list[tuple[Callable[[Any], None], Any, Any]]:
    """(setter, the user's choice, full precision): torch raises where someone reads these and the newer ones say
    otherwise; so it does here, if the user has set the newer ones, and these are left alone."""
    found: list[tuple[Callable[[Any], None], Any, Any]] = []
    with suppress(RuntimeError):
        found.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "highest"))
    if everything:
        with suppress(RuntimeError):
            found.append((partial(setattr, BACKENDS.cudnn, "allow_tf32"), BACKENDS.cudnn.allow_tf32, False))
    return found


def full_precision_in_eager() -> AbstractContextManager[None]:
    """Of a backward that a compiler may trace, which knows no settings: then they are those of the whole region."""
    return nullcontext() if torch.compiler.is_compiling() else full_precision()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Not `torch.backends.cudnn.flags`, which sets TF32, too, and raises where the user has set it by the newer API."""
    before = BACKENDS.cudnn.enabled
    BACKENDS.cudnn.enabled = False
    try:
        yield
    finally:
        BACKENDS.cudnn.enabled = before
