"""Vectors: dicts of tensors by parameter name, and how they become matrices of blocks, or one long tensor.

The vector of a complex parameter [...] has its real and imaginary parts, [..., 2]. Users may pass complex numbers.

A *form* lays the parameters of a registration out as a matrix [g, o, i] (`VectorForm`). Users, gradients and optimizers
name whole parameters; registrations and their blocks may name pieces of them, such as `w[0:64]`. `split` and `joined`
translate between the two. `Flat` holds many tensors in one, so that an update of all of them takes a handful of
operations.

**Krylov's methods**: powers of operators and solutions of linear systems, from products with vectors alone.

**Linear maps** of vectors by name that autograd can pass through, whatever they consist of.

A map that is computed without a graph is differentiable in its argument all the same: its derivative is the map itself,
and its backward is the transposed map. So the backward of X v is Xᵀ g, and derivatives of any order are such products.

**Products with a Jacobian in reverse mode, twice**, of functions that have no derivative in forward mode. Jᵀ u is
linear in u, and its derivative in the direction d is J d. It is right where the backward of a function is its
derivative, and has a derivative itself. So a product is compared with the backward once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kfac_fx.passes.errors import NotRegisteredError, RegistrationError, nearest, warn_user
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.parametrization import Piece, ranges, unallocated
from kfac_fx.passes.torch_private import StorageWeakRef, foreach_copy_, transforms

Tensors = dict[str, Tensor]
Vector = Mapping[str, Tensor]

# --- forms ------------------------------------------------------------------------------------------------------------


class VectorForm(Protocol):
    """How the parameters of a registration become a matrix [g, o, i]; `MatrixForm` is one."""

    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def shapes(self) -> Mapping[str, Sequence[int]]: ...
    def pack(self, tensors: Vector) -> Tensor: ...
    def unpack(self, matrix: Tensor) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Flat:
    """The places of tensors in a vector [P], one behind the other.

    Attributes:
        shapes: of the tensors, by name.
        sizes: their numbers of elements.
        places: names and shapes, None for vectors. `view` takes a tuple in half of the time that it takes a torch.Size.
    """

    shapes: Mapping[str, torch.Size]
    sizes: list[int] = field(init=False, repr=False, compare=False)
    places: list[tuple[str, tuple[int, ...] | None]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Not cached properties, which torch.compile cannot trace.
        object.__setattr__(self, "sizes", [shape.numel() for shape in self.shapes.values()])
        places = [(name, None if len(shape) == 1 else tuple(shape)) for name, shape in self.shapes.items()]
        object.__setattr__(self, "places", places)

    def joined(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """[P], in the widest of the precisions, or in `out` if it is passed. Other names are ignored."""
        each = [tensors[name] for name in self.shapes]
        if all(tensor.is_contiguous() for tensor in each):
            return torch.cat([tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in each], out=out)
        if out is None:
            dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in each))
            out = each[0].new_empty(sum(tensor.numel() for tensor in each), dtype=dtype)
        foreach_copy_(list(self.parts(out).values()), each)  # `cat` would copy the others twice
        return out

    def parts(self, vector: Tensor) -> Tensors:
        """The inverse of `joined`: views of the vector."""
        parts = zip(self.places, vector.split_with_sizes(self.sizes), strict=True)
        return {name: part if shape is None else part.view(shape) for (name, shape), part in parts}

    def spread(self, scalars: Mapping[str, Tensor]) -> Tensor:
        """The factor that multiplies each tensor by its own 0-dim scalar: [P], or 0-dim if all share one scalar."""
        first, *others = (scalars[name] for name in self.shapes)
        if all(scalar is first for scalar in others):
            return first
        return torch.cat([scalars[name].expand(shape.numel()) for name, shape in self.shapes.items()])


class FixedVector:
    """A vector [P] that stays where it is, and the views of `Flat.parts` into it.

    In small networks the host takes longer to make the views than to compute with their numbers.
    """

    def __init__(self, flat: Flat, vector: Tensor) -> None:
        self.vector, self.parts = vector, flat.parts(vector)

    def filled(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector, after the tensors have been copied into it. Other names are ignored."""
        foreach_copy_([*self.parts.values()], [tensors[name] for name in self.parts])
        return self.vector


