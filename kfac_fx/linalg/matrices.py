"""Batches of matrices: products, roots, eigenvectors and messages; and what is asked of any tensor or gradient.

The leading dimensions count matrices: groups, or layers of one shape. Products of float32 are computed in float32,
whatever precision the user allows for the network (`full_precision`). A CPU is its own host: it reads a condition at
once, and saves what is not needed. Other devices compute both cases, so that the host does not wait for them, or send a
copy (`HostCopy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx.passes.matrix import has_autocast, precise, products_of_columns, row_products, without_autocast
from kfac_fx.passes.torch_private import is_batched


def dense(tensor: Tensor) -> Tensor:
    """The tensor with strides; gradients of `nn.Embedding(sparse=True)` are sparse."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


PARTS_OF_LAYOUTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("offsets", "values"),
}


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with strides that a sparse or nested tensor consists of. A dense copy may not fit into memory."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    return [getattr(tensor, name)() for name in PARTS_OF_LAYOUTS.get(tensor.layout, ())] or [tensor]


def pulled(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    *,
    keep: bool = False,
    batched: bool = False,
) -> list[Tensor | None]:
    """The vector-Jacobian product of the outputs with the leaves; None for a leaf that no cotangent reaches.

    Args:
        cotangents: of every output; None: nothing is sent back from it.
        keep: another backward comes.
        batched: cotangents are [k, *output.shape], and so are the results.
    """
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    roots, vectors = [o for o, _ in pairs], [c.to(o.dtype) for o, c in pairs]
    if len(roots) == 1 and roots[0].grad_fn is None:  # a leaf, whose gradient is the cotangent
        return [vectors[0] if leaf is roots[0] else None for leaf in leaves]
    grads = iter(
        torch.autograd.grad(roots, wanted, vectors, retain_graph=keep, allow_unused=True, is_grads_batched=batched)
    )
    return [next(grads) if leaf.requires_grad else None for leaf in leaves]


