"""Parameters that are used in pieces become pieces, each registered on its own; so do parameters whose use is put
together from several.

    linear(x, w[:4], b[:4])                          linear(w[0:4], b[0:4])
    linear(y, w[4:], b[4:])                          linear(w[4:12], b[4:12])

    linear(x, w, cat([q, zeros, v]))                 linear(w[0:4], q), linear(w[4:8]), linear(w[8:12], v)

    linear(x, w), and the user asks for w[0:4]       linear(w[0:4]), linear(w[4:12])

A use is taken apart along its matrix [g, o, i]: what reaches outputs of its own, or comes from inputs of its own, has
rows of its own, so that every part is an exact registration. A parameter is cut along one dimension, where any of its
uses begins or ends and where its partner in a use, a weight's bias, is cut. Parameters that cannot be cut so stay
whole; the uses that would need it are dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from torch import fx

from .graphs.labels import Label, differentiated, labels_of, parameters_behind, use_edges
from .ir import Note, Program, Use
from .matrix import Shape
from .parametrization import nodes_of
from .parametrizations.functions import by_jacobian, in_pieces, small_functions
from .parametrizations.normalized import BySlice, WithGain
from .parametrizations.parts import NOTHING, Part, partial, parts_of, parts_of_expr, sides_of, taken_apart, whole_uses
from .parametrizations.product import ProductFactor
from .pieces import ParameterExpr, Piece, Slice, axis_along, ranges, view_of
from .users_code import where

OUTPUTS = (0, 1)  # the axes of a matrix that a weight has in common with a bias: groups and outputs


def cut(program: Program) -> Program:
    """See the module's docstring. Afterwards no match has a role that is an expression."""
    shapes = {name: tuple(parameter.shape) for name, parameter in program.parameters.items()}
    uses = [with_functions(use, program, shapes) for use in program.matches]
    program = program.but(matches=tuple(part for use in uses for part in by_jacobian(use, shapes)))
    if not any(use.exprs for use in program.matches) and not program.options.pieces:
        return program.but(parameter_exprs={})
    cutter = Cutter(program, shapes)
    plan = cutter.plan()
    pieces = {piece.name: piece for name in program.parameters for piece in plan.pieces(name)}
    dropped = (*program.dropped, *cutter.notes)
    behind = behind_nodes(program, plan, cutter.label)
    return program.but(
        matches=tuple(cutter.matches(plan)), parameter_exprs={}, pieces=pieces, dropped=dropped, behind=behind
    )


def with_functions(use: Use, program: Program, shapes: Mapping[str, Shape]) -> Use:
    """A use with small functions of parameters instead of expressions whose elements go neither with the outputs nor
    with the inputs of its matrix, as those of `x @ w.exp()`, and instead of products whose factors are no matrices in
    it, as the bases of a relational graph network."""
    exprs = dict(use.exprs)
    for role, (expr, canonical) in use.exprs.items():
        nodes = [node for node, value in program.parameter_exprs.items() if value is expr]
        if expr.products:
            placed = {name for part in whole_uses(use, shapes) or () for name in part.parameter_set}
            if placed.issuperset(product.parameter for product in expr.products):
                continue
        elif not any(slice_.through for slice_ in expr.slices):
            continue
        else:
            exact = parts_of_expr(use, role, program, exact=True) or whole_uses(use, shapes, exact=True)
            if exact is not None and not lost(expr, nodes, labels_of(program)):
                continue
        for small in small_functions(program, labels_of(program), nodes[:1], in_pieces(program)).values():
            exprs[role] = small, canonical
    return use if exprs == use.exprs else replace(use, exprs=exprs)


def lost(expr: ParameterExpr, nodes: Sequence[fx.Node], label: Mapping[fx.Node, Label]) -> set[str]:
    """The parameters behind a node of which its expression has neither elements nor gains."""
    steps = [step for slice_ in expr.slices for step in slice_.through if isinstance(step, WithGain)]
    kept = {slice_.parameter for slice_ in expr.slices} | {step.gain.parameter for step in steps if step.gain}
    return set[str]().union(*(parameters_behind(node, label) for node in nodes[:1])) - kept