class ColumnForm(Flat):
    """Generic parameters, flattened and concatenated in order: one column [1, p, 1]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, sum(shape.numel() for shape in self.shapes.values()), 1

    def pack(self, tensors: Vector) -> Tensor:
        # Not `joined`, whose copy has no rule of `vmap`: many vectors are packed at once.
        return torch.cat([tensors[name].reshape(-1) for name in self.shapes]).view(self.shape)

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        return self.parts(matrix.flatten())


def vector_form(
    registration: Registration, parameters: Vector, divided: Mapping[tuple[str, ...], VectorForm] = MappingProxyType({})
) -> VectorForm:
    """The form of a registration. divided: the forms of the blocks of which this process keeps a part."""
    if registration.parameters in divided:
        return divided[registration.parameters]
    if registration.matrix is not None:
        return registration.matrix
    return ColumnForm({name: parameters[name].shape for name in registration.parameters})


def joint_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """One vector [P] over tensors that lie one behind another in memory; None if they do not."""
    first, end = tensors[0], tensors[0].storage_offset()
    memory = StorageWeakRef(first.untyped_storage())
    for tensor in tensors:
        here = tensor.storage_offset() == end and StorageWeakRef(tensor.untyped_storage()) == memory
        if not (here and tensor.is_contiguous() and tensor.dtype == first.dtype):
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


# --- pieces ---------------------------------------------------------------------------------------------------------

PIECE = re.compile(r"(?P<parameter>.+)\[(?P<before>(?:(?::|\d+:\d+), ?)*)(?P<start>\d*):(?P<stop>\d*)\]")


def split(whole: Mapping[str, Tensor], registrations: Iterable[Registration], lead: int = 0) -> dict[str, Tensor]:
    """The tensors by the names of the registrations; pieces are views.

    Args:
        lead: the number of dimensions in front of those of the parameters.
    """
    parts: dict[str, Tensor] = {}
    for registration in registrations:
        if not registration.pieces:
            parts |= {name: whole[name] for name in registration.parameters}
            continue
        pieces = {piece.name: piece for piece in registration.pieces}
        for name in registration.parameters:
            piece = pieces.get(name)
            parts[name] = whole[name] if piece is None else piece.of(whole[piece.parameter], lead)
    return parts


def joined(
    parts: Mapping[str, Tensor], registrations: Iterable[Registration], whole: Mapping[str, Tensor], lead: int = 0
) -> dict[str, Tensor]:
    """The inverse of `split`, in the order and the shapes of `whole`. Elements that are in no piece are zero."""
    pieces = [piece for registration in registrations for piece in registration.pieces]
    cut = {piece.parameter for piece in pieces}
    result = {name: torch.zeros_like(tensor) if name in cut else parts[name] for name, tensor in whole.items()}
    for piece in pieces:
        piece.of(result[piece.parameter], lead).copy_(parts[piece.name])
    return result


def read_piece(text: str, aliases: Mapping[str, str], parameters: Mapping[str, Tensor]) -> Piece | None:
    """Read `"w[0:64]"`, `"table[:, 2:5]"` or `"experts[1:2, 0:1]"`; an end may be omitted as in Python. None if this
    names no piece.

    Raises RegistrationError for elements that the parameter does not have.
    """
    match = PIECE.fullmatch(text)
    if match is None or match["parameter"] not in aliases:
        return None
    name, dim = aliases[match["parameter"]], match["before"].count(",")
    ends = [(int(first), int(last)) for first, last in re.findall(r"(\d+):(\d+)", match["before"])]
    if ends and (len(ends) < dim or any(last != first + 1 for first, last in ends)):
        return None
    shape, within = tuple(parameters[name].shape), tuple(first for first, _ in ends)
    size = shape[dim] if dim < len(shape) else 0
    start, stop = int(match["start"] or 0), int(match["stop"] or size)
    if not start < stop <= size or any(place >= count for place, count in zip(within, shape, strict=False)):
        raise RegistrationError(f"{text!r}: {name} has shape {list(shape)}")
    return Piece(name, dim, start, stop, within=within)


def piece_of_view(view: Tensor, parameters: Mapping[str, Tensor]) -> Piece | None:
    """The piece of a parameter that a view such as `w[0:64]` shows; None if it shows anything else."""
    for name, parameter in parameters.items():
        memory = parameter.untyped_storage().data_ptr()
        if memory and memory == view.untyped_storage().data_ptr():
            shape, offset = tuple(parameter.shape), int(view.storage_offset() - parameter.storage_offset())
            if offset >= 0 and parameter.is_contiguous():
                seen = unallocated(shape).as_strided(view.shape, view.stride(), offset)
                return next((Piece(name, dim, *ends) for dim, ends in ranges(seen, shape).items()), None)
    return None


def overlap(first: Piece, second: Piece) -> bool:
    """Whether two pieces have elements in common; pieces along different dimensions of a parameter always have."""
    apart = first.stop <= second.start or second.stop <= first.start or first.within != second.within
    return first.parameter == second.parameter and not (first.dim == second.dim and apart)


def connected(groups: Sequence[Iterable[str]]) -> list[list[int]]:
    """The places of groups of names in sets, in order; groups with a name in common are in one set."""
    set_of: dict[str, list[int]] = {}
    named = [tuple(names) for names in groups]
    for n, names in enumerate(named):
        met = {id(members): members for name in names if (members := set_of.get(name)) is not None}
        members = sorted([n, *(m for some in met.values() for m in some)])
        set_of |= dict.fromkeys((name for m in members for name in named[m]), members)
    return sorted({id(members): members for members in set_of.values()}.values())


# --- refusals ---------------------------------------------------------------------------------------------------------


def real_vector(vector: Vector) -> Vector:
    """A vector with the real and imaginary parts of its complex entries, which are those of complex parameters."""
    if not isinstance(vector, Mapping):
        return vector  # `check_fits` refuses it
    of_complex = [name for name, entry in vector.items() if isinstance(entry, Tensor) and entry.is_complex()]
    return {**vector, **{name: real_numbers(vector[name]) for name in of_complex}} if of_complex else vector


def like_vector(product: Tensors, vector: Vector) -> Tensors:
    """A product with a `real_vector`, with complex entries where the vector had them."""
    return {
        name: torch.view_as_complex(entry.contiguous()) if vector[name].is_complex() else entry
        for name, entry in product.items()
    }


def check_fits(
    vector: Vector, shapes: Mapping[str, Sequence[int]], alone: bool = False, lead: tuple[int, ...] = ()
) -> None:
    """Raises NotRegisteredError with all names that are missing, of another shape or, if the vector is of these
    parameters alone, unknown; TypeError if the vector is not a mapping. lead: the additional dimensions in front."""
    refuse_no_mapping(vector)
    missing, unknown = sorted(shapes.keys() - vector.keys()), sorted(vector.keys() - shapes.keys()) if alone else []
    misshapen = [name for name in shapes if name in vector and tuple(vector[name].shape) != (*lead, *shapes[name])]
    if not (missing or unknown or misshapen):
        return
    lines = ["the vector does not fit the registered parameters:"]
    lines += [f"  missing  {name}" for name in missing]
    lines += [f"  unknown  {name}{f'.{guess}' if (guess := nearest(name, missing)) else ''}" for name in unknown]
    lines += [f"  {name} is {list(vector[name].shape)}, the parameter {list(shapes[name])}" for name in misshapen]
    if lead and misshapen:
        lines.append(
            f"The other tensors of the vector have the additional dimensions {list(lead)} in front; "
            "all must have the same."
        )
    if any((*vector[name].shape, 2) == (*lead, *shapes[name]) for name in misshapen):
        lines.append("Of a complex parameter, pass complex numbers, or their real and imaginary parts, [..., 2].")
    if unknown:  # frozen parameters, or those that `variables` leaves out
        lines.append(
            "Pass only the parameters that are estimated: those in estimator.parameters or spectrum.shapes, or for "
            "net.fisher_product those of net.named_parameters()."
        )
    raise NotRegisteredError("\n".join(lines))


def refuse_no_mapping(vector: object) -> None:
    if not isinstance(vector, Mapping):
        raise TypeError(f"a vector is a dict of tensors by parameter name, not a {type(vector).__name__}")


def check_kinds(vector: Vector, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises TypeError with all entries of a vector that are no numbers of floating point on a device."""
    refuse_no_mapping(vector)
    lines = []
    if others := [type(key).__name__ for key in vector if not isinstance(key, str)]:
        raise TypeError(f"a vector is a dict of tensors by parameter name, and has a key that is a {others[0]}")
    for name in (name for name in shapes if name in vector):
        entry: Any = vector[name]
        if entry is None:
            lines.append(f"  {name} is None: write zeros for a parameter without a gradient")
        elif not isinstance(entry, Tensor):
            lines.append(f"  {name} is a {type(entry).__name__}: write torch.as_tensor(value)")
        elif not (entry.is_floating_point() or entry.is_complex()):
            lines.append(f"  {name} is of {entry.dtype}: write tensor.float()")
        elif entry.is_meta:
            lines.append(f"  {name} is on the meta device, and has no values")
    if lines:
        raise TypeError("\n".join(["the vector has entries that cannot be multiplied:", *lines]))


