"""Parameters that are used in pieces become pieces, each registered on its own; so do parameters whose use is put
together from several.

    linear(x, w[:4], b[:4])                          linear(w[0:4], b[0:4])
    linear(y, w[4:], b[4:])                          linear(w[4:12], b[4:12])

    linear(x, w, cat([q, zeros, v]))                 linear(w[0:4], q), linear(w[4:8]), linear(w[8:12], v)

A use is taken apart along its matrix [g, o, i]: what reaches outputs of its own, or comes from inputs of its own, has
rows of its own, so that every part is an exact registration. A parameter is cut along one dimension, where any of its
uses begins or ends and where its partner in a use, a weight's bias, is cut. What cannot be cut so stays whole; the uses
that would need it are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from torch import Tensor, fx

from .errors import LayerError
from .ir import Bound, Note, Program, Use, where
from .labels import Label, labels, reads_values, use_edges
from .matrix import Layout, Shape
from .pieces import (
    Piece,
    Region,
    Slab,
    Slope,
    axis_along,
    constant_along,
    layout_in,
    ranges,
    region_in,
    view_of,
    viewed,
    whole,
)
from .slopes import NORMALIZED, STANDARDIZED

OUTPUTS = (0, 1)  # the axes of a matrix that a weight has in common with a bias: groups and outputs
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
    slopes: tuple[Slope, ...] = ()


class Uncuttable(Exception):
    """A parameter cannot be cut as its uses need it; never leaves this module."""


@dataclass
class Plan:
    """Where parameters are cut: along which dimension, at which places beside their ends."""

    shapes: Mapping[str, Shape]
    dims: dict[str, int] = field(default_factory=dict)
    places: dict[str, set[int]] = field(default_factory=dict)

    def cut(self, parameter: str, dim: int, place: int) -> bool:
        """Returns whether there was need to. Raises Uncuttable."""
        known = self.places.setdefault(parameter, {0, self.shapes[parameter][dim]})
        if self.dims.setdefault(parameter, dim) != dim:
            raise Uncuttable(parameter)
        new = place not in known
        known.add(place)
        return new

    def pieces(self, parameter: str) -> list[Piece]:
        """Empty for what is not cut."""
        ends = sorted(self.places.get(parameter, ()))
        return [Piece(parameter, self.dims[parameter], *one) for one in pairwise(ends)] if len(ends) > 2 else []

    def divided(self, part: Part) -> list[Part]:
        """A part of a parameter as parts of its pieces. Raises Uncuttable."""
        pieces = self.pieces(part.parameter)
        if not pieces:
            return [part]
        dim, shape = self.dims[part.parameter], self.shapes[part.parameter]
        start, stop = ranges(part.view, shape).get(dim, NOTHING)
        inside = [piece for piece in pieces if start <= piece.start and piece.stop <= stop]
        if len(inside) == 1:
            return [replace(part, piece=inside[0])]
        along = axis_along(part.view, shape, dim, stop - start)
        if along is None:
            raise Uncuttable(part.parameter)
        axis, steps = along
        ends = [(steps * (one.start - start), steps * (one.stop - start)) for one in inside]
        return [between(part, axis, *one, piece) for one, piece in zip(ends, inside, strict=True)]


def between(part: Part, axis: int, start: int, stop: int, piece: Piece) -> Part:
    region, first = list(part.region), part.region[axis][0]
    region[axis] = first + start, first + stop
    g, o, i = region
    return replace(part, view=part.view.narrow(axis, start, stop - start), region=(g, o, i), piece=piece)


def cut(program: Program) -> Program:
    """See the module's docstring. Afterwards no match has a role that is an expression."""
    shapes = {name: tuple(parameter.shape) for name, parameter in program.parameters.items()}
    if not any(use.made for use in program.matches):
        return program.but(made={})
    cutter = Cutter(program, shapes)
    plan = cutter.plan()
    pieces = {piece.name: piece for name in program.parameters for piece in plan.pieces(name)}
    dropped = (*program.dropped, *cutter.notes)
    behind = behind_nodes(program, plan)
    return program.but(matches=tuple(cutter.matches(plan)), made={}, pieces=pieces, dropped=dropped, behind=behind)