class Cutter:
    """Where parameters may be cut.

    parts: of every use by its number among the matches; None where they are no views of parameters.
    entire: uses of whole parameters instead of such a use.
    rigid: parameters that may not be cut.
    """

    def __init__(self, program: Program, shapes: Mapping[str, Shape]) -> None:
        self.program, self.shapes = program, shapes
        self.parts = {number: parts_of(use, program) for number, use in enumerate(program.matches)}
        self.notes: list[Note] = []
        self.rigid: set[str] = set()
        self.entire: dict[int, list[Use]] = {}
        for number, use in enumerate(program.matches):
            placed = {part.role for part in self.parts[number] or ()}
            products = any(expr.products for expr, _ in use.exprs.values())
            entire = whole_uses(use, shapes) if products or use.exprs.keys() - placed else None
            if entire is not None:
                self.parts[number], self.entire[number] = None, entire
                self.rigid |= {name for part in entire for name in part.parameter_set}
            elif self.parts[number] is None and use.exprs:
                self.forget(number, "its parameters have no place of their own in its matrix")
            elif self.parts[number] is None and not program.layers[use.layer].parts:
                self.rigid |= use.parameter_set
            for part in self.parts.get(number) or ():
                steps = [step for step in part.through if isinstance(step, BySlice)]
                gains = [step.gain for step in steps if isinstance(step, WithGain) and step.gain is not None]
                spread = bool(part.through) and sides_of(part, shapes[part.parameter]) is None
                self.rigid.update([part.parameter] * (spread or bool(steps)), (gain.parameter for gain in gains))
        self.drop_factors()
        self.label = labels_of(program)
        self.edges = use_edges(program.graph, self.label, program.outputs)

    def drop_factors(self) -> None:
        """Drop the factors of products that another use lays out in other groups."""
        groups: dict[str, set[int]] = defaultdict(set)
        others = [use for number, use in enumerate(self.program.matches) if number not in self.entire]
        for use in chain(others, *self.entire.values()):
            for role, bound in use.parameters.items():
                if role == "weight" and not self.program.layers[use.layer].parts:
                    groups[bound.parameter].add(bound.layout.result[0])
        for number, parts in self.parts.items():
            exprs = self.program.matches[number].exprs
            for part in parts or ():
                if part.role == "weight" and "weight" in exprs:
                    groups[part.parameter].add(exprs["weight"][1].result[0])
        for number, uses in self.entire.items():
            consistent = [
                use for use in uses if not is_factor(use) or all(len(groups[n]) == 1 for n in use.parameter_set)
            ]
            if len(consistent) < len(uses):
                self.entire[number] = consistent
                reason = "a factor of its weight has a use of another form"
                self.notes.append(Note(f"{uses[0].layer} at {where(uses[0].output)}", reason))

    def plan(self) -> Plan:
        """The first plan that no use objects to; every objection leaves one more parameter whole."""
        while True:
            self.drop()
            plan = Plan(self.shapes)
            try:
                self.cut_as_asked(plan)
                self.cut_apart(plan)
                while sum(self.cut_alike(plan, parts) for parts in self.parts.values() if parts):
                    pass
                return plan
            except Uncuttable as error:
                self.rigid.add(str(error))

    def drop(self) -> None:
        """Drop uses of a part of what must stay whole. The parameters that they leave unmatched are read whole, too."""
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
        """Parameters that a node reads whole which no use explains."""
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
            if node in self.program.parameter_exprs:
                slices = self.program.parameter_exprs[node].slices
                names |= {part.parameter for part in slices if not partial(view_of(part), self.shapes[part.parameter])}
                names |= {product.parameter for product in self.program.parameter_exprs[node].products}
                continue
            if node.op == "get_attr" and self.label[node] is Label.PURE:
                names.add(str(node.target))
            operands = [n for n in differentiated(node) if n not in seen]
            seen.update(operands)
            stack += operands
        return names

    # --- places -----------------------------------------------------------------------------------------------------

    def cut_as_asked(self, plan: Plan) -> None:
        for piece in self.program.options.pieces:
            if piece.parameter in self.shapes and piece.parameter not in self.rigid:
                for place in (piece.start, piece.stop):
                    plan.cut(piece.parameter, piece.dim, place)

    def cut_apart(self, plan: Plan) -> None:
        """Where parts of parameters begin and end."""
        for part in chain.from_iterable(parts or () for parts in self.parts.values()):
            shape = self.shapes[part.parameter]
            if partial(part.view, shape):
                along = ranges(part.view, shape)
                if not along:
                    raise Uncuttable(part.parameter)
                ((dim, ends),) = along.items()
                for place in ends:
                    plan.cut(part.parameter, dim, place)

    def cut_alike(self, plan: Plan, parts: Sequence[Part]) -> bool:
        """Cut the weight and the bias of a use where the other one is cut. Where one cannot be cut, they are registered
        apart. Returns whether there was need to."""
        divided = [piece for part in parts for piece in plan.divided(part)]
        changed = False
        for axis in OUTPUTS:
            edges = {edge for piece in divided for edge in piece.region[axis]}
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
            cut = any(plan.cuts(bound.parameter) for bound in use.parameters.values())
            yield from self.entire.get(number, ())
            if parts is not None and (use.exprs or cut):
                yield from taken_apart(use, [piece for part in parts for piece in plan.divided(part)], self.shapes)
            elif number in self.parts and not use.exprs and not cut:
                yield use