def leading(vector: Vector, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The additional dimensions of a vector, in front of those of the parameters: those that most of its tensors have,
    so that `check_fits` names the others; none, if as many tensors have none."""
    if not isinstance(vector, Mapping):
        return ()
    ranks = {name: vector[name].dim() - len(shapes[name]) for name in shapes if name in vector}
    if not any(ranks.values()):  # a vector of a step
        return ()
    leads = [tuple(vector[n].shape[:k]) for n, k in ranks.items() if tuple(vector[n].shape[k:]) == tuple(shapes[n])]
    most: tuple[int, ...] = ()
    if all(lead == leads[0] for lead in leads):
        return leads[0] if leads else most
    for lead in leads:  # plain loops, which Dynamo traces
        votes, votes_of_most = (sum(other == candidate for other in leads) for candidate in (lead, most))
        if votes > votes_of_most:
            most = lead
    return most


# From (a vector, whether the map is transposed) to a vector of the same names and shapes.
Map = Callable[[Tensors, bool], Tensors]


def applied(map: Map, vector: Vector, transposed: bool = False) -> Tensors:
    """X v, or Xᵀ v, differentiable in v.

    map: takes vectors with any additional dimensions in front if it is used inside of torch.func.vmap.
    """
    if not is_differentiated(vector.values()):
        with torch.no_grad():
            return map(dict(vector), transposed)
    names = tuple(vector)
    products = cast(Any, Applied).apply(map, transposed, names, *vector.values())
    return dict(zip(names, products, strict=True))


def is_differentiated(tensors: Any) -> bool:
    """Whether a derivative by one of these may be asked for: by autograd, or by a transformation of torch.func."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return not torch.compiler.is_compiling() and transforms() > 0


class Applied(torch.autograd.Function):
    """See `applied`."""

    @staticmethod
    def forward(map: Map, transposed: bool, names: Sequence[str], *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            product = map(dict(zip(names, tensors, strict=True)), transposed)
        return tuple(product[name] for name in names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map, ctx.transposed, ctx.names, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = applied(ctx.map, dict(zip(ctx.names, gradients, strict=True)), not ctx.transposed)
        return None, None, None, *(back[name] for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        pushed = applied(ctx.map, dict(zip(ctx.names, tangents[3:], strict=True)), ctx.transposed)
        return tuple(pushed[name] for name in ctx.names)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], map: Map, transposed: bool, names: Any, *tensors: Tensor) -> Any:
        def in_front(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

        many = [in_front(tensor, dim) for tensor, dim in zip(tensors, in_dims[3:], strict=True)]
        products = applied(map, dict(zip(names, many, strict=True)), transposed)
        return tuple(products[name] for name in names), (0,) * len(names)


def inverse_power(
    multiply: Callable[[Tensor], Tensor], vector: Tensor, alpha: float, smallest: float, tolerance: float, most: int
) -> tuple[Tensor, float]:
    """(F^-α u, a bound of its relative error), as soon as the bound is within the tolerance, or after `most` steps.

    Lanczos' process makes an orthonormal basis V of u, F u, F² u, ... with Vᵀ F V = T tridiagonal, and takes

        F^-α u  ≈  V T^-α Vᵀ u,    0 < α < 1

    (Druskin & Knizhnerman 1989, "Two polynomial methods of calculating functions of symmetric matrices"). Let λ be at
    most the smallest eigenvalue of F. The error is then at most λ^-α times the residual that conjugate gradients for
    F⁻¹ u would have at this step (Ilić, Turner & Simpson 2010, "A restarted Lanczos approximation to functions of a
    symmetric matrix"). This residual is Π β / Π d, with all pivots d of T and all numbers β beside its diagonal.

    `multiply` is F on vectors [K], `vector` is u in the precision to compute in, `smallest` is a lower bound of the
    eigenvalues of F. Every new vector is made orthogonal to all others, so the basis takes steps · K numbers. Waits for
    the device.
    """
    norm = float(vector.norm())
    if norm == 0:
        return vector, 0.0
    basis = (vector / norm).repeat(min(most, 32), 1)  # doubled when full; rows beyond `step` are not used
    diagonal: list[float] = []
    beside: list[float] = []
    pivot, residual = 1.0, 1.0
    for step in range(min(most, len(vector))):
        product = multiply(basis[step])
        diagonal.append(float(product @ basis[step]))
        pivot = diagonal[-1] - (beside[-1] ** 2 / pivot if beside else 0)
        for _ in range(2):  # one pass leaves rounding errors
            product = product - basis[: step + 1].mT @ (basis[: step + 1] @ product)
        beta = float(product.norm())
        exhausted = step + 1 == len(vector) or beta <= torch.finfo(vector.dtype).eps * max(diagonal)
        residual = 0.0 if exhausted else residual * beta / pivot
        if residual <= tolerance or step + 1 == most:
            values = tridiagonal_power(diagonal, beside, alpha).to(vector)
            error = residual * smallest**-alpha / float(values.norm())
            if error <= tolerance or step + 1 == most:
                return norm * (values @ basis[: step + 1]), error
        beside.append(beta)
        if step + 1 == len(basis):
            basis = torch.cat([basis, basis])
        basis[step + 1] = product / beta
    raise AssertionError("bug in kfac_fx: Lanczos' process went on in an exhausted space")


def tridiagonal_power(diagonal: list[float], beside: list[float], alpha: float) -> Tensor:
    """The first column of T^-α, [m], in float64."""
    t = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        t = t + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(t)
    column: Tensor = vectors @ (values**-alpha * vectors[0])
    return column


# --- linear systems ---------------------------------------------------------------------------------------------------


NamedProduct = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class Solution(NamedTuple):
    """The result of `solve`.

    Attributes:
        vector: x, with the dimensions of v.
        residuals: |v - (H + δ I) x| / |v| of every right-hand side, as the recursion has it: at the start and after
            every iteration, [iterations + 1, ...].
        converged: whether the last residual is within the tolerance, [...].
    """

    vector: dict[str, Tensor]
    residuals: Tensor
    converged: Tensor

    @property
    def iterations(self) -> int:
        return len(self.residuals) - 1


class ConvergenceWarning(UserWarning):
    """A solver stopped before it reached its tolerance."""

    __module__ = "kfac_fx"


def conjugate_gradients(
    vector: Mapping[str, Tensor],
    multiply: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    precondition: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    lead: tuple[int, ...],
    tolerance: float,
    iterations: int,
) -> Solution:
    """Solve A x = v for A = `multiply`, positive definite, by conjugate gradients, for many right-hand sides at once.

    Every right-hand side has coefficients of its own. If A = H + δ I for a curvature matrix H, and `precondition` is a
    spectrum with s F near to H, few iterations suffice (Martens 2010, "Deep learning via Hessian-free optimization",
    section 4). Waits for the device in every iteration.

    lead: the first dimensions of all tensors, which count right-hand sides.
    """

    def inner(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(left[n] * right[n]).reshape(*lead, -1).sum(-1) for n in left]).sum(0)

    def added(left: Mapping[str, Tensor], scale: Tensor, right: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: left[n] + scale.view((*lead, *[1] * (left[n].dim() - len(lead)))) * right[n] for n in left}

    solution = {name: torch.zeros_like(tensor) for name, tensor in vector.items()}
    residual = dict(vector)
    norm = inner(vector, vector).sqrt()
    residuals = [torch.where(norm > 0, 1.0, 0.0).to(norm)]
    direction = precondition(residual)
    product = inner(residual, direction)
    for _ in range(iterations):
        active = residuals[-1] > tolerance
        if not active.any():
            break
        image = multiply(direction)
        curvature = inner(direction, image)
        if bool((active & ~(curvature > 0)).any()):
            raise ValueError(
                "conjugate gradients met a direction without positive curvature: `product` is not that of a symmetric "
                "matrix without negative eigenvalues, or the damping is zero where it is singular."
            )
        step = torch.where(active, product / curvature, 0)
        solution = added(solution, step, direction)
        residual = added(residual, -step, image)
        residuals.append(torch.where(norm > 0, inner(residual, residual).sqrt() / norm, 0))
        turned = precondition(residual)
        following = inner(residual, turned)
        direction = added(turned, torch.where(active, following / product, 0), direction)
        product = following
    converged = residuals[-1] <= tolerance
    if not bool(converged.all()):
        warn_user(
            ConvergenceWarning(
                f"{int((~converged).sum())} of {converged.numel()} right-hand sides have a residual of up to "
                f"{float(residuals[-1].max()):.0e} after {iterations} iterations, and the tolerance is {tolerance:.0e}."
                " Write more iterations= or a larger tolerance=; a larger damping converges in fewer iterations."
            )
        )
    return Solution(solution, torch.stack(residuals), converged)


# --- products with a Jacobian in reverse mode -------------------------------------------------------------------------

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
        check_backward(lambda: [values[n] for n in live], leaves, live, tangents, pushed, check)
    return tuple(v.detach() for v in values), tuple(torch.stack(products) for products in zip(*pushed, strict=True))


def check_backward(
    values_of: Callable[[], Sequence[Tensor]],
    leaves: Sequence[Tensor],
    live: Sequence[int],
    tangents: Sequence[Tensor],
    pushed: Sequence[Sequence[Tensor]],
    total: Total,
    said: str = "the backward of an autograd.Function is not linear in the gradient, or hides it",
) -> None:
    """`check_linear` for some cotangents of values. values_of: the values at the leaves, for one backward. live: their
    places among all."""
    for number in range(COTANGENTS):
        values = values_of()
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