class Cutter:
    """parts: of every use by its number among the matches, None where they are no views of parameters. rigid:
    parameters that may not be cut."""

    def __init__(self, program: Program, shapes: Mapping[str, Shape]) -> None:
        self.program, self.shapes = program, shapes
        self.parts = {number: parts_of(use, program) for number, use in enumerate(program.matches)}
        self.notes: list[Note] = []
        self.rigid: set[str] = set()
        for number, use in enumerate(program.matches):
            if self.parts[number] is None and use.made:
                self.forget(number, "its parameters have no place of their own in its matrix")
            elif self.parts[number] is None and not program.layers[use.layer].parts:
                self.rigid |= use.parameter_set
            sloped = [part for part in self.parts.get(number) or () if part.slopes]
            self.rigid |= {name for part in sloped for name in (part.parameter, *gains_in(part))}
        self.label = labels(program.graph, program.parameters, cases=program.cases)
        self.edges = use_edges(program.graph, self.label, program.outputs)

    def plan(self) -> Plan:
        """The first that no use objects to; every objection leaves one more parameter whole."""
        while True:
            self.drop()
            plan = Plan(self.shapes)
            try:
                self.cut_apart(plan)
                while sum(self.cut_alike(plan, parts) for parts in self.parts.values() if parts):
                    pass
                return plan
            except Uncuttable as error:
                self.rigid.add(str(error))

    def drop(self) -> None:
        """Uses of a part of what must stay whole; what they leave unmatched is read whole, too."""
        while True:
            self.rigid |= self.read_whole()
            dropped = [n for n, parts in self.parts.items() if parts and any(map(self.impossible, parts))]
            if not dropped:
                return
            for number in dropped:
                names = dict.fromkeys(part.parameter for part in self.parts[number] or () if self.impossible(part))
                self.forget(number, f"takes a part of {', '.join(names)}, which cannot be cut there")

    def forget(self, number: int, reason: str) -> None:
        use = self.program.matches[number]
        self.notes.append(Note(f"{use.layer} at {where(use.output)}", reason))
        del self.parts[number]

    def impossible(self, part: Part) -> bool:
        return part.parameter in self.rigid and partial(part.view, self.shapes[part.parameter])

    def read_whole(self) -> set[str]:
        """Parameters that something reads whole which no use explains."""
        explained: set[tuple[fx.Node, str]] = set()
        for number, parts in self.parts.items():
            use = self.program.matches[number]
            names = {part.parameter for part in parts or ()} | {bound.parameter for bound in use.parameters.values()}
            explained |= {(node, name) for node in use.nodes for name in names}
        return {name for pure, act in self.edges for name in self.wholes(pure) if (act, name) not in explained}

    def wholes(self, pure: fx.Node) -> set[str]:
        """The parameters that all of a node's value depends on."""
        names: set[str] = set()
        stack, seen = [pure], {pure}
        while stack:
            node = stack.pop()
            if node in self.program.made:
                slabs = self.program.made[node].slabs
                names |= {one.parameter for one in slabs if not partial(view_of(one), self.shapes[one.parameter])}
                continue
            if node.op == "get_attr" and self.label[node] is Label.PURE:
                names.add(str(node.target))
            operands = [n for n in node.all_input_nodes if reads_values(node, n) and n not in seen]
            seen.update(operands)
            stack += operands
        return names

    # --- places -----------------------------------------------------------------------------------------------------

    def cut_apart(self, plan: Plan) -> None:
        """Where parts of parameters begin and end."""
        for part in chain.from_iterable(parts or () for parts in self.parts.values()):
            shape = self.shapes[part.parameter]
            if partial(part.view, shape):
                found = ranges(part.view, shape)
                if not found:
                    raise Uncuttable(part.parameter)
                ((dim, ends),) = found.items()
                for place in ends:
                    plan.cut(part.parameter, dim, place)

    def cut_alike(self, plan: Plan, parts: Sequence[Part]) -> bool:
        """Weight and bias of a use where the other one is cut; returns whether anything had to be. Where it cannot be,
        they will be registered apart."""
        divided = [one for part in parts for one in plan.divided(part)]
        changed = False
        for axis in OUTPUTS:
            edges = {edge for one in divided for edge in one.region[axis]}
            for part in parts:
                start, stop = part.region[axis]
                for edge in edges:
                    if start < edge < stop and part.parameter not in self.rigid:
                        changed |= self.cut_at(plan, part, axis, edge - start)
        return changed

    def cut_at(self, plan: Plan, part: Part, axis: int, distance: int) -> bool:
        shape, name = self.shapes[part.parameter], part.parameter
        for dim, (start, stop) in ranges(part.view, shape).items():
            along = axis_along(part.view, shape, dim, stop - start)
            if plan.dims.get(name, dim) == dim and along is not None and along[0] == axis and not distance % along[1]:
                return plan.cut(name, dim, start + distance // along[1])
        return False

    # --- uses -------------------------------------------------------------------------------------------------------

    def matches(self, plan: Plan) -> Iterator[Use]:
        """The matches after the cuts, in their order."""
        for number, use in enumerate(self.program.matches):
            parts = self.parts.get(number)
            cut = any(plan.pieces(bound.parameter) for bound in use.parameters.values())
            if parts is not None and (use.made or cut):
                yield from taken_apart(use, [one for part in parts for one in plan.divided(part)], self.shapes)
            elif number in self.parts and not use.made and not cut:
                yield use


def parts_of(use: Use, program: Program) -> list[Part] | None:
    """The parameters in a use's matrix, without roles that do not say where they are in it; None if there are none, if
    a whole parameter is copied on the way, and for a composite layer."""
    if program.layers[use.layer].parts:
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
            yield use_of(use, part.region, [part], shapes)
            yield from gains_of(use, part, shapes)
        else:
            yield use_of(use, part.region, [part, biases.pop(part.region[:2])], shapes)
    for region, bias in biases.items():
        yield use_of(use, (*region, NOTHING), [bias], shapes)


def use_of(use: Use, region: Region, parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Use:
    layouts = {role: bound.layout for role, bound in use.parameters.items()}
    layouts |= {role: layout for role, (_, layout) in use.made.items()}
    g, o, i = layouts["weight"].result if "weight" in layouts else (*layouts["bias"].result, 0)
    bound = {part.role: bound_to(part, shapes[part.parameter]) for part in parts}
    all_of_it = region == ((0, g), (0, o), (0, i))
    use = replace(use, parameters=bound, made={}, region=None if all_of_it else region)
    return with_slopes(use, parts[0], shapes) if parts[0].slopes else use


def with_slopes(use: Use, part: Part, shapes: Mapping[str, Shape]) -> Use:
    """What the tap needs beside the input: arguments of the functions, and the gains."""
    nodes = {f"operand{n}": one.operand for n, one in enumerate(part.slopes)}
    nodes |= {f"factor{n}": one.factor for n, one in enumerate(part.slopes) if one.factor is not None}
    side = sides_of(part, shapes[part.parameter])
    return replace(use, attrs={**use.attrs, **nodes}, slopes=part.slopes, slope_side=side)


def gains_in(part: Part) -> list[str]:
    return [one.gain.parameter for one in part.slopes if one.gain is not None]


def gains_of(use: Use, part: Part, shapes: Mapping[str, Shape]) -> Iterator[Use]:
    """The gain of normalized filters as a layer of its own, if there is one for every output in their order."""
    found = next((one for one in part.slopes if one.gain is not None), None)
    (g, o, _), shape = part.view.shape, shapes[part.parameter]
    size = math.prod(shape[1:])
    ordered = part.view.stride(1) == size and (g == 1 or part.view.stride(0) == o * size)
    if found is None or found.gain is None or not ordered or shape[0] != g * o:
        return
    gain, own = found.gain, shapes[found.gain.parameter]
    if math.prod(own) != g * o or sides_of(part, shape) != "outputs":
        return
    bound = Bound(gain.parameter, Layout(own), Layout(own).reshape((g * o, 1, 1)), gain.scale * part.scale)
    filters = bound_to(part, shape).layout
    attrs = {**use.attrs, "operand0": found.operand}
    yield replace(use, parameters={"weight": bound}, made={}, attrs=attrs, gain_of=(found, filters))


def sides_of(part: Part, shape: Shape) -> str | None:
    """Whether what the slopes multiply varies along outputs only, or along inputs only; None if along both."""
    g, o, i = part.view.shape
    dims = [0 if one.name == STANDARDIZED else one.settings[0] for one in part.slopes if one.name in NORMALIZED]
    if dims:
        outputs = constant_along(part.view, shape, dims[0], 2)
        inputs = all(constant_along(part.view, shape, dims[0], axis) for axis in OUTPUTS)
    else:
        outputs, inputs = i == 1, g * o == 1
    return "outputs" if outputs else "inputs" if inputs else None


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


def behind_nodes(program: Program, plan: Plan) -> dict[fx.Node, frozenset[str]]:
    """What the nodes are made of that pieces stand behind."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr" and (pieces := plan.pieces(str(node.target))):
            found[node] = frozenset(piece.name for piece in pieces)
    for node, made in program.made.items():
        if any(plan.pieces(slab.parameter) for slab in made.slabs):
            found[node] = frozenset(name for slab in made.slabs for name in names_in(slab, plan))
    return found


def names_in(slab: Slab, plan: Plan) -> list[str]:
    """The pieces that a slab may read."""
    pieces, shape = plan.pieces(slab.parameter), plan.shapes[slab.parameter]
    if not pieces:
        return [slab.parameter]
    dim = pieces[0].dim
    start, stop = ranges(view_of(slab), shape).get(dim, (0, shape[dim]))
    return [one.name for one in pieces if start < one.stop and one.start < stop]