def dense_or_zero(grads: Iterable[Tensor | None], leaves: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of the leaves with strides, zero for a leaf that has none."""
    pairs = zip(grads, leaves, strict=True)
    return [torch.zeros_like(leaf) if grad is None else dense(grad) for grad, leaf in pairs]


def is_differentiable(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor that may have a gradient: of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def with_gradient(tensor: Tensor) -> Tensor:
    """The tensor, a leaf, which from now on gets a gradient if it may have one: frozen parameters may be integers."""
    return tensor.requires_grad_(is_differentiable(tensor))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The precision of statistics and steps of a parameter; a frozen one may be complex, an integer or of 8 bits."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype.to_real(), torch.float32)


# --- products -------------------------------------------------------------------------------------------------------

CACHE_LINE = 16  # numbers that fill one or two lines of a CPU's cache; CUDA loads rows of so many halves at once
WORTH_ALIGNING = 512  # rows and columns of a result in float32


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, [..., a, b] and [..., b, c] with the same leading dimensions -> [..., a, c].

    A bias makes sides of odd width. In float32 a CPU takes 2/3 of the time for large results if every row of the result
    begins a line of its cache; where the rows of the operands begin does not matter. Smaller results and those in
    bfloat16 gain nothing. Compilers and autograd cannot handle such results.

    The memory between the rows of a result is zero. Where the user allows products in bfloat16, processors with AMX
    read a number behind every row of odd width and multiply it by 0: a NaN in free memory became a NaN in the result.
    """
    if has_autocast(left.device):  # it would round the products of an estimator
        with without_autocast(left.device):
            return matmul(left, right)
    columns = right.shape[-1]
    stacks = left.flatten(0, -3), right.flatten(0, -3)
    if not is_worth_aligning(left, columns) or not writes_parts(left, right):
        return torch.bmm(*stacks).view(*left.shape[:-1], columns)
    padded = left.new_empty(*left.shape[:-1], cache_aligned(columns))
    padded[..., columns:] = 0
    result = padded[..., :columns]
    for a, b, out in zip(*stacks, result.flatten(0, -3), strict=True):
        torch.mm(a, b, out=out)
    return result


def is_worth_aligning(left: Tensor, columns: int) -> bool:
    rows, wide = left.shape[-2], columns >= WORTH_ALIGNING
    return wide and rows >= WORTH_ALIGNING and left.dtype.itemsize >= 4 and columns % CACHE_LINE > 0


def half_products(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """left @ right of stacks [m, a, b] and [m, b, c] in bfloat16, with sums in float32. dtype: of the result; None:
    theirs."""
    if dtype is None or dtype is left.dtype:
        return left @ right
    if left.is_cuda:
        return torch.bmm(left, right, dtype)
    return left.to(dtype) @ right.to(dtype)


FAST_HALVES = ("avx512_bf16", "amx_bf16")  # of `torch.cpu.get_capabilities`
WORTH_HALVING = 128  # width


def basis_dtype(device: torch.device, dtype: torch.dtype, width: int) -> torch.dtype:
    """The precision of bases of so wide matrices of a dtype: bfloat16 on a CPU that multiplies it fast.

    There a product of wide matrices takes half of the time of one in float32 or less. Other CPUs convert every number,
    and take longer.
    """
    if device.type != "cpu" or dtype is not torch.float32 or width < WORTH_HALVING:
        return dtype
    return torch.bfloat16 if has_fast_halves() else dtype


@cache
def has_fast_halves() -> bool:
    """Whether the CPU has instructions for products of bfloat16, and torch uses them; torch 2.11 does not tell."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return TORCH_BACKENDS.mkldnn.is_available() and any(capabilities.get(name) for name in FAST_HALVES)


def cache_aligned(size: int) -> int:
    """The next size at which a row is a whole number of cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE


def gram(rows: Tensor) -> Tensor:
    """Sum of rows rowsᵀ in every group, in at least float32: [..., g, d] -> [g, d, d]."""
    if rows.shape[-1] == 1:  # one product of two numbers a group is slow
        return precise(rows).square().flatten(0, -3).sum(0).unsqueeze(-1)
    wide = rows.device.type == "cpu" and worth_strips(rows.shape[-1], math.prod(rows.shape[:-2]))
    if rows.shape[-2] == 1 and rows.is_contiguous() and not wide:  # as below, in half of the time for the host
        columns = rows.flatten(0, -2).mT
        return products_of_columns(columns, columns).unsqueeze(0)
    columns = rows.movedim((-2, -1), (0, 1)).flatten(2)  # a view if the rows lie one behind the other
    return gram_by_strips(precise(columns)) if wide else row_products(columns, columns)


WORTH_STRIPS = 256  # columns
WORTH_WRITING = 256**2  # numbers of a body: smaller ones are joined with their borders in half of the time


def worth_strips(width: int, rows: int) -> bool:
    """Whether strips save more than the copies of their other half cost. With few rows they do not: strips of width
    3072 take 0.8 of the time of a plain product for 512 rows, and those of width 1024 take 1.1 of it for 128."""
    return width >= WORTH_STRIPS and 6 * rows >= width


def writes_parts(*tensors: Tensor) -> bool:
    """Whether results of these tensors are written into parts of a new one, which saves copies on a CPU. Compilers,
    autograd and vmap cannot handle this."""
    eager = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    return eager and tensors[0].device.type == "cpu" and not is_batched(*tensors)


def gram_by_strips(columns: Tensor, strips: int = 4) -> Tensor:
    """X Xᵀ of X [g, d, n]. Entries below the diagonal are copied from above: 5/8 of the products with 4 strips.

    On a CPU this takes 3/4 of the time. CUDA gains more from one large product.
    """
    size = columns.shape[1]
    width = cache_aligned(-(-size // strips))
    starts = range(0, size, width)
    if not writes_parts(columns):
        above = [columns[:, start : start + width] @ columns[:, start:].mT for start in starts]
        strip = [
            torch.cat(
                [*(row[..., (k - j) * width :][..., :width].mT for j, row in enumerate(above[:k])), row_k], dim=-1
            )
            for k, row_k in enumerate(above)
        ]
        return torch.cat(strip, dim=-2)
    products = columns.new_empty(len(columns), size, size)
    for x, product in zip(columns, products, strict=True):
        for start in starts:
            torch.mm(x[start : start + width], x[start:].mT, out=product[start : start + width, start:])
        for end in starts[1:]:
            product[end:, end - width : end] = product[end - width : end, end:].mT
    return products


def bordered(body: Tensor, border: Tensor, corner: Tensor) -> Tensor:
    """[[body, border], [borderᵀ, corner]] of every matrix: [..., d, d], [..., d] and [...] -> [..., d + 1, d + 1]."""
    if body.numel() > WORTH_WRITING and writes_parts(body, border, corner):
        *lead, size, _ = body.shape
        whole = body.new_empty(*lead, size + 1, size + 1)
        whole[..., :-1, :-1], whole[..., -1, -1] = body, corner
        whole[..., :-1, -1] = whole[..., -1, :-1] = border
        return whole
    above = torch.cat([body, border.unsqueeze(-1)], dim=-1)
    below = torch.cat([border, corner.unsqueeze(-1)], dim=-1)
    return torch.cat([above, below.unsqueeze(-2)], dim=-2)


# --- sides: [..., d, d], or [..., d] if diagonal --------------------------------------------------------------------


def unsqueeze_like(scalars: Tensor, like: Tensor) -> Tensor:
    """The scalars of a stack with trailing dimensions of size 1, so that they broadcast with `like`."""
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
    """side @ matrix. side: dense, diagonal, or in diagonal blocks (`blocks_of`)."""
    if diagonal:
        return side.unsqueeze(-1) * matrix
    if not is_in_blocks(side):
        return matmul(side, matrix)
    return by_blocks(((block, matrix[..., rows, :], (rows, slice(None))) for rows, block in blocks_of(side)), matrix)


def multiply_right(matrix: Tensor, side: Tensor, diagonal: bool) -> Tensor:
    """matrix @ side, as `multiply_left`."""
    if diagonal:
        return matrix * side.unsqueeze(-2)
    if not is_in_blocks(side):
        return matmul(matrix, side)
    return by_blocks(((matrix[..., rows], block, (slice(None), rows)) for rows, block in blocks_of(side)), matrix)


def multiply_both(left: Tensor, matrix: Tensor, right: Tensor, transpose: bool) -> Tensor:
    """left @ matrix @ rightᵀ, or leftᵀ @ matrix @ right, of stacks [..., d, d], [..., d, e] and [..., e, e]."""
    a, w, b = (left.mT, matrix, right) if transpose else (left, matrix, right.mT)
    if is_worth_aligning(w, w.shape[-1]) or has_autocast(w.device):
        return matmul(matmul(a, w), b)
    # In small networks the host takes longer to make stacks twice than to multiply.
    return torch.bmm(torch.bmm(a.flatten(0, -3), w.flatten(0, -3)), b.flatten(0, -3)).view(matrix.shape)


def by_blocks(products: Iterable[tuple[Tensor, Tensor, tuple[slice, slice]]], like: Tensor) -> Tensor:
    """The products of pairs of matrices in their places of a new matrix like another. One by one, because a batched
    product of strided parts copies them first."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    for left, right, place in products:
        out = result[(..., *place)]
        if result.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_grad_enabled():
            out.copy_(left @ right)
            continue
        stacks = left.flatten(0, -3), right.flatten(0, -3), out.view(-1, *out.shape[-2:])
        for a, b, c in zip(*stacks, strict=True):
            torch.mm(a, b, out=c)
    return result


def is_in_blocks(side: Tensor) -> bool:
    """Whether a matrix [..., d, d] is kept as its diagonal blocks, one below the other [..., d, w], or as the transpose
    of such a matrix, [..., w, d]."""
    return side.shape[-1] != side.shape[-2]


def blocks_of(side: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows and the diagonal blocks of a matrix that is kept as these; the last block may be narrower."""
    size, width = max(side.shape[-2:]), min(side.shape[-2:])
    for start in range(0, size, width):
        rows = slice(start, min(start + width, size))
        inside = slice(0, rows.stop - rows.start)
        yield rows, side[..., rows, inside] if side.shape[-1] == width else side[..., inside, rows]


def as_blocks(blocks: Iterable[Tensor], width: int) -> Tensor:
    """Diagonal blocks [..., b, b] as one matrix [..., d, width], which `blocks_of` takes apart."""
    return torch.cat([F.pad(block, (0, width - block.shape[-1])) for block in blocks], dim=-2)


def pi_correction(inputs: Tensor, outputs: Tensor) -> Tensor:
    """π of factored Tikhonov damping (Martens & Grosse 2015, §6.3) from the mean eigenvalues of the sides, elementwise.

    √λ is split into π√λ for the input side and √λ/π for the output side, so that it has the same relative weight on
    both. π is 1 if a side is zero.
    """
    ratio = (inputs / outputs).sqrt()
    return torch.where((inputs == 0) | (outputs == 0), 1, ratio)


# --- roots: the powers and triangular factors of C + λ I ------------------------------------------------------------

Root = float | str  # an exponent, "cholesky" or "cholesky_inverse"
RESCUES = ((None, 10.0), (None, 100.0), (torch.float64, 1.0), (torch.float64, 100.0))  # precision, times the damping


def exponent(root: Root) -> float:
    """p where X = (C + λ I)^p, or X Xᵀ = (C + λ I)^2p for a triangular factor X."""
    return {"cholesky": 0.5, "cholesky_inverse": -0.5}[root] if isinstance(root, str) else root


def diagonal_root(side: Tensor, damping: Tensor, root: Root) -> Tensor:
    """(C + λ I)^p of a diagonal C [..., d]; the triangular factors are square roots."""
    return damp(side.clamp(min=0), damping, diagonal=True) ** exponent(root)


def dense_roots(side: Tensor, damping: Tensor, roots: Sequence[Root]) -> tuple[dict[Root, Tensor], Tensor]:
    """The roots of C + λ I for a batch of C [m, d, d] and λ [m], and which matrices are valid [m].

    One Cholesky decomposition serves -1 and the triangular factors. Any other exponent needs eigenvalues, which then
    serve -1 too. The host does not wait for the device to learn of failures, but `eigh` itself may wait.
    """
    exponents = [root for root in roots if not isinstance(root, str)]
    results: dict[Root, Tensor] = {}
    valid = torch.ones(side.shape[0], dtype=torch.bool, device=side.device)
    if any(p != -1 for p in exponents):
        values, vectors = eigh(side)
        for p in exponents:
            powers = diagonal_root(values, damping, p)
            results[p] = (vectors * powers.unsqueeze(-2)) @ vectors.mT
    if len(results) < len(roots):
        lower, valid = cholesky(damp(side, damping, diagonal=False))
        if "cholesky" in roots:
            results["cholesky"] = lower
        if "cholesky_inverse" in roots:
            results["cholesky_inverse"] = invert_triangular(lower)
        if -1.0 in roots and -1.0 not in results:
            results[-1.0] = invert_from_cholesky(lower)
    for matrix in results.values():
        valid = valid & are_finite(matrix)
    return results, valid


def are_finite(stack: Tensor) -> Tensor:
    """Whether all entries of each element are finite: [m, ...] -> [m]. A sum is finite only if all its terms are."""
    return stack.unsqueeze(-1).flatten(1).sum(1).isfinite()


def cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors [m, d, d] and which are valid [m]; the others get a diagonal of ones, to divide by in solves."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    diagonal = lower.diagonal(dim1=-2, dim2=-1)
    valid = (info == 0) & are_finite(diagonal)
    diagonal.copy_(torch.where(unsqueeze_like(valid, diagonal), diagonal, 1))
    return lower, valid


def invert_triangular(lower: Tensor) -> Tensor:
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return inverse


def invert_from_cholesky(lower: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹. LAPACK takes a third of the operations, in place; CUDA has no such routine, but fast products."""
    if lower.device.type == "cpu":
        return torch.cholesky_inverse(lower)
    inverse = invert_triangular(lower)
    return inverse.mT @ inverse


WIDEST_ON_HOST = 512  # where CUDA's eigh takes as long, with thirty times the error or more; docs/cost.md has a table


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [m, d] and eigenvectors [m, d, d]; NaN for matrices that are not finite or do not converge.

    Matrices on CUDA up to `WIDEST_ON_HOST` are decomposed on the host (`benchmarks/decompositions.py`). The host waits
    for the device in any case.
    """
    if matrix.is_cuda and matrix.shape[-1] <= WIDEST_ON_HOST:
        on_host = eigh(matrix.cpu())
        return on_host[0].to(matrix.device), on_host[1].to(matrix.device)
    finite = are_finite(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    try:
        values, vectors = torch.linalg.eigh(torch.where(unsqueeze_like(finite, matrix), matrix, identity))
        return torch.where(unsqueeze_like(finite, values), values, torch.nan), vectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not in torch's stubs
        if len(matrix) == 1:  # a batch does not say which of its matrices failed
            return torch.full_like(matrix[:, 0], torch.nan), torch.full_like(matrix, torch.nan)
        values, vectors = zip(*(eigh(single) for single in torch.split(matrix, 1)), strict=True)
        return torch.cat(values), torch.cat(vectors)


class Place(NamedTuple):
    """Where matrices are decomposed, and in what precision; None: where they are, and in theirs."""

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None


HERE = Place()


def rescued_eigh(matrix: Tensor, place: Place = HERE) -> tuple[Tensor, Tensor]:
    """`eigh` at a place, repeated in float64 if it fails; the result is where the matrix is, and has its precision.

    Waits for the device. At another place the matrices are decomposed one by one.
    """
    if place.device is None and place.dtype is None:
        values, vectors = eigh(matrix)
    else:  # one by one, so that a place has room for one of them
        pairs = [eigh(part.to(place.device or part.device, place.dtype or part.dtype)) for part in matrix.split(1)]
        values, vectors = (torch.cat([side.to(matrix) for side in sides]) for sides in zip(*pairs, strict=True))
    if not values.isfinite().all():
        values, vectors = eigh(matrix.double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def eigh_of_blocks(matrix: Tensor, width: int, place: Place = HERE) -> tuple[Tensor, Tensor]:
    """`rescued_eigh` of the diagonal blocks of matrices [m, d, d], so wide, with the eigenvectors [m, d, width] that
    `blocks_of` takes apart. Eigenvalues [m, d] are in the order of the blocks."""
    if width == matrix.shape[-1]:
        return rescued_eigh(matrix, place)
    pairs = [rescued_eigh(matrix[:, rows, rows], place) for rows, _ in blocks_of(matrix[..., :width])]
    values, vectors = zip(*pairs, strict=True)
    return torch.cat(values, dim=-1), as_blocks(vectors, width)


MEAN_SHIFT = 1e-3  # of the mean eigenvalue, by which orthogonal iteration keeps directions of eigenvalue zero apart
GRAM_SHIFT = 3e-6  # added to the ones on the diagonal of a Gram matrix of unit columns, for its rounding in float32
INDEPENDENT = 0.5  # the least diagonal of the second Cholesky factor, which is 1 if the first pass was exact


def iterated_basis(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvectors by one step of orthogonal iteration from those of a matrix before: QR of C Q, by Cholesky.

    SOAP updates its bases so (Vyas et al. 2024, algorithm 4). QR by two Cholesky decompositions of Gram matrices
    (Fukaya et al. 2020, "Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices") consists
    of products and of decompositions of a whole stack, where `eigh` of a GPU decomposes one matrix after another. The
    columns are in the order of falling eigenvalues, because QR keeps the first ones.

    Args:
        matrix: C [m, d, d], positive semi-definite.
        basis: Q [m, d, d], orthogonal.

    Returns the diagonal of Qᵀ C Q [m, d] and Q [m, d, d] of the new basis, and which of them are right [m]: where
    columns are dependent up to rounding, they are not.
    """
    product = matrix @ basis
    estimates = (basis * product).sum(-2)
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    columns = torch.addcmul(product, unsqueeze_like(MEAN_SHIFT * mean, basis), basis)
    order = estimates.argsort(-1, descending=True)
    columns = columns.gather(-1, order.unsqueeze(-2).expand_as(columns))
    good = torch.ones_like(mean, dtype=torch.bool)
    for shift in (GRAM_SHIFT, 0.0):
        columns = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
        gram_matrix = columns.mT @ columns
        gram_matrix.diagonal(dim1=-2, dim2=-1).add_(shift)
        lower, valid = cholesky(gram_matrix)
        good = good & valid
        columns = torch.linalg.solve_triangular(lower.mT, columns, upper=True, left=False)
    good = good & (lower.diagonal(dim1=-2, dim2=-1).amin(-1) > INDEPENDENT)
    values = (columns * (matrix @ columns)).sum(-2)
    return values, columns, good & are_finite(values)


def renewed_eigh(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """`iterated_basis`, and `rescued_eigh` for the matrices for which it fails; those without a basis have zeros there.

    Waits for the device.
    """
    values, vectors, good = iterated_basis(matrix, basis)
    wrong = (~good).nonzero().squeeze(-1)
    if len(wrong):
        values[wrong], vectors[wrong] = rescued_eigh(matrix[wrong])
    return values, vectors


def rescued_roots(side: Tensor, damping: Tensor, roots: Sequence[Root]) -> tuple[dict[Root, Tensor], Tensor]:
    """`dense_roots` for matrices that failed in it: with more damping, then in float64. Waits for the device."""
    results = {root: torch.full_like(side, torch.nan) for root in roots}
    valid = torch.zeros(side.shape[0], dtype=torch.bool, device=side.device)
    for dtype, more in RESCUES:
        left = (~valid).nonzero().squeeze(-1)
        if not len(left):
            break
        precision = dtype or side.dtype
        again, valid[left] = dense_roots(side[left].to(precision), damping[left].to(precision) * more, roots)
        for root, matrices in again.items():
            results[root][left] = matrices.to(side.dtype)
    return results, valid


# --- precision ------------------------------------------------------------------------------------------------------


TORCH_BACKENDS: Any = torch.backends  # parts of it are missing in torch's type stubs


@contextmanager
def full_precision(everything: bool = False) -> Iterator[None]:
    """Compute matrix products of float32 in float32. All settings are restored at the end.

    Factors are decomposed later, and ten bits of mantissa are not enough for that. A compiled region reads the setting
    while it runs, and inductor while it compiles, so enter outside of the region. everything: include convolutions and
    recurrent layers, which cuDNN otherwise computes in TF32.
    """
    backends = [TORCH_BACKENDS.cuda.matmul, TORCH_BACKENDS.mkldnn.matmul]
    if everything:
        backends += [TORCH_BACKENDS.cudnn.conv, TORCH_BACKENDS.cudnn.rnn]
        backends += [TORCH_BACKENDS.mkldnn.conv, TORCH_BACKENDS.mkldnn.rnn]
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
    """(setter, the user's choice, full precision) of torch's older settings. Reading one raises RuntimeError if the
    user has set the newer ones; the older ones are then left alone."""
    settings: list[tuple[Callable[[Any], None], Any, Any]] = []
    with suppress(RuntimeError):
        settings.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision(), "highest"))
    if everything:
        with suppress(RuntimeError):
            cudnn = TORCH_BACKENDS.cudnn
            settings.append((partial(setattr, cudnn, "allow_tf32"), cudnn.allow_tf32, False))
    return settings


def products_are_full() -> bool:
    """Whether matrix products of float32 are computed in float32 by the settings of now."""
    return are_full([TORCH_BACKENDS.cuda.matmul, TORCH_BACKENDS.mkldnn.matmul])


def convolutions_are_full(kinds: Collection[str]) -> bool:
    """The same for convolutions and recurrent layers. kinds: of the devices that compute them."""
    backends = [] if "cuda" not in kinds else [TORCH_BACKENDS.cudnn.conv, TORCH_BACKENDS.cudnn.rnn]
    return are_full([*backends, *([TORCH_BACKENDS.mkldnn.conv, TORCH_BACKENDS.mkldnn.rnn] if "cpu" in kinds else [])])


def are_full(backends: Sequence[Any]) -> bool:
    chosen = [backend.fp32_precision for backend in backends]
    effective = [TORCH_BACKENDS.fp32_precision if precision == "none" else precision for precision in chosen]
    return all(precision in ("none", "ieee") for precision in effective)


def full_precision_in_eager() -> AbstractContextManager[None]:
    """`full_precision` in a backward that a compiler may trace, which does not see settings made inside. Many taps
    enter it, so it makes no settings that are made already."""
    return nullcontext() if torch.compiler.is_compiling() or is_full_precision() else full_precision()


def is_full_precision() -> bool:
    """Whether the settings are those of `full_precision`."""
    backends = TORCH_BACKENDS.cuda.matmul, TORCH_BACKENDS.mkldnn.matmul
    return all(backend.fp32_precision == "ieee" for backend in backends) and all(
        chosen == full for _, chosen, full in older_settings(False)
    )


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Disable cuDNN. `torch.backends.cudnn.flags` also sets TF32, and raises if the user set that by the newer API."""
    before = TORCH_BACKENDS.cudnn.enabled
    TORCH_BACKENDS.cudnn.enabled = False
    try:
        yield
    finally:
        TORCH_BACKENDS.cudnn.enabled = before


# --- symmetric matrices in half of their memory -----------------------------------------------------------------------


def pack_symmetric(matrices: Tensor) -> Tensor:
    """A symmetric M [..., d, d] as R [..., ⌈d / 2⌉, d + 1], for messages between processes.

    M is determined by its elements on and above the diagonal, and only these are read. Row i has d - i of them, and row
    d - 1 - i has i + 1, so the two fill one row of d + 1 elements:

        R[i, j + 1] = M[i, j] for j >= i          R[i, j] = M[d - 1 - i, d - 1 - j] for j <= i

    This needs no indices (rectangular full packed storage; Gustavson et al. 2010, "Rectangular Full Packed Format for
    Cholesky's Algorithm"). If d is odd, the middle row is there twice.
    """
    half = (matrices.shape[-1] + 1) // 2
    top, bottom = matrices[..., :half, :], matrices.flip(-2, -1)[..., :half, :]
    return F.pad(top, (1, 0)).triu(1) + F.pad(bottom, (0, 1)).tril()


def unpack_symmetric(rows: Tensor) -> Tensor:
    """The inverse of `pack_symmetric`, for symmetric matrices."""
    half, width = rows.shape[-2], rows.shape[-1] - 1
    upper = rows.new_zeros(*rows.shape[:-2], width, width)
    upper[..., width - half :, :] = rows[..., :-1].tril().flip(-2, -1)
    upper[..., :half, :] = rows[..., 1:].triu()
    return upper + upper.triu(1).mT


# --- reads by the host ------------------------------------------------------------------------------------------------


def zero_unless_(condition: Tensor, tensor: Tensor) -> Tensor:
    """`torch.where(condition, tensor, 0)` in place. On a CPU the host reads the condition, which saves a pass."""
    return tensor if on_host(condition) and condition.all() else tensor.masked_fill_(~condition, 0)


def copy_if_(condition: Tensor, target: Tensor, source: Tensor) -> None:
    """Overwrite the target where the condition is true, in the target's precision. On a CPU the host reads the
    condition, because `where` takes several times as long as a copy."""
    if on_host(condition) and condition.all():
        target.copy_(source)
    elif not on_host(condition) or condition.any():
        torch.where(condition, source.to(target.dtype), target, out=target)


def on_host(condition: Tensor) -> bool:
    """Whether the host may read a condition without waiting for a device or interrupting a compiled function."""
    return condition.device.type == "cpu" and not torch.compiler.is_compiling()


def all_true(flags: Tensor) -> bool:
    """Whether the host knows without waiting for a device that all flags are true."""
    return on_host(flags) and bool(flags.all())


class HostCopy:
    """A copy of a tensor on the host. The host does not wait for the device that computes the tensor.

    Attributes:
        value: the copy; its numbers are there once `arrived` is true.
    """

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        self.event: Any = None
        if device.type == "cpu":
            self.value = tensor.clone()
        else:
            self.value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.value.copy_(tensor, non_blocking=True)
            self.event = torch.accelerator.current_stream(device).record_event()

    @property
    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> Tensor:
        """The copy. The host waits until it has arrived, and for nothing that came after it."""
        if self.event is not None:
            self.event.synchronize()
        return self.value


GOLDEN = 0.6180339887498949


def uneven_numbers(like: Sequence[Tensor]) -> list[Tensor]:
    """Numbers between 1 and 2 of these shapes. Two slices of them differ by much in some place."""
    total = sum(tensor.numel() for tensor in like)
    if not total:
        return [torch.ones_like(tensor) for tensor in like]
    every = torch.arange(total, device=like[0].device, dtype=torch.float64).square().mul(GOLDEN).frac().add(1)
    parts = every.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]