def is_factor(use: Use) -> bool:
    return any(isinstance(step, ProductFactor) for step in use.through)


def behind_nodes(program: Program, plan: Plan, label: Mapping[fx.Node, Label]) -> dict[fx.Node, frozenset[str]]:
    """The pieces and parameters behind every node that is an expression or is cut."""
    behind: dict[fx.Node, frozenset[str]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr" and (pieces := plan.pieces(str(node.target))):
            behind[node] = frozenset(piece.name for piece in pieces)
    for node, expr in program.parameter_exprs.items():
        steps = [step for slice_ in expr.slices for step in slice_.through]
        factors = [
            node for step in steps for key, value in step.nodes.items() if key != "operand" for node in nodes_of(value)
        ]
        factors += [node] if expr.products else []
        names = {name for slice_ in expr.slices for name in names_in(slice_, plan)}
        behind[node] = frozenset(names.union(*(parameters_behind(factor, label, behind) for factor in factors)))
    return behind


def names_in(slice_: Slice, plan: Plan) -> list[str]:
    """The pieces that a slice may read."""
    if not plan.cuts(slice_.parameter):
        return [slice_.parameter]
    dim, shape = plan.dims[slice_.parameter], plan.shapes[slice_.parameter]
    start, stop = ranges(view_of(slice_), shape).get(dim, (0, shape[dim]))
    return [piece.name for piece in plan.meeting(slice_.parameter, start, stop)]


# --- where parameters are cut -----------------------------------------------------------------------------------------


class Uncuttable(Exception):
    """A parameter cannot be cut as its uses need it; never leaves passes.cut."""


@dataclass
class Plan:
    """Where parameters are cut: along which dimension, and at which places, in order; their ends are among these."""

    shapes: Mapping[str, Shape]
    dims: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[int]] = field(default_factory=dict)

    def cut(self, parameter: str, dim: int, place: int) -> bool:
        """Returns whether there was need to. Raises Uncuttable."""
        cuts = self.places.setdefault(parameter, [0, self.shapes[parameter][dim]])
        if self.dims.setdefault(parameter, dim) != dim:
            raise Uncuttable(parameter)
        at = bisect_left(cuts, place)
        if at < len(cuts) and cuts[at] == place:
            return False
        cuts.insert(at, place)
        return True

    def cuts(self, parameter: str) -> bool:
        return len(self.places.get(parameter, ())) > 2

    def pieces(self, parameter: str) -> list[Piece]:
        """Empty for what is not cut."""
        return self.at(parameter, self.places[parameter]) if self.cuts(parameter) else []

    def at(self, parameter: str, places: Sequence[int]) -> list[Piece]:
        return [Piece(parameter, self.dims[parameter], *ends) for ends in pairwise(places)]

    def inside(self, parameter: str, start: int, stop: int) -> list[Piece]:
        """The pieces of a cut parameter that have no element outside."""
        places = self.places[parameter]
        return self.at(parameter, places[bisect_left(places, start) : bisect_right(places, stop)])

    def meeting(self, parameter: str, start: int, stop: int) -> list[Piece]:
        """The pieces of a cut parameter that have an element between."""
        places = self.places[parameter]
        return self.at(parameter, places[bisect_right(places, start) - 1 : bisect_left(places, stop) + 1])

    def divided(self, part: Part) -> list[Part]:
        """A part of a parameter as parts of its pieces. Raises Uncuttable."""
        if not self.cuts(part.parameter):
            return [part]
        dim, shape = self.dims[part.parameter], self.shapes[part.parameter]
        start, stop = ranges(part.view, shape).get(dim, NOTHING)
        inside = self.inside(part.parameter, start, stop)
        if len(inside) == 1:
            return [replace(part, piece=inside[0])]
        along = axis_along(part.view, shape, dim, stop - start)
        if along is None:
            raise Uncuttable(part.parameter)
        axis, steps = along
        ends = [(steps * (piece.start - start), steps * (piece.stop - start)) for piece in inside]
        return [between(part, axis, *places, piece) for places, piece in zip(ends, inside, strict=True)]


def between(part: Part, axis: int, start: int, stop: int, piece: Piece) -> Part:
    region, first = list(part.region), part.region[axis][0]
    region[axis] = first + start, first + stop
    g, o, i = region
    return replace(part, view=part.view.narrow(axis, start, stop - start), region=(g, o, i), piece=piece)
