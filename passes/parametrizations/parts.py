"""Uses taken apart: where in the matrix [g, o, i] of a use the elements of each parameter are, and the uses of these.

    linear(x, torch.cat([w, v * e]))    w at outputs 0:4, v at outputs 4:6, and e a gain of the latter

Each part is a use of the same layer on a region of its matrix, see `slices`, with the functions that its parameter goes
through, see `elementwise`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import LayerError
from ..ir import Bound, Program, Use
from ..matrix import Layout, Shape
from ..parametrization import Parametrization
from ..pieces import Piece, Region, constant_along, layout_in, region_in, unallocated, view_of, viewed
from .elementwise import placed, side_of
from .gains import constant_in, gains_of, reads_ids
from .jacobian import PerCase
from .product import uses_of_factors
from .slices import Sliced

NOTHING = (0, 0)


@dataclass(frozen=True)
class Part:
    """Some elements of a parameter in the matrix of a use.

    view: of the parameter, as [g, o, i]; [g, o, 1] for a bias.
    region: where they are in the matrix.
    scale: the matrix has a multiple of them.
    piece: the piece of the parameter that they are; None for a parameter that is not cut.
    through: the functions that the parameter goes through.
    """

    role: str
    parameter: str
    view: Tensor
    region: Region
    scale: float = 1.0
    piece: Piece | None = None
    through: tuple[Parametrization, ...] = ()


def parts_of(use: Use, program: Program) -> list[Part] | None:
    """The parameters in a use's matrix, without roles whose place in it is not known. None if there are none, if a
    whole parameter is copied on the way, and for a composite layer."""
    if program.layers[use.layer].parts or any(isinstance(step, PerCase) for step in use.through):
        return None
    parts: list[Part] = []
    for role, bound in use.parameters.items():
        view = viewed(bound.layout, unallocated(bound.used.shape))
        if view is None:
            return None
        parts.append(Part(role, bound.parameter, as_matrix(view), everywhere(as_matrix(view)), bound.scale))
    for role in use.exprs:
        parts += parts_of_expr(use, role, program) or []
    return parts or None


def parts_of_expr(use: Use, role: str, program: Program) -> list[Part] | None:
    form, (expr, canonical) = program.layers[use.layer].forms[use.form], use.exprs[role]
    matrix = viewed(canonical, unallocated(expr.shape))
    parts: list[Part] = []
    for slice_ in expr.slices:
        try:
            layout = form.layout(role, Layout(slice_.shape), use.attrs)
        except LayerError:
            return None
        box = unallocated(expr.shape)[tuple(slice(*ends) for ends in slice_.box)]
        place, view = viewed(layout, box), viewed(layout, view_of(slice_))
        if matrix is None or place is None or view is None:
            return None
        region = region_in(as_matrix(matrix), as_matrix(place))
        if region is None:
            return None
        part = Part(role, slice_.parameter, as_matrix(view), region, slice_.scale, None, slice_.through)
        if slice_.through and sides_of(part, tuple(program.parameters[slice_.parameter].shape)) is None:
            return None
        parts.append(part)
    return parts


def taken_apart(use: Use, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """A use for every part of the weight, with the bias of its outputs, and for every bias that has no such weight. A
    part that goes through functions is on its own: they are not those of its partner. So is a bias that is the weight
    itself."""
    biases = {part.region[:2]: part for part in parts if part.role == "bias"}
    for part in sorted((part for part in parts if part.role == "weight"), key=lambda part: part.region):
        bias = biases.get(part.region[:2])
        if bias is None or bias.through or part.through or share_elements(part, bias):
            yield (alone := use_of(use, part.region, [part], shapes))
            yield from gains_of(alone, shapes)
        else:
            yield use_of(use, part.region, [part, biases.pop(part.region[:2])], shapes)
    for region, bias in biases.items():
        yield use_of(use, (*region, NOTHING), [bias], shapes)


def share_elements(part: Part, other: Part) -> bool:
    """Whether one parameter, or one piece, has both roles: `layer_norm(x, (3,), g, 2 * g)`."""
    return (part.parameter, part.piece) == (other.parameter, other.piece)


def whole_uses(use: Use, shapes: Mapping[str, Shape]) -> list[Use] | None:
    """The uses that a use is taken apart into if its expressions are products, or all of a parameter each in any order;
    None if one is not. The matrix of a transposed convolution, which is no view of its weight, has such uses only."""
    whole: dict[str, Bound] = dict(use.parameters)
    apart: list[Use] = []
    for role, (expr, canonical) in use.exprs.items():
        for slice_ in expr.slices:
            shape = shapes[slice_.parameter]
            used = layout_in(Piece(slice_.parameter, 0, 0, *shape[:1] or (1,)), shape, view_of(slice_))
            if slice_.shape != expr.shape or used is None:
                return None
            bound = Bound(slice_.parameter, used, canonical, slice_.scale)
            elsewhere = any(other.parameter == slice_.parameter for other in whole.values())
            if role not in whole and not slice_.through and not elsewhere:
                whole[role] = bound
                continue
            if slice_.through and role != "weight":
                return None
            side = side_of(slice_.through, (*canonical.result, 1)[:3], constant_in(bound.layout))
            if slice_.through and side is None:
                return None
            through = placed(slice_.through, bound.layout, side)
            alone = replace(use, parameters={role: bound}, exprs={}, through=through)
            apart += [alone, *gains_of(alone, shapes)]
        if expr.products and role == "weight":
            apart += uses_of_factors(use, expr, canonical, reads_ids(use))
    return [*apart, *([replace(use, parameters=whole, exprs={})] if whole else [])]


def use_of(use: Use, region: Region, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Use:
    layouts = {role: bound.layout for role, bound in use.parameters.items()}
    layouts |= {role: layout for role, (_, layout) in use.exprs.items()}
    g, o, i = layouts["weight"].result if "weight" in layouts else (*layouts["bias"].result, 0)
    bound = {part.role: bound_to(part, shapes[part.parameter]) for part in parts}
    all_of_it = region == ((0, g), (0, o), (0, i))
    first = parts[0]
    side = sides_of(first, shapes[first.parameter])
    functions = placed(first.through, bound[first.role].layout, side, first.piece)
    sliced = () if all_of_it else (Sliced(region),)
    return replace(use, parameters=bound, exprs={}, through=(*use.through, *sliced, *functions))


def sides_of(part: Part, shape: Shape) -> str | None:
    return side_of(part.through, part.view.shape, lambda dim, axis: constant_along(part.view, shape, dim, axis))


def bound_to(part: Part, shape: Shape) -> Bound:
    piece = part.piece or Piece(part.parameter, 0, 0, *shape[:1] or (1,))
    layout = layout_in(piece, shape, part.view if part.role == "weight" else part.view[..., 0])
    assert layout is not None, f"bug in kfac_fx: a part of {part.parameter} that is not what was cut"
    name = part.parameter if part.piece is None else part.piece.name
    return Bound(name, layout, Layout(layout.result), part.scale)


def partial(view: Tensor, shape: Shape) -> bool:
    return view.numel() < math.prod(shape)


def as_matrix(view: Tensor) -> Tensor:
    """[g, o, i], also of a bias."""
    return view if view.dim() == 3 else view.unsqueeze(-1)


def everywhere(matrix: Tensor) -> Region:
    g, o, i = ((0, int(size)) for size in matrix.shape)
    return g, o, i
