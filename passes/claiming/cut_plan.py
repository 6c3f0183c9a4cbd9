"""Where parameters are cut into pieces, found place by place."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..matrix import Shape
from ..words.pieces import Piece, axis_along, ranges
from .parts import NOTHING, Part


class Uncuttable(Exception):
    """A parameter cannot be cut as its uses need it; never leaves passes.cut."""


@dataclass
class Plan:
    """Where parameters are cut: along which dimension, at which places, their ends among them, in order."""

    shapes: Mapping[str, Shape]
    dims: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[int]] = field(default_factory=dict)

    def cut(self, parameter: str, dim: int, place: int) -> bool:
        """Returns whether there was need to. Raises Uncuttable."""
        known = self.places.setdefault(parameter, [0, self.shapes[parameter][dim]])
        if self.dims.setdefault(parameter, dim) != dim:
            raise Uncuttable(parameter)
        at = bisect_left(known, place)
        if at < len(known) and known[at] == place:
            return False
        known.insert(at, place)
        return True

    def cuts(self, parameter: str) -> bool:
        return len(self.places.get(parameter, ())) > 2

    def pieces(self, parameter: str) -> list[Piece]:
        """Empty for what is not cut."""
        return self.at(parameter, self.places[parameter]) if self.cuts(parameter) else []

    def at(self, parameter: str, places: Sequence[int]) -> list[Piece]:
        return [Piece(parameter, self.dims[parameter], *one) for one in pairwise(places)]

    def inside(self, parameter: str, start: int, stop: int) -> list[Piece]:
        """Of a parameter that is cut, the pieces that have no element outside."""
        places = self.places[parameter]
        return self.at(parameter, places[bisect_left(places, start) : bisect_right(places, stop)])

    def meeting(self, parameter: str, start: int, stop: int) -> list[Piece]:
        """Of a parameter that is cut, the pieces that have an element between."""
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
        ends = [(steps * (one.start - start), steps * (one.stop - start)) for one in inside]
        return [between(part, axis, *one, piece) for one, piece in zip(ends, inside, strict=True)]


def between(part: Part, axis: int, start: int, stop: int, piece: Piece) -> Part:
    region, first = list(part.region), part.region[axis][0]
    region[axis] = first + start, first + stop
    g, o, i = region
    return replace(part, view=part.view.narrow(axis, start, stop - start), region=(g, o, i), piece=piece)
