"""Tensors by name as one vector: an update is a handful of operations, however many layers there are.

Tensors by the names of the model's parameters, and by those of the registrations, which know some only in pieces.

This is where the two meet: users, gradients and optimizers have whole parameters, blocks have pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.pieces import Piece, ranges
from kfac_fx.passes.pieces import whole as without_data

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Flat:
    """Where tensors lie in a vector [P], one behind the other. shapes: theirs, by name."""

    shapes: Mapping[str, torch.Size]

    def joined(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """[P], in the widest of their precisions or that of `out`, where it then is. Others may be among them."""
        return torch.cat([tensors[name].reshape(-1) for name in self.shapes], out=out)

    def parts(self, vector: Tensor) -> Tensors:
        """The inverse: views of the vector."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}

    def spread(self, scalars: Mapping[str, Tensor]) -> Tensor:
        """A 0-dim tensor for each as what to multiply a vector with: [P], or 0-dim where it is one for all."""
        first, *others = (scalars[name] for name in self.shapes)
        if all(one is first for one in others):
            return first
        return torch.cat([scalars[name].expand(shape.numel()) for name, shape in self.shapes.items()])

    def add_to(self, tensors: Mapping[str, Tensor], vector: Tensor) -> None:
        """Add a vector to the tensors, in place and in their own precision."""
        parts = self.parts(vector)
        # torch documents its operations on lists under these names; on CUDA they are one kernel.
        torch._foreach_add_([tensors[name] for name in parts], list(parts.values()))


# --- pieces -----------------------------------------------------------------------------------------------------------


SLAB = re.compile(r"(?P<parameter>.+)\[(?P<before>(?::, ?)*)(?P<start>\d*):(?P<stop>\d*)\]")


def split(whole: Mapping[str, Tensor], registrations: Iterable[Registration], lead: int = 0) -> dict[str, Tensor]:
    """By every name of the registrations; pieces are views.

    lead: how many dimensions are in front of those of the parameters.
    """
    parts: dict[str, Tensor] = {}
    for one in registrations:
        pieces = {piece.name: piece for piece in one.pieces}
        for name in one.parameters:
            piece = pieces.get(name)
            parts[name] = whole[name] if piece is None else piece.of(whole[piece.parameter], lead)
    return parts


def joined(
    parts: Mapping[str, Tensor], registrations: Iterable[Registration], whole: Mapping[str, Tensor], lead: int = 0
) -> dict[str, Tensor]:
    """The inverse of `split`, in the order and the shapes of `whole`; zero where no piece is: nothing reads it."""
    pieces = [piece for one in registrations for piece in one.pieces]
    cut = {piece.parameter for piece in pieces}
    found = {name: torch.zeros_like(tensor) if name in cut else parts[name] for name, tensor in whole.items()}
    for piece in pieces:
        piece.of(found[piece.parameter], lead).copy_(parts[piece.name])
    return found


# --- as users name them ---------------------------------------------------------------------------------------------


def read_piece(text: str, aliases: Mapping[str, str], parameters: Mapping[str, Tensor]) -> Piece | None:
    """`"w[0:64]"`, `"table[:, 2:5]"`, an end left out as in Python; None if this is no piece of a parameter.

    Raises RegistrationError for elements that the parameter has not.
    """
    found = SLAB.fullmatch(text)
    if found is None or found["parameter"] not in aliases:
        return None
    name, dim = aliases[found["parameter"]], found["before"].count(",")
    shape = tuple(parameters[name].shape)
    size = shape[dim] if dim < len(shape) else 0
    start, stop = int(found["start"] or 0), int(found["stop"] or size)
    if not start < stop <= size:
        raise RegistrationError(f"{text!r}: {name} has shape {list(shape)}")
    return Piece(name, dim, start, stop)


def piece_of_view(view: Tensor, parameters: Mapping[str, Tensor]) -> Piece | None:
    """What `w[0:64]` shows of the parameter w; None if it shows none, or no slab of it."""
    for name, parameter in parameters.items():
        memory = parameter.untyped_storage().data_ptr()
        if memory and memory == view.untyped_storage().data_ptr():
            shape, offset = tuple(parameter.shape), int(view.storage_offset() - parameter.storage_offset())
            if offset >= 0 and parameter.is_contiguous():
                seen = without_data(shape).as_strided(view.shape, view.stride(), offset)
                return next((Piece(name, dim, *ends) for dim, ends in ranges(seen, shape).items()), None)
    return None


def overlap(first: Piece, second: Piece) -> bool:
    """Whether two pieces of one parameter, cut along one dimension or not, have elements in common."""
    apart = first.dim == second.dim and (first.stop <= second.start or second.stop <= first.start)
    return first.parameter == second.parameter and not apart
