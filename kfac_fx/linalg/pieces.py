"""Tensors by the names of the model's parameters, and by those of the registrations, which know some only in pieces.

This is where the two meet: users, gradients and optimizers have whole parameters, blocks have pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.words.pieces import Piece, ranges
from kfac_fx.passes.words.pieces import whole as without_data

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
