"""Uses by parts: what of each parameter is where in the matrix [g, o, i] of a use, and the uses that these make.

Outputs that are a parameter's own have gradient rows of their own, and inputs have rows, so every part of a use is one
of the same layer on a region of its matrix.
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
from ..pieces import Piece, Region, constant_along, layout_in, region_in, view_of, viewed, whole
from .elementwise import placed, side_of
from .gains import constant_in, gains_of, reads_ids
from .jacobian import PerCase
from .product import uses_of_factors
from .slices import Sliced

NOTHING = (0, 0)


@dataclass(frozen=True)
class Part:
    """Some elements of a parameter in the matrix of a use.

    view: of the parameter, as [g, o, i]; [g, o, 1] for a bias. piece: None for a parameter that is not cut.
    """

    role: str
    parameter: str
    view: Tensor
    region: Region
    scale: float = 1.0
    piece: Piece | None = None
    slopes: tuple[Parametrization, ...] = ()


def parts_of(use: Use, program: Program) -> list[Part] | None:
    """The parameters in a use's matrix, without roles that do not say where they are in it; None if there are none, if
    a whole parameter is copied on the way, and for a composite layer."""
    if program.layers[use.layer].parts or any(isinstance(step, PerCase) for step in use.through):
        return None
    found: list[Part] = []
    for role, bound in use.parameters.items():
        view = viewed(bound.layout, whole(bound.used.shape))
        if view is None:
            return None
        found.append(Part(role, bound.parameter, as_matrix(view), everywhere(as_matrix(view)), bound.scale))
    for role in use.made:
        found += parts_made(use, role, program) or []
    return found or None


def parts_made(use: Use, role: str, program: Program) -> list[Part] | None:
    form, (made, canonical) = program.layers[use.layer].forms[use.form], use.made[role]
    matrix = viewed(canonical, whole(made.shape))
    found: list[Part] = []
    for slab in made.slabs:
        try:
            layout = form.layout(role, Layout(slab.shape), use.attrs)
        except LayerError:
            return None
        box = whole(made.shape)[tuple(slice(*ends) for ends in slab.box)]
        place, view = viewed(layout, box), viewed(layout, view_of(slab))
        if matrix is None or place is None or view is None:
            return None
        region = region_in(as_matrix(matrix), as_matrix(place))
        if region is None:
            return None
        part = Part(role, slab.parameter, as_matrix(view), region, slab.scale, None, slab.slopes)
        if slab.slopes and sides_of(part, tuple(program.parameters[slab.parameter].shape)) is None:
            return None
        found.append(part)
    return found


def taken_apart(use: Use, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """A use for every part of the weight, with the bias of its outputs, and for every bias that has no such weight.
    What has slopes is on its own: they are not those of its partner."""
    biases = {part.region[:2]: part for part in parts if part.role == "bias"}
    for part in sorted((part for part in parts if part.role == "weight"), key=lambda part: part.region):
        bias = biases.get(part.region[:2])
        if bias is None or bias.slopes or part.slopes:
            yield (own := use_of(use, part.region, [part], shapes))
            yield from gains_of(own, shapes)
        else:
            yield use_of(use, part.region, [part, biases.pop(part.region[:2])], shapes)
    for region, bias in biases.items():
        yield use_of(use, (*region, NOTHING), [bias], shapes)


def whole_uses(use: Use, shapes: Mapping[str, Shape]) -> list[Use] | None:
    """Of a use whose expressions hold all of a parameter each, in whatever order, or products; None if one does not.

    The matrix of a transposed convolution is no view of its weight, so nothing says what a part of it would be.
    """
    found: dict[str, Bound] = dict(use.parameters)
    apart: list[Use] = []
    for role, (made, canonical) in use.made.items():
        for slab in made.slabs:
            own = shapes[slab.parameter]
            used = layout_in(Piece(slab.parameter, 0, 0, *own[:1] or (1,)), own, view_of(slab))
            if slab.shape != made.shape or used is None:
                return None
            bound = Bound(slab.parameter, used, canonical, slab.scale)
            if role not in found and not slab.slopes:
                found[role] = bound
                continue
            if slab.slopes and role != "weight":
                return None
            side = side_of(slab.slopes, (*canonical.result, 1)[:3], constant_in(bound.layout))
            if slab.slopes and side is None:
                return None
            through = placed(slab.slopes, bound.layout, side)
            own_use = replace(use, parameters={role: bound}, made={}, through=through)
            apart += [own_use, *gains_of(own_use, shapes)]
        if made.products and role == "weight":
            apart += uses_of_factors(use, made, canonical, reads_ids(use))
    return [*apart, *([replace(use, parameters=found, made={})] if found else [])]


def use_of(use: Use, region: Region, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Use:
    layouts = {role: bound.layout for role, bound in use.parameters.items()}
    layouts |= {role: layout for role, (_, layout) in use.made.items()}
    g, o, i = layouts["weight"].result if "weight" in layouts else (*layouts["bias"].result, 0)
    bound = {part.role: bound_to(part, shapes[part.parameter]) for part in parts}
    all_of_it = region == ((0, g), (0, o), (0, i))
    first = parts[0]
    side = sides_of(first, shapes[first.parameter])
    functions = placed(first.slopes, bound[first.role].layout, side, first.piece)
    sliced = () if all_of_it else (Sliced(region),)
    return replace(use, parameters=bound, made={}, through=(*use.through, *sliced, *functions))


def sides_of(part: Part, shape: Shape) -> str | None:
    return side_of(part.slopes, part.view.shape, lambda dim, axis: constant_along(part.view, shape, dim, axis))


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
